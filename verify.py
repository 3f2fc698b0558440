"""Is it lossless, how fast is it, and does the entropy law hold?  `python verify.py` answers all three.

    python verify.py                      the shipped target and head on held-out pages of five tasks
    python verify.py --show document      one page as PNG and its decoding, tokens coloured by where they came from
    python verify.py --audit full         every budget, branch and a gallery of bad drafters
    python verify.py --drafters glance,eagle3,my_file.py:MyDrafter       others in the same loop, and one of your own
    python verify.py --report report      every table of the README as Markdown and JSON (ten minutes on two CPU cores)
    python verify.py --target <hub id or folder> --head <hub id or folder> --data <folder of .jsonl>
    python verify.py --help               every option with its default

The reference is never our own loop: it is the library's `model.generate(do_sample=False)`. Exit status: 0 every answer is
identical, 1 a divergence, 2 bad input.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import importlib.util
import inspect
import json
import math
import platform
import random
import sys
import time
from collections import namedtuple
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import chain, count, islice
from pathlib import Path

import torch
import transformers
from PIL import Image
from tqdm import tqdm
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

import glance
from glance import (BlockDraftHead, CandidateTree, EntropyLaw, Generation, Spine, Target, end_tokens, fit_entropy_law, generate,
                    grow_tree, r2_on_deciles)  # fmt: skip
from train import (COLOUR_CODES, HELD_OUT, SHAPE_CODES, TASKS, Page, block_loss, eagle_loss, make_page, option, parse,
                   score, text_prompt)  # fmt: skip

HERE = Path(__file__).resolve().parent


@dataclass
class Config:
    """Every option and its default; the command line is made from this."""

    target: str = option("checkpoints/target", "target model: folder or hub id")
    head: str = option("checkpoints/head", "draft head: folder or hub id")
    data: str = option("", "folder of .jsonl files, one task a file, rows {image, prompt}; empty: held-out pages drawn here")
    tasks: str = option(",".join(TASKS), "comma-separated tasks")
    prompts: int = option(12, "prompts a task")
    max_new_tokens: int = option(160, "longest answer, in tokens")
    budget: int = option(15, "N, drafted nodes per round (15 suits a CPU: the cost curve is in notebooks/2_tree.ipynb; 31 to 63 a GPU)")
    branch: int = option(8, "tokens tried per offset")
    drafters: str = option("glance,spine", "comma-separated: glance, spine, eagle3, eagle8 (chains of 3 and 8), eagletree, ngram, "
                           "auto; my_file.py:MyDrafter is made with those of `head` and `target` that its __init__ names")  # fmt: skip
    eagle: str = option("checkpoints/eagle", "EAGLE-3 head: folder")
    dtype: str = option("float32", "float32 or bfloat16")
    tie_margin: str = option("", "two best logits this close: a one-token pass decides (see glance.rounds); auto: twice the measured noise")
    device: str = option("", "cpu, cuda, ...; empty: a GPU if there is one")
    temperature: float = option(0.0, "0 is greedy; above, the audit compares with plain sampling from the same seed")
    seed: int = option(0, "first held-out page, and the sampling seed")
    audit: str = option("default", "default or full")
    show: str = option("", "a task: save one page as PNG and print its decoding, round by round")
    rounds: str = option("", "write every round to this .jsonl file")
    json: str = option("", "write all results to this file")
    cost_of: str = option("", "0.5b, 2b or 8b: time a random-weight target of that size, and project this run's tau onto it")
    report: str = option("", "write every table to report.md and report.json in this folder")
    tables: str = option("matched,copy,generalisation,vision,budget,law", "which of them, comma-separated")
    narrow_head: str = option("checkpoints/head_narrow", "a head trained on captions and scene text only (generalisation)")
    blind_head: str = option("checkpoints/head_blind", "a head trained on the target's states over blank pages (vision)")
    law_rounds: int = option(5000, "rounds for the law of the report")
    draws: int = option(200, "bootstrap draws over prompts for the law")


REPORT_OPTIONS = ("tables", "narrow_head", "blind_head", "law_rounds", "draws")
# More noise than this between a one-token and an N-token pass, in units of the logits' spread, is a fault and no rounding.
ROUNDING = {dtype: Target.ROUNDING[getattr(torch, dtype)] for dtype in ("float32", "bfloat16")}


class BadInput(Exception):
    """Something the user can mend; printed as one line, exit status 2."""


# ---------------------------------------------------------------------------------------------------------------------
# What is asked
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    task: str
    image: Image.Image | None
    prompt: str
    page: Page | None = None  # knows the right answer; None for the user's own data

    def for_target(self, target: Target) -> Sample:
        """Itself; for a target without eyes, a drawn page as text. Raises BadInput for an image of the user's own."""
        if self.image is None or hasattr(target.processor, "image_processor"):
            return self
        if not self.page:
            raise BadInput(f"task {self.task} has images, but this target's processor takes none")
        return Sample(self.task, None, text_prompt(self.page), self.page)


def load_samples(config: Config) -> dict[str, list[Sample]]:
    """Held-out pages, or the user's JSONL rows. Raises BadInput naming the file, line and field at fault."""
    tasks = [task.strip() for task in config.tasks.split(",") if task.strip()]
    if config.prompts < 1:
        raise BadInput(f"--prompts must be at least 1, got {config.prompts}")
    if config.data:
        return load_rows(Path(config.data), tasks if config.tasks != ",".join(TASKS) else None, config.prompts)
    unknown = [task for task in tasks if task not in TASKS]
    if unknown or not tasks:
        raise BadInput(f"unknown task {', '.join(unknown) or '(none)'}; there are {', '.join(TASKS)}")
    first = HELD_OUT + config.seed * 100_000
    pages = {task: [make_page(task, first + i) for i in range(config.prompts)] for task in tasks}
    return {task: [Sample(task, page.image, page.prompt, page) for page in rows] for task, rows in pages.items()}


def load_rows(folder: Path, tasks: list[str] | None, limit: int) -> dict[str, list[Sample]]:
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise BadInput(f"--data {folder}: no .jsonl file there")
    known = {file.stem: file for file in files}
    missing = [task for task in tasks or [] if task not in known]
    if missing:
        raise BadInput(f"unknown task {', '.join(missing)}; {folder} has {', '.join(known)}")
    samples = {}
    for task in tasks or known:
        try:
            lines = enumerate(known[task].read_text("utf-8").split("\n"), start=1)  # not splitlines: U+2028 is no end of a row
        except UnicodeDecodeError as error:
            raise BadInput(f"{known[task]} is not UTF-8 ({error})") from None
        samples[task] = [read_row(known[task], *line) for line in islice((line for line in lines if line[1].strip()), limit)]
        if not samples[task]:
            raise BadInput(f"{known[task]} holds no row")
    return samples


def read_row(file: Path, number: int, line: str) -> Sample:
    where = f"{file}, line {number}"
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadInput(f"{where}: not JSON ({error})") from None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise BadInput(f"{where}: a row needs a text field 'prompt'")
    image = None
    if row.get("image"):
        try:
            image = Image.open(file.parent / row["image"]).convert("RGB")
        except Exception as error:  # Pillow has many ways to refuse a missing, truncated or enormous file
            raise BadInput(f"{where}: image {row['image']} cannot be read ({type(error).__name__}: {error})") from None
    return Sample(file.stem, image, row["prompt"])


def swap_partner(rows: list[Sample], i: int) -> Sample:
    """The next page with the same prompt, failing that the next one answered in the same form, failing that the page itself.

    The prompt decides whether a document is transcribed line by line or told in a sentence, and its page is scored for that form.
    Without an image the page is part of the prompt, and there is nothing to swap.
    """
    if rows[i].image is None:
        return rows[i]
    following, lines = rows[i + 1 :] + rows[:i], lambda sample: sample.page and "\n" in sample.page.answer
    same = [other for other in following if other.prompt == rows[i].prompt]
    return (same + [other for other in following if lines(other) == lines(rows[i])] + [rows[i]])[0]


def encode(target: Target, prompt: str, image: Image.Image | None) -> dict:
    return target.encode(prompt, [image] if image is not None else None)


# ---------------------------------------------------------------------------------------------------------------------
# The oracle, and drafters that try to break the loop
# ---------------------------------------------------------------------------------------------------------------------


class Stopwatch(BaseStreamer):
    """Notes when the library hands out its first and its latest token, so that its prefill can be left out."""

    def __init__(self):
        self.times = []

    def put(self, value):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def dropped_processors(target: Target) -> list[str]:
    """Settings of the target's own generation config that change greedy decoding and are not applied here."""
    own, neutral = target.model.generation_config, GenerationConfig()
    names = ("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens",
             "forced_bos_token_id", "forced_eos_token_id", "min_length", "min_new_tokens", "exponential_decay_length_penalty",
             "sequence_bias", "num_beams")  # fmt: skip
    values = {name: getattr(own, name, None) for name in names}
    return [f"{n}={v}" for n, v in values.items() if v not in (None, getattr(neutral, n, None), [], 1, 1.0, 0)]


def library_generate(target: Target, inputs: dict, config: Config) -> tuple[list[int], float, int]:
    """(new ids, seconds after the first token, tokens in that time) of the library's own greedy generate, and nothing else: end and
    pad ids and the length. Logits processors of the target's own config are dropped."""
    watch, ends = Stopwatch(), end_tokens(target)
    settings = dict(max_new_tokens=config.max_new_tokens, eos_token_id=ends or None, pad_token_id=(ends or [0])[0])
    ids = target.library_generate(inputs, watch, **settings)
    new = ids[0, inputs["input_ids"].shape[1] :].tolist()
    return new, watch.times[-1] - watch.times[1], len(new) - 1  # times[0] is the prompt


