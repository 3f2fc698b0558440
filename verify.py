"""Is it lossless, how fast is it, and does the entropy law hold?  `python verify.py` answers all three.

    python verify.py                      the shipped target and head on held-out pages of five tasks
    python verify.py --show document      one page as PNG and its decoding, tokens coloured by where they came from
    python verify.py --audit full         every budget, branch and a gallery of bad drafters
    python verify.py --target <hub id or folder> --head <hub id or folder> --data <folder of .jsonl>
    python verify.py --help               every option with its default

The reference is never our own loop: it is the library's `model.generate(do_sample=False)`. Exit status: 0 every answer is
identical, 1 a divergence, 2 bad input.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import resource
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import transformers
from PIL import Image
from tqdm import tqdm
from transformers import GenerationConfig, HfArgumentParser
from transformers.generation.streamers import BaseStreamer

from glance import BlockDraftHead, CandidateTree, EntropyLaw, Generation, Spine, Target, end_tokens, fit_entropy_law, generate, grow_tree
from train import HELD_OUT, TASKS, Page, make_page, option, score

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
    budget: int = option(15, "N, drafted nodes per round (15 suits a CPU: see the cost curve in the README; 31 to 63 a GPU)")
    branch: int = option(8, "tokens tried per offset")
    drafters: str = option("glance,spine", "comma-separated: glance, spine")
    dtype: str = option("float32", "float32 or bfloat16")
    device: str = option("", "cpu, cuda, ...; empty: a GPU if there is one")
    temperature: float = option(0.0, "0 is greedy; above, the audit compares with plain sampling from the same seed")
    seed: int = option(0, "first held-out page, and the sampling seed")
    audit: str = option("default", "default or full")
    show: str = option("", "a task: save one page as PNG and print its decoding, round by round")
    rounds: str = option("", "write every round to this .jsonl file")
    json: str = option("", "write all results to this file")


# More noise than this between a 1-token and an (N + 1)-token pass is a fault, not rounding. On the shipped target fp32 gives
# 2e-5. The bf16 bound is a guess from reported flips and has not been measured here.
ROUNDING = {"float32": 1e-3, "bfloat16": 0.5}


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
        lines = known[task].read_text().splitlines()[:limit]
        samples[task] = [read_row(known[task], number, line) for number, line in enumerate(lines, start=1)]
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
        path = file.parent / row["image"]
        try:
            image = Image.open(path).convert("RGB")
        except Exception as error:  # Pillow has many ways to refuse a missing, truncated or enormous file
            raise BadInput(f"{where}: image {path} cannot be read ({type(error).__name__}: {error})") from None
    return Sample(file.stem, image, row["prompt"])


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


def clean_config(target: Target, config: Config) -> GenerationConfig:
    """Greedy and nothing else: end and pad ids and the length. Logits processors of the target's own config are dropped."""
    own = target.model.generation_config
    pad = own.pad_token_id if own.pad_token_id is not None else (end_tokens(target) or [0])[0]
    return GenerationConfig(max_new_tokens=config.max_new_tokens, do_sample=False, eos_token_id=own.eos_token_id, pad_token_id=pad)


def dropped_processors(target: Target) -> list[str]:
    """Settings of the target's own generation config that change greedy decoding and are not applied here."""
    own, neutral = target.model.generation_config, GenerationConfig()
    names = ("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens",
             "forced_bos_token_id", "forced_eos_token_id", "min_length", "min_new_tokens", "exponential_decay_length_penalty",
             "sequence_bias", "num_beams")  # fmt: skip
    values = {name: getattr(own, name, None) for name in names}
    return [f"{n}={v}" for n, v in values.items() if v not in (None, getattr(neutral, n, None), [], 1, 1.0, 0)]


def library_generate(target: Target, inputs: dict, config: Config) -> tuple[list[int], float, int]:
    """(new ids, seconds after the first token, tokens in that time) of the library's own greedy generate."""
    watch = Stopwatch()
    ids = target.model.generate(**inputs, generation_config=clean_config(target, config), streamer=watch)
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
    arms: dict[str, Generation] = field(default_factory=dict)  # "greedy" and every drafter
    divergences: list[dict] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    certified: int = 0  # positions with margin > 2 x noise
    noise: float = 0.0  # largest logit difference between a tree pass and a one-token pass


