"""verify.py on the shipped checkpoints: the main job, its options, its exit status, and that a broken line turns it red."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

import glance
import verify
from glance import BlockDraftHead, CandidateTree, EntropyLaw, Target, load_processor
from train import TASKS, build_head, build_text_target, make_page, read_rows

SMALL = ["--prompts", "1", "--max-new-tokens", "48"]


@pytest.fixture(scope="module")
def shipped():
    target = Target.load(ROOT / "checkpoints" / "target")
    return target, BlockDraftHead.from_pretrained(ROOT / "checkpoints" / "head")


def test_the_main_job_from_any_folder(tmp_path):
    """`python verify.py` as a newcomer types it, only shorter: exit 0, every task in the table, and the promised JSON."""
    command = [sys.executable, str(ROOT / "verify.py"), *SMALL, "--json", "out.json", "--rounds", "rounds.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(task in done.stdout for task in TASKS) and "5 of 5 prompts identical" in done.stdout
    result = json.loads((tmp_path / "out.json").read_text())
    assert set(result) >= {"config", "environment", "tasks", "total", "law"} and set(result["tasks"]) == set(TASKS)
    for task in result["tasks"].values():
        assert set(task) >= {"prompts", "identical", "accuracy", "grounding", "entropy", "min_margin", "greedy_ms_per_token",
                             "library_ms_per_token", "drafters"}  # fmt: skip
        for drafter in ("glance", "spine"):
            figures = task["drafters"][drafter]
            assert set(figures) >= {"tau", "rounds", "tokens", "ms_per_token", "speedup", "at_cap", "stage_ms"}
            assert set(figures["stage_ms"]) == {"draft", "tree", "verify", "commit"}
            assert figures["tau"] == pytest.approx(figures["tokens"] / figures["rounds"])
        # the certificate covers every position of every drafter (the prefill's token included), not the last drafter's only
        assert task["positions"] == sum(d["tokens"] + task["prompts"] for d in task["drafters"].values())
    assert set(result["total"]) >= {"prompts", "identical", "uncertified", "geomean_speedup"}
    assert set(result["law"]["pooled"]) >= {"b0", "b1", "r2_deciles", "rounds"}
    rounds = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert len(rounds) == sum(t["drafters"][d]["rounds"] for t in result["tasks"].values() for d in ("glance", "spine"))


def broken_mask(parents):
    """Everyone sees everything before it: siblings leak into each other."""
    return torch.ones(len(parents), len(parents), dtype=torch.bool).tril()


def broken_positions(target, inputs, taps=()):
    sequence, logits, features = Target._prefill(target, inputs, taps)
    sequence.root_position = sequence.root_position + 1
    return sequence, logits, features


def broken_commit(target, sequence, tree, path):
    """Keeps the first rows of the pass instead of the accepted path."""
    Target._commit(target, sequence, tree, list(range(1, len(path) + 1)))


@pytest.mark.parametrize("name, mutant", [("mask", broken_mask), ("position", broken_positions), ("commit", broken_commit)])
def test_break_one_line_and_the_audit_turns_red(monkeypatch, capsys, name, mutant):
    """Exit status 1 and a printed divergence for a wrong mask, position or commit. The target itself is untouched."""
    monkeypatch.setattr(Target, "_self_check", lambda self: None)  # it would refuse at once; here the audit itself is on trial
    if name == "mask":
        monkeypatch.setattr(glance, "ancestor_mask", mutant)
    else:
        attribute = {"position": "prefill", "commit": "commit"}[name]
        monkeypatch.setattr(Target, f"_{attribute}", getattr(Target, attribute), raising=False)
        monkeypatch.setattr(Target, attribute, mutant)
    assert verify.main(["--prompts", "2", "--tasks", "caption,document", "--budget", "31"]) == 1
    printed = capsys.readouterr().out
    assert "DIVERGENCE" in printed and "unchanged" in printed


def test_a_slice_of_the_full_audit(capsys):
    """Two prompts a task: budgets, branches, the spine, and heads that are random, wrong, perfect or NaN never change the text.

    Its time goes into passes over wide trees that are never accepted, so answers are short: a few rounds of each setting.
    """
    assert verify.main(["--prompts", "2", "--max-new-tokens", "10", "--audit", "full"]) == 0
    assert "48 settings x 10 prompts, 0 divergences" in capsys.readouterr().out


def test_the_full_audit_can_fail(monkeypatch, shipped):
    """An oracle that commits its own draft without asking the target is caught."""
    target, head = shipped
    config = verify.Config(prompts=1, max_new_tokens=24, device="cpu")
    samples = verify.load_samples(config)["document"]
    answer = verify.answer_prompt(target, {"glance": head}, samples[0], samples[0], config)
    monkeypatch.setattr(glance, "accept_greedy", lambda tree, logits: (list(range(1, len(tree) + 1)), int(logits[-1].argmax())))
    assert verify.full_audit(target, head, [answer], config)


@pytest.mark.parametrize("arguments, message", [
    (["--tasks", "poem"], "unknown task poem"),
    (["--prompts", "0"], "--prompts must be at least 1"),
    (["--drafters", "oracle"], "unknown drafter oracle"),
    (["--dtype", "float8"], "--dtype is float32 or bfloat16"),
    (["--head", "no/such/head"], "no/such/head"),
    (["--target", "no/such/target"], "no/such/target"),
    (["--data", "no/such/folder"], "no .jsonl file"),
    (["--show", "poem"], "--show poem"),
    (["--budget", "-1"], "--budget and --temperature are at least 0"),
    (["--max-new-tokens", "0"], "--max-new-tokens at least 1"),
    (["--json", "no/such/folder/out.json"], "no/such/folder/out.json cannot be written"),
    (["--device", "abacus"], "abacus"),
    (["--bugdet", "3"], "unknown option --bugdet 3"),
    (["--drafters", "glance,spine,glance"], "two drafters are called glance"),
    (["--temperature", "0.5", "--tie-margin", "auto"], "--tie-margin is for temperature 0 only"),
    (["--report", "README.md"], "README.md"),
])  # fmt: skip
def test_bad_input_is_one_clear_line_and_exit_2(arguments, message, capsys):
    assert verify.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_what_the_targets_own_config_asks_for_stays_out_of_the_oracle(tmp_path, capsys):
    """A repetition penalty and beams, as hub targets ship them, would change the library's answer: they are named and not applied."""
    shutil.copytree(ROOT / "checkpoints" / "target", tmp_path / "target")
    file = tmp_path / "target" / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "repetition_penalty": 1.3, "num_beams": 3}))
    assert verify.main(["--target", str(tmp_path / "target"), "--tasks", "caption", *SMALL]) == 0
    assert "not applied, from the target's own generation config: repetition_penalty=1.3, num_beams=3" in capsys.readouterr().out
    target = Target.load(tmp_path / "target")
    assert target.model.generation_config.repetition_penalty == 1.3  # set aside for the call, and put back


