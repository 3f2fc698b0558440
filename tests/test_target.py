"""Section 4, target: one pass over a tree against the library's own forward, path by path."""

import pytest
import torch
import transformers
from PIL import Image

from conftest import (ROOT, VOCAB, Oracle, build_head, build_tiny, library_forward, library_greedy, lively, path_to, prompt_inputs,
                      random_tree, widen)  # fmt: skip
from glance import CandidateTree, Target, decode, generate, load_processor

NONE, ONE, TWO = (), ((2, 4),), ((2, 4), (4, 6))  # images: patches high and wide
TAPS = [0, 2]


def words_at(tree, path):
    return [tree.tokens[node] for node in path]


def assert_tree_equals_library(target, sequence, tree, inputs, committed=()):
    """Every node's logits = those of one fresh library forward over prompt, committed tokens and the node's path."""
    logits, _ = target.verify(sequence, tree)
    for node in range(len(tree) + 1):
        words = [*committed, *words_at(tree, [0, *path_to(tree, node)])]
        oracle = library_forward(target, inputs, words).logits[0, -1]
        assert (logits[node] - oracle).abs().max() < 1e-4, f"node {node}"
        assert logits[node].argmax() == oracle.argmax()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("grids", [NONE, ONE, TWO], ids=["text", "one image", "two images"])
def test_one_tree_pass_equals_a_forward_per_path(grids, attention):
    """Prefix, ancestors and position (M-RoPE shift and depth) are right for every node at once."""
    target, inputs = build_tiny(seed=1, attention=attention), prompt_inputs(2, grids=grids)
    tree = random_tree(5, 14, torch.Generator().manual_seed(3))
    sequence, logits, _ = target.prefill(inputs)
    assert (logits - library_forward(target, inputs).logits[0, -1]).abs().max() < 1e-4
    assert_tree_equals_library(target, sequence, tree, inputs)


@pytest.mark.parametrize("grids", [NONE, TWO], ids=["text", "two images"])
def test_eager_and_sdpa_agree(grids):
    """The additive mask means the same to both attention implementations."""
    tree, inputs, both = random_tree(5, 14, torch.Generator().manual_seed(3)), prompt_inputs(2, grids=grids), []
    for attention in ("eager", "sdpa"):
        target = build_tiny(seed=1, attention=attention)
        both.append(target.verify(target.prefill(inputs)[0], tree)[0])
    assert (both[0] - both[1]).abs().max() < 1e-4


def test_a_sibling_moves_only_its_own_branch(tiny_target):
    """Another token at node 2 changes the logits of node 2 and of what stands below it, and no other row."""
    inputs, rows = prompt_inputs(4, grids=ONE), []
    for token in (7, 8):
        tree = CandidateTree([5, 1, token, 3, 4, 9], [-1, 0, 0, 1, 2, 4], [0, 1, 1, 2, 2, 3], [0.0] * 6)
        rows.append(tiny_target.verify(tiny_target.prefill(inputs)[0], tree)[0])
    moved = (rows[0] - rows[1]).abs().amax(dim=1)
    assert moved[[0, 1, 3]].max() < 1e-5 and moved[[2, 4, 5]].min() > 1e-2


def commit_random_rounds(target, inputs, rounds=4):
    """Verify and commit a few random trees, each time down to the last node. Returns (sequence, committed tokens)."""
    generator, committed = torch.Generator().manual_seed(6), []
    sequence, _, _ = target.prefill(inputs)
    for root in range(10, 10 + rounds):
        tree = random_tree(root, 12, generator)
        path = path_to(tree, 12)
        target.verify(sequence, tree)
        target.commit(sequence, tree, path)
        committed += words_at(tree, [0, *path])
    return sequence, committed


def cache_error(target, inputs, sequence, committed):
    """Largest difference between the committed keys and values and those of one fresh library forward."""
    fresh = library_forward(target, inputs, committed, use_cache=True).cache
    pairs = [(getattr(ours, name), getattr(theirs, name)) for ours, theirs in zip(sequence.cache.layers, fresh.layers) for name in ("keys", "values")]
    assert all(ours.shape == theirs.shape for ours, theirs in pairs)
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


@pytest.mark.parametrize("grids", [NONE, ONE], ids=["text", "one image"])
def test_committed_cache_equals_a_sequential_run(tiny_target, grids):
    """After four rounds that each took a scattered path, the cache holds what token-by-token decoding would hold."""
    inputs = prompt_inputs(5, grids=grids)
    sequence, committed = commit_random_rounds(tiny_target, inputs)
    assert sequence.length == inputs["input_ids"].shape[1] + len(committed)
    assert cache_error(tiny_target, inputs, sequence, committed) < 1e-4
    assert_tree_equals_library(tiny_target, sequence, random_tree(3, 5, torch.Generator().manual_seed(1)), inputs, committed)


