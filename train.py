"""Target and heads in checkpoints/, made again from nothing: pages -> a tiny target that reads them -> its answers -> draft heads.

    python train.py               all of it, in order: target, corpus, head, eagle (about five hours on two CPU cores)
    python train.py --head-steps 4500 --head-seasons 1     the same in two hours, with heads that guess less far
    python train.py target        one part alone; `corpus`, `head` and `eagle` (the EAGLE-3 head it is compared with) likewise
    python train.py head --target <folder or hub id> --data rows.jsonl      a head for a target of your own
    python train.py head --head <folder> --tasks caption,scene_text         a head that never met the other tasks
    python train.py head --head <folder> --blank                            a head that never saw a page
    python train.py --text --target <folder> --corpus <file> --head <folder> --eagle <folder>      all of it, without eyes
    python train.py --help        every option with its default

A run that was stopped goes on where it last saved. What is drawn depends on the seeds alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import re
import sys
import time
import warnings
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from PIL import Image, ImageChops, ImageDraw, ImageFont
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import nn
from tqdm import tqdm
from transformers import GenerationConfig, HfArgumentParser, Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from glance import BlockDraftHead, Eagle3Head, HeadConfig, Target, block_loss_weights, default_taps, end_tokens, load_processor


def option(default, text: str):
    """A dataclass field that is also a documented command-line option."""
    return field(default=default, metadata={"help": text})


def parse(options: type, title: str, arguments: list[str]):
    """An instance of the dataclass from the command line. Raises ValueError for an option that there is not."""
    parser = HfArgumentParser(options, description=title.splitlines()[0])
    config, unknown = parser.parse_args_into_dataclasses(args=arguments, return_remaining_strings=True)
    if unknown:
        raise ValueError(f"unknown option {' '.join(unknown)}; --help lists them")
    return config


# ---------------------------------------------------------------------------------------------------------------------
# 1  pages: five kinds of 128 x 128 picture, each with a prompt and the answer the tiny target is taught
#
# What matters is the range. A document leaves the answer no choice: every character is on the page. A caption leaves it
# almost every choice. The paper reads its entropy law along that range, so TASKS runs from free to grounded.
# ---------------------------------------------------------------------------------------------------------------------

TASKS = ("caption", "scene_text", "infographic", "document", "chart")
HELD_OUT = 1_000_000_000                        # seeds from here on are held out; training draws below it only
SIDE, ROWS, COLS = 128, 8, 16                   # one glyph per 8 x 16 px cell: a vision token (16 x 16 px) sees two

COLOURS = {"red": (214, 40, 40), "green": (34, 150, 60), "blue": (45, 85, 220), "yellow": (240, 200, 20),
           "purple": (135, 50, 180), "pink": (250, 135, 190), "brown": (125, 75, 35), "black": (25, 25, 28)}
SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond")
SIZES = {"small": 7, "large": 13}               # radius in px
SIDES = ("far left", "left", "right", "far right")
GROUNDS = ("plain", "striped", "dotted", "checked")
COLOUR_CODES, SHAPE_CODES = "!#&'()*+", ";<=>?@[]^_`{"  # what the probe calls them: signs that no page prints


@dataclass
class Page:
    task: str
    image: Image.Image                          # RGB, 128 x 128
    prompt: str                                 # fits any page of its task: pages get swapped under prompts
    answer: str                                 # what the target is taught to say
    cells: list[str]                            # 8 strings of 16: the glyph in each cell, for a throw-away reading probe
    facts: list                                 # what score() checks


@dataclass
class Thing:
    """One coloured shape of a scene. Grid: 4 columns of 32 px, 3 rows of 42 px."""
    colour: str
    shape: str
    size: str
    column: int
    row: int


# -- words that are read off a page: long lists and random digits, so that no answer can be guessed ---------------------

GOODS = """tea rice salt milk bread honey beans corn flour sugar butter cheese cocoa coffee pepper ginger garlic onion
    basil mint thyme sage dill leek kale beet melon lemon lime mango peach plum grape cherry olive almond walnut pecan
    oats barley rye wheat yeast cream yogurt syrup jam jelly cider juice soda water wine oil soap wax paper ink
    paint glue chalk wool silk linen cotton felt denim yarn rope twine wire nails coal wood cork clay sand slate
    brick glass copper iron steel brass tin zinc ham bacon trout salmon tuna crab squid shrimp turkey""".split()
SHORT = """tea oak fig rye bus car cow hen pig bee ant fox owl elk cod eel yak emu gas oil tin ink jam nut pea rum soy
    tap van web zoo gym inn pub spa jet ski bow cup hat key map pen pot rug saw toy urn wax ice ash fir ivy elm yew mud
    sky sun sea bay bog fen""".split()
FIRST = """Ada Tom Eva Leo Ivy Max Nora Paul Rosa Hugo Lena Owen Mia Karl Zoe Finn Vera Ivan Lucy Adam Cleo Otto Ruth
    Sven Anna Eric Jane Noah Emma Luke Olga Hans Iris Mark Tara Rene Gwen Abel Dora Kurt Alma Bo""".split()
LAST = """Holt Reed Kemp Lane West Ford Nash Hale Boyd Cole Webb Shaw Rowe Page York Byrne Stone Marsh Frost Blake Quinn
    Doyle Swift Bauer Weiss Vogel Lopez Silva Costa Rossi Ricci Novak Kovac Sato Mori Khan Singh Patel Osei Addo""".split()
CITIES = """Leeds Paris Turin Delhi Lagos Accra Osaka Kyoto Quito Lima Oslo Bern Bonn Graz Linz Porto Cadiz Nice Lyon
    Metz Ghent Delft Lund Turku Riga Minsk Sofia Split Izmir Cairo Tunis Rabat Dakar Perth Hobart Miami Tulsa Boise""".split()
SHOPS = "bakery market grocer deli store kiosk traders supply books garden tools pharmacy".split()
JOBS = "nurse baker pilot tailor farmer clerk cook judge miner actor singer tutor welder porter potter barber".split()
MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()
TOPICS = "sales stock demand trade output yield prices orders exports imports waste".split()
CROWD = "nurses bakers pilots cooks clerks tutors judges miners actors teens adults women men boys girls dads mums twins" \
    " guests locals nuns monks guards chefs scouts riders divers skiers owners voters".split()
DEEDS = "grow buy sell like want need share trade store pick keep make send order waste miss test rent ship".split()
SIGNS = GOODS + """north south east west upper lower new royal grand silver golden crystal velvet harbor station museum
    library theater tavern hotel motel diner cafe clinic school chapel temple castle palace cottage cabin farm ranch mill
    barn depot wharf pier dock ferry canal lake pond creek brook falls canyon ridge summit cliff cave island lagoon delta
    swamp jungle glacier volcano comet planet rocket saturn jupiter eagle falcon robin swan lion tiger wolf badger otter
    moose bison camel zebra tulip daisy lily orchid lotus maple cedar birch willow exit enter slow danger private tickets
    office music dance cinema circus arcade express central plaza avenue""".split()
DRILL_LETTERS, DRILL_OTHERS = "abcdefghijklmnopqrstuvwxyz0123456789", "ABCDEFGHIJKLMNOPQRSTUVWXYZ.-:%/$"
SYLLABLES = "ba be bo da do du fa fi ga go ka ki ko la le lo ma mi mo na ne no pa po ra ri ro sa so ta ti to va".split()


# -- free language ------------------------------------------------------------------------------------------------------
# The tree is worth its nodes only where the target's own choice is hard to foresee. A few equally likely templates do not
# give that: greedy decoding takes the same one on every page, at high entropy and with perfect predictability. So a word
# here is preferred for many small fixed reasons at once,
#
#     P(w) = softmax over the class of   STRENGTH / sqrt(n) * sum_j  g(detail_j, w)       g: a frozen standard normal
#
# the details being the two words before and eight properties of the page. The greedy choice flips with any of them, so it
# cannot be copied from another page, yet each table is small enough to learn. Which clause comes next is drawn likewise.

WORDS = {name: tuple(words.split()) for name, words in {
    "MOOD": "calm bold quiet warm cool bare bright soft proud shy gentle merry grave lone",
    "VERB": "rests floats sits hangs leans drifts waits sleeps stands glows turns stays hides",
    "ADV": "softly slowly lightly firmly neatly freely gladly alone still today again somehow forever",
    "PREP": "near over under behind beside above below past along beyond against before",
    "PLACE": "garden river hill harbour meadow window stair field valley bridge road tower shore",
    "THING": "lamp kite boat coin leaf stone bell drum seed cloud flag mask feather",
    "LIGHT": "morning twilight winter summer midnight market forest desert harvest moon candle city",
    "JOIN": "then while where but so yet and now as though next also",
    "SEEMS": "seems looks feels grows remains appears becomes turns stays sounds rings proves",
    "QUAL": "very quite rather almost truly hardly fairly always never often perhaps just",
    "GAZE": "here there see look behold notice first today perhaps once indeed clearly",
    "FOLK": "friends sailors children poets farmers painters dancers students pilots visitors dreamers singers",
    "LOVE": "like love watch trust follow forget know praise fear miss want thank",
    "DET": "a the one this that our",
    "SAYS": "says shows claims notes adds tells states proves repeats hints warns holds",
}.items()}
STRENGTH = 1.9                                  # about 1.5 nats over a dozen words
SHARP = {"JOIN": 3.5, "PREP": 3.5}              # and a few slots that are nearly settled (about 0.4), as in real prose

# In a clause, CAPITALS draw from a class and $names are read off the page.
OPENING = ("GAZE, on $ground ground,", "GAZE PREP DET LIGHT PLACE,", "PREP DET MOOD PLACE,",
           "on $ground ground, QUAL MOOD,", "GAZE, as FOLK LOVE it,")
OBJECT = ("JOIN DET MOOD $colour $shape VERB ADV PREP DET PLACE,",
          "JOIN DET $size $colour $shape VERB PREP DET LIGHT PLACE, MOOD as a THING.",
          "DET $size $colour $shape on the $side SEEMS QUAL MOOD, MOOD as DET LIGHT THING.",
          "PREP DET LIGHT PLACE VERB DET $colour $shape, QUAL MOOD and MOOD,",
          "JOIN DET $colour $shape on the $side, MOOD as a THING, VERB ADV,",
          "JOIN FOLK LOVE DET MOOD $size $colour $shape PREP DET PLACE,",
          "DET $size $colour $shape, which FOLK ADV LOVE, VERB PREP DET PLACE.",
          "QUAL MOOD, DET $colour $shape on the $side VERB PREP DET LIGHT PLACE and SEEMS MOOD,")
CLOSING = ("JOIN all SEEMS QUAL MOOD PREP DET LIGHT PLACE.", "JOIN DET MOOD PLACE VERB ADV PREP DET THING.",
           "JOIN FOLK LOVE DET LIGHT light PREP DET PLACE.", "JOIN FOLK ADV LOVE DET MOOD THING.")
SIGN = ('GAZE, DET MOOD $colour sign on the $side VERB PREP DET PLACE and SAYS "$words",',
        'GAZE, DET $colour sign, MOOD as a THING, SAYS "$words" to FOLK PREP DET PLACE,',
        'PREP DET PLACE VERB DET MOOD $colour sign which QUAL SAYS "$words".',
        '"$words" SAYS DET MOOD $colour sign, which VERB ADV on the $side,')
HEADLINE = ("GAZE, the page on $title SAYS this.", "on $title FOLK LOVE to know this.", "the page SAYS much on $title.")
STATISTIC = ("JOIN the $colour $shape SAYS that $stat.", "beside the $colour $shape it SAYS that $stat.",
             "it SEEMS QUAL clear that $stat.", "GAZE, the $colour $shape SAYS $stat.")


@lru_cache(maxsize=None)
def leaning(detail: str, options: tuple[str, ...]) -> tuple[float, ...]:
    """g(detail, .): seeded by the strings alone, so the language is the same on every machine and in every run."""
    return tuple(random.Random(f"{detail}>{option}").gauss(0, 1) for option in options)


class Voice:
    """Speaks one answer, remembering what it said.

    Temperature 0 is what a perfect greedy reader would say. With None there is no free word: the bare list of what there is.
    """

    def __init__(self, rng: random.Random, temperature: float | None = 1.0):
        self.rng, self.temperature, self.words = rng, temperature, ["", ""]
        self.spoken: list[str] = []                                            # the same words with their punctuation

    def choose(self, options: tuple[str, ...], details: list[str], strength: float = STRENGTH) -> str:
        details = details + [f"1 {self.words[-1]}", f"2 {self.words[-2]}"]
        pulls = map(sum, zip(*(leaning(detail, options) for detail in details)))
        scale = strength / math.sqrt(len(details))
        # no word twice within a dozen: the details last as long as the clause, and would ask for it again
        fresh = {option: scale * pull for option, pull in zip(options, pulls) if option not in self.words[-12:]}
        if self.temperature == 0:
            return max(fresh, key=fresh.get)
        return self.rng.choices(list(fresh), [math.exp(z / self.temperature) for z in fresh.values()])[0]

    def say(self, clauses: tuple[str, ...], details: list[str], bare: str = "", **read: str) -> None:
        if self.temperature is None:
            self.spoken += [re.sub(r"\$(\w+)", lambda name: read[name[1]], bare)] if bare else []
            return
        for token in self.choose(clauses, details).split():
            before, word, after = re.fullmatch(r"(\W*?)(\$?\w+)(\W*)", token).groups()
            if word in WORDS:
                word = self.choose(WORDS[word], details, STRENGTH * SHARP.get(word, 1.0))
            elif word[0] == "$":
                word = read[word[1:]]
            self.words.append(word)
            self.spoken.append(before + word + after)

    def text(self) -> str:
        return " ".join(self.spoken).rstrip(",.") + "."


def details_of(thing: Thing, other: Thing, ground: str) -> list[str]:
    """The eight page details a word may lean on: this thing, its neighbour, the ground."""
    return [f"colour {thing.colour}", f"shape {thing.shape}", f"size {thing.size}", f"column {thing.column}",
            f"next colour {other.colour}", f"next shape {other.shape}", f"next column {other.column}", f"ground {ground}"]


def describe(voice: Voice, things: list[Thing], ground: str) -> None:
    for i, thing in enumerate(things):
        voice.say(OBJECT, details_of(thing, things[(i + 1) % len(things)], ground), "$size $colour $shape on the $side,",
                  colour=thing.colour, shape=thing.shape, size=thing.size, side=SIDES[thing.column])


# -- drawing ------------------------------------------------------------------------------------------------------------

FACES = ("bitmap", 11, 12, 13)                  # Pillow's own fonts only: the same pages on every machine


@lru_cache(maxsize=None)
def glyph(face: str | int, char: str, scale: int) -> Image.Image:
    """The ink of one character, at most 7 x 15 px (times scale): a pixel of jitter then stays inside its cell."""
    width, height = 7 * scale, 15 * scale
    if face == "bitmap":
        mask = Image.new("L", (7, 15))
        ImageDraw.Draw(mask).text((1, 2), char, fill=255, font=ImageFont.load_default_imagefont())
        return mask.resize((width, height), Image.Resampling.NEAREST)
    wide = Image.new("L", (4 * width, height))
    ImageDraw.Draw(wide).text((width, 12 * scale), char, fill=255, font=ImageFont.load_default(face * scale), anchor="ls")
    left, _, right, _ = wide.getbbox()
    ink = wide.crop((left, 0, right, height))
    if ink.width > width:                       # a proportional 'm' squeezed into its cell
        ink = ink.resize((width, height))
    mask = Image.new("L", (width, height))
    mask.paste(ink, ((width - ink.width) // 2, 0))
    return mask.point(lambda v: min(255, 2 * v))                                # hairlines must outlive the noise


@lru_cache(maxsize=None)
def grain(sigma: int) -> Image.Image:
    """A fixed tile of noise around 128 with a few specks. Pages take random crops: no per-pixel Python per page."""
    rng = random.Random(sigma)
    levels = (rng.gauss(128, sigma if rng.random() < 0.99 else 40) for _ in range(256 * 256))
    return Image.frombytes("L", (256, 256), bytes(min(255, max(0, int(v))) for v in levels)).convert("RGB")


class Sheet:
    """A page being drawn: the picture, and the glyph in every cell."""

    def __init__(self, rng: random.Random, dark_chance: float = 0.15):
        light, dark = (tuple(rng.randint(low, high) for _ in range(3)) for low, high in ((205, 255), (0, 85)))
        self.paper, self.ink = (dark, light) if rng.random() < dark_chance else (light, dark)
        self.rng, self.face = rng, rng.choice(FACES)
        self.image = Image.new("RGB", (SIDE, SIDE), self.paper)
        self.draw = ImageDraw.Draw(self.image)
        self.cells = [[" "] * COLS for _ in range(ROWS)]

    def write(self, row: int, col: int, text: str, ink=None, scale: int = 1) -> None:
        assert col >= 0 and col + scale * len(text) <= COLS and row + scale <= ROWS, f"{text!r} does not fit at {row}, {col}"
        dx, dy = self.rng.randint(0, 1), self.rng.randint(0, 1)
        for i, char in enumerate(text):
            if char == " ":
                continue
            at = col + i * scale
            self.image.paste(ink or self.ink, (8 * at + dx, 16 * row + dy), glyph(self.face, char, scale))
            for r in range(row, row + scale):
                self.cells[r][at:at + scale] = char * scale

    def ground(self, kind: str) -> None:
        """The backdrop of a scene, in a tint a little darker than the paper."""
        tint, step = tuple(c - 26 for c in self.paper), self.rng.randint(12, 16)
        for a in range(0, SIDE, step):
            if kind == "striped":
                self.draw.rectangle((0, a, SIDE, a + step // 2 - 1), fill=tint)
            for b in range(0, SIDE, step):
                if kind == "dotted":
                    self.draw.ellipse((a + 3, b + 3, a + 7, b + 7), fill=tint)
                elif kind == "checked" and (a + b) // step % 2:
                    self.draw.rectangle((a, b, a + step - 1, b + step - 1), fill=tint)

    def shape(self, shape: str, colour: str, x: int, y: int, r: int) -> None:
        fill = tuple(min(255, max(0, c + self.rng.randint(-12, 12))) for c in COLOURS[colour])
        if shape == "circle":
            self.draw.ellipse((x - r, y - r, x + r, y + r), fill=fill)
        elif shape == "square":
            self.draw.rectangle((x - 0.86 * r, y - 0.86 * r, x + 0.86 * r, y + 0.86 * r), fill=fill)
        elif shape == "cross":
            for w, h in ((r, r // 3), (r // 3, r)):
                self.draw.rectangle((x - w, y - h, x + w, y + h), fill=fill)
        else:                                   # corners around the centre, clockwise from the top; a star dips in between
            n, dip = {"triangle": (3, 1), "diamond": (4, 1), "star": (10, 0.42)}[shape]
            spokes = ((2 * math.pi * k / n, r * (dip if k % 2 else 1)) for k in range(n))
            self.draw.polygon([(x + d * math.sin(a), y - d * math.cos(a)) for a, d in spokes], fill=fill)
        self.mark(shape, colour, x, y, r)

    def mark(self, shape: str, colour: str, x: int, y: int, r: int) -> None:
        """Shapes are asked of the probe too: one sign for the colour, one for the form (and size), in every token they cover."""
        code = COLOUR_CODES[list(COLOURS).index(colour)] + SHAPE_CODES[2 * SHAPES.index(shape) + (r > 10)]
        for top in range(0, SIDE, 16):
            for left in range(0, SIDE, 16):
                if max(abs(left + 7.5 - x), abs(top + 7.5 - y)) < max(r, 8.5) and set(self.cells[top // 16][left // 8:left // 8 + 2]) == {" "}:
                    self.cells[top // 16][left // 8:left // 8 + 2] = code

    def place(self, thing: Thing) -> None:
        r = SIZES[thing.size]
        x, y = 32 * thing.column + self.rng.randint(r + 1, 31 - r), 42 * thing.row + self.rng.randint(r + 1, 42 - r)
        self.shape(thing.shape, thing.colour, x, y, r)

    def page(self, task: str, prompt: str, answer: str, facts: list) -> Page:
        x, y = self.rng.randrange(SIDE), self.rng.randrange(SIDE)
        noise = grain(self.rng.choice((2, 4, 6))).crop((x, y, x + SIDE, y + SIDE))
        image = ImageChops.add(self.image, noise, offset=-128)
        return Page(task, image, prompt, answer, ["".join(row) for row in self.cells], facts)


def some_things(rng: random.Random, spots: list[tuple[int, int]], n: int) -> list[Thing]:
    """n things on free (row, column) spots, in reading order."""
    return [Thing(rng.choice(list(COLOURS)), rng.choice(SHAPES), rng.choice(list(SIZES)), column, row)
            for row, column in sorted(rng.sample(spots, n))]


# -- the five tasks, from free to grounded --------------------------------------------------------------------------------

LIST = "List what is there."                    # the question under a page whose answer is bare


def caption(rng: random.Random, lines: int, temperature: float | None) -> Page:
    sheet, ground = Sheet(rng, 0), rng.choice(GROUNDS)
    things = some_things(rng, [(r, c) for r in range(3) for c in range(4)], min(lines, rng.choice((3, 4, 4))))
    sheet.ground(ground)
    for thing in things:
        sheet.place(thing)
    voice = Voice(rng, temperature)
    voice.say(OPENING, details_of(things[0], things[-1], ground), ground=ground)
    describe(voice, things, ground)
    voice.say(CLOSING, details_of(things[-1], things[0], ground))
    prompt = LIST if temperature is None else rng.choice(("Describe the picture.", "Write a caption.", "What do you see?"))
    return sheet.page("caption", prompt, voice.text(), [(t.size, t.colour, t.shape, SIDES[t.column]) for t in things])


def scene_text(rng: random.Random, lines: int, temperature: float | None) -> Page:
    sheet, ground, colour = Sheet(rng, 0), rng.choice(GROUNDS), rng.choice(list(COLOURS))
    scale = rng.choice((1, 1, 2))
    words, n = [], min(lines, 2 if scale == 2 else rng.choice((2, 3)))
    while len(words) < n:
        word = rng.choice(SIGNS) if rng.random() < 0.6 else "".join(rng.choices(SYLLABLES, k=rng.randint(2, 3)))
        if temperature is None:                                                 # a drill: nothing to guess
            word = "".join(rng.choices(DRILL_LETTERS, k=rng.randint(3, 6)))
        if len(word) <= 7 and word not in words:
            words.append(word)
    words = [w.capitalize() for w in words] if rng.random() < 0.25 else words
    width, height = scale * max(map(len, words)), scale * len(words)            # in cells
    row = rng.choice((1, 3)) if scale == 2 else rng.randint(1, ROWS - height - 1)   # always leaves room for clutter
    col = rng.randint(1, COLS - width - 1)
    box = (8 * col - 4, 16 * row - 4, 8 * (col + width) + 4, 16 * (row + height) + 4)
    free = [(r, c) for r in range(3) for c in range(4)                          # clutter stays clear of the sign
            if 32 * c + 32 <= box[0] or 32 * c >= box[2] or 42 * r + 42 <= box[1] or 42 * r >= box[3]]
    column = min(3, 8 * (2 * col + width) // 64)
    sign = Thing(colour, "sign", "large" if scale == 2 else "small", column, row)
    clutter = some_things(rng, free, 2)

    sheet.ground(ground)
    for x in (box[0] + 8, box[2] - 12):
        sheet.draw.rectangle((x, box[3], x + 3, SIDE), fill=COLOURS["black"])
    for thing in clutter:
        sheet.place(thing)
    sheet.draw.rectangle(box, fill=COLOURS[colour], outline=(70, 70, 70))
    ink = (15, 15, 15) if colour in ("yellow", "pink") else (250, 250, 245)
    for i, word in enumerate(words):
        sheet.write(row + i * scale, col + (width - scale * len(word)) // 2, word, ink, scale)

    voice = Voice(rng, temperature)
    voice.say(SIGN, details_of(sign, clutter[0], ground), '"$words" $colour sign on the $side,',
              colour=colour, side=SIDES[column], words=" ".join(words))
    describe(voice, clutter, ground)
    prompt = rng.choice(("What does the sign say?", "Describe the sign and what is around it.", "Read the sign."))
    prompt = LIST if temperature is None else prompt
    return sheet.page("scene_text", prompt, voice.text(), words)


def infographic(rng: random.Random, lines: int, temperature: float | None) -> Page:
    sheet, n = Sheet(rng), min(3, max(1, lines // 2))
    title = f"{rng.choice(GOODS)} in {rng.choice(CITIES)}"
    sheet.write(0, rng.randint(0, COLS - len(title)), title)
    left, voice, facts = rng.random() < 0.5, Voice(rng, temperature), []
    icons = [Thing(rng.choice(list(COLOURS)), rng.choice(SHAPES), "small", int(left), i) for i in range(n)]
    for i, icon in enumerate(icons):
        value, crowd, deed = f"{rng.randint(1, 99)}%", rng.choice(CROWD), f"{rng.choice(DEEDS)} {rng.choice(GOODS)}"
        sheet.draw.rectangle((0 if left else 108, 32 * i + 17, 20 if left else 127, 32 * i + 46), fill=(225, 225, 225))
        sheet.shape(icon.shape, icon.colour, 10 if left else 118, 32 * i + 32, 8)
        sheet.write(1 + 2 * i, 3 if left else 0, f"{value} of {crowd}")
        sheet.write(2 + 2 * i, 3 if left else 0, deed)
        facts.append((f"{value} of", f"{crowd} {deed}"))
    voice.say(HEADLINE, details_of(icons[0], icons[-1], ""), title=title)
    for i, (icon, fact) in enumerate(zip(icons, facts)):
        voice.say(STATISTIC, details_of(icon, icons[(i + 1) % n], ""),
                  colour=icon.colour, shape=icon.shape, stat=" ".join(fact))
    prompt = rng.choice(("What does the infographic say?", "Sum up this infographic.", "Report the figures."))
    return sheet.page("infographic", prompt, voice.text(), facts)


def document(rng: random.Random, lines: int, temperature: float | None) -> Page:
    """Rows of (left, right, how the row is told). Question and transcription read the same rows: pure reading."""
    sheet, n = Sheet(rng), min(lines, rng.choice((6, 7, 7)))
    rows = rng.choice((receipt, form, letter))(rng, n)
    inset, rule = rng.randint(0, 1), rng.random() < 0.5
    at = sorted(rng.sample(range(ROWS), len(rows)))
    for row, (left, right, _) in zip(at, rows):
        line = f"{left} {right}".strip()
        if not right:
            sheet.write(row, min(inset * rng.randint(0, 4), COLS - len(line)), line)
        else:
            sheet.write(row, 0, left)
            sheet.write(row, COLS - len(right) if inset else len(left) + 1, right)
    for row in set(range(ROWS)) - set(at) if rule else ():                      # rules only where nothing is written
        sheet.draw.line((4, 16 * row + 9, SIDE - 5, 16 * row + 9), fill=sheet.ink)

    written, told = [f"{left} {right}".strip() for left, right, _ in rows], [said for _, _, said in rows]
    if rng.random() < 0.5:
        prompt = rng.choice(("Read this document.", "Transcribe the page.", "Write out every line."))
        return sheet.page("document", prompt, "\n".join(written), written)
    prompt = rng.choice(("What is this document about?", "Say what this document tells us.", "Report what the page holds."))
    return sheet.page("document", prompt, ", ".join(told) + ".", told)


def clock(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"


def receipt(rng: random.Random, n: int) -> list[tuple[str, str, str]]:
    shop, time = f"{rng.choice(LAST)} {rng.choice(SHOPS)}", clock(rng)
    date = f"{rng.randint(1, 28):02}-{rng.randint(1, 12):02}"
    cents = [rng.randint(50, 2999) for _ in range(max(1, n - 3))]
    prices = [f"{c / 100:.2f}" for c in cents]
    items = [(item, price, f"{item} at {price}") for item, price in zip(rng.sample(GOODS, len(prices)), prices)]
    total = f"{sum(cents) / 100:.2f}"
    head = [(shop, "", f"the receipt from {shop}"), (date, time, f"of {date} at {time}")]
    return (head + items)[:n - 1] + [("total", total, f"which comes to {total}")]


def form(rng: random.Random, n: int) -> list[tuple[str, str, str]]:
    kind, number = rng.choice(("visitor", "member", "patient", "student", "tenant")), rng.randint(1000, 9999)
    colon = rng.choice((":", ""))
    fields = {"name": f"{rng.choice(FIRST)} {rng.choice(LAST)}", "city": rng.choice(CITIES), "job": rng.choice(JOBS),
              "born": f"{rng.choice(MONTHS)} {rng.randint(1930, 2009)}",
              "code": f"{rng.choice('ABCDEFGHKLMNPRST')}{rng.randint(0, 9)}-{rng.randint(0, 99999):05}",
              "phone": f"{rng.randint(200, 999)}-{rng.randint(0, 9999):04}",
              "room": f"{rng.randint(1, 9)}.{rng.randint(0, 99):02}",
              "visit": f"{rng.choice(MONTHS)} {rng.randint(1, 28)}", "ends": clock(rng)}
    rows = [(key + colon, fields[key], f"{key} {fields[key]}") for key in rng.sample(list(fields), n - 1)]
    return [(kind, str(number), f"the form of {kind} {number}")] + rows


def letter(rng: random.Random, n: int) -> list[tuple[str, str, str]]:
    date, to, by = f"{rng.randint(1, 28)} {rng.choice(MONTHS)} {rng.randint(1950, 2029)}", *rng.sample(FIRST, 2)
    asks = [f"buy {rng.randint(2, 99)} kg {rng.choice(GOODS)}", f"send {rng.choice(GOODS)}", f"come to {rng.choice(CITIES)}",
            f"meet at {clock(rng)}", f"call {rng.randint(200, 999)}-{rng.randint(0, 9999):04}", f"ask Dr {rng.choice(LAST)}",
            f"pay ${rng.randint(100, 9999) / 100:.2f}", f"take bus {rng.randint(10, 999)}"]
    body = [(ask, "", f"to {ask}") for ask in rng.sample(asks, max(0, n - 3))]
    signed = ("yours,", by, f"signed by {by}")
    return ([(date, "", f"the letter of {date}"), (f"dear {to},", "", f"asking {to}")] + body)[:n - 1] + [signed]


def chart(rng: random.Random, lines: int, temperature: float | None) -> Page:
    sheet, upright = Sheet(rng), rng.random() < 0.3
    title = f"{rng.choice(GOODS if not upright else SHORT)} {rng.choice(TOPICS)}"
    title = f"{title} {rng.randint(10, 99)}" if len(title) <= COLS - 3 else title[:COLS]
    sheet.write(0, rng.randint(0, COLS - len(title)), title)
    n = min(lines, 5 if upright else rng.choice((6, 7, 7)))
    labels = rng.sample(SHORT if upright else GOODS, n)
    decimal = rng.random() < 0.4
    numbers = [rng.randint(10, 99) if upright else rng.randint(10, 999) / (10 if decimal else 1) for _ in labels]
    values = [f"{v:.1f}" if decimal and not upright else str(int(v)) for v in numbers]
    fill = rng.choice([c for c in COLOURS.values() if sum(abs(a - b) for a, b in zip(c, sheet.paper)) > 200])
    for i, (label, number, value) in enumerate(zip(labels, numbers, values)):
        share = number / max(numbers)
        if upright:                             # value above the bar; labels on two levels, so that neighbours do not touch
            top = 96 - int(1 + 60 * share)
            sheet.draw.rectangle((24 * i + 5, top, 24 * i + 18, 95), fill=fill)
            sheet.write(top // 16 - 1, 3 * i, value)
            sheet.write(6 + i % 2, 3 * i, label)
        else:                                   # label, bar, value
            sheet.draw.rectangle((51, 16 * i + 20, 52 + int(40 * share), 16 * i + 28), fill=fill)
            sheet.write(1 + i, 0, label)
            sheet.write(1 + i, COLS - len(value), value)
    facts = list(zip(labels, values))
    prompt, head, link, between, end = rng.choice((                             # the wording asked fixes the wording answered
        ("Read the chart.", f"the chart of {title} shows ", " at ", ", ", "."),
        ("What does the chart show?", f"in {title}, ", " is ", ", ", "."),
        ("List the values.", f"{title}\n", ": ", "\n", "")))
    return sheet.page("chart", prompt, head + between.join(label + link + value for label, value in facts) + end, facts)


def drill(rng: random.Random, lines: int, temperature: float | None) -> Page:
    """Random characters, line by line: nothing here can be foreseen, so the only way to a lower loss is to read. Training only.

    Eight lines are for the eyes alone: every character, sign-sized ones and sign colours too."""
    sheet, crowded = Sheet(rng), lines == 8
    scale = rng.choice((1, 1, 1, 2)) if crowded else 1
    if crowded and rng.random() < 0.3:
        colour = rng.choice(list(COLOURS))
        sheet.ink = (15, 15, 15) if colour in ("yellow", "pink") else (250, 250, 245)
        sheet.draw.rectangle((0, 0, SIDE, SIDE), fill=COLOURS[colour])
    letters = DRILL_LETTERS + (DRILL_OTHERS if crowded else "")
    rows = ["".join(rng.choices(letters, k=rng.randint(4, COLS // scale - 1 if crowded else 10))) for _ in range(min(lines, ROWS // scale))]
    for i, row in enumerate(rows):
        sheet.write(scale * i, rng.randint(0, 1) if crowded else 0, row, scale=scale)
    return sheet.page("drill", "Read this document.", "\n".join(rows), rows)


def make_page(task: str, seed: int, lines: int = 7, temperature: float | None = 1.0) -> Page:
    """The page of (task, seed). `lines` is the curriculum: it caps rows and objects. `temperature` is the language's; None: bare."""
    if task not in (*TASKS, "drill"):
        raise ValueError(f"unknown task {task!r}: expected one of {', '.join(TASKS)}")
    if not 2 <= lines <= (7 if task in TASKS else 8):
        raise ValueError(f"lines is {lines}: expected 2 to 7")
    return globals()[task](random.Random(f"{task} {seed}"), lines, temperature)


