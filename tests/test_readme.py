"""What the README says must stay true: its commands parse, its files exist, its line counts count."""

import re
import shlex

import pytest
from conftest import ROOT
from transformers import HfArgumentParser

import train
import verify

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, flags=re.S)
COMMANDS = [line.split("#")[0].strip() for block in BLOCKS for line in block.splitlines() if line.split("#")[0].strip()]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_in_the_readme_parses(command):
    """Scripts exist and take the options shown. The two first-screen commands also do all of their own set-up."""
    for part in command.split("&&"):
        words = shlex.split(part)
        if words[:2] == ["pip", "install"]:
            assert words[2:] == ["-r", "requirements.txt"] and (ROOT / "requirements.txt").exists()
        elif words[1] == "-m":
            assert words == ["python", "-m", "pytest"]
        else:
            script, arguments = words[1], words[2:]
            assert words[0] == "python" and (ROOT / script).exists()
            if arguments and not arguments[0].startswith("-"):
                assert script == "train.py" and arguments.pop(0) in ("target", "corpus", "head", "eagle")
            if arguments != ["--help"] and script != "glance.py":
                HfArgumentParser({"train.py": train.Config, "verify.py": verify.Config}[script]).parse_args_into_dataclasses(args=arguments)


def test_the_main_job_and_the_test_command_set_themselves_up():
    assert COMMANDS[0] == "pip install -r requirements.txt && python verify.py"
    assert COMMANDS[1] == "pip install -r requirements.txt && python -m pytest"
    assert "python -m pytest" in (ROOT / ".ci" / "run").read_text()


def test_files_named_in_the_readme_exist():
    links = re.findall(r"\]\(([^)#]+)\)", README) + re.findall(r"`((?:tests|notebooks|checkpoints)/[\w./]*\w)`", README)
    missing = [link for link in links if not link.startswith("http") and not (ROOT / link).exists()]
    assert not missing


@pytest.mark.parametrize("file", ["glance.py", "train.py", "verify.py"])
def test_line_counts_are_those_of_the_files(file):
    said = re.search(rf"`{file}` ([\d,]+) lines", README)
    assert said and int(said[1].replace(",", "")) == len((ROOT / file).read_text().splitlines())


def test_the_pasted_output_has_the_columns_of_today(capsys):
    """The table pasted on the first screen is headed as verify.py heads it now."""
    figures = dict(tau=1, ms_per_token=1, speedup=1, at_cap=0)
    row = dict(prompts=1, identical=1, accuracy=1, swapped_accuracy=1, grounding=0, entropy=0, greedy_ms_per_token=1, library_ms_per_token=1,
               drafters={"glance": figures, "spine": figures})  # fmt: skip
    verify.print_table({"caption": row}, ["glance", "spine"])
    header = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("task"))
    assert header.rstrip() in README


def test_nothing_unfinished_is_left_in_the_readme():
    assert "@@" not in README and "TODO" not in README
