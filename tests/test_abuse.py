"""Two thousand seeded cases that nobody would write by hand: trees of any shape, budgets, stop ids, caps, drafters, the gate.

Whatever is drafted, the text must be the library's greedy text, cut at the first stop id or at the cap. Below that: bad input of other
kinds, each with an error that names it.
"""

import functools
import math
import random
import struct
import zlib

import pytest
import torch
import transformers
from conftest import build_head, build_tiny, library_greedy, prompt_inputs, widen

import verify
from glance import CandidateTree, Spine, Target, decode, generate, grow_tree

WORDS, LONGEST = 11, 20
BLOCKS, BLOCK = 21, 100  # 2,100 cases


@functools.cache
def small_target():
    """The smallest target that is not trivial: two layers, eleven words, margins as wide as its random weights make them."""
    config = transformers.LlamaConfig(vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=False)  # fmt: skip
    torch.manual_seed(0)
    model = widen(transformers.LlamaForCausalLM(config).eval(), seed=5)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, eos_token_id=None)
    return Target(model)


@functools.cache
def reference(number):
    """Prompt `number` (1 to 12 random words) and the library's greedy answer to it."""
    rng = random.Random(number)
    ids = torch.tensor([[rng.randrange(WORDS) for _ in range(rng.randint(1, 12))]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return inputs, library_greedy(small_target(), inputs, LONGEST)


class Mischief:
    """Drafts in one of six manners, or in another one each round ("moody")."""

    taps = []
    MANNERS = ["nothing", "thicket", "truth_in_a_thicket", "marginals", "oracle", "liar"]

    def __init__(self, rng, manner, start, answer):
        self.rng, self.manner, self.start, self.answer = rng, manner, start, answer

    def propose(self, context):
        self.budget, self.branch = context.budget, context.branch
        manner = self.rng.choice(self.MANNERS) if self.manner == "moody" else self.manner
        return getattr(self, manner)(CandidateTree.empty(context.root), self.answer[len(context.tokens) - self.start :])

    def nothing(self, tree, ahead):
        return tree

    def thicket(self, tree, ahead):
        """Any shape, any words; a child may stand twice under one parent."""
        for _ in range(self.rng.randrange(25)):
            tree.add(self.rng.randrange(len(tree) + 1), self.rng.randrange(WORDS), -1.0)
        return tree

    def truth_in_a_thicket(self, tree, ahead):
        """The right path, its nodes scattered among wrong ones."""
        node = 0
        for token in ahead[: self.rng.randrange(12)]:
            tree = self.thicket(tree, ahead) if self.rng.random() < 0.3 else tree
            node = tree.add(node, token, -1.0)
        return tree

    def oracle(self, tree, ahead):
        """Right, and on past the end of the answer."""
        for token in ahead + [0, 1, 2]:
            tree.add(len(tree), token, 0.0)
        return tree

    def liar(self, tree, ahead):
        for token in ahead[:7]:
            tree.add(len(tree), (token + 1) % WORDS, 0.0)
        return tree

    def marginals(self, tree, ahead):
        """Noisy, leaning towards the truth; with ties, words of probability zero, rows without any word, NaN."""
        log_q = torch.tensor([[self.rng.gauss(0, 1) for _ in range(WORDS)] for _ in range(self.rng.randrange(8))]).reshape(-1, WORDS)
        for row, token in zip(log_q, ahead):
            row[token] += 3
        damage = self.rng.choice(["none", "ties", "zeros", "empty row", "nan"])
        if damage == "ties":
            log_q = log_q.round()
        log_q = log_q.log_softmax(dim=-1)
        if len(log_q) and damage in ("empty row", "nan"):
            log_q[self.rng.randrange(len(log_q))] = -math.inf if damage == "empty row" else math.nan
        if damage == "zeros":
            log_q[log_q < -2.5] = -math.inf
        return grow_tree(log_q, tree.tokens[0], self.budget, self.branch)


def heads():
    return [build_head(small_target(), seed=i, block=block, mask_token_id=10, target_layer_ids=[0, 1]) for i, block in enumerate((1, 2, 8))]


def random_case(seed, drafters):
    """(what to run, what must come out)."""
    rng = random.Random(seed)
    inputs, answer = reference(rng.randrange(40))
    cap, stops = rng.randint(1, LONGEST), rng.sample(range(WORDS), rng.choice([0, 0, 1, 2, 3]))
    end = next((i for i, token in enumerate(answer[:cap]) if token in stops), cap - 1)
    manner = rng.choice([*Mischief.MANNERS, "moody", "moody", "head", "spine"])
    drafter = rng.choice(drafters) if manner in ("head", "spine") else Mischief(rng, manner, inputs["input_ids"].shape[1], answer)
    options = dict(max_new_tokens=cap, end_ids=stops, budget=rng.choice([0, 1, 2, 5, 15, 40, 1000]), branch=rng.randint(1, 15),
                   tie_margin=rng.choice([None, None, 0.0, 0.3, math.inf]))  # fmt: skip
    return inputs, Spine(drafter) if manner == "spine" else drafter, options, answer[: end + 1]


@pytest.mark.parametrize("block", range(BLOCKS))
def test_nothing_that_is_drafted_changes_the_text(block):
    """A hundred random cases; the records add up as well."""
    drafters = heads()
    for seed in range(BLOCK * block, BLOCK * (block + 1)):
        inputs, drafter, options, expected = random_case(seed, drafters)
        done = generate(small_target(), drafter, inputs, **options)
        assert done.tokens == expected, f"seed {seed}: {type(drafter).__name__} {getattr(drafter, 'manner', '')} {options}"
        later = done.rounds[1:]
        assert all(r.accepted <= r.cap for r in later), f"seed {seed}: more accepted than possible"
        assert all(len(r.tokens) == len(r.margins) == r.accepted + 1 for r in later[:-1]), f"seed {seed}"


def test_the_cases_are_worth_their_time():
    """The answers are no single word repeated, and drafts are both accepted and rejected."""
    answers = [reference(number)[1] for number in range(40)]
    assert sum(len(set(answer)) >= 4 for answer in answers) >= 30
    rounds = []
    for seed in range(60):
        inputs, drafter, options, _ = random_case(seed, heads())
        rounds += generate(small_target(), drafter, inputs, **options).rounds[1:]
    assert sum(r.accepted > 0 for r in rounds) > 40 and sum(len(r.tree) > r.accepted for r in rounds) > 40
    assert sum(r.passes > 1 for r in rounds) > 20


# ---- options and input ----


@pytest.mark.parametrize("options", [dict(max_new_tokens=0), dict(budget=-1), dict(tie_margin=-0.1), dict(tie_margin=0.1, temperature=1.0), dict(top_k=3)], ids=str)
def test_wrong_options_raise_at_the_call(options):
    """decode is an iterator, but a wrong option need not wait for the first round."""
    inputs, _ = reference(0)
    with pytest.raises(ValueError):
        decode(small_target(), None, inputs, generator=torch.Generator(), **options)


def test_a_head_of_another_target_is_refused_by_decode():
    """With both numbers, before any work, though nobody called check."""
    head = build_head(small_target(), mask_token_id=10, vocab_size=12, target_layer_ids=[0, 1])
    for drafter in (head, Spine(head)):
        with pytest.raises(ValueError, match="vocabulary 12.*11"):
            decode(small_target(), drafter, reference(0)[0])


def test_one_end_id_need_not_be_a_list():
    """end_ids=5 means [5]."""
    inputs, answer = next(reference(n) for n in range(40) if reference(n)[1][4] not in reference(n)[1][:4])
    assert generate(small_target(), None, inputs, max_new_tokens=LONGEST, end_ids=answer[4]).tokens == answer[:5]


def test_an_empty_answer_cannot_be_read():
    with pytest.raises(ValueError, match="empty"):
        small_target().teacher_force(reference(0)[0], [])


def test_tau_of_no_round_is_no_number():
    """The prefill's token alone: nothing was decoded, so there is no tau."""
    assert math.isnan(generate(small_target(), None, reference(0)[0], max_new_tokens=1).tau)


def test_too_few_layer_types_are_named():
    with pytest.raises(ValueError, match="2 layers but 1 layer_types"):
        build_head(small_target(), layer_types=["full_attention"])


@pytest.mark.parametrize("row", [[0.0] * 152_000, [0.0] + [-math.inf] * 151_999], ids=["all equal", "one possible"])
def test_a_flat_row_costs_no_more_than_another(row):
    """152,000 words as likely, or all but one impossible: the words beyond `branch` are cut before any Python loop sees them."""
    log_q, seen = torch.tensor(row).log_softmax(dim=-1).repeat(3, 1), []
    tree = grow_tree(log_q, 0, budget=15, branch=4)
    assert len(tree) == (15 if row[1] == 0 else 3) and tree.tokens[1] == 0
    watched = torch.Tensor.tolist
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", lambda self: seen.append(self.numel()) or watched(self))
        assert grow_tree(log_q, 0, budget=15, branch=4) == tree
    assert max(seen) <= 3 * 4


def test_rows_without_a_possible_word_end_the_tree():
    """Offset 2 has no word at all: one level of nodes, whatever the budget."""
    log_q = torch.full((3, 4), 0.25).log()
    log_q[1] = -math.inf
    assert grow_tree(log_q, 0, budget=31).depths == [0, 1, 1, 1, 1]


@pytest.mark.parametrize("budget", [0, 1, 3, 7, 31])
def test_cap_knows_the_budget(budget):
    """Three nodes reach three deep at most, whatever the head's block."""
    target = build_tiny()
    generation, left = generate(target, build_head(target, block=8), prompt_inputs(3), max_new_tokens=12, budget=budget), 11
    for r in generation.rounds[1:]:
        assert r.cap == min(7, budget, left)
        left -= len(r.tokens)


def test_an_enormous_image_is_named(tmp_path):
    """A file of a hundred bytes that claims 60,000 x 60,000 pixels: refused with file and line, before they are unpacked."""
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))  # noqa: E731
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    (tmp_path / "vast.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b""))
    (tmp_path / "mine.jsonl").write_text('{"image": "vast.png", "prompt": "?"}\n')
    with pytest.raises(verify.BadInput, match="mine.jsonl, line 1: image .*vast.png cannot be read.*Bomb"):
        verify.load_samples(verify.Config(data=str(tmp_path)))


def test_fp32_means_fp32():
    """TF32 would blur float32 on a GPU by 1e-3: the audit switches it off before anything is loaded."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    with pytest.raises(verify.BadInput):
        verify.prepare(verify.Config(target="no/such/target"))
    assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32
