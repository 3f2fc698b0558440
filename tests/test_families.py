"""Which transformers families can be targets: a tiny genuine model of each, with wide random weights, must decode losslessly.

The README's support table is written by these tests: `python tests/test_families.py` puts it between the markers there.
"""

import math
from dataclasses import dataclass, field

import pytest
import torch
import transformers

from conftest import IMAGE, ROOT, VISION_END, VISION_START, VOCAB, Oracle, build_head, library_greedy, widen
from glance import Target, generate

NEW = 24  # tokens to write
TEXT = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            max_position_embeddings=256, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
WINDOW = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
MROPE = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1]))
LATENT = dict(head_dim=4, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, kv_lora_rank=16, q_lora_rank=16, num_key_value_heads=4)
SIGHT = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4)
SIGLIP = dict(model_type="siglip_vision_model", **SIGHT)
QWEN_SIGHT = dict(hidden_size=16, depth=2, num_heads=2, intermediate_size=32, patch_size=4, temporal_patch_size=1, out_hidden_size=32)
QWEN25_SIGHT = dict(**QWEN_SIGHT, window_size=16, fullatt_block_indexes=[1])
QWEN3_SIGHT = dict(**QWEN_SIGHT, num_position_embeddings=64, deepstack_visual_indexes=[0, 1])
QWEN = dict(image_token_id=IMAGE, video_token_id=59, vision_start_token_id=VISION_START, vision_end_token_id=VISION_END)
GLM = dict(image_token_id=IMAGE, video_token_id=59, image_start_token_id=VISION_START, image_end_token_id=VISION_END,
           video_start_token_id=57, video_end_token_id=58)  # fmt: skip

# ---- images: for a list of sizes (0 small, 1 large), the tensors that a processor gives beside the ids ----


def as_patches(sizes):
    """Qwen-VL kind: flattened patches of any grid, merged two by two."""
    grid = torch.tensor([[[1, 2, 4], [1, 4, 6]][size] for size in sizes])
    return {"pixel_values": torch.randn(int(grid.prod(dim=1).sum()), 3 * 4 * 4), "image_grid_thw": grid}


def as_squares(sizes):
    """LLaVA, PaliGemma, Gemma-3: every image is scaled to one size."""
    return {"pixel_values": torch.randn(len(sizes), 3, 8, 8)}


def as_tiles(sizes):
    """InternVL: a larger image is cut into more tiles."""
    return {"pixel_values": torch.randn(sum([1, 3][size] for size in sizes), 3, 8, 8)}


def as_masked_tiles(sizes):
    """Idefics3, SmolVLM: the tiles of all images in one row; what lies beyond an image's edge is masked."""
    seen = torch.ones(1, sum([1, 3][size] for size in sizes), 8, 8, dtype=torch.long)
    seen[:, 0, :, 4:] = 0
    return {"pixel_values": torch.randn(*seen.shape[:2], 3, 8, 8) * seen[:, :, None], "pixel_attention_mask": seen}


def as_any_resolution(sizes):
    """LLaVA-OneVision: an overview and the tiles of the nearest grid, padded to the same number."""
    return {"pixel_values": torch.randn(len(sizes), 3, 3, 8, 8), "image_sizes": torch.tensor([[[8, 8], [16, 8]][size] for size in sizes])}


def as_padded(sizes):
    """Pixtral: images of any size, padded to the largest."""
    true = torch.tensor([[[8, 8], [8, 16]][size] for size in sizes])
    return {"pixel_values": torch.randn(len(sizes), 3, 8, int(true.max())), "image_sizes": true}


def as_crossed(sizes):
    """Llama-3.2-Vision: tiles that cross attention reads. 34 rows an image: sooner or later as many as prompt and tree together."""
    tiles = torch.tensor([[[1, 0], [1, 1]][size] for size in sizes])[None]
    return {"pixel_values": torch.randn(1, len(sizes), 2, 3, 16, 16), "aspect_ratio_mask": tiles, "aspect_ratio_ids": tiles.sum(dim=2)}


@dataclass
class Family:
    name: str
    model: str  # class in transformers
    text: dict = field(default_factory=dict)  # on top of TEXT
    sight: dict = field(default_factory=dict)
    top: dict = field(default_factory=dict)
    images: callable = None
    kinds: str = ""  # the input that tells placeholders from words, if the processor gives one
    attention: str = "sdpa"