def test_answers_of_one_token(capsys):
    """The prefill's token is all there is: no round, nothing to divide by."""
    assert verify.main(["--prompts", "1", "--tasks", "chart", "--max-new-tokens", "1"]) == 0
    assert "1 of 1 prompts identical" in capsys.readouterr().out


@pytest.mark.parametrize("row, message", [
    ("{", "line 2: not JSON"), ('{"image": "a.png"}', "line 2: a row needs a text field 'prompt'"), ("[1]", "line 2: a row needs"),
    ('{"image": "gone.png", "prompt": "?"}', "line 2: image .*gone.png cannot be read"),
    ('{"image": "cut.png", "prompt": "?"}', "line 2: image .*cut.png cannot be read"),
])  # fmt: skip
def test_a_bad_row_is_named_with_file_and_line(tmp_path, row, message):
    image = tmp_path / "good.png"
    make_page("chart", 1).image.save(image)
    (tmp_path / "cut.png").write_bytes(image.read_bytes()[:200])
    (tmp_path / "mine.jsonl").write_text('{"image": "good.png", "prompt": "Read the chart."}\n' + row + "\n")
    with pytest.raises(verify.BadInput, match=f"mine.jsonl, {message}"):
        verify.load_samples(verify.Config(data=str(tmp_path)))


def test_rows_end_at_line_feeds_only(tmp_path):
    """A JSON text may hold U+2028 as it is; blank lines are no rows; what is not UTF-8 is named."""
    (tmp_path / "mine.jsonl").write_text('{"prompt": "one\u2028two"}\n\n{"prompt": "three"}\n', "utf-8")
    rows = verify.load_samples(verify.Config(data=str(tmp_path)))["mine"]
    assert [row.prompt for row in rows] == ["one\u2028two", "three"] == [row["prompt"] for row in read_rows(tmp_path / "mine.jsonl")]
    (tmp_path / "mine.jsonl").write_bytes('{"prompt": "Größe"}'.encode("latin-1"))
    with pytest.raises(verify.BadInput, match="mine.jsonl is not UTF-8"):
        verify.load_samples(verify.Config(data=str(tmp_path)))


def test_an_empty_file_is_named(tmp_path):
    (tmp_path / "mine.jsonl").write_text("")
    with pytest.raises(verify.BadInput, match="mine.jsonl holds no row"):
        verify.load_samples(verify.Config(data=str(tmp_path)))


def test_report_options_are_printed_with_the_report_only(monkeypatch, capsys, tmp_path):
    """A default run says what it ran with, and nothing of what it did not use."""
    monkeypatch.setattr(verify, "show", lambda *_: None)
    for arguments, there in ([], False), (["--report", str(tmp_path)], True):
        assert verify.main(["--show", "chart", "--prompts", "1", *arguments]) == 0
        assert ("law_rounds=5000" in capsys.readouterr().out) == there