class Scripted:
    """Drafts a known answer: an oracle. With `shift` every token is another one: always wrong."""

    taps: list[int] = []

    def __init__(self, answer: list[int], vocabulary: int, shift: int = 0):
        self.answer, self.vocabulary, self.shift = answer, vocabulary, shift
        self.prompt_length = None

    def propose(self, context) -> CandidateTree:
        if self.prompt_length is None:
            self.prompt_length = len(context.tokens) - 1
        done = len(context.tokens) - self.prompt_length
        tree = CandidateTree.empty(context.root)
        for token in self.answer[done : done + min(context.budget, 15)]:
            tree.add(len(tree), (token + self.shift) % self.vocabulary, 0.0)
        return tree


class BrokenHead:
    """The same head after a bad training run: every logit is NaN."""

    def __init__(self, head: BlockDraftHead):
        self.head, self.taps, self.config = head, head.taps, head.config

    def propose(self, context) -> CandidateTree:
        return grow_tree(torch.full_like(self.head.draft(context), math.nan), context.root, context.budget, context.branch)


def random_head(head: BlockDraftHead, seed: int) -> BlockDraftHead:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        fresh = BlockDraftHead(head.config)
    return fresh.to(head.fc.weight).eval()


def parameter_hash(model) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# One prompt, every arm
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """Everything measured on one prompt."""

    sample: Sample
    reference: list[int]
    library_seconds: float
    text: str
    right: int
    asked: int
    swapped: tuple[int, int]
    entropy: float  # mean over the answer's tokens, nats
    grounding: float  # G: the same on a blank page, minus that
    arms: dict[str, Arm] = field(default_factory=dict)  # "greedy" and every drafter
    divergences: list[dict] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    certified: int = 0  # positions with margin > 2 x noise
    noise: float = 0.0  # largest logit difference between a tree pass and a one-token pass


def entropies(target: Target, inputs: dict, answer: list[int]) -> torch.Tensor:
    """H of the target at every token of an answer, nats [A]."""
    return torch.special.entr(target.teacher_force(inputs, answer)[0].float().softmax(dim=-1)).sum(dim=-1)


class Altered:
    """A drafter that is shown another context: `change(context)` gives the fields that differ."""

    def __init__(self, drafter, change):
        self.drafter, self.change, self.taps = drafter, change, drafter.taps

    def __getattr__(self, name):
        return getattr(self.drafter, name)

    def propose(self, context) -> CandidateTree:
        return self.drafter.propose(replace(context, **self.change(context)))


class Counter:
    """The target as drafters see it. Every draft pass ends by reading its lm_head once, and that is counted, round by round."""

    def __init__(self, target: Target):
        self.target, self.passes = target, []

    def __getattr__(self, name):
        return getattr(self.target, name)

    def lm_head(self, hidden):
        self.passes[-1] += 1
        return self.target.lm_head(hidden)

    def next_round(self, context) -> dict:
        self.passes.append(0)
        return {"target": self}


@dataclass
class Arm(Generation):
    """One drafter's answer; `drafts[i]` is the number of draft passes of rounds[i + 1]."""

    drafts: list[int] = field(default_factory=list)


def run_arm(target: Target, drafter, inputs: dict, config: Config, **options) -> Arm:
    """Decode as `config` says; `options` are those of `decode` and go first."""
    counter = Counter(target)
    asked = {name: getattr(config, name) for name in ("max_new_tokens", "budget", "branch", "temperature")} | options
    asked |= {"tie_margin": float(config.tie_margin)} if config.tie_margin and asked["temperature"] == 0 else {}
    if config.temperature > 0:
        asked["generator"] = torch.Generator(target.device).manual_seed(config.seed)
    arm = generate(target, drafter and Altered(drafter, counter.next_round), inputs, keep_logits=True, **asked)
    return Arm(arm.rounds, counter.passes)


ORDER = random.Random(0)


def run_arms(target: Target, drafters: dict, inputs: dict, config: Config) -> dict[str, Arm]:
    """All drafters on one prompt, one after the other, so that a slow minute of the machine hits each of them; in an order drawn anew
    for each prompt, because who follows his like finds the caches warm (a few per cent)."""
    order = ORDER.sample(list(drafters), len(drafters))
    arms = {name: run_arm(target, drafters[name], inputs, config) for name in order}
    return {name: arms[name] for name in drafters}


def compare(answer: Answer, name: str, arm: Generation, plain: Generation, rounding: float) -> None:
    """Certify each position of an arm against the one-token pass, and record the first divergence if there is one.

    It is "uncertified" where two logits of the target lie closer than twice the noise, and the noise is no more than rounding: a
    broken mask makes noise as well, but more than that.
    """
    mine, theirs = (torch.cat([r.logits for r in g.rounds]) for g in (arm, plain))
    margins = [m for r in arm.rounds for m in r.margins]
    same = next((i for i, (a, b) in enumerate(zip(arm.tokens, answer.reference)) if a != b), None)
    if same is None and len(arm.tokens) != len(answer.reference):
        same = min(len(arm.tokens), len(answer.reference))
    upto = len(margins) if same is None else min(same + 1, len(margins), len(theirs))
    noise = (mine[:upto] - theirs[:upto]).abs().amax(dim=-1).tolist()
    answer.noise = max([answer.noise, *noise])
    if same is None:  # every drafter's every position counts, not those of the last one alone
        answer.margins += margins
        answer.certified += sum(m > 2 * n for m, n in zip(margins, noise))
        return
    at, margin = min(same, upto - 1), margins[min(same, len(margins) - 1)]
    answer.divergences.append({"drafter": name, "task": answer.sample.task, "position": same, "margin": margin, "noise": noise[at],
                               "uncertified": noise[at] <= rounding * float(theirs.std()) and margin <= 2 * noise[at]})  # fmt: skip


def answer_prompt(target: Target, drafters: dict, sample: Sample, other: Sample, config: Config) -> Answer:
    """One prompt: the library, all arms, and what shows that the page was read."""
    inputs = encode(target, sample.prompt, sample.image)
    reference, seconds, _ = library_generate(target, inputs, config)
    arms = run_arms(target, {"greedy": None, **drafters}, inputs, config)
    if config.temperature > 0:
        reference = arms["greedy"].tokens
    decode_text = target.processor.tokenizer.decode if hasattr(target.processor, "tokenizer") else target.processor.decode

    text, right, asked, swapped = decode_text(reference, skip_special_tokens=True), 0, 0, (0, 0)
    if sample.page:
        right, asked = score(sample.page, text)
        if config.temperature == 0 and other is not sample:  # this prompt, the other page: is what is said on the page shown?
            ids = run_arm(target, next(iter(drafters.values())), encode(target, sample.prompt, other.image), config).tokens
            swapped = score(other.page, decode_text(ids, skip_special_tokens=True))
    blank = blank_page(target, sample)
    entropy = float(entropies(target, inputs, reference).mean())
    grounding = float(entropies(target, blank, reference).mean()) - entropy if blank else math.nan
    answer = Answer(sample, reference, seconds, text, right, asked, swapped, entropy, grounding, arms)
    for name, arm in arms.items():
        compare(answer, name, arm, arms["greedy"], ROUNDING[config.dtype])
        if name == "greedy":  # held to the reference too, but it has no tree pass to certify
            answer.margins, answer.certified = [], 0
    return answer


class Prefilled:
    """A target that runs the prefill of one prompt once: each run decodes from a copy of it."""

    def __init__(self, target: Target, inputs: dict, taps: list[int]):
        self.target, self.taps, self.first = target, taps, target.prefill(inputs, taps)

    def __getattr__(self, name):
        return getattr(self.target, name)

    @torch.inference_mode()
    def prefill(self, inputs: dict, taps: list[int] = ()):
        if list(taps) not in ([], self.taps):
            return self.target.prefill(inputs, taps)
        sequence, logits, features = copy.deepcopy(self.first)
        return sequence, logits, features if taps else None


def full_audit(target: Target, head: BlockDraftHead, answers: list[Answer], config: Config, drafters: dict = {}) -> list[dict]:
    """The whole grid: budgets and branches for the head, budgets for drafters that are random, wrong, perfect and broken, and for
    those that were asked for."""
    budgets, faults = (0, 1, 7, 31, 63, 127), []
    grid = [("glance", budget, branch) for budget in budgets for branch in (1, 4, 8)]
    others = {name: drafter for name, drafter in drafters.items() if drafter is not head}
    grid += [(name, budget, 8) for name in ("random", "wrong", "oracle", "nan", *others) for budget in budgets]
    fresh, broken, vocabulary = random_head(head, config.seed), BrokenHead(head), head.config.vocab_size
    for answer in tqdm(answers, desc="full audit", unit="prompt"):
        inputs = encode(target, answer.sample.prompt, answer.sample.image)
        started = Prefilled(target, inputs, list(head.taps))
        for name, budget, branch in grid:
            own = {"glance": head, "random": fresh, "nan": broken, **others}
            drafter = own.get(name) or Scripted(answer.reference, vocabulary, name == "wrong")
            arm = run_arm(started, drafter, inputs, config, budget=budget, branch=branch)
            if arm.tokens != answer.reference:
                before = len(answer.divergences)
                compare(answer, f"{name} N={budget} branch={branch}", arm, answer.arms["greedy"], ROUNDING[config.dtype])
                faults += answer.divergences[before:]
    print(f"full audit: {len(grid)} settings x {len(answers)} prompts, {len(faults)} divergences")
    return faults


# ---------------------------------------------------------------------------------------------------------------------
# Near-ties: the margin, the control, what the gate costs
# ---------------------------------------------------------------------------------------------------------------------


