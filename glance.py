"""GLANCE in one file: one-pass block drafting for lossless speculative decoding in vision-language models.

A vision-language model writes one token per forward pass, although a pass over 32 tokens costs little more than a
pass over one. Speculative decoding uses that: something cheap *drafts* several tokens, the model *verifies* them all in
one pass, and only what the model itself would have written is kept. GLANCE drafts a whole block in ONE pass of a small
head that reads the model's own hidden states, in which the image is already fused with the text. It needs no
pixels and no vision tokens of its own: vision is not overhead.

One round of decoding, top to bottom in this file:

    committed text ... r          r = last committed token (its keys and values are not cached yet)
            |
    1 head      [r, MASK x 15] --one pass--> 15 marginals q_1 ... q_15, one for each future offset
    2 tree      the N most probable prefixes under q_1 q_2 ... q_15, best first, parents before children
    3 mask      every node sees the whole prefix and its own ancestors, nothing else
    4 target    r and the N nodes go through the frozen target --one pass--> N + 1 next-token laws
    5 accept    walk from r along the target's own choice; the longest matching path plus one bonus token
    6 decode    commit the path to the caches; the bonus token is the next r
    7 law       how many drafts survive, as a function of the target's entropy H

Legend, used throughout (shapes in comments are written [rows, columns]):

    B  block size (16)                          V  vocabulary size
    L  drafted offsets, B - 1 (15)              D  hidden size
    N  drafted nodes in the tree ("budget")     T  committed tokens whose keys and values are cached
    p  the target's law of the next token       q  the draft head's law of an offset
    H  entropy of p in nats, at the token a round starts from
    a  accepted length: drafts kept in a round; tau = tokens committed per target pass = mean of a + 1

Paper: "Vision Is Not Overhead: One-Pass Block Drafting for Lossless Speculative Decoding in Vision-Language Models",
arXiv 2609.00355. The head is that of DFlash (arXiv 2602.06036) and reads and writes its checkpoint format.
Run `python glance.py` to watch one round on a toy of a few numbers, without any model.
"""

from __future__ import annotations

import heapq
import inspect
import json
import math
import statistics
import time
from collections import deque
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

# =====================================================================================================================
# 1  head: fused states -> L marginals in one pass
# =====================================================================================================================
#
# The head is a small transformer over the block [r, MASK x 15]. Inside the block attention is bidirectional: the
# offsets are refined together, there is no order to respect. What it knows of page and text comes in as extra keys
# and values, projected from the target's hidden states at a few kept layers ("taps"):
#
#     f_t      = RMSNorm(W_fc [h_t^(l1); h_t^(l2); ...])                 fused feature of committed token t
#     K^i, V^i = W_k^i f, W_v^i f   beside   W_k^i x, W_v^i x            layer i: context beside block
#     q_k      = softmax(W_lm RMSNorm(x_k)),  k = 1 ... L                W_lm and the embeddings are the target's
#
# The context part of K, V depends on committed tokens only, so it is computed once a token and cached.
# Names from below: Target (section 4) lends its embeddings and lm_head, Context (section 6) is what the loop hands a drafter, and
# `propose` hands the marginals to section 2.


@dataclass
class HeadConfig:
    """What a DFlash `config.json` says (DFlash checkpoint format; field names are its keys).

    `target_layer_ids[j] = i` taps the output of decoder layer i, which transformers calls `hidden_states[i + 1]`.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    mask_token_id: int
    target_layer_ids: list[int]
    block_size: int = 16
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e4
    attention_bias: bool = False
    layer_types: list[str] | None = None  # "full_attention" | "sliding_attention" per layer; None: all full
    sliding_window: int | None = None
    is_causal: bool | None = None  # None: sliding layers are causal, full ones bidirectional
    input_embedding_scale: float = 1.0  # the head scales the target's raw table by its own factor ...
    output_multiplier: float = 1.0  # ... and shapes its own logits
    final_logit_softcapping: float | None = None

    @classmethod
    def from_dict(cls, raw: dict, wanted: str = "DFlashDraftModel") -> HeadConfig:
        """Read a config in either style: values flat, or nested in `dflash_config` and `rope_parameters`.

        Raises ValueError naming what cannot be loaded (architecture, activation, scaled rotary embedding) or the keys that are missing.
        """
        architecture = (raw.get("architectures") or ["DFlashDraftModel"])[0]
        if architecture != wanted:
            raise ValueError(f"draft head has architecture {architecture!r}; only {wanted!r} can be loaded")
        rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
        if rope.get("rope_type", rope.get("type", "default")) != "default" or any(isinstance(value, dict) for value in rope.values()):
            raise ValueError(f"draft head has scaled or several rotary embeddings, only one plain rope_theta can be loaded: {rope}")
        if raw.get("hidden_act", "silu") != "silu":
            raise ValueError(f"draft head has hidden_act {raw['hidden_act']!r}; only 'silu' can be loaded")
        flat = {**raw, **rope, **(raw.get("dflash_config") or {})}
        known = {name: flat[name] for name in cls.__dataclass_fields__ if flat.get(name) is not None}
        required = [f.name for f in fields(cls) if f.default is MISSING]
        missing = [name for name in required if name not in known]
        if missing:
            raise ValueError(f"draft head config lacks {', '.join(missing)}")
        return cls(**known)

    def to_dict(self) -> dict:
        """The same facts with every key that the public DFlash loaders ask for, in the place where all of them look."""
        own = ("mask_token_id", "target_layer_ids", "input_embedding_scale", "output_multiplier", "final_logit_softcapping")
        flat = {n: v for n, v in vars(self).items() if n not in own and v is not None}
        nested = {n: v for n in own if (v := getattr(self, n)) is not None}  # SGLang reads the last three nowhere else
        layer_types = self.layer_types or ["full_attention"] * self.num_hidden_layers
        sliding = "sliding_attention" in layer_types  # a Qwen3 config forgets its window unless use_sliding_window says so
        return {
            "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_act": "silu", "dtype": "float32",
            "tie_word_embeddings": False, "max_position_embeddings": 32768, **flat, "layer_types": layer_types,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta}, "use_sliding_window": sliding,
            "dflash_config": nested,
        }  # fmt: skip


def block_loss_weights(offsets: int, gamma: float) -> Tensor:
    """w_k = exp(-(k - 1) / gamma) for k = 1 ... L, fp32 [L] (DFlash: gamma 7 for blocks of 16, 5 for 10, 4 for 8).

    An early miss throws away everything behind it, so early offsets weigh more in the training loss.
    """
    return torch.exp(-torch.arange(offsets) / gamma)


def default_taps(num_draft_layers: int, num_target_layers: int) -> list[int]:
    """Layers to tap when none are named: evenly spaced from 1 to n - 3 (DFlash). [1, 9, 17, 25, 33] for 5 of 36."""
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    last = max(num_target_layers - 3, 1)
    return [round(1 + i * (last - 1) / (num_draft_layers - 1)) for i in range(num_draft_layers)]


@lru_cache
def frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    """theta^(-2 i / head_dim) for i = 0 ... head_dim / 2 - 1, fp32 radians a position; the same in every draft pass."""
    return theta ** (-torch.arange(0, head_dim, 2, device=device).float() / head_dim)


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position x frequency: positions [batch, S] -> [batch, 1, S, head_dim], one row for all heads.
    sin is negative on the left half: `rotate` swaps the halves, so the minus has to be here. The head keeps plain 1-D stream
    positions even where the target uses M-RoPE: it counts tokens, not pixels."""
    angle = positions.float()[:, None, :, None] * frequencies(head_dim, theta, positions.device)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to x [..., S, head_dim] (the half-split convention of Qwen and Llama).

        left' = left cos - right sin,   right' = right cos + left sin        roll swaps left and right; the minus is in `sin`
    """
    return (x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin).to(x.dtype)


def grow(old: tuple[Tensor, Tensor] | None, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values with more rows behind them: pairs of [batch, kv_heads, S, head_dim]."""
    return new if old is None else (torch.cat([old[0], new[0]], dim=2), torch.cat([old[1], new[1]], dim=2))


