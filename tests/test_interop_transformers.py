"""`attn_implementation="attnkit"` against "eager" in transformers' models with random weights."""

from collections import Counter

import pytest
import torch

import attnkit
from attnkit import interop

transformers = pytest.importorskip("transformers")
from transformers import masking_utils  # noqa: E402

from attnkit.interop.transformers import attention  # noqa: E402
from attnkit.interop.transformers_masks import MaskTensor  # noqa: E402

interop.register_transformers()

TOKENS, SHORTER = 11, 7
SIZES = {"vocab_size": 53, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
POSITIONS = {"max_position_embeddings": 64}
TEXT = {**SIZES, **SPECIAL, **POSITIONS, "num_attention_heads": 6, "num_key_value_heads": 3}
HEADS = {**SIZES, **SPECIAL, **POSITIONS, "num_attention_heads": 3}
IMAGES = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
          "num_attention_heads": 3, "image_size": 32, "patch_size": 8}  # fmt: skip
BOTH = {"vocab_size": 53, "d_model": 24, "num_heads": 3, "decoder_start_token_id": 0, **SPECIAL}
BART = {**BOTH, **POSITIONS, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3,
        "decoder_attention_heads": 3, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40}  # fmt: skip
TOWERS = {"text_config": HEADS, "vision_config": IMAGES}
CAUSAL, SLIDING, PADDED = "Causal & Padding", "Window & Padding", "Padding"
# class, settings, and the masks of its attentions where some text is padded
MODELS = {
    "llama": ("LlamaForCausalLM", TEXT, {CAUSAL: 2}),
    "mistral": ("MistralForCausalLM", {**TEXT, "sliding_window": 5}, {SLIDING: 2}),
    "qwen2": (
        "Qwen2ForCausalLM",
        {**TEXT, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        {CAUSAL: 1, SLIDING: 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {**TEXT, "head_dim": 10}, {CAUSAL: 2}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {**TEXT, "head_dim": 4, "sliding_window": 5, "attn_logit_softcapping": 0.7},
        {SLIDING: 1, CAUSAL: 1},
    ),
    "llama4": (
        "Llama4ForCausalLM",
        {**TEXT, "head_dim": 4, "attention_chunk_size": 5, "num_local_experts": 2,
         "intermediate_size_mlp": 40},
        {"Dense": 2},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {**TEXT, "head_dim": 4, "sliding_window": 5, "num_local_experts": 2,
         "num_experts_per_tok": 1},
        {SLIDING: 1, CAUSAL: 1},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 53, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 64, **SPECIAL,
         "scale_attn_by_inverse_layer_idx": True},
        {CAUSAL: 2},
    ),
    "bert": ("BertForMaskedLM", HEADS, {PADDED: 2}),
    "modernbert": (
        "ModernBertForMaskedLM",
        {**HEADS, "local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1,
         "sep_token_id": 2},
        {PADDED: 1, SLIDING: 1},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {**BOTH, "d_kv": 4, "d_ff": 40, "num_layers": 2},
        {"Padding + bias": 4, "Causal + bias": 2},
    ),
    "bart": ("BartForConditionalGeneration", BART, {PADDED: 4, "Causal": 2}),
    "whisper": (
        "WhisperForConditionalGeneration",
        {**BART, "num_mel_bins": 5, "max_source_positions": 13, "max_target_positions": 64},
        {"none": 4, "Causal": 2},
    ),
    "vit": ("ViTForImageClassification", {**IMAGES, "num_labels": 7}, {"none": 2}),
    "dinov2": ("Dinov2ForImageClassification", {**IMAGES, "num_labels": 7}, {"none": 2}),
    "siglip": ("SiglipModel", TOWERS, {"none": 2, PADDED: 2}),
    "clip": ("CLIPModel", {**TOWERS, "projection_dim": 8}, {"none": 2, CAUSAL: 2}),
}  # fmt: skip
DECODERS = ["llama", "mistral", "qwen2", "gemma2", "gpt2"]


def build(name):
    """In float32: several of the eager functions take softmax in it whatever the model is in."""
    kind, settings, _ = MODELS[name]
    kind = getattr(transformers, kind)
    model = kind(kind.config_class(**settings)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    return model


def some_tokens(num_tokens=TOKENS):
    torch.manual_seed(2)
    tokens = torch.randint(3, 52, (2, num_tokens))
    tokens[:, 5] = 52  # the largest is the one that CLIP pools: no padding
    return tokens


def real_tokens(side):
    real = torch.ones(2, TOKENS, dtype=torch.long)
    real[1, slice(4) if side == "left" else slice(-4, None)] = 0
    return real


def some_inputs(name, side):
    tokens, images = some_tokens(), torch.randn(2, 3, 32, 32)
    if name in ("vit", "dinov2"):
        return {"pixel_values": images}
    if name == "whisper":
        return {"input_features": torch.randn(2, 5, 26), "decoder_input_ids": tokens}
    inputs = {"input_ids": tokens, "attention_mask": real_tokens(side)}
    if name in ("siglip", "clip"):
        inputs["pixel_values"] = images
    if name in ("t5", "bart"):
        inputs["decoder_input_ids"] = some_tokens(SHORTER)
    return inputs


def by_both(model, run):
    """What `run` gives by the model's own attention and by ours, and the masks and kernels."""
    model.set_attn_implementation("eager")
    expected = run(model)
    model.set_attn_implementation("attnkit")
    with interop.record_masks(model) as record:
        return expected, run(model), record


def masks_of(record):
    counts = Counter()
    for counter in record.counts.values():
        for (mask, _), times in counter.items():
            counts[mask] += times
    return counts


def check_model(name, side):
    model, inputs = build(name), some_inputs(name, side)
    with attnkit.record_backends(model) as kernels, torch.no_grad():
        expected, output, record = by_both(model, lambda model: model(**inputs))
    values = [key for key in ("logits", "image_embeds", "text_embeds") if key in expected]
    assert values
    for key in values:
        one, other = expected[key], output[key]
        if one.shape[:2] == (2, TOKENS) and "decoder_input_ids" not in inputs:
            real = inputs["attention_mask"].bool()  # what padding sees differs and concerns no one
            assert other.isfinite().all()
            one, other = one[real], other[real]
        assert one.std() > 0.01
        torch.testing.assert_close(other, one, atol=2e-5, rtol=2e-5)
    assert masks_of(record) == MODELS[name][2]
    for module, counter in record.counts.items():
        ran = Counter()
        for (_, kernel), times in counter.items():
            ran[kernel] += times
        assert kernels.counts[module] == ran


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_the_models_own(name):
    check_model(name, "right")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("vit", "dinov2")])