# -- did it read? -------------------------------------------------------------------------------------------------------

MENTION = re.compile(rf"(?:({'|'.join(SIZES)}) )?({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})\b"
                     rf"(?: on the ({'|'.join(sorted(SIDES, key=len, reverse=True))}))?")


def score(page: Page, text: str) -> tuple[int, int]:
    """(facts right, facts asked).

    A caption is free to leave things out, so only what it *names* is asked: the k-th thing mentioned against the k-th on
    the page, attribute by attribute (a caption that names nothing scores 0 of 0). Elsewhere every fact must be there.
    """
    if page.task == "caption":
        mentions = enumerate(MENTION.findall(text))
        asked = [(named, k, j) for k, mention in mentions for j, named in enumerate(mention) if named]
        return sum(k < len(page.facts) and named == page.facts[k][j] for named, k, j in asked), len(asked)
    if page.task == "scene_text":               # the free language may use a word of the sign: only the quote counts
        text = " ".join(re.findall('"([^"]*)"', text))
    link = r"(?: at|:| is)? "                   # what may stand between a label and its value
    patterns = (link.join(map(re.escape, fact)) if isinstance(fact, tuple) else re.escape(fact) for fact in page.facts)
    return sum(bool(re.search(rf"(?<![\w.-]){p}(?![\w-]|\.\d)", text)) for p in patterns), len(page.facts)


