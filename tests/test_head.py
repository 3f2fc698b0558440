"""Section 1, head: the draft pass against a slow head written out by hand, its cache, its checkpoints, its checks."""

import json
import math

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from conftest import MASK, VOCAB, Oracle, build_head, build_tiny, extend, lively, make_context, prompt_inputs
from glance import BlockDraftHead, HeadConfig, Spine, block_loss_weights, default_taps, generate

# ---- the same head, slowly: one query, one key, one number at a time, nothing cached ----


def turn(x, position, theta):
    """Rotary embedding of one vector: the pair (x_j, x_{j + d/2}) turns by position x theta^(-2j/d)."""
    half, out = len(x) // 2, x.clone()
    for j in range(half):
        angle = position * theta ** (-2 * j / len(x))
        out[j] = x[j] * math.cos(angle) - x[j + half] * math.sin(angle)
        out[j + half] = x[j + half] * math.cos(angle) + x[j] * math.sin(angle)
    return out


def slow_draft(head, target, features, root, sees=lambda layer, query, key: True):
    """log q [L, V] from features [T, taps * D]. `sees(layer, query position, key position)` is the mask."""
    w, c, length = head.state_dict(), head.config, len(features)

    def norm(x, name):
        return w[name + ".weight"] * x / (x.pow(2).mean(dim=-1, keepdim=True) + c.rms_norm_eps).sqrt()

    def linear(x, name, rows=slice(None)):
        bias = w.get(name + ".bias")
        return x @ w[name + ".weight"][rows].T + (0 if bias is None else bias[rows])

    context = norm(linear(features, "fc"), "hidden_norm")
    x = target.embedding_weight[[root] + [c.mask_token_id] * (c.block_size - 1)] * c.input_embedding_scale
    for i in range(c.num_hidden_layers):
        a = f"layers.{i}.self_attn."
        block = norm(x, f"layers.{i}.input_layernorm")
        outs = []
        for h in range(c.num_attention_heads):
            own, shared = (slice(g * c.head_dim, (g + 1) * c.head_dim) for g in (h, h * c.num_key_value_heads // c.num_attention_heads))
            source = torch.cat([context, block])
            keys = [turn(k, t, c.rope_theta) for t, k in enumerate(norm(linear(source, a + "k_proj", shared), a + "k_norm"))]
            values, rows = linear(source, a + "v_proj", shared), []
            for s, q in enumerate(norm(linear(block, a + "q_proj", own), a + "q_norm")):
                query, here = turn(q, length + s, c.rope_theta), length + s
                scores = [query @ k / math.sqrt(c.head_dim) if sees(i, here, t) else torch.tensor(-math.inf) for t, k in enumerate(keys)]
                rows.append(torch.stack(scores).softmax(dim=0) @ values)
            outs.append(torch.stack(rows))
        x = x + linear(torch.cat(outs, dim=1), a + "o_proj")
        y = norm(x, f"layers.{i}.post_attention_layernorm")
        gate = linear(y, f"layers.{i}.mlp.gate_proj")
        x = x + linear(gate * gate.sigmoid() * linear(y, f"layers.{i}.mlp.up_proj"), f"layers.{i}.mlp.down_proj")
    logits = norm(x, "norm")[1:] @ target.model.lm_head.weight.T * c.output_multiplier
    cap = c.final_logit_softcapping
    return (logits if not cap else cap * torch.tanh(logits / cap)).log_softmax(dim=-1)


def shaken(head, seed=0):
    """Every parameter redrawn, norms and biases too, so that none can be left out unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in head.parameters():
            scale = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale + (weight.dim() == 1))
    return head


def features_of(head, tokens=11, seed=0):
    return torch.randn(tokens, len(head.taps) * 32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("changes", [
    {}, {"layers": 3, "block": 5}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1}, {"attention_bias": True}, {"rope_theta": 100.0},
    {"rms_norm_eps": 0.1}, {"input_embedding_scale": 3.0}, {"output_multiplier": 0.25}, {"final_logit_softcapping": 2.0},
    {"output_multiplier": 0.5, "final_logit_softcapping": 3.0}, {"final_logit_softcapping": 0.0}, {"block": 2},
], ids=str)  # fmt: skip
def test_head_equals_the_slow_head(changes, tied):
    """One draft pass gives the marginals of the written-out head, for every switch in the config."""
    target = build_tiny(tied=tied)
    head = shaken(build_head(target, **changes))
    features = features_of(head)
    with torch.no_grad():
        slow = slow_draft(head, target, features, root=7)
    fast = head.draft(make_context(target, [7], features))
    assert fast.shape == slow.shape == (head.config.block_size - 1, VOCAB) and fast.dtype == torch.float32
    assert (fast - slow).abs().max() < 1e-4 and (fast.exp() - slow.exp()).abs().max() < 1e-5


@pytest.mark.parametrize("kinds", [("sliding", "sliding"), ("full", "sliding")], ids="-".join)
@pytest.mark.parametrize("causal", [None, True, False])
def test_sliding_and_causal_layers(tiny_target, kinds, causal):
    """Context of 11, window 4. Unless the config says otherwise a sliding layer is causal and a full one bidirectional."""
    head = shaken(build_head(tiny_target, layer_types=[f"{kind}_attention" for kind in kinds], sliding_window=4, is_causal=causal))

    def sees(layer, query, key):
        sliding = kinds[layer] == "sliding"
        looks_back = key <= query if (sliding if causal is None else causal) else True
        return looks_back and (abs(query - key) < 4 or not sliding)

    features = features_of(head)
    with torch.no_grad():
        slow = slow_draft(head, tiny_target, features, 7, sees)
        wrong = slow_draft(head, tiny_target, features, 7, lambda layer, query, key: sees(layer, query + 1, key))
    fast = head.draft(make_context(tiny_target, [7], features))
    assert (fast - slow).abs().max() < 1e-4
    assert (fast - wrong).abs().max() > 1e-2, "a window off by one would go unnoticed"


def test_a_sliding_head_without_a_window_is_refused(tiny_target):
    """Layer types ask for a window the config does not give: an error that says so, not one from deep inside."""
    with pytest.raises(ValueError, match="sliding_window"):
        head = build_head(tiny_target, layer_types=["sliding_attention"] * 2)
        head.check(tiny_target)
        head.draft(make_context(tiny_target, [7], features_of(head)))


# ---- who sees whom ----


def test_block_is_bidirectional(tiny_target):
    """Another embedding in slot 5 moves the output of slot 1 as well as of slot 7."""
    head, block = shaken(build_head(tiny_target)), torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0))
    stream = torch.arange(19)[None]
    context = head.context(features_of(head)[None], stream[:, :11])
    other = block.clone()
    other[0, 5] += 1
    moved = (head(block, context, stream[:, 11:], stream[:, :11]) - head(other, context, stream[:, 11:], stream[:, :11])).abs().amax(dim=-1)
    assert moved.min() > 1e-3


@pytest.mark.parametrize("changes", [{}, dict(layer_types=["full_attention", "sliding_attention"], sliding_window=4)], ids=["full", "sliding"])
def test_blocks_read_together_equal_blocks_read_alone(tiny_target, changes):
    """Training reads blocks at several anchors as a batch over one context: each sees what lies strictly before its own r."""
    head, g = shaken(build_head(tiny_target, **changes)), torch.Generator().manual_seed(1)
    blocks, features, anchors = torch.randn(3, 8, 32, generator=g), features_of(head), torch.tensor([4, 9, 11])
    stream, positions = torch.arange(11)[None], anchors[:, None] + torch.arange(8)
    together = head(blocks, head.context(features[None], stream), positions, stream, visible=stream < anchors[:, None])
    for i, t in enumerate(anchors.tolist()):
        alone = head(blocks[i : i + 1], head.context(features[None, :t], stream[:, :t]), positions[i : i + 1], stream[:, :t])
        assert (together[i] - alone[0]).abs().max() < 1e-5
    leaky = head(blocks, head.context(features[None], stream), positions, stream, visible=stream <= anchors[:, None])
    assert (together - leaky)[:2].abs().amax(dim=(1, 2)).min() > 1e-3, "r's own features would go unnoticed"


@pytest.mark.parametrize("cut", [0, 4, 10])
def test_every_context_token_counts(tiny_target, cut):
    """The marginals move with each feature of the context, the oldest and the newest."""
    head = shaken(build_head(tiny_target))
    features = features_of(head)
    other = features.clone()
    other[cut] += 1
    drafts = [head.draft(make_context(tiny_target, [7], f)) for f in (features, other)]
    assert (drafts[0] - drafts[1]).abs().max() > 1e-3


class Watched(Oracle):
    """Drafts with the head, remembers what it drafted, then proposes the oracle's tree so that drafts are accepted."""

    def __init__(self, head, *oracle, **options):
        super().__init__(*oracle, **options)
        self.head, self.taps, self.seen = head, head.taps, []

    def propose(self, context):
        log_q = self.head.draft(context)
        self.seen.append((context.tokens[self.start :], log_q, context.memory["length"]))
        return super().propose(context)


@pytest.mark.parametrize("right", ["none", "some", "all"])
@pytest.mark.parametrize("grids", [(), ((2, 4),)], ids=["text", "one image"])
def test_cached_context_equals_a_fresh_one(tiny_target, right, grids):
    """In every round, after rejection, partial and full acceptance, the draft is that of a head that starts afresh there."""
    head, (inputs, answer) = shaken(build_head(tiny_target)), lively(tiny_target, 9, grids)
    told = {"none": [(t + 1) % VOCAB for t in answer], "some": [(t + (k % 3 == 2)) % VOCAB for k, t in enumerate(answer)], "all": answer}[right]
    watched = Watched(head, inputs, told, depth=4, wrong=1)
    assert generate(tiny_target, watched, inputs, max_new_tokens=20).tokens == answer
    for written, log_q, length in watched.seen:
        prefix = extend(inputs, written[:-1])  # strictly before r: r's own features do not exist yet
        assert length == prefix["input_ids"].shape[1]
        fresh = head.draft(make_context(tiny_target, written, tiny_target.prefill(prefix, head.taps)[2], left=20 - len(written)))
        assert (log_q - fresh).abs().max() < 1e-4 and (log_q.exp() - fresh.exp()).abs().max() < 1e-5


@pytest.mark.parametrize("changes", [{}, {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}], ids=["full", "sliding"])
def test_decoding_reads_what_training_reads(tiny_target, changes):
    """`draft` takes new context along with the block; `context` and then `forward` is how training does it. The same marginals."""
    head, features = shaken(build_head(tiny_target, **changes)).double(), features_of(build_head(tiny_target)).double()
    block = torch.tensor([7] + [head.config.mask_token_id] * (head.config.block_size - 1))
    stream = torch.arange(len(features) + len(block))[None]
    known, own = stream[:, : len(features)], stream[:, len(features) :]
    with torch.no_grad():
        hidden = head(tiny_target.embed(block).double()[None], head.context(features[None], known), own, known)
        trained = head.marginals(hidden[0, 1:], tiny_target)
    assert (head.draft(make_context(tiny_target, [7], features)) - trained).abs().max() < 1e-5


def test_context_in_pieces_equals_context_at_once(tiny_target):
    """Eleven features cached as 6 + 1 + 4 give the same draft as eleven at once; a forgotten or doubled one does not."""
    head = shaken(build_head(tiny_target)).double()  # in fp32 the rounding of log-probabilities near -20 alone is 1e-5
    features = features_of(head)

    def draft(*pieces):
        context = make_context(tiny_target, [7], None)
        for piece in pieces:
            context.fresh = features[piece]
            log_q = head.draft(context)
        return log_q

    whole = draft(slice(0, 11))
    assert (draft(slice(0, 6), slice(6, 7), slice(7, 11)) - whole).abs().max() < 1e-5
    assert (draft(slice(0, 6), slice(7, 11)) - whole).abs().max() > 1e-3
    assert (draft(slice(0, 7), slice(6, 11)) - whole).abs().max() > 1e-3


def test_no_deeper_than_the_tokens_left(tiny_target):
    """With two tokens to go only two offsets are drafted, and they are the first two."""
    head = shaken(build_head(tiny_target))
    few, all_ = (head.draft(make_context(tiny_target, [7], features_of(head), left=left)) for left in (2, 99))
    assert few.shape[0] == 2 and (few - all_[:2]).abs().max() < 1e-4


def test_float32_head_on_a_bfloat16_target():
    """Features and embeddings are taken to the head's precision, its output back to the target's; the text has the right length."""
    target = build_tiny()
    target = type(target)(target.model.to(torch.bfloat16))
    head = build_head(target)
    answer = generate(target, head, prompt_inputs(3), max_new_tokens=12)
    assert target.dtype == torch.bfloat16 and head.fc.weight.dtype == torch.float32 and len(answer.tokens) == 12
    assert generate(target, head, prompt_inputs(3), max_new_tokens=12, budget=0).tokens == generate(target, None, prompt_inputs(3), max_new_tokens=12).tokens


def test_a_head_on_another_device_is_refused(tiny_target):
    head = build_head(tiny_target).to("meta")
    with pytest.raises(ValueError, match="draft head is on meta, this target on cpu"):
        generate(tiny_target, head, prompt_inputs(3), max_new_tokens=2)


# ---- taps ----


@pytest.mark.parametrize("draft, layers, taps", [
    (5, 36, [1, 9, 17, 25, 33]), (5, 28, [1, 7, 13, 19, 25]), (1, 36, [18]), (1, 5, [2]), (1, 1, [0]), (2, 8, [1, 5]), (3, 4, [1, 1, 1]), (2, 2, [1, 1]),
])  # fmt: skip
def test_default_taps_by_hand(draft, layers, taps):
    """Evenly spaced from 1 to n - 3; one draft layer taps the middle; a tiny target repeats what it has."""
    assert default_taps(draft, layers) == taps


def test_default_taps_exist():
    """From two layers on, every default tap is a layer of the target, in rising order."""
    for layers in range(2, 50):
        for draft in range(1, 9):
            taps = default_taps(draft, layers)
            assert len(taps) == draft and taps == sorted(taps) and 0 <= taps[0] and taps[-1] < layers


@pytest.mark.parametrize("offsets, gamma", [(15, 7), (9, 5), (7, 4), (0, 4)])
def test_loss_weights_fall_from_one(offsets, gamma):
    """w_k = exp(-(k - 1) / gamma): 1 for the first offset, 1/e for the one gamma places later."""
    weights = block_loss_weights(offsets, gamma)
    assert weights.tolist() == pytest.approx([math.exp(-(k - 1) / gamma) for k in range(1, offsets + 1)], rel=1e-6)


# ---- checkpoints ----


def test_save_and_load_round_trip(tiny_target, tmp_path):
    """What is loaded drafts the same numbers, and the file holds the DFlash names without embedding or lm_head."""
    head = shaken(build_head(tiny_target, final_logit_softcapping=5.0, rope_theta=500.0))
    head.save_pretrained(tmp_path)
    loaded = BlockDraftHead.from_pretrained(tmp_path)
    drafts = [h.draft(make_context(tiny_target, [7], features_of(head))) for h in (head, loaded)]
    assert torch.equal(*drafts)
    layer = [f"self_attn.{p}_{kind}" for p, kind in zip("qkvoqk", ["proj"] * 4 + ["norm"] * 2)]
    layer += [f"mlp.{p}_proj" for p in ("gate", "up", "down")] + ["input_layernorm", "post_attention_layernorm"]
    names = {f"layers.{i}.{n}.weight" for i in range(2) for n in layer} | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert set(load_file(tmp_path / "model.safetensors")) == names


def test_a_head_in_half_precision_says_so(tiny_target, tmp_path):
    """Half the file; the config names its precision, and it loads in fp32 with the values it had."""
    head = build_head(tiny_target).to(torch.bfloat16)
    head.save_pretrained(tmp_path)
    loaded = BlockDraftHead.from_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert loaded.fc.weight.dtype == torch.float32 and torch.equal(loaded.fc.weight, head.fc.weight.float())


def test_every_faulty_tensor_is_named(tiny_target, tmp_path):
    """One missing, one unexpected, one of another shape: all three stand in one ValueError; nothing is filled in at random."""
    build_head(tiny_target).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["layers.1.mlp.up_proj.weight"]
    tensors |= {"lm_head.weight": torch.zeros(2, 2), "fc.weight": torch.zeros(32, 5)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as error:
        BlockDraftHead.from_pretrained(tmp_path)
    for fault in ("missing layers.1.mlp.up_proj.weight", "unexpected lm_head.weight", r"fc.weight has shape [32, 5], the config says [32, 64]"):
        assert fault in str(error.value)


def test_a_folder_without_a_head_is_named(tmp_path):
    """No config.json or no tensors: FileNotFoundError with the folder."""
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        BlockDraftHead.from_pretrained(tmp_path)


FLAT = dict(architectures=["DFlashDraftModel"], hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, vocab_size=64, num_target_layers=4, rms_norm_eps=1e-5)  # fmt: skip


@pytest.mark.parametrize("style", [
    dict(rope_theta=5e5, block_size=8, mask_token_id=63, target_layer_ids=[1, 2]),
    dict(rope_theta=5e5, block_size=8, dflash_config=dict(mask_token_id=63, target_layer_ids=[1, 2])),
    dict(rope_parameters=dict(rope_type="default", rope_theta=5e5), dflash_config=dict(mask_token_id=63, target_layer_ids=[1, 2], block_size=8)),
], ids=["flat", "mixed", "nested"])  # fmt: skip
def test_config_styles_read_alike(style):
    """rope_theta, block_size, mask id and taps flat or nested give one HeadConfig, and null means 'not said'."""
    config = HeadConfig.from_dict({**FLAT, **style, "sliding_window": None, "final_logit_softcapping": None})
    assert (config.rope_theta, config.block_size, config.mask_token_id, config.target_layer_ids) == (5e5, 8, 63, [1, 2])
    assert HeadConfig.from_dict(json.loads(json.dumps(config.to_dict()))).to_dict() == config.to_dict()


def test_the_head_counts_tokens_though_the_target_counts_pixels(tiny_target):
    """After an image, M-RoPE settings copied from the target's config or not: positions of the head are 0, 1, 2 ... of the stream."""
    copied = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1], mrope_interleaved=True))
    plain = build_head(tiny_target).config.to_dict()
    head = shaken(BlockDraftHead(HeadConfig.from_dict({**plain, **copied})))
    features = tiny_target.prefill(prompt_inputs(3, grids=((4, 6),)), head.taps)[2]
    with torch.no_grad():
        slow = slow_draft(head, tiny_target, features, root=7)
    fast = head.draft(make_context(tiny_target, [7], features))
    assert (fast.exp() - slow.exp()).abs().max() < 1e-5


