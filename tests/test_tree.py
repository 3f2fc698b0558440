"""Section 2, tree: best-first growth against the enumeration of every prefix there is."""

import math
from itertools import product

import pytest
import torch

import glance
from conftest import path_to
from glance import grow_tree


def every_prefix(log_q, branch):
    """{prefix: log-probability}, the slow obvious way: at each offset the `branch` best tokens, all combinations, no zeros."""
    rows = [sorted(range(len(row)), key=lambda t: (-row[t], t))[:branch] for row in log_q.tolist()]
    prefixes = [p for depth in range(1, len(rows) + 1) for p in product(*rows[:depth])]
    scores = {p: sum(float(log_q[k, t]) for k, t in enumerate(p)) for p in prefixes}
    return {p: score for p, score in scores.items() if score > -math.inf}


def prefixes_of(tree):
    return [tuple(tree.tokens[i] for i in path_to(tree, node)) for node in range(1, len(tree) + 1)]


def random_case(seed):
    """Small marginals; every third case has ties, every fourth has impossible tokens."""
    g = torch.Generator().manual_seed(seed)
    offsets, words, branch = torch.randint(1, 5, (3,), generator=g).tolist()
    budget = int(torch.randint(1, 40, (1,), generator=g))
    logits = torch.randn(offsets, words + 1, generator=g)
    if seed % 3 == 0:
        logits = logits.round()
    log_q = logits.log_softmax(dim=-1)
    if seed % 4 == 0:
        log_q[torch.rand(log_q.shape, generator=g) < 0.3] = -math.inf
    return log_q, budget, branch


@pytest.mark.parametrize("block", range(6))
def test_tree_holds_the_most_probable_prefixes(block):
    """The tree's probabilities are the N largest of all prefixes (as a multiset: which of two equals is taken is free)."""
    for seed in range(50 * block, 50 * block + 50):
        log_q, budget, branch = random_case(seed)
        best = sorted(every_prefix(log_q, branch).values(), reverse=True)[:budget]
        tree = grow_tree(log_q, 9, budget, branch)
        assert sorted(tree.log_probs[1:], reverse=True) == pytest.approx(best, abs=1e-5), f"seed {seed}"
        assert tree.log_probs[1:] == pytest.approx(best, abs=1e-5), f"seed {seed}: not grown best first"


@pytest.mark.parametrize("block", range(6))
def test_tree_is_a_tree(block):
    """Root first, parents before children, siblings distinct, depth = parent's + 1, log_probs the sum along the path."""
    for seed in range(50 * block, 50 * block + 50):
        log_q, budget, branch = random_case(seed)
        tree = grow_tree(log_q, 9, budget, branch)
        assert (tree.tokens[0], tree.parents[0], tree.depths[0], tree.log_probs[0]) == (9, -1, 0, 0.0)
        assert all(0 <= parent < node for node, parent in enumerate(tree.parents) if node)
        prefixes = prefixes_of(tree)
        assert len(set(prefixes)) == len(prefixes) == len(tree)  # equal siblings would give equal prefixes
        assert tree.depths[1:] == [len(p) for p in prefixes]
        sums = [sum(float(log_q[k, t]) for k, t in enumerate(p)) for p in prefixes]
        assert tree.log_probs[1:] == pytest.approx(sums, abs=1e-5)


@pytest.mark.parametrize("budget, size", [(0, 0), (1, 1), (5, 5), (12, 12), (13, 12), (1000, 12)])
def test_budget_is_met_until_candidates_run_out(budget, size):
    """Two offsets of three words have 3 + 9 prefixes; asking for more gives those twelve."""
    assert len(grow_tree(torch.randn(2, 3).log_softmax(dim=-1), 0, budget)) == size


def test_no_offsets_no_tree():
    """L = 0 (a head of block size 1) is plain autoregression."""
    assert len(grow_tree(torch.zeros(0, 5), 3, budget=8)) == 0


def test_branch_one_is_the_chain_of_argmaxes():
    """With one token per offset there is one path, and it is the greedy one."""
    log_q = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).log_softmax(dim=-1)
    tree = grow_tree(log_q, 0, budget=31, branch=1)
    assert tree.tokens[1:] == log_q.argmax(dim=-1).tolist() and tree.parents == [-1, 0, 1, 2, 3, 4]


def test_branch_beyond_the_vocabulary_means_all_of_it():
    """branch > V is branch = V."""
    log_q = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).log_softmax(dim=-1)
    assert grow_tree(log_q, 0, 20, branch=99) == grow_tree(log_q, 0, 20, branch=4)


