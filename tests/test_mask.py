"""Section 3, mask: who sees whom, against climbing from every node to the root."""

import pytest
import torch

from conftest import path_to, random_tree
from glance import ancestor_mask


def test_mask_by_hand():
    """Nodes 1 and 2 are siblings below r; 3 is a child of 1, 4 of 2, 5 of 3."""
    seen = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 3, 5]]
    assert [row.nonzero().flatten().tolist() for row in ancestor_mask([-1, 0, 0, 1, 2, 3])] == seen


@pytest.mark.parametrize("nodes", [1, 2, 5, 31, 127])
def test_rows_are_the_ancestors(nodes):
    """Row i is True at r, at i's ancestors and at i, and nowhere else, for trees of any shape."""
    for seed in range(10):
        tree = random_tree(0, nodes, torch.Generator().manual_seed(seed))
        mask = ancestor_mask(tree.parents)
        for node in range(nodes + 1):
            assert mask[node].nonzero().flatten().tolist() == [0, *path_to(tree, node)]


def test_a_chain_is_causal():
    """Without branches the mask is the ordinary lower triangle."""
    assert torch.equal(ancestor_mask(list(range(-1, 9))), torch.ones(10, 10).tril().bool())


@pytest.mark.parametrize("parents", [[-1], [-1, 0, 0, 0]])
def test_the_root_sees_only_itself(parents):
    """r was committed before anything was drafted; its row is also the whole mask of an empty tree."""
    assert ancestor_mask(parents)[0].tolist() == [True] + [False] * (len(parents) - 1)
