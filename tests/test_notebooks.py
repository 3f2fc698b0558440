"""The notebooks run from a clean kernel, at a small size (GLANCE_FAST=1), and what is committed of them is fit to read."""

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
WALKTHROUGHS = sorted(FOLDER.glob("[0-9]_*.ipynb"))
ALL = [*WALKTHROUGHS, FOLDER / "assignment.ipynb"]
by_name = pytest.mark.parametrize("file", ALL, ids=lambda file: file.stem)
walkthrough = pytest.mark.parametrize("file", WALKTHROUGHS, ids=lambda file: file.stem)


def cells(file, kind="code"):
    return [cell for cell in json.loads(file.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def printed(cell):
    return "".join("".join(output.get("text", "")) for output in cell["outputs"])


def test_there_are_six_and_they_lead_on():
    """1 to 6 in order, each with a way to the next; the last leads to the assignment."""
    assert [file.stem[0] for file in WALKTHROUGHS] == list("123456")
    for file, following in zip(ALL, ALL[1:]):
        last = "".join(cells(file, "markdown")[-1]["source"])
        assert f"({following.name})" in last, f"{file.name} does not lead to {following.name}"


@by_name
def test_notebook_runs(file, monkeypatch):
    """Every cell of every notebook, in a kernel of its own; a failed assertion in a cell fails here."""
    for module in ("nbclient", "nbformat", "ipykernel", "matplotlib"):
        pytest.importorskip(module, reason="needs notebooks/requirements.txt")
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("GLANCE_FAST", "1")
    notebook = nbformat.read(file, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(FOLDER)}}).execute()
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip())


@walkthrough
def test_cells_are_short_and_words_lead(file):
    """No cell over eighteen lines or 130 columns, a heading first, and a plot is never far from a word of explanation."""
    notebook = json.loads(file.read_text(encoding="utf-8"))["cells"]
    assert notebook[0]["cell_type"] == "markdown" and "".join(notebook[0]["source"]).startswith(f"# {file.stem[0]}")
    for cell in cells(file):
        lines = "".join(cell["source"]).splitlines()
        assert len(lines) <= 18 and max(map(len, lines)) <= 130, lines[0]
    kinds = "".join(cell["cell_type"][0] for cell in notebook)
    assert "ccccc" not in kinds


@walkthrough
def test_first_cell_says_what_it_runs_on(file):
    """Versions and device, and on a bare machine what to do."""
    first = cells(file)[0]
    assert re.search(r"python 3\.\S+  torch \S+  transformers \S+  device \w+", printed(first))
    assert "GLANCE_FAST" in "".join(first["source"]) and "%pip install" in "".join(first["source"])


@walkthrough
def test_outputs_are_committed_and_clean(file):
    """Executed in order from the top at full size, with pictures, without errors, warnings or paths of the machine that ran it."""
    code = cells(file)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert all(output["output_type"] != "error" and output.get("name") != "stderr" for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users|usr|mnt)/", text) and len(text) < 600_000


def test_pictures_beside_the_notebooks():
    """What markdown shows is there; the film of a decode moves and is small."""
    from PIL import Image

    for file in WALKTHROUGHS:
        for name in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", file.read_text(encoding="utf-8")):
            assert (FOLDER / name).is_file()
    film = FOLDER / "decode.gif"
    assert film.stat().st_size < 1_000_000 and Image.open(film).n_frames > 5
