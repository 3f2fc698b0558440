"""The course assignment: cut the blanks out of the source, and grade what comes back.

    python tests/assignment.py blanks --out student.py    signature, docstring and worked example of every blank; no bodies
    python tests/assignment.py grade student.py           points and a lesson per blank (a notebook will do too)
                                                          --json for a grading script, --seed N for fresh instances
    python tests/assignment.py grade glance.py            the reference takes the same tests as everyone else

Six blanks are functions of glance.py, an open answer key; three variants stand in assignment_checks.py without an answer, with
the tests of all nine. In a notebook, `check("ancestor_mask", ancestor_mask)` runs the same tests.

Accidents (an endless loop, an exception, a flood of output, a process that ends itself) cost the blank they happen in and no
other. This is no guard against malice: a student's file is code, and it runs with your rights.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import io
import json
import os
import queue
import random
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
import types
from dataclasses import fields
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from assignment_checks import CHECKS, Wrong  # noqa: E402
from glance import CandidateTree, EntropyLaw  # noqa: E402

REFERENCE = ["ancestor_mask", "grow_tree", "accept_greedy", "accept_sampled", "block_loss_weights", "fit_entropy_law"]
VARIANTS = ["grow_tree_capped", "packed_mask", "grow_tree_by_cost"]
SHARED = {"accept_greedy": "walk", "accept_sampled": "walk"}  # a helper that is blank with them: its docstring is quoted, its body is not

# ---------------------------------------------------------------------------------------------------------------------
# Blanks
# ---------------------------------------------------------------------------------------------------------------------

HEADER = f'''"""The blanks. Put your own lines in the place of each `raise`, then: python tests/assignment.py grade FILE

The worked examples are doctests: in the repository's folder, `python -m doctest FILE` is silent once all of them come out.
"""

from __future__ import annotations

import heapq
import math

import torch
from torch import Tensor

# Yours to use, and to read in glance.py:
#   CandidateTree({", ".join(f.name for f in fields(CandidateTree))}), with empty(root), add(parent, token, log_prob), children() and len()
#   EntropyLaw({", ".join(f.name for f in fields(EntropyLaw))}), with expected_accepted and r2_on_deciles
from glance import CandidateTree, EntropyLaw, expected_accepted, r2_on_deciles
'''

EXAMPLES = {
    "ancestor_mask": """nodes 1 and 2 are children of 0, node 3 is a child of 1
        >>> ancestor_mask([-1, 0, 0, 1]).int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]""",
    "grow_tree": """0.54 = 0.6 x 0.9; of equally likely words the lowest ids come first
        >>> tree = grow_tree(torch.tensor([[0.6, 0.4], [0.9, 0.1]]).log(), root=7, budget=4)
        >>> tree.tokens, tree.parents, tree.depths
        ([7, 0, 0, 1, 0], [-1, 0, 1, 0, 3], [0, 1, 2, 1, 2])
        >>> [round(math.exp(x), 2) for x in tree.log_probs]
        [1.0, 0.6, 0.54, 0.4, 0.36]
        >>> grow_tree(torch.zeros(1, 9), root=7, budget=9, branch=3).tokens
        [7, 0, 1, 2]""",
    "accept_greedy": """it says 1 after node 0, 2 after node 1, 0 after node 2 and 4 after node 3
        >>> tree = CandidateTree(tokens=[5, 1, 2, 2], parents=[-1, 0, 0, 1], depths=[0, 1, 1, 2], log_probs=[0.0, -0.5, -1.0, -1.5])
        >>> accept_greedy(tree, torch.eye(6)[[1, 2, 0, 4]])
        ([1, 3], 4)""",
    "accept_sampled": """with a law that is certain, a draw is no surprise
        >>> tree = CandidateTree(tokens=[5, 1, 2, 2], parents=[-1, 0, 0, 1], depths=[0, 1, 1, 2], log_probs=[0.0, -0.5, -1.0, -1.5])
        >>> accept_sampled(tree, torch.eye(6)[[2, 2, 3, 4]], torch.Generator().manual_seed(0))
        ([2], 3)""",
    "block_loss_weights": """
        >>> [round(w, 4) for w in block_loss_weights(3, gamma=2.0).tolist()]
        [1.0, 0.6065, 0.3679]""",
    "fit_entropy_law": """rounds without noise, at most six drafts each
        >>> h = torch.linspace(0, 3, 400)
        >>> law = fit_entropy_law(h, expected_accepted(h, 1.5, 0.8, cap=6), cap=6)
        >>> round(law.b0, 1), round(law.b1, 1)
        (1.5, 0.8)""",
}


@functools.cache
def parsed(name: str) -> tuple[str, str]:
    """Signature and docstring of a top-level function, from the text of its file."""
    text = (ROOT / ("tests/assignment_checks.py" if name in VARIANTS else "glance.py")).read_text(encoding="utf-8")
    node = next(node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name)
    return "\n".join(text.splitlines()[node.lineno - 1 : node.body[0].lineno - 1]), ast.get_docstring(node)


def blank(name: str) -> str:
    """One blank as source: everything of the function but its body."""
    head, docstring = parsed(name)
    if name in SHARED:
        docstring += "\n\nThe walk:\n" + parsed(SHARED[name])[1]
    if name in EXAMPLES:
        title, _, example = EXAMPLES[name].partition("\n")
        docstring += f"\n\nWorked example: {title}".rstrip() + "\n" + textwrap.dedent(example)
    return f'{head}\n    """{textwrap.indent(docstring, "    ").lstrip()}\n    """\n    raise NotImplementedError("{name} is blank")\n'


def blanks() -> str:
    """The student file."""
    variants = "# The variants: no answer to these stands in glance.py. They may call your own blanks, or the reference's.\n"
    return "\n\n".join([HEADER, *map(blank, REFERENCE), variants, *map(blank, VARIANTS)])


def show(name: str) -> None:
    """For the notebook: a blank as the source has it today."""
    print(blank(name).rpartition("    raise")[0].rstrip())


# ---------------------------------------------------------------------------------------------------------------------
# Judging one blank
# ---------------------------------------------------------------------------------------------------------------------


class Flood(BaseException):
    """More output than anyone will read. Not an Exception, so that a blank which catches those is stopped too."""


class Sink(io.TextIOBase):
    """Swallows what a blank prints, up to a hundred thousand characters."""

    seen = 0

    def write(self, text: str) -> int:
        self.seen += len(text)
        if self.seen > 100_000:
            raise Flood("stopped after 100 000 characters of output; is there a print in a loop?")
        return len(text)


NOT_YET = "not attempted yet"


def run(test, function, rng: random.Random) -> str:
    """What a test has to say: nothing if it passes."""
    if function is None:
        return NOT_YET
    try:
        with contextlib.redirect_stdout(Sink()), contextlib.redirect_stderr(Sink()):
            test(function, rng)
        return ""
    except NotImplementedError:
        return NOT_YET
    except Wrong as lesson:
        return str(lesson)[:1000]
    except (Exception, SystemExit, Flood) as error:
        return trouble(error, getattr(getattr(function, "__code__", None), "co_filename", None))


def trouble(error: BaseException, file: str | None) -> str:
    """An exception, and the line of the student's own file that it came through last."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{type(error).__name__}: {error}"[:1000] + (f" (line {lines[-1]})" if lines else "")


