"""Who grades the grader: the reference gets every point, a blank gets none, and each real mistake is told what it is."""

import ast
import doctest
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import assignment
import glance
from assignment import REFERENCE, VARIANTS, blank, blanks, check, grade_blank, parsed
from assignment_checks import CHECKS, climb, every_prefix
from glance import CandidateTree, accept_greedy, accept_sampled, ancestor_mask, block_loss_weights
from glance import expected_accepted, fit_entropy_law, grow_tree, walk


@pytest.fixture(autouse=True)
def one_thread():
    """These are thousands of tiny operations, as in the grader's own worker."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- the variants, solved the slow way ----


def tree_of(prefixes, root):
    """Prefixes, parents first, as a tree."""
    tree, node = CandidateTree.empty(root), {(): 0}
    for score, prefix in prefixes:
        node[prefix] = tree.add(node[prefix[:-1]], prefix[-1], score)
    return tree


def grow_tree_capped(log_q, root, budget, caps, branch=8, among=None):
    taken = []
    for score, prefix in every_prefix(log_q, branch)[:among]:
        depth = len(prefix)
        parent_stands = depth == 1 or prefix[:-1] in [p for _, p in taken]
        if len(taken) < budget and parent_stands and depth <= len(caps) and sum(len(p) == depth for _, p in taken) < caps[depth - 1]:
            taken.append((score, prefix))
    return tree_of(taken, root)


def packed_mask(cached, parents):
    owner = [0] * cached[0] + [1] * cached[1] + [0] * len(parents[0]) + [1] * len(parents[1])  # of each column
    place = [None] * sum(cached) + [i for tree in parents for i in range(len(tree))]
    rows = list(zip(owner, place))[sum(cached) :]
    seen = [[who == w and (j is None or j in climb(parents[w], i)) for who, j in zip(owner, place)] for w, i in rows]
    return torch.tensor(seen), torch.tensor([cached[w] + len(climb(parents[w], i)) - 1 for w, i in rows])


def tokens_per_second(log_q, seconds, branch, bonus=1):
    prefixes = every_prefix(log_q, branch)
    return [(bonus + sum(math.exp(s) for s, _ in prefixes[:n])) / seconds[n] for n in range(min(len(prefixes), len(seconds) - 1) + 1)]


def grow_tree_by_cost(log_q, root, seconds, branch=8):
    ratios = tokens_per_second(log_q, seconds, branch)
    return tree_of(every_prefix(log_q, branch)[: ratios.index(max(ratios))], root)


ANSWERS = {**{name: getattr(glance, name) for name in REFERENCE},
           "grow_tree_capped": grow_tree_capped, "packed_mask": packed_mask, "grow_tree_by_cost": grow_tree_by_cost}  # fmt: skip

# ---- mistakes: (function, what its lesson must say). The parameters' names are those of the blank ----


def sibling_visible(parents):
    p = torch.tensor(parents)
    return ancestor_mask(parents) | (p[:, None] == p)


def parent_only(parents):
    mask = torch.eye(len(parents), dtype=torch.bool)
    for i, parent in enumerate(parents[1:], start=1):
        mask[i, parent] = True
    return mask


def root_forgotten(parents):
    mask = ancestor_mask(parents)
    mask[1:, 0] = False
    return mask


def additive_mask(parents):
    return torch.where(ancestor_mask(parents), 0.0, -math.inf)


MASKS = [
    (parent_only, "misses"),
    (sibling_visible, "row 1 must see exactly {0, 1}; yours also sees 2"),
    (root_forgotten, "row 1 must see exactly {0, 1}; yours misses 0"),
    (additive_mask, "must be bool [4, 4]; yours is float32 [4, 4]"),
    (lambda parents: ancestor_mask(parents) & ~torch.eye(len(parents), dtype=torch.bool), "row 0 must see exactly {0}; yours misses 0"),
    (lambda parents: ancestor_mask(parents).T, "row 0 must see exactly {0}; yours also sees 1, 2, 3"),
    (lambda parents: torch.ones(len(parents), len(parents)).tril().bool(), "row 2 must see exactly {0, 2}; yours also sees 1"),
]


def best_first(log_q, root, budget, branch=8, join=lambda path, step: path + step):
    """A plain best-first search; what `join` makes of a path's score and a step's is how candidates are compared."""
    tree, frontier, scores = CandidateTree.empty(root), [], [0.0]
    q, node = log_q.tolist(), 0
    while len(tree) < budget:
        if (offset := tree.depths[node]) < len(q):
            best = sorted(range(len(q[0])), key=lambda t: (-q[offset][t], t))[:branch]
            frontier += [(-join(scores[node], q[offset][t]), node, t, q[offset][t]) for t in best if q[offset][t] > -math.inf]
        if not frontier:
            break
        frontier.sort()
        score, parent, token, step = frontier.pop(0)
        node = tree.add(parent, token, tree.log_probs[parent] + step)
        scores.append(-score)
    return tree


def probabilities_added(log_q, root, budget, branch=8):
    return best_first(log_q, root, budget, branch, join=lambda path, step: path + math.exp(step))


def level_by_level(log_q, root, budget, branch=8):
    return best_first(log_q, root, budget, branch, join=lambda path, step: path + step - 100)


def unstable_ties(log_q, root, budget, branch=8):
    tree = grow_tree(log_q.flip(1), root, budget, branch)  # of equals, the highest id first
    return replace(tree, tokens=[root] + [log_q.shape[1] - 1 - t for t in tree.tokens[1:]])


def row_off_by_one(log_q, root, budget, branch=8):
    return grow_tree(torch.cat([log_q[:1], log_q[:-1]]), root, budget, branch)


def probability_of_the_last_token(log_q, root, budget, branch=8):
    tree = grow_tree(log_q, root, budget, branch)
    return replace(tree, log_probs=[p - tree.log_probs[max(parent, 0)] for p, parent in zip(tree.log_probs, tree.parents)])


TREES = [
    (probabilities_added, "product of its offsets' marginals"),
    (level_by_level, "node 2 must be the prefix [0, 0] of probability 0.5400"),
    (unstable_ties, "2 equally likely words, branch 8: the lowest ids in order, [0, 1]; yours [1, 0]"),
    (row_off_by_one, "node 2 must be the prefix [0, 0]"),
    (probability_of_the_last_token, "log_probs[2] is that of the whole path, -0.616; yours -0.105"),
    (lambda log_q, root, budget, branch=8: grow_tree(log_q, root, min(budget, len(log_q)), 1), "the tree must have 4 drafted nodes; yours has 2"),
    (lambda log_q, root, budget, branch=8: grow_tree(log_q, root, budget, 99), "drafted nodes; yours has"),
    (lambda log_q, root, budget, branch=8: grow_tree(log_q.clamp(min=-99), root, budget, branch), "a word of probability 0"),
    (lambda log_q, root, budget, branch=8: grow_tree(log_q.nan_to_num(-1.0, neginf=-math.inf), root, budget, branch), "NaN among the marginals"),
    (lambda log_q, root, budget, branch=8: grow_tree(log_q, root, max(budget, 0), max(branch, 1)), "budget -1 must raise ValueError"),
]


def bonus_dropped(tree, logits):
    path, bonus = accept_greedy(tree, logits)
    return path, tree.tokens[path[-1]] if path else bonus


def no_bonus_after_a_leaf(tree, logits):
    path, bonus = accept_greedy(tree, logits)
    return path, bonus if path and path[-1] in tree.parents else None


def parent_ignored(tree, logits):
    best, node, path = logits.argmax(dim=-1).tolist(), 0, []
    while best[node] in tree.tokens[node + 1 :]:
        node = tree.tokens.index(best[node], node + 1)
        path.append(node)
    return path, best[node]


def first_child_only(tree, logits):
    first = [i for i, parent in enumerate(tree.parents) if i == 0 or parent not in tree.parents[:i]]
    return walk(tree, lambda node: t if tree.children().get((node, t := int(logits[node].argmax())), 0) in [0, *first] else -1)


def tokens_for_nodes(tree, logits):
    path, bonus = accept_greedy(tree, logits)
    return [tree.tokens[i] for i in path], bonus


WALKS = [
    (bonus_dropped, "the bonus is what it says after node"),
    (no_bonus_after_a_leaf, "return (list of nodes, bonus token as int)"),
    (parent_ignored, "the path must be"),
    (first_child_only, "the path must be"),
    (lambda tree, logits: accept_greedy(tree, logits.roll(1, 0)), "the path must be [1, 3]; yours is []"),
    (lambda tree, logits: (accept_greedy(tree, logits)[0], int(logits[0].argmax())), "yours is 1, what it says after node 0"),
    (tokens_for_nodes, "a path holds node numbers"),
]


def draw(law, generator):
    return int(torch.multinomial(law, 1, generator=generator))


def bonus_redrawn(tree, probs, generator):
    path, _ = accept_sampled(tree, probs, generator)
    return path, draw(probs[path[-1] if path else 0], generator)


def drawn_before_the_walk(tree, probs, generator):
    drawn = torch.multinomial(probs, 1, generator=generator).flatten().tolist()
    return walk(tree, drawn.__getitem__)


def drawn_from_the_drafted_only(tree, probs, generator):
    drafted = torch.zeros_like(probs)
    for node, token in tree.children():
        drafted[node, token] = 1
    return accept_sampled(tree, torch.where(drafted.sum(1, keepdim=True) > 0, probs * drafted + 1e-9, probs), generator)


def second_draw_from_the_rest(tree, probs, generator):
    """The habit of rejection sampling: the law is right, but one draw too many is spent."""
    path, _ = accept_sampled(tree, probs, generator)
    rest = probs[path[-1] if path else 0].clone()
    rest[[token for node, token in tree.children() if node == (path[-1] if path else 0)]] = 0
    return path, draw(rest, generator)


DRAWS = [
    (bonus_redrawn, "instead of drawing again"),
    (drawn_before_the_walk, "Draw where the walk stands, not before it starts"),
    (drawn_from_the_drafted_only, "the target's law says"),
    (second_draw_from_the_rest, "must cost the draws that they cost one at a time"),
    (lambda tree, probs, generator: accept_greedy(tree, probs), "the target's law says"),
    (lambda tree, probs, generator: accept_sampled(tree, probs, generator.manual_seed(0)), "it is seeded again inside"),
    (lambda tree, probs, generator: accept_sampled(tree, probs, None), "torch's global generator moved"),
    (lambda tree, probs, generator: accept_sampled(tree, probs**0.7, generator), "the target's law says"),  # temperature twice
]

WEIGHTS = [
    (lambda offsets, gamma: torch.exp(-torch.arange(1, offsets + 1) / gamma), "w_1 = exp(-(1 - 1) / gamma) = 1; yours is 0.8669"),
    (lambda offsets, gamma: block_loss_weights(offsets, gamma) / block_loss_weights(offsets, gamma).sum(), "w_1 = "),
    (lambda offsets, gamma: block_loss_weights(offsets, -gamma), "w_2 must be exp(-(2 - 1)"),
    (lambda offsets, gamma: block_loss_weights(offsets, gamma).double(), "return float32 [15]; yours is float64 [15]"),
    (lambda offsets, gamma: block_loss_weights(offsets + 1, gamma), "return float32 [15]; yours is float32 [16]"),
]


def interval_from_the_variance(entropy, accepted, cap=15):
    law = fit_entropy_law(entropy, accepted, cap)
    half = 1.96 * ((law.interval[1] - law.b1) / 1.96) ** 2
    return replace(law, interval=(law.b1 - half, law.b1 + half))


def unequal_lengths_cut(entropy, accepted, cap=15):
    n = min(len(entropy), len(accepted))
    return fit_entropy_law(entropy[:n], accepted[:n], cap)


def interval_of_everything(entropy, accepted, cap=15):
    return replace(fit_entropy_law(entropy, accepted, cap), interval=(-math.inf, math.inf))


FITS = [
    (lambda entropy, accepted, cap=15: fit_entropy_law(entropy, accepted, 15), "that is the fit with every cap at 15"),
    (lambda entropy, accepted, cap=15: fit_entropy_law(entropy / math.log(2), accepted, cap), "planted b0"),  # bits, not nats
    (lambda entropy, accepted, cap=15: fit_entropy_law(-entropy, accepted, cap), "planted b0"),  # sign of the slope
    (interval_from_the_variance, "it is too narrow"),
    (interval_of_everything, "your interval runs from -inf to inf"),
    (unequal_lengths_cut, "5 entropies beside 4 lengths must raise ValueError"),
]


def pruned_afterwards(log_q, root, budget, caps, branch=8):
    """Grown without caps, then cut: the nodes cut off have used up the budget."""
    return grow_tree_capped(log_q, root, budget, caps, branch, among=budget)


def positions_run_on(cached, parents):
    mask, positions = packed_mask(cached, parents)
    positions[len(parents[0]) :] += cached[0] + len(parents[0])
    return mask, positions


def stops_at_the_first_fall(log_q, root, seconds, branch=8):
    ratios = tokens_per_second(log_q, seconds, branch)
    best = next((n for n in range(len(ratios) - 1) if ratios[n + 1] < ratios[n]), len(ratios) - 1)
    return grow_tree(log_q, root, best, branch)


def bonus_not_counted(log_q, root, seconds, branch=8):
    ratios = tokens_per_second(log_q, seconds, branch, bonus=0)
    return grow_tree(log_q, root, ratios.index(max(ratios)), branch)


def widths_ignored(log_q, root, budget, caps, branch=8):
    return grow_tree(log_q[: len(caps)], root, budget, branch)


def one_depth_too_deep(log_q, root, budget, caps, branch=8):
    return grow_tree_capped(log_q, root, budget, [*caps, 99], branch)


def largest_tree(log_q, root, seconds, branch=8):
    return grow_tree(log_q, root, len(seconds) - 1, branch)


VARIANT_MISTAKES = [
    ("grow_tree_capped", widths_ignored, "nodes may stand at depth"),
    ("grow_tree_capped", one_depth_too_deep, "at most 0 nodes may stand at depth"),
    ("grow_tree_capped", pruned_afterwards, "drafted nodes; yours has"),
    ("packed_mask", lambda cached, parents: (packed_mask(cached, parents)[0] | True, packed_mask(cached, parents)[1]), "also sees"),
    ("packed_mask", lambda cached, parents: (packed_mask(cached, parents)[0], packed_mask(cached, parents)[1] - 1), "cached + depth"),
    ("packed_mask", positions_run_on, "positions are cached + depth"),
    ("grow_tree_by_cost", stops_at_the_first_fall, "a second; yours takes N ="),
    ("grow_tree_by_cost", bonus_not_counted, "a second; yours takes N ="),
    ("grow_tree_by_cost", largest_tree, "a second; yours takes N ="),
]

MISTAKES = [(name, *mistake) for name, mistakes in zip(REFERENCE, [MASKS, TREES, WALKS, DRAWS, WEIGHTS, FITS]) for mistake in mistakes]
MISTAKES += VARIANT_MISTAKES


# ---- full points, no points, points lost ----


@pytest.mark.parametrize("name", CHECKS)
def test_right_answers_get_every_point(name):
    """The reference, and a brute-force answer to each variant, on three seeds."""
    for seed in range(3 if name != "fit_entropy_law" else 1):
        result = grade_blank(name, ANSWERS[name], seed)
        assert result["points"] == result["of"] and result["attempted"], [c["message"] for c in result["checks"]]


@pytest.mark.parametrize("name", CHECKS)
def test_lazy_answers_get_nothing(name):
    """A blank, a function that is missing, one that returns nothing and one that returns its first argument."""

    def still_blank(*arguments, **named):
        raise NotImplementedError

    for lazy, attempted in ((still_blank, False), (None, False), (lambda *a, **n: None, True), (lambda first, *a, **n: first, True)):
        result = grade_blank(name, lazy)
        assert result["points"] == 0 and result["attempted"] == attempted


@pytest.mark.parametrize("name, mistake, lesson", MISTAKES, ids=[f"{m[0]}-{m[1].__name__.strip('<>')}" for m in MISTAKES])
def test_mistakes_lose_points_and_say_why(name, mistake, lesson):
    """The lesson comes from a test and names what is wrong: it is no stray exception."""
    result = grade_blank(name, mistake)
    assert result["points"] < result["of"]
    assert any(lesson in c["message"] for c in result["checks"]), [c["message"] for c in result["checks"]]
    assert not any("Error: " in c["message"] for c in result["checks"])


def test_every_blank_has_its_mistakes():
    """At least twelve in all and three for each blank; sixty points for the reference's blanks, forty for the variants."""
    assert len(MISTAKES) >= 12 and all(sum(m[0] == name for m in MISTAKES) >= 3 for name in CHECKS)
    assert [sum(points for name in names for points, _, _ in CHECKS[name]) for names in (REFERENCE, VARIANTS)] == [60, 40]