def test_committing_the_first_rows_instead_of_the_path_is_caught(tiny_target, monkeypatch):
    """The classical rollback mistake, cropping to a + 1 rows, leaves the keys of rejected tokens behind."""
    commit = Target.commit
    monkeypatch.setattr(Target, "commit", lambda self, sequence, tree, path: commit(self, sequence, tree, list(range(1, len(path) + 1))))
    inputs = prompt_inputs(5, grids=ONE)
    assert cache_error(tiny_target, inputs, *commit_random_rounds(tiny_target, inputs)) > 1e-2


def test_rejecting_everything_keeps_only_the_root(tiny_target):
    """The empty path forgets all N nodes: the next pass sees prompt and r alone."""
    inputs = prompt_inputs(5, grids=ONE)
    sequence, _, _ = tiny_target.prefill(inputs)
    tree = random_tree(4, 9, torch.Generator().manual_seed(0))
    tiny_target.verify(sequence, tree)
    tiny_target.commit(sequence, tree, [])
    assert cache_error(tiny_target, inputs, sequence, [4]) < 1e-4


@pytest.mark.parametrize("grids", [NONE, ONE, TWO], ids=["text", "one image", "two images"])
def test_four_tokens_in_one_pass_equal_four_passes(tiny_target, grids):
    """A chain of four gets four consecutive positions after an image: same logits, features, keys and values."""
    inputs, chain = prompt_inputs(7, grids=grids), CandidateTree([3, 9, 3, 20], [-1, 0, 1, 2], [0, 1, 2, 3], [0.0] * 4)
    at_once, _, _ = tiny_target.prefill(inputs, TAPS)
    logits, features = tiny_target.verify(at_once, chain, TAPS)
    tiny_target.commit(at_once, chain, [1, 2, 3])
    one_by_one, _, _ = tiny_target.prefill(inputs, TAPS)
    for i, token in enumerate(chain.tokens):
        step_logits, step_features = tiny_target.verify(one_by_one, CandidateTree.empty(token), TAPS)
        tiny_target.commit(one_by_one, CandidateTree.empty(token), [])
        assert (logits[i] - step_logits[0]).abs().max() < 1e-4 and (features[i] - step_features[0]).abs().max() < 1e-4
    for ours, theirs in zip(at_once.cache.layers, one_by_one.cache.layers):
        assert (ours.keys - theirs.keys).abs().max() < 1e-4 and (ours.values - theirs.values).abs().max() < 1e-4
    assert torch.equal(at_once.root_position, one_by_one.root_position) and at_once.length == one_by_one.length


def test_features_are_the_hidden_states_after_the_tapped_layers(tiny_target):
    """Tap i is hidden_states[i + 1] of an ordinary forward, for the prompt and for the nodes; several taps side by side."""
    inputs, tree, taps = prompt_inputs(8, grids=ONE), CandidateTree([3, 9, 1], [-1, 0, 1], [0, 1, 2], [0.0] * 3), [0, 1, 3]
    sequence, _, prompt_features = tiny_target.prefill(inputs, taps)
    features = torch.cat([prompt_features, tiny_target.verify(sequence, tree, taps)[1]])
    states = library_forward(tiny_target, inputs, tree.tokens, output_hidden_states=True).hidden_states
    expected = torch.cat([states[tap + 1][0] for tap in taps], dim=-1)
    assert features.shape == (inputs["input_ids"].shape[1] + 3, 3 * 32) and (features - expected).abs().max() < 1e-4


@pytest.mark.parametrize("answer", [[7], [7, 3, 3, 20, 9]], ids=["one token", "five tokens"])
def test_teacher_forcing_reads_the_laws_of_a_known_answer(tiny_target, answer):
    """Row i is the law of answer[i] given the prompt and answer[:i]; features cover prompt and answer."""
    inputs = prompt_inputs(8, grids=ONE)
    logits, features = tiny_target.teacher_force(inputs, answer, TAPS)
    oracle = library_forward(tiny_target, inputs, answer, output_hidden_states=True)
    assert logits.shape == (len(answer), VOCAB) and (logits - oracle.logits[0, -len(answer) - 1 : -1]).abs().max() < 1e-4
    assert (features - torch.cat([oracle.hidden_states[tap + 1][0] for tap in TAPS], dim=-1)).abs().max() < 1e-4