def grade_blank(name: str, function, seed: int = 0) -> dict:
    """Every test of a blank, on instances made from the seed."""
    return record(name, [run(test, function, random.Random(f"{seed} {name} {title}")) for _, title, test in CHECKS[name]])


def record(name: str, messages: list[str]) -> dict:
    checks = [{"title": title, "points": 0 if message else points, "of": points, "message": message}
              for (points, title, _), message in zip(CHECKS[name], messages)]  # fmt: skip
    attempted = any(message != NOT_YET for message in messages)
    return {"blank": name, "points": sum(c["points"] for c in checks), "of": sum(c["of"] for c in checks), "attempted": attempted, "checks": checks}


def report(r: dict) -> str:
    """One line for a blank, and one lesson if it lost points: the first is often the cause of the others."""
    if not r["attempted"]:
        return f"{r['blank']:20s}  - / {r['of']:2d}   {NOT_YET}"
    lesson = next((f"   {c['title']}\n      {c['message']}" for c in r["checks"] if c["message"]), "")
    return f"{r['blank']:20s} {r['points']:2d} / {r['of']:2d}{lesson}"


def check(name: str, function, seed: int = 0) -> None:
    """For notebooks. An endless loop is stopped like that of any cell: interrupt the kernel."""
    print(report(grade_blank(name, function, seed)))


# ---------------------------------------------------------------------------------------------------------------------
# Judging a file
# ---------------------------------------------------------------------------------------------------------------------