FAMILIES = [
    Family("Qwen3-VL", "Qwen3VLForConditionalGeneration", MROPE, QWEN3_SIGHT, QWEN, as_patches, "mm_token_type_ids"),
    Family("Qwen3-VL-MoE", "Qwen3VLMoeForConditionalGeneration", {**MROPE, **EXPERTS}, QWEN3_SIGHT, QWEN, as_patches, "mm_token_type_ids"),
    Family("Qwen2.5-VL", "Qwen2_5_VLForConditionalGeneration", MROPE, QWEN25_SIGHT, QWEN, as_patches, "mm_token_type_ids"),
    Family("Qwen2.5-VL, sliding", "Qwen2_5_VLForConditionalGeneration", dict(use_sliding_window=True, **MROPE, **WINDOW), QWEN25_SIGHT, QWEN,
           as_patches, "mm_token_type_ids"),
    Family("Qwen2-VL", "Qwen2VLForConditionalGeneration", MROPE, {**QWEN_SIGHT, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}, QWEN,
           as_patches, "mm_token_type_ids"),
    Family("GLM-4V", "Glm4vForConditionalGeneration", MROPE, dict(**QWEN_SIGHT, image_size=32), GLM, as_patches, "mm_token_type_ids"),
    Family("LLaVA", "LlavaForConditionalGeneration", dict(model_type="llama"), dict(model_type="clip_vision_model", **SIGHT),
           dict(image_token_index=IMAGE), as_squares),
    Family("LLaVA-OneVision", "LlavaOnevisionForConditionalGeneration", dict(model_type="qwen2"), SIGLIP,
           dict(image_token_index=IMAGE, video_token_index=59, image_grid_pinpoints=[[8, 8], [16, 8], [8, 16]]), as_any_resolution),
    Family("SmolVLM", "SmolVLMForConditionalGeneration", dict(model_type="llama"), SIGHT, dict(image_token_id=IMAGE), as_masked_tiles),
    Family("Idefics3", "Idefics3ForConditionalGeneration", dict(model_type="llama"), SIGHT, dict(image_token_id=IMAGE), as_masked_tiles),
    Family("InternVL", "InternVLForConditionalGeneration", dict(model_type="qwen2"), {**SIGHT, "image_size": [8, 8], "patch_size": [4, 4]},
           dict(image_token_id=IMAGE), as_tiles),
    Family("Mistral-3 with Pixtral", "Mistral3ForConditionalGeneration", dict(model_type="mistral", sliding_window=None),
           dict(model_type="pixtral", head_dim=8, **SIGHT), dict(image_token_index=IMAGE, spatial_merge_size=1), as_padded),
    Family("PaliGemma", "PaliGemmaForConditionalGeneration", dict(model_type="gemma"), dict(projection_dim=32, **SIGLIP),
           dict(image_token_index=IMAGE, projection_dim=32, hidden_size=32), as_squares, "token_type_ids"),
    Family("PaliGemma-2", "PaliGemmaForConditionalGeneration", {**WINDOW, "model_type": "gemma2", "query_pre_attn_scalar": 8, "sliding_window": 128},
           dict(projection_dim=32, **SIGLIP), dict(image_token_index=IMAGE, projection_dim=32, hidden_size=32), as_squares, "token_type_ids", "eager"),
    Family("Gemma-3", "Gemma3ForConditionalGeneration", dict(query_pre_attn_scalar=8, **WINDOW), SIGLIP,
           dict(mm_tokens_per_image=4, boi_token_index=VISION_START, eoi_token_index=VISION_END, image_token_index=IMAGE), as_squares, "token_type_ids"),
    Family("Llama-3.2-Vision", "MllamaForConditionalGeneration",
           dict(cross_attention_layers=[1, 3], rope_parameters=dict(rope_type="default", rope_theta=1e4)),
           dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_global_layers=1, attention_heads=2, vision_output_dim=32, image_size=16,
                patch_size=4, max_num_tiles=2, intermediate_layers_indices=[0], supported_aspect_ratios=[[1, 1], [1, 2]]),
           dict(image_token_index=IMAGE), as_crossed),
    Family("Llama", "LlamaForCausalLM"),
    Family("Llama-4 (text)", "Llama4ForCausalLM", dict(attention_chunk_size=8, layer_types=["chunked_attention", "full_attention"] * 2, no_rope_layers=[1, 0] * 2,
           num_local_experts=2, intermediate_size_mlp=64, attn_temperature_tuning=True, floor_scale=128)),
    Family("Qwen2, sliding", "Qwen2ForCausalLM", dict(use_sliding_window=True, **WINDOW)),
    Family("Qwen3", "Qwen3ForCausalLM"),
    Family("Qwen3-MoE", "Qwen3MoeForCausalLM", EXPERTS),
    Family("Gemma-2", "Gemma2ForCausalLM", dict(query_pre_attn_scalar=8, **WINDOW), attention="eager"),
    Family("Gemma-3 (text)", "Gemma3ForCausalLM", dict(query_pre_attn_scalar=8, **WINDOW)),
    Family("Gemma-3n (text)", "Gemma3nForCausalLM", dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB, altup_num_inputs=2, laurel_rank=4,
           num_kv_shared_layers=2, activation_sparsity_pattern=None, **WINDOW)),
    Family("GPT-2", "GPT2LMHeadModel"),
    Family("OPT", "OPTForCausalLM", dict(word_embed_proj_dim=32, ffn_dim=64)),
    Family("Mistral, sliding", "MistralForCausalLM", dict(sliding_window=8)),
    Family("Phi-3, sliding", "Phi3ForCausalLM", dict(sliding_window=8)),
    Family("Cohere2", "Cohere2ForCausalLM", dict(logit_scale=1.0, **WINDOW)),
    Family("Olmo3", "Olmo3ForCausalLM", WINDOW),
    Family("gpt-oss", "GptOssForCausalLM", dict(num_local_experts=4, num_experts_per_tok=2, **WINDOW), attention="eager"),
    Family("DeepSeek-V3", "DeepseekV3ForCausalLM", dict(**LATENT, moe_intermediate_size=16, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2,
           first_k_dense_replace=1, num_mtp_layers=0)),
]  # fmt: skip