def set_tie_margin(target: Target, samples: dict[str, list[Sample]], config: Config) -> None:
    """`auto` becomes twice the largest difference of a logit between a plain loop's passes and an oracle's N-token passes, on the first
    prompt of each task, up to the first token that differs. Raises BadInput for what is neither a number nor auto."""
    if config.tie_margin == "auto":
        noise, free = 0.0, replace(config, tie_margin="", temperature=0.0)
        for first, *_ in samples.values():
            inputs = encode(target, first.prompt, first.image)
            plain = run_arm(target, None, inputs, free)
            oracle = run_arm(target, Scripted(plain.tokens, len(target.embedding_weight)), inputs, free)
            mine, theirs = (torch.cat([r.logits for r in arm.rounds]) for arm in (oracle, plain))
            upto = next((i for i, (a, b) in enumerate(zip(oracle.tokens, plain.tokens)) if a != b), len(plain.tokens) - 1) + 1
            noise = max(noise, float((mine[:upto] - theirs[:upto]).abs().max()))
        config.tie_margin = str(2 * noise)
        print(f"tie margin {2 * noise:.3g} (twice the noise between one-token and N-token passes on {len(samples)} prompts)")
    try:
        if config.tie_margin and not float(config.tie_margin) >= 0:
            raise ValueError
    except ValueError:
        raise BadInput(f"--tie-margin is auto or a number from 0 up, got {config.tie_margin}") from None


def pooled_tau(arms: list[Generation]) -> float:
    later = [r for arm in arms for r in arm.rounds[1:]]
    return sum(len(r.tokens) for r in later) / max(sum(r.passes for r in later), 1)


def print_temperatures(target: Target, drafters: dict, answers: list[Answer], config: Config) -> None:
    """Sampled text is less predictable: tau at this temperature beside tau at 0, on the same prompts."""
    cold = replace(config, temperature=0.0)
    for name, drafter in drafters.items():
        greedy = [run_arm(target, drafter, encode(target, a.sample.prompt, a.sample.image), cold) for a in answers]
        hot = pooled_tau([a.arms[name] for a in answers])
        print(f"{name}: tau {hot:.2f} at temperature {config.temperature}, {pooled_tau(greedy):.2f} at 0")


def print_control(target: Target, drafters: dict, answers: list[Answer], config: Config) -> None:
    """Does the target reproduce itself between one-token and N-token passes, with an oracle's drafts and no head? And the gate?"""
    free = replace(config, tie_margin="")

    def line(name, arms):
        differ = sum(arm.tokens != a.reference for arm, a in zip(arms, answers))
        gated = sum(r.passes > 1 for arm in arms for r in arm.rounds)
        print(f"  {name:32s} {differ:4d} of {len(answers)} answers differ from the library's, tau {pooled_tau(arms):5.2f}, "
              f"{gated} tokens gated")  # fmt: skip

    prompts, words = [encode(target, a.sample.prompt, a.sample.image) for a in answers], len(target.embedding_weight)
    print(f"\ncontrol, {config.dtype}: the same target, the same text, passes of another width")
    line("one-token passes, no draft", [a.arms["greedy"] for a in answers])
    line("an oracle's drafts, no head", [run_arm(target, Scripted(a.reference, words), i, free) for a, i in zip(answers, prompts)])
    for name, drafter in drafters.items():
        arms = [a.arms[name] for a in answers]
        line(f"{name} without the gate", [run_arm(target, drafter, i, free) for i in prompts] if config.tie_margin else arms)
        if config.tie_margin:
            line(f"{name} with the gate", arms)


# ---------------------------------------------------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------------------------------------------------


def drafted_rounds(answers: list[Answer], name: str) -> list:
    return [r for answer in answers for r in answer.arms[name].rounds[1:]]


def ms_per_token(answers: list[Answer], name: str) -> float:
    """Decode only: the rounds' seconds over the tokens they committed (the first token is the prefill's)."""
    tokens = sum(len(a.arms[name].tokens) - 1 for a in answers)
    return 1e3 * sum(a.arms[name].decode_seconds for a in answers) / max(tokens, 1)


def drafter_figures(answers: list[Answer], name: str, fastest_plain: float) -> dict:
    rounds = drafted_rounds(answers, name)
    tokens, n = sum(len(r.tokens) for r in rounds), max(len(rounds), 1)
    ms = ms_per_token(answers, name)
    return {
        "identical": sum(all(d["drafter"] != name for d in a.divergences) for a in answers),
        "draft_passes": sum(sum(a.arms[name].drafts) for a in answers) / n,
        "tau": tokens / max(sum(r.passes for r in rounds), 1),
        "rounds": len(rounds), "tokens": tokens, "ms_per_token": ms, "speedup": fastest_plain / ms if ms else math.nan,
        "at_cap": sum(r.accepted == r.cap for r in rounds) / n, "accepted": sum(r.accepted for r in rounds) / n,
        "stage_ms": {stage: 1e3 * sum(r.seconds[stage] for r in rounds) / n for stage in ("draft", "tree", "verify", "commit")},
    }  # fmt: skip


def task_figures(answers: list[Answer], drafters: list[str]) -> dict:
    greedy = ms_per_token(answers, "greedy")
    library = 1e3 * sum(a.library_seconds for a in answers) / max(sum(len(a.reference) - 1 for a in answers), 1)
    asked, shown = sum(a.asked for a in answers), sum(a.swapped[1] for a in answers)
    fastest = min(greedy, library)
    return {
        "prompts": len(answers), "identical": sum(not a.divergences for a in answers),
        "accuracy": sum(a.right for a in answers) / asked if asked else None,
        "swapped_accuracy": sum(a.swapped[0] for a in answers) / shown if shown else None,
        "grounding": sum(a.grounding for a in answers) / len(answers), "entropy": sum(a.entropy for a in answers) / len(answers),
        "min_margin": min((m for a in answers for m in a.margins), default=None), "noise": max(a.noise for a in answers),
        "certified": sum(a.certified for a in answers), "positions": sum(len(a.margins) for a in answers),
        "greedy_ms_per_token": greedy, "library_ms_per_token": library,
        "drafters": {name: drafter_figures(answers, name, fastest) for name in drafters},
    }  # fmt: skip


def fit_laws(by_task: dict[str, list[Answer]], name: str) -> dict[str, EntropyLaw | None]:
    """The law on all rounds ("pooled") and on each task's."""
    groups = {"pooled": [a for answers in by_task.values() for a in answers], **by_task}
    laws = {}
    for group, answers in groups.items():
        rounds = drafted_rounds(answers, name)
        columns = ([r.entropy for r in rounds], [float(r.accepted) for r in rounds], [r.cap for r in rounds])
        laws[group] = fit_entropy_law(*map(torch.tensor, columns)) if len(rounds) > 2 else None
    return laws


def law_json(law: EntropyLaw | None) -> dict | None:
    return law and {"b0": law.b0, "b1": law.b1, "interval": law.interval, "r2_deciles": law.r2_deciles, "rounds": law.rounds,
                    "identified": law.identified}  # fmt: skip


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def print_table(tasks: dict[str, dict], drafters: list[str]) -> None:
    percent = lambda x: "    -" if x is None else f"{100 * x:4.0f}%"  # noqa: E731
    print(f"\n{'task':12s} {'prompts':>7s} {'same':>5s} {'right':>5s} {'swap':>5s} {'G':>5s} {'H':>5s} "
          f"{'greedy':>7s} {'library':>7s}" + "".join(f" | {name:>8s} tau {'ms/tok':>6s} {'speed':>6s} {'cap':>4s}" for name in drafters))  # fmt: skip
    for task, t in tasks.items():
        line = (f"{task:12s} {t['prompts']:7d} {t['identical']:5d} {percent(t['accuracy'])} {percent(t['swapped_accuracy'])} "
                f"{t['grounding']:5.2f} {t['entropy']:5.2f} {t['greedy_ms_per_token']:7.2f} {t['library_ms_per_token']:7.2f}")  # fmt: skip
        for d in (t["drafters"][name] for name in drafters):
            line += f" | {d['tau']:12.2f} {d['ms_per_token']:6.2f} {d['speedup']:5.2f}x {100 * d['at_cap']:3.0f}%"
        print(line)
    print("same: answers identical to the library's greedy generate.  right: of what the page says.  swap: the same with another page\n"
          "under the prompt, judged by the page shown.  G: nats of entropy that the page removes.  H: entropy of the target, nats.\n"
          "greedy, library: ms a token, plain loop and model.generate.  tau: tokens per target pass, drafts accepted + 1.\n"
          "speed: against the faster of the two.  cap: rounds in which every draft was accepted.")  # fmt: skip


def print_stages(tasks: dict[str, dict], drafters: list[str]) -> None:
    for name in drafters:
        rounds = sum(t["drafters"][name]["rounds"] for t in tasks.values())
        stage = {s: sum(t["drafters"][name]["stage_ms"][s] * t["drafters"][name]["rounds"] for t in tasks.values()) / max(rounds, 1)
                 for s in ("draft", "tree", "verify", "commit")}  # fmt: skip
        total = sum(stage.values())
        if not total:  # no answer was longer than the prefill's token
            continue
        share = (stage["tree"] + stage["commit"]) / total
        print(f"a round of {name}: " + ", ".join(f"{s} {ms:.2f} ms" for s, ms in stage.items())
              + f"; outside the two passes {100 * share:.1f} %")  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Looking at one page
# ---------------------------------------------------------------------------------------------------------------------


