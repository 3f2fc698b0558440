"""What the assignment asks, and how an answer is judged: by brute force, on instances made from a seed.

Every prefix is listed, every ancestor climbed to, every outcome's probability added up: slow, obvious, and another way than
glance.py takes. The tests of a blank stand together, in the order of glance.py; the variants come last, each behind its
own signature and docstring, since glance.py does not contain them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random

import torch
from torch import Tensor

from glance import CandidateTree, expected_accepted

CHECKS: dict[str, list] = {}  # blank -> [(points, title, test)]


class Wrong(Exception):
    """An answer that is not right. The text is for its author: what must be, and what is."""


def worth(name: str, points: int, title: str):
    """Register a test: it takes the blank's function and a `random.Random`, and raises Wrong with a lesson."""
    return lambda test: CHECKS.setdefault(name, []).append((points, title, test)) or test


def expect(condition, message: str) -> None:
    if not condition:
        raise Wrong(message)


def must_refuse(call, what: str) -> None:
    with contextlib.suppress(ValueError):
        raise Wrong(f"{what} must raise ValueError; yours returns {kind(call())}")


def kind(x) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" if isinstance(x, Tensor) else f"{x!r:.80}"


def torch_seed(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.randrange(2**31))


def random_tree(rng: random.Random, nodes: int, words: int = 4) -> CandidateTree:
    """Any shape, siblings distinct; so few words that the same one stands under many parents."""
    tree = CandidateTree.empty(rng.randrange(words))
    while len(tree) < nodes:
        parent, token = rng.randrange(len(tree) + 1), rng.randrange(words)
        if (parent, token) not in tree.children():
            tree.add(parent, token, tree.log_probs[parent] - 1)
    return tree


def climb(parents: list[int], node: int) -> list[int]:
    """The nodes from 0 down to `node`."""
    return [0] if node == 0 else [*climb(parents, parents[node]), node]


# ---- ancestor_mask ----


def compare_mask(mask, rows: list[set[int]], columns: int, case: str) -> None:
    fits = isinstance(mask, Tensor) and mask.dtype == torch.bool and list(mask.shape) == [len(rows), columns]
    expect(fits, f"{case}: the mask must be bool [{len(rows)}, {columns}]; yours is {kind(mask)}")
    for i, must in enumerate(rows):
        sees = set(mask[i].nonzero().flatten().tolist())
        faults = [f"{verb} {str(sorted(nodes))[1:-1]}" for verb, nodes in (("also sees", sees - must), ("misses", must - sees)) if nodes]
        expect(not faults, f"{case}: row {i} must see exactly {{{str(sorted(must))[1:-1]}}}; yours {' and '.join(faults)}")


@worth("ancestor_mask", 2, "four nodes by hand")
def mask_by_hand(mask, rng):
    compare_mask(mask([-1, 0, 0, 1]), [{0}, {0, 1}, {0, 2}, {0, 1, 3}], 4, "parents [-1, 0, 0, 1]")


@worth("ancestor_mask", 6, "trees of any shape, a chain, the empty tree")
def mask_of_any_tree(mask, rng):
    for parents in [[-1], [-1, *range(8)], *(random_tree(rng, n).parents for n in (3, 5, 8, 20, 40))]:
        compare_mask(mask(list(parents)), [set(climb(parents, i)) for i in range(len(parents))], len(parents), f"parents {parents}")


# ---- grow_tree ----


def marginals(rng: random.Random, offsets: int, words: int) -> Tensor:
    return torch.randn(offsets, words, generator=torch_seed(rng)).mul(1.5).log_softmax(dim=-1)


def every_prefix(log_q: Tensor, branch: int) -> list[tuple[float, tuple]]:
    """(log-probability, tokens) of each prefix of nonzero probability over the `branch` likeliest words, most probable first."""
    q = log_q.tolist()
    rows = [sorted(range(len(row)), key=lambda t: (-row[t], t))[:branch] for row in q]
    prefixes = [p for depth in range(1, len(rows) + 1) for p in itertools.product(*rows[:depth])]
    scored = [(sum(q[k][t] for k, t in enumerate(p)), p) for p in prefixes]
    return sorted((s for s in scored if s[0] > -math.inf), key=lambda s: -s[0])