class DraftAttention(nn.Module):
    """Queries from the block; keys and values from the context's features and the block itself."""

    def __init__(self, c: HeadConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, self.heads * c.head_dim, bias=c.attention_bias)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * c.head_dim, bias=c.attention_bias)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * c.head_dim, bias=c.attention_bias)
        self.o_proj = nn.Linear(self.heads * c.head_dim, c.hidden_size, bias=c.attention_bias)
        self.q_norm = nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps)
        self.k_norm = nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, kv_heads, S, head_dim] of features or block states x [batch, S, D]."""
        shape = (*x.shape[:2], self.kv_heads, self.head_dim)
        keys = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        return rotate(keys, cos, sin), self.v_proj(x).view(shape).transpose(1, 2)

    def forward(self, x: Tensor, context: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """x [batch, S, D] -> [batch, S, D]; mask [batch, 1, S, T + S] is True where a query may look, None for everywhere."""
        return self.attend(x, grow(context, self.keys_values(x, cos, sin)), cos, sin, mask)

    def attend(self, x: Tensor, keys_values: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        queries = self.q_norm(self.q_proj(x).view(*x.shape[:2], self.heads, self.head_dim)).transpose(1, 2)
        keys, values = keys_values
        grouped = self.heads != self.kv_heads
        out = F.scaled_dot_product_attention(rotate(queries, cos, sin), keys, values, attn_mask=mask, enable_gqa=grouped)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DraftMLP(nn.Module):
    def __init__(self, c: HeadConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    def __init__(self, c: HeadConfig):
        super().__init__()
        self.self_attn, self.mlp = DraftAttention(c), DraftMLP(c)
        self.input_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)

    def forward(self, x: Tensor, context: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        return self.finish(x, self.self_attn(self.input_layernorm(x), context, cos, sin, mask))

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockDraftHead(nn.Module):
    """The block-diffusion draft head (paper section 3; tensor names are the DFlash checkpoint's).

    It is also a *drafter*: anything with `taps` and `propose(context) -> CandidateTree` can drive `decode`.
    """

    ARCHITECTURE = "DFlashDraftModel"  # what its config.json calls it

    def __init__(self, config: HeadConfig):
        super().__init__()
        if "sliding_attention" in (config.layer_types or []) and not config.sliding_window:
            raise ValueError("draft head config asks for sliding_attention layers but gives no sliding_window")
        if foreign := set(config.layer_types or []) - {"full_attention", "sliding_attention"}:
            raise ValueError(f"draft head config has layer_types {sorted(foreign)}; there are full_attention and sliding_attention")
        if config.layer_types and len(config.layer_types) != config.num_hidden_layers:
            raise ValueError(f"draft head config has {config.num_hidden_layers} layers but {len(config.layer_types)} layer_types")
        self.config = config
        self.taps = list(config.target_layer_ids)
        self.fc = nn.Linear(len(self.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    # ---- context: features of committed tokens -> cached keys and values ----

    def context(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """features [1, T, taps * D] at stream positions [1, T] -> per layer (keys, values) [1, kv_heads, T, head_dim]."""
        cos, sin = rotary(positions, self.config.head_dim, self.config.rope_theta)
        fused = self.fuse(features)
        return [layer.self_attn.keys_values(fused, cos, sin) for layer in self.layers]

    def fuse(self, features: Tensor) -> Tensor:
        """f_t above: [batch, T, taps * D] -> [batch, T, D]."""
        return self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))

    # ---- block: [r, MASK x L] -> hidden states from which the target's lm_head reads the marginals ----

    def forward(self, embeddings: Tensor, context: list[tuple[Tensor, Tensor]], positions: Tensor,
                context_positions: Tensor, visible: Tensor | None = None) -> Tensor:  # fmt: skip
        """Block embeddings [batch, B, D] at positions [batch, B] -> hidden states [batch, B, D].

        Decoding has one block, whose context is everything cached. Training reads many blocks of one answer as a batch over
        the same context, and `visible` [batch, T] says what lies before each block's own r.
        """
        x = embeddings * self.config.input_embedding_scale
        cos, sin = rotary(positions, self.config.head_dim, self.config.rope_theta)
        context = [(k.expand(len(x), -1, -1, -1), v.expand(len(x), -1, -1, -1)) for k, v in context]
        for i, layer in enumerate(self.layers):
            x = layer(x, context[i], cos, sin, self._mask(i, positions, context_positions, visible))
        return self.norm(x)

    def _mask(self, i: int, positions: Tensor, context_positions: Tensor, visible: Tensor | None = None) -> Tensor | None:
        """[batch, 1, B, T + B], True where a slot may look. The usual layer is full and bidirectional and, with one block, needs none."""
        c = self.config
        sliding = bool(c.layer_types) and c.layer_types[i] == "sliding_attention"
        causal = sliding if c.is_causal is None else c.is_causal
        if visible is None and not sliding and not causal:
            return None
        batch, block = positions.shape
        keys = torch.cat([context_positions.expand(batch, -1), positions], dim=1)
        ahead = keys[:, None, :] - positions[:, :, None]  # key minus query  [batch, B, T + B]
        mask = torch.ones_like(ahead, dtype=torch.bool)
        if visible is not None:
            mask[:, :, : visible.shape[1]] &= visible[:, None, :]
        if sliding:
            mask &= ahead.abs() < c.sliding_window  # where not causal, the window bounds both sides
        if causal:
            mask &= ahead <= 0
        return mask[:, None]

    def marginals(self, hidden: Tensor, target: Target) -> Tensor:
        """Hidden states [..., D] of slots 1 ... L -> log q_1 ... log q_L  [..., V], fp32."""
        logits = target.lm_head(hidden).float() * self.config.output_multiplier
        if cap := self.config.final_logit_softcapping:  # 0 means none
            logits = cap * torch.tanh(logits / cap)
        return logits.log_softmax(dim=-1)

    @torch.inference_mode()
    def draft(self, context: Context) -> Tensor:
        """One draft pass: the context's new features are cached, then the block is read. Returns log q [L, V], fp32."""
        new, c = context.fresh, self.config
        start = context.memory.get("length", 0)
        length = start + len(new)
        stream = torch.arange(length + c.block_size, device=new.device)[None]
        cached, grown = context.memory.get("keys_values", [None] * len(self.layers)), []

        # slot 0 is the committed token r and predicts nothing; slot k predicts the token k places after it
        block = torch.tensor([context.root] + [c.mask_token_id] * (c.block_size - 1), device=new.device)
        x = context.target.embed(block).to(self.fc.weight.dtype)[None] * c.input_embedding_scale  # [1, B, D]
        fused = self.fuse(new[None])  # [1, n, D]
        cos, sin = rotary(stream[:, start:], c.head_dim, c.rope_theta)
        own = cos[:, :, len(new) :], sin[:, :, len(new) :]
        for i, layer in enumerate(self.layers):  # `context` and `forward` in one: new tokens and block share each product
            normed = layer.input_layernorm(x)
            keys, values = grow(cached[i], layer.self_attn.keys_values(torch.cat([fused, normed], dim=1), cos, sin))
            grown.append((keys[:, :, :length], values[:, :, :length]))  # of the block nothing stays
            mask = self._mask(i, stream[:, length:], stream[:, :length])
            x = layer.finish(x, layer.self_attn.attend(normed, (keys, values), *own, mask))
        context.memory.update(length=length, keys_values=grown)
        return self.marginals(self.norm(x)[0, 1 : 1 + context.left], context.target)

    def propose(self, context: Context) -> CandidateTree:
        """Draft a block, grow the tree: the drafter that `decode` calls once a round."""
        log_q = self.draft(context)
        context.clock.lap("draft")
        return grow_tree(log_q, context.root, context.budget, context.branch)

    # ---- checkpoints ----

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors` in the DFlash format: embedding and lm_head stay the target's."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        dtype = str(self.fc.weight.dtype).removeprefix("torch.")
        config = {**self.config.to_dict(), "architectures": [self.ARCHITECTURE], "dtype": dtype}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file({name: t.contiguous() for name, t in self.state_dict().items()}, folder / "model.safetensors", {"format": "pt"})

    @classmethod
    def from_pretrained(cls, name: str | Path, dtype: torch.dtype | str = "float32", device: str = "cpu") -> BlockDraftHead:
        """Load a head from a folder or a hub id.

        Raises FileNotFoundError if there is no such head, ValueError naming every missing, unexpected or mis-shaped tensor.
        """
        folder = find_checkpoint(name)
        head = cls(HeadConfig.from_dict(json.loads((folder / "config.json").read_text()), cls.ARCHITECTURE))
        tensors = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors.update(load_file(file))
        expected = head.state_dict()
        faults = [f"missing {n}" for n in expected if n not in tensors] + [f"unexpected {n}" for n in tensors if n not in expected]
        faults += [f"{n} has shape {list(tensors[n].shape)}, the config says {list(t.shape)}"
                   for n, t in expected.items() if n in tensors and tensors[n].shape != t.shape]  # fmt: skip
        if faults:
            raise ValueError(f"draft head {name}: " + "; ".join(faults))
        head.load_state_dict(tensors)
        return head.to(device=device, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype).eval()

    def check(self, target: Target) -> None:
        """Raise ValueError with both numbers if this head cannot belong to that target."""
        (rows, width), words = target.embedding_weight.shape, target.model.get_output_embeddings().weight.shape[0]
        c, layers = self.config, target.num_layers
        for what, head_says, target_says in (
            ("hidden size", c.hidden_size, width), ("vocabulary", c.vocab_size, words), ("target layers", c.num_target_layers, layers),
        ):  # fmt: skip
            if head_says != target_says:
                raise ValueError(f"draft head was built for {what} {head_says}, this target has {target_says}")
        if self.fc.weight.device != target.device:
            raise ValueError(f"draft head is on {self.fc.weight.device}, this target on {target.device}: move it with head.to(...)")
        if not 0 <= c.mask_token_id < rows:
            raise ValueError(f"mask token {c.mask_token_id} lies outside the target's embedding table of {rows} rows")
        if not all(0 <= tap < layers for tap in self.taps):
            raise ValueError(f"taps {self.taps} reach outside the target's {layers} layers")


def find_checkpoint(name: str | Path) -> Path:
    """A local folder as it is; anything else is fetched from the hub (config and safetensors only: no code, no pickles)."""
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").exists() or not list(folder.glob("*.safetensors")):
            raise FileNotFoundError(f"{folder} holds no config.json with a *.safetensors beside it")
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name), allow_patterns=["config.json", "*.safetensors"]))
    except Exception as error:
        raise FileNotFoundError(f"no folder and no reachable hub repository is called {str(name)!r} ({type(error).__name__})") from error


# =====================================================================================================================
# 2  tree: marginals -> the N most probable prefixes
# =====================================================================================================================


@dataclass
class CandidateTree:
    """A tree of drafted tokens. Node 0 is the committed token r; parents stand before their children.

    tokens[i], parents[i] (-1 for node 0), depths[i] (0 for node 0) and log_probs[i], the drafter's log-probability of
    the whole path from r to node i. `len(tree)` counts the drafted nodes, so a tree of length 0 is plain autoregression.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    log_probs: list[float]

    @classmethod
    def empty(cls, root: int) -> CandidateTree:
        return cls([root], [-1], [0], [0.0])

    def add(self, parent: int, token: int, log_prob: float) -> int:
        """Append a child of `parent`; returns its node number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.log_probs.append(log_prob)
        return len(self.tokens) - 1

    def __len__(self) -> int:
        return len(self.tokens) - 1

    def check(self, root: int, words: int) -> None:
        """Raise ValueError, naming the node, for what cannot be verified as a tree of r = `root` over `words` token ids."""
        if self.tokens[0] != root:
            raise ValueError(f"the drafted tree starts at token {self.tokens[0]!r}, the committed one is {root}")
        for i, (token, parent, depth) in enumerate(zip(self.tokens, self.parents, self.depths)):
            if i and not (type(token) is int and 0 <= token < words and 0 <= parent < i and depth == self.depths[parent] + 1):
                raise ValueError(f"node {i} of the drafted tree has token {token!r}, parent {parent}, depth {depth}: a token is an int "
                                 f"below {words}, a parent stands before its child and one step higher")  # fmt: skip

    def children(self) -> dict[tuple[int, int], int]:
        """(parent, token) -> node: the only question that the accept walk asks."""
        return {(parent, token): i for i, (parent, token) in enumerate(zip(self.parents, self.tokens)) if i}


def best_words(log_q: Tensor, branch: int) -> list[list[tuple[float, int]]]:
    """For each offset of log_q [L, V] its `branch` best words as (-log q, id), best first; words of probability 0 left out.

    Of equally likely words the lowest ids come first, also at the cut: topk alone promises no order among equals.
    """
    values, words = log_q.topk(min(branch, log_q.shape[1]), dim=-1)
    kth = values[:, -1:]
    if int((log_q >= kth).sum()) == values.numel():  # the usual case: nobody outside equals the last one in
        return [sorted((-v, w) for v, w in zip(*row) if v > -math.inf) for row in zip(values.tolist(), words.tolist())]
    offsets, words = ((log_q >= kth) & (log_q > -math.inf)).nonzero(as_tuple=True)  # by offset, then by id
    costs = -log_q[offsets, words]
    order = costs.argsort(stable=True)
    order = order[offsets[order].argsort(stable=True)]  # by offset, then by cost, then by id
    rank = torch.arange(len(order), device=order.device) - torch.searchsorted(offsets, offsets)  # minus where its offset's run begins
    order = order[rank < branch]  # a flat row has V equals: they are cut here, not in Python
    ranked: list[list] = [[] for _ in log_q]
    for offset, cost, word in zip(offsets[order].tolist(), costs[order].tolist(), words[order].tolist()):
        ranked[offset].append((cost, word))
    return ranked


def grow_tree(log_q: Tensor, root: int, budget: int, branch: int = 8) -> CandidateTree:
    """The `budget` most probable prefixes under the product of marginals (paper section 3; best-first, as in DDTree).

        log q(t_1 ... t_d) = sum_k log q_k(t_k)

    A child is never more probable than its parent, and siblings come in falling order. So it is enough to keep, for every
    node already taken, two candidates on a heap: its best child and its next sibling. At most 2 N + 1 pushes.

    Args:
        log_q: [L, V] log-probabilities, one row per offset. A row with NaN yields the empty tree.
        root: the committed token r, node 0 of the tree.
        budget: N, the number of drafted nodes wanted; fewer come back if fewer exist. Words of probability 0 are never drafted.
        branch: at most this many words are tried per offset, the lowest ids first where words are equally likely.
    Raises: ValueError for a negative budget or a branch below 1.
    """
    if budget < 0 or branch < 1:
        raise ValueError(f"budget must be at least 0 and branch at least 1, got budget={budget}, branch={branch}")
    tree = CandidateTree.empty(root)
    if budget == 0 or len(log_q) == 0:
        return tree
    if bool(torch.isnan(log_q).any()):
        return tree
    ranked = best_words(log_q, branch)

    # A heap entry is (-log q of the path, tie-break by age, parent, rank of its token at that offset).
    heap, pushes = [(ranked[0][0][0], 0, 0, 0)] if ranked[0] else [], 1
    while heap and len(tree) < budget:
        cost, _, parent, rank = heapq.heappop(heap)
        offset = tree.depths[parent]
        node = tree.add(parent, ranked[offset][rank][1], -cost)
        if rank + 1 < len(ranked[offset]):  # next sibling: same parent, next token
            heapq.heappush(heap, (-tree.log_probs[parent] + ranked[offset][rank + 1][0], pushes, parent, rank + 1))
            pushes += 1
        if offset + 1 < len(ranked) and ranked[offset + 1]:  # best child
            heapq.heappush(heap, (cost + ranked[offset + 1][0][0], pushes, node, 0))
            pushes += 1
    return tree


# =====================================================================================================================
# 3  mask: who sees whom
# =====================================================================================================================


def ancestor_mask(parents: list[int]) -> Tensor:
    """[N + 1, N + 1] bool, True where node (row) sees node (column): its ancestors and itself, nothing else.

    All nodes climb one step at a time together: after d steps, node i stands at its d-th ancestor. Node 0 climbs to itself.
    """
    nodes = torch.arange(len(parents))
    up = torch.tensor(parents).clamp(min=0)
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    seen = nodes
    while True:
        mask[nodes, seen] = True
        if not bool(seen.any()):  # everyone has reached node 0
            return mask
        seen = up[seen]


# =====================================================================================================================
# 4  target: the one place that touches a transformers model
# =====================================================================================================================


@dataclass
class Sequence:
    """What one generation knows about the target's state. It lives here and never on the model, so that two
    generations on one model can interleave."""

    cache: object  # transformers DynamicCache, T rows per layer
    length: int  # T
    clean: int  # of these the first so many were read as the library reads: with the prompt, or one token a pass (for section 6's gate)
    root_position: Tensor  # position ids of the token after the cache, [..., 1]: [1, 1], or [3 or 4, 1, 1] for M-RoPE
    layers: list  # the cache's layers that held T rows after the prompt; a cross-attention layer holds the image instead
    extras: dict  # per-token inputs the model wants besides ids and positions, as it prepared them for one token


class Target:
    """A frozen transformers model, read through five verbs: embed, lm_head, prefill, verify, commit.

    Nothing here knows one model family from another: positions and extra inputs come from the model's own
    `prepare_inputs_for_generation`, masks from the layer types and window that its config declares.
    """

    ROLLBACK = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}  # cache layers that are rows of keys and values
    # More difference than this between a one-token and an N-token pass, in units of the logits' spread, is a fault and no rounding. On
    # the random models of tests/test_families.py rounding reaches 1.3e-5 and 0.06; the smallest fault there is 0.56.
    ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.18}

    def __init__(self, model, processor=None):
        """Raises ValueError, before any work, for a model whose state cannot be rolled back to an accepted path."""
        from transformers import DynamicCache

        self.model, self.processor = model.eval(), processor
        self.config = model.config.get_text_config()
        name = type(model).__name__
        if model.config.is_encoder_decoder:
            raise ValueError(f"{name} is an encoder-decoder: its decoder cannot be verified through this path")
        if "position_ids" not in inspect.signature(model.forward).parameters:
            raise ValueError(f"{name}.forward takes no position_ids: siblings of a tree could not share a position")
        foreign = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers} - self.ROLLBACK
        if foreign:
            raise ValueError(f"{name} keeps state in {', '.join(sorted(foreign))}, which cannot be rolled back to an accepted path")
        if model.config._attn_implementation not in ("eager", "sdpa"):
            raise ValueError(f"attention {model.config._attn_implementation!r} cannot take a tree mask: load with 'sdpa' or 'eager'")
        self.num_layers = self.config.num_hidden_layers
        # without layer types one window (or chunk) holds for all layers: what the library's own cache reads from the config
        sliding, chunked = (getattr(self.config, name, None) for name in ("sliding_window", "attention_chunk_size"))
        only = "sliding_attention" if sliding else "chunked_attention" if chunked else "full_attention"
        self.layer_types = set(getattr(self.config, "layer_types", None) or [only])
        self.device, self.dtype = model.device, model.dtype
        self.limits = self._limits()
        if len(self.layer_types) > 1 and not self._takes_masks_by_type():
            self.limits["one mask serves all layers, so the window must not bite"] = self.config.sliding_window
            self.layer_types = {"full_attention"}
        self._self_check()

    @torch.inference_mode()
    def _takes_masks_by_type(self) -> bool:
        """Does forward take {layer type: mask}, or hand the dict to a function that wants a tensor (PaliGemma-2)?"""
        masks = dict.fromkeys(self.layer_types, torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device))
        try:
            self.model(input_ids=torch.tensor([[1]], device=self.device), attention_mask=masks, use_cache=False)
        except (AttributeError, TypeError):
            return False
        return True

    def _limits(self) -> dict[str, int]:
        """{reason: tokens} beyond which a row depends on what else is in its pass, so that a tree is not exact. Mostly empty."""
        c, limits = self.config, {}
        ropes = getattr(c, "rope_parameters", None) or {}
        for rope in [ropes] if "rope_type" in ropes else filter(None, ropes.values()):  # one for all, or one for each layer type
            if rope["rope_type"] in ("dynamic", "longrope"):
                most = rope.get("original_max_position_embeddings") or c.max_position_embeddings
                limits["rotary frequencies follow the longest position of a pass"] = most
        if getattr(c, "attn_temperature_tuning", False):
            limits["attention is scaled by a token's row, not by its position"] = c.floor_scale - 1
        return limits

    def _self_check(self) -> None:
        """What no rule foresees (attention that takes no mask or counts rows, own positions, no cache) is refused here, by name."""
        name = type(self.model).__name__
        try:
            error = self.tree_error()
        except Exception as fault:
            raise ValueError(f"{name} cannot be verified as a tree: {type(fault).__name__}: {fault}") from fault
        if not error < self.rounding:
            raise ValueError(f"{name} is not exact in a tree pass: its logits differ by {error:.2g} times their spread")

    @property
    def rounding(self) -> float:
        return self.ROUNDING.get(self.dtype, self.ROUNDING[torch.bfloat16])

    def library_generate(self, inputs: dict, streamer=None, **settings):
        """The library's own greedy generate with these settings and no others: the oracle. What a config leaves open the library
        fills from the model's (a repetition penalty, beams), so that one is set aside for the call."""
        from transformers import GenerationConfig

        own, self.model.generation_config = self.model.generation_config, GenerationConfig()
        try:
            return self.model.generate(**inputs, generation_config=GenerationConfig(do_sample=False, **settings), streamer=streamer)
        finally:
            self.model.generation_config = own

    @torch.inference_mode()
    def tree_error(self) -> float:
        """A small tree, its second branch committed, one more token, against the library's own generate: the largest difference of a
        logit, in units of their spread."""
        ids = torch.arange(1, 6, device=self.device)[None]
        prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        options = dict(pad_token_id=0, output_logits=True, return_dict_in_generate=True)
        own = self.library_generate(prompt, max_new_tokens=5, **options)  # no end id: five tokens, whatever they are
        root, second, third, fourth, _ = own.sequences[0, 5:].tolist()
        lie = (second + 1) % own.logits[0].shape[-1]
        tree = CandidateTree([root, lie, second, third], [-1, 0, 0, 2], [0, 1, 1, 2], [0.0] * 4)
        sequence, first, _ = self.prefill(prompt)
        logits, _ = self.verify(sequence, tree)
        self.commit(sequence, tree, [2, 3])
        last, _ = self.verify(sequence, CandidateTree.empty(fourth))
        own, ours = torch.cat(own.logits).float(), torch.cat([first[None], logits[[0, 2, 3]], last]).float()
        return float((ours - own).abs().max() / own.std())

    @classmethod
    def load(cls, name: str | Path, dtype: str | torch.dtype = "float32", device: str = "cpu") -> Target:
        """Load a model and its processor from a folder or a hub id (no remote code, safetensors only)."""
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

        config = AutoConfig.from_pretrained(name)
        auto = AutoModelForImageTextToText if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else AutoModelForCausalLM
        model = auto.from_pretrained(name, dtype=dtype, use_safetensors=True)
        return cls(model.to(device), load_processor(name))

    # ---- what the draft head borrows ----

    @property
    def embedding_weight(self) -> Tensor:
        return self.model.get_input_embeddings().weight  # [V, D]

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of the raw table, without the scale that some targets apply in their own embedding layer."""
        return F.embedding(ids, self.embedding_weight)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """[S, D] -> [S, V], without the target's own soft-cap."""
        head = self.model.get_output_embeddings()
        return F.linear(hidden.to(head.weight.dtype), head.weight, head.bias)

    # ---- prompt ----

    def encode(self, prompt: str, images=None) -> dict:
        """A user turn with images (PIL), one or several -> the model's input tensors, through the processor's own chat template.

        Raises ValueError for images where the processor is a tokenizer, and without any processor.
        """
        images = [] if images is None else list(images) if isinstance(images, (list, tuple)) else [images]
        if self.processor is None:
            raise ValueError("this target was made without a processor: Target(model, processor), or Target.load(folder)")
        content = [{"type": "image", "image": image} for image in images] + [{"type": "text", "text": prompt}]
        if not hasattr(self.processor, "tokenizer"):  # a tokenizer: its template wants the turn as plain text
            if images:
                raise ValueError("this target's processor is a tokenizer: it takes no images")
            content = prompt
        options = dict(add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")
        inputs = self.processor.apply_chat_template([{"role": "user", "content": content}], **options)
        return {n: v.to(self.device, self.dtype if v.is_floating_point() else v.dtype) for n, v in inputs.items()}  # pixels in bf16 too

    @torch.inference_mode()
    def prefill(self, inputs: dict, taps: list[int] = ()) -> tuple[Sequence, Tensor, Tensor | None]:
        """Run the prompt. Returns (sequence, logits [V] after its last token, features [T, taps * D]).

        The model makes its own masks and positions here (an image block may be bidirectional, an image may take many tokens
        but few positions). Then it is asked how it would continue with one token: the answer carries every shift.
        Raises ValueError for a batch of more than one prompt, or a padded one.
        """
        from transformers import DynamicCache

        ids = inputs["input_ids"]
        if ids.shape[0] != 1:
            raise ValueError(f"one prompt at a time: input_ids has batch size {ids.shape[0]}, the method here is for batch 1")
        if "attention_mask" in inputs and not bool(inputs["attention_mask"].all()):
            raise ValueError("the prompt holds padding: its attention_mask has zeros; pass one prompt without padding")
        kwargs = {name: value for name, value in inputs.items() if name != "input_ids"}
        kwargs["position_ids"] = self.model._prepare_position_ids_for_generation(ids, {**kwargs, "input_ids": ids})
        if self.model._supports_logits_to_keep():
            kwargs["logits_to_keep"] = 1
        kwargs |= {"cache": DynamicCache(), "use_cache": True}  # no config: every layer keeps every row, windows live in masks
        step = self.model.prepare_inputs_for_generation(ids, is_first_iteration=True, **kwargs)
        out = self.model(**step, output_hidden_states=bool(taps), return_dict=True)

        kwargs = self.model._update_model_kwargs_for_generation(out, kwargs, is_encoder_decoder=False)
        after = torch.cat([ids, ids[:, -1:]], dim=1)  # any token would do: its word is not read, only its place
        step = self.model.prepare_inputs_for_generation(after, next_sequence_length=1, **kwargs)
        known = ("input_ids", "inputs_embeds", "position_ids", "attention_mask", "cache")
        extras = {n: v for n, v in step.items() if n not in known and isinstance(v, Tensor) and v.dim() > 1 and v.shape[1] == 1}
        layers = [layer for layer in kwargs["cache"].layers if layer.is_initialized and layer.keys.shape[-2] == ids.shape[1]]
        sequence = Sequence(kwargs["cache"], ids.shape[1], ids.shape[1], step["position_ids"], layers, extras)
        return sequence, out.logits[0, -1], self._features(out, taps)

    def _features(self, out, taps: list[int]) -> Tensor | None:
        """Hidden states of the kept layers side by side, [S, taps * D]. hidden_states[0] is the embedding output."""
        if not taps:
            return None
        states, layers = out.hidden_states, out.cache.layers  # states[n]: after the n-th layer that ran
        if len(states) <= self.num_layers:  # cross attention is skipped without an image: such a layer hands on what it was given
            ran = [i < len(layers) and layers[i].is_initialized for i in range(self.num_layers)]
            states = [states[n] for n in accumulate(ran, initial=0)]
        return torch.cat([states[tap + 1].flatten(0, -3)[0] for tap in taps], dim=-1)  # of several streams [n, 1, S, D], the first

    # ---- one round ----

    def _mask(self, sequence: Sequence, tree: CandidateTree, kind: str) -> Tensor:
        """Additive [1, 1, N + 1, T + N + 1]: the whole prefix and one's ancestors; for windowed layers only what is near
        *along the path* (prefix length + depth), wherever the node happens to be packed."""
        prefix = torch.ones(len(tree) + 1, sequence.length, dtype=torch.bool)
        visible = torch.cat([prefix, ancestor_mask(tree.parents)], dim=1)
        if kind != "full_attention":
            query = sequence.length + torch.tensor(tree.depths)
            key = torch.cat([torch.arange(sequence.length), query])
            if kind == "chunked_attention":
                chunk = self.config.attention_chunk_size
                visible &= query[:, None] // chunk == key[None, :] // chunk
            else:
                visible &= query[:, None] - key[None, :] < self.config.sliding_window
        blocked = torch.zeros(visible.shape, dtype=self.dtype).masked_fill_(~visible, torch.finfo(self.dtype).min)
        return blocked[None, None].to(self.device)

    @torch.inference_mode()
    def verify(self, sequence: Sequence, tree: CandidateTree, taps: list[int] = ()) -> tuple[Tensor, Tensor | None]:
        """One target pass over r and the N nodes (paper section 3).

        Node i sits at the position of r plus its depth. The cache grows by N + 1 rows, which `commit` gathers.
        Returns (logits [N + 1, V], features [N + 1, taps * D]).
        """
        rows = len(tree) + 1
        for reason, most in self.limits.items():
            if sequence.length + rows > most:
                raise ValueError(f"{type(self.model).__name__} cannot be verified beyond {most} tokens: {reason}")
        if rows == 1:  # a token alone: the model makes its own mask, so that this pass is the library's to the last bit
            mask = torch.ones(1, sequence.length + 1, dtype=torch.long, device=self.device)
        else:
            masks = {kind: self._mask(sequence, tree, kind) for kind in self.layer_types}
            mask = masks if len(masks) > 1 else masks.popitem()[1]
        depths = torch.tensor(tree.depths, device=self.device)
        extras = {name: value.repeat_interleave(rows, dim=1) for name, value in sequence.extras.items()}
        out = self.model(
            input_ids=torch.tensor([tree.tokens], device=self.device), attention_mask=mask, cache=sequence.cache, use_cache=True,
            position_ids=sequence.root_position + depths, output_hidden_states=bool(taps), return_dict=True, **extras,
        )  # fmt: skip
        return out.logits[0], self._features(out, taps)

    def teacher_force(self, inputs: dict, answer: list[int], taps: list[int] = ()) -> tuple[Tensor, Tensor | None]:
        """Read a known answer in one pass, as a tree without branches. Training and entropies are measured with this.

        Returns (logits [A, V], row i the law of answer[i] given all before it; features [T + A, taps * D] of prompt and answer).
        Raises ValueError for an empty answer.
        """
        if not answer:
            raise ValueError("there is no answer to read: its list of tokens is empty")
        sequence, first, features = self.prefill(inputs, taps)
        chain = CandidateTree.empty(answer[0])
        for token in answer[1:]:
            chain.add(len(chain), token, 0.0)
        logits, more = self.verify(sequence, chain, taps)
        return torch.cat([first[None], logits[:-1]]), torch.cat([features, more]) if taps else None

    @torch.inference_mode()
    def commit(self, sequence: Sequence, tree: CandidateTree, path: list[int]) -> None:
        """Keep r and the accepted path in the cache; forget every other node."""
        if len(tree) == 0 and sequence.clean == sequence.length:  # a token alone, over rows that are clean: so is its own
            sequence.clean += 1
        self._keep(sequence, len(tree) + 1, [0, *path])

    def _keep(self, sequence: Sequence, rows: int, kept: list[int]) -> None:
        """Of the `rows` newest rows of the cache keep these. They are moved up, then the rest is cut off."""
        start = sequence.length
        in_place = kept == list(range(len(kept)))  # the path was drafted first, so nothing has to move
        index = torch.tensor(kept, device=self.device) + start
        for layer in sequence.layers:
            if layer.keys.shape[-2] != start + rows:
                continue  # cross attention to an image just as long as the prompt: it did not grow
            for name in ("keys", "values"):
                states = getattr(layer, name)
                if not in_place:
                    states[:, :, start : start + len(kept)] = states[:, :, index]
                setattr(layer, name, states[:, :, : start + len(kept)])
        sequence.length += len(kept)
        sequence.root_position = sequence.root_position + len(kept)

    @torch.inference_mode()
    def reread(self, sequence: Sequence, tree: CandidateTree, path: list[int], text: list[int], logits: Tensor,
               features: Tensor | None, taps: list[int]) -> int:  # fmt: skip
        """Commit r and the path as the library would have read them: all rows left by tree passes are read again, a token a pass.

        text: prompt and committed tokens, r the last. `logits` and `features` are changed in the row of the path's last node.
        Returns the number of passes: no token of an answer is read again twice.
        """
        last, back = [0, *path][-1], sequence.length - sequence.clean
        sequence.length, sequence.root_position = sequence.clean, sequence.root_position - back
        self._keep(sequence, back + len(tree) + 1, [])
        tokens = text[sequence.clean :] + [tree.tokens[node] for node in path]
        for token in tokens:
            alone = CandidateTree.empty(token)
            again, more = self.verify(sequence, alone, taps)
            self.commit(sequence, alone, [])
        logits[last] = again[0]
        if taps:
            features[last] = more[0]
        return len(tokens)


def load_processor(name: str | Path):
    """The target's own processor; without its video half where that alone cannot load (it needs torchvision).

    Both are the model's own class, so ids, pixels and token types are the same by construction: a processor class names its
    parts in `get_attributes`, and a part left out is neither loaded nor asked for. Text-only targets get their tokenizer.
    """
    from transformers import AutoConfig, AutoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    try:
        return AutoProcessor.from_pretrained(name)
    except ImportError:
        full = PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(name))]

    class WithoutVideo(full):
        @classmethod
        def get_attributes(cls):
            return [part for part in full.get_attributes() if part != "video_processor"]

    return WithoutVideo.from_pretrained(name)  # whatever else is missing raises again, by name


# =====================================================================================================================
# 5  accept: walk the tree along the target's own choice
# =====================================================================================================================


def walk(tree: CandidateTree, choose) -> tuple[list[int], int]:
    """From node 0, ask the target for its token (`choose(node) -> id`) and follow the child that equals it, until none does.

    Returns (path of accepted nodes, bonus token). The bonus is the target's own choice after the last accepted node: it was
    already drawn to find that no child equals it, and it must be kept, not drawn again.
    """
    children, node, path = tree.children(), 0, []
    while True:
        token = choose(node)
        if (node, token) not in children:
            return path, token
        node = children[node, token]
        path.append(node)


def accept_greedy(tree: CandidateTree, logits: Tensor) -> tuple[list[int], int]:
    """Temperature 0: the target's choice after node i is the argmax of logits[i] ([N + 1, V]). Returns (path, bonus)."""
    best = logits.argmax(dim=-1).tolist()
    return walk(tree, best.__getitem__)


def accept_sampled(tree: CandidateTree, probs: Tensor, generator: torch.Generator) -> tuple[list[int], int]:
    """Temperature > 0: the choice after node i is one draw from the target's law probs[i] ([N + 1, V]).

    Every committed token is a draw from the target's own conditional, made before looking at which children exist. So the
    output law is the target's whatever the tree is; a better tree only makes it arrive sooner. Exactly one draw is made per
    committed token, so one seed gives one text with every drafter. Returns (path, bonus).
    """
    return walk(tree, lambda node: int(torch.multinomial(probs[node], 1, generator=generator)))


def sampling_law(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """The law that is sampled: logits [S, V] -> probabilities [S, V] in fp64, through the library's own warpers."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = TemperatureLogitsWarper(float(temperature))(None, logits.double())
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.softmax(dim=-1)


# =====================================================================================================================
# 6  decode: draft -> grow -> verify -> accept -> commit
# =====================================================================================================================


class Clock:
    """Seconds by stage. A GPU works behind Python's back, so each lap waits for it first."""

    def __init__(self, device):
        self.cuda = torch.device(device).type == "cuda"
        self.restart()

    def restart(self) -> dict[str, float]:
        """Begin anew; returns the seconds since the last restart."""
        before = getattr(self, "seconds", {})
        self.seconds, self.last = {"draft": 0.0, "tree": 0.0, "verify": 0.0, "commit": 0.0}, self._now()
        return before

    def _now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def lap(self, stage: str) -> None:
        now = self._now()
        self.seconds[stage] += now - self.last
        self.last = now


@dataclass
class Context:
    """What a drafter may read when it is asked for a tree."""

    target: Target
    tokens: list[int]  # prompt and committed tokens; the last one is r
    fresh: Tensor | None  # features of the tokens cached since the last call, [n, taps * D] (None without taps)
    budget: int
    branch: int
    left: int  # tokens still wanted: drafting deeper would be wasted
    clock: Clock
    memory: dict = field(default_factory=dict)  # the drafter's own notes on this sequence (its cached context)
    last: Round | None = None  # what came of the round before
    ends: frozenset[int] = frozenset()  # end tokens: nothing below one is ever committed

    @property
    def root(self) -> int:
        return self.tokens[-1]


class NoDraft:
    """Plain autoregression: the empty tree, one token per target pass."""

    taps: list[int] = []

    def propose(self, context: Context) -> CandidateTree:
        return CandidateTree.empty(context.root)


@dataclass
class Round:
    """One target pass (with the gate, several) and what came of it. Round 0 is the prefill: it commits one token and drafts nothing."""

    tokens: list[int]  # committed, after truncation at an end token or the limit
    tree: CandidateTree
    path: list[int]  # accepted nodes, before truncation
    entropy: float  # H: entropy of the target's law right after r, in nats, at temperature 1
    margins: list[float]  # the target's best logit minus its second best, at every committed token
    logits: Tensor | None  # [len(tokens), V], fp32: where each token was decided (kept if asked for)
    seconds: dict = field(default_factory=dict)  # by stage: draft, tree, verify, commit
    cap: int = 0  # the most drafts this round could have had accepted: min(L, N, tokens left, where the gate stopped); set by `generate`
    passes: int = 1  # target passes: more where a near-tie was handed to one-token passes

    @property
    def accepted(self) -> int:
        """a: drafts kept in this round."""
        return min(len(self.path), len(self.tokens))


@dataclass
class Generation:
    """All rounds of one answer. tau = tokens committed by rounds / their target passes: 1 for autoregression, nan without a round."""

    rounds: list[Round]  # rounds[0] is the prefill

    @property
    def tokens(self) -> list[int]:
        return [token for r in self.rounds for token in r.tokens]

    @property
    def tau(self) -> float:
        drafted = self.rounds[1:]
        return sum(len(r.tokens) for r in drafted) / sum(r.passes for r in drafted) if drafted else math.nan

    @property
    def decode_seconds(self) -> float:
        return sum(sum(r.seconds.values()) for r in self.rounds[1:])


def end_tokens(target: Target) -> list[int]:
    """The target's own end tokens: its generation config has one id, a list, or none at all."""
    ids = target.model.generation_config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def acceptor(temperature: float, top_k: int, top_p: float, generator: torch.Generator | None):
    """The accept rule for these options: (tree, logits [N + 1, V]) -> (path, bonus). Raises ValueError if they contradict."""
    if temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(f"out of range: temperature={temperature}, top_k={top_k}, top_p={top_p}")
    if temperature == 0:
        if top_k or top_p < 1:
            raise ValueError("top_k and top_p only mean something above temperature 0")
        return accept_greedy
    if generator is None:
        raise ValueError("sampling needs a torch.Generator: generator=torch.Generator(device).manual_seed(0)")
    return lambda tree, logits: accept_sampled(tree, sampling_law(logits, temperature, top_k, top_p), generator)


def settle(tree: CandidateTree, path: list[int], bonus: int, logits: Tensor, ends: frozenset[int], left: int) -> Round:
    """What a pass commits: the path and the bonus, cut at the first end token (it may sit inside the path) and at the limit."""
    tokens = ([tree.tokens[i] for i in path] + [bonus])[:left]
    stop = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    tokens = tokens[: stop + 1]
    decided = logits[[0, *path][: len(tokens)]].float()  # the rows at which these tokens were chosen
    best = decided.topk(2, dim=-1).values
    entropy = torch.special.entr(decided[0].softmax(dim=-1)).sum()  # H = - sum p log p
    return Round(tokens, tree, path, float(entropy), (best[:, 0] - best[:, 1]).tolist(), logits=decided)


def near_tie(path: list[int], logits: Tensor, tie_margin: float) -> int | None:
    """How many nodes of the path come before the first token whose two best logits lie no further apart than the margin; None if
    there is none."""
    best = logits[[0, *path]].float().topk(2, dim=-1).values
    return next((i for i, (first, second) in enumerate(best.tolist()) if first - second <= tie_margin), None)


def decode(target: Target, drafter, inputs: dict, *, max_new_tokens: int = 128, end_ids: list[int] | int | None = None,
           budget: int = 31, branch: int = 8, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0,
           generator: torch.Generator | None = None, tie_margin: float | None = None, keep_logits: bool = False):  # fmt: skip
    """An iterator of Round records; the first is the prefill's. Options are checked at the call, work begins with the first round.

    Args:
        drafter: anything with `taps` and `propose(context) -> CandidateTree`; None for plain autoregression.
        inputs: one prompt as `target.encode` makes it.
        max_new_tokens: at least 1, the prefill's token included. end_ids: one or several; None for the target's own.
        budget, branch: N and the tokens tried per offset. They change the speed, never the text.
        temperature: 0 is greedy. Above 0, `generator` is required and top_k / top_p apply to the target's law.
        tie_margin: for low precision, see `rounds`; None switches the gate off.
    Raises: ValueError for options out of range or in contradiction, for a head built for another target, and, with the first
        round, for a batch above 1 and for a padded prompt.
    """
    if max_new_tokens < 1 or budget < 0 or branch < 1:
        raise ValueError(f"out of range: max_new_tokens={max_new_tokens}, budget={budget}, branch={branch}")
    if tie_margin is not None and (tie_margin < 0 or temperature > 0):
        raise ValueError(f"tie_margin is 0 or more and for temperature 0 only, got tie_margin={tie_margin}, temperature={temperature}")
    accept = acceptor(temperature, top_k, top_p, generator)
    end_ids = end_ids.flatten().tolist() if isinstance(end_ids, Tensor) else end_ids
    ends = end_tokens(target) if end_ids is None else [end_ids] if isinstance(end_ids, int) else end_ids
    if not all(isinstance(end, int) for end in ends):
        raise ValueError(f"end_ids are token ids, got {end_ids!r}")
    drafter = drafter or NoDraft()
    if not all(0 <= tap < target.num_layers for tap in drafter.taps):
        raise ValueError(f"taps {list(drafter.taps)} reach outside the target's {target.num_layers} layers")
    if hasattr(head := getattr(drafter, "head", drafter), "check"):  # the spine and others carry a head
        head.check(target)
    return rounds(target, drafter, inputs, accept, frozenset(ends), max_new_tokens, budget, branch, tie_margin, keep_logits)


def rounds(target: Target, drafter, inputs: dict, accept, ends: frozenset[int], max_new_tokens: int, budget: int, branch: int,
           tie_margin: float | None, keep_logits: bool):  # fmt: skip
    """The loop behind `decode`.

    The gate: in bf16 a token's logits, keys and values differ in their last bits between a one-token and an N-token pass, and a
    near-tie can fall either way. With `tie_margin` the walk stops before such a token, and all that tree passes have read since the
    last such stop is read again one token a pass, as the library reads. So a gated token is the library's to the last bit (where
    the library's cache keeps every row), and any other is the library's if no logit moves by more than tie_margin / 2 between its
    pass and ours.
    """
    taps, clock = list(drafter.taps), Clock(target.device)

    # Round 0: the prefill is a pass over the empty tree
    sequence, logits, features = target.prefill(inputs, taps)
    prompt = inputs["input_ids"][0].tolist()
    tree, logits = CandidateTree.empty(prompt[-1]), logits[None]
    path, bonus = accept(tree, logits)
    clock.lap("verify")
    context, rereads = Context(target, prompt, features, budget, branch, max_new_tokens, clock, ends=ends), 0

    while True:
        done = settle(tree, path, bonus, logits, ends, context.left)
        done.passes += rereads
        context.tokens = context.tokens + done.tokens
        context.left -= len(done.tokens)
        clock.lap("commit")
        done.seconds, done.logits = clock.restart(), done.logits if keep_logits else None
        context.last = done
        yield done
        if done.tokens[-1] in ends or context.left == 0:
            return
        clock.restart()  # what the caller did between rounds is not our time

        tree = drafter.propose(context)  # one draft pass
        if tree is None:
            raise ValueError(f"{type(drafter).__name__}.propose returned nothing, it owes a CandidateTree")
        tree.check(context.root, logits.shape[-1])
        clock.lap("tree")
        logits, features = target.verify(sequence, tree, taps)  # one target pass
        path, bonus = accept(tree, logits)  # reads the result, so it waits for the pass and shares its time
        # a row is the library's own unless it comes from a tree pass, or stands on rows that do
        gated = tie_margin is not None and (len(tree) > 0 or sequence.clean < sequence.length)
        tie = near_tie(path, logits, tie_margin) if gated else None
        if tie is None:
            clock.lap("verify")
            target.commit(sequence, tree, path)
            rereads = 0
        else:
            path = path[:tie]
            rereads = target.reread(sequence, tree, path, context.tokens, logits, features, taps)
            bonus = int(logits[[0, *path][-1]].argmax())
            clock.lap("verify")
        context.fresh = features[[0, *path]] if taps else None


def generate(target: Target, drafter, inputs: dict, *, budget: int = 31, **options) -> Generation:
    """Collect `decode` into a Generation and set each round's cap. Options are those of `decode`."""
    generation = Generation(list(decode(target, drafter, inputs, budget=budget, **options)))
    block = getattr(getattr(drafter, "config", None), "block_size", None)
    left = 0
    for r in reversed(generation.rounds[1:]):
        left += len(r.tokens)
        most = len(r.tree) if hasattr(drafter, "grid") else budget  # AutoBudget chose N itself
        r.cap = min(min(block - 1, most) if block else max(r.tree.depths), left)  # N nodes reach N deep at most
        if r.passes > 1:  # where the gate stopped the walk, nobody knows what it would have met
            r.cap = min(r.cap, len(r.path))
    return generation


# =====================================================================================================================
# 7  law: accepted length from the target's entropy
# =====================================================================================================================
#
# Let every offset of a block survive with the same probability p, given the entropy H the target had when the round
# began:
#     logit p = b0 - b1 H          E[a | H] = p + p^2 + ... + p^L = p (1 - p^L) / (1 - p)
#
# b0 is how well the head drafts when the target is sure; b1 how fast that is lost per nat of doubt. A round near the end of
# an answer cannot accept more than what is left, so each round brings its own cap in the place of L.


def expected_accepted(entropy: Tensor, b0: float | Tensor, b1: float | Tensor, cap: int | Tensor = 15) -> Tensor:
    """E[a | H] of the entropy law (paper section 5), as the sum of powers: exact at p = 1, where it is the cap.

    entropy: [R] nats. cap: L, or one cap per round [R]. Returns fp64 [R].
    """
    entropy = torch.as_tensor(entropy, dtype=torch.float64)
    cap = torch.as_tensor(cap).expand(entropy.shape)
    p = torch.sigmoid(b0 - b1 * entropy)
    k = torch.arange(1, int(cap.max()) + 1 if cap.numel() else 1)
    return (p[..., None] ** k * (k <= cap[..., None])).sum(dim=-1)


@dataclass
class EntropyLaw:
    """A fitted law. `interval` is b1's 95 % interval; `identified` says whether it may be believed at all."""

    b0: float
    b1: float
    interval: tuple[float, float]
    rounds: int
    r2_deciles: float

    MINIMUM_ROUNDS = 300

    @property
    def identified(self) -> bool:
        low, high = self.interval
        return self.rounds >= self.MINIMUM_ROUNDS and not low <= 0 <= high

    def predict(self, entropy: Tensor, cap: int | Tensor = 15) -> Tensor:
        return expected_accepted(entropy, self.b0, self.b1, cap)

    def __str__(self) -> str:
        low, high = self.interval
        fit = f"b0 = {self.b0:.2f}, b1 = {self.b1:.2f} per nat (95 %: {low:.2f} to {high:.2f}), {self.rounds} rounds"
        return f"{fit}, R^2 on deciles {self.r2_deciles:.2f}" if self.identified else f"not identified: {fit}"


def fit_entropy_law(entropy: Tensor, accepted: Tensor, cap: int | Tensor = 15) -> EntropyLaw:
    """Least squares on rounds: minimise sum (a - E[a | H])^2 over b0, b1 (paper section 5).

    entropy, accepted: [R]; cap: L or [R]. The interval uses the sandwich covariance, since the spread of `a` changes with H; it
    is infinite where H or a never varies, or fewer than 30 rounds end between 0 and their cap.
    Raises ValueError for fewer than three rounds, unequal lengths or a value that is not finite.
    """
    h, a = torch.as_tensor(entropy, dtype=torch.float64), torch.as_tensor(accepted, dtype=torch.float64)
    shapes = [list(h.shape), list(a.shape), list(torch.as_tensor(cap).shape)]
    if shapes[0] != shapes[1] or shapes[2] not in ([], shapes[0]) or h.dim() != 1 or len(h) < 3:
        raise ValueError(f"the fit needs at least 3 rounds, as many entropies as lengths (and caps), got shapes {shapes}")
    if not bool((h.isfinite() & a.isfinite()).all()):
        raise ValueError("an entropy or an accepted length is not finite")
    b = torch.tensor([1.0, 0.5], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([b], max_iter=200, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        # a whisper of a prior keeps b finite where the data say nothing (all rounds at the cap, one value of H)
        value = ((a - expected_accepted(h, b[0], b[1], cap)) ** 2).mean() + 1e-6 * (b**2).sum()
        value.backward()
        return value

    optimizer.step(loss)
    b = b.detach()
    x = (b[0] - b[1] * h).requires_grad_()  # logit p of every round: one slope each, and the chain rule gives both parameters'
    predicted = expected_accepted(x, 0.0, -1.0, cap)  # [R]
    (slope,) = torch.autograd.grad(predicted.sum(), x)
    predicted, jacobian = predicted.detach(), torch.stack([slope, -h * slope], dim=-1)  # [R], [R, 2]
    bread = torch.linalg.pinv(jacobian.T @ jacobian)
    covariance = bread @ (jacobian.T * (a - predicted) ** 2) @ jacobian @ bread
    half = 1.96 * float(covariance[1, 1].clamp(min=0).sqrt())
    # Rounds at 0 or at their cap say only "less" or "more": with a handful in between, one odd round would decide b1.
    between = int(((a > 0) & (a < torch.as_tensor(cap))).sum())
    if between < 30 or bool((h == h[0]).all() or (a == a[0]).all()):
        half = math.inf
    interval = (float(b[1]) - half, float(b[1]) + half)
    return EntropyLaw(float(b[0]), float(b[1]), interval, len(h), r2_on_deciles(h, a, predicted))


def r2_on_deciles(entropy: Tensor, accepted: Tensor, predicted: Tensor, bins: int = 10) -> float:
    """R^2 of mean predicted against mean accepted over equal-count entropy bins: how the paper reads its law."""
    groups = torch.argsort(entropy, stable=True).tensor_split(min(bins, len(entropy)))
    actual = torch.stack([accepted[g].mean() for g in groups])
    fitted = torch.stack([predicted[g].mean() for g in groups])
    spread = ((actual - actual.mean()) ** 2).sum()
    return float(1 - ((actual - fitted) ** 2).sum() / spread) if spread > 0 else float("nan")


# =====================================================================================================================
# Not the method: what it is measured against, and help for reading it
# =====================================================================================================================
#
# 8  baselines: each only a propose()


class Spine:
    """The head's single best path, without branches (the paper's "width-1 chain"; not an autoregressive chain)."""

    def __init__(self, head: BlockDraftHead):
        self.head, self.config, self.taps = head, head.config, head.taps

    def propose(self, context: Context) -> CandidateTree:
        log_q = self.head.draft(context)
        context.clock.lap("draft")
        return grow_tree(log_q, context.root, min(context.budget, len(log_q)), branch=1)


class NGram:
    """Lookup without a head: what followed the last time the text ended like this? Copies off its own prompt and answer only."""

    taps: list[int] = []

    def __init__(self, longest: int = 4, depth: int = 15):
        self.longest, self.depth = longest, depth

    def propose(self, context: Context) -> CandidateTree:
        text, tree = context.tokens, CandidateTree.empty(context.root)
        for size in range(min(self.longest, len(text) - 1), 0, -1):  # the longest suffix that occurred before ...
            for at in range(len(text) - size - 1, -1, -1):  # ... and of its occurrences the latest
                if text[at : at + size] == text[-size:]:
                    for token in text[at + size :][: min(self.depth, context.budget, context.left)]:
                        tree.add(len(tree), token, 0.0)
                    return tree
        return tree


class Eagle3Head(BlockDraftHead):
    """An EAGLE-3 head: the same parts, wired to draft one token after the other (arXiv 2503.01840).

    One layer reads pairs, the feature of position t beside the embedding of the token after it, and names the token after that:

        q(token t + 2) = softmax(W_lm RMSNorm(o_t)),   o_t = layer([RMSNorm(e_(t+1)) ; RMSNorm(g_t)])

    g_t is W_fc [h_t^(l1); h_t^(l2); h_t^(l3)] where t is committed and the layer's own output o_(t-1) where it is drafted:
    nothing else is known there. So each further token costs a pass, and k tokens cost k. Training (train.py) unrolls the same steps.
    Context is cached in `context.memory`; of what was drafted nothing stays. `config.block_size` - 1 is the depth trained to.
    """

    ARCHITECTURE = "Eagle3DraftHead"

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        if config.num_hidden_layers != 1:
            raise ValueError(f"an EAGLE-3 head has one layer, the config says {config.num_hidden_layers}")
        attention = self.layers[0].self_attn
        for name in ("q_proj", "k_proj", "v_proj"):  # they read pairs, twice as wide
            narrow = getattr(attention, name)
            setattr(attention, name, nn.Linear(2 * config.hidden_size, narrow.out_features, bias=config.attention_bias))

    def remember(self, embeddings: Tensor, features: Tensor, positions: Tensor, past: tuple | None) -> tuple[Tensor, tuple]:
        """Embeddings e_(t+1), features g_t [batch, S, D] -> pairs [batch, S, 2 D], and the past's keys and values with theirs."""
        layer, rope = self.layers[0], rotary(positions, self.config.head_dim, self.config.rope_theta)
        pairs = torch.cat([layer.input_layernorm(embeddings), self.hidden_norm(features)], dim=-1)
        return pairs, grow(past, layer.self_attn.keys_values(pairs, *rope))

    def forward(self, pairs: Tensor, features: Tensor, positions: Tensor, past: tuple, mask: Tensor | None = None) -> Tensor:
        """One pass: o_t [batch, S, D] of pairs already in `past`. The law of what follows is marginals(norm(o_t))."""
        layer, rope = self.layers[0], rotary(positions, self.config.head_dim, self.config.rope_theta)
        x = features + layer.self_attn.attend(pairs, past, *rope, mask)
        return x + layer.mlp(layer.post_attention_layernorm(x))

    @torch.inference_mode()
    def draft(self, context: Context, depth: int, width: int) -> CandidateTree:
        """`depth` passes, each over the `width` best nodes of a level; then the N most probable of all nodes seen (EAGLE-2)."""
        new, dtype, start = context.fresh, self.fc.weight.dtype, context.memory.get("length", 0)
        table = lambda ids: context.target.embed(torch.tensor([ids], device=new.device)).to(dtype)  # noqa: E731  [1, S, D]
        context.memory["length"] = length = start + len(new)
        features, at = self.fc(new.to(dtype))[None], torch.arange(start, length, device=new.device)[None]
        pairs, past = self.remember(table(context.tokens[start + 1 : length + 1]), features, at, context.memory.get("past"))
        context.memory["past"] = past
        pairs, features, at, mask = pairs[:, -1:], features[:, -1:], at[:, -1:], None  # r's pair: the root of all that is drafted

        scores, level = torch.zeros(1, device=new.device), [0]  # of this level's nodes: log q of their paths, numbers in `seen`
        seen, above = CandidateTree.empty(context.root), torch.ones(1, length, dtype=torch.bool, device=new.device)
        depth = min(depth, context.budget, context.left)
        for more in reversed(range(depth)):
            features = self(pairs, features, at, past, mask)  # one draft pass  [1, M, D]
            best = self.marginals(self.norm(features[0]), context.target).topk(min(width, self.config.vocab_size))
            paths = (scores[:, None] + best.values).flatten()  # [M * width]
            if bool(paths.isnan().any()):
                return CandidateTree.empty(context.root)
            words, first, ways = best.indices.flatten().tolist(), len(seen) + 1, best.values.shape[1]
            for i, (token, score) in enumerate(zip(words, paths.tolist())):
                seen.add(level[i // ways], token, score)
            if not more:
                break
            scores, kept = paths.topk(min(width, len(paths)))
            parent, level = kept // ways, [first + i for i in kept.tolist()]
            features, at = features[:, parent], at[:, :1].expand(1, len(kept)) + 1
            pairs, past = self.remember(table([seen.tokens[node] for node in level]), features, at, past)
            above = torch.cat([above[parent], torch.eye(len(kept), dtype=torch.bool, device=new.device)], dim=1)  # and itself
            mask = above[None, None] if len(kept) > 1 else None
        context.clock.lap("draft")
        return best_nodes(seen, context.budget)

    def propose(self, context: Context) -> CandidateTree:
        return self.draft(context, self.config.block_size - 1, context.branch)


def best_nodes(seen: CandidateTree, budget: int) -> CandidateTree:
    """The `budget` most probable nodes, best first. A child is never likelier than its parent, so they are a tree again."""
    order = sorted((i for i in range(1, len(seen) + 1) if seen.log_probs[i] > -math.inf), key=lambda i: -seen.log_probs[i])
    tree, number = CandidateTree.empty(seen.tokens[0]), {0: 0}
    for i in order[:budget]:  # the sort keeps the order of equals: parents first
        number[i] = tree.add(number[seen.parents[i]], seen.tokens[i], seen.log_probs[i])
    return tree


class EagleTree:
    """The EAGLE-3 head's dynamic tree: `depth` passes, each over a level's best nodes; the N best of all are verified."""

    def __init__(self, head: Eagle3Head, depth: int = 8):
        self.head, self.taps, self.depth = head, head.taps, depth
        self.config = replace(head.config, block_size=depth + 1)  # `generate` reads the most that can be accepted from it

    def propose(self, context: Context) -> CandidateTree:
        return self.head.draft(context, self.depth, context.branch)


class EagleChain(EagleTree):
    """Its best token after its best token: `depth` passes for `depth` drafts."""

    def propose(self, context: Context) -> CandidateTree:
        return self.head.draft(context, self.depth, 1)


class AutoBudget:
    """budget="auto": any drafter, with N chosen anew each round from a small grid (the call's own budget is not used).

        N = argmax (1 + sum_{n <= N} c_n s_n) / (draft + verify(N)),     s_n = sum of exp(log q) over the nodes that n adds
                                                                        to the next smaller budget: accepted, as expected

    What a pass costs is measured: the first rounds try each N of the grid a few times; then verify(N) is the straight line
    through the medians. Medians, so that a hiccup counts once; a line, so that an N that was slow in its few trials, and is
    never tried again for that, is judged by its neighbours.
    c_n corrects the head's opinion of itself: accepted / expected of the nodes that n adds, both running sums. A round with N
    nodes tells it for every smaller budget too, as the best nodes come first. (One factor for the whole tree would hide that
    the last nodes keep less than they promise.) All of it is read off `context.last`; none of it can change the text.
    """

    def __init__(self, drafter, grid: tuple[int, ...] = (1, 3, 7, 15, 31, 63), trials: int = 3):
        if min(grid, default=0) < 1 or list(grid) != sorted(set(grid)):
            raise ValueError(f"the grid holds budgets of at least 1, smallest first, got {grid}")
        self.drafter, self.taps, self.config = drafter, drafter.taps, getattr(drafter, "config", None)
        self.head = getattr(drafter, "head", drafter)  # `decode` checks that it fits the target
        self.grid, self.trials, self.chosen = grid, trials, dict.fromkeys(grid, 0)
        self.draft, self.verify = deque(maxlen=31), {n: deque(maxlen=31) for n in grid}  # seconds
        self.expected, self.accepted = dict.fromkeys(grid, 1.0), dict.fromkeys(grid, 1.0)
        self.ends, self.size = frozenset(), grid[-1]

    @property
    def calibration(self) -> dict[int, float]:
        """c_n: 1 if the drafter's own probabilities are right. Where rounds are few, mostly that of all nodes together."""
        pooled = sum(self.accepted.values()) / sum(self.expected.values())
        return {n: (self.accepted[n] + 10 * pooled) / (self.expected[n] + 10) for n in self.grid}

    def gains(self, tree: CandidateTree) -> dict[int, float]:
        """s_n for every n of the grid that this tree fills. What stands below an end token is worth nothing."""
        alive, survive = [True], [0.0]
        for parent, log_q in zip(tree.parents[1:], tree.log_probs[1:]):
            alive.append(alive[parent] and not (parent and tree.tokens[parent] in self.ends))
            survive.append(survive[-1] + alive[-1] * math.exp(log_q))
        return {n: survive[n] - survive[m] for m, n in zip((0, *self.grid), self.grid) if n < len(survive)}

    def learn(self, last: Round) -> None:
        self.draft.append(sum(last.seconds.values()) - last.seconds["verify"])
        if len(last.tree) in self.verify:
            self.verify[len(last.tree)].append(last.seconds["verify"])
        counted = 0
        for n, gain in self.gains(last.tree).items():  # the last fifty rounds count most
            accepted = sum(node <= n for node in last.path)
            self.expected[n] = 0.98 * self.expected[n] + gain
            self.accepted[n] = 0.98 * self.accepted[n] + accepted - counted
            counted = accepted

    def choose(self, tree: CandidateTree) -> int:
        """The best N for this tree, whose nodes stand best first."""
        gains = self.gains(tree)
        sizes = list(gains)
        tries = min(sizes, key=lambda n: len(self.verify[n]), default=len(tree))
        if not sizes or len(self.verify[tries]) < self.trials:
            return tries
        c, draft = self.calibration, statistics.median(self.draft)
        kept = dict(zip(sizes, accumulate(c[n] * gain for n, gain in gains.items())))
        medians = {n: statistics.median(seconds) for n, seconds in self.verify.items() if seconds}
        slope, start = statistics.linear_regression(*zip(*medians.items())) if len(medians) > 1 else (0.0, *medians.values())
        best = max(sizes, key=lambda n: (1 + kept[n]) / (draft + start + slope * n))
        further = sum(self.chosen.values()) % 25 == 24  # one step: what is never tried again is never known better
        return sizes[min(sizes.index(best) + further, len(sizes) - 1)]

    def propose(self, context: Context) -> CandidateTree:
        self.ends = context.ends
        if context.last and len(context.last.tree):
            self.learn(context.last)
        known = all(len(seconds) >= self.trials for seconds in self.verify.values())
        wider = [n for n in self.grid if n > self.size and known]  # a step up a round, lest a tree is grown to be cut
        tree = self.drafter.propose(replace(context, budget=wider[0] if wider else self.grid[-1]))
        n = self.size = self.choose(tree)
        self.chosen[n] = self.chosen.get(n, 0) + 1
        return CandidateTree(*(values[: n + 1] for values in (tree.tokens, tree.parents, tree.depths, tree.log_probs)))


def toy_round() -> None:
    """One round by hand: three offsets, four words, a target that is a table. Prints every stage."""
    words = ["<mask>", "red", "blue", "box", "ball"]
    log_q = torch.tensor([[0.0, 0.6, 0.4, 0.0, 0.0], [0.0, 0.0, 0.0, 0.7, 0.3], [0.0, 0.5, 0.3, 0.1, 0.1]]).log()
    root = 4  # "ball"
    print("block      [r, MASK, MASK, MASK] =", [words[root]] + ["<mask>"] * 3)
    for k, row in enumerate(log_q.exp().tolist(), start=1):
        print(f"  q_{k}      ", "  ".join(f"{word} {q:.1f}" for word, q in zip(words, row) if q))
    tree = grow_tree(log_q, root, budget=6)
    print("\ntree       node  parent  depth  probability  token")
    for i in range(len(tree) + 1):
        indent = "  " * tree.depths[i] + words[tree.tokens[i]]
        print(f"           {i:4d}  {tree.parents[i]:6d}  {tree.depths[i]:5d}  {math.exp(tree.log_probs[i]):11.3f}  {indent}")
    print("\nmask       row sees column: itself and its ancestors")
    for i, row in enumerate(ancestor_mask(tree.parents)):
        print(f"           {i}  ", " ".join("x" if seen else "." for seen in row))
    says = {"ball": "blue", "red": "ball", "blue": "box", "box": "blue"}  # the toy target looks one word back
    logits = torch.stack([F.one_hot(torch.tensor(words.index(says[words[t]])), len(words)).float() for t in tree.tokens])
    path, bonus = accept_greedy(tree, logits)
    print("\naccept     target says:", ", ".join(f"after node {i} ({words[t]}) -> {says[words[t]]}" for i, t in enumerate(tree.tokens)))
    print("           path", " -> ".join(["0"] + [str(i) for i in path]), "=", [words[tree.tokens[i]] for i in path], "+ bonus", repr(words[bonus]))
    print(f"\nround      {len(path)} drafts accepted, {len(path) + 1} tokens from one target pass")


if __name__ == "__main__":
    toy_round()
