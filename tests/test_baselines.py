"""Section 8, baselines: n-gram lookup, the EAGLE-3 head (drafting, tree, training) and the budget chosen round by round."""

import functools
import json
import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from conftest import ROOT, Guesser, Oracle, build_head, make_context, path_to, prompt_inputs
from test_decode import LENGTH, case

import glance
import train
from glance import (AutoBudget, BlockDraftHead, CandidateTree, Clock, Context, Eagle3Head, EagleChain, EagleTree, NGram, Round, Target,
                    best_nodes, decode, generate, grow_tree)  # fmt: skip


def build_eagle(target, seed=0, depth=8, **changes):
    torch.manual_seed(seed)
    config = replace(build_head(target).config, num_hidden_layers=1, target_layer_ids=[0, 1, 2], block_size=depth + 1, **changes)
    head = Eagle3Head(config).eval()
    for weight in head.parameters():  # far from degenerate: each part of the input must matter
        if weight.dim() > 1:
            weight.data = torch.randn(weight.shape) * 1.6 / weight.shape[-1] ** 0.5
    return head


@torch.no_grad()
def law_after(head, target, features, tokens, drafted):
    """log q [V] of the token after tokens (ending in r) and drafted: the definition, from scratch, nothing cached, one causal pass
    over all pairs for each drafted token. features [T, taps * D] of all tokens but r."""
    layer, ids, states = head.layers[0], torch.tensor(list(tokens[1:]) + list(drafted)), head.fc(features)
    for size in range(len(features), len(ids) + 1):
        pairs = torch.cat([layer.input_layernorm(target.embed(ids[:size])), head.hidden_norm(states)], dim=-1)[None]
        rope = glance.rotary(torch.arange(size)[None], head.config.head_dim, head.config.rope_theta)
        nothing = tuple(torch.empty(1, head.config.num_key_value_heads, 0, head.config.head_dim) for _ in range(2))
        out = states[None] + layer.self_attn(pairs, nothing, *rope, torch.ones(size, size).tril().bool())
        out = (out + layer.mlp(layer.post_attention_layernorm(out)))[0, -1:]
        states = torch.cat([states, out])
    return head.marginals(head.norm(out[0]), target)


def words_to(tree, node):
    return tuple(tree.tokens[i] for i in path_to(tree, node))


# ---- n-gram ----


@pytest.mark.parametrize("text, drafted", [
    ([1, 2, 3, 9, 1, 2], [3, 9, 1, 2]),  # "1 2" was followed by this
    ([1, 2, 3, 7, 2, 4, 5, 1, 2], [3, 7, 2, 4, 5, 1, 2]),  # the longer suffix wins, though "2" alone occurred later
    ([2, 3, 8, 2, 4, 8, 2], [4, 8, 2]),  # of two equal ones the latest
    ([5, 5, 5], [5]),
    ([1, 2, 3], []), ([1], []), ([4, 1, 2, 3, 4], [1, 2, 3, 4]),
])  # fmt: skip
def test_ngram_by_hand(text, drafted):
    tree = NGram().propose(make_context(None, text, None))
    assert tree.tokens == [text[-1], *drafted] and tree.parents == list(range(-1, len(drafted)))


def test_ngram_keeps_to_suffix_depth_budget_and_what_is_left():
    text = [1, 2, 3, 4, 5, 6, 9, 3, 4, 5, 7, 1, 2, 3, 4, 5]
    assert NGram().propose(make_context(None, text, None)).tokens[1] == 6  # four of the five tokens match, 2 3 4 5
    assert NGram(longest=3).propose(make_context(None, text, None)).tokens[1] == 7  # three match, and the latest place counts
    assert len(NGram(depth=2).propose(make_context(None, text, None))) == 2
    assert len(NGram().propose(make_context(None, text, None, left=3))) == 3
    assert len(NGram().propose(replace(make_context(None, text, None), budget=1))) == 1


# ---- EAGLE-3: drafting ----