def compare_tree(tree, want: list[tuple[float, tuple]], log_q: Tensor, case: str, root: int = 9) -> None:
    """A sound tree whose i-th node is the i-th prefix wanted, or another one exactly as probable."""
    fields = [getattr(tree, name, None) for name in ("tokens", "parents", "depths", "log_probs")]
    expect(all(isinstance(x, list) and len(x) == len(fields[0]) > 0 for x in fields), f"{case}: return a CandidateTree; yours is {kind(tree)}")
    tokens, parents, depths, log_probs = fields
    first = [x[0] for x in fields]
    expect(first == [root, -1, 0, 0.0], f"{case}: node 0 is r itself, token {root}, parent -1, depth 0, log_prob 0; yours has {first}")
    for i, parent in enumerate(parents[1:], start=1):
        expect(0 <= parent < i, f"{case}: parents stand before their children; node {i} has parent {parent}")
        expect(depths[i] == depths[parent] + 1, f"{case}: node {i} is one deeper than its parent, {depths[parent] + 1}; yours says {depths[i]}")
    drafted = [tuple(tokens[j] for j in climb(parents, i)[1:]) for i in range(1, len(tokens))]
    expect(max(map(len, drafted), default=0) <= len(log_q), f"{case}: no node can stand deeper than the {len(log_q)} offsets")
    expect(len(set(drafted)) == len(drafted), f"{case}: the same prefix stands in the tree twice")
    for i, (prefix, (score, best)) in enumerate(zip(drafted, want), start=1):
        true = sum(float(log_q[k, t]) for k, t in enumerate(prefix))
        expect(abs(true - score) < 1e-4, f"{case}: node {i} must be the prefix {list(best)} of probability {math.exp(score):.4f}, the "
               f"product of its offsets' marginals; yours is {list(prefix)} of {math.exp(true):.4f}")  # fmt: skip
        expect(abs(log_probs[i] - true) < 1e-4, f"{case}: log_probs[{i}] is that of the whole path, {true:.3f}; yours {log_probs[i]:.3f}")
    expect(len(drafted) == len(want), f"{case}: the tree must have {len(want)} drafted nodes; yours has {len(drafted)}")


@worth("grow_tree", 3, "two offsets of two words by hand")
def tree_by_hand(grow, rng):
    log_q = torch.tensor([[0.6, 0.4], [0.9, 0.1]]).log()
    compare_tree(grow(log_q.clone(), 9, 4), every_prefix(log_q, 8)[:4], log_q, "q [[0.6, 0.4], [0.9, 0.1]], budget 4")


@worth("grow_tree", 6, "the most probable prefixes of all, best first")
def tree_is_the_best(grow, rng):
    for _ in range(12):
        log_q, branch, budget = marginals(rng, rng.randint(1, 4), rng.randint(2, 6)), rng.randint(1, 5), rng.randint(1, 30)
        case = f"{len(log_q)} offsets of {log_q.shape[1]} words, budget {budget}, branch {branch}"
        compare_tree(grow(log_q.clone(), 9, budget, branch), every_prefix(log_q, branch)[:budget], log_q, case)


@worth("grow_tree", 2, "equal probabilities")
def tree_with_ties(grow, rng):
    for words, branch in ((2, 8), (9, 3), (64, 8)):
        drafted, want = grow(torch.zeros(1, words), 9, 99, branch).tokens[1:], list(range(min(words, branch)))
        expect(drafted == want, f"{words} equally likely words, branch {branch}: the lowest ids in order, {want}; yours {drafted}")
    log_q = torch.randint(1, 4, (3, 12), generator=torch_seed(rng)).float().log_softmax(dim=-1)
    tree = grow(log_q.clone(), 9, 40, 5)
    compare_tree(tree, every_prefix(log_q, 5)[:40], log_q, "marginals with many ties, budget 40, branch 5")
    for i, j in itertools.combinations(range(1, len(tree) + 1), 2):
        equal = tree.parents[i] == tree.parents[j] and tree.log_probs[i] == tree.log_probs[j]
        expect(not equal or tree.tokens[i] < tree.tokens[j], f"equally likely siblings: {tree.tokens[j]} must stand before {tree.tokens[i]}")