def statements(cell: str) -> list[ast.stmt]:
    """A notebook cell's statements; only if it is no Python as it stands, without its magics. Raises SyntaxError if that is none either."""
    try:
        return ast.parse(cell).body
    except SyntaxError:
        return ast.parse("\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in cell.splitlines())).body


def source(file: str) -> str:
    """The code of a file to be judged; of a notebook what it defines: imports, functions, classes, and assignments that work.

    Cells that show, try or time something are not run, and a cell that is no Python costs its own blank and no other.
    """
    text = Path(file).read_text(encoding="utf-8")
    if not file.endswith(".ipynb"):
        return text
    cells, kept = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"], []
    for cell in cells:
        with contextlib.suppress(SyntaxError):
            for node in statements(cell):
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    kept.append(ast.unparse(node))
                elif isinstance(node, (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)):
                    kept.append(f"try:\n{textwrap.indent(ast.unparse(node), '    ')}\nexcept Exception:\n    pass")
    return "\n\n".join(kept)


def worker(file: str, names: list[str], seed: int, limit: float) -> None:
    """In a process of its own: import the file, say so, then one line of JSON a blank. What the file itself writes goes nowhere."""
    results, nowhere = os.fdopen(os.dup(1), "w"), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    torch.set_num_threads(1)

    def say(word) -> None:
        print(json.dumps(word), file=results, flush=True)
        if hasattr(signal, "setitimer"):  # ends this process after so many seconds of work, however busy the machine is
            signal.setitimer(signal.ITIMER_PROF, limit)

    say("begin")
    sys.path.insert(0, str(Path(file).parent))
    module = sys.modules["graded"] = types.ModuleType("graded")
    try:
        exec(compile(source(file), file, "exec"), module.__dict__)
    except BaseException as error:
        return say(f"the file cannot be imported: {trouble(error, file)}")
    say("ready")
    for name in names:
        say(grade_blank(name, getattr(module, name, None), seed))


def pump(stream, words: queue.Queue) -> None:
    for line in stream:
        words.put(json.loads(line))
    words.put(None)


def hear(process: subprocess.Popen, words: queue.Queue, limit: float):
    """The worker's next word, or what became of the worker. The long patience is for loops that sleep and for systems without timers."""
    with contextlib.suppress(queue.Empty):
        word = words.get(timeout=limit + 100)
        if word is not None:
            return word
        if process.wait() != -getattr(signal, "SIGPROF", 999):
            return "the process ended in the middle: something called exit, or ran out of memory"
    return f"stopped after {limit:g} s: an endless loop?"


def grade(file: str | Path, seed: int = 0, limit: float = 20.0) -> list[dict]:
    """A record for every blank. One worker judges them in turn; when it hangs or dies, that blank is lost and a new worker goes on."""
    records, waiting = [], [*REFERENCE, *VARIANTS]
    while waiting:
        command = [sys.executable, __file__, "worker", str(Path(file).resolve()), "--seed", str(seed), "--limit", str(limit), "--names", *waiting]
        process, words = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True), queue.Queue()
        threading.Thread(target=pump, args=(process.stdout, words), daemon=True).start()
        word = hear(process, words, limit)
        if word == "begin":
            word = hear(process, words, limit)
        if word != "ready":  # nothing in this file can be judged
            records, waiting = records + [record(name, [word] * len(CHECKS[name])) for name in waiting], []
        while waiting:
            word, name = hear(process, words, limit), waiting.pop(0)
            records.append(word if isinstance(word, dict) else record(name, [word] * len(CHECKS[name])))
            if not isinstance(word, dict):
                break
        process.kill()
        process.wait()
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description="Cut the blanks out of the source, or grade a file.")
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("blanks", help="write the student file")
    make.add_argument("--out", type=Path, required=True)
    for name in ("grade", "worker"):
        judge = commands.add_parser(name, help="points per blank" if name == "grade" else "(what `grade` starts)")
        judge.add_argument("file", type=Path)
        judge.add_argument("--seed", type=int, default=0, help="other seeds give other instances")
        judge.add_argument("--limit", type=float, default=20.0, help="seconds of work that one blank may take")
        judge.add_argument("--json", action="store_true", help="print everything as JSON")
        judge.add_argument("--names", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()

    if options.command == "blanks":
        if options.out.exists() and options.out.read_text(encoding="utf-8") not in ("", blanks()):
            parser.exit(2, f"{options.out} exists and is not the blank file: it may be someone's work, so it stays\n")
        if not options.out.absolute().parent.is_dir():
            parser.exit(2, f"{options.out} cannot be written: its folder does not exist\n")
        options.out.write_text(blanks(), encoding="utf-8")
        print(f"{len(CHECKS)} blanks written to {options.out}")
        return 0
    if not options.file.is_file():
        parser.exit(2, f"there is no file {options.file}\n")
    if options.command == "worker":
        worker(str(options.file), options.names, options.seed, options.limit)
        return 0
    records = grade(options.file, options.seed, options.limit)
    sums = {part: {key: sum(r[key] for r in records if r["blank"] in names) for key in ("points", "of")}
            for part, names in (("reference", REFERENCE), ("variants", VARIANTS))}  # fmt: skip
    if options.json:
        print(json.dumps({"file": str(options.file), "seed": options.seed, **sums, "blanks": records}, indent=2))
    else:
        print("\n".join(map(report, records)))
        print(f"{options.file}, seed {options.seed}: " + ", ".join(f"{part} {s['points']} / {s['of']}" for part, s in sums.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