def test_outputs_with_padding_on_the_left(name):
    check_model(name, "left")


FUNCTIONS = {
    "causal": lambda: masking_utils.causal_mask_function,
    "sliding": lambda: masking_utils.sliding_window_causal_mask_function(3),
    "everything": lambda: masking_utils.bidirectional_mask_function,
    "both ways": lambda: masking_utils.sliding_window_bidirectional_mask_function(2),
    "chunked": lambda: masking_utils.chunked_causal_mask_function(3, torch.tensor([0, 2])),
    "either": lambda: masking_utils.or_masks(
        masking_utils.causal_mask_function, lambda batch, head, query, key: key == query + 2
    ),
    "own": lambda: lambda batch, head, query, key: key <= query + 1,
}
SEQUENCES = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 2]])
IN_SEQUENCE = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [4, 0, 1, 2, 3, 4, 0]])


def made(**given):
    """Our mask and transformers' own."""
    table = masking_utils.AttentionMaskInterface._global_mapping
    given = {"batch_size": 2, "q_length": 7, "kv_length": 7, **given}
    expected = table["sdpa"](**given, allow_is_causal_skip=False)
    return table["attnkit"](**given, allow_is_causal_skip=False), expected


@pytest.mark.parametrize("name", FUNCTIONS)
def test_masks_are_the_models_own(name):
    real = torch.arange(13) < torch.tensor([[11], [5]])
    for padding in (None, real, real.flip(1), real | True):
        for sizes in (
            {},
            {"q_length": 5, "kv_length": 11, "q_offset": 6},  # with a cache
            {"q_length": 5, "kv_length": 13, "q_offset": torch.tensor(4)},  # of fixed length
            {"q_length": 5, "kv_length": 7, "q_offset": 6, "kv_offset": 4},  # of a window
        ):
            mask, expected = made(mask_function=FUNCTIONS[name](), attention_mask=padding, **sizes)
            if type(mask) is MaskTensor:
                typed = mask.mask.dense(*mask.shape[2:], mask.device).expand_as(expected)
                assert torch.equal(typed, expected), (name, sizes)
                assert "Dense" not in str(mask.mask)
            else:
                assert torch.equal(mask, expected)
            is_typed = name in ("causal", "sliding", "both ways")
            has_padding = padding is not None and not padding.all()
            if not sizes:
                assert (type(mask) is MaskTensor) == (
                    is_typed or (name == "everything" and has_padding)
                )