@pytest.mark.parametrize("order", [(ONE, NONE), (NONE, ONE)], ids=["image first", "text first"])
def test_interleaved_generations_do_not_mix(tiny_target, order):
    """Two answers written turn by turn on one model are those written one after the other: the model remembers nothing."""
    prompts, alone = zip(*(lively(build_tiny(), 9, grids) for grids in order))
    runs = [decode(tiny_target, Oracle(inputs, answer, 2, wrong=1), inputs, max_new_tokens=20) for inputs, answer in zip(prompts, alone)]
    together, running = [[], []], [0, 1]
    while running:
        for i in list(running):
            if (round_ := next(runs[i], None)) is None:
                running.remove(i)
            else:
                together[i] += round_.tokens
    assert together == list(alone)


def test_target_is_left_as_it_was():
    """No parameter changes, and no forward hook is added by a second generation."""
    target, inputs = build_tiny(), prompt_inputs(3, grids=ONE)
    before = {name: weight.clone() for name, weight in target.model.named_parameters()}
    hooks = []
    for _ in range(3):
        generate(target, build_head(target), inputs, max_new_tokens=5)
        hooks.append(sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.model.modules()))
    assert hooks[0] == hooks[1] == hooks[2]
    assert all(torch.equal(weight, before[name]) for name, weight in target.model.named_parameters())


def test_a_batch_of_two_is_refused(tiny_target):
    """Batch 1 only; the error says how many came."""
    pair = {name: value.repeat(2, 1) for name, value in prompt_inputs(1, grids=NONE).items()}
    with pytest.raises(ValueError, match="batch size 2"):
        tiny_target.prefill(pair)


def test_left_padding_is_honoured_or_refused(tiny_target):
    """A padded prompt gives the unpadded answer, or a ValueError; never a third thing."""
    inputs = prompt_inputs(3, grids=NONE)
    padded = {name: torch.cat([torch.zeros(1, 3, dtype=torch.long), value], dim=1) for name, value in inputs.items()}
    answer = library_greedy(tiny_target, inputs, 12)
    try:
        assert generate(tiny_target, None, padded, max_new_tokens=12).tokens == answer
    except ValueError as refusal:
        assert "pad" in str(refusal)


SMALL = dict(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2)
HYBRID = dict(linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=2,
              num_experts_per_tok=1, moe_intermediate_size=8, shared_expert_intermediate_size=8, head_dim=8)  # fmt: skip


@pytest.mark.parametrize("family, config, fault", [
    ("MambaForCausalLM", dict(state_size=4), "position_ids"),
    ("BloomForCausalLM", dict(n_head=2), "position_ids"),  # ALiBi
    ("Qwen3NextForCausalLM", dict(num_attention_heads=2, num_key_value_heads=1, layer_types=["linear_attention", "full_attention"], **HYBRID), "LinearAttention"),
    ("T5ForConditionalGeneration", dict(d_ff=16, d_kv=8, num_heads=2), "encoder-decoder"),
])  # fmt: skip
def test_targets_that_cannot_be_rolled_back_are_refused_by_name(family, config, fault):
    """State that is no row of keys and values, or no way to give siblings one position: a ValueError naming model and reason."""
    model_class = getattr(transformers, family)
    with pytest.raises(ValueError, match=f"(?s){family}.*{fault}"):
        Target(model_class(model_class.config_class(**SMALL, **config)))


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_attention_without_a_tree_mask_is_refused(attention):
    """FlashAttention takes no 4-D mask; the error names it and the two that do."""
    model = build_tiny().model
    model.config._attn_implementation_internal = attention
    with pytest.raises(ValueError, match=f"{attention}.*sdpa.*eager"):
        Target(model)


WINDOWED = {  # prompt 12, window 8
    "all layers, no layer_types": ("MistralForCausalLM", {}),
    "all layers": ("Qwen2ForCausalLM", dict(use_sliding_window=True, max_window_layers=0)),
    "upper half": ("Qwen2ForCausalLM", dict(use_sliding_window=True, max_window_layers=2)),
    "alternating, soft-capped": ("Gemma2ForCausalLM", {}),
    "alternating, two rotary bases": ("Gemma3ForCausalLM", dict(layer_types=["sliding_attention", "full_attention"] * 2)),
}


def build_windowed(kind):
    family, changes = WINDOWED[kind]
    model_class = getattr(transformers, family)
    config = model_class.config_class(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                                      head_dim=8, max_position_embeddings=128, sliding_window=8, tie_word_embeddings=False, **changes)  # fmt: skip
    config._attn_implementation = "eager"
    model = widen(model_class(config).eval(), seed=3)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return Target(model)


@pytest.mark.parametrize("kind", WINDOWED)
def test_sliding_windows_follow_the_path(kind):
    """The window counts along the path, not along the packed rows; full and sliding layers of one model get different masks."""
    target, inputs = build_windowed(kind), prompt_inputs(5, grids=NONE)
    sequence, _, _ = target.prefill(inputs)
    assert_tree_equals_library(target, sequence, random_tree(5, 20, torch.Generator().manual_seed(3)), inputs)


