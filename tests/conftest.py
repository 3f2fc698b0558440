"""Shared by all tests: tiny targets with wide random weights, so that margins are real and every mistake shows.

Nothing is downloaded. `tiny_target` is a genuine Qwen3-VL (M-RoPE, deepstack) of four layers over a vocabulary of 64.
"""

import sys
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from glance import BlockDraftHead, CandidateTree, Clock, Context, HeadConfig, Target, default_taps, grow_tree  # noqa: E402


VOCAB, IMAGE, VISION_START, VISION_END, MASK = 64, 60, 61, 62, 63


def widen(model, seed):
    """Redraw every matrix so that attention, logits and margins are far from degenerate."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            scale = 1.0 if "embed" in name or "lm_head" in name else 1.6 / weight.shape[-1] ** 0.5
            weight.data = torch.randn(weight.shape, generator=generator) * scale
    return model


def build_tiny(seed=0, layers=4, tied=True, attention="sdpa"):
    config = Qwen3VLConfig(
        text_config=dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=8, max_position_embeddings=512, tie_word_embeddings=tied,
                         rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1], mrope_interleaved=True)),
        vision_config=dict(hidden_size=16, depth=3, num_heads=2, intermediate_size=32, patch_size=4, spatial_merge_size=2,
                           temporal_patch_size=1, out_hidden_size=32, num_position_embeddings=64, deepstack_visual_indexes=[0, 1]),
        image_token_id=IMAGE, video_token_id=59, vision_start_token_id=VISION_START, vision_end_token_id=VISION_END,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    config._attn_implementation = attention
    model = widen(Qwen3VLForConditionalGeneration(config).eval(), seed)
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None)
    return Target(model)


def prompt_inputs(seed, length=12, grids=((2, 4),)):
    """A prompt with one image per grid (patches high, wide; merged 2 x 2), or none: the tensors a processor would give."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 58, (length,), generator=generator).tolist()
    ids, kinds = words[: length // 2], [0] * (length // 2)
    for h, w in grids:
        n = h * w // 4
        ids += [VISION_START] + [IMAGE] * n + [VISION_END]
        kinds += [0] + [1] * n + [0]
    ids += words[length // 2 :]
    kinds += [0] * (len(ids) - len(kinds))
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    if grids:
        inputs["mm_token_type_ids"] = torch.tensor([kinds])
        inputs["pixel_values"] = torch.randn(sum(h * w for h, w in grids), 3 * 4 * 4, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, h, w] for h, w in grids])
    return inputs


def build_head(target, seed=0, layers=2, block=8, **changes):
    width, config = target.config.hidden_size, target.config
    values = dict(hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
                  head_dim=8, vocab_size=config.vocab_size, num_target_layers=config.num_hidden_layers, mask_token_id=MASK,
                  target_layer_ids=default_taps(layers, config.num_hidden_layers), block_size=block)  # fmt: skip
    torch.manual_seed(seed)
    return BlockDraftHead(HeadConfig(**{**values, **changes})).eval()


def library_greedy(target, inputs, max_new_tokens, eos=None):
    """The oracle: the library's own greedy generate with a clean configuration."""
    clean = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=eos, pad_token_id=0)
    out = target.model.generate(**inputs, generation_config=clean)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def lively(target, seed, grids=(), length=20):
    """(prompt, greedy answer) whose first 20 tokens hold 10 different ones, the first three among them: in a text that
    repeats one word, a fault in cache or positions could hide. The answer runs `length` tokens."""
    for attempt in range(100):
        inputs = prompt_inputs(100 * seed + attempt, grids=grids)
        answer = library_greedy(target, inputs, length)
        if len(set(answer[:20])) >= 10 and len(set(answer[:3])) == 3:
            return inputs, answer
    raise AssertionError("no prompt of a hundred gives a varied answer")


def extend(inputs, tokens):
    """The same prompt with `tokens` written after it."""
    more = torch.tensor([list(tokens)], dtype=torch.long)
    longer = {**inputs, "input_ids": torch.cat([inputs["input_ids"], more], dim=1)}
    for name, fill in (("attention_mask", 1), ("mm_token_type_ids", 0)):
        if name in inputs:
            longer[name] = torch.cat([inputs[name], torch.full_like(more, fill)], dim=1)
    return longer


@torch.inference_mode()
def library_forward(target, inputs, tokens=(), **options):
    """The oracle for one pass: the library's own forward over prompt and tokens, from scratch, with its own masks and positions."""
    return target.model(**extend(inputs, tokens), **options)


def random_tree(root, nodes, generator):
    """A tree of any shape over the words below 58, siblings distinct."""
    tree = CandidateTree.empty(root)
    while len(tree) < nodes:
        parent, token = (int(torch.randint(0, high, (1,), generator=generator)) for high in (len(tree) + 1, 58))
        if (parent, token) not in tree.children():
            tree.add(parent, token, -1.0)
    return tree


def path_to(tree, node):
    """The nodes from the root's child down to `node`."""
    path = []
    while node:
        path, node = [node, *path], tree.parents[node]
    return path


class Oracle:
    """A drafter that knows the answer. `wrong` lies stand before every right node, each with a child of its own."""

    taps = []

    def __init__(self, inputs, answer, depth=4, wrong=0):
        self.start, self.answer, self.depth, self.wrong = inputs["input_ids"].shape[1], answer, depth, wrong

    def ahead(self, context):
        done = len(context.tokens) - self.start
        return self.answer[done : done + self.depth]

    def propose(self, context):
        tree, node = CandidateTree.empty(context.root), 0
        for token in self.ahead(context):
            for j in range(1, self.wrong + 1):
                lie = tree.add(node, (token + j) % VOCAB, -1.0)
                tree.add(lie, token, -2.0)
            node = tree.add(node, token, 0.0)
        return tree


class Guesser(Oracle):
    """Noisy marginals that lean towards the answer, grown into a tree: right often, wrong often, at every rank."""

    def __init__(self, inputs, answer, seed=0):
        super().__init__(inputs, answer, depth=7)
        self.generator = torch.Generator().manual_seed(seed)

    def propose(self, context):
        logits = torch.randn(self.depth, VOCAB, generator=self.generator)
        for k, token in enumerate(self.ahead(context)):
            logits[k, token] += 3
        return grow_tree(logits.log_softmax(dim=-1), context.root, context.budget, context.branch)


def make_context(target, tokens, fresh, left=99):
    """What `decode` would hand a drafter: `tokens` end in r, `fresh` are the features cached since the last call."""
    return Context(target, list(tokens), fresh, budget=31, branch=8, left=left, clock=Clock("cpu"))


@pytest.fixture(scope="session")
def tiny_target():
    return build_tiny()


@pytest.fixture(scope="session")
def tiny_head(tiny_target):
    return build_head(tiny_target)