class Beside(Oracle):
    """Commits what the oracle says; after each round compares the head's cached draft with the definition."""

    def __init__(self, head, width, *oracle):
        super().__init__(*oracle)
        self.head, self.taps, self.width, self.features, self.compared, self.steps = head, head.taps, width, None, 0, []

    def propose(self, context):
        self.steps.append(len(context.fresh))
        self.features = context.fresh if self.features is None else torch.cat([self.features, context.fresh])
        tree = self.head.draft(context, 3, self.width)
        assert context.memory["length"] == len(context.tokens) - 1 == context.memory["past"][0].shape[2]  # nothing drafted stays
        for node in range(1, len(tree) + 1):
            *before, last = words_to(tree, node)
            log_q = law_after(self.head, context.target, self.features, context.tokens, before)
            assert tree.log_probs[node] - tree.log_probs[tree.parents[node]] == pytest.approx(float(log_q[last]), abs=1e-4)
            self.compared += 1
            assert self.width > 1 or last == int(log_q.argmax())
        return super().propose(context)


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("images", [0, 1])
def test_cached_steps_equal_uncached_ones(width, images):
    """Several tokens are committed in each round; what is drafted next is what a computation from scratch gives."""
    target, inputs, answer = case(1, images)
    drafter = Beside(build_eagle(target), width, inputs, answer)
    generation = generate(target, drafter, inputs, max_new_tokens=LENGTH, budget=6)
    assert generation.tokens == answer[:LENGTH] and max(drafter.steps[1:]) == 5 and drafter.compared >= 3 * len(generation.rounds[1:-1])


class FewWords(Eagle3Head):
    """Five words are possible, so that every prefix can be listed."""

    WORDS = [3, 11, 20, 42, 57]

    def marginals(self, hidden, target):
        mask = torch.full((self.config.vocab_size,), -math.inf)
        mask[self.WORDS] = 0.0
        return (target.lm_head(hidden).float() * 0.3 + mask).log_softmax(dim=-1)


def few_words(target):
    head = build_eagle(target)
    head.__class__ = FewWords
    inputs = prompt_inputs(4, grids=())
    _, logits, features = target.prefill(inputs, head.taps)
    return head, features, inputs["input_ids"][0].tolist() + [int(logits.argmax())]


def test_a_wide_eagle_tree_is_the_best_of_all_prefixes(tiny_target):
    """Beam as wide as a level: of all 155 prefixes of up to three words the N most probable, best first, a tree."""
    head, features, tokens = few_words(tiny_target)
    every = {}
    for depth in range(3):
        for before in product(FewWords.WORDS, repeat=depth):
            log_q = law_after(head, tiny_target, features, tokens, before)
            every |= {(*before, word): every.get(before, 0.0) + float(log_q[word]) for word in FewWords.WORDS}
    best = sorted(every, key=every.get, reverse=True)
    for budget in (1, 10, 40, 200):
        tree = head.draft(replace(make_context(tiny_target, tokens, features), budget=budget), 3, 25)
        depth = min(budget, 3)
        expected = [path for path in best if len(path) <= depth][:budget]
        assert [words_to(tree, i) for i in range(1, len(tree) + 1)] == expected
        assert tree.log_probs[1:] == pytest.approx([every[path] for path in expected], abs=1e-4)


def test_a_narrow_eagle_tree_expands_the_best_of_each_level(tiny_target):
    """Beam of two, by the definition: only the two best nodes of a level get children, two each."""
    head, features, tokens = few_words(tiny_target)
    level, seen = {(): 0.0}, {}
    for _ in range(3):
        found = {}
        for before, score in level.items():
            best = law_after(head, tiny_target, features, tokens, before).topk(2)
            found |= {(*before, word): score + value for word, value in zip(best.indices.tolist(), best.values.tolist())}
        level = dict(sorted(found.items(), key=lambda item: -item[1])[:2])
        seen |= found
    tree = head.draft(make_context(tiny_target, tokens, features), 3, 2)
    assert {words_to(tree, i) for i in range(1, len(tree) + 1)} == set(seen) and len(tree) == 10
    assert sorted(tree.log_probs[1:]) == pytest.approx(sorted(seen.values()), abs=1e-4)


def test_best_nodes_keep_equals_in_order_and_drop_the_impossible():
    """Certain children tie with their parents and must stay behind them; a word of probability 0 is never drafted."""
    seen = CandidateTree([9, 1, 2, 3, 4], [-1, 0, 0, 2, 3], [0, 1, 1, 2, 3], [0.0, -math.inf, -1.0, -1.0, -1.0])
    tree = best_nodes(seen, 9)
    assert (tree.tokens, tree.parents, tree.depths) == ([9, 2, 3, 4], [-1, 0, 1, 2], [0, 1, 2, 3])
    assert best_nodes(seen, 2).tokens == [9, 2, 3] and len(best_nodes(seen, 0)) == 0