SMALL = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
HYBRID = dict(linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=2,
              num_experts_per_tok=1, moe_intermediate_size=8, shared_expert_intermediate_size=8, head_dim=8)  # fmt: skip
REFUSED = [  # (family, model class, config, what the error names, the table's words)
    ("Qwen3-Next", "Qwen3NextForCausalLM", dict(layer_types=["linear_attention", "full_attention"], **HYBRID), "LinearAttentionLayer", "linear attention"),
    ("LFM2", "Lfm2ForCausalLM", dict(layer_types=["conv", "full_attention"]), "LinearAttentionLayer", "convolution state"),
    ("Falcon-H1", "FalconH1ForCausalLM", dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_ssm=64), "LinearAttentionAndFull", "state space beside attention"),
    ("RecurrentGemma", "RecurrentGemmaForCausalLM", dict(lru_width=32), "LinearAttentionLayer", "recurrent state"),
    ("DeepSeek-V3.2", "DeepseekV32ForCausalLM", LATENT, "DynamicIndexedLayer", "indexed attention"),
    ("Mamba", "MambaForCausalLM", dict(state_size=4), "position_ids", "state space"),
    ("Bloom", "BloomForCausalLM", dict(n_head=4), "position_ids", "ALiBi, no positions"),
    ("MPT", "MptForCausalLM", dict(n_heads=4, d_model=32, n_layers=2), "position_ids", "ALiBi, no positions"),
    ("Falcon with ALiBi", "FalconForCausalLM", dict(alibi=True), "cannot be verified as a tree", "ALiBi takes no tree mask (self-check)"),
    ("T5", "T5ForConditionalGeneration", dict(d_ff=16, d_kv=8, num_heads=2), "encoder-decoder", "encoder-decoder"),
]  # fmt: skip


def build(family):
    model_class = getattr(transformers, family.model)
    values = {**TEXT, **family.text}
    if family.images:
        values = dict(text_config=values, vision_config=dict(family.sight), tie_word_embeddings=False, **family.top)
    config = model_class.config_class(**values)
    config._attn_implementation = family.attention
    torch.manual_seed(0)
    model = widen(model_class(config).eval(), seed=3)
    for name, weight in model.named_parameters():
        if name.endswith("gate") and weight.numel() == 1:
            weight.data.fill_(1.0)  # an untrained Llama-3.2-Vision keeps its eyes shut
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, eos_token_id=None)
    return Target(model)