def test_the_seed_makes_the_instances():
    """Equal seeds give equal lessons, other seeds other ones."""
    lessons = [grade_blank("packed_mask", positions_run_on, seed)["checks"][1]["message"] for seed in (0, 0, 1, 2)]
    assert lessons[0] == lessons[1] and len(set(lessons)) == 3


# ---- the blanks ----


def test_blanks_hold_signature_docstring_example_and_no_body():
    """What the source says above each body, word for word; then one `raise`. The walk's body is in no blank."""
    functions = {n.name: n for n in ast.parse(blanks()).body if isinstance(n, ast.FunctionDef)}
    assert list(functions) == REFERENCE + VARIANTS
    for name, node in functions.items():
        signature, docstring = parsed(name)
        assert signature in blanks() and ast.get_docstring(node).startswith(docstring)
        assert [type(statement) for statement in node.body] == [ast.Expr, ast.Raise]


@pytest.mark.parametrize("name", CHECKS)
def test_worked_examples_come_out(name):
    """Each blank has a doctest, and the right answer passes it."""
    docstring = ast.get_docstring(ast.parse(blank(name)).body[0])
    names = {"torch": torch, "math": math, "CandidateTree": CandidateTree, "expected_accepted": expected_accepted, **ANSWERS}
    example = doctest.DocTestParser().get_doctest(docstring, names, name, None, 0)
    assert len(example.examples) and doctest.DocTestRunner().run(example).failed == 0