def test_a_broken_eagle_head_drafts_nothing(tiny_target):
    head = build_eagle(tiny_target)
    torch.nn.init.constant_(head.fc.weight, math.nan)
    inputs = prompt_inputs(3, grids=())
    assert all(len(r.tree) == 0 for r in generate(tiny_target, EagleTree(head), inputs, max_new_tokens=4).rounds)


def test_an_eagle_pass_is_paid_for_each_level(tiny_target):
    """k tokens of a chain cost k passes, a tree of depth k no more: and none beyond the budget or what is left."""
    head, inputs = build_eagle(tiny_target), prompt_inputs(3, grids=())
    _, logits, features = tiny_target.prefill(inputs, head.taps)
    tokens, calls = inputs["input_ids"][0].tolist() + [int(logits.argmax())], []
    head.register_forward_hook(lambda *_: calls.append(1))
    for drafter, budget, left, passes in ((EagleChain(head, 3), 31, 99, 3), (EagleChain(head, 8), 31, 99, 8), (EagleTree(head), 31, 99, 8),
                                          (EagleTree(head), 5, 99, 5), (EagleTree(head), 31, 2, 2), (EagleTree(head), 0, 99, 0)):  # fmt: skip
        calls.clear()
        tree = drafter.propose(replace(make_context(tiny_target, tokens, features, left), budget=budget))
        assert len(calls) == passes and len(tree) == (min(passes, budget) if isinstance(drafter, EagleChain) else min(budget, len(tree)))
        assert max(tree.depths) <= passes and (isinstance(drafter, EagleChain) or budget > 30 or len(tree) == budget)


# ---- EAGLE-3: training ----


def test_the_unrolled_loss_is_that_of_sequential_drafting(tiny_target):
    """Soft cross-entropy of every chain and step, by the definition: each chain drafted alone from its own context."""
    head, generator = build_eagle(tiny_target, depth=3), torch.Generator().manual_seed(0)
    total, first = 12, 6
    features = torch.randn(total, 3 * 32, generator=generator)
    tokens = torch.randint(0, 58, (total,), generator=generator).tolist()
    laws = torch.randn(total - first, 64, generator=generator).mul(2).softmax(dim=-1)
    loss, run = train.eagle_loss(head, tiny_target, features, tokens, laws)
    weights, terms, runs = train.offset_weights(4).tolist(), [], []
    for r in range(first, total - 1):  # position of the committed token
        right = []
        for j in range(min(3, total - 1 - r)):
            log_q = law_after(head, tiny_target, features[:r], tokens[: r + 1], tokens[r + 1 : r + 1 + j])
            terms.append((weights[j], -float((laws[r + 1 + j - first] * log_q).sum())))
            right.append(int(log_q.argmax()) == tokens[r + 1 + j])
        runs.append((right + [False]).index(False))
    assert len(terms) == 3 + 3 + 3 + 2 + 1 and run.tolist() == runs
    assert loss.item() == pytest.approx(sum(w * nats for w, nats in terms) / sum(w for w, _ in terms), abs=1e-4)


@functools.cache
def taught():
    """A target, a prompt, its answer and an EAGLE-3 head that learnt this answer by heart."""
    target, inputs, answer = case(1, 1)
    target.model.requires_grad_(False)
    head = build_eagle(target, depth=4)
    with torch.no_grad():
        logits, features = (t.clone() for t in target.teacher_force(inputs, answer, head.taps))
    tokens, optimiser = inputs["input_ids"][0].tolist() + answer, torch.optim.AdamW(head.parameters(), lr=5e-3)
    for _ in range(80):
        loss, run = train.eagle_loss(head, target, features, tokens, (logits * 4).softmax(dim=-1))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return target, inputs, answer, head, run.float().mean()


def test_what_is_learnt_is_what_is_drafted():
    """Training says how many drafts of each chain hold; decoding the same answer finds as many."""
    target, inputs, answer, head, kept = taught()
    generation = generate(target, EagleChain(head, 4), inputs, max_new_tokens=LENGTH)
    assert kept > 2.5 and generation.tokens == answer[:LENGTH] and generation.tau > 3
    assert max(r.accepted for r in generation.rounds) == 4 and all(r.cap <= 4 for r in generation.rounds)