def test_a_hub_id_fetches_config_and_safetensors_only(tiny_target, tmp_path, monkeypatch):
    """No code and no pickle is asked for; what cannot be reached is named."""
    build_head(tiny_target).save_pretrained(tmp_path)
    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: asked.update(options, name=name) or str(tmp_path))
    assert BlockDraftHead.from_pretrained("someone/some-head").config.block_size == 8
    assert asked["name"] == "someone/some-head" and asked["allow_patterns"] == ["config.json", "*.safetensors"]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: 1 / 0)
    with pytest.raises(FileNotFoundError, match="someone/some-head"):
        BlockDraftHead.from_pretrained("someone/some-head")


def test_a_folder_with_a_pickle_is_no_head(tiny_target, tmp_path):
    """pytorch_model.bin is never opened."""
    (tmp_path / "config.json").write_text(json.dumps(build_head(tiny_target).config.to_dict()))
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(FileNotFoundError, match="safetensors"):
        BlockDraftHead.from_pretrained(tmp_path)


def test_shards_are_read_together(tiny_target, tmp_path):
    """Several safetensors files in one folder hold one head."""
    head = shaken(build_head(tiny_target))
    head.save_pretrained(tmp_path)
    tensors = list(load_file(tmp_path / "model.safetensors").items())
    (tmp_path / "model.safetensors").unlink()
    for i, part in enumerate((tensors[:9], tensors[9:])):
        save_file(dict(part), tmp_path / f"model-{i}.safetensors")
    loaded = BlockDraftHead.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in head.state_dict().items())


