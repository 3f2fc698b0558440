"""Section 6, decode: whatever the drafter, the text is the target's own; stopping, length and what a Round records."""

import functools
import math
import time

import pytest
import torch

import glance
from conftest import MASK, VOCAB, Guesser, Oracle, build_head, build_tiny, library_forward, library_greedy, lively, prompt_inputs
from glance import CandidateTree, Spine, Target, decode, generate

IMAGES = [(), ((2, 4),), ((2, 4), (4, 6))]
LENGTH = 20


@functools.cache
def case(seed, images):
    """A random target, a prompt with that many images and the library's greedy answer to it, some tokens past LENGTH."""
    target = build_tiny(seed, tied=seed % 2 == 0)
    return target, *lively(target, seed, IMAGES[images], LENGTH + 16)


def nan_head(target):
    head = build_head(target)
    torch.nn.init.constant_(head.fc.weight, math.nan)
    return head


DRAFTERS = {
    "none": lambda target, inputs, answer: None,
    "random head": lambda target, inputs, answer: build_head(target, seed=1),
    "spine": lambda target, inputs, answer: Spine(build_head(target, seed=1)),
    "head with block size 1": lambda target, inputs, answer: build_head(target, block=1),
    "NaN head": lambda target, inputs, answer: nan_head(target),
    "oracle": lambda target, inputs, answer: Oracle(inputs, answer, depth=15),
    "oracle behind lies": lambda target, inputs, answer: Oracle(inputs, answer, depth=3, wrong=2),
    "always wrong": lambda target, inputs, answer: Oracle(inputs, [(t + 1) % VOCAB for t in answer], wrong=1),
    "guesser": lambda target, inputs, answer: Guesser(inputs, answer),
}

# ---- losslessness ----


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("images", range(3))
def test_lossless_for_every_drafter(name, images):
    """Random targets, tied and untied: the text is the library's greedy text, token for token."""
    for seed in range(3):
        target, inputs, answer = case(seed, images)
        assert generate(target, DRAFTERS[name](*case(seed, images)), inputs, max_new_tokens=LENGTH).tokens == answer[:LENGTH], f"seed {seed}"


@pytest.mark.parametrize("budget", [0, 1, 7, 31, 127])
@pytest.mark.parametrize("branch", [1, 4, 8])
def test_budget_and_branch_change_the_speed_only(budget, branch):
    """Any tree size and width gives the same text; only an empty tree forbids a gain."""
    target, inputs, answer = case(1, 1)
    generation = generate(target, Guesser(inputs, answer), inputs, max_new_tokens=LENGTH, budget=budget, branch=branch)
    assert generation.tokens == answer[:LENGTH]
    assert all(len(r.tree) <= budget for r in generation.rounds) and (generation.tau == 1) == (budget == 0)


def test_a_prompt_of_one_token(tiny_target):
    """The shortest prompt there is."""
    inputs = {name: value[:, :1] for name, value in prompt_inputs(3, grids=()).items()}
    answer = library_greedy(tiny_target, inputs, 12)
    assert generate(tiny_target, Oracle(inputs, answer, wrong=1), inputs, max_new_tokens=12).tokens == answer


# Each breaks one line of the method. The property above must notice, or it is no property.


def siblings_visible(patch):
    mask = glance.ancestor_mask
    patch.setattr(glance, "ancestor_mask", lambda parents: mask(parents) | (torch.tensor(parents)[:, None] == torch.tensor(parents)))


def only_parent_visible(patch):
    mask = glance.ancestor_mask
    near = lambda parents: torch.eye(len(parents)).bool() | (torch.tensor(parents)[:, None] == torch.arange(len(parents)))  # noqa: E731
    patch.setattr(glance, "ancestor_mask", lambda parents: mask(parents) & near(parents))


def node_order_mask(patch):
    patch.setattr(glance, "ancestor_mask", lambda parents: torch.ones(len(parents), len(parents)).tril().bool())


def with_depths(patch, change):
    verify = Target.verify
    moved = lambda tree: CandidateTree(tree.tokens, tree.parents, change(tree), tree.log_probs)  # noqa: E731
    patch.setattr(Target, "verify", lambda self, sequence, tree, taps=(): verify(self, sequence, moved(tree), taps))