@worth("grow_tree", 3, "nothing to draft, and impossible requests")
def tree_at_the_edges(grow, rng):
    log_q = marginals(rng, 2, 3)
    compare_tree(grow(log_q.clone(), 9, 50), every_prefix(log_q, 8), log_q, "budget 50 where only 12 prefixes exist")
    compare_tree(grow(log_q.clone(), 9, 0), [], log_q, "budget 0")
    log_q[0, 1] = -math.inf
    compare_tree(grow(log_q.clone(), 9, 50), every_prefix(log_q, 8), log_q, "a word of probability 0, budget to spare")
    log_q[1, 2] = math.nan
    compare_tree(grow(log_q.clone(), 9, 50), [], log_q, "NaN among the marginals")
    must_refuse(lambda: grow(torch.zeros(2, 3), 9, -1), "budget -1")
    must_refuse(lambda: grow(torch.zeros(2, 3), 9, 4, 0), "branch 0")


# ---- accept_greedy ----


def target_says(rng: random.Random, tree: CandidateTree) -> list[int]:
    """What the target says after each node: anything, but on the way to one of them what was drafted."""
    says = [rng.randrange(4) for _ in tree.tokens]
    for node in climb(tree.parents, rng.randrange(len(tree.tokens)))[1:]:
        says[tree.parents[node]] = tree.tokens[node]
    return says


def compare_walk(result, tree: CandidateTree, says: list[int]) -> None:
    """Right is the deepest node whose whole path is what the target says, and what the target says there."""
    agreed = [i for i in range(len(says)) if all(tree.tokens[j] == says[tree.parents[j]] for j in climb(tree.parents, i)[1:])]
    last = max(agreed, key=lambda i: tree.depths[i])
    path = climb(tree.parents, last)[1:]
    case = f"tokens {tree.tokens}, parents {tree.parents}; the target says {says} after nodes 0, 1, 2 ..."
    sound = isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], list) and isinstance(result[1], int)
    expect(sound, f"{case}: return (list of nodes, bonus token as int); yours is {kind(result)}")
    hint = " (tokens; a path holds node numbers)" if result[0] == [tree.tokens[i] for i in path] else ""
    expect(result[0] == path, f"{case}: the path must be {path}; yours is {result[0]}{hint}")
    hint = next((f", what it says after node {i}" for i, token in enumerate(says) if token == result[1]), "")
    right = f"the bonus is what it says after node {last}, the last accepted: {says[last]}"
    expect(result[1] == says[last], f"{case}: {right}; yours is {result[1]}{hint}")


@worth("accept_greedy", 2, "four nodes by hand")
def greedy_by_hand(accept, rng):
    tree = CandidateTree([5, 1, 2, 2], [-1, 0, 0, 1], [0, 1, 1, 2], [0.0, -0.5, -1.0, -1.5])
    compare_walk(accept(tree, torch.eye(6)[[1, 2, 0, 4]]), tree, [1, 2, 0, 4])


@worth("accept_greedy", 6, "trees of any shape, the empty one among them")
def greedy_on_any_tree(accept, rng):
    for nodes in [0, 1, 2, 3, 4, 6, 8] + [12] * 14:
        tree = random_tree(rng, nodes)
        says = target_says(rng, tree)
        compare_walk(accept(tree, torch.rand(nodes + 1, 4, generator=torch_seed(rng)) + 5 * torch.eye(4)[says]), tree, says)


# ---- accept_sampled ----


@worth("accept_sampled", 3, "a law that is certain")
def sampled_when_certain(accept, rng):
    for nodes in (0, 1, 3, 6, 12, 12):
        tree = random_tree(rng, nodes)
        says = target_says(rng, tree)
        compare_walk(accept(tree, torch.eye(4)[says], torch_seed(rng)), tree, says)