def mean_entropy(target: Target, inputs: dict, answer: list[int]) -> float:
    log_p = target.teacher_force(inputs, answer)[0].float().log_softmax(dim=-1)
    return float(torch.special.entr(log_p.exp()).sum(dim=-1).mean())


def run_arm(target: Target, drafter, inputs: dict, config: Config, budget: int | None = None, branch: int | None = None) -> Generation:
    generator = torch.Generator(target.device).manual_seed(config.seed) if config.temperature > 0 else None
    return generate(target, drafter, inputs, max_new_tokens=config.max_new_tokens, budget=config.budget if budget is None else budget,
                    branch=branch or config.branch, temperature=config.temperature, generator=generator, keep_logits=True)  # fmt: skip


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
                               "uncertified": noise[at] <= rounding and margin <= 2 * noise[at]})  # fmt: skip


def answer_prompt(target: Target, drafters: dict, sample: Sample, other: Sample, config: Config) -> Answer:
    """All arms on one prompt, one after the other, so that a slow minute of the machine hits each of them."""
    inputs = encode(target, sample.prompt, sample.image)
    reference, seconds, _ = library_generate(target, inputs, config)
    arms = {"greedy": run_arm(target, None, inputs, config)}
    arms |= {name: run_arm(target, drafter, inputs, config) for name, drafter in drafters.items()}
    if config.temperature > 0:
        reference = arms["greedy"].tokens
    decode_text = target.processor.tokenizer.decode if hasattr(target.processor, "tokenizer") else target.processor.decode

    text, right, asked, swapped, blank = decode_text(reference, skip_special_tokens=True), 0, 0, (0, 0), None
    if sample.page:
        right, asked = score(sample.page, text)
        if config.temperature == 0:  # this prompt over the other page: does the answer follow the page shown?
            ids, _, _ = library_generate(target, encode(target, sample.prompt, other.image), config)
            swapped = score(other.page, decode_text(ids, skip_special_tokens=True))
    if sample.image is not None:
        blank = encode(target, sample.prompt, Image.new("RGB", sample.image.size, "white"))
    entropy = mean_entropy(target, inputs, reference)
    grounding = mean_entropy(target, blank, reference) - entropy if blank else math.nan
    answer = Answer(sample, reference, seconds, text, right, asked, swapped, entropy, grounding, arms)
    for name, arm in arms.items():
        compare(answer, name, arm, arms["greedy"], ROUNDING[config.dtype])
        if name == "greedy":  # held to the reference too, but it has no tree pass to certify
            answer.margins, answer.certified = [], 0
    return answer


def full_audit(target: Target, head: BlockDraftHead, answers: list[Answer], config: Config) -> list[dict]:
    """The whole grid: budgets and branches for the head, budgets for drafters that are random, wrong, perfect and broken."""
    budgets, faults = (0, 1, 7, 31, 63, 127), []
    grid = [("glance", budget, branch) for budget in budgets for branch in (1, 4, 8)]
    grid += [(name, budget, 8) for name in ("random", "wrong", "oracle", "nan") for budget in budgets]
    fresh, broken, vocabulary = random_head(head, config.seed), BrokenHead(head), head.config.vocab_size
    for answer in tqdm(answers, desc="full audit", unit="prompt"):
        inputs = encode(target, answer.sample.prompt, answer.sample.image)
        for name, budget, branch in grid:
            drafter = {"glance": head, "random": fresh, "nan": broken}.get(name) or Scripted(answer.reference, vocabulary, name == "wrong")
            arm = run_arm(target, drafter, inputs, config, budget, branch)
            if arm.tokens != answer.reference:
                before = len(answer.divergences)
                compare(answer, f"{name} N={budget} branch={branch}", arm, answer.arms["greedy"], ROUNDING[config.dtype])
                faults += answer.divergences[before:]
    print(f"full audit: {len(grid)} settings x {len(answers)} prompts, {len(faults)} divergences")
    return faults


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
        "tau": tokens / n, "rounds": len(rounds), "tokens": tokens, "ms_per_token": ms, "speedup": fastest_plain / ms if ms else math.nan,
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
        for d in t["drafters"].values():
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
    if config.dtype not in ("float32", "bfloat16") or config.audit not in ("default", "full"):
        raise BadInput(f"--dtype is float32 or bfloat16 and --audit default or full, got {config.dtype} and {config.audit}")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # TF32 would blur fp32 by 1e-3
    config.device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("target", "head"):  # the shipped checkpoints are found from any working directory
        if not Path(getattr(config, name)).exists() and (HERE / getattr(config, name)).exists():
            setattr(config, name, str(HERE / getattr(config, name)))
    try:
        target = Target.load(config.target, config.dtype, config.device)
        head = BlockDraftHead.from_pretrained(config.head, target.dtype, config.device)
        head.check(target)
    except (OSError, ValueError) as error:
        raise BadInput(str(error)) from None
    available = {"glance": head, "spine": Spine(head)}
    names = [name.strip() for name in config.drafters.split(",")]
    unknown = [name for name in names if name not in available]
    if unknown:
        raise BadInput(f"unknown drafter {', '.join(unknown)}; there are {', '.join(available)}")
    return target, head, {name: available[name] for name in names}