@pytest.mark.parametrize("kind", WINDOWED)
def test_sliding_window_targets_decode_losslessly(kind):
    """Window 8, prompt 12, 24 new tokens: the library's greedy text with a rejected, a right and a mixed draft."""
    target = build_windowed(kind)
    inputs, answer = lively(target, 5, length=24)
    for drafter in (Oracle(inputs, [(t + 1) % VOCAB for t in answer]), Oracle(inputs, answer, depth=10), Oracle(inputs, answer, wrong=2)):
        assert generate(target, drafter, inputs, max_new_tokens=24).tokens == answer


def test_an_ignored_window_is_caught(monkeypatch):
    """A target that declares only full attention sees too far in its tree passes, and the text shows it."""
    target = build_windowed("all layers")
    inputs, answer = lively(target, 5, length=24)
    monkeypatch.setattr(target, "layer_types", {"full_attention"})
    assert generate(target, Oracle(inputs, answer, depth=10), inputs, max_new_tokens=24).tokens != answer


def test_a_token_alone_is_read_as_the_library_reads_it():
    """bf16, where the last bits decide ties: the logits of one-token passes equal those of the library's own loop."""
    target = Target(build_tiny(1).model.to(torch.bfloat16))
    inputs = prompt_inputs(5)
    config = transformers.GenerationConfig(max_new_tokens=16, do_sample=False, pad_token_id=0)
    own = target.model.generate(**inputs, generation_config=config, output_logits=True, return_dict_in_generate=True)
    done = generate(target, None, inputs, max_new_tokens=16, end_ids=[], keep_logits=True)
    assert torch.equal(torch.cat([r.logits for r in done.rounds]), torch.cat(own.logits).float())


def test_embed_and_lm_head_are_the_raw_tables(tiny_target):
    """The head borrows the table's rows as they are and the output matrix without a soft-cap, tied or untied."""
    for target in (tiny_target, build_tiny(tied=False), build_windowed("alternating, soft-capped")):
        ids, hidden = torch.tensor([3, 9]), torch.randn(2, 32)
        assert torch.equal(target.embed(ids), target.model.get_input_embeddings().weight[ids])
        assert (target.lm_head(hidden) - hidden @ target.model.get_output_embeddings().weight.T).abs().max() < 1e-4


# ---- the prompt ----

TURN = "{%% for m in messages %%}<|im_start|>%s<|im_end|>{%% endfor %%}"
TEMPLATES = {  # how the templates of text-only targets treat a turn that is a list of parts: drop it, print it, choke on it
    "drops it": TURN % "{{ m.content if m.content is string else '' }}",
    "prints it": TURN % "{{ m.content }}",
    "adds to it": TURN % "{{ '' + m.content }}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_text_only_prompt_reaches_the_target(tiny_target, template):
    """A tokenizer's template gets the turn as plain text, and a page for it is refused instead of dropped."""
    tokenizer = load_processor(ROOT / "checkpoints" / "target").tokenizer
    tokenizer.chat_template = template
    target = Target(tiny_target.model, tokenizer)
    assert tokenizer.decode(target.encode("Read the chart.")["input_ids"][0]) == "<|im_start|>Read the chart.<|im_end|>"
    with pytest.raises(ValueError, match="takes no images"):
        target.encode("Read the chart.", [Image.new("RGB", (128, 128))])


def test_one_image_or_several(tiny_target):
    """Alone, in a list or in a tuple; without a processor the error says how to get one."""
    target, page = Target(tiny_target.model, load_processor(ROOT / "checkpoints" / "target")), Image.new("RGB", (128, 128), "red")
    alone, *others = [target.encode("Read.", images) for images in (page, [page], (page,))]
    assert all(torch.equal(alone[name], other[name]) for other in others for name in alone) and "pixel_values" in alone
    assert len(target.encode("Read.", [page, page])["image_grid_thw"]) == 2
    with pytest.raises(ValueError, match="without a processor"):
        tiny_target.encode("Read.")


def test_the_oracle_is_greedy_whatever_the_targets_config_says():
    """Sampling, beams and penalties of the model's own generation config are set aside for the call, and are there again after it."""
    target = build_tiny(3)
    inputs, answer = lively(target, 3)
    own = transformers.GenerationConfig(do_sample=True, num_beams=3, repetition_penalty=1.5, eos_token_id=answer[4], pad_token_id=0)
    target.model.generation_config = own
    assert target.library_generate(inputs, max_new_tokens=20, pad_token_id=0)[0, inputs["input_ids"].shape[1] :].tolist() == answer
    assert target.model.generation_config is own and Target(target.model).tree_error() < 1e-4
