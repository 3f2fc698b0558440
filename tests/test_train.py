"""train.py: pages, the language, the corpus and the head's training."""

import json
import random
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, build_head, build_tiny, prompt_inputs

import train
from glance import BlockDraftHead, Eagle3Head, Target
from train import HELD_OUT, TASKS, make_page, score

SHIPPED = ROOT / "checkpoints" / "target"


@pytest.mark.parametrize("task", TASKS)
def test_a_page_is_a_function_of_task_and_seed(task):
    """Same seed: same pixels and words. Another seed: another page. The language's temperature never touches the picture."""
    one, again, other, cold = make_page(task, 5), make_page(task, 5), make_page(task, 6), make_page(task, 5, temperature=0)
    assert one.image.tobytes() == again.image.tobytes() and one.answer == again.answer
    assert one.image.tobytes() != other.image.tobytes() and one.answer != other.answer
    assert one.image.size == (128, 128) and [len(row) for row in one.cells] == [16] * 8
    assert cold.facts == one.facts


@pytest.mark.parametrize("task", TASKS)
def test_the_score_knows_a_page_from_another(task):
    """An answer is perfect on its own page; on another page it scores no better than chance."""
    pages = [make_page(task, HELD_OUT + i) for i in range(40)]
    own = [score(page, page.answer) for page in pages]
    other = [score(page, pages[i - 1].answer) for i, page in enumerate(pages)]
    assert all(right == asked > 0 for right, asked in own)
    assert sum(right for right, _ in other) < 0.35 * sum(asked for _, asked in other)


def test_score_sees_a_single_wrong_digit():
    page = next(p for p in (make_page("chart", HELD_OUT + i) for i in range(50)) if p.prompt == "List the values.")
    label, value = page.facts[2]
    wrong = page.answer.replace(f"{label}: {value}", f"{label}: {value[:-1]}{(int(value[-1]) + 1) % 10}")
    assert score(page, wrong) == (len(page.facts) - 1, len(page.facts))


def test_unknown_task_and_size_are_refused_by_name():
    with pytest.raises(ValueError, match="unknown task 'poem'.*caption"):
        make_page("poem", 0)
    with pytest.raises(ValueError, match="lines is 9"):
        make_page("chart", 0, lines=9)


def test_training_never_draws_a_held_out_page():
    config = train.Config()
    assert config.target_steps * 16 < train.CORPUS_SEEDS
    assert max(row["seed"] for row in train.page_rows(config.corpus_rows)) < HELD_OUT


@pytest.mark.parametrize("task, least", [("caption", 0.9), ("scene_text", 0.85)])
def test_free_text_is_hard_to_foresee(task, least):
    """Even a perfect greedy reader rarely says the same eight words on two pages: the free text is no template."""
    spans = []
    for i in range(150):
        words = make_page(task, HELD_OUT + i, temperature=0).answer.split()
        spans += [tuple(words[at : at + 8]) for at in range(0, len(words) - 7, 8)]
    assert len(set(spans)) >= least * len(spans)


def toy_block(anchors, total=30, first=10, seed=0):
    target = build_tiny(seed)
    head = build_head(target, seed)
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(total, len(head.taps) * 32, generator=generator)
    tokens = torch.randint(0, 58, (total,), generator=generator).tolist()
    return target, head, features, tokens, torch.tensor(anchors)


def test_block_loss_is_the_weighted_mean_of_single_blocks():
    """Two anchors in a batch: the same as each block drafted alone from its own context, weighted by hand."""
    target, head, features, tokens, anchors = toy_block([14, 25])
    loss, _ = train.block_loss(head, target, features, tokens, anchors)
    weights, nats = train.block_loss_weights(7, 4.0), []
    for r in anchors.tolist():
        stream = torch.arange(r + 8)[None]
        block = torch.tensor([[tokens[r]] + [head.config.mask_token_id] * 7])
        hidden = head(target.embed(block), head.context(features[None, :r], stream[:, :r]), stream[:, r:], stream[:, :r])
        log_q = head.marginals(hidden[0, 1:], target)
        nats += [(weights[k], -log_q[k, tokens[r + 1 + k]]) for k in range(7) if r + 1 + k < len(tokens)]
    by_hand = sum(w * n for w, n in nats) / sum(w for w, _ in nats)
    assert len(nats) == 7 + 4 and torch.allclose(loss, by_hand, atol=1e-5)


