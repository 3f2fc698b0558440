"""What the walk-throughs share: one palette, loading, and masks, trees and texts as pictures. Nothing of the method is here."""

import matplotlib.pyplot as plt
import torch
import transformers
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle

from glance import BlockDraftHead, Target
from overview import place
from train import HELD_OUT, TASKS, make_page

# Okabe and Ito's palette: told apart with any kind of colour vision. Markers and labels say the same again for print.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PINK = "#000000 #E69F00 #56B4E9 #009E73 #F0E442 #0072B2 #D55E00 #CC79A7".split()
GREY, PALE = "#8a8a8a", "#e8e8e8"
STYLE = dict(zip(TASKS, zip((ORANGE, SKY, PINK, GREEN, BLUE), "os^Dv")))  # task -> colour, marker
SEEN = ListedColormap(["white", SKY])  # masks

plt.rcParams.update({"figure.dpi": 80, "figure.constrained_layout.use": True, "font.size": 11, "axes.spines.top": False,
                     "axes.spines.right": False, "image.interpolation": "nearest"})  # fmt: skip
transformers.utils.logging.disable_progress_bar()


def load(root, device: str) -> tuple[Target, BlockDraftHead]:
    """The shipped target and head, fp32. TF32 is off: it would blur fp32 by a thousandth."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    target = Target.load(root / "checkpoints/target", device=device)
    return target, BlockDraftHead.from_pretrained(root / "checkpoints/head", device=device)


def ask(target: Target, task: str, number: int) -> tuple:
    """Held-out page `number` of a task, and its prompt as the target's input tensors."""
    page = make_page(task, HELD_OUT + number)
    return page, target.encode(page.prompt, [page.image])


def word(target: Target, token: int) -> str:
    """A token as readers see it; a blank and a line's end get a sign of their own."""
    text = target.processor.tokenizer.decode([token])
    return text.replace("\n", "↵").strip() or "␣"


def show_mask(ax, mask: torch.Tensor, rows: list[str], columns: list[str], title: str) -> None:
    """True is filled. Labels beside rows and above columns."""
    ax.imshow(mask.cpu(), cmap=SEEN, vmin=0, vmax=1, aspect="equal")
    ax.set_xticks(range(len(columns)), columns, rotation=90, fontsize=8)
    ax.set_yticks(range(len(rows)), rows, fontsize=8)
    ax.set_xticks([x - 0.5 for x in range(len(columns) + 1)], minor=True)
    ax.set_yticks([y - 0.5 for y in range(len(rows) + 1)], minor=True)
    ax.grid(which="minor", color=GREY, linewidth=0.4)
    ax.tick_params(which="both", length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    ax.set(title=title, xlabel="key (who is seen)", ylabel="query (who looks)")


def show_tree(ax, tree, names: list[str], path: list[int] = (), title: str = "", size: float = 9) -> None:
    """Depth runs to the right; line width and the figure on it are the probability of the whole path. `path` is drawn bold."""
    row, rows = place(tree)
    for i in range(len(tree) + 1):
        x, y, p, taken = tree.depths[i], -row[i], float(torch.tensor(tree.log_probs[i]).exp()), i in path
        if i:
            x0, y0, colour = x - 1, -row[tree.parents[i]], GREEN if taken else GREY
            ax.plot([x0, x - 0.55, x], [y0, y, y], color=colour, linewidth=0.6 + 5 * p, zorder=1, solid_capstyle="round")
            if size > 7:
                ax.text(x - 0.33, y + 0.12, f"{p:.2f}", fontsize=size - 2, ha="right", va="bottom")
        box = dict(boxstyle="round,pad=0.25", facecolor="#d9f0e8" if taken else "white", edgecolor=GREEN if taken else BLACK if i == 0 else GREY)
        ax.text(x, y, names[i], fontsize=size, ha="center", va="center", bbox=box, zorder=2, weight="bold" if taken else "normal")
    ax.set(xlim=(-0.5, max(tree.depths) + 0.6), ylim=(0.7 - rows, 0.9), title=title, xlabel="offset k")
    ax.set_xticks(range(max(tree.depths) + 1))
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)


def show_text(ax, words: list[str], fills: list, title: str, width: int = 74) -> None:
    """Words in reading order on coloured ground, wrapped at `width` characters. Dark grounds get white letters."""
    x = y = 0
    for text, fill in zip(words, fills):
        shown = text.replace("\n", "↵")
        if x + len(shown) > width:
            x, y = 0, y + 1
        ax.add_patch(Rectangle((x, -y - 0.85), len(shown), 0.9, facecolor=fill, edgecolor="white", linewidth=0.5))
        light = 0.3 * fill[0] + 0.59 * fill[1] + 0.11 * fill[2] if not isinstance(fill, str) else 1
        ax.text(x + len(shown) / 2, -y - 0.4, shown.strip(" ") or " ", family="monospace", fontsize=10, ha="center", va="center",
                color="white" if light < 0.5 else "black")  # fmt: skip
        x += len(shown)
        if "\n" in text:
            x, y = 0, y + 1
    ax.set(xlim=(0, width), ylim=(-y - 1, 0.2), title=title)
    ax.axis("off")