# ---- the command line: `main` is called here, files are judged in a process of their own ----


@pytest.fixture
def command(monkeypatch, capsys):
    """Run a command line; returns (exit status, what it printed, what it complained of)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["assignment.py", *map(str, arguments)])
        try:
            status = assignment.main()
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return call


def grades(command, file, *options):
    status, printed, _ = command("grade", file, "--json", *options)
    assert status == 0
    return json.loads(printed), {r["blank"]: r for r in json.loads(printed)["blanks"]}


def test_the_reference_gets_full_points():
    """`grade glance.py`, as from a shell: sixty of sixty, and the variants are not attempted."""
    line = [sys.executable, assignment.__file__, "grade", glance.__file__, "--json"]
    result = json.loads(subprocess.run(line, capture_output=True, text=True, check=True).stdout)
    assert result["reference"] == {"points": 60, "of": 60} and result["variants"] == {"points": 0, "of": 40} and result["seed"] == 0
    assert [r["blank"] for r in result["blanks"] if r["attempted"]] == REFERENCE


def test_the_student_file_as_written_gets_none(command, tmp_path):
    """`blanks` writes it, `grade` finds nothing attempted; work in it is never overwritten."""
    student = tmp_path / "student.py"
    for _ in range(2):
        assert command("blanks", "--out", student)[0] == 0 and student.read_text() == blanks()
    _, printed, _ = command("grade", student)
    assert printed.count("not attempted yet") == 9 and "reference 0 / 60, variants 0 / 40" in printed
    student.write_text(blanks() + "# my work\n")
    status, _, complaint = command("blanks", "--out", student)
    assert status == 2 and "someone's work" in complaint and student.read_text().endswith("# my work\n")


HOSTILE = """
import os, sys
from glance import block_loss_weights, grow_tree
print("hello" * 10_000)
def ancestor_mask(parents):
    while True: pass