# What public loaders read. The DFlash class: every tensor by name, nothing missing and nothing left over. SGLang: the same, q, k, v and gate, up
# merged; config keys of `flat` and `nested`. vLLM: the same through a Qwen3 config, the mask id from `dflash_config`.
SERVED = {
    "flat": ["architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
             "rms_norm_eps", "rope_parameters", "rope_theta", "vocab_size", "max_position_embeddings", "hidden_act", "attention_bias", "num_target_layers",
             "block_size", "layer_types", "tie_word_embeddings", "dtype"],
    "nested": ["mask_token_id", "target_layer_ids", "input_embedding_scale", "output_multiplier", "final_logit_softcapping"],
}  # fmt: skip


@pytest.mark.parametrize("bias", [False, True])
def test_the_folder_has_what_serving_engines_ask_for(tiny_target, tmp_path, bias):
    """Every key and every tensor, with the shape that follows from the config; the library's own Qwen3 config reads the file alike."""
    window = dict(layer_types=["full_attention", "sliding_attention"], sliding_window=4)
    build_head(tiny_target, attention_bias=bias, rope_theta=5e5, final_logit_softcapping=30.0, **window).save_pretrained(tmp_path)
    raw, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert not [key for key in SERVED["flat"] if key not in raw] + [key for key in SERVED["nested"] if key not in raw["dflash_config"]]
    assert raw["architectures"] == ["DFlashDraftModel"] and raw["model_type"] == "qwen3" and raw["hidden_act"] == "silu"
    assert len(raw["layer_types"]) == raw["num_hidden_layers"] and sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    d, h, kv, hd, ffn, taps = 32, 4, 2, 8, 64, len(raw["dflash_config"]["target_layer_ids"])
    shapes = {"fc": [d, taps * d], "hidden_norm": [d], "norm": [d]}
    for i in range(2):
        shapes |= {f"layers.{i}.self_attn.{n}_proj": s for n, s in (("q", [h * hd, d]), ("k", [kv * hd, d]), ("v", [kv * hd, d]), ("o", [d, h * hd]))}
        shapes |= {f"layers.{i}.self_attn.{n}_norm": [hd] for n in "qk"} | {f"layers.{i}.{n}_layernorm": [d] for n in ("input", "post_attention")}
        shapes |= {f"layers.{i}.mlp.{n}_proj": s for n, s in (("gate", [ffn, d]), ("up", [ffn, d]), ("down", [d, ffn]))}
    biases = {f"{n}.bias": s[:1] for n, s in shapes.items() if bias and n.endswith(("q_proj", "k_proj", "v_proj", "o_proj"))}
    assert {n: list(t.shape) for n, t in tensors.items()} == {f"{n}.weight": s for n, s in shapes.items()} | biases
    read = AutoConfig.from_pretrained(tmp_path)
    assert type(read).__name__ == "Qwen3Config" and read.rope_parameters["rope_theta"] == 5e5 and read.head_dim == 8
    assert read.sliding_window == 4, "a Qwen3 config without use_sliding_window would drop the window"
    assert read.dflash_config == raw["dflash_config"] and read.block_size == 8 and read.attention_bias == bias