@worth("accept_sampled", 6, "the law of what comes out, against every outcome's probability")
def sampled_has_the_law(accept, rng, draws=4000):
    for tree in (random_tree(rng, 3), random_tree(rng, 6)):
        probs = torch.rand(len(tree) + 1, 4, generator=torch_seed(rng), dtype=torch.float64) + 0.05
        probs /= probs.sum(dim=1, keepdim=True)
        exact, children = {}, tree.children()  # (last accepted node, bonus) -> walks expected to end so
        for end in itertools.product(range(len(tree) + 1), range(4)):
            if end not in children:  # else the walk would go on
                steps = [(tree.parents[j], tree.tokens[j]) for j in climb(tree.parents, end[0])[1:]] + [end]
                exact[end] = draws * math.prod(float(probs[step]) for step in steps)
        counts, generator = dict.fromkeys(exact, 0), torch_seed(rng)
        for _ in range(draws):
            path, bonus = accept(tree, probs, generator)
            end = (path[-1] if path else 0, bonus)
            expect(end in exact, f"a walk ended at node {end[0]} with bonus {bonus}, but its child {children.get(end)} is that token: walk on, "
                   "or keep the draw that ended the walk instead of drawing again")  # fmt: skip
            counts[end] += 1
        square = {end: (counts[end] - exact[end]) ** 2 / exact[end] for end in exact if exact[end] >= 5}
        worst, df, total = max(square, key=square.get), len(square), sum(square.values())
        limit = df * (1 - 2 / (9 * df) + 4.9 * math.sqrt(2 / (9 * df))) ** 3  # chance alone: once in two million (Wilson-Hilferty)
        expect(total < limit, f"of {draws} walks {counts[worst]} ended at node {worst[0]} with bonus {worst[1]}, the target's law says "
               f"{exact[worst]:.0f} (chi-square {total:.0f}, chance stays below {limit:.0f}). One draw from probs[node] is both: the child to "
               "follow, or else the bonus")  # fmt: skip


@worth("accept_sampled", 3, "the generator: one draw for each committed token, in order")
def sampled_draws_once_a_token(accept, rng):
    generator, empty, outside, states = torch_seed(rng), CandidateTree.empty(0), torch.get_rng_state(), []
    for _ in range(2):
        accept(empty, torch.full((1, 4), 0.25), generator)
        states.append(generator.get_state())
    expect(torch.equal(outside, torch.get_rng_state()), "torch's global generator moved: draw from the generator you are given")
    expect(not torch.equal(*states), "two calls leave the generator in the same state: it is seeded again inside, or not used")
    for nodes in (4, 8, 12):
        tree, seed = random_tree(rng, nodes), rng.randrange(2**31)
        certain = torch.eye(4)[target_says(rng, tree)]
        in_one, one_by_one = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
        path, _ = accept(tree, certain, in_one)
        for node in [0, *path]:
            accept(empty, certain[[node]], one_by_one)
        expect(torch.equal(in_one.get_state(), one_by_one.get_state()), f"{len(path) + 1} tokens out of a tree of {nodes} nodes must cost the draws "
               "that they cost one at a time; yours leaves the generator elsewhere. Draw where the walk stands, not before it starts")  # fmt: skip


# ---- block_loss_weights ----


@worth("block_loss_weights", 2, "shape, type and the first weight")
def weights_start_at_one(weights, rng):
    w = weights(15, 7.0)
    expect(isinstance(w, Tensor) and w.dtype == torch.float32 and list(w.shape) == [15], f"15 offsets: return float32 [15]; yours is {kind(w)}")
    expect(abs(float(w[0]) - 1) < 1e-6, f"w_1 = exp(-(1 - 1) / gamma) = 1; yours is {float(w[0]):.4f}")


@worth("block_loss_weights", 4, "the formula")
def weights_by_formula(weights, rng):
    for offsets, gamma in ((1, 4.0), *((rng.randint(2, 40), rng.uniform(1, 20)) for _ in range(5))):
        w = weights(offsets, gamma).tolist()
        expect(len(w) == offsets, f"{offsets} offsets: as many weights; yours {len(w)}")
        for k, yours in enumerate(w, start=1):
            must = math.exp(-(k - 1) / gamma)
            expect(abs(yours - must) < 1e-5, f"gamma {gamma:.2f}: w_{k} must be exp(-({k} - 1) / {gamma:.2f}) = {must:.4f}; yours is {yours:.4f}")


# ---- fit_entropy_law ----