def test_a_block_never_sees_its_own_future():
    """Features at and after r may be anything: the loss of that block does not move."""
    target, head, features, tokens, anchors = toy_block([14])
    before, _ = train.block_loss(head, target, features, tokens, anchors)
    features[14:] += 5.0
    after, _ = train.block_loss(head, target, features, tokens, anchors)
    features[13] += 5.0
    moved, _ = train.block_loss(head, target, features, tokens, anchors)
    assert torch.equal(before, after) and not torch.allclose(before, moved)


def test_rows_that_are_no_rows_are_named(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "hello"}\n{"image": "a.png"}\n')
    with pytest.raises(ValueError, match="rows.jsonl, line 2.*prompt"):
        train.read_rows(file)
    assert train.main(["head", "--data", str(file), "--target", str(SHIPPED)]) == 2


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_stopped_head_training_goes_on_as_if_nothing_happened(tmp_path, optimizer):
    """Six steps in one go, or three, a stop and three more: the same weights, bit for bit."""
    target, rows = Target.load(SHIPPED), [{"task": "document", "seed": 7, "ids": list(range(20, 60))}]
    config = train.Config(head_steps=6, rows_per_step=1, anchors=4, head_layers=1, optimizer=optimizer)
    whole = train.train_head(target, rows, tmp_path / "whole", config)

    class Stop(Exception):
        pass

    def stop_at_four(*_):
        calls.append(1)
        if len(calls) == 4:
            raise Stop
        return real(*_)

    calls, real = [], train.block_loss
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr(train, "block_loss", stop_at_four)
        patch.setattr(train, "SAVE_SECONDS", 0)
        train.train_head(target, rows, tmp_path / "cut", config)
    for other in {"optimizer": "adamw" if optimizer == "muon" else "muon"}, {"head_layers": 2}, {"seed": 1}, {"head_lr": 2e-3}:
        with pytest.raises(ValueError, match="belongs to a run of"):
            train.train_head(target, rows, tmp_path / "cut", replace(config, **other))
    resumed = train.train_head(target, rows, tmp_path / "cut", config)
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), resumed.state_dict().values()))


@pytest.mark.parametrize("options, message", [
    ({"head_steps": 0}, "--head-steps"),
    ({"block_size": 1}, "--block-size 2"),
    ({"taps": "1;2"}, "--taps are layer numbers"),
    ({"taps": "1,99"}, "99"),
    ({"tasks": "poem"}, "of task poem"),
])  # fmt: skip
def test_head_options_out_of_range_are_named_before_the_first_step(tmp_path, options, message):
    rows = [{"task": "document", "seed": 7, "ids": list(range(20, 60))}]
    with pytest.raises(ValueError, match=message):
        train.train_head(Target.load(SHIPPED), rows, tmp_path, train.Config(**{"head_steps": 1, **options}))


def test_an_unknown_optimizer_is_refused():
    """By name, with the two there are."""
    with pytest.raises(ValueError, match="neither 'muon' nor 'adamw'"):
        train.head_optimisers(build_head(build_tiny(0)), 1e-3, "sgd")


@pytest.mark.parametrize("name, peak, kinds", [("adamw", 5e-3, ["AdamW"]), ("muon", 5e-3, ["Muon", "AdamW"])])
def test_the_learning_rate_asked_for_is_the_one_used(name, peak, kinds):
    """On every matrix, with either optimiser; beside Muon the norms stay at AdamW's 1e-3 or below."""
    head = build_head(build_tiny(0))
    made = train.head_optimisers(head, peak, name)
    rates = {id(w): group["lr"] for optimiser in made for group in optimiser.param_groups for w in group["params"]}
    assert [type(optimiser).__name__ for optimiser in made] == kinds
    assert {id(w) for w in head.parameters()} == set(rates)
    assert all(rates[id(w)] == (peak if w.dim() == 2 or name == "adamw" else 1e-3) for w in head.parameters())


