"""The shared block in vision towers of transformers that compute attention by themselves."""

import copy

import pytest
import torch

from attnkit import capture_attention, explain, replace_attention

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
         "num_attention_heads": 3, "image_size": 32, "patch_size": 8, "num_labels": 5}  # fmt: skip
WINDOWS = {"image_size": 32, "patch_size": 4, "embed_dim": 12, "depths": [2, 1],
           "num_heads": [2, 3], "window_size": 4, "num_labels": 5}  # fmt: skip
DATA2VEC = "Data2VecVisionForImageClassification"
SWIN = "Swinv2ForImageClassification"
TOWERS = {
    "swin v2": (SWIN, WINDOWS),
    "swin v2, no biases": (SWIN, {**WINDOWS, "qkv_bias": False}),
    "data2vec": (DATA2VEC, {**SIZES, "use_relative_position_bias": True}),
    "data2vec, shared bias": (DATA2VEC, {**SIZES, "use_shared_relative_position_bias": True}),
    "data2vec, positions": (DATA2VEC, {**SIZES, "use_absolute_position_embeddings": True}),
}


def build(name, attention="eager"):
    kind, settings = TOWERS[name]
    kind = getattr(transformers, kind)
    config = kind.config_class(**settings)
    if name[:4] == "data":
        config._attn_implementation = attention
    model = kind(config).double().eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def some_images(dtype=torch.float64):
    torch.manual_seed(2)
    return torch.randn(2, 3, 32, 32, dtype=dtype)


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_equal_outputs_gradients_and_weights(name, attention):
    theirs = build(name, attention)
    ours = copy.deepcopy(theirs)
    replaced = replace_attention(ours)
    assert len(replaced) == (3 if name.startswith("swin") else 2)
    results = []
    for model in (theirs, ours):
        images = some_images().requires_grad_()
        logits = model(images).logits
        logits.square().sum().backward()
        results.append((logits, images.grad, model))
    (expected, gradient, _), (output, other, _) = results
    assert expected.std() > 0.01
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(other, gradient)
    kept = dict(theirs.named_parameters())
    shared = {n: p for n, p in ours.named_parameters() if n in kept and "attention" not in n}
    assert shared
    for parameter_name, parameter in shared.items():
        torch.testing.assert_close(parameter.grad, kept[parameter_name].grad)
    for module in replaced:
        layer, before = ours.get_submodule(module.name), theirs.get_submodule(module.name)
        parts = before.self if name.startswith("swin") else before.attention
        gradients = [
            linear.weight.grad for linear in (parts.query, parts.key, parts.value)
        ]  # one parameter here
        torch.testing.assert_close(layer.attention.in_proj.weight.grad, torch.cat(gradients))
    if attention == "eager":
        weights = [
            model(some_images(), output_attentions=True).attentions for model in (theirs, ours)
        ]
        for one, two in zip(*weights, strict=True):
            torch.testing.assert_close(two, one)


def test_tables_learn():
    for name, table in (("swin v2", "logit_scale"), ("data2vec", "bias_table")):
        theirs = build(name)
        ours = copy.deepcopy(theirs)
        replace_attention(ours)
        found = []
        for model in (theirs, ours):
            model(some_images()).logits.square().sum().backward()
            found.append([p.grad for n, p in model.named_parameters() if n.endswith(table)])
        assert len(found[0]) == (3 if name == "swin v2" else 2)
        for one, other in zip(*found, strict=True):
            assert one.abs().max() > 0
            torch.testing.assert_close(other, one)


def test_captured_weights_are_theirs():
    model = build("data2vec")
    expected = model(some_images(), output_attentions=True).attentions
    replace_attention(model)
    with capture_attention(model) as captured:
        model(some_images())
    for one, other in zip(captured.values(), expected, strict=True):
        torch.testing.assert_close(one[0], other)


def test_it_is_explained():
    """Before, their attention could not be seen, but in that of the encoder's own class."""
    model = build("data2vec").float()
    replace_attention(model)
    seen = explain(model, some_images(torch.float32), method="relevance")
    assert seen.map.shape == (2, 4, 4)
    assert seen.num_prefix_tokens == 1


def test_those_that_ask_the_interface_are_told_so():
    kind = transformers.ViTForImageClassification
    model = kind(kind.config_class(**SIZES))
    with pytest.raises(ValueError, match=r'ViTAttention is not a cl.*set_attn_implementation."att'):
        replace_attention(model)