def simulate(rng: random.Random, b0: float, b1: float, rounds: int = 400) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds as the law has them: draft after draft survives with probability p(H), up to the round's own cap."""
    g = torch_seed(rng)
    h, cap = 3 * torch.rand(rounds, generator=g, dtype=torch.float64), torch.randint(1, 16, (rounds,), generator=g)
    survived = torch.rand(rounds, 15, generator=g) < torch.sigmoid(b0 - b1 * h)[:, None]
    return h, survived.long().cumprod(dim=1).sum(dim=1).minimum(cap), cap


def misfit(h: Tensor, a: Tensor, cap: Tensor, pairs: Tensor) -> Tensor:
    """Mean squared error of the law at each pair (b0, b1)."""
    p = torch.sigmoid(pairs[:, :1] - pairs[:, 1:] * h).clamp(max=1 - 1e-9)
    return ((p * (1 - p**cap) / (1 - p) - a) ** 2).mean(dim=-1)


def least_squares(h: Tensor, a: Tensor, cap: Tensor) -> tuple[float, float]:
    """The best pair by brute force: a grid of 25 x 25, eight times, each a third as wide around the best so far."""
    best, width = (1.0, 0.5), 4.0
    for _ in range(8):
        grid = torch.cartesian_prod(*(torch.linspace(b - width, b + width, 25, dtype=torch.float64) for b in best))
        best, width = grid[misfit(h, a, cap, grid).argmin()].tolist(), width / 3
    return tuple(best)


@worth("fit_entropy_law", 3, "rounds without noise give the law back")
def fit_without_noise(fit, rng):
    b0, b1 = rng.uniform(0.5, 2), rng.uniform(0.4, 1.2)
    h, _, cap = simulate(rng, b0, b1)
    law = fit(h, expected_accepted(h, b0, b1, cap), cap)
    near = abs(law.b0 - b0) < 0.02 and abs(law.b1 - b1) < 0.02
    expect(near, f"planted b0 = {b0:.3f}, b1 = {b1:.3f} and caps of 1 to 15; yours gives b0 = {law.b0:.3f}, b1 = {law.b1:.3f}")
    expect(law.rounds == 400 and law.r2_deciles > 0.99, f"400 rounds, fitted exactly; yours reports {law.rounds} rounds, R^2 {law.r2_deciles:.3f}")


@worth("fit_entropy_law", 4, "least squares on noisy rounds, each with its own cap")
def fit_with_noise(fit, rng):
    for _ in range(2):
        h, a, cap = simulate(rng, rng.uniform(0.5, 2), rng.uniform(0.4, 1.2))
        law, best, uncapped = fit(h, a, cap), least_squares(h, a, cap), least_squares(h, a, torch.full_like(cap, 15))
        yours, least = misfit(h, a, cap, torch.tensor([(law.b0, law.b1), best], dtype=torch.float64)).tolist()
        hint = "; that is the fit with every cap at 15" if math.dist(uncapped, (law.b0, law.b1)) < 0.05 else ""
        expect(yours < least * 1.0005, f"(b0, b1) = ({best[0]:.3f}, {best[1]:.3f}) has the least mean squared error, {least:.4f}; "
               f"yours, ({law.b0:.3f}, {law.b1:.3f}), has {yours:.4f}{hint}")  # fmt: skip


@worth("fit_entropy_law", 4, "the interval holds a planted slope, and claims none where there is none")
def fit_knows_what_it_knows(fit, rng):
    held = believed = 0
    for _ in range(6):
        h, a, cap = simulate(rng, 1.5, 0.8)
        low, high = fit(h, a, cap).interval
        expect(0 < high - low < 1, f"400 rounds pin b1 down to about 0.3; your interval runs from {low:.3f} to {high:.3f}")
        held += low <= 0.8 <= high
        believed += fit(h[torch.tensor(rng.sample(range(400), 400))], a, cap).identified
    expect(held >= 3, f"a 95 % interval holds the planted b1 in 5 or 6 of 6 sets of rounds; yours in {held}: it is too narrow or off")
    expect(believed <= 3, f"H dealt out to other rounds has no slope to find; yours is believed in {believed} of 6 sets of rounds")
    expect(not fit(torch.full_like(h, 1.3), a, cap).identified, "with one value of H any b1 will do: its interval must hold 0 or be infinite")
    odd = torch.zeros_like(a)
    odd[rng.randrange(400)] = 1
    expect(not fit(h, odd, torch.full_like(cap, 15)).identified, "one accepted draft in 400 rounds decides no slope: with fewer than 30 rounds "
           "between 0 and their cap the interval must be infinite")  # fmt: skip


