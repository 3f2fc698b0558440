"""Section 5, accept: the walk, and the law of what comes out of it."""

import random
from types import SimpleNamespace

import pytest
import torch

import glance
from glance import CandidateTree, accept_greedy, accept_sampled, generate, sampling_law


def small_tree():
    """r=0 -> {1, 2}; 1 -> {3}; 2 -> {3, 1}; 2,3 -> {0}"""
    tree = CandidateTree.empty(0)
    one, two = tree.add(0, 1, -1.0), tree.add(0, 2, -1.2)
    tree.add(one, 3, -2.0)
    three = tree.add(two, 3, -2.1)
    tree.add(two, 1, -2.2)
    tree.add(three, 0, -3.0)
    return tree


@pytest.mark.parametrize("says, path, bonus", [
    ({0: 3}, [], 3),  # no child equals the choice: the bonus alone
    ({0: 1, 1: 0}, [1], 0),  # first child, then off the tree
    ({0: 2, 2: 1, 5: 2}, [2, 5], 2),  # second child, its second child
    ({0: 2, 2: 3, 4: 0, 6: 1}, [2, 4, 6], 1),  # down to a leaf, and one token past it
])  # fmt: skip
def test_greedy_walk_by_hand(says, path, bonus):
    """The path follows the target's argmax from node to node; the bonus is the first choice that was not drafted."""
    logits = torch.zeros(7, 4)
    for node, token in says.items():
        logits[node, token] = 5.0
    assert accept_greedy(small_tree(), logits) == (path, bonus)


def test_the_empty_tree_gives_one_token():
    """Plain autoregression: no path, the bonus is the argmax."""
    assert accept_greedy(CandidateTree.empty(0), torch.tensor([[0.0, 1.0, 3.0, 2.0]])) == ([], 2)


# A toy target over four words: row w is the law of the word after w.
TABLE = torch.tensor([[0.1, 0.3, 0.4, 0.2], [0.25, 0.25, 0.0, 0.5], [0.3, 0.4, 0.1, 0.2], [0.6, 0.2, 0.1, 0.1]], dtype=torch.float64)
DRAWS, CRITICAL = 20_000, 37.7  # chi-square with at most 15 degrees of freedom passes 37.7 once in a thousand


def chi_square_of_two_words(accept, table, draws=DRAWS):
    """Write two words after r many times, round by round as decode does; chi-square of the 16 counts against the exact law."""
    generator, tree, counts = torch.Generator().manual_seed(0), small_tree(), torch.zeros(4, 4, dtype=torch.float64)
    probs, probs_after = table[tree.tokens], [table[[word]] for word in range(4)]
    for _ in range(draws):
        path, bonus = accept(tree, probs, generator)
        words = [tree.tokens[i] for i in path] + [bonus]
        if len(words) == 1:  # the next round, here without a draft
            words += [accept_sampled(CandidateTree.empty(bonus), probs_after[bonus], generator)[1]]
        counts[words[0], words[1]] += 1
    exact = draws * table[0][:, None] * table  # p(x | r) p(y | x): the enumeration
    possible = exact > 0
    assert counts[~possible].sum() == 0
    return float(((counts - exact)[possible] ** 2 / exact[possible]).sum())


def test_sampled_output_has_the_targets_law():
    """Any two words come out with exactly the target's probability, though most of the tree is rejected each time."""
    assert chi_square_of_two_words(accept_sampled, TABLE) < CRITICAL


def test_sampled_output_has_the_warped_law():
    """The same under temperature, top-k and top-p: the warped law is drawn from and nothing else."""
    assert chi_square_of_two_words(accept_sampled, sampling_law(TABLE.log(), temperature=0.7, top_k=3, top_p=0.9)) < CRITICAL


class TableTarget:
    """A target of four words whose law depends on the last two: logits are looked up, nothing is cached. `decode` takes it as it is."""

    device = "cpu"
    laws = 0.7 * torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(1))  # logits of the next word after [last but one, last]

    def prefill(self, inputs, taps):
        text = inputs["input_ids"][0].tolist()
        return SimpleNamespace(text=text), self.laws[text[-2], text[-1]], None

    def verify(self, sequence, tree, taps):
        words = [[sequence.text[-1], tree.tokens[0]]]  # the last two words at every node
        for node in range(1, len(tree) + 1):
            words.append([words[tree.parents[node]][1], tree.tokens[node]])
        return self.laws[tuple(zip(*words))], None

    def commit(self, sequence, tree, path):
        sequence.text += [tree.tokens[node] for node in [0, *path]]


class Thicket:
    """Random trees over the four words: siblings, chains, empty ones."""

    taps: list[int] = []
    rng = random.Random(0)

    def propose(self, context):
        tree = CandidateTree.empty(context.root)
        for _ in range(self.rng.randrange(7)):
            parent, word = self.rng.randrange(len(tree) + 1), self.rng.randrange(4)
            if (parent, word) not in tree.children():
                tree.add(parent, word, -1.0)
        return tree


