"""Vision models of transformers, through the attention that they run by default."""

import pytest
import torch

from attnkit.interpret import explain
from attnkit.interpret.methods.table import methods_of

pytestmark = pytest.mark.slow  # transformers alone takes long to import

SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "image_size": 32,
    "patch_size": 8,
}
# how many prefix tokens, and which tokens the classifier reads
MODELS = {
    "ViT": (1, [0]),
    "DeiT": (2, [0]),
    "Beit": (1, range(1, 17)),
    "Dinov2": (1, range(17)),
    "Dinov2WithRegisters": (5, [0, *range(5, 21)]),
    "CLIP": (1, range(1, 17)),
    "Siglip": (0, range(16)),
    "IJepa": (0, range(16)),
}


def build(name):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")
    if name in ("CLIP", "Siglip"):
        config = config(vision_config=SIZES, num_labels=7)
    else:
        config = config(**SIZES, num_labels=7)
    model = getattr(transformers, f"{name}ForImageClassification")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_relevance_is_autograd_through_transformers_own_weights(name):
    model, (prefix, read) = build(name), MODELS[name]
    images, target = torch.randn(2, 3, 32, 32), torch.tensor([5, 2])
    seen = explain(model, images, target)
    assert seen.num_prefix_tokens == prefix
    model.set_attn_implementation("eager")
    output = model(images, output_attentions=True)
    y = output.logits.gather(1, target[:, None]).sum()
    weights = [one for one in output.attentions if one.shape[-2:] == (prefix + 16, prefix + 16)]
    assert len(weights) == 3
    matrix = torch.eye(prefix + 16).expand(2, -1, -1)
    for attention, gradient in zip(weights, torch.autograd.grad(y, weights), strict=True):
        matrix = matrix + (gradient * attention).relu().mean(dim=1) @ matrix
    expected = (matrix - torch.eye(prefix + 16))[:, [*read]].mean(dim=1).detach()
    torch.testing.assert_close(seen.tokens, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_every_method_gives_a_map(name):
    model, images = build(name), torch.randn(2, 3, 32, 32)
    for method in methods_of("patch"):
        seen = explain(model, images, method=method)
        assert seen.map.shape == (2, 4, 4), method
        assert seen.map.isfinite().all(), method
        assert not any("output projection" in note for note in seen.notes)


def test_windows_are_refused():
    transformers = pytest.importorskip("transformers")
    sizes = {"embed_dim": 12, "depths": [1, 1], "num_heads": [3, 3], "window_size": 4}
    config = transformers.SwinConfig(image_size=32, patch_size=4, num_labels=7, **sizes)
    model = transformers.SwinForImageClassification(config)
    with pytest.raises(ValueError, match="attends within windows, 4 an image; leave method out"):
        explain(model, torch.randn(2, 3, 32, 32), method="relevance")
    assert explain(model, torch.randn(2, 3, 32, 32), method="grad_cam").map.shape[0] == 2


@pytest.mark.parametrize("name", ["ViT", "Dinov2WithRegisters", "DeiT"])
def test_a_patch_is_hidden_from_eager_attention_as_from_torchs(name):
    model, images = build(name), torch.randn(2, 3, 32, 32)
    if name == "Dinov2WithRegisters":  # it also reads the mean of the patches
        with torch.no_grad():
            model.classifier.weight[:, SIZES["hidden_size"] :] = 0
    maps, kinds = [], []
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        seen = explain(model, images, 3, "occlusion")
        maps.append(seen.map)
        assert "patches hidden from all attention" in seen.notes
        assert (seen.map != 0).all()
        kinds.append("mask" in seen.trust(removals=["mask", "mean"]).curves)
    torch.testing.assert_close(*maps, atol=1e-5, rtol=1e-4)
    assert kinds == [True, True]


def test_of_attention_with_masks_of_another_kind_nothing_is_hidden():
    """What hides nothing is not called hidden: patches are painted then."""
    transformers = pytest.importorskip("transformers")

    def unmasked(module, query, key, value, attention_mask, **options):
        weights = (query @ key.mT * query.shape[-1] ** -0.5).softmax(dim=-1)
        return (weights @ value).transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("unmasked", unmasked)
    model, images = build("ViT"), torch.randn(2, 3, 32, 32)
    model.set_attn_implementation("unmasked")
    seen = explain(model, images, 3, "occlusion")
    assert seen.notes[0].startswith("patches not hidden: hidden patches still reach the logits")
    assert list(seen.trust().unavailable) == ["mask"]


def dinov2_of_one_layer():
    transformers = pytest.importorskip("transformers")
    sizes = SIZES | {"patch_size": 14, "image_size": 56, "num_hidden_layers": 1}
    config = transformers.Dinov2Config(**sizes, num_labels=7)
    return transformers.Dinov2ForImageClassification(config).eval()


def test_the_grid_at_sizes_that_the_patch_does_not_divide():
    model = dinov2_of_one_layer()
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        high, wide = torch.randint(28, 100, (2,), generator=draw).tolist()
        images = torch.randn(1, 3, high, wide, generator=draw)
        for method in ("attention", "input_gradient"):
            seen = explain(model, images, method=method)
            assert seen.map.shape == (1, high // 14, wide // 14), (method, high, wide)


def test_a_given_grid_of_patches_has_their_pixels_at_such_sizes():
    model, images = dinov2_of_one_layer(), torch.randn(2, 3, 76, 61)  # the patches have 70 x 56
    for method, options in (("input_gradient", {}), ("occlusion", {"removal": "colour"})):
        found, given = (
            explain(model, images, 3, method, grid=grid, **options).map for grid in (None, (5, 4))
        )
        torch.testing.assert_close(found, given)
    trust = explain(model, images, 3).trust(removals=["mean"])
    known = explain(model, images, 3, "input_gradient").trust(removals=["mean"])
    gap = "gap in logit, mean colour"
    assert trust[gap].input_gradient == pytest.approx(known[gap].map, rel=1e-4)


def test_tokens_behind_the_patches_of_a_detector():
    """YOLOS has a class token before the patches and 100 tokens of detections behind them."""
    transformers = pytest.importorskip("transformers")
    config = transformers.YolosConfig(**SIZES | {"image_size": [32, 48]}, num_labels=7)
    detector = transformers.YolosForObjectDetection(config).eval()

    class FirstDetection(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.detector = detector

        def forward(self, images):
            return self.detector(images).logits[:, 0]

    images = torch.randn(1, 3, 32, 48)
    seen = explain(FirstDetection(), images, method="attention")
    assert seen.map.shape == (1, 4, 6)
    assert (seen.num_prefix_tokens, seen.num_suffix_tokens) == (1, 100)
    assert seen.tokens.shape == (1, 125)
    torch.testing.assert_close(seen.map.flatten(1), seen.tokens[:, 1:25])