@worth("fit_entropy_law", 1, "rounds that cannot be fitted")
def fit_refuses(fit, rng):
    must_refuse(lambda: fit(torch.tensor([0.1, 0.2]), torch.tensor([1, 2])), "a fit of two rounds")
    must_refuse(lambda: fit(torch.rand(5), torch.ones(4)), "5 entropies beside 4 lengths")


# ---- the variants: signature and docstring, then the tests ----


def grow_tree_capped(log_q: Tensor, root: int, budget: int, caps: list[int], branch: int = 8) -> CandidateTree:
    """`grow_tree` with a cap on every depth: at most caps[d - 1] nodes at depth d, and none deeper than len(caps).

    Go through the prefixes best first. Take each one whose parent was taken (the root always is) and whose depth has room, until
    `budget` nodes are taken or no prefix is left. A verify pass that was compiled for one shape wants such trees. With
    large caps it is the plain limit of depth, for an answer that has only len(caps) tokens to go.

    Args: log_q, root, budget and branch as in `grow_tree`; caps may be shorter or longer than log_q and may hold zeros.

    Worked example: as in `grow_tree`, but depth 1 is full after one node
    >>> tree = grow_tree_capped(torch.tensor([[0.6, 0.4], [0.9, 0.1]]).log(), root=7, budget=4, caps=[1, 5])
    >>> tree.tokens, tree.parents
    ([7, 0, 0, 1], [-1, 0, 1, 1])
    """
    raise NotImplementedError


@worth("grow_tree_capped", 12, "against going through every prefix")
def capped_is_the_rule(grow, rng):
    for turn in range(12):
        log_q, branch, budget = marginals(rng, rng.randint(3, 4), 5), rng.randint(2, 5), rng.randint(4, 16)
        caps = [99] * rng.randint(1, 3) if turn < 4 else [rng.randint(1, 3), rng.randint(1, 4), rng.choice([0, 1, 6]), 4, 4][: rng.randint(1, 5)]
        room, taken = dict(enumerate(caps, start=1)), {(): 0.0}
        for score, prefix in every_prefix(log_q, branch):
            if len(taken) <= budget and prefix[:-1] in taken and room.get(len(prefix), 0):
                taken[prefix] = score
                room[len(prefix)] -= 1
        case = f"{len(log_q)} offsets, budget {budget}, branch {branch}, caps {caps}"
        tree = grow(log_q.clone(), 9, budget, list(caps), branch)
        for depth in range(1, max(tree.depths) + 1):
            cap, yours = dict(enumerate(caps, start=1)).get(depth, 0), tree.depths.count(depth)
            expect(yours <= cap, f"{case}: at most {cap} nodes may stand at depth {depth}; yours has {yours}")
        compare_tree(tree, [(score, prefix) for prefix, score in taken.items() if prefix], log_q, case)


def packed_mask(cached: tuple[int, int], parents: tuple[list[int], list[int]]) -> tuple[Tensor, Tensor]:
    """Two prompts verified in one pass, their trees laid one behind the other: (mask, positions).

    Rows are the nodes of the first tree, then those of the second: R = len(parents[0]) + len(parents[1]). Columns are the first
    prompt's cached tokens, the second's, then the R nodes in the order of the rows. A node sees all cached tokens of its own
    prompt, its own ancestors and itself, and nothing of the other prompt. Its position is what it would be alone: cached
    tokens stand at 0 ... cached - 1, node 0 comes next, every depth adds one.

    Returns: mask [R, cached[0] + cached[1] + R], bool; positions [R], int64.

    Worked example: rows 2 and 3 are node 2 of the first tree and node 0 of the second
    >>> mask, positions = packed_mask(cached=(2, 1), parents=([-1, 0, 0], [-1, 0]))
    >>> mask.int().tolist()[2:4]
    [[1, 1, 0, 1, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0, 1, 0]]
    >>> positions.tolist()
    [2, 3, 3, 1, 2]
    """
    raise NotImplementedError