def test_eagle_trains_by_the_common_loop_and_comes_back(tmp_path):
    """`python train.py eagle`, two steps: a folder that loads and fits the target; the other head's class refuses it by name."""
    rows = [{"image": "0.png", "prompt": "Read the chart."}]
    train.make_page("chart", 20).image.save(tmp_path / "0.png")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shipped = ROOT / "checkpoints" / "target"
    options = {"--target": shipped, "--data": tmp_path / "rows.jsonl", "--corpus": tmp_path / "answers.jsonl", "--eagle": tmp_path / "eagle",
               "--head-steps": 2, "--rows-per-step": 1, "--unroll": 2, "--max-new-tokens": 6}  # fmt: skip
    assert train.main(["eagle", *(str(x) for pair in options.items() for x in pair)]) == 0
    head = Eagle3Head.from_pretrained(tmp_path / "eagle", torch.float32, "cpu")
    head.check(Target.load(shipped))
    assert head.config.block_size == 3 and not (tmp_path / "eagle" / "training.safetensors").exists()
    head.save_pretrained(tmp_path / "again")
    again = Eagle3Head.from_pretrained(tmp_path / "again")
    assert again.config == head.config
    assert all(torch.equal(a, b) for a, b in zip(head.state_dict().values(), again.state_dict().values(), strict=True))
    with pytest.raises(ValueError, match="Eagle3DraftHead.*DFlashDraftModel"):
        BlockDraftHead.from_pretrained(tmp_path / "eagle")
    with pytest.raises(ValueError, match="DFlashDraftModel.*Eagle3DraftHead"):
        Eagle3Head.from_pretrained(ROOT / "checkpoints" / "head")


def test_rows_by_task_and_pages_removed():
    """--tasks keeps those rows only; --blank asks the same question of a white page."""
    rows = [{"task": "caption", "ids": [1, 2]}, {"task": "chart", "ids": [1, 2]}, {"task": "caption", "ids": [1]}, {"ids": [3, 4]}]
    assert train.pick_rows(rows, "") == [rows[0], rows[1], rows[3]] and train.pick_rows(rows, "caption,document") == [rows[0]]
    with pytest.raises(ValueError, match="task poem"):
        train.pick_rows(rows, "poem")
    target = Target.load(ROOT / "checkpoints" / "target")
    page, other, blank, white = (train.row_inputs(target, {"task": task, "seed": seed}, removed)
                                 for task, seed, removed in (("chart", 1, False), ("chart", 2, False), ("chart", 1, True), ("chart", 1, True)))  # fmt: skip
    assert torch.equal(page["input_ids"], blank["input_ids"]) and not torch.equal(page["pixel_values"], blank["pixel_values"])
    assert len(blank["pixel_values"].unique()) == 1 and len(other["pixel_values"].unique()) > 1


# ---- losslessness ----

DRAFTERS = {
    "ngram": lambda target, inputs, answer: NGram(),
    "ngram of one": lambda target, inputs, answer: NGram(longest=1, depth=3),
    "eagle3": lambda target, inputs, answer: EagleChain(build_eagle(target), 3),
    "eagle8": lambda target, inputs, answer: EagleChain(build_eagle(target), 8),
    "eagletree": lambda target, inputs, answer: EagleTree(build_eagle(target)),
    "auto of a head": lambda target, inputs, answer: AutoBudget(build_head(target, seed=1)),
    "auto of a tree": lambda target, inputs, answer: AutoBudget(EagleTree(build_eagle(target)), grid=(2, 5)),
    "auto of n-grams": lambda target, inputs, answer: AutoBudget(NGram()),
    "auto of a guesser": lambda target, inputs, answer: AutoBudget(Guesser(inputs, answer), trials=1),
}


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("images", range(3))
def test_lossless(name, images):
    """Random targets: the text is the library's greedy text, token for token."""
    for seed in range(2):
        target, inputs, answer = case(seed, images)
        assert generate(target, DRAFTERS[name](target, inputs, answer), inputs, max_new_tokens=LENGTH).tokens == answer[:LENGTH], f"seed {seed}"