def show(target: Target, head: BlockDraftHead, sample: Sample, config: Config) -> None:
    """Save the page and print its decoding: drafted and accepted tokens green, the target's own (bonus) tokens plain and bold."""
    file = Path(f"page_{sample.task}.png")
    if sample.image is not None:
        sample.image.resize((sample.image.width * 4, sample.image.height * 4), Image.Resampling.NEAREST).save(file)
        print(f"page saved as {file}")
    green, bold, off = ("\033[32m", "\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "[", "]")
    tokenizer = getattr(target.processor, "tokenizer", target.processor)
    arm = run_arm(target, head, encode(target, sample.prompt, sample.image), config)
    print(f"prompt: {sample.prompt}\n{green}draft accepted{off if green else ''}, {bold}the target's own token{off}\n")
    print(f"{'round':>5s} {'H':>6s} {'drafted':>7s} {'accepted':>8s}  text")
    for number, r in enumerate(arm.rounds):
        drafted = tokenizer.decode(r.tokens[: r.accepted])
        own = tokenizer.decode(r.tokens[r.accepted :])
        text = f"{green}{drafted}{off if green else ''}{bold}{own}{off}".replace("\n", "\\n")
        print(f"{number:5d} {r.entropy:6.2f} {len(r.tree):7d} {r.accepted:8d}  {text}")
    print(f"\n{len(arm.tokens)} tokens in {len(arm.rounds) - 1} rounds after the prefill: tau = {arm.tau:.2f}")


def write_rounds(file: str, by_task: dict[str, list[Answer]], drafters: list[str]) -> None:
    with open(file, "w") as out:
        for task, answers in by_task.items():
            for index, answer in enumerate(answers):
                for name in drafters:
                    for number, r in enumerate(answer.arms[name].rounds[1:], start=1):
                        row = {"task": task, "prompt": index, "drafter": name, "round": number, "tokens": r.tokens, "accepted": r.accepted,
                               "cap": r.cap, "nodes": len(r.tree), "entropy": r.entropy, "margins": r.margins, "seconds": r.seconds}  # fmt: skip
                        out.write(json.dumps(row) + "\n")


# ---------------------------------------------------------------------------------------------------------------------


def prepare(config: Config) -> tuple[Target, BlockDraftHead, dict]:
    """Load target and head, and name the drafters. Raises BadInput with one clear line."""
    if config.cost_of not in ("", *SIZES):
        raise BadInput(f"--cost-of is one of {', '.join(SIZES)}, got {config.cost_of}")
    if config.dtype not in ("float32", "bfloat16") or config.audit not in ("default", "full"):
        raise BadInput(f"--dtype is float32 or bfloat16 and --audit default or full, got {config.dtype} and {config.audit}")
    if config.budget < 0 or config.branch < 1 or config.max_new_tokens < 1 or config.temperature < 0:
        raise BadInput("--budget and --temperature are at least 0, --branch and --max-new-tokens at least 1")
    if config.temperature > 0 and config.tie_margin:
        raise BadInput("--tie-margin is for temperature 0 only")
    if missing := [file for file in (config.json, config.rounds) if file and not Path(file).absolute().parent.is_dir()]:
        raise BadInput(f"{missing[0]} cannot be written: its folder does not exist")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # TF32 would blur fp32 by 1e-3
    config.device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("target", "head", "eagle", "narrow_head", "blind_head"):  # the shipped ones are found from any working directory
        if not Path(getattr(config, name)).exists() and (HERE / getattr(config, name)).exists():
            setattr(config, name, str(HERE / getattr(config, name)))
    try:
        if config.report:
            Path(config.report).mkdir(parents=True, exist_ok=True)  # now, and not after ten minutes
        target = Target.load(config.target, config.dtype, config.device)
        head = BlockDraftHead.from_pretrained(config.head, target.dtype, config.device)
        head.check(target)
    except (OSError, ValueError, RuntimeError, AssertionError) as error:  # the last two: a device that torch does not know or has not
        raise BadInput(str(error).splitlines()[0]) from None
    drafters = build_drafters(config, target, head, [name.strip() for name in config.drafters.split(",")])
    return target, head, report_drafters(config, target, head, drafters) if config.report else drafters


def build_drafters(config: Config, target: Target, head: BlockDraftHead, names: list[str]) -> dict:
    """{name: drafter}; a reader's own goes by its class name. Raises BadInput for one that is unknown or cannot be made."""

    @cache
    def eagle():
        made = glance.Eagle3Head.from_pretrained(config.eagle, target.dtype, config.device)
        made.check(target)
        return made

    known = {
        "glance": lambda: head, "spine": lambda: Spine(head), "ngram": glance.NGram, "auto": lambda: glance.AutoBudget(head),
        "eagle3": lambda: glance.EagleChain(eagle(), 3), "eagle8": lambda: glance.EagleChain(eagle(), 8),
        "eagletree": lambda: glance.EagleTree(eagle(), 8),
    }  # fmt: skip
    drafters = {}
    for name in names:
        file, _, own = name.rpartition(":")
        if name not in known and not file.endswith(".py"):
            raise BadInput(f"unknown drafter {name}; there are {', '.join(known)} and my_file.py:MyDrafter")
        if own in drafters or (file and own in known):
            raise BadInput(f"two drafters are called {own}")
        try:
            drafters[own] = known[name]() if name in known else own_drafter(file, own, head=head, target=target)
            drafters[own].taps, drafters[own].propose  # noqa: B018
        except Exception as error:  # a reader's file may fail in any way
            raise BadInput(f"drafter {name}: {type(error).__name__}: {error}") from error
    return drafters


def own_drafter(file: str, name: str, **parts):
    """An instance of class `name` in a reader's file, made with those of `head` and `target` that its __init__ names."""
    spec = importlib.util.spec_from_file_location(f"own_{Path(file).stem}", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = getattr(module, name)
    return made(**{part: value for part, value in parts.items() if part in inspect.signature(made).parameters})


def environment(config: Config) -> dict:
    gpu = torch.cuda.get_device_name() if config.device.startswith("cuda") else None
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
            "device": config.device, "gpu": gpu, "machine": platform.machine(), "threads": torch.get_num_threads()}  # fmt: skip


def measure(target: Target, drafters: dict, samples: dict[str, list[Sample]], config: Config) -> dict[str, list[Answer]]:
    """Every prompt by every arm, each prompt's arms one after the other. {task: answers}."""
    first = next(iter(samples.values()))[0]
    for drafter in [None, *drafters.values()]:  # warm-up, not counted
        run_arm(target, drafter, encode(target, first.prompt, first.image), config)
    by_task, total = {task: [] for task in samples}, sum(map(len, samples.values()))
    gc.collect()
    gc.freeze()  # what is loaded is not searched for garbage meanwhile: that took 0.2 s in the middle of a round
    try:
        with tqdm(total=total, unit="prompt", file=sys.stderr) as bar:
            for task, rows in samples.items():
                bar.set_description(task)
                for i, sample in enumerate(rows):
                    by_task[task].append(answer_prompt(target, drafters, sample, swap_partner(rows, i), config))
                    bar.update()
    finally:
        gc.unfreeze()
    return by_task


def report(config: Config, drafters: dict, by_task: dict[str, list[Answer]], divergences: list[dict]) -> dict:
    names = list(drafters)
    tasks = {task: task_figures(answers, names) for task, answers in by_task.items()}
    laws = fit_laws(by_task, names[0])
    print_table(tasks, names[:2])
    matched = matched_table(tasks, by_task, names)
    if names != ["glance", "spine"]:
        print("\n" + matched.markdown())
    print_stages(tasks, names)
    for d in divergences[:20]:
        kind = "uncertified (margin within the noise)" if d["uncertified"] else "DIVERGENCE"
        print(f"{kind}: {d['task']}, {d['drafter']}, position {d['position']}, margin {d['margin']:.3g}, noise {d['noise']:.3g}")
    total = {"prompts": sum(t["prompts"] for t in tasks.values()), "identical": sum(t["identical"] for t in tasks.values()),
             "uncertified": sum(d["uncertified"] for d in divergences),
             "geomean_speedup": {n: geometric_mean([t["drafters"][n]["speedup"] for t in tasks.values()]) for n in names}}  # fmt: skip
    certified, positions = (sum(t[key] for t in tasks.values()) for key in ("certified", "positions"))
    margin = min((t["min_margin"] for t in tasks.values() if t["min_margin"] is not None), default=math.nan)
    print(f"\nlossless: {total['identical']} of {total['prompts']} prompts identical; smallest margin {margin:.2g}, largest noise "
          f"{max(t['noise'] for t in tasks.values()):.2g}; {certified} of {positions} positions certified (margin > 2 x noise there)")  # fmt: skip
    print("speed:    " + ", ".join(f"{n} {v:.2f}x" for n, v in total["geomean_speedup"].items()) + " over greedy (geometric mean of tasks)")
    said = {group: law or "not identified: two rounds or fewer" for group, law in laws.items()}
    print(f"law:      logit p = b0 - b1 H, {names[0]}, pooled: {said['pooled']}")
    for task in tasks:
        print(f"          {task:12s} {said[task]}")
    law = {"pooled": law_json(laws["pooled"]), "tasks": {task: law_json(laws[task]) for task in tasks}}
    return {"config": asdict(config), "environment": environment(config), "tasks": tasks, "total": total, "law": law,
            "matched": asdict(matched), "divergences": divergences}  # fmt: skip


def tau_ratio(ours: torch.Tensor, theirs: torch.Tensor, draws: int = 1000) -> tuple[float, float, float]:
    """Pooled tau of one arm over another's, and its 95 % interval. A row (tokens, rounds) is a prompt, drawn with both arms."""

    def ratio(rows):
        (a, b), (c, d) = ours[rows].sum(0), theirs[rows].sum(0)
        return (a / b) / (c / d)

    everyone = torch.arange(len(ours))
    return float(ratio(everyone)), *interval(bootstrap(everyone, ratio, draws))


def matched_table(tasks: dict[str, dict], by_task: dict[str, list[Answer]], names: list[str]) -> Table:
    """Every drafter on every task. tau and time stand apart: a narrow tree may be the faster one with the lower tau."""
    everyone = [a for answers in by_task.values() for a in answers]
    pooled = task_figures(everyone, names)
    for name, d in pooled["drafters"].items():
        d["speedup"] = geometric_mean([t["drafters"][name]["speedup"] for t in tasks.values()])
    rows = [[task, name, d["tau"], d["draft_passes"], d["ms_per_token"], d["speedup"], f"{d['identical']} of {t['prompts']}"]
            for task, t in {**tasks, "all": pooled}.items() for name, d in t["drafters"].items()]  # fmt: skip
    columns = ["task", "drafter", "tau", "draft passes/round", "ms/token", "speed-up", "identical"]
    table = Table("matched", "Every drafter in the same loop", columns, rows)
    table.notes.append("All: tau and time of all tokens together, geometric mean of the tasks' speed-ups.")
    counts = {n: torch.tensor([[len(a.arms[n].tokens) - 1.0, sum(r.passes for r in a.arms[n].rounds[1:])] for a in everyone])
              for n in names}  # fmt: skip
    for name in names[1:]:
        ratio, low, high = tau_ratio(counts[names[0]], counts[name])
        table.notes.append(f"tau of {names[0]} / {name}: {ratio:.2f} (95 %: {low:.2f} to {high:.2f}, bootstrap over prompts)")
    return table


def peak_memory() -> str:
    try:
        import resource
    except ImportError:  # Windows does not count it
        return ""
    unit = 2**30 if sys.platform == "darwin" else 2**20  # bytes on macOS, KiB elsewhere
    return f", peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit:.1f} GiB"


def main(arguments: list[str] | None = None) -> int:
    transformers.utils.logging.disable_progress_bar()
    began = time.time()
    try:
        config = parse(Config, __doc__, arguments)
        samples = load_samples(config)
        config.tasks = ",".join(samples)  # what the run line, the JSON and the report's commands name
        if config.show and config.show not in samples:
            raise BadInput(f"--show {config.show}: there are {', '.join(samples)}")
        target, head, drafters = prepare(config)
        samples = {task: [sample.for_target(target) for sample in rows] for task, rows in samples.items()}
        set_tie_margin(target, samples, config)
    except (BadInput, ValueError) as error:
        print(f"verify.py: {error}", file=sys.stderr)
        return 2
    idle = () if config.report else REPORT_OPTIONS
    print("  ".join(f"{k}={v}" for k, v in asdict(config).items() if v != "" and k not in idle))
    if dropped := dropped_processors(target):
        print(f"not applied, from the target's own generation config: {', '.join(dropped)}")
    if config.show:
        show(target, head, samples[config.show][0], config)
        return 0
    before = parameter_hash(target.model)
    blind = drafters.pop("blind", None)  # its states are another page's: it is run apart
    try:
        by_task = measure(target, drafters, samples, config)
    except ValueError as error:  # what a drafter of one's own returned, or a prompt beyond what the target can verify
        print(f"verify.py: {error}", file=sys.stderr)
        return 2
    everyone = [answer for answers in by_task.values() for answer in answers]
    if config.audit == "full":
        full_audit(target, head, everyone, config, drafters)
    if config.temperature > 0:
        print_temperatures(target, drafters, everyone, config)
    elif config.tie_margin or config.dtype != "float32":
        print_control(target, drafters, everyone, config)
    tables = report_tables(target, head, drafters, blind, samples, by_task, config) if config.report else []
    results = report(config, drafters, by_task, [d for a in everyone for d in a.divergences])
    if config.report:
        write_report(tables, results, config)
    untouched = parameter_hash(target.model) == before
    print(f"target parameters {'unchanged' if untouched else 'CHANGED'}; {time.time() - began:.0f} s{peak_memory()}")
    if config.json:
        Path(config.json).write_text(json.dumps(results, indent=1) + "\n")
    if config.cost_of:
        print_cost(config, results["tasks"])
    if config.rounds:
        write_rounds(config.rounds, by_task, list(drafters))
    return 0 if untouched and results["total"]["identical"] == results["total"]["prompts"] else 1


# ---------------------------------------------------------------------------------------------------------------------
# Not the audit: the report
#
# `--report DIR` makes every table again. First the statistics: pure functions of arrays, one entry a round.
# ---------------------------------------------------------------------------------------------------------------------

TABLES = ("matched", "copy", "generalisation", "vision", "budget", "law")
EVERY = ("glance", "spine", "eagle3", "eagle8", "eagletree", "ngram", "auto")
BUDGETS = (1, 3, 7, 15, 31, 63, 127)
PAGES = (1, 2, 4, 8, 16)  # under one prompt: 64 to 1,024 vision tokens


@dataclass
class Table:
    name: str  # as in --tables
    title: str
    columns: list[str]
    rows: list[list]
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        def cell(value) -> str:
            if isinstance(value, tuple):
                return f"{cell(value[0])} to {cell(value[1])}"
            if value is None or value != value:
                return "-"
            return f"{value:.2f}" if isinstance(value, float) else str(value)

        cells = [self.columns, *([cell(value) for value in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells)]
        lines = ["| " + " | ".join(map(str.rjust, row, widths)) + " |" for row in cells]
        lines.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
        return "\n".join(lines) + "".join(f"\n\n{note}" for note in self.notes)


# Many rounds as columns [R]: numbers of arm, task and prompt (over all tasks); H, a, cap, tokens committed; gain, the nats that
# the page takes off the entropy of the round's first token; seconds.
Rounds = namedtuple("Rounds", "arm task prompt entropy accepted cap tokens gain seconds")


def pick(rounds: Rounds, rows: torch.Tensor) -> Rounds:
    return Rounds(*(column[rows] for column in rounds))


def expected(x: torch.Tensor, cap: torch.Tensor, form: str = "series") -> tuple[torch.Tensor, torch.Tensor]:
    """E[a] and its slope in x = logit p. "series": the paper's p + ... + p^cap; "ratio": its code's min(p / (1 - p), cap)."""
    if form == "ratio":  # p / (1 - p) = e^x
        value = x.clamp(max=30).exp()
        return value.minimum(cap), torch.where(value < cap, value, 0)
    p, k = x.sigmoid(), torch.arange(1, int(cap.max()) + 1)
    powers = p[:, None].expand(-1, len(k)).cumprod(1) * (k <= cap[:, None])  # p^k  [R, L]
    return powers.sum(1), (powers * k).sum(1) * (1 - p)


def fit(rounds: Rounds, form: str = "series", effects: bool = False) -> torch.Tensor:
    """(b0, b1) of logit p = b0 - b1 H that minimise sum (a - E[a])^2; with `effects` each task has its own b0, and b1 comes last.

    Gauss-Newton with halved steps: fast enough to bootstrap. The whisper of a prior is that of `fit_entropy_law`.
    """
    groups = rounds.task.unique(return_inverse=True)[1] if effects else torch.zeros(len(rounds.task), dtype=torch.long)
    x = torch.cat([torch.nn.functional.one_hot(groups).double(), -rounds.entropy[:, None]], dim=1)  # logit p = x @ b
    b = torch.zeros(x.shape[1], dtype=torch.float64)
    if form == "ratio":  # flat where the cap holds: it must start near
        b = fit(rounds, "series", effects)
    prior = 1e-6 * len(x)

    def state(b):
        value, slope = expected(x @ b, rounds.cap, form)
        return rounds.accepted - value, slope, ((rounds.accepted - value) ** 2).sum() + prior * b @ b

    for _ in range(100):
        miss, slope, loss = state(b)
        jacobian = x * slope[:, None]
        step = torch.linalg.solve(jacobian.T @ jacobian + prior * torch.eye(len(b)), jacobian.T @ miss - prior * b)
        while step.norm() > 1e-8 and not state(b + step)[2] < loss:
            step = step / 2
        b = b + step
        if step.norm() <= 1e-6:
            break
    return b


def predict(b: torch.Tensor, rounds: Rounds) -> torch.Tensor:
    return expected(b[0] - b[1] * rounds.entropy, rounds.cap)[0]


def bootstrap(prompt: torch.Tensor, statistic, draws: int = 200, seed: int = 0) -> torch.Tensor:
    """statistic(rows) [draws, ...] with prompts drawn anew, each with all of its rounds and all of its arms."""
    groups = prompt.argsort(stable=True).split(prompt.unique(return_counts=True)[1].tolist())
    picks = torch.randint(len(groups), (draws, len(groups)), generator=torch.Generator().manual_seed(seed)).tolist()
    return torch.stack([statistic(torch.cat([groups[i] for i in pick])) for pick in picks])


def interval(values: torch.Tensor) -> tuple[float, float]:
    """95 % of the draws [draws]; inf is allowed."""
    return tuple(torch.nanquantile(values.double(), torch.tensor([0.025, 0.975]).double(), interpolation="nearest").tolist())


def rank_correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    def ranks(values):  # equals share their mean rank
        _, place, counts = values.unique(return_inverse=True, return_counts=True)
        return (counts.cumsum(0) - (counts - 1) / 2).double()[place]

    return float(torch.corrcoef(torch.stack([ranks(x), ranks(y)]))[0, 1])


def r2(actual: torch.Tensor, fitted: torch.Tensor) -> float:
    return float(1 - ((actual - fitted) ** 2).sum() / ((actual - actual.mean()) ** 2).sum())


def ceiling(entropy: torch.Tensor, accepted: torch.Tensor, bins: int = 30) -> float:
    """R^2 on rounds that the best function of H alone would reach: means of equal-count bins, corrected for their number."""
    groups, fitted = entropy.argsort(stable=True).tensor_split(min(bins, max(len(entropy) // 10, 1))), torch.empty_like(accepted)
    for group in groups:
        fitted[group] = accepted[group].mean()
    return 1 - (1 - r2(accepted, fitted)) * (len(entropy) - 1) / (len(entropy) - len(groups))


def law_figures(rounds: Rounds, draws: int) -> dict:
    """Everything that is said of one task's rounds, or of all of them."""
    b, other = fit(rounds), fit(rounds, "ratio")
    predicted = predict(b, rounds)
    whole = pick(rounds, rounds.cap == rounds.cap.max())  # one cap: H is all that differs
    explained = r2(whole.accepted, predict(fit(whole), whole))
    most = ceiling(whole.entropy, whole.accepted)
    both = lambda rows: torch.stack([fit(pick(rounds, rows), form)[-1] for form in ("series", "ratio")])  # noqa: E731
    slopes = bootstrap(rounds.prompt, both, draws)
    grounded = rounds.tokens[rounds.gain >= 1]
    return {
        "rounds": len(rounds.task), "H": float(rounds.entropy.mean()), "b0": float(b[0]), "b1": float(b[1]),
        "b1 95 %": interval(slopes[:, 0]),
        "b0 ratio form": float(other[0]), "b1 ratio form": float(other[1]), "its 95 %": interval(slopes[:, 1]),
        "R2 deciles": r2_on_deciles(rounds.entropy, rounds.accepted, predicted), "R2 rounds": r2(rounds.accepted, predicted),
        "share of ceiling": explained / most if most > 0.005 else math.nan,
        "rank corr.": rank_correlation(rounds.entropy, rounds.accepted),
        "b1 sd(H)": float(b[1] * rounds.entropy.std()), "tau": float(rounds.tokens.mean()),
        "tau grounded": float(grounded.mean()), "slopes": slopes[:, 0],
    }  # fmt: skip


def permuted(rounds: Rounds, seed: int) -> Rounds:
    """H dealt out anew among the rounds of each task: what is left is what the tasks' means alone would show."""
    g = torch.Generator().manual_seed(seed)
    mixed = (rounds.task + torch.rand(len(rounds.task), generator=g, dtype=torch.float64)).argsort()
    entropy = torch.empty_like(rounds.entropy)
    entropy[rounds.task.argsort(stable=True)] = rounds.entropy[mixed]
    return rounds._replace(entropy=entropy)


def verdict(pooled: tuple[float, float], within: tuple[float, float], rounds: int) -> str:
    """One line from b1's intervals, pooled and with task effects."""
    if rounds < EntropyLaw.MINIMUM_ROUNDS:
        return f"not identified: {rounds} rounds"
    if within[0] > 0:
        return "the law holds inside tasks: b1 > 0 with an intercept for each task"
    if within[1] < 0:
        return "the reverse of the law: inside tasks more is accepted where entropy is higher"
    return "no law inside tasks: b1 " + ("> 0 only between them, and a few means prove little" if pooled[0] > 0 else "spans 0")


def law_controls(rounds: Rounds, pooled: dict, draws: int) -> Table:
    """What would show if the pooled law were an artefact."""
    within = interval(bootstrap(rounds.prompt, lambda rows: fit(pick(rounds, rows), effects=True)[-1], draws))
    shuffles = [permuted(rounds, seed) for seed in range(20)]
    alone = torch.stack([torch.stack([fit(s)[-1], fit(s, effects=True)[-1]]) for s in shuffles])
    chance = [r2_on_deciles(s.entropy, s.accepted, predict(fit(s), s)) for s in shuffles]
    rows = [["pooled", pooled["b1"], pooled["b1 95 %"], pooled["R2 deciles"]],
            ["an intercept for each task", float(fit(rounds, effects=True)[-1]), within, None],
            ["H permuted within tasks (20 times), pooled", float(alone[:, 0].mean()), interval(alone[:, 0]), sum(chance) / 20],
            ["the same, an intercept for each task", float(alone[:, 1].mean()), interval(alone[:, 1]), None]]  # fmt: skip
    return Table("law", "Controls of the law", ["control", "b1", "95 %", "R2 deciles"], rows,
                 ["Verdict: " + verdict(pooled["b1 95 %"], within, pooled["rounds"]) + "."])  # fmt: skip


def law_by_task(rounds: Rounds, names: list[str], grounding: list[float], draws: int) -> tuple[Table, dict]:
    """b0 and b1 of all rounds and of each task, with what speaks for and against them. Returns the pooled figures too."""
    per_task = [pick(rounds, rounds.task == t) for t in range(len(names))]
    figures = [law_figures(part, draws) for part in (rounds, *per_task)]
    low = max(float(part.entropy.quantile(0.05)) for part in per_task)  # the range of H that all tasks share
    high = min(float(part.entropy.quantile(0.95)) for part in per_task)
    for part, row in zip((rounds, *per_task), figures):
        shared = pick(part, (part.entropy >= low) & (part.entropy <= high))
        row["b1 shared H"] = float(fit(shared)[-1]) if len(shared.task) >= 50 else math.nan
    drawn, g = torch.stack([row.pop("slopes") for row in figures[1:]], dim=1), torch.tensor(grounding)
    figures[0].pop("slopes")
    order = rank_correlation(torch.tensor([row["b1"] for row in figures[1:]]), g)
    least, most = interval(torch.tensor([rank_correlation(slopes, g) for slopes in drawn]))
    rows = [[name, at, *row.values()] for name, at, row in zip(["pooled", *names], [math.nan, *grounding], figures)]
    notes = ["Share of ceiling: R2 on rounds with the full cap, over what the best function of H reaches there.",
             "Grounded: rounds at whose first token the page takes a nat or more off the entropy.",
             f"Shared H: {low:.2f} to {high:.2f} nats" + (" (empty)." if low >= high else "."),
             f"b1 against G, rank correlation of {len(names)} tasks: {order:.2f} (95 %: {least:.2f} to {most:.2f})."]  # fmt: skip
    return Table("law", "The entropy law", ["task", "G", *figures[0]], rows, notes), figures[0]


def law_held_out(rounds: Rounds, names: list[str]) -> Table:
    """The law of one half of the prompts, asked for tau on the other half, and the other way round."""
    first = torch.isin(rounds.prompt, torch.cat([rounds.prompt[rounds.task == t].unique()[::2] for t in rounds.task.unique()]))
    foretold = torch.empty_like(rounds.entropy)
    for here in (first, ~first):
        foretold[here] = predict(fit(pick(rounds, ~here)), pick(rounds, here))
    groups = [("all", torch.ones_like(first)), *((name, rounds.task == t) for t, name in enumerate(names))]
    rows = [[name, 1 + float(rounds.accepted[at].mean()), 1 + float(foretold[at].mean()),
             r2_on_deciles(rounds.entropy[at], rounds.accepted[at], foretold[at])] for name, at in groups]  # fmt: skip
    return Table("law", "The law of half of the prompts on the other", ["task", "1 + mean a", "foretold", "R2 deciles"], rows)


def crossing(rounds: Rounds, theirs: int, grid: torch.Tensor) -> torch.Tensor:
    """The first H of the grid at which arm `theirs` is 1 % ahead of arm 0: in tau, and in ms a token [2]. inf if it never is."""
    tau, ms = [], []
    for arm in (0, theirs):
        own = pick(rounds, rounds.arm == arm)
        b = fit(own)
        tau.append(1 + expected(b[0] - b[1] * grid, own.cap.max().expand_as(grid))[0])
        ms.append(own.seconds.mean() / tau[-1])
    ahead = torch.stack([tau[1] > 1.01 * tau[0], ms[0] > 1.01 * ms[1]])
    return torch.where(ahead.any(dim=1), grid[ahead.long().argmax(dim=1)], math.inf)


def law_crossing(rounds: Rounds, arms: list[str], draws: int) -> Table:
    top = float(rounds.entropy.quantile(0.99))
    grid, rows = torch.linspace(0, top, 400, dtype=torch.float64), []
    for arm in range(1, len(arms)):
        at = crossing(rounds, arm, grid)
        drawn = bootstrap(rounds.prompt, lambda rows, arm=arm: crossing(pick(rounds, rows), arm, grid), draws)
        rows.append([arms[arm], float(at[0]), interval(drawn[:, 0]), float(at[1]), interval(drawn[:, 1])])
    note = f"By 1 %, by each arm's law, H up to {top:.2f} nats (99 % of rounds); inf: at none. ms: mean time of a round / tau."
    columns = ["chain", "in tau", "95 %", "in ms/token", "95 % "]
    return Table("law", f"H from which a chain is ahead of {arms[0]}", columns, rows, [note])


def law_tables(rounds: Rounds, names: list[str], grounding: list[float], arms: list[str], draws: int) -> list[Table]:
    ours = pick(rounds, rounds.arm == 0)
    table, pooled = law_by_task(ours, names, grounding, draws)
    deciles = [[arm, i + 1, float(own.entropy[g].mean()), float(own.accepted[g].mean()), float(predicted[g].mean())]
               for number, arm in enumerate(arms) for own in [pick(rounds, rounds.arm == number)]
               for predicted in [predict(fit(own), own)]
               for i, g in enumerate(own.entropy.argsort(stable=True).tensor_split(10))]  # fmt: skip
    curve = Table("law", "Accepted length by decile of H", ["drafter", "decile", "mean H", "mean a", "law"], deciles)
    return [table, law_controls(ours, pooled, draws), law_held_out(ours, names), law_crossing(rounds, arms, draws), curve]


def copied_runs(pieces: list[str], page: str, shortest: int = 4) -> list[tuple[int, int]]:
    """(start, stop) of the longest runs of tokens whose text stands on the page, left to right. Any white space is one blank."""
    runs, start = [], 0
    while start < len(pieces):
        stop = start
        while stop < len(pieces) and " ".join("".join(pieces[start : stop + 1]).split()) in page:
            stop += 1
        if stop - start >= shortest:
            runs.append((start, stop))
        start = stop if stop - start >= shortest else start + 1
    return runs


def copy_costs(committed: list[int], passes: list[int], runs: list[tuple[int, int]]) -> torch.Tensor:
    """[tokens, rounds] that start inside a run, the same outside, target and draft passes of the rounds that touch a run: [6].

    committed[i], passes[i]: tokens and draft passes of round i. Token 0 of the answer is the prefill's, so round 0 starts at 1.
    """
    sums, start = [0] * 6, 1
    for tokens, drafts in zip(committed, passes):
        at = 0 if any(a <= start < b for a, b in runs) else 2
        touched = sum(a < start + tokens and start < b for a, b in runs)
        for i, more in ((at, tokens), (at + 1, 1), (4, touched), (5, touched * drafts)):
            sums[i] += more
        start += tokens
    return torch.tensor(sums)


def auto_against_fixed(ms: list[dict[str, list[float]]]) -> float:
    """Speed of auto over that of the fixed budget that was best on the *other* half. ms[half][name]: ms a token, task by task."""
    ratios = []
    for here, other in (ms, ms[::-1]):
        best = min((name for name in other if name != "auto"), key=lambda name: geometric_mean(other[name]))
        ratios.append(geometric_mean(here[best]) / geometric_mean(here["auto"]))
    return geometric_mean(ratios)


# -- what is measured for them ----------------------------------------------------------------------------------------


def printed(page: Page) -> str:
    """The text on a page, row by row. Marks for shapes are no text; a glyph of a large sign fills two cells of two rows."""
    rows = []
    for cells in page.cells:
        row = "".join(" " if sign in COLOUR_CODES + SHAPE_CODES else sign for sign in cells).strip()
        if page.task == "scene_text" and row and row[::2] == row[1::2]:
            row = row[::2]
        rows += [row] if row not in rows[-1:] else []
    return " ".join(" ".join(rows).split())


def copy_tables(target: Target, by_task: dict[str, list[Answer]], names: list[str]) -> list[Table]:
    decode_piece, lengths, costs = getattr(target.processor, "tokenizer", target.processor).decode, [], []
    for task, answers in by_task.items():
        read = [answer for answer in answers if answer.sample.page]
        runs = [copied_runs([decode_piece([t]) for t in a.reference], printed(a.sample.page)) for a in read]
        sizes = torch.tensor([float(stop - start) for spans in runs for start, stop in spans])
        share = float(sizes.sum()) / max(sum(len(a.reference) for a in read), 1)
        if not len(sizes):
            lengths.append([task, len(read), 0.0, None, None, None, share])
            continue
        lengths.append([task, len(read), len(sizes) / len(read), *sizes.quantile(torch.tensor([0.5, 0.9, 1.0])).tolist(), share])
        for name in names:
            arms = [a.arms[name] for a in read]
            s = sum(copy_costs([len(r.tokens) for r in arm.rounds[1:]], arm.drafts, spans) for arm, spans in zip(arms, runs))
            inside, outside, verified, drafted = s[0] / s[1], s[2] / s[3], s[4] / len(sizes), s[5] / len(sizes)
            costs.append([task, name, *map(float, (inside, outside, verified, drafted))])
    columns = ["task", "drafter", "tau inside", "tau outside", "target passes/run", "draft passes/run"]
    note = "A run is four or more tokens that stand on the page as they are. Inside: rounds whose first token lies in one."
    heads = ["task", "answers", "runs/answer", "median tokens", "90 %", "longest", "share of tokens"]
    return [Table("copy", "Runs that answers copy off the page", heads, lengths, [note]),
            Table("copy", "What a copied run costs", columns, costs, ["Passes of all rounds that touch the run."])]  # fmt: skip


@torch.inference_mode()
def depth_table(target: Target, heads: dict, by_task: dict[str, list[Answer]], depths: tuple[int, ...] = (1, 2, 3, 4, 6, 8)) -> Table:
    """How far each head's best words hold, from every token of every held-out answer, over the target's own states: no tree, no loop."""
    rows = []
    for name, head in heads.items():
        for task, answers in by_task.items():
            runs, left = [], []  # drafts that held, and tokens that were left, by start
            for answer in (a for a in answers if len(a.reference) > 1):
                inputs = encode(target, answer.sample.prompt, answer.sample.image)
                tokens, first = inputs["input_ids"][0].tolist() + answer.reference, inputs["input_ids"].shape[1]
                laws, features = target.teacher_force(inputs, answer.reference, head.taps)
                if isinstance(head, glance.Eagle3Head):
                    runs.append(eagle_loss(head, target, features, tokens, laws.float().softmax(dim=-1))[1])
                else:
                    runs.append(block_loss(head, target, features, tokens, torch.arange(first, len(tokens) - 1))[1])
                left.append(torch.arange(len(answer.reference) - 1, 0, -1))
            held, left = torch.cat(runs).cpu(), torch.cat(left)
            rows.append([task, name, len(held), *(float((held[left >= k] >= k).float().mean()) for k in depths)])
    sizes = ", ".join(f"{name} {sum(w.numel() for w in head.parameters()) / 1e6:.2f} M" for name, head in heads.items())
    note = f"Every token of an answer is a start once, for all k that are left behind it. Parameters: {sizes}."
    columns = ["task", "head", "starts", *(f"k={k}" for k in depths)]
    return Table("matched", "Share of starts whose first k drafts are all right", columns, rows, [note])


def narrow_table(by_task: dict[str, list[Answer]]) -> Table:
    taus = [[pooled_tau([a.arms[name] for a in answers]) for name in ("glance", "narrow")] for answers in by_task.values()]
    rows = [[task, both, narrow, narrow / both] for task, (both, narrow) in zip(by_task, taus)]
    columns = ["task", "tau, trained on all tasks", "tau, on two", "ratio"]
    return Table("generalisation", "A head trained on captions and scene text only", columns, rows)


def vision_table(target: Target, drafters: dict, sample: Sample, config: Config) -> Table:
    """Draft time against the number of vision tokens: more and more pages before one prompt. What is written does not matter."""
    rows, alone = [], len(encode(target, sample.prompt, None)["input_ids"][0])
    options = {"max_new_tokens": min(48, config.max_new_tokens), "end_ids": []}
    for pages in PAGES:
        inputs = target.encode(sample.prompt, [sample.image] * pages)
        for name, drafter in drafters.items():
            arms = [run_arm(target, drafter, inputs, config, **options) for _ in range(3)]
            draft, verified = (torch.tensor([[1e3 * r.seconds[stage] for r in arm.rounds] for arm in arms]).amin(dim=0)
                               for stage in ("draft", "verify"))  # fmt: skip
            times = (verified[0], draft[1], draft[2:].median(), verified[1:].median())
            rows.append([pages, len(inputs["input_ids"][0]) - alone, name, *map(float, times)])
    columns = ["pages", "vision tokens", "drafter", "prefill ms", "first draft ms", "later drafts ms", "verify ms"]
    note = "Fastest of three runs, median of rounds. Vision tokens count the marks around a page."
    return Table("vision", "Draft time against vision tokens", columns, rows, [note])


def blank_page(target: Target, sample: Sample) -> dict | None:
    """The prompt with a white page, or without the page's text; None for a prompt that has no page."""
    if sample.image is not None:
        return encode(target, sample.prompt, Image.new("RGB", sample.image.size, "white"))
    return encode(target, sample.page.prompt, None) if sample.page else None


def states_of(blank: dict, taps: list[int]):
    """Change of context: the states the target has when it reads the same prompt and answer beside a blank page."""

    def change(context) -> dict:
        target, memory = context.target, context.memory
        if "blank" not in memory:
            memory["blank"], _, fresh = target.prefill(blank, taps)
            return {"fresh": fresh}
        new = context.tokens[memory["blank"].length : -1]
        line = CandidateTree.empty(new[0])
        for token in new[1:]:
            line.add(len(line), token, 0.0)
        _, fresh = target.verify(memory["blank"], line, taps)
        target.commit(memory["blank"], line, list(range(1, len(new))))
        return {"fresh": fresh}

    return change


def page_removed(target: Target, head: BlockDraftHead, blind, by_task: dict[str, list[Answer]], config: Config) -> Table:
    """tau without sight: by a head that was trained so, and by the shipped head with its states zeroed."""
    rows = []
    for task, answers in by_task.items():
        arms = {"zeroed": []} | ({"blank": []} if blind else {})
        for answer in (a for a in answers if a.sample.image is not None):
            inputs, blank = encode(target, answer.sample.prompt, answer.sample.image), blank_page(target, answer.sample)
            change = {"zeroed": lambda c: {"fresh": torch.zeros_like(c.fresh)}, "blank": states_of(blank, head.taps)}
            for name in arms:
                arms[name].append(run_arm(target, Altered(blind if name == "blank" else head, change[name]), inputs, config))
                compare(answer, name, arms[name][-1], answer.arms["greedy"], ROUNDING[config.dtype])
        fused, zeroed = pooled_tau([a.arms["glance"] for a in answers]), pooled_tau(arms["zeroed"])
        without = pooled_tau(arms["blank"]) if blind else math.nan
        rows.append([task, fused, without, without / fused, zeroed])
    columns = ["task", "tau", "tau, trained and run on blank pages", "kept", "tau, states zeroed only now (out of distribution)"]
    return Table("vision", "The page removed from the head", columns, rows)


def budget_table(by_task: dict[str, list[Answer]], auto) -> Table:
    names, everyone = [f"N={n}" for n in BUDGETS] + ["auto"], [a for answers in by_task.values() for a in answers]
    tasks = [task_figures(answers, names) for answers in by_task.values()]
    pooled, rows = task_figures(everyone, names), []
    for name in names:
        d, nodes = pooled["drafters"][name], [len(r.tree) for r in drafted_rounds(everyone, name)]
        speed = geometric_mean([t["drafters"][name]["speedup"] for t in tasks])
        draft = d["stage_ms"]["draft"] + d["stage_ms"]["tree"]
        rows.append([name, sum(nodes) / max(len(nodes), 1), d["tau"], draft, d["stage_ms"]["verify"], d["ms_per_token"], speed,
                     f"{d['identical']} of {len(everyone)}"])  # fmt: skip
    kept = ", ".join(f"{n}: {c:.2f}" for n, c in auto.calibration.items())
    chosen = ", ".join(f"{n}: {times}" for n, times in auto.chosen.items())
    notes = [f"Accepted / expected of the nodes that N adds to the budget before it: {kept}. Rounds at N: {chosen}"]
    if all(len(answers) > 1 for answers in by_task.values()):
        ms = [{name: [ms_per_token(answers[half::2], name) for answers in by_task.values()] for name in names} for half in (0, 1)]
        notes.append(f"Speed of auto over the budget that was best on the other half of prompts: {auto_against_fixed(ms):.3f}")
    columns = ["budget", "nodes", "tau", "draft + tree ms", "verify ms", "ms/token", "speed-up", "identical"]
    return Table("budget", "Budgets", columns, rows, notes)


def law_sweep(target: Target, arms: dict, samples: dict[str, list[Sample]], config: Config) -> tuple[Rounds, list[float]]:
    """Rounds of every arm on pages of their own, a page of each task in turn, until the first arm has enough; and G by task."""
    first, rows, gains, done = HELD_OUT + config.seed * 100_000 + 50_000, [], {task: [] for task in samples}, 0
    pages = ((task, make_page(task, first + i)) for i in count() for task in samples)
    drawn = (Sample(task, page.image, page.prompt, page).for_target(target) for task, page in pages)
    stream = chain.from_iterable(samples.values()) if config.data else drawn
    with tqdm(total=config.law_rounds, desc="law", unit="round", file=sys.stderr) as bar:
        for prompt, sample in enumerate(stream):
            inputs, blank = encode(target, sample.prompt, sample.image), blank_page(target, sample)
            runs = list(run_arms(target, arms, inputs, config).values())
            sure = entropies(target, inputs, runs[0].tokens)
            gain = (entropies(target, blank, runs[0].tokens) if blank else sure * math.nan) - sure
            gains[sample.task].append(float(gain.mean()))
            for arm, run in enumerate(runs):
                at = 1
                for r in run.rounds[1:]:
                    task, seconds = list(samples).index(sample.task), sum(r.seconds.values())
                    rows.append([arm, task, prompt, r.entropy, r.accepted, r.cap, len(r.tokens), float(gain[at]), seconds])
                    at += len(r.tokens)
            done += len(runs[0].rounds) - 1
            bar.update(len(runs[0].rounds) - 1)
            if done >= config.law_rounds and not config.data and sample.task == list(samples)[-1]:
                break
    return Rounds(*torch.tensor(rows, dtype=torch.float64).unbind(dim=1)), [sum(g) / max(len(g), 1) for g in gains.values()]


def second_head(config: Config, target: Target, option: str, kind: type[BlockDraftHead] = BlockDraftHead) -> BlockDraftHead | None:
    """The head of that option; None, and a word why, if it is not there or is the shipped one and the target is another."""
    folder = Path(getattr(config, option))
    try:
        if not folder.is_dir():
            raise FileNotFoundError(f"no folder {folder}")
        head = kind.from_pretrained(folder, target.dtype, config.device)
        head.check(target)
    except (OSError, ValueError) as error:
        if folder.is_dir() and folder not in (Path(getattr(Config, option)), HERE / getattr(Config, option)):
            raise BadInput(str(error)) from None
        return print(f"left out: {error} (--{option.replace('_', '-')})")
    return head


def report_drafters(config: Config, target: Target, head: BlockDraftHead, drafters: dict) -> dict:
    """The arms that the tables need, beside those asked for."""
    unknown = [name for name in config.tables.split(",") if name not in TABLES]
    if unknown or config.temperature > 0:
        raise BadInput(f"--report needs temperature 0 and --tables of {', '.join(TABLES)}; got {config.temperature}, {config.tables}")
    wanted = [name for name in EVERY if name not in drafters]
    if second_head(config, target, "eagle", glance.Eagle3Head) is None:
        wanted = [name for name in wanted if "eagle" not in name]
    drafters = {"glance": head} | drafters | build_drafters(config, target, head, wanted)
    if "generalisation" in config.tables and (narrow := second_head(config, target, "narrow_head")):
        drafters["narrow"] = narrow
    if "vision" in config.tables and (blind := second_head(config, target, "blind_head")):
        drafters["blind"] = blind
    if "budget" in config.tables:
        drafters |= {f"N={n}": Altered(head, lambda context, n=n: {"budget": n}) for n in BUDGETS}
    return drafters


def report_tables(target: Target, head, drafters: dict, blind, samples: dict, by_task: dict, config: Config) -> list[Table]:
    asked, own = config.tables.split(","), [name for name in drafters if name != "narrow" and not name.startswith("N=")]
    tasks, tables = {task: task_figures(answers, own) for task, answers in by_task.items()}, []
    if "matched" in asked:
        tables.append(matched_table(tasks, by_task, own))
        eagles = {"eagle": drafters["eagle8"].head} if "eagle8" in drafters else {}
        tables.append(depth_table(target, {"glance": head} | eagles, by_task))
    if "copy" in asked:
        tables += copy_tables(target, by_task, own)
    if "narrow" in drafters:
        tables.append(narrow_table(by_task))
    if "vision" in asked:
        some = next((s for rows in samples.values() for s in rows if s.image is not None), None)
        if some:
            tables.append(vision_table(target, {n: drafters[n] for n in ("glance", "eagle8") if n in drafters}, some, config))
            tables.append(page_removed(target, head, blind, by_task, config))
    if "budget" in asked:
        tables.append(budget_table(by_task, drafters["auto"]))
    if "law" in asked:
        arms = {name: drafters[name] for name in ("glance", "eagle3", "eagle8") if name in drafters}
        rounds, grounding = law_sweep(target, arms, samples, config)
        tables += law_tables(rounds, list(samples), grounding, list(arms), config.draws)
    return tables


def write_report(tables: list[Table], results: dict, config: Config) -> None:
    """report.md and report.json. Each table is headed by the command that makes it alone."""
    folder = Path(config.report)
    skipped = ("report", "tables", "json", "rounds", "device")
    changed = {k: v for k, v in asdict(config).items() if v != getattr(Config, k)}
    options = "".join(f" --{k.replace('_', '-')} {v}" for k, v in changed.items() if k not in skipped)
    command = f"python verify.py --report {config.report} --tables {{}}{options}"
    text = ["# Every table, made again", "  ".join(f"{k}={v}" for k, v in results["environment"].items())]
    for table in tables:
        text += [f"## {table.title}", f"`{command.format(table.name)}`", table.markdown()]
    (folder / "report.md").write_text("\n\n".join(text) + "\n")
    written = [{"command": command.format(table.name), **asdict(table)} for table in tables]
    (folder / "report.json").write_text(json.dumps({**results, "tables": written}, indent=1) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# What a real size would cost: its passes are timed, with random weights; tau is borrowed
# ---------------------------------------------------------------------------------------------------------------------

SIZES = {  # hidden, layers, heads, ffn, tied: text targets shaped like Qwen3, vocabulary 151,936
    "0.5b": (1024, 24, 16, 3072, True), "2b": (2048, 28, 16, 6144, True), "8b": (4096, 36, 32, 12288, False),
}  # fmt: skip


def random_pair(size: str, config: Config) -> tuple[Target, BlockDraftHead]:
    """A target of that size and a DFlash head of five layers for it: random weights, which cost the same as trained ones."""
    hidden, layers, heads, ffn, tied = SIZES[size]
    shape = dict(vocab_size=151_936, hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads, num_key_value_heads=8,
                 head_dim=128)  # fmt: skip
    dtype = getattr(torch, config.dtype)
    text = transformers.Qwen3Config(**shape, num_hidden_layers=layers, tie_word_embeddings=tied)
    with torch.device(config.device):
        model = transformers.AutoModelForCausalLM.from_config(text, dtype=dtype)
        model.generation_config = GenerationConfig(pad_token_id=0)
        taps = glance.default_taps(5, layers)
        head = BlockDraftHead(glance.HeadConfig(**shape, num_hidden_layers=5, num_target_layers=layers, mask_token_id=151_935,
                                                target_layer_ids=taps))  # fmt: skip
    return Target(model), head.to(dtype).eval()


@torch.inference_mode()
def time_passes(target: Target, head: BlockDraftHead, rows: list[int], prompt: int = 512, repeats: int = 5) -> tuple[dict, float]:
    """({rows: ms of one target pass over that many}, ms of one draft pass), medians, after a prompt of 512 tokens."""
    ids = torch.randint(0, 150_000, (1, prompt), generator=torch.Generator().manual_seed(0)).to(target.device)
    sequence, _, features = target.prefill({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, head.taps)
    clock = glance.Clock(target.device)
    context = glance.Context(target, ids[0].tolist(), features, 31, 8, 99, clock)
    head.draft(context)
    context.fresh = features[:1]

    def median_ms(step) -> float:
        seconds = []
        for _ in range(repeats + 1):  # the first one warms up
            clock.restart()
            step()
            clock.lap("verify")
            seconds.append(clock.seconds["verify"])
        return 1e3 * sorted(seconds[1:])[repeats // 2]

    def verify_rows(n):
        tree = CandidateTree([5] * n, [-1, *range(n - 1)], list(range(n)), [0.0] * n)
        target.verify(sequence, tree, head.taps)
        target.commit(sequence, tree, [])

    return {n: median_ms(lambda n=n: verify_rows(n)) for n in rows}, median_ms(lambda: head.draft(context))


def print_cost(config: Config, tasks: dict[str, dict]) -> None:
    """speed-up of a size = tau measured here x its one-token step / (its draft pass + its pass over r and N nodes)."""
    target, head = random_pair(config.cost_of, config)
    ms, draft = time_passes(target, head, sorted({1, 16, 64, config.budget + 1}))
    billions = sum(weight.numel() for weight in target.model.parameters()) / 1e9
    print(f"\na real size: {billions:.2f} B random weights, {config.dtype} on {config.device}, after 512 tokens: "
          + ", ".join(f"verify({n}) {t:.1f} ms" for n, t in ms.items()) + f", draft {draft:.1f} ms")  # fmt: skip
    name = next(iter(next(iter(tasks.values()))["drafters"]))
    for task, t in tasks.items():
        tau = t["drafters"][name]["tau"]
        gain = tau * ms[1] / (draft + ms[config.budget + 1])
        print(f"  PROJECTED {task:12s} tau {tau:5.2f} of {name} on the small target -> {gain:.2f}x")
    print("  projected, not measured: a head for that size has another tau, and tree, accept and commit are left out")


if __name__ == "__main__":
    sys.exit(main())