def two_prompts(rng: random.Random):
    for sizes in ((0, 0), (1, 2), (3, 0), (2, 4), (9, 6)):
        yield (rng.randint(0, 5), rng.randint(0, 5)), tuple(random_tree(rng, n).parents for n in sizes)


@worth("packed_mask", 8, "who sees whom")
def packed_rows(pack, rng):
    for cached, parents in two_prompts(rng):
        rows = []
        for which, tree in enumerate(parents):
            start, node_0 = which * cached[0], sum(cached) + which * len(parents[0])
            rows += [{*range(start, start + cached[which]), *(node_0 + j for j in climb(tree, i))} for i in range(len(tree))]
        compare_mask(pack(cached, parents)[0], rows, sum(cached) + len(rows), f"cached {cached}, parents {parents}")


@worth("packed_mask", 4, "positions")
def packed_positions(pack, rng):
    for cached, parents in two_prompts(rng):
        must = [cached[which] + len(climb(tree, i)) - 1 for which, tree in enumerate(parents) for i in range(len(tree))]
        yours = pack(cached, parents)[1]
        expect(isinstance(yours, Tensor) and yours.dtype == torch.int64, f"positions must be int64 [{len(must)}]; yours is {kind(yours)}")
        expect(yours.tolist() == must, f"cached {cached}, parents {parents}: positions are cached + depth, {must}; yours {yours.tolist()}")


def grow_tree_by_cost(log_q: Tensor, root: int, seconds: list[float], branch: int = 8) -> CandidateTree:
    """The best-first tree of the size that pays best on a measured cost curve.

    seconds[n] is the measured time of one round with n drafted nodes, n = 0 ... len(seconds) - 1. If the marginals are right, a node
    is accepted with the probability of its path, so a round with N nodes commits on average

        1 + sum over its nodes of exp(log_probs)        tokens in seconds[N].

    Returns `grow_tree(log_q, root, N, branch)` for the N whose ratio is largest. A measured curve has steps, so the ratio may fall and
    rise again. A size counts only if there are that many prefixes of nonzero probability.

    Worked example: (1 + 0.6 + 0.54) / 1.2 is the best of four ratios
    >>> len(grow_tree_by_cost(torch.tensor([[0.6, 0.4], [0.9, 0.1]]).log(), root=7, seconds=[1.0, 1.1, 1.2, 2.0]))
    2
    """
    raise NotImplementedError


@worth("grow_tree_by_cost", 16, "against the ratio of every size")
def cost_decides_the_size(grow, rng):
    for _ in range(12):
        log_q, branch, step = marginals(rng, 3, 4), rng.randint(1, 4), rng.choice([2, 4, 8])
        base, rise = rng.uniform(0.5, 1), rng.uniform(0.01, 0.6)
        seconds = [base + rise * math.ceil(n / step) + rng.uniform(0, 0.02) for n in range(rng.choice([3, 9, 25]))]
        prefixes = every_prefix(log_q, branch)
        tokens = [1 + sum(math.exp(score) for score, _ in prefixes[:n]) for n in range(len(prefixes) + 1)]
        ratios = [t / s for t, s in zip(tokens, seconds)]
        best = max(range(len(ratios)), key=ratios.__getitem__)
        tree, case = grow(log_q.clone(), 9, list(seconds), branch), f"seconds {[round(s, 2) for s in seconds]}, branch {branch}"
        n = len(tree)
        expect(n < len(ratios), f"{case}: a tree can have 0 to {len(ratios) - 1} nodes here; yours has {n}")
        expect(ratios[n] > ratios[best] - 1e-6, f"{case}: N = {best} brings {tokens[best]:.3f} tokens in {seconds[best]:.3f} s, {ratios[best]:.3f} a "
               f"second; yours takes N = {n} and {ratios[n]:.3f}")  # fmt: skip
        compare_tree(tree, prefixes[:n], log_q, case)