# ---------------------------------------------------------------------------------------------------------------------
# 2  target: a small vision-language model that truly reads
#
# A genuine Qwen3-VL, only small. Reading does not come by itself: on answer loss alone it becomes a language model that
# ignores the page. What makes it read, in this order:
#
#   eyes      the vision tower alone, under a throw-away probe that asks it for glyphs, colours and shapes
#   drills    pages whose answer cannot be guessed: random characters, bare lists of shapes, signs of random letters
#   lessons   the five tasks, on pages that grow from two lines to seven
#   signs     a last season, signs above all: they are what is read last
# ---------------------------------------------------------------------------------------------------------------------

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
            "<|video_pad|>", "<|mask|>")  # the mask is the draft head's: it needs a row of the target's embedding table
PAD, END, MASK = "<|endoftext|>", "<|im_end|>", "<|mask|>"

# Qwen's layout: image first, then the question, both inside one user turn.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'text' -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""


def build_tokenizer(texts, vocab=704):
    """Byte-level BPE in Qwen's own class. Its split pattern already cuts numbers into single digits, so a value on a
    page is read digit by digit and no two numbers share a lucky token."""
    shell = Qwen2Tokenizer().backend_tokenizer
    bpe = Tokenizer(BPE())
    bpe.normalizer, bpe.pre_tokenizer = shell.normalizer, shell.pre_tokenizer
    bpe.train_from_iterator(texts, BpeTrainer(vocab_size=vocab, special_tokens=list(SPECIALS), show_progress=False,
                                              initial_alphabet=ByteLevel.alphabet()))
    learnt = json.loads(bpe.to_str())["model"]
    return Qwen2Tokenizer(vocab=learnt["vocab"], merges=[tuple(pair) for pair in learnt["merges"]],
                          eos_token=END, pad_token=PAD, unk_token=None, extra_special_tokens=list(SPECIALS),
                          chat_template=CHAT_TEMPLATE, model_max_length=2048)