def accept_greedy(tree, logits):
    while True: print("so far so good")
def accept_sampled(tree, probs, generator):
    os._exit(0)
def fit_entropy_law(entropy, accepted, cap=15): sys.exit(0)
def grow_tree_capped(log_q, root, budget, caps, branch=8):
    return {}["key"]
def packed_mask(cached, parents): return packed_mask(cached, parents)
"""


def test_accidents_cost_their_blank_only(command, tmp_path):
    """An endless loop, a flood, an exit by force, an exit, an exception with its line, a recursion; the two sound blanks keep their points."""
    file = tmp_path / "hostile.py"
    file.write_text(HOSTILE)
    _, r = grades(command, file, "--limit", 4)
    said = {name: r[name]["checks"][0]["message"] for name in r if r[name]["attempted"]}
    assert said.pop("ancestor_mask") == "stopped after 4 s: an endless loop?"
    assert "100 000 characters of output" in said.pop("accept_greedy")
    assert "ended in the middle" in said.pop("accept_sampled")
    assert said.pop("fit_entropy_law").startswith("SystemExit")
    assert said.pop("grow_tree_capped") == "KeyError: 'key' (line 13)"
    assert said.pop("packed_mask").startswith("RecursionError")
    assert set(said) == {"grow_tree", "block_loss_weights"} and all(r[name]["points"] == r[name]["of"] for name in said)
    assert sum(r[name]["points"] for name in r) == 20 and not r["grow_tree_by_cost"]["attempted"]


@pytest.mark.parametrize("text, message", [("def f(:\n", "SyntaxError"), ("import os; os._exit(3)\n", "ended in the middle")])
def test_a_file_that_cannot_be_imported(command, tmp_path, text, message):
    """No points, and every blank says why; the JSON still comes."""
    file = tmp_path / "broken.py"
    file.write_text(text)
    result, r = grades(command, file)
    assert result["reference"]["points"] == 0 and len(r) == 9 and all(message in c["message"] for x in r.values() for c in x["checks"])


def test_a_file_that_is_not_there(command):
    """One line on the error stream, exit status 2."""
    assert command("grade", "nowhere.py") == (2, "", "there is no file nowhere.py\n")


# ---- the notebook ----

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "assignment.ipynb"


def cells(kind):
    return ["".join(c["source"]) for c in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == kind]


def test_the_notebook_asks_for_the_same_blanks():
    """For each blank, in order: its text shown from the source, its signature word for word, and a check of it."""
    code = cells("code")
    shown = [i for i, cell in enumerate(code) if cell.startswith("show(")]
    assert [code[i] for i in shown] == [f'show("{name}")' for name in CHECKS]
    for i, name in zip(shown, CHECKS):
        assert code[i + 1].startswith(parsed(name)[0]) and code[i + 1].rstrip().endswith("raise NotImplementedError")
        assert code[i + 2] == f'check("{name}", {name})'
    assert all(len(cell.splitlines()) < 15 for cell in code)


def test_the_notebook_runs_unfilled(monkeypatch, capsys):
    """Every cell runs as committed; the checks say that nothing was attempted, and raise nothing."""
    monkeypatch.chdir(NOTEBOOK.parent)
    names = {}
    for cell in cells("code"):
        exec(compile(cell, str(NOTEBOOK), "exec"), names)
    assert capsys.readouterr().out.count("not attempted yet") == 9


def test_a_notebook_is_graded_like_a_file(command, tmp_path, monkeypatch):
    """One blank filled in among nine; cells that show or check are left out.

    So is whatever a student tries beside: a magic, a shell line, a call that fails, a cell that is no Python.
    """
    book = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    scratch = ["%matplotlib inline\n!ls\nfactor = 1.0", "block_loss_weights(3, 'seven')", "x = ancestor_mask([0, 0])", "def half(:", "1 / 0"]
    book["cells"] = [{"cell_type": "code", "source": text} for text in scratch] + book["cells"]
    fill = next(c for c in book["cells"] if c["cell_type"] == "code" and "".join(c["source"]).startswith("def block_loss_weights"))
    fill["source"] = ["def block_loss_weights(offsets, gamma):\n", "    return (factor + 7\n", "            % 7) * torch.exp(-torch.arange(offsets) / gamma)"]
    file = tmp_path / "work.ipynb"
    file.write_text(json.dumps(book))
    monkeypatch.chdir(tmp_path)  # an instructor's folder of submissions: glance.py is not in it
    _, r = grades(command, file)
    assert {name: r[name]["points"] for name in r if r[name]["attempted"]} == {"block_loss_weights": 6}


def test_check_prints_points_and_the_lesson(capsys):
    """In a notebook: one line for the blank, and below it the first lesson."""
    check("ancestor_mask", sibling_visible)
    points, lesson = capsys.readouterr().out.splitlines()
    assert points.split()[:4] == ["ancestor_mask", "0", "/", "8"] and "yours also sees 2" in lesson