def test_false_and_zero_are_said():
    """`is_causal: false` and mask id 0 are values, not absent keys."""
    config = HeadConfig.from_dict({**FLAT, "is_causal": False, "mask_token_id": 0, "target_layer_ids": [1, 2]})
    assert config.is_causal is False and config.mask_token_id == 0


def test_another_architecture_is_refused_by_name():
    """DFlash2DraftModel looks alike and is not."""
    with pytest.raises(ValueError, match="DFlash2DraftModel"):
        HeadConfig.from_dict({**FLAT, "architectures": ["DFlash2DraftModel"]})


@pytest.mark.parametrize("changes, message", [
    (dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0)), "scaled or several rotary"),
    (dict(rope_scaling=dict(type="linear", factor=2.0)), "scaled or several rotary"),
    (dict(rope_parameters=dict(full_attention=dict(rope_theta=1e6), sliding_attention=dict(rope_theta=1e4))), "scaled or several rotary"),
    (dict(hidden_act="gelu"), "'gelu'"), (dict(layer_types=["full_attention", "sliding"]), "'sliding'"),
], ids=["yarn", "linear", "by layer type", "gelu", "layer type"])  # fmt: skip
def test_a_config_that_would_be_misread_is_refused(changes, message):
    """Each would load without a word, keep the text right and lose acceptance."""
    with pytest.raises(ValueError, match=message):
        BlockDraftHead(HeadConfig.from_dict({**FLAT, "mask_token_id": 0, "target_layer_ids": [1, 2], **changes}))