def test_ones_own_pages_with_and_without_image(tmp_path, capsys):
    """--data: images of other sizes and a prompt without one; the same audit, no accuracy column to fill."""
    make_page("document", 3).image.crop((0, 0, 96, 64)).save(tmp_path / "a.png")
    rows = [{"image": "a.png", "prompt": "Read this document."}, {"prompt": "Read the chart."}]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert verify.main(["--data", str(tmp_path), "--max-new-tokens", "24"]) == 0
    printed = capsys.readouterr().out
    assert "2 of 2 prompts identical" in printed and "tasks=mine" in printed


def test_a_target_without_eyes_reads_the_page_as_text(tmp_path, capsys):
    """A Qwen3 of random weights: same pages, same audit. Without the page's text the question is all it gets, and there is nothing to swap."""
    tokenizer = load_processor(ROOT / "checkpoints" / "target").tokenizer
    build_text_target(tmp_path / "target", tokenizer)
    target = Target.load(tmp_path / "target")
    build_head(target, 2, 8).save_pretrained(tmp_path / "head")
    folders = ["--target", str(tmp_path / "target"), "--head", str(tmp_path / "head")]
    assert verify.main([*folders, "--tasks", "caption,document", "--prompts", "2", "--max-new-tokens", "12"]) == 0
    assert "4 of 4 prompts identical" in capsys.readouterr().out
    page = make_page("document", 7)
    sample = verify.Sample("document", page.image, page.prompt, page).for_target(target)
    assert sample.image is None and all(str(fact) in sample.prompt for fact in page.facts)
    assert verify.swap_partner([sample, sample], 0) is sample
    with pytest.raises(verify.BadInput, match="task mine has images"):
        verify.Sample("mine", page.image, "What is this?").for_target(target)
    assert verify.blank_page(target, sample)["input_ids"].shape[1] < verify.encode(target, sample.prompt, None)["input_ids"].shape[1]


def test_show_saves_the_page_and_prints_every_round(tmp_path, monkeypatch, capsys, shipped):
    monkeypatch.chdir(tmp_path)
    assert verify.main(["--show", "document", "--prompts", "1"]) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "page_document.png").stat().st_size > 0 and "tau = " in printed
    rounds = [line for line in printed.splitlines() if line[:5].strip().isdigit()]
    target, sample = shipped[0], verify.load_samples(verify.Config(prompts=1))["document"][0]
    reference, _, _ = verify.library_generate(target, verify.encode(target, sample.prompt, sample.image), verify.Config())
    text = "".join(line[31:] for line in rounds).replace("[", "").replace("]", "").replace("\\n", "\n")
    assert len(rounds) > 3 and text == target.processor.tokenizer.decode(reference)


def test_sampling_says_the_same_as_plain_sampling(capsys):
    """Temperature 1: every drafter gives the text that plain sampling gives from the same seed."""
    assert verify.main([*SMALL, "--temperature", "1", "--tasks", "caption,chart", "--seed", "3"]) == 0


def test_scripted_drafters_are_what_they_say(shipped):
    """The oracle is always accepted in full, the shifted one never: the gallery of the full audit is no straw man."""
    target, head = shipped
    sample = verify.load_samples(verify.Config(prompts=1))["document"][0]
    inputs = verify.encode(target, sample.prompt, sample.image)
    config = verify.Config(max_new_tokens=40)
    reference, _, _ = verify.library_generate(target, inputs, config)
    for shift, tau in ((0, 16), (1, 1)):
        arm = verify.run_arm(target, verify.Scripted(reference, 704, shift), inputs, config)
        assert arm.tokens == reference and arm.rounds[1].accepted == tau - 1


def test_a_changed_parameter_changes_the_hash(shipped):
    target, _ = shipped
    before = verify.parameter_hash(target.model)
    weight = next(target.model.parameters())
    with torch.no_grad():
        weight.view(-1)[0] += 1
        changed = verify.parameter_hash(target.model)
        weight.view(-1)[0] -= 1
    assert before != changed


def test_few_rounds_give_no_law():
    law = EntropyLaw(1.0, 0.5, (0.3, 0.7), 299, 0.9)
    assert not law.identified and str(law).startswith("not identified") and EntropyLaw(1.0, 0.5, (0.3, 0.7), 300, 0.9).identified
    assert CandidateTree.empty(3).tokens == [3]


def test_rounds_too_few_to_fit_are_said_to_be(capsys):
    assert verify.main(["--tasks", "chart", "--prompts", "1", "--max-new-tokens", "3", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "pooled: not identified: two rounds or fewer" in printed and "None" not in printed


def test_a_drafter_that_breaks_the_rules_is_one_line_and_exit_2(tmp_path, capsys):
    """What it returned is named; no traceback in a reader's face."""
    (tmp_path / "mine.py").write_text(
        "from glance import CandidateTree\n"
        "class Astray:\n"
        "    taps = []\n"
        "    def propose(self, context):\n"
        "        return CandidateTree([5], [-1], [0], [0.0])\n"
    )
    own = f"{tmp_path / 'mine.py'}:Astray"
    assert verify.main(["--drafters", own, "--tasks", "chart", "--prompts", "1", "--max-new-tokens", "8"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error and "verify.py: " in error