def test_impossible_tokens_are_never_drafted():
    """-inf is probability zero: not even a budget to spare buys it."""
    log_q = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]).log()
    assert sorted(prefixes_of(grow_tree(log_q, 0, 100))) == [(0,), (0, 0), (1,), (1, 0)]
    assert len(grow_tree(torch.full((2, 3), -math.inf), 0, 100)) == 0


@pytest.mark.parametrize("row", [0, 1])
def test_a_row_of_nan_yields_the_empty_tree(row):
    """A broken head drafts nothing, rather than something."""
    log_q = torch.randn(2, 4).log_softmax(dim=-1)
    log_q[row] = math.nan
    assert len(grow_tree(log_q, 3, 8)) == 0


def test_ties_by_hand():
    """All equal, two offsets of two words: both words by id, then their children, the older parent's first."""
    tree = grow_tree(torch.full((2, 2), 0.5).log(), 7, budget=6)
    assert tree.tokens == [7, 0, 1, 0, 0, 1, 1]
    assert tree.parents == [-1, 0, 0, 1, 2, 1, 2]


@pytest.mark.parametrize("vocabulary, branch", [(8, 3), (64, 3), (64, 8), (64, 40), (5000, 8)])
@pytest.mark.parametrize("spread", [0, 1])
def test_ties_stand_in_order_of_token_id(vocabulary, branch, spread):
    """Equal words are tried by rising id, at the cut of `branch` too, whatever order topk fancies for this vocabulary size."""
    row = (spread * torch.randn(vocabulary, generator=torch.Generator().manual_seed(0))).round().log_softmax(dim=-1)
    tree = grow_tree(row[None], 0, budget=1000, branch=branch)
    assert tree.tokens[1:] == sorted(range(vocabulary), key=lambda token: (-float(row[token]), token))[:branch]


def test_equal_input_equal_tree():
    """Nothing random and nothing remembered: a copy of the marginals gives the same nodes in the same order."""
    log_q = torch.randn(6, 40, generator=torch.Generator().manual_seed(2)).round().log_softmax(dim=-1)
    assert grow_tree(log_q, 1, 63) == grow_tree(log_q.clone(), 1, 63)


@pytest.mark.parametrize("budget, branch", [(1, 8), (31, 8), (127, 8), (127, 1), (60, 64)])
def test_at_most_two_pushes_a_node(budget, branch, monkeypatch):
    """The heap sees a node's best child and next sibling only: 2 N + 1 pushes, whatever the branch."""
    pushes, push = [], glance.heapq.heappush
    monkeypatch.setattr(glance.heapq, "heappush", lambda heap, entry: (pushes.append(entry), push(heap, entry)))
    tree = grow_tree(torch.randn(15, 64, generator=torch.Generator().manual_seed(3)).log_softmax(dim=-1), 0, budget, branch)
    assert len(tree) <= len(pushes) + 1 <= 2 * budget + 1  # the first entry is laid down, not pushed


@pytest.mark.parametrize("budget, branch", [(-1, 8), (4, 0), (4, -2)])
def test_impossible_budget_or_branch(budget, branch):
    """The error names both values."""
    with pytest.raises(ValueError, match=f"budget={budget}, branch={branch}"):
        grow_tree(torch.zeros(2, 3), 0, budget, branch)


@pytest.mark.parametrize("fault, tree", {
    "starts at token 9, the committed one is 7": ([9], [-1], [0]),
    "node 1 .* token 64": ([7, 64], [-1, 0], [0, 1]), "node 1 .* token tensor": ([7, torch.tensor(3)], [-1, 0], [0, 1]),
    "node 1 .* parent 2": ([7, 3, 4], [-1, 2, 1], [0, 1, 1]), "node 2 .* depth 1": ([7, 3, 4], [-1, 0, 1], [0, 1, 1]),
}.items())  # fmt: skip
def test_what_is_no_tree_of_r_is_named(fault, tree):
    """Unchecked, these give another text (a false root or depth), an endless loop (a ring) or no acceptance at all (a tensor)."""
    with pytest.raises(ValueError, match=fault):
        glance.CandidateTree(*tree, [0.0] * len(tree[0])).check(7, 64)
    glance.CandidateTree([7, 3, 4, 3], [-1, 0, 1, 0], [0, 1, 2, 1], [0.0] * 4).check(7, 64)