@torch.no_grad()
def prompt(target, family, seed, sizes, length):
    """`length` words with images of these sizes among them: the tensors that the family's processor would give."""
    torch.manual_seed(seed)
    words, ids, inputs = torch.randint(3, 57, (length,)).tolist(), [], {}
    for size in sizes:
        holes = 1  # placeholders for an image: as many as the model makes features of it; one where cross attention reads it
        if hasattr(target.model, "get_image_features"):
            features = target.model.get_image_features(**family.images([size]), return_dict=True).pooler_output
            holes = sum(part.flatten(0, -2).shape[0] for part in (features if isinstance(features, (list, tuple)) else [features]))
        ids += [words.pop(), words.pop(), VISION_START] + [IMAGE] * holes + [VISION_END]
    ids = torch.tensor([ids + words])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **(family.images(sizes) if sizes else {})}
    if family.kinds:
        inputs[family.kinds] = (ids == IMAGE).long() * ("PaliGemma" not in family.name)  # there 0 stands for all of the prompt
    if "aspect_ratio_mask" in inputs:  # every word looks at the last image before it
        latest = (ids[0] == IMAGE).cumsum(dim=0)[:, None] == torch.arange(1, len(sizes) + 1)
        inputs["cross_attention_mask"] = (latest[:, :, None] * inputs["aspect_ratio_mask"][0])[None]
    return inputs


def drafts(target, inputs, answer):
    """(drafter, budget): nobody; random heads that tap the first and the last layer; one who knows but puts lies before the truth."""
    yield None, 31
    for budget in (1, 7, 31):
        yield build_head(target, seed=budget, target_layer_ids=[0, target.num_layers - 1]), budget
    for depth, lies, budget in ((1, 0, 1), (2, 1, 7), (6, 2, 31)):  # depth x (2 lies + 1) nodes
        yield Oracle(inputs, answer, depth, lies), budget


PROMPTS = [((), 12), ((), 33), ((0,), 14), ((1,), 10), ((0, 1), 18)]  # image sizes, words


def check(family):
    """Five prompts, every drafter: the library's own greedy ids. Returns the family's row of the support table."""
    target = build(family)
    before = {name: weight.clone() for name, weight in target.model.named_parameters()}
    for sizes, length in PROMPTS:
        sizes = sizes if family.images else ()
        tried = (prompt(target, family, seed, sizes, length) for seed in range(40))  # a text of few words could hide a fault
        inputs, answer = next((inputs, answer) for inputs in tried if len(set(answer := library_greedy(target, inputs, NEW))) >= 8)
        if sizes:
            other = {**inputs, "pixel_values": -inputs["pixel_values"]}
            assert (target.prefill(inputs)[1] - target.prefill(other)[1]).abs().max() > 1e-2, "the image is not seen"
        for drafter, budget in drafts(target, inputs, answer):
            done = generate(target, drafter, inputs, max_new_tokens=NEW, budget=budget)
            assert done.tokens == answer, f"{family.name}, images {sizes}, {length} words, {type(drafter).__name__}, budget {budget}"
            if isinstance(drafter, Oracle):  # all of it accepted, along rows that are not neighbours
                assert len(done.rounds) == 1 + math.ceil((NEW - 1) / (drafter.depth + 1))
    assert all(torch.equal(weight, before[name]) for name, weight in target.model.named_parameters())
    build_head(target).check(target)
    images = "none, one, two" + (" (one size)" if family.images is as_squares else " (two sizes)") if family.images else "text only"
    masks = "one" if len(target.layer_types) == 1 else "by layer type"
    result = "lossless" + "".join(f" up to a length: {reason}" for reason in target.limits)
    return f"| {family.name} | `{family.model}` | {masks} | {images} | {result} |"


def refuse(name, model, config, fault, reason, dtype=torch.float32):
    """The ValueError names the class and the reason. Returns the row."""
    model_class = getattr(transformers, model)
    torch.manual_seed(0)
    tiny = widen(model_class(model_class.config_class(**{**SMALL, **config})), seed=3)
    with pytest.raises(ValueError, match=f"(?s){model}.*{fault}"):
        Target(tiny.to(dtype))
    return f"| {name} | `{model}` | | | refused: {reason} |"


README, START, END = ROOT / "README.md", "<!-- support table -->", "<!-- end -->"
ROWS = {}  # what the tests below found