def test_packed_masks_are_the_models_own():
    for name in ("causal", "sliding", "own"):
        function = masking_utils.and_masks(
            masking_utils.remap_positions_for_packed_sequence(FUNCTIONS[name](), IN_SEQUENCE),
            masking_utils.packed_sequence_mask_function(SEQUENCES),
        )
        mask, expected = made(mask_function=function)
        assert (type(mask) is MaskTensor) == (name != "own")
        if name == "own":
            continue
        assert mask.mask.parts[0].lengths.tolist() == [3, 4, 1, 5, 1]
        joined = mask.mask.dense(14, 14, mask.device)[0, 0]
        assert torch.equal(joined, torch.block_diag(*expected[:, 0]).bool())


def test_positions_that_do_not_count_up_are_evaluated():
    function = masking_utils.and_masks(
        masking_utils.remap_positions_for_packed_sequence(FUNCTIONS["sliding"](), 2 * IN_SEQUENCE),
        masking_utils.packed_sequence_mask_function(SEQUENCES),
    )
    mask, expected = made(mask_function=function)
    assert torch.equal(mask, expected)
    assert type(mask) is torch.Tensor


def test_other_masks_of_transformers_are_not_read(monkeypatch):
    """A version whose windows are wider gets booleans, and no mask of the same name."""

    def wider(sliding_window):
        def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
            return kv_idx >= q_idx - sliding_window

        return inner_mask

    monkeypatch.setattr(masking_utils, "sliding_window_overlay", wider)
    try:
        interop.register_transformers()
        mask, expected = made(mask_function=FUNCTIONS["sliding"]())
        assert type(mask) is torch.Tensor
        assert torch.equal(mask, expected)
    finally:
        monkeypatch.undo()
        interop.register_transformers()


def test_a_mask_that_a_model_reads_or_writes_is_its_numbers():
    mask, expected = made(mask_function=FUNCTIONS["causal"]())
    assert mask.shape == (2, 1, 7, 7)
    assert mask.dtype == torch.bool
    whole = mask[:, :, :, :7].to("cpu").detach()
    assert isinstance(whole, MaskTensor)
    assert isinstance(whole.mask, attnkit.Causal)
    part = mask[:, :, 2:, :]
    assert torch.equal(part, expected[:, :, 2:])
    assert type(part) is torch.Tensor
    mask, expected = made(mask_function=FUNCTIONS["causal"](), attention_mask=torch.eye(2, 7) == 0)
    mask[:, :, :, 5] = True
    expected[:, :, :, 5] = True
    query = torch.randn(2, 3, 7, 5)
    output, _ = attention(torch.nn.Module(), query, query, query, mask)
    expected = attnkit.attend(query, query, query, mask=expected)
    assert torch.equal(output, expected.transpose(1, 2))


def test_what_is_not_computed_is_refused():
    query, module = torch.randn(1, 3, 7, 5), torch.nn.Linear(1, 1)
    for name, what in (
        ("sinks", "attention sinks"),
        ("indices", "a choice of keys for each query"),
        ("block_indices", "a choice of keys for each query"),
    ):
        with pytest.raises(ValueError, match=f'{name}: Linear has {what}.*implementation."eager"'):
            attention(module, query, query, query, None, **{name: torch.zeros(3)})
    ends = torch.tensor([0, 3, 7])
    causal, _ = made(batch_size=1, mask_function=FUNCTIONS["causal"]())
    with pytest.raises(ValueError, match=r"cu_seq_lens_q: 2 sequences.*give position_ids"):
        attention(module, query, query, query, causal, cu_seq_lens_q=ends, cu_seq_lens_k=ends)


def test_sequences_given_by_their_ends():
    query = torch.randn(1, 3, 7, 5)
    ends = {"cu_seq_lens_q": torch.tensor([0, 3, 7]), "cu_seq_lens_k": torch.tensor([0, 3, 7])}
    for is_causal in (True, False):
        output, _ = attention(torch.nn.Module(), query, query, query, None,
                              is_causal=is_causal, **ends)  # fmt: skip
        mask = attnkit.Packed([3, 4])
        mask = mask & attnkit.Causal() if is_causal else mask
        expected = attnkit.attend(query, query, query, mask=mask, backend="reference")
        torch.testing.assert_close(output.transpose(1, 2), expected)


