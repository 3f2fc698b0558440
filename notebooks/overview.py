"""Draws overview.png, the figure of the README, from one real round of the shipped checkpoints: python notebooks/overview.py"""

import sys
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from glance import BlockDraftHead, Target, decode  # noqa: E402
from train import HELD_OUT, make_page  # noqa: E402

INK, SOFT, LINE, GREEN, ORANGE, BLUE = "#1a1a1a", "#5c5c5c", "#b0b0b0", "#00795c", "#c45500", "#cfe3f5"
SHOWN = 7  # offsets drawn


def font(size):
    return ImageFont.load_default(size)


class Watching:
    """The head, remembering the marginals of its last draft."""

    def __init__(self, head):
        self.head, self.taps, self.config = head, head.taps, head.config

    def propose(self, context):
        draft = self.head.draft

        def remember(c):
            self.log_q = draft(c)
            return self.log_q

        self.head.draft = remember
        try:
            return self.head.propose(context)
        finally:
            del self.head.draft


def interesting_round(target, head, task, seeds, budget=13):
    """A round that took a branch other than the first, accepted a few tokens and rejected the rest."""
    best = None
    for seed in seeds:
        page, text = make_page(task, HELD_OUT + seed), []
        watch = Watching(head)
        for r in decode(target, watch, target.encode(page.prompt, [page.image]), budget=budget):
            branched = any(node != i for i, node in enumerate(r.path, start=1))
            if text and branched and 3 <= r.accepted <= 6 and max(r.tree.depths) <= SHOWN and len(r.tokens) == r.accepted + 1:
                spread = len({r.tree.parents[i] for i in range(1, len(r.tree) + 1)})
                if best is None or spread > best[0]:
                    best = (spread, page, list(text), r, watch.log_q)
            text += r.tokens
    return best[1:]


def place(tree):
    """Tidy layout: x is the depth, leaves get rows of their own, a parent stands at the height of its first child."""
    rows, y = 0, {}

    def visit(node):
        nonlocal rows
        children = [i for i in range(1, len(tree) + 1) if tree.parents[i] == node]
        if not children:
            y[node], rows = rows, rows + 1
        for child in children:
            visit(child)
        if children:
            y[node] = y[children[0]]

    visit(0)
    return y, rows


def chip(draw, x, y, text, fill="white", outline=LINE, colour=INK, width=1, size=16):
    box = draw.textbbox((0, 0), text, font=font(size))
    w = max(box[2] - box[0] + 16, 30)
    draw.rounded_rectangle((x, y - 14, x + w, y + 14), 7, fill=fill, outline=outline, width=width)
    draw.text((x + w / 2, y), text, font=font(size), fill=colour, anchor="mm")
    return w


def main():
    target = Target.load(HERE.parent / "checkpoints" / "target")
    head = BlockDraftHead.from_pretrained(HERE.parent / "checkpoints" / "head")
    page, before, r, log_q = interesting_round(target, head, "infographic", range(40))
    say = lambda t: target.processor.tokenizer.decode([t]).strip() or "_"  # noqa: E731
    y, rows = place(r.tree)
    gap_x, gap_y, left = 124, 40, 860
    depth = max(r.tree.depths)
    width, height = max(left + gap_x * (depth + 1), left + 760), max(470, 150 + gap_y * rows)
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)

    for x, title, note in ((20, "page and prompt", "prefilled once by the target"), (350, "one draft pass", "marginals of the next offsets"),
                           (left, "one verify pass", "the most probable prefixes; green: accepted")):  # fmt: skip
        draw.text((x, 16), title, font=font(24), fill=INK)
        draw.text((x, 48), note, font=font(16), fill=SOFT)
    image.paste(page.image.resize((288, 288), Image.Resampling.NEAREST), (20, 86))
    draw.rectangle((20, 86, 308, 374), outline=LINE)
    draw.text((20, 384), page.prompt, font=font(17), fill=INK)
    said = target.processor.tokenizer.decode(before)
    draw.text((20, 408), ("... " + said[-34:]), font=font(17), fill=SOFT)

    root = say(r.tree.tokens[0])
    chip(draw, 350, 100, root, outline=INK, width=2)
    for k in range(min(SHOWN, len(log_q))):
        top = log_q[k].exp().topk(3)
        draw.text((350, 140 + 44 * k), f"+{k + 1}", font=font(16), fill=SOFT, anchor="lm")
        x = 390
        for q, token in zip(top.values.tolist(), top.indices.tolist()):
            shade = tuple(int(255 - (255 - c) * q) for c in (0x56, 0xB4, 0xE9))
            draw.rounded_rectangle((x, 124 + 44 * k, x + 138, 156 + 44 * k), 6, fill=shade, outline=LINE)
            draw.text((x + 8, 140 + 44 * k), say(token), font=font(16), fill=INK, anchor="lm")
            draw.text((x + 130, 140 + 44 * k), f"{q:.2f}", font=font(14), fill=INK, anchor="rm")
            x += 146

    at = {i: (left + gap_x * r.tree.depths[i], 110 + gap_y * y[i]) for i in range(len(r.tree) + 1)}
    taken = {0, *r.path}
    wide = {i: max(draw.textlength(say(r.tree.tokens[i]), font=font(16)) + 16, 30) for i in at}
    for i in range(1, len(r.tree) + 1):
        (x0, y0), (x1, y1) = at[r.tree.parents[i]], at[i]
        accepted = i in taken
        draw.line((x0 + wide[r.tree.parents[i]], y0, x1 - 12, y1, x1, y1), fill=GREEN if accepted else LINE, width=4 if accepted else 2, joint="curve")
    for i, (x, level) in at.items():
        accepted = i in taken and i
        chip(draw, x, level, say(r.tree.tokens[i]), fill="#d9f0e8" if accepted else "white", outline=GREEN if accepted else INK if i == 0 else LINE,
             width=2 if i in taken else 1)  # fmt: skip
    level_bonus = height - 40
    draw.text((left, level_bonus), f"{r.accepted} drafts accepted + the target's own next token", font=font(18), fill=INK, anchor="lm")
    chip(draw, left + 400, level_bonus, say(r.tokens[-1]), fill="#fbe3d0", outline=ORANGE, width=2)
    draw.text((left + 520, level_bonus), f"= {len(r.tokens)} tokens in one target pass", font=font(18), fill=INK, anchor="lm")
    image.save(HERE / "overview.png", optimize=True)
    print("saved", HERE / "overview.png", image.size)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