def test_a_head_for_ones_own_target_from_rows(tmp_path):
    """The documented path for a real target: rows of image and prompt -> answers -> a DFlash folder that fits the target."""
    for i in range(3):
        make_page("chart", 20 + i).image.save(tmp_path / f"{i}.png")
    rows = [{"image": f"{i}.png", "prompt": "Read the chart."} for i in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"--target": SHIPPED, "--data": tmp_path / "rows.jsonl", "--corpus": tmp_path / "answers.jsonl", "--head": tmp_path / "head",
               "--head-steps": 2, "--rows-per-step": 1, "--anchors": 4, "--max-new-tokens": 12}  # fmt: skip
    assert train.main(["head", *(str(x) for pair in options.items() for x in pair)]) == 0
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 3 and all(1 <= len(row["ids"]) <= 12 for row in answers)
    BlockDraftHead.from_pretrained(tmp_path / "head").check(Target.load(SHIPPED))


def test_every_season_warms_up_and_falls_to_zero():
    """Two seasons of 100 steps: 4 % of warm-up, the peak and half of it, next to nothing at either end."""
    rates = [train.season_rate(step, 200, 2) for step in range(200)]
    assert rates[0] == pytest.approx(0.25) and max(rates) == rates[3] == pytest.approx(0.97) and rates[99] == pytest.approx(0.01)
    assert rates[100:] == pytest.approx([rate / 2 for rate in rates[:100]])
    assert [train.season_rate(step, 3, 1) for step in range(3)] == pytest.approx([1, 2 / 3, 1 / 3])


def test_a_head_goes_on_from_another(tmp_path):
    """--start: its weights and sizes, whatever the options for an untrained one say; a head of another class is refused."""
    target, rows = Target.load(SHIPPED), [{"task": "document", "seed": 7, "ids": list(range(20, 60))}]
    first = train.build_head(target, 1, 8)
    first.save_pretrained(tmp_path / "first")
    config = train.Config(start=str(tmp_path / "first"), head_steps=1, rows_per_step=1, anchors=4, head_layers=3, head_lr=1e-9)
    after = train.train_head(target, rows, tmp_path / "next", config)
    assert (after.config.num_hidden_layers, after.config.block_size) == (1, 8)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(first.state_dict().values(), after.state_dict().values()))
    untrained = train.train_head(target, rows, tmp_path / "other", replace(config, start="", head_layers=1, block_size=8))
    assert not torch.allclose(first.layers[0].mlp.gate_proj.weight, untrained.layers[0].mlp.gate_proj.weight, atol=1e-3)
    with pytest.raises(ValueError):
        train.train_head(target, rows, tmp_path / "eagle", config, eagle=True)


def test_the_corpus_is_the_targets_own_greedy_answer_and_resumes(tmp_path):
    """Batched answers equal one-by-one answers; a torn last line is answered again."""
    target, rows = Target.load(SHIPPED), train.page_rows(5)
    whole = train.train_corpus(target, rows, tmp_path / "a.jsonl", batch=4, max_new_tokens=16)
    for row in whole:
        inputs = train.row_inputs(target, row)
        alone = target.model.generate(**inputs, do_sample=False, max_new_tokens=16)[0, inputs["input_ids"].shape[1] :].tolist()
        assert row["ids"] == alone
    lines = (tmp_path / "a.jsonl").read_text().splitlines(True)
    (tmp_path / "b.jsonl").write_text("".join(lines[:3]) + lines[3][:10])
    assert train.train_corpus(target, rows, tmp_path / "b.jsonl", batch=4, max_new_tokens=16) == whole
    before = (tmp_path / "b.jsonl").stat().st_mtime_ns
    assert train.train_corpus(target, rows[:3], tmp_path / "b.jsonl", max_new_tokens=16) == whole[:3]  # a complete file is read and not written
    assert (tmp_path / "b.jsonl").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="answers other rows"):
        train.train_corpus(target, train.page_rows(6)[1:], tmp_path / "b.jsonl", max_new_tokens=16)
    with pytest.raises(ValueError, match="of another target or length"):
        train.train_corpus(target, rows, tmp_path / "b.jsonl", max_new_tokens=17)
    with torch.no_grad():
        next(target.model.parameters())[-1].add_(1.0)
    with pytest.raises(ValueError, match="of another target or length"):
        train.train_corpus(target, rows, tmp_path / "b.jsonl", max_new_tokens=16)