@pytest.mark.parametrize("options, texts", [(dict(temperature=1.0), 64), (dict(temperature=0.9, top_k=3, top_p=0.95), 20)], ids=str)
def test_every_text_of_three_words_has_its_probability(options, texts):
    """20,000 answers of three words through the whole loop, a random tree each round, against the enumeration of all 64: chi-square below
    what chance exceeds once in a thousand; texts of probability zero never come."""
    target, inputs, generator = TableTarget(), {"input_ids": torch.tensor([[1, 2]])}, torch.Generator().manual_seed(0)
    counts = torch.zeros(4, 4, 4, dtype=torch.float64)
    for _ in range(DRAWS):
        counts[tuple(generate(target, Thicket(), inputs, max_new_tokens=3, end_ids=[], generator=generator, **options).tokens)] += 1
    law = sampling_law(target.laws.reshape(16, 4), **options).reshape(4, 4, 4)  # [last but one, last, next]
    exact = DRAWS * law[1, 2][:, None, None] * law[2][:, :, None] * law  # p(x | 1 2) p(y | 2 x) p(z | x y)
    possible = exact > 0
    dof = int(possible.sum()) - 1
    critical = dof * (1 - 2 / (9 * dof) + 3.09 * (2 / (9 * dof)) ** 0.5) ** 3  # Wilson and Hilferty
    assert dof + 1 >= texts and counts[~possible].sum() == 0
    assert float(((counts - exact)[possible] ** 2 / exact[possible]).sum()) < critical


def second_chance(tree, probs, generator):
    """Broken: a choice that no child equals is drawn once more before it is taken, as if the draft deserved it."""
    children = tree.children()

    def choose(node):
        token = int(torch.multinomial(probs[node], 1, generator=generator))
        return token if (node, token) in children else int(torch.multinomial(probs[node], 1, generator=generator))

    return glance.walk(tree, choose)


def drafted_only(tree, probs, generator):
    """Broken: the draw is restricted to the drafted words wherever there are any."""
    drafted = torch.zeros_like(probs)
    for node, token in tree.children():
        drafted[node, token] = 1
    kept = probs * drafted
    return accept_sampled(tree, torch.where(kept.sum(dim=1, keepdim=True) > 0, kept, probs), generator)


@pytest.mark.parametrize("broken", [second_chance, drafted_only])
def test_a_biased_walk_is_caught(broken):
    """The chi-square test can fail: two plausible mistakes give another law."""
    assert chi_square_of_two_words(broken, TABLE, draws=5000) > 2 * CRITICAL


def test_one_draw_for_every_committed_token():
    """The walk draws once per token it returns, so the generator's state after it does not depend on the tree."""
    certain = torch.eye(4, dtype=torch.float64)[[2, 0, 3, 0, 0, 0, 1]]  # r -> 2 -> 3 -> 0 -> 1, along the nodes 0, 2, 4, 6
    one_pass, token_by_token = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    path, bonus = accept_sampled(small_tree(), certain, one_pass)
    alone = [accept_sampled(CandidateTree.empty(0), certain[[node]], token_by_token)[1] for node in (0, 2, 4, 6)]
    assert [small_tree().tokens[i] for i in path] + [bonus] == alone == [2, 3, 0, 1]
    assert torch.equal(one_pass.get_state(), token_by_token.get_state())


@pytest.mark.parametrize("options, expected", [
    (dict(temperature=1.0), [0.5, 0.3, 0.15, 0.05]),
    (dict(temperature=0.5), [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),  # p^(1/T), normalised
    (dict(temperature=1.0, top_k=2), [0.625, 0.375, 0, 0]),
    (dict(temperature=1.0, top_k=1), [1, 0, 0, 0]),
    (dict(temperature=1.0, top_k=99), [0.5, 0.3, 0.15, 0.05]),
    (dict(temperature=1.0, top_p=0.7), [0.625, 0.375, 0, 0]),  # 0.5 is not enough, 0.5 + 0.3 is
    (dict(temperature=1.0, top_p=0.4), [1, 0, 0, 0]),  # the likeliest word always stays
    (dict(temperature=0.5, top_k=3, top_p=0.9), [0.25 / 0.34, 0.09 / 0.34, 0, 0]),  # temperature, then top-k, then top-p
])  # fmt: skip
def test_sampling_law_by_hand(options, expected):
    """Temperature, top-k and top-p of (0.5, 0.3, 0.15, 0.05), worked out on paper; double precision, sums to one."""
    law = sampling_law(torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log() + 2.5, **options)
    assert law.dtype == torch.float64 and law.sum().item() == pytest.approx(1, abs=1e-12)
    assert law[0].tolist() == pytest.approx(expected, abs=1e-6)