def support_table(rows):
    """The README's table, from the rows that `check` and `refuse` return."""
    return "\n".join(["| family | model class | masks | images tested | result |", "|---|---|---|---|---|", *rows])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_family_is_lossless(family):
    """No drafter, a random head and an oracle at budgets 1, 7, 31; with and without images: always the library's ids."""
    ROWS[family.name] = check(family)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_self_check_catches_what_no_rule_foresees(dtype):
    """GPT-Neo's local layers count rows, whatever mask comes: a tree of four nodes shows it, in either precision."""
    local = dict(num_layers=2, num_heads=4, window_size=4, attention_types=[[["global", "local"], 1]])
    refuse("GPT-Neo", "GPTNeoForCausalLM", local, "not exact in a tree", "", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_rounding_is_below_its_bound(family, dtype):
    """One-token against N-token passes, an oracle's trees, up to the first token that differs: `Target.ROUNDING` lies above all noise.
    In bf16 too the plain loop writes the library's text, unless the library's cache drops rows behind a window: then sums differ."""
    target = Target(build(family).model.to(dtype))
    for sizes, length in PROMPTS[1 : 3 if family.images else 2]:
        inputs = {n: v.to(dtype) if v.is_floating_point() else v for n, v in prompt(build(family), family, 5, sizes, length).items()}
        answer = library_greedy(target, inputs, NEW)
        plain, tree = (generate(target, drafter, inputs, max_new_tokens=NEW, keep_logits=True) for drafter in (None, Oracle(inputs, answer, 6, 1)))
        assert plain.tokens == answer or (dtype == torch.bfloat16 and target.layer_types != {"full_attention"})
        same = next((i for i, (a, b) in enumerate(zip(plain.tokens, tree.tokens)) if a != b), NEW - 1) + 1
        theirs, ours = (torch.cat([r.logits for r in g.rounds]) for g in (plain, tree))
        assert (ours - theirs)[:same].abs().max() / theirs.std() < Target.ROUNDING[dtype]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
def test_state_that_cannot_be_rolled_back_is_refused(case):
    """No way to give siblings one position, or state that is no row of keys and values: refused before any work."""
    ROWS[case[0]] = refuse(*case)


ROPE = dict(rope_theta=1e4, original_max_position_embeddings=32)
LONG = dict(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[4.0] * 4, **ROPE)
LIMITED = [
    Family("dynamic rope", "LlamaForCausalLM", dict(max_position_embeddings=32, rope_parameters=dict(rope_type="dynamic", factor=4.0, **ROPE))),
    Family("longrope", "Phi3ForCausalLM", dict(original_max_position_embeddings=32, rope_parameters=LONG)),
    Family("temperature", "Llama4ForCausalLM", {**next(f.text for f in FAMILIES if f.name == "Llama-4 (text)"), "floor_scale": 33}),
]


@pytest.mark.parametrize("family", LIMITED, ids=lambda family: family.name)
def test_lengths_at_which_a_pass_would_matter_are_refused(family):
    """Where rotation or scale depends on the whole pass, the target is exact up to that length and says so beyond it."""
    target = build(family)
    inputs = prompt(target, family, 1, (), 12)
    answer = library_greedy(target, inputs, NEW)
    drafter = Oracle(inputs, answer, depth=3, wrong=1)  # 10 rows: the last pass starts at 12 + 9 and ends at 31
    assert generate(target, drafter, inputs, max_new_tokens=12).tokens == answer[:12]
    with pytest.raises(ValueError, match=f"{family.model}.*beyond 32 tokens"):
        generate(target, drafter, inputs, max_new_tokens=NEW)


def test_support_table_in_the_readme_is_the_generated_one():
    """Only with the whole file: a family that was not tried has no row."""
    text, names = README.read_text() if README.exists() else "", [family.name for family in FAMILIES] + [case[0] for case in REFUSED]
    if START not in text or any(name not in ROWS for name in names):
        pytest.skip("README.md has no support table yet" if START not in text else "needs the rows of all tests in this file")
    assert text.split(START)[1].split(END)[0].strip() == support_table(ROWS[name] for name in names)


if __name__ == "__main__":
    table = support_table([*(check(family) for family in FAMILIES), *(refuse(*case) for case in REFUSED)])
    before, start, rest = README.read_text().partition(START)
    if start:
        README.write_text(f"{before}{START}\n{table}\n{END}{rest.partition(END)[2]}")
    print(table)