def environment(config: Config) -> dict:
    gpu = torch.cuda.get_device_name() if config.device.startswith("cuda") else None
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
            "device": config.device, "gpu": gpu, "machine": platform.machine(), "threads": torch.get_num_threads()}  # fmt: skip


def measure(target: Target, head: BlockDraftHead, drafters: dict, samples: dict[str, list[Sample]], config: Config) -> dict[str, list[Answer]]:
    first = next(iter(samples.values()))[0]
    for drafter in [None, *drafters.values()]:  # warm-up, not counted
        run_arm(target, drafter, encode(target, first.prompt, first.image), config)
    by_task, total = {task: [] for task in samples}, sum(map(len, samples.values()))
    with tqdm(total=total, unit="prompt", file=sys.stderr) as bar:
        for task, rows in samples.items():
            bar.set_description(task)
            for i, sample in enumerate(rows):
                by_task[task].append(answer_prompt(target, drafters, sample, rows[(i + 1) % len(rows)], config))
                bar.update()
    return by_task


def report(config: Config, drafters: dict, by_task: dict[str, list[Answer]], divergences: list[dict]) -> dict:
    names = list(drafters)
    tasks = {task: task_figures(answers, names) for task, answers in by_task.items()}
    laws = fit_laws(by_task, names[0])
    print_table(tasks, names)
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
    print(f"law:      logit p = b0 - b1 H, {names[0]}, pooled: {laws['pooled']}")
    for task in tasks:
        print(f"          {task:12s} {laws[task]}")
    law = {"pooled": law_json(laws["pooled"]), "tasks": {task: law_json(laws[task]) for task in tasks}}
    return {"config": asdict(config), "environment": environment(config), "tasks": tasks, "total": total, "law": law, "divergences": divergences}


def main(arguments: list[str] | None = None) -> int:
    (config,) = HfArgumentParser(Config, description=__doc__.splitlines()[0]).parse_args_into_dataclasses(args=arguments)
    transformers.utils.logging.disable_progress_bar()
    began = time.time()
    try:
        samples = load_samples(config)
        if config.show and config.show not in samples:
            raise BadInput(f"--show {config.show}: there are {', '.join(samples)}")
        target, head, drafters = prepare(config)
    except BadInput as error:
        print(f"verify.py: {error}", file=sys.stderr)
        return 2
    print("  ".join(f"{k}={v}" for k, v in asdict(config).items() if v != ""))
    if dropped := dropped_processors(target):
        print(f"not applied, from the target's own generation config: {', '.join(dropped)}")
    if config.show:
        show(target, head, samples[config.show][0], config)
        return 0
    before = parameter_hash(target.model)
    by_task = measure(target, head, drafters, samples, config)
    everyone = [answer for answers in by_task.values() for answer in answers]
    if config.audit == "full":
        full_audit(target, head, everyone, config)
    results = report(config, drafters, by_task, [d for a in everyone for d in a.divergences])
    untouched = parameter_hash(target.model) == before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"target parameters {'unchanged' if untouched else 'CHANGED'}; {time.time() - began:.0f} s, peak memory {peak:.1f} GiB")
    if config.json:
        Path(config.json).write_text(json.dumps(results, indent=1) + "\n")
    if config.rounds:
        write_rounds(config.rounds, by_task, list(drafters))
    return 0 if untouched and results["total"]["identical"] == results["total"]["prompts"] else 1


if __name__ == "__main__":
    sys.exit(main())