def commit_first_rows(patch):
    commit = Target.commit
    patch.setattr(Target, "commit", lambda self, sequence, tree, path: commit(self, sequence, tree, list(range(1, len(path) + 1))))


def bonus_from_the_root(patch):
    accept = glance.accept_greedy
    patch.setattr(glance, "accept_greedy", lambda tree, logits: (accept(tree, logits)[0], int(logits[0].argmax())))


def bonus_dropped(patch):
    accept = glance.accept_greedy

    def shorter(tree, logits):
        path, bonus = accept(tree, logits)
        return path, tree.tokens[path[-1]] if path else bonus  # the last draft stands where the bonus should

    patch.setattr(glance, "accept_greedy", shorter)


MUTATIONS = {
    "siblings visible": siblings_visible,
    "only the parent visible": only_parent_visible,
    "packed order as mask": node_order_mask,
    "depths one too deep": lambda patch: with_depths(patch, lambda tree: [d + 1 for d in tree.depths]),
    "all at the root's position": lambda patch: with_depths(patch, lambda tree: [0] * len(tree.depths)),
    "packed order as position": lambda patch: with_depths(patch, lambda tree: list(range(len(tree.depths)))),
    "first rows committed": commit_first_rows,
    "bonus from the root's row": bonus_from_the_root,
    "bonus dropped": bonus_dropped,
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_losslessness_notices_a_broken_method(name, monkeypatch):
    """With one line wrong, at least one of six prompts is answered differently (and with none wrong, none is)."""
    cases = [case(seed, images) for seed in range(3) for images in (0, 1)]

    def lossless():
        return [generate(t, Oracle(i, a, depth=4, wrong=2), i, max_new_tokens=LENGTH).tokens == a[:LENGTH] for t, i, a in cases]

    assert all(lossless())
    MUTATIONS[name](monkeypatch)
    assert not all(lossless())


# ---- sampling ----


@pytest.mark.parametrize("warp", [{}, dict(top_k=5), dict(top_p=0.8)], ids=str)
@pytest.mark.parametrize("images", [0, 1])
def test_sampled_text_is_the_same_for_every_drafter(warp, images):
    """One draw per committed token, in order: the same generator seed gives the same text, with or without a draft."""
    target, inputs, _ = case(2, images)

    def text(drafter):
        return generate(target, drafter, inputs, max_new_tokens=LENGTH, temperature=1.0, generator=torch.Generator().manual_seed(5), **warp)

    plain = text(None).tokens
    for name, make in DRAFTERS.items():
        assert text(make(target, inputs, plain)).tokens == plain, name
    assert text(Oracle(inputs, plain, wrong=1)).tau > 2  # drafts were accepted, so the tree was walked
    other = generate(target, None, inputs, max_new_tokens=LENGTH, temperature=1.0, generator=torch.Generator().manual_seed(6), **warp)
    assert other.tokens != plain


def test_the_generator_moves_on(tiny_target):
    """Nothing is re-seeded inside: two answers drawn with one generator differ, and the tokens of one are not all alike."""
    generator, inputs = torch.Generator().manual_seed(0), prompt_inputs(3)
    first, second = (generate(tiny_target, None, inputs, max_new_tokens=LENGTH, temperature=2.0, generator=generator).tokens for _ in range(2))
    assert first != second and len(set(first)) > 3


# ---- stopping and length ----


@pytest.mark.parametrize("ends, left, tokens, accepted", [
    (set(), 99, [5, 6, 7, 8], 3), (set(), 4, [5, 6, 7, 8], 3), (set(), 3, [5, 6, 7], 3), (set(), 2, [5, 6], 2), (set(), 1, [5], 1),
    ({5}, 99, [5], 1), ({6}, 99, [5, 6], 2), ({8}, 99, [5, 6, 7, 8], 3), ({9}, 99, [5, 6, 7, 8], 3),  # 9 was drafted, not accepted
    ({7, 6}, 99, [5, 6], 2), ({7}, 2, [5, 6], 2), ({6}, 2, [5, 6], 2), ({4}, 99, [5, 6, 7, 8], 3),  # 4 is r, of the round before
])  # fmt: skip
def test_settling_a_pass_by_hand(ends, left, tokens, accepted):
    """r=4, then 5, 6, 7 accepted beside a rejected 9, bonus 8: cut at the first end token or at the limit, whichever comes first."""
    tree, logits = CandidateTree([4, 9, 5, 6, 7], [-1, 0, 0, 2, 3], [0, 1, 1, 2, 3], [0.0] * 5), torch.arange(50.0).reshape(5, 10) ** 2
    done = glance.settle(tree, [2, 3, 4], 8, logits, ends, left)
    assert (done.tokens, done.accepted) == (tokens, accepted)
    rows = logits[[0, 2, 3, 4][: len(tokens)]]
    assert done.margins == [float(row[9] - row[8]) for row in rows]


@pytest.mark.parametrize("law, entropy", [([1.0, 0.0, 0.0], 0), ([0.5, 0.5, 0.0], math.log(2)), ([0.5, 0.25, 0.25], 1.5 * math.log(2))])
def test_entropy_by_hand(law, entropy):
    """H of the law right after r, in nats; an impossible token counts for nothing."""
    done = glance.settle(CandidateTree.empty(0), [], 1, torch.tensor([law]).log(), set(), 5)
    assert done.entropy == pytest.approx(entropy, abs=1e-6)


@pytest.mark.parametrize("limit", [1, 2, 15, 16, 17])
def test_the_limit_holds_inside_a_block(limit):
    """Fifteen right drafts a round: the answer is cut at the limit, and takes no more passes than that needs."""
    target, inputs, answer = case(0, 1)
    generation = generate(target, Oracle(inputs, answer, depth=15), inputs, max_new_tokens=limit)
    assert generation.tokens == answer[:limit]
    assert len(generation.rounds) == 1 + math.ceil((limit - 1) / 16)


def test_an_end_token_inside_an_accepted_run_ends_the_answer():
    """The third token is the end and a right draft runs past it: the output ends there, though the bonus is no end token."""
    target, inputs, answer = case(0, 1)
    generation = generate(target, Oracle(inputs, answer, depth=15), inputs, max_new_tokens=LENGTH, end_ids=[answer[2]])
    last = generation.rounds[-1]
    assert generation.tokens == answer[:3] == library_greedy(target, inputs, LENGTH, eos=answer[2])
    assert len(last.path) > len(last.tokens) and last.accepted == len(last.tokens) == 2


@pytest.mark.parametrize("name", ["none", "oracle", "oracle behind lies", "random head"])
@pytest.mark.parametrize("spare", [-5, -1, 0, 1, 6])
def test_end_token_after_at_and_before_the_limit(name, spare):
    """One of two end ids comes `spare` tokens before the limit is reached: the library stops in the same place."""
    target, inputs, answer = case(1, 1)
    end = next(i for i in range(5, LENGTH) if answer[i] not in answer[:i])
    ends, limit = [59, answer[end]], end + 1 + spare
    generation = generate(target, DRAFTERS[name](target, inputs, answer), inputs, max_new_tokens=limit, end_ids=ends)
    assert generation.tokens == library_greedy(target, inputs, limit, eos=ends) == answer[: min(limit, end + 1)]


@pytest.mark.parametrize("form", ["int", "list", "None"])
def test_end_ids_of_the_targets_own_generation_config(form, monkeypatch):
    """One id, a list of ids or none at all; an explicit empty list overrides them."""
    target, inputs, answer = case(1, 0)
    ends = {"int": answer[4], "list": [59, answer[4]], "None": None}[form]
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", ends)
    expected = answer[:LENGTH] if ends is None else answer[: answer.index(answer[4]) + 1]
    assert generate(target, Oracle(inputs, answer), inputs, max_new_tokens=LENGTH).tokens == expected
    assert generate(target, None, inputs, max_new_tokens=LENGTH, end_ids=[]).tokens == answer[:LENGTH]


def test_the_mask_id_may_be_an_end_id():
    """The block is full of mask ids, the output is not: only what was committed is searched for an end."""
    target, inputs, answer = next(c for c in map(case, range(3), range(3)) if MASK not in c[2][:LENGTH])
    for drafter in (build_head(target), Oracle(inputs, answer)):
        assert generate(target, drafter, inputs, max_new_tokens=LENGTH, end_ids=[MASK]).tokens == answer[:LENGTH]


# ---- options ----


@pytest.mark.parametrize("options, named", [
    (dict(max_new_tokens=0), "max_new_tokens.*0"), (dict(temperature=-1.0), "temperature=-1.0"), (dict(top_k=-1), "top_k=-1"),
    (dict(top_p=0.0), "top_p=0.0"), (dict(top_p=1.5), "top_p=1.5"),
    (dict(top_k=5), "temperature"), (dict(top_p=0.9), "temperature"), (dict(temperature=1.0), "Generator"),
    (dict(budget=-1), "budget=-1"), (dict(branch=0), "branch=0"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("drafter", ["none", "random head"])
def test_impossible_options(tiny_target, options, named, drafter):
    """A ValueError that names what was wrong, whatever the drafter."""
    inputs = prompt_inputs(1)
    with pytest.raises(ValueError, match=named):
        generate(tiny_target, DRAFTERS[drafter](tiny_target, inputs, []), inputs, **options)


@pytest.mark.parametrize("option", ["num_beams", "repetition_penalty", "do_sample"])
def test_unknown_options_are_not_swallowed(tiny_target, option):
    """What is not offered raises, rather than being ignored."""
    with pytest.raises(TypeError, match=option):
        generate(tiny_target, None, prompt_inputs(1), **{option: 1})


# ---- records ----


@pytest.mark.parametrize("name", ["none", "random head", "oracle behind lies", "guesser"])
def test_rounds_tell_what_happened(name):
    """Entropy and margins are those of the target's own next-token laws, recomputed by separate forwards; counts add up."""
    target, inputs, answer = case(0, 1)
    generation = generate(target, DRAFTERS[name](target, inputs, answer), inputs, max_new_tokens=LENGTH, keep_logits=True)
    written = []
    for r in generation.rounds:
        laws = torch.stack([library_forward(target, inputs, written + r.tokens[:k]).logits[0, -1] for k in range(len(r.tokens))])
        p, best = laws[0].double().softmax(dim=-1), laws.topk(2, dim=-1).values
        assert r.entropy == pytest.approx(float(-(p * p.log()).sum()), abs=1e-4)
        assert r.margins == pytest.approx((best[:, 0] - best[:, 1]).tolist(), abs=1e-3)
        assert (r.logits - laws).abs().max() < 1e-3 and r.logits.argmax(dim=-1).tolist() == r.tokens
        drafted = [r.tree.tokens[node] for node in r.path]
        assert r.tree.tokens[0] == (written[-1] if written else int(inputs["input_ids"][0, -1])) and r.tokens[: len(drafted)] == drafted[: len(r.tokens)]
        written += r.tokens
    assert written == generation.tokens == answer[:LENGTH]


@pytest.mark.parametrize("name", ["none", "random head", "oracle", "oracle behind lies", "guesser"])
def test_tau_is_tokens_per_pass(name):
    """tau = tokens after the prefill's / passes after the prefill; accepted + 1 a round, but for a last one cut short."""
    target, inputs, answer = case(0, 2)
    generation = generate(target, DRAFTERS[name](target, inputs, answer), inputs, max_new_tokens=LENGTH)
    first, *rounds, last = generation.rounds
    assert first.tokens == answer[:1] and first.accepted == 0 and len(first.tree) == 0
    assert generation.tau == (LENGTH - 1) / (len(rounds) + 1)
    assert all(len(r.tokens) == r.accepted + 1 for r in rounds) and last.accepted <= len(last.tokens) <= last.accepted + 1
    if name in ("none", "random head"):
        assert generation.tau < 1.5 and (name != "none" or generation.tau == 1)


class TaughtHead(Oracle):
    """Carries a head's config (block size 8) but drafts the answer: full acceptance under the head's own cap."""

    def __init__(self, head, *oracle, **options):
        super().__init__(*oracle, **options)
        self.config = head.config


def test_cap_is_offsets_or_tokens_left():
    """A round of a block drafter can have at most min(L, tokens still to come) drafts accepted, whether it did or not."""
    target, inputs, answer = case(0, 1)
    head = build_head(target, block=8)
    for drafter in (head, Spine(head), TaughtHead(head, inputs, answer, depth=7)):
        generation, left = generate(target, drafter, inputs, max_new_tokens=LENGTH), LENGTH - 1
        for r in generation.rounds[1:]:
            assert r.cap == min(7, left) and r.accepted <= r.cap
            left -= len(r.tokens)
        assert left == 0 and generation.rounds[0].cap == 0


@pytest.mark.parametrize("name", ["none", "oracle", "oracle behind lies", "always wrong", "guesser"])
def test_cap_never_exceeds_what_was_left(name):
    """Drafters without a block size too: no round could have had more drafts accepted than tokens were still to come."""
    target, inputs, answer = case(0, 1)
    generation, left = generate(target, DRAFTERS[name](target, inputs, answer), inputs, max_new_tokens=LENGTH), LENGTH - 1
    for r in generation.rounds[1:]:
        assert r.accepted <= r.cap <= min(left, max(r.tree.depths))
        left -= len(r.tokens)


def test_rounds_arrive_one_by_one(tiny_target):
    """decode is an iterator: the prefill's token can be shown before anything is drafted, and stopping early is allowed."""
    class Sulks(Oracle):
        def propose(self, context):
            raise AssertionError("asked to draft although nobody wanted a second round")

    rounds = decode(tiny_target, Sulks(prompt_inputs(3), []), prompt_inputs(3), max_new_tokens=LENGTH)
    assert next(rounds).tokens == library_greedy(tiny_target, prompt_inputs(3), 1)
    rounds.close()


def test_time_is_booked_once(tiny_target):
    """The rounds' seconds add up to what the loop took: no stage twice, and not what the caller did between rounds."""
    head, inputs, rounds, asleep = build_head(tiny_target), prompt_inputs(3), [], 0.0
    start = time.perf_counter()
    for round_ in decode(tiny_target, head, inputs, max_new_tokens=5):
        nap = time.perf_counter()
        time.sleep(0.05)
        asleep += time.perf_counter() - nap
        rounds.append(round_)
    took = time.perf_counter() - start - asleep
    assert all(set(r.seconds) == {"draft", "tree", "verify", "commit"} and min(r.seconds.values()) >= 0 for r in rounds)
    booked = [sum(r.seconds.values()) for r in rounds]
    assert 0.5 * took < sum(booked) < took
    assert glance.Generation(rounds).decode_seconds == pytest.approx(sum(booked[1:]))  # the prefill is not decoding


def test_the_toy_round_runs(capsys):
    """`python glance.py` walks one round by hand: two drafts accepted, blue -> box, and a bonus."""
    glance.toy_round()
    out = capsys.readouterr().out
    assert "2 drafts accepted, 3 tokens from one target pass" in out and "['blue', 'box']" in out


def test_end_ids_of_any_kind_stop_and_others_are_refused():
    """One id, a list or a tensor; a word is no token id and would never be met. Taps outside the target are refused too."""
    target, inputs, answer = case(0, 0)
    for ends in (answer[2], [answer[2]], torch.tensor([answer[2]]), torch.tensor(answer[2])):
        assert generate(target, None, inputs, max_new_tokens=LENGTH, end_ids=ends).tokens == answer[:3]
    for ends in ("</s>", [str(answer[2])]):
        with pytest.raises(ValueError, match="end_ids are token ids"):
            decode(target, None, inputs, end_ids=ends)
    for taps in ([-1], [4]):
        drafter = Spine(build_head(target))
        drafter.taps = taps
        with pytest.raises(ValueError, match="outside the target's 4 layers"):
            decode(target, drafter, inputs)


def test_a_drafter_that_returns_nothing_is_named():
    """The commonest slip: `propose` without its return."""

    class Forgetful:
        taps = []

        def propose(self, context):
            CandidateTree.empty(context.root)

    target, inputs, _ = case(0, 0)
    with pytest.raises(ValueError, match="Forgetful.propose returned nothing"):
        generate(target, Forgetful(), inputs, max_new_tokens=3)