def build_target(folder, tokenizer, seed=0):
    """An untrained Qwen3-VL of 6.6 M parameters, written as any hub model is: the rest of the project cannot tell."""
    token = tokenizer.convert_tokens_to_ids
    ends = {"eos_token_id": token(END), "pad_token_id": token(PAD), "bos_token_id": None}
    config = Qwen3VLConfig(
        text_config=dict(
            vocab_size=len(tokenizer), hidden_size=192, intermediate_size=512, num_hidden_layers=12,
            num_attention_heads=6, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048,
            tie_word_embeddings=True, **ends,
            # 16 rotary frequencies, dealt out to time, row and column in turn.
            rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[6, 5, 5], mrope_interleaved=True)),
        vision_config=dict(
            hidden_size=128, depth=4, num_heads=4, intermediate_size=512, patch_size=8, spatial_merge_size=2,
            temporal_patch_size=1, out_hidden_size=192, num_position_embeddings=256, deepstack_visual_indexes=[1, 2]),
        image_token_id=token("<|image_pad|>"), video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"), vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True, **ends)
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config)
    # Greedy, and nothing else: no logits processor may come between the model and its argmax.
    model.generation_config = GenerationConfig(**ends, do_sample=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Both bounds at 128 x 128 pixels and more, so that a page is never resampled and a glyph keeps its pixels.
    Qwen2VLImageProcessorPil(
        patch_size=8, merge_size=2, temporal_patch_size=1, size={"shortest_edge": 64 * 64, "longest_edge": 256 * 256},
        image_mean=[0.5] * 3, image_std=[0.5] * 3).save_pretrained(folder)
    return model


MIX = {"caption": 0.42, "scene_text": 0.18, "infographic": 0.12, "document": 0.18, "chart": 0.10}
SIGN_MIX = {"caption": 0.13, "scene_text": 0.70, "infographic": 0.06, "document": 0.06, "chart": 0.05}  # the last lessons
FULL_PAGE = 7                # lines of a finished page; the curriculum climbs to it
EYE_SEEDS = 400_000_000      # pages of the first look
CORPUS_SEEDS = 500_000_000   # the corpus reads pages from here, training from 0: both below HELD_OUT, never the same


def pick_task(number: int, mix: dict[str, float] = MIX) -> str:
    """Which task page `number` belongs to: a pure function, so a resumed run meets exactly the pages it would have."""
    return random.Random(number).choices(list(mix), weights=list(mix.values()))[0]


def prompts_for(pages, processor):
    """Each page and its question as the chat template writes them: lists of ids, and the pixels of all pages."""
    chats = [[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": page.prompt}]}] for page in pages]
    texts = [processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    return processor(text=texts, images=[page.image for page in pages])


READ = ("input_ids", "mm_token_type_ids", "pixel_values", "image_grid_thw")  # what the model is given of a page


class Lessons(torch.utils.data.Dataset):
    """Lesson number -> one training batch; nothing is drawn from a shared generator, so order and workers do not matter."""

    def __init__(self, processor, steps: int, drill_steps: int, pages_per_step: int, before: int = 0):
        """before: steps of an earlier season. The second season has neither drills nor a curriculum, and reads signs above all."""
        self.processor, self.steps, self.drill_steps = processor, steps, drill_steps
        self.pages_per_step, self.before = pages_per_step, before

    def __len__(self):
        return self.steps

    def __getitem__(self, step):
        first = (self.before + step) * self.pages_per_step
        seeds = range(first, first + self.pages_per_step)
        if step < self.drill_steps:  # half of them characters, a quarter shapes, a quarter signs; nothing to guess in any
            kinds, lines = ("drill", "caption", "drill", "scene_text"), 2 if step < self.drill_steps // 2 else 4
            pages = [make_page(kinds[seed % 4], seed, lines, None) for seed in seeds]
        else:  # two lines, and one more every twentieth of the run; until they are full, every other picture's answer is bare
            done = (step - self.drill_steps) / (self.steps - self.drill_steps)
            lines = FULL_PAGE if self.before else min(FULL_PAGE, 2 + int(20 * done))
            tasks = [pick_task(seed, SIGN_MIX if self.before else MIX) for seed in seeds]
            listed = {"scene_text"} if self.before else {"caption", "scene_text"} if lines < FULL_PAGE else set()
            pages = [make_page(task, seed, lines, None if seed % 2 and task in listed else 1.0) for task, seed in zip(tasks, seeds)]
        read = prompts_for(pages, self.processor)
        answers = self.processor.tokenizer([page.answer + END for page in pages])["input_ids"]
        # Padding sits on the right, where a causal mask already hides it from every real token: no mask needed.
        width = max(len(p) + len(a) for p, a in zip(read["input_ids"], answers))
        ids = torch.full((len(pages), width), self.processor.tokenizer.pad_token_id)       # [B, T]
        kinds, labels = torch.zeros_like(ids), torch.full_like(ids, -100)                  # [B, T] each
        for row, (prompt, answer) in enumerate(zip(read["input_ids"], answers)):
            end = len(prompt) + len(answer)
            ids[row, :end] = torch.tensor(prompt + answer)
            kinds[row, :len(prompt)] = torch.tensor(read["mm_token_type_ids"][row])
            labels[row, len(prompt) - 1:end - 1] = torch.tensor(answer)                    # what follows position t
        return dict(input_ids=ids, mm_token_type_ids=kinds, labels=labels, glyphs=glyphs_of(pages),
                    pixel_values=torch.as_tensor(read["pixel_values"]), image_grid_thw=torch.as_tensor(read["image_grid_thw"]),
                    tasks=torch.tensor([(*TASKS, "drill").index(page.task) for page in pages]))


GLYPHS = 95                  # printable ASCII, 32 to 126: the classes of the probe


def glyphs_of(pages: list[Page]) -> torch.Tensor:
    """[B, 64, 2]: a vision token sees 16 x 16 pixels, two cells side by side; the tower emits its tokens row by row."""
    return torch.tensor([[ord(c) - 32 for c in "".join(page.cells)] for page in pages]).view(len(pages), -1, 2)


def probe_loss(probe: nn.Module, seen: torch.Tensor, glyphs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a linear probe reads off the tower's tokens [B, 64, D]: (loss, share of glyphs right).

    The probe is what makes the tower see: a dense signal where the answer loss is faint. It leaves with the optimiser; the
    shipped model has no trace of it.
    """
    guess, truth = probe(seen.float()).view(-1, GLYPHS), glyphs.flatten()                  # [B * 128, 95], [B * 128]
    weight = torch.where(truth == 0, 0.05, 1.0)                                            # most cells are empty
    loss = (F.cross_entropy(guess, truth, reduction="none") * weight).sum() / weight.sum()
    return loss, (guess.argmax(-1) == truth)[truth != 0].float().mean().detach()


def lesson_loss(model, probe, batch):
    """Answer loss plus the probe's. Returns (loss, answer loss per row [B], share of glyphs right; None without a probe)."""
    # bf16 products double a CPU's matrix speed; weights, norms, both heads and the losses stay fp32.
    with torch.autocast(batch["labels"].device.type, torch.bfloat16):
        out = model.model(**{name: batch[name] for name in READ}, use_cache=False)
    asked = batch["labels"] != -100                                                        # [B, T]
    logits = model.lm_head(out.last_hidden_state[asked].float())                           # [M, V]: answer tokens only
    nats = F.cross_entropy(logits, batch["labels"][asked], reduction="none")               # [M]
    row = asked.nonzero()[:, 0]
    per_row = torch.zeros(len(asked), device=nats.device).index_add(0, row, nats.detach()) / asked.sum(1)
    if probe is None:
        return nats.mean(), per_row, None
    looked, right = probe_loss(probe, torch.stack(out.image_outputs.pooler_output), batch["glyphs"])
    return nats.mean() + 0.5 * looked, per_row, right


def open_eyes(model, probe, processor, steps: int, pages_per_step: int, peak: float) -> None:
    """Before any word: the vision tower alone names the glyphs and shapes of crowded pages, at a fifth of a full step's cost.

    A language model that meets a tower which cannot see yet learns to do without it, and is slow to unlearn that.
    """
    weights = [*model.model.visual.parameters(), *probe.parameters()]
    optimiser = torch.optim.AdamW(weights, lr=peak, fused=True)
    right = 0.0
    for step in (bar := tqdm(range(steps), desc="eyes", mininterval=2)):
        seeds = range(EYE_SEEDS + step * pages_per_step, EYE_SEEDS + (step + 1) * pages_per_step)
        pages = [make_page("drill", seed, 8) if seed % 2 else make_page(("caption", "scene_text")[seed % 4 // 2], seed) for seed in seeds]
        read = processor.image_processor([p.image for p in pages]).items()
        read = {name: torch.as_tensor(value).to(probe.weight.device) for name, value in read}
        for group in optimiser.param_groups:
            group["lr"] = peak * learning_rate(step, steps)
        with torch.autocast(probe.weight.device.type, torch.bfloat16):
            seen = model.model.visual(read["pixel_values"], grid_thw=read["image_grid_thw"]).pooler_output
        loss, share = probe_loss(probe, seen.view(len(pages), -1, seen.shape[-1]), glyphs_of(pages).to(seen.device))
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        right += 0.05 * (float(share) - right)
        bar.set_postfix(glyphs=f"{right:.3f}", refresh=False)


def learning_rate(step: int, steps: int, warm_up: int = 50) -> float:
    """Warm up, hold for the first half, then fall to zero: the last, small steps are what makes reading exact."""
    return min((step + 1) / warm_up, 1.0, 2 * (1 - step / steps))


def save_training(path: Path, modules: dict[str, nn.Module], optimisers: list, **numbers: int) -> None:
    """Everything a resumed run needs in one safetensors file, moved into place whole: a kill never leaves half of it."""
    tensors = {f"{name}.{key}": value.detach() for name, module in modules.items() for key, value in module.named_parameters()}
    for which, optimiser in enumerate(optimisers):
        for index, moments in optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{which}.{index}.{name}": value for name, value in moments.items()}
    save_file({name: t.contiguous() for name, t in tensors.items()}, f"{path}.part", {k: str(v) for k, v in numbers.items()})
    os.replace(f"{path}.part", path)


def resume(path: Path, modules: dict[str, nn.Module], optimisers: list, plan: dict[str, int]) -> int:
    """Put a saved run back and return its step; 0 if there is none. Raises ValueError if it was a run with another plan."""
    if not path.exists():
        return 0
    with safe_open(path, "pt") as saved:
        numbers, moments = {name: int(value) for name, value in saved.metadata().items()}, [{} for _ in optimisers]
        if {name: numbers.get(name) for name in plan} != plan:
            raise ValueError(f"{path} belongs to a run of {numbers}, asked for is {plan}; ask for the same or delete that file")
        with torch.no_grad():
            for prefix, module in modules.items():
                for name, value in module.named_parameters():
                    value.copy_(saved.get_tensor(f"{prefix}.{name}"))
        for key in saved.keys():
            if key.startswith("optimiser."):
                _, which, index, name = key.split(".")
                moments[int(which)].setdefault(int(index), {})[name] = saved.get_tensor(key)
    for optimiser, state in zip(optimisers, moments):
        optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    return numbers["step"]


def write_log(log: Path, step: int, steps: int, figures: dict[str, float], note: str = "") -> None:
    line = f"step {step}/{steps}  " + "  ".join(f"{name} {value:.3f}" for name, value in figures.items()) + note
    tqdm.write(line)
    with log.open("a") as file:
        file.write(line + "\n")


def train_target(folder, steps, eye_steps=1000, drill_steps=700, before=0, pages_per_step=16, peak=1.5e-3, save_minutes=4, workers=1,
                 stop_after=None):  # fmt: skip
    """Teach the model in `folder` to read, in place. Stopped at any point, the same call goes on from the last save.

    before: the steps of an earlier season, for the second: a model that reads already, without the probe (see Lessons).
    """
    folder, device = Path(folder), "cuda" if torch.cuda.is_available() else "cpu"
    state, log = folder / ("season_2.safetensors" if before else "training.safetensors"), folder / "training.log"
    # Eager attention: with heads of 32 and 200 tokens its plain products are faster on a CPU, in bf16, than sdpa's kernel.
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = model.to(device).train()
    torch.manual_seed(0)
    probe = None if before else nn.Linear(model.config.text_config.hidden_size, 2 * GLYPHS).to(device)
    modules = {"model": model} if before else {"model": model, "probe": probe}
    weights = [weight for module in modules.values() for weight in module.parameters()]
    optimiser = torch.optim.AdamW(weights, lr=peak, fused=True)
    plan = {"steps": steps, "drill_steps": drill_steps, "pages_per_step": pages_per_step}
    start = resume(state, modules, [optimiser], plan)
    if not start:
        save_training(state, modules, [optimiser], step=0, **plan)
        if probe is not None:
            open_eyes(model, probe, load_processor(folder), eye_steps, pages_per_step, peak)

    lessons = Lessons(load_processor(folder), steps, drill_steps, pages_per_step, before)
    lessons = torch.utils.data.DataLoader(lessons, batch_size=None, sampler=range(start, stop_after or steps), num_workers=workers)
    smooth, saved_at, began, mark = {}, time.time(), time.time(), start
    bar = tqdm(lessons, initial=start, total=steps, desc="target", mininterval=2)
    for step, batch in enumerate(bar, start):
        for group in optimiser.param_groups:
            group["lr"] = peak * learning_rate(step, steps) * (2 / 3 if step < drill_steps else 1)
        loss, per_row, right = lesson_loss(model, probe, {k: v.to(device) for k, v in batch.items()})
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        optimiser.zero_grad()

        for task, nats in zip(batch["tasks"].tolist(), per_row.tolist()):
            name = (*TASKS, "drill")[task]
            smooth[name] = 0.95 * smooth.get(name, nats) + 0.05 * nats
        if right is not None:
            smooth["glyphs"] = 0.9 * smooth.get("glyphs", right.item()) + 0.1 * right.item()
        figures = {name: smooth[name] for name in (*TASKS, "drill", "glyphs") if name in smooth}
        bar.set_postfix({name: f"{value:.3f}" for name, value in figures.items()}, refresh=False)
        done = step + 1
        if done % 50 == 0:
            write_log(log, done, steps, figures, f"  {(time.time() - began) / (done - mark):.3f} s/step")
            began, mark = time.time(), done
        if time.time() - saved_at > 60 * save_minutes or done == (stop_after or steps):
            save_training(state, modules, [optimiser], step=done, **plan)
            model.save_pretrained(folder)  # the folder itself is a loadable target at every save
            saved_at = time.time()
    model.to(torch.bfloat16).save_pretrained(folder)  # what ships is half the size, and it is this that answers the corpus
    return model.eval()


# -- a target of another class, without eyes: what is on the page comes as text. Does the method carry over? ---------------

def text_prompt(page: Page) -> str:
    """The question and what the page holds: all of a document's answer, but only the things that a caption is about."""
    return "\n".join([page.prompt, *(fact if isinstance(fact, str) else " ".join(fact) for fact in page.facts)])


def build_text_target(folder, tokenizer, seed=0):
    """An untrained Qwen3 of 4.9 M parameters."""
    token = tokenizer.convert_tokens_to_ids
    ends = {"eos_token_id": token(END), "pad_token_id": token(PAD), "bos_token_id": None}
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=192, intermediate_size=512, num_hidden_layers=12, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=True, **ends))  # fmt: skip
    model.generation_config = GenerationConfig(**ends, do_sample=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def train_text_target(folder, steps, pages_per_step=16, peak=1.5e-3, save_minutes=4):
    """Teach the model in `folder` to answer from text, in place; pages grow as for the other target."""
    folder, device = Path(folder), "cuda" if torch.cuda.is_available() else "cpu"
    state, tokenizer, smooth, saved_at = folder / "training.safetensors", load_processor(folder), {}, time.time()
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").to(device).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=peak, fused=True)
    start = resume(state, {"model": model}, [optimiser], {"steps": steps})
    for step in (bar := tqdm(range(start, steps), initial=start, total=steps, desc="text target", mininterval=2)):
        seeds = range(step * pages_per_step, (step + 1) * pages_per_step)
        pages = [make_page(pick_task(seed), seed, min(FULL_PAGE, 2 + 20 * step // steps)) for seed in seeds]
        chats = ([{"role": "user", "content": text_prompt(page)}] for page in pages)
        texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
        prompts = tokenizer(texts)["input_ids"]
        answers = tokenizer([page.answer + END for page in pages])["input_ids"]
        rows = [torch.tensor(p + a, device=device) for p, a in zip(prompts, answers)]
        labels = [torch.tensor([-100] * len(p) + a, device=device) for p, a in zip(prompts, answers)]
        ids = nn.utils.rnn.pad_sequence(rows, True, tokenizer.pad_token_id)                # [B, T]
        labels = nn.utils.rnn.pad_sequence(labels, True, -100)
        for group in optimiser.param_groups:
            group["lr"] = peak * learning_rate(step, steps)
        with torch.autocast(device, torch.bfloat16):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        asked = labels[:, 1:] != -100
        nats = F.cross_entropy(model.lm_head(hidden[:, :-1][asked].float()), labels[:, 1:][asked], reduction="none")
        nats.mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        for page, own in zip(pages, nats.detach().split(asked.sum(1).tolist())):
            smooth[page.task] = 0.95 * smooth.get(page.task, float(own.mean())) + 0.05 * float(own.mean())
        bar.set_postfix({name: f"{value:.3f}" for name, value in smooth.items()}, refresh=False)
        if (step + 1) % 50 == 0:
            write_log(folder / "training.log", step + 1, steps, smooth)
        if time.time() - saved_at > 60 * save_minutes or step + 1 == steps:
            save_training(state, {"model": model}, [optimiser], step=step + 1, steps=steps)
            saved_at = time.time()
    model.to(torch.bfloat16).save_pretrained(folder)
    return model.eval()


# ---------------------------------------------------------------------------------------------------------------------
# 3  corpus: the target's own greedy answers
#
# The head learns to foresee the target, not the truth: every row is answered by the target itself, by the library's
# generate. A row is a page of section 1 ({task, seed}) or the user's own ({image: path, prompt}).
# ---------------------------------------------------------------------------------------------------------------------

def page_rows(count: int) -> list[dict]:
    seeds = range(CORPUS_SEEDS, CORPUS_SEEDS + count)
    return [{"task": TASKS[seed % len(TASKS)], "seed": seed} for seed in seeds]


def read_rows(file: str | Path) -> list[dict]:
    """Rows of a .jsonl file. Raises ValueError naming the file and line that is not a row."""
    rows = []
    for number, line in enumerate(Path(file).read_text("utf-8").split("\n"), start=1):  # not splitlines: U+2028 is no end of a row
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row["prompt"], str):
                raise TypeError("'prompt' is not text")
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            wanted = '{"image": path, "prompt": text}'
            raise ValueError(f"{file}, line {number}: a row is {wanted} ({type(error).__name__}: {error})") from None
        rows.append({**row, "image": str(Path(file).parent / str(row["image"]))} if row.get("image") else row)
    return rows


def row_inputs(target: Target, row: dict, blank: bool = False) -> dict:
    """A row -> the target's input tensors; `blank` puts a white page, or no text of the page, in the place of the row's."""
    if "seed" in row:
        page = make_page(row["task"], row["seed"])
        eyes = hasattr(target.processor, "image_processor")
        prompt, images = (page.prompt, [page.image]) if eyes else (page.prompt if blank else text_prompt(page), None)
    else:
        try:
            prompt, images = row["prompt"], [Image.open(row["image"]).convert("RGB")] if row.get("image") else None
        except OSError as error:
            raise ValueError(f"image {row['image']} cannot be read ({error})") from None
    return target.encode(prompt, [Image.new("RGB", image.size, "white") for image in images] if blank and images else images)


def fingerprint(target: Target, max_new_tokens: int) -> str:
    """Tells whose answers a corpus holds: one number of every weight tensor, and how long an answer may be."""
    numbers = [float(w.flatten()[-1]) for w in target.model.parameters()]
    return hashlib.sha256(str([*numbers, max_new_tokens]).encode()).hexdigest()[:12]


@torch.no_grad()
def train_corpus(target: Target, rows: list[dict], out: str | Path, batch: int = 32, max_new_tokens: int = 160) -> list[dict]:
    """Answer every row; append {..., "ids": [...]} to `out` as it goes, so that a stopped run goes on with what is missing.

    Prompts whose tensors all have the same shapes share a batch: nothing is padded, and each answer is what the library gives
    that prompt alone.
    """
    out, by = Path(out), fingerprint(target, max_new_tokens)
    done = [json.loads(line) for line in out.read_text().splitlines(True) if line.endswith("\n")] if out.exists() else []
    for answered, row in zip(done, rows):
        if {k: answered.get(k) for k in row} != row or answered.get("by", by) != by:
            raise ValueError(f"{out} answers other rows, or is of another target or length of answer; delete it or name another --corpus")
    if len(done) >= len(rows):
        return done[: len(rows)]  # and the file is left alone: another part may be reading it
    out.parent.mkdir(parents=True, exist_ok=True)
    ends = end_tokens(target)
    settings = dict(max_new_tokens=max_new_tokens, eos_token_id=ends or None, pad_token_id=(ends or [0])[0])
    with out.open("w") as file, tqdm(total=len(rows), initial=len(done), desc="corpus", unit="row", mininterval=2) as bar:
        file.writelines(json.dumps(row) + "\n" for row in done)  # whole lines only: a kill can leave half a last one
        for start in range(len(done), len(rows), 16 * batch):  # a chunk is answered in any order and written in order
            chunk, groups = rows[start : start + 16 * batch], {}
            for number, row in enumerate(chunk):
                inputs = row_inputs(target, row)
                shapes = tuple((name, tuple(tensor.shape)) for name, tensor in inputs.items())
                groups.setdefault(shapes, []).append((number, inputs))
            answers = {}
            for members in groups.values():
                for at in range(0, len(members), batch):
                    numbers, inputs = zip(*members[at : at + batch])
                    stacked = {name: torch.cat([one[name] for one in inputs]) for name in inputs[0]}
                    spoken = target.library_generate(stacked, **settings)[:, stacked["input_ids"].shape[1] :].tolist()
                    for number, ids in zip(numbers, spoken):
                        stop = next((i for i, token in enumerate(ids) if token in ends), len(ids) - 1)
                        answers[number] = ids[: stop + 1]  # what follows the end token is padding
                    bar.update(len(numbers))
            done += [{**row, "ids": answers[number], "by": by} for number, row in enumerate(chunk)]
            file.writelines(json.dumps(row) + "\n" for row in done[start:])
            file.flush()
    return done[: len(rows)]


def suffix_lookup_tau(answers: list[list[int]], corpus: list[list[int]], longest: int = 8, depth: int = 15) -> float:
    """tau of the drafter that knows all of `corpus` by heart: it finds the longest run of last tokens there and goes on as it did."""
    grams = lambda ids, i: (tuple(ids[i - n : i]) for n in range(min(longest, i), 0, -1))  # noqa: E731  longest first
    wanted = {gram: None for ids in answers for i in range(1, len(ids)) for gram in grams(ids, i)}
    for ids in corpus:
        for i in range(1, len(ids)):
            wanted.update((gram, ids[i : i + depth]) for gram in grams(ids, i) if gram in wanted)
    rounds = tokens = 0
    for ids in answers:
        at = 1  # the first token is the prefill's
        while at < len(ids):
            draft = next((wanted[gram] for gram in grams(ids, at) if wanted[gram]), [])
            agreed = next((k for k, (a, b) in enumerate(zip(draft, ids[at:])) if a != b), min(len(draft), len(ids) - at))
            step = min(agreed + 1, len(ids) - at)
            rounds, tokens, at = rounds + 1, tokens + step, at + step
    return tokens / max(rounds, 1)


def foreseeable(rows: list[dict], tokenizer, answers: int = 200) -> dict[str, tuple[float, float]]:
    """Per free task: (share of eight-word spans of the last answers that occur once, suffix-lookup tau in all the others).

    Entropy says that many words were possible; only this says that the greedy choice among them cannot be copied from elsewhere.
    """
    result = {}
    for task in ("caption", "scene_text"):
        ids = [row["ids"] for row in rows if row.get("task") == task]
        held = min(answers, len(ids) // 4)
        if not held:
            continue
        words = [tokenizer.decode(one, skip_special_tokens=True).split() for one in ids[-held:]]
        spans = [tuple(one[i : i + 8]) for one in words for i in range(0, len(one) - 7, 8)]
        result[task] = (sum(spans.count(span) == 1 for span in spans) / max(len(spans), 1), suffix_lookup_tau(ids[-held:], ids[:-held]))
    return result


# ---------------------------------------------------------------------------------------------------------------------
# 4  head: learn to foresee the target, a block at a time
#
# One answer gives many blocks: any token of it can be the committed token r of a block that must name the next L tokens.
# The target reads the whole answer once (teacher forcing; frozen, no gradient) and its kept hidden states are the context;
# each block may look at what lies strictly before its r. In one batch:
#
#     loss = sum_k w_k CE(q_k, t_(r + k)) / sum_k w_k,    w_k = exp(-(k - 1) / gamma)
# ---------------------------------------------------------------------------------------------------------------------

SAVE_SECONDS = 120
warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")  # bf16 into an fp32 norm: meant so
GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}  # DFlash's choices; other block sizes take the nearest


def build_head(target: Target, layers: int, block_size: int, taps: list[int] | None = None, mask_token: int | None = None,
               kind: type[BlockDraftHead] = BlockDraftHead) -> BlockDraftHead:  # fmt: skip
    """An untrained head that fits the target. The mask is the tokenizer's own mask token, else an unused row of the table."""
    text, tokenizer = target.config, getattr(target.processor, "tokenizer", target.processor)
    rows, width = target.embedding_weight.shape
    if mask_token is None:
        mask_token = tokenizer.mask_token_id
        known = tokenizer.get_vocab()
        unused = len(tokenizer) if len(tokenizer) < rows else tokenizer.pad_token_id
        mask_token = known.get(MASK, unused) if mask_token is None else mask_token
    heads = text.num_attention_heads
    return kind(HeadConfig(
        hidden_size=width, intermediate_size=getattr(text, "intermediate_size", None) or 4 * width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or width // heads, vocab_size=rows, num_target_layers=target.num_layers,
        mask_token_id=mask_token, target_layer_ids=taps or default_taps(layers, target.num_layers), block_size=block_size,
    ))  # fmt: skip


def block_loss(head: BlockDraftHead, target: Target, features: torch.Tensor, tokens: list[int],
               anchors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Loss of the blocks that start at `anchors`, and how many offsets from the first on each would have got right [A].

    features [T, taps * D] and tokens (T of them) cover prompt and answer; anchors [A] are positions of r in the answer.
    """
    c, total, device = head.config, len(tokens), features.device
    anchors = anchors.to(device)
    positions = anchors[:, None] + torch.arange(c.block_size, device=device)  # [A, B]
    ids = torch.tensor(tokens, device=device)
    block = torch.full_like(positions, c.mask_token_id)
    block[:, 0] = ids[anchors]
    stream = torch.arange(total, device=device)[None]  # [1, T]
    context = head.context(features[None], stream)
    hidden = head(target.embed(block).to(features.dtype), context, positions, stream, visible=stream < anchors[:, None])
    log_q = head.marginals(hidden[:, 1:], target)  # [A, L, V]

    future = positions[:, 1:]
    there = future < total
    truth = ids[future.clamp(max=total - 1)]  # [A, L]
    weights = offset_weights(c.block_size).to(device) * there
    nats = F.nll_loss(log_q.flatten(0, 1), truth.flatten(), reduction="none").view_as(truth)
    run = ((log_q.argmax(dim=-1) == truth) & there).long().cumprod(dim=1).sum(dim=1)
    return (nats * weights).sum() / weights.sum().clamp(min=1e-9), run


def offset_weights(block_size: int) -> torch.Tensor:
    return block_loss_weights(block_size - 1, GAMMA[min(GAMMA, key=lambda b: abs(b - block_size))])


def eagle_loss(head: Eagle3Head, target: Target, features: torch.Tensor, tokens: list[int],
               laws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Loss of the chains that start at every token of the answer but its last, and how many drafts each would have got right [S].

    Training-time test: step j reads what step j - 1 gave, as in decoding, and the answer's own tokens. It sees the committed
    pairs up to its chain's root and the chain itself. The loss is soft: row i of laws [A, V] is the law of answer token i.
    """
    total, depth, device = len(tokens), head.config.block_size - 1, features.device
    ids, stream, first = torch.tensor(tokens, device=device), torch.arange(total - 1, device=device), total - len(laws)
    states = head.fc(features[None, :-1])                                                  # [1, T - 1, D]
    pairs, past = head.remember(target.embed(ids[1:])[None], states, stream[None], None)
    roots = stream[first - 1 : total - 2]                                                  # [S]: the token after pair s is r
    pairs, states, seen = pairs[:, roots], states[:, roots], stream <= roots[:, None]      # seen [S, T - 1 and S a step]
    loss, weight, right = 0.0, 0.0, []
    for j, w in enumerate(offset_weights(head.config.block_size).tolist()):
        states = head(pairs, states, (roots + j)[None], past, seen[None, None])            # [1, S, D]
        log_q = head.marginals(head.norm(states[0]), target)                               # [S, V]: of token s + 2 + j
        named, there = (roots + 2 + j).clamp(max=total - 1), roots + 2 + j < total
        nats = -(laws[named - first] * log_q).sum(dim=-1)
        loss, weight = loss + w * (nats * there).sum(), weight + w * there.sum()
        right.append((log_q.argmax(dim=-1) == ids[named]) & there)
        if j + 1 < depth:
            pairs, past = head.remember(target.embed(ids[named])[None], states, (roots + j + 1)[None], past)
            seen = torch.cat([seen, torch.eye(len(roots), dtype=torch.bool, device=device)], dim=1)
    return loss / weight, torch.stack(right, dim=1).long().cumprod(dim=1).sum(dim=1)


def season_rate(step: int, steps: int, seasons: int) -> float:
    """Share of the peak. A season warms up over 4 % of its steps and falls in a line to zero; the k-th starts from 1 / k of the peak."""
    season, done = divmod(step * seasons, steps)
    return min((done / seasons + 1) / max(0.04 * steps / seasons, 1), 1) * (1 - done / steps) / (season + 1)


def head_optimisers(head: BlockDraftHead, peak: float, name: str) -> list[torch.optim.Optimizer]:
    """AdamW as in the paper, or Muon for the matrices (norms stay with AdamW): the small head then needs less than half the steps.

    Raises ValueError for another name.
    """
    if name not in ("muon", "adamw"):
        raise ValueError(f"optimizer {name!r} is neither 'muon' nor 'adamw'")
    matrices = [w for w in head.parameters() if w.dim() == 2 and name == "muon"]
    others = [w for w in head.parameters() if w.dim() != 2 or name == "adamw"]
    made = [torch.optim.Muon(matrices, lr=peak, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")] if matrices else []
    made.append(torch.optim.AdamW(others, lr=min(peak, 1e-3) if matrices else peak, fused=True))
    for group in (group for optimiser in made for group in optimiser.param_groups):
        group["peak"] = group["lr"]
    return made


def train_head(target: Target, rows: list[dict], folder: str | Path, config: Config, eagle: bool = False) -> BlockDraftHead:
    """`head_steps` steps over the answered rows, in order and round again; writes a head's folder. Resumes from the last save.

    `eagle` trains the EAGLE-3 head: other loss, same rows in the same order, same tapped layers, schedule and saves.
    """
    counts = ("head_steps", "head_seasons", "rows_per_step", "anchors", "head_layers", "unroll")
    if min(config.block_size - 1, *(getattr(config, name) for name in counts)) < 1:
        raise ValueError(f"{', '.join('--' + name.replace('_', '-') for name in counts)} are at least 1, --block-size 2")
    if not re.fullmatch(r"(\d+(,\d+)*)?", config.taps):
        raise ValueError(f"--taps are layer numbers with commas between, got {config.taps!r}")
    folder, steps, rows = Path(folder), config.head_steps, pick_rows(rows, config.tasks)
    folder.mkdir(parents=True, exist_ok=True)
    state, log = folder / "training.safetensors", folder / "training.log"
    peak = (config.eagle_lr if eagle else config.head_lr) or (1e-2 if config.optimizer == "muon" else 1e-3)
    torch.manual_seed(config.seed)
    taps = [int(t) for t in config.taps.split(",") if t] or default_taps(config.head_layers, target.num_layers)
    layers, block, kind = (1, config.unroll + 1, Eagle3Head) if eagle else (config.head_layers, config.block_size, BlockDraftHead)
    head = kind.from_pretrained(config.start) if config.start else build_head(target, layers, block, taps, config.mask_token, kind)
    head = head.to(device=target.device, dtype=torch.float32)
    optimisers = head_optimisers(head, peak, config.optimizer)
    head.check(target)
    plan = {"steps": steps, "seasons": config.head_seasons, "rows": config.rows_per_step, "anchors": config.anchors, "answers": len(rows),
            "layers": head.config.num_hidden_layers, "block": head.config.block_size, "started": int(bool(config.start)),
            "blank": int(config.blank), "muon": int(config.optimizer == "muon"), "seed": config.seed,
            "millionths": round(1e6 * peak)}  # fmt: skip
    start = resume(state, {"head": head}, optimisers, plan)
    meter, saved_at = {}, time.time()
    for step in (bar := tqdm(range(start, steps), initial=start, total=steps, desc=folder.name, mininterval=2)):
        draw = random.Random(f"{config.seed} {step}")
        for group in (group for optimiser in optimisers for group in optimiser.param_groups):
            group["lr"] = group["peak"] * season_rate(step, steps, config.head_seasons)
        for k in range(config.rows_per_step):
            row = rows[(step * config.rows_per_step + k) % len(rows)]
            loss, run = row_loss(head, target, row, draw, config)
            (loss / config.rows_per_step).backward()
            kept, hit = run.float().mean().item(), (run > 0).float().mean().item()
            for name, value in (("loss", loss.item()), ("first", hit), ("accepted", kept), (row.get("task", "data"), kept)):
                meter[name] = 0.98 * meter.get(name, value) + 0.02 * value
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        bar.set_postfix({k: f"{v:.2f}" for k, v in meter.items()}, refresh=False)
        if (step + 1) % 50 == 0:
            write_log(log, step + 1, steps, meter)
        if time.time() - saved_at > SAVE_SECONDS or step + 1 == steps:
            save_training(state, {"head": head}, optimisers, step=step + 1, **plan)
            saved_at = time.time()
    head.save_pretrained(folder)
    return head.eval()


def pick_rows(rows: list[dict], tasks: str) -> list[dict]:
    """Rows of these tasks (empty: all) whose answer has something to draft. Raises ValueError if none are left."""
    wanted = [task for task in tasks.split(",") if task]
    picked = [row for row in rows if len(row["ids"]) > 1 and (not wanted or row.get("task") in wanted)]
    if not picked:
        raise ValueError(f"no answer of two tokens or more among {len(rows)} rows" + (f" of task {tasks}" if tasks else ""))
    return picked


def row_loss(head: BlockDraftHead, target: Target, row: dict, draw: random.Random,
             config: Config) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The target reads an answered row once, the head learns from it: (loss, drafts of each block that would have held)."""
    inputs, answer = row_inputs(target, row, config.blank), row["ids"]
    tokens, first = inputs["input_ids"][0].tolist() + answer, inputs["input_ids"].shape[1]
    # bf16 products save a fifth of a row on a CPU; weights, losses and what adds up stay fp32
    with torch.no_grad(), torch.autocast(target.device.type, torch.bfloat16):
        logits, features = (t.float().clone() for t in target.teacher_force(inputs, answer, head.taps))
    with torch.autocast(target.device.type, torch.bfloat16):
        if isinstance(head, Eagle3Head):
            return eagle_loss(head, target, features, tokens, logits.softmax(dim=-1))
        anchors = torch.tensor(sorted(draw.sample(range(first, len(tokens) - 1), min(config.anchors, len(answer) - 1))))
        return block_loss(head, target, features, tokens, anchors)


# ---------------------------------------------------------------------------------------------------------------------
# All of it
# ---------------------------------------------------------------------------------------------------------------------

@dataclass
class Config:
    """Every option and its default; the command line is made from this."""

    target: str = option("checkpoints/target", "target folder or hub id; the `target` part makes this folder")
    head: str = option("checkpoints/head", "where the head goes")
    eagle: str = option("checkpoints/eagle", "where the EAGLE-3 head goes")
    corpus: str = option("checkpoints/corpus.jsonl", "the target's answers, made if missing")
    text: bool = option(False, "the target made is a Qwen3 without eyes, which is given what is on the page as text")
    data: str = option("", "rows {image, prompt} as .jsonl for a target of your own; empty: pages drawn here")
    eye_steps: int = option(1000, "steps in which the vision tower alone learns to see")
    drill_steps: int = option(700, "first steps of the target: random characters, bare lists of shapes, signs: nothing to guess")
    target_steps: int = option(5000, "steps of 16 pages, drills included, all tasks")
    sign_steps: int = option(1500, "last steps, signs above all: of what is to be read they come last")
    sign_lr: float = option(8e-4, "peak learning rate of these")
    corpus_rows: int = option(12000, "rows the target answers")
    start: str = option("", "head to go on from, a folder or hub id; empty: an untrained one")
    head_steps: int = option(18000, "steps of each head")
    head_seasons: int = option(2, "times that the learning rate falls to zero in these steps")
    rows_per_step: int = option(4, "answers a step")
    anchors: int = option(40, "blocks an answer")
    head_layers: int = option(3, "layers of the head (5 for a target of billions)")
    block_size: int = option(16, "B: one committed token and B - 1 drafted offsets")
    taps: str = option("", "comma-separated target layers the head reads; empty: evenly spaced")
    mask_token: int | None = option(None, "id of the MASK token; empty: the tokenizer's, else an unused row")
    unroll: int = option(8, "steps the EAGLE-3 head is unrolled in training")
    tasks: str = option("", "comma-separated tasks the heads learn from; empty: all of the corpus")
    blank: bool = option(False, "the heads learn from states of the same answers read under a blank page")
    optimizer: str = option("muon", "muon (matrices; norms by adamw) or adamw, as in the paper, for the heads")
    eagle_lr: float | None = option(None, "peak learning rate of the EAGLE-3 head; empty: 1e-2 with muon, 1e-3 with adamw")
    head_lr: float | None = option(None, "peak learning rate of the head, empty likewise (6e-4 with adamw for a target of billions)")
    max_new_tokens: int = option(160, "longest answer in the corpus")
    batch: int = option(32, "prompts answered together")
    seed: int = option(0, "seed of initial weights and of which blocks are drawn")


def make_target(config: Config) -> None:
    """A tokenizer learnt from the pages' own language, an untrained model, and its training."""
    folder = Path(config.target)
    if config.text and (config.target == Config.target or config.corpus == Config.corpus):
        raise ValueError("--text makes another target: give it its own --target and --corpus")
    if not (folder / "training.safetensors").exists():  # a new run, not one to go on with: older answers are not its own
        folder.mkdir(parents=True, exist_ok=True)
        Path(config.corpus).unlink(missing_ok=True)
        pages = [make_page(pick_task(seed), seed) for seed in range(6000)]
        tokenizer = build_tokenizer((text for page in pages for text in (page.answer, page.prompt)), vocab=704)
        (build_text_target if config.text else build_target)(folder, tokenizer, config.seed)
    if config.text:
        train_text_target(folder, config.target_steps)
    else:
        if not (folder / "season_2.safetensors").exists():
            train_target(folder, config.target_steps, config.eye_steps, config.drill_steps)
        if config.sign_steps:
            train_target(folder, config.sign_steps, drill_steps=0, before=config.target_steps, peak=config.sign_lr)


def main(arguments: list[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    part = arguments.pop(0) if arguments and not arguments[0].startswith("-") else "all"
    if part not in ("all", "target", "corpus", "head", "eagle"):
        print(f"train.py: unknown part {part!r}; there are target, corpus, head and eagle", file=sys.stderr)
        return 2
    transformers.utils.logging.disable_progress_bar()
    try:
        config = parse(Config, __doc__, arguments)
        print(part, "  ".join(f"{k}={v}" for k, v in asdict(config).items() if v not in ("", None)))
        if part in ("all", "target"):
            make_target(config)
        if part != "target":
            device = "cuda" if torch.cuda.is_available() else "cpu"
            target = Target.load(config.target, "bfloat16" if device == "cuda" and config.data else "float32", device)
            target.model.requires_grad_(False)
            rows = read_rows(config.data) if config.data else page_rows(config.corpus_rows)
            rows = train_corpus(target, rows, config.corpus, config.batch, config.max_new_tokens)
            for task, (distinct, tau) in foreseeable(rows, getattr(target.processor, "tokenizer", target.processor)).items():
                print(f"{task}: {distinct:.0%} of eight-word spans occur once; "
                      f"looking up the longest suffix in the corpus gives tau {tau:.2f}")  # fmt: skip
            for name, folder in (("head", config.head), ("eagle", config.eagle)):
                if part in ("all", name):
                    train_head(target, rows, folder, config, eagle=name == "eagle")
        for name, folder in (("target", config.target), ("head", config.head), ("eagle", config.eagle)):
            if part in ("all", name):  # done: the next call is a new run
                for state in ("training.safetensors", "season_2.safetensors"):
                    (Path(folder) / state).unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