def test_lossless_where_drafts_are_taken():
    """The same for a tree of a head whose drafts are mostly right, alone and with its budget chosen, also when sampling."""
    target, inputs, answer, head, _ = taught()
    for drafter in (EagleTree(head, 4), AutoBudget(EagleTree(head, 4), trials=1)):
        generation = generate(target, drafter, inputs, max_new_tokens=LENGTH, budget=31)
        assert generation.tokens == answer[:LENGTH] and generation.tau > 2
    texts = {tuple(generate(target, drafter, inputs, max_new_tokens=LENGTH, temperature=1.0, generator=torch.Generator().manual_seed(5)).tokens)
             for drafter in (None, EagleTree(head, 4), NGram(), AutoBudget(EagleTree(head, 4)))}  # fmt: skip
    assert len(texts) == 1


# ---- the budget, chosen ----


def told(grid, draft, verify, trials=3):
    auto = AutoBudget(Oracle({"input_ids": torch.zeros(1, 0)}, []), grid, trials)
    auto.draft.extend([draft] * trials)
    for n, seconds in verify.items():
        auto.verify[n].extend([seconds] * trials)
    return auto


def fan(*probabilities):
    """A tree of leaves with these probabilities."""
    n = len(probabilities)
    return CandidateTree(list(range(n + 1)), [-1] + [0] * n, [0] + [1] * n, [0.0] + [math.log(q) for q in probabilities])


def test_the_choice_by_hand():
    """Three nodes of probability 0.9, 0.5, 0.4 and a draft of 1 s: S(1) = 0.9, S(3) = 1.8."""
    tree = fan(0.9, 0.5, 0.4)
    assert told((1, 3), 1.0, {1: 1.0, 3: 1.2}).choose(tree) == 3  # 1.9 / 2.0 < 2.8 / 2.2
    assert told((1, 3), 1.0, {1: 1.0, 3: 2.0}).choose(tree) == 1  # 0.95 > 2.8 / 3.0
    doubtful = told((1, 3), 1.0, {1: 1.0, 3: 1.2})
    doubtful.expected, doubtful.accepted = {1: 90.0, 3: 90.0}, {1: 90.0, 3: 0.0}
    assert doubtful.choose(tree) == 1  # pooled 0.5: nodes 2 and 3 keep 5 of 100: (1 + 0.855) / 2.0 > (1 + 0.855 + 0.045) / 2.2
    assert told((1, 3), 1.0, {1: 1.0, 3: 1.2}).choose(fan(0.9, 0.5)) == 1  # there are no three nodes
    assert told((2, 3), 1.0, {2: 1.0, 3: 1.2}).choose(fan(0.9)) == 1 and told((2,), 1.0, {}).choose(fan()) == 0
    assert AutoBudget(NGram(), (1, 3)).choose(tree) == 1  # nothing measured yet: try each in turn


def test_every_25th_round_looks_one_step_further():
    """A budget that did badly once would else never be tried again."""
    tree = fan(0.9, 0.5, 0.4)
    auto = told((1, 3), 1.0, {1: 1.0, 3: 2.0})
    for round_number in range(50):
        n = auto.choose(tree)
        auto.chosen[n] += 1
        assert n == (3 if round_number % 25 == 24 else 1)


def test_an_unlucky_trial_does_not_rule_a_budget_out():
    """Four budgets on a line of 1 + 0.1 N but for the trials of N = 7, thrice as slow: the best by the line is still chosen."""
    tree = fan(*[0.9] * 7, *[0.01] * 8)
    auto = told((1, 3, 7, 15), 1.0, {1: 1.1, 3: 1.3, 7: 5.1, 15: 2.5})
    assert auto.choose(tree) == 7


def test_nothing_below_an_end_token_counts():
    """Seven sure nodes in a row, the third an end: what is worth verifying is three."""
    chain = CandidateTree([0, 1, 2, 9, 4, 5, 6, 7], list(range(-1, 7)), list(range(8)), [0.0] * 8)
    auto = told((1, 3, 7), 1.0, {1: 1.0, 3: 1.0, 7: 1.1})
    assert auto.choose(chain) == 7
    auto.ends = frozenset({9})
    assert auto.choose(chain) == 3 and auto.gains(chain) == {1: 1.0, 3: 2.0, 7: 0.0}


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_what_auto_accepts_is_within_its_cap(budget):
    """Its N is its own, whatever the call's budget: the cap of a round follows the tree that it took."""
    target, inputs, answer, head, _ = taught()
    generation = generate(target, AutoBudget(EagleTree(head, 4), grid=(1, 3, 5), trials=1), inputs, max_new_tokens=LENGTH, budget=budget)
    assert all(r.accepted <= r.cap <= len(r.tree) for r in generation.rounds[1:]) and any(r.accepted for r in generation.rounds)