def test_all_parts_from_nothing_for_a_target_without_eyes(tmp_path):
    """`train.py --text` in small: tokenizer, target, its answers, both heads; each folder loads, fits, and no training state is left."""
    folders = {name: tmp_path / name for name in ("target", "head", "eagle")}
    options = {"--corpus": tmp_path / "corpus.jsonl", "--target-steps": 2, "--corpus-rows": 5, "--head-steps": 1, "--rows-per-step": 1,
               "--max-new-tokens": 8, "--unroll": 2} | {f"--{name}": folder for name, folder in folders.items()}  # fmt: skip
    assert train.main(["--text", *(str(x) for pair in options.items() for x in pair)]) == 0
    target = Target.load(folders["target"])
    assert target.model.config.model_type == "qwen3" and len((tmp_path / "corpus.jsonl").read_text().splitlines()) == 5
    row = train.page_rows(1)[0]
    seen, blind = (train.row_inputs(target, row, blank)["input_ids"] for blank in (False, True))
    assert blind.shape[1] < seen.shape[1], "without the page there is only the question"
    for kind, name in ((BlockDraftHead, "head"), (Eagle3Head, "eagle")):
        kind.from_pretrained(folders[name]).check(target)
    assert not list(tmp_path.glob("*/training.safetensors"))
    with pytest.raises(ValueError, match="its own --target and --corpus"):
        train.make_target(train.Config(text=True))


def test_a_stopped_text_target_goes_on_as_if_nothing_happened(tmp_path):
    """Three steps in one go, or one, a stop and two more: the same weights, bit for bit."""
    tokenizer, real = train.load_processor(SHIPPED).tokenizer, train.learning_rate
    for name in ("whole", "cut"):
        train.build_text_target(tmp_path / name, tokenizer)

    def stop_at_the_second(step, steps):
        if step:
            raise InterruptedError
        return real(step, steps)

    teach = lambda name: train.train_text_target(tmp_path / name, 3, pages_per_step=2, save_minutes=0)  # noqa: E731
    whole = teach("whole")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(train, "learning_rate", stop_at_the_second)
        teach("cut")
    resumed = teach("cut")
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), resumed.state_dict().values()))


def test_drills_come_first_and_then_every_task():
    """The first lessons are drills without a word to guess; then the five tasks, pictures half bare until pages have grown full."""
    processor = train.load_processor(SHIPPED)
    lessons, bare = train.Lessons(processor, steps=40, drill_steps=4, pages_per_step=8), processor.tokenizer(train.LIST)["input_ids"]
    names = (*TASKS, "drill")
    asks_for_a_list = lambda step: ["".join(map(str, bare)) in "".join(map(str, row)) for row in lessons[step]["input_ids"].tolist()]  # noqa: E731
    assert [names[t] for t in lessons[0]["tasks"].tolist()] == ["drill", "caption", "drill", "scene_text"] * 2
    assert asks_for_a_list(0) == [False, True] * 4
    assert "drill" not in {names[t] for t in lessons[5]["tasks"].tolist()} and any(asks_for_a_list(5)) and not all(asks_for_a_list(5))
    assert not any(asks_for_a_list(39))
    assert {train.pick_task(seed) for seed in range(300)} == set(TASKS)


def test_suffix_lookup_knows_its_corpus_by_heart_and_nothing_else():
    """What was seen comes in one round, what was not one token at a time; the longest suffix decides, not the latest."""
    assert train.suffix_lookup_tau([[1, 2, 3, 4, 5, 6]], [[0, 1, 2, 3, 4, 5, 6]]) == 5
    assert train.suffix_lookup_tau([[7, 8, 9]], [[1, 2, 3]]) == 1
    # after 1 2 the corpus says 3 4, though after a mere 2 it last said 9: rounds are [1], [2] and [3 4]
    assert train.suffix_lookup_tau([[7, 1, 2, 3, 4]], [[1, 2, 3, 4], [8, 2, 9], [5, 1, 6]], longest=2) == pytest.approx(4 / 3)


def test_copied_text_is_foreseeable_and_fresh_text_is_not():
    """The control: the same answer on every page scores no distinct span; random text is all distinct and cannot be looked up."""
    tokenizer, rng = train.load_processor(SHIPPED).tokenizer, random.Random(0)
    same = [{"task": "caption", "ids": tokenizer("one red square rests near the old stone bridge and glows")["input_ids"]}] * 40
    fresh = [{"task": "caption", "ids": [rng.randrange(300, 600) for _ in range(60)]} for _ in range(40)]
    (copied, lookup), (distinct, blind) = train.foreseeable(same, tokenizer)["caption"], train.foreseeable(fresh, tokenizer)["caption"]
    assert copied == 0 and lookup > 10 and distinct > 0.9 and blind < 1.2