def test_missing_config_keys_are_named():
    """All of them at once."""
    with pytest.raises(ValueError, match="head_dim, mask_token_id, target_layer_ids"):
        HeadConfig.from_dict({name: value for name, value in FLAT.items() if name != "head_dim"})


@pytest.mark.parametrize("changes, numbers", [
    (dict(hidden_size=16), ("hidden size", "16", "32")), (dict(vocab_size=100), ("vocabulary", "100", "64")),
    (dict(num_target_layers=36), ("layers", "36", "4")), (dict(mask_token_id=64), ("mask token", "64", "64")),
    (dict(mask_token_id=-1), ("mask token", "-1", "64")), (dict(target_layer_ids=[1, 4]), ("taps", "[1, 4]", "4")),
], ids=lambda value: value[0] if isinstance(value, tuple) else "")  # fmt: skip
def test_check_names_both_numbers(tiny_target, changes, numbers):
    """A head built for another target is told apart before the first pass, with its number and the target's."""
    with pytest.raises(ValueError) as error:
        build_head(tiny_target, **changes).check(tiny_target)
    assert all(number in str(error.value) for number in numbers)


def test_check_accepts_a_matching_head(tiny_target):
    """The tiny head fits the tiny target, mask id on the last row and all."""
    build_head(tiny_target, mask_token_id=MASK).check(tiny_target)


def test_spine_is_the_argmax_chain_of_the_head(tiny_target):
    """The baseline drafts the same head's best token at every offset, no wider, and no longer than the budget."""
    head = shaken(build_head(tiny_target))
    log_q = head.draft(make_context(tiny_target, [7], features_of(head)))
    for budget in (31, 3):
        context = make_context(tiny_target, [7], features_of(head))
        context.budget = budget
        tree = Spine(head).propose(context)
        assert tree.tokens[1:] == log_q.argmax(dim=-1).tolist()[:budget] and tree.parents == list(range(-1, len(tree)))