def test_auto_refuses_what_it_could_not_use(tiny_target):
    """A budget of 0 could never be left again; a head inside it is checked like any other."""
    with pytest.raises(ValueError, match="at least 1"):
        AutoBudget(NGram(), grid=(0, 3))
    with pytest.raises(ValueError, match="vocabulary 100"):
        decode(tiny_target, AutoBudget(build_head(tiny_target, vocab_size=100)), prompt_inputs(0))


def test_a_bare_eagle_head_drafts_its_trained_depth():
    """And it has one layer: a second would be ignored."""
    target, inputs, answer, head, _ = taught()
    assert generate(target, head, inputs, max_new_tokens=LENGTH).tokens == answer[:LENGTH]
    with pytest.raises(ValueError, match="one layer, the config says 2"):
        Eagle3Head(replace(head.config, num_hidden_layers=2))


def test_a_round_teaches_every_smaller_budget():
    """Five nodes verified, 1 and 4 accepted: one is the best node, none stands second or third, one fourth or fifth."""
    auto = AutoBudget(NGram(), (1, 3, 5, 9))
    tree = CandidateTree([0] * 6, [-1, 0, 0, 1, 1, 2], [0, 1, 1, 2, 2, 2], [0.0] + [math.log(q) for q in (0.5, 0.25, 0.125, 0.125, 0.125)])
    auto.learn(Round([0] * 3, tree, [1, 4], 0.0, [], None, {"draft": 1.0, "tree": 2.0, "verify": 5.0, "commit": 4.0}))
    assert list(auto.draft) == [7.0] and {n: list(v) for n, v in auto.verify.items()} == {1: [], 3: [], 5: [5.0], 9: []}
    counted = {1: (1.98, 1.48), 3: (0.98, 1.355), 5: (1.98, 1.23), 9: (1.0, 1.0)}  # 0.98 of the 1 that each begins with, and the round
    pooled = 10 * (1.98 + 0.98 + 1.98 + 1.0) / (1.48 + 1.355 + 1.23 + 1.0)
    assert auto.calibration == pytest.approx({n: (accepted + pooled) / (expected + 10) for n, (accepted, expected) in counted.items()})


class Boastful:
    """Says 0.9 an offset where the truth is 0.6."""

    taps = []

    def propose(self, context):
        return grow_tree(torch.tensor([[0.9, 0.1]] * 8).log(), context.root, context.budget)


@pytest.mark.parametrize("slope", [0.01, 0.3])
def test_it_finds_the_best_budget_of_a_known_world(slope):
    """A pass costs 1 + slope N and a chain survives 0.6 a step: after some hundred rounds the budget chosen is the best there is."""
    generator, context = torch.Generator().manual_seed(0), Context(None, [0], None, 15, 8, 99, Clock("cpu"))
    auto, truth = AutoBudget(Boastful(), grid := (1, 2, 4, 8)), {n: sum(0.6**k for k in range(1, n + 1)) for n in (1, 2, 4, 8)}
    for step in range(400):
        tree = auto.propose(context)
        assert len(tree) in grid and tree.tokens == [0] * (len(tree) + 1)  # best first: the chain of likelier words
        run = next((k for k in range(len(tree)) if torch.rand(1, generator=generator) > 0.6), len(tree))
        seconds = {"draft": 0.5, "tree": 0.0, "verify": 1 + slope * len(tree) + (5.0 if step % 7 == 0 else 0), "commit": 0.0}  # hiccups
        context.last = Round([0] * (run + 1), tree, list(range(1, run + 1)), 0.0, [], None, seconds)
    best = max(truth, key=lambda n: (1 + truth[n]) / (1.5 + slope * n))
    chosen = {n: count - 3 for n, count in auto.chosen.items()}  # without the trials
    assert max(chosen, key=chosen.get) == best == {0.01: 8, 0.3: 2}[slope]
    told, true = ({n: sum(q**k for k in range(m + 1, n + 1)) for m, n in zip((0, *grid), grid)} for q in (0.9, 0.6))
    assert all(auto.calibration[n] == pytest.approx(true[n] / told[n], abs=0.1) for n in grid if n <= best)