class PackedEncoder(torch.nn.Module):
    """Attention of two sequences, as models of transformers call it."""

    def forward(self, query):
        function = transformers.AttentionInterface().get_interface("attnkit", None)
        ends = torch.tensor([0, 3, 7])
        options = {"is_causal": False, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        return function(self, query, query, query, None, **options)[0]


def test_captured_weights_are_those_of_attend():
    query, model = torch.randn(1, 3, 7, 5), PackedEncoder()
    with attnkit.capture_attention(model) as captured:
        model(query)
    expected = attnkit.attention_weights(query, query, mask=attnkit.Packed([3, 4]))
    torch.testing.assert_close(captured[""][0], expected)


def test_one_query_has_booleans():
    """Its mask is made outside of the program that transformers compiles for decoding."""
    real = torch.ones(2, 7, dtype=torch.bool).index_fill(1, torch.tensor([0]), False)
    mask, expected = made(
        q_length=1, q_offset=6, mask_function=FUNCTIONS["sliding"](), attention_mask=real
    )
    assert type(mask) is torch.Tensor
    assert torch.equal(mask, expected)


def test_learned_queries_and_weights():
    query, key, value = torch.randn(1, 3, 2, 5), torch.randn(2, 3, 7, 5), torch.randn(2, 3, 7, 4)
    given = (query, key, value, torch.randn(1, 1, 2, 7))
    output, weights = attention(torch.nn.Module(), *given, scaling=0.3, output_attentions=True)
    expected = (0.3 * query @ key.mT + given[3]).softmax(dim=-1)
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(output, (expected @ value).transpose(1, 2))


def test_dropout_is_of_training_alone():
    kind, settings = transformers.LlamaForCausalLM, {**TEXT, "attention_dropout": 0.5}
    model = kind(kind.config_class(**settings))
    model.set_attn_implementation("attnkit")
    tokens = some_tokens()
    one, other = model(tokens).logits, model(tokens).logits
    assert not torch.allclose(one, other)
    model.eval()
    assert torch.equal(model(tokens).logits, model(tokens).logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("num_items", [1, 2])
def test_packed_sequences(name, num_items):
    lengths = [[3, 7, 1], [10, 1]][:num_items]
    positions = [torch.cat([torch.arange(length) for length in item]) for item in lengths]
    given = {"input_ids": some_tokens()[:num_items], "position_ids": torch.stack(positions)}
    model = build(name)
    expected, output, record = by_both(model, lambda model: model(**given, use_cache=False).logits)
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)
    assert all(mask.startswith("Packed & ") for mask in masks_of(record))
    if num_items > 1:  # whoever listens sees items
        with attnkit.capture_attention(model) as captured:
            assert torch.allclose(model(**given, use_cache=False).logits, expected, atol=2e-5)
        assert "[2, " in str(captured)


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_generated_tokens(name):
    model = build(name)
    given = {"input_ids": some_tokens(), "attention_mask": real_tokens("left")}
    for options in (
        {},
        {"num_beams": 3},
        {"cache_implementation": "static"},
        {"use_cache": False},
    ):
        options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, **options}
        expected, tokens, record = by_both(
            model, lambda model, options=options: model.generate(**given, **options)
        )
        assert torch.equal(tokens, expected)
        assert tokens.shape == (2, TOKENS + 9)
        assert record.counts


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DECODERS, "bert", "modernbert", "t5"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients(name, checkpointing):
    model, inputs = build(name), some_inputs(name, "right")
    labels = some_tokens(SHORTER if name == "t5" else TOKENS)
    if name != "t5":
        labels = labels.masked_fill(inputs["attention_mask"] == 0, -100)
    if checkpointing:
        model.gradient_checkpointing_enable()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    model.train()

    def gradients(model):
        model.zero_grad()
        model(**inputs, labels=labels, use_cache=False).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    expected, actual, _ = by_both(model, gradients)
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_compiled_and_exported():
    model = build("mistral")
    model.set_attn_implementation("attnkit")
    given = {"input_ids": some_tokens(), "attention_mask": real_tokens("right")}
    expected = model(**given).logits
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(**given).logits, expected)
    exported = torch.export.export(model, (), {**given, "use_cache": False}, strict=False)
    output = exported.module()(**given, use_cache=False)
    torch.testing.assert_close(output.logits, expected)
    for layer in model.model.layers:  # alone, whose mask is made outside of them
        layer.compile(backend="eager")
    torch.testing.assert_close(model(**given).logits, expected)


@pytest.mark.slow
def test_a_table_of_what_ran():
    model = build("qwen2")
    with interop.record_masks(model) as record:
        assert str(record) == 'no attention ran by attn_implementation="attnkit"'
        model.set_attn_implementation("attnkit")
        model(some_tokens())
    assert str(record) == (
        "module                    mask    kernel\n"
        "model.layers.0.self_attn  Causal  flash ×1\n"
        "model.layers.1.self_attn  Window  flash ×1"
    )
