"""Our ViT with timm's weights; random ones that timm saved stand in for pretrained ones."""

import logging

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed

from attnkit.interop import PretrainedViT

# timm's test_vit: 64 wide, 6 layers, 2 heads; 160 pixels, patch 16
OURS = {"dim": 64, "depth": 6, "num_heads": 2, "mlp_ratio": 3.0}
SAME = {**OURS, "image_size": 160, "patch_size": 16, "num_classes": 11}


@pytest.fixture(scope="module")
def theirs(stand_in):
    return stand_in


@pytest.fixture(scope="module")
def saved(stand_in_files):
    folder = stand_in_files
    torch.save(PretrainedViT(pretrained=folder / "hf", **SAME).state_dict(), folder / "ours.pth")
    torch.save({"conv_proj.weight": torch.ones(2)}, folder / "other.pth")
    return folder


def said(caplog):
    return [r.getMessage() for r in caplog.records if r.name.endswith(("pretrained", "backbones"))]


@pytest.mark.parametrize("form", ["net.safetensors", "hf", "ours.pth"])
def test_equal_logits(theirs, saved, form):
    images = torch.randn(2, 3, 160, 160)
    ours = PretrainedViT(pretrained=saved / form, **SAME).eval()
    torch.testing.assert_close(ours(images), theirs(images), atol=1e-5, rtol=1e-4)


def test_a_name_of_timms(theirs, monkeypatch):
    create, asked = timm.create_model, []

    def offline(name, pretrained, **options):
        asked.append((name, pretrained))
        network = create(name, **options)
        network.load_state_dict(theirs.state_dict())
        return network

    monkeypatch.setattr(timm, "create_model", offline)
    ours = PretrainedViT(pretrained="test_vit", **SAME).eval()
    assert asked == [("test_vit", True)]
    images = torch.randn(2, 3, 160, 160)
    torch.testing.assert_close(ours(images), theirs(images), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("form", ["net.safetensors", "hf"])
def test_another_size_and_number_of_classes(theirs, saved, caplog, form):
    caplog.set_level(logging.INFO, "attnkit")
    options = {**SAME, "image_size": (96, 64), "num_classes": 4, "in_channels": 1}
    ours = PretrainedViT(pretrained=saved / form, **options)
    expected = resample_abs_pos_embed(theirs.pos_embed, (6, 4), num_prefix_tokens=1)[:, 1:]
    torch.testing.assert_close(ours.position_table, expected)
    patches = theirs.patch_embed.proj.weight.sum(dim=1, keepdim=True)
    torch.testing.assert_close(ours.patch_embed.weight, patches)
    assert ours(torch.randn(2, 1, 96, 64)).shape == (2, 4)
    (line,) = said(caplog)
    assert line.endswith("its head for 11 classes is replaced by one for 4")


def test_with_another_score(saved, caplog):
    """One with weights of its own, which no pretrained network has."""
    caplog.set_level(logging.INFO, "attnkit")
    ours = PretrainedViT(pretrained=saved / "hf", score="general", **SAME)
    plain = PretrainedViT(pretrained=saved / "hf", **SAME)
    assert torch.equal(ours.blocks[3].mlp.fc1.weight, plain.blocks[3].mlp.fc1.weight)
    assert "has no blocks.0.attention.score" in said(caplog)[0]
    assert "these start untrained" in said(caplog)[0]


WRONG = {
    "no name, no file": ("vit_smal", {}, "pretrained: no file or folder vit_smal"),
    "no weights": ("vit_small_patch16_18x2_224", {}, "timm has no weights for vit_small_patch16"),
    "no network": ("vit_tiny_patch16_224", {}, "cannot be loaded: no network connection"),
    "no ViT": ("other.pth", {}, "holds no Vision Transformer under timm's or attnkit's names"),
    "wider": (
        "net.safetensors", {"dim": 96, "num_heads": 3},
        "is another network: dim is 64 there, 96 here; model.dim=64$",
    ),
    "heads": ("hf", {"num_heads": 4}, "num_heads is 2 there, 4 here; model.num_heads=2$"),
    "several": (
        "hf", {"depth": 2, "layer_scale": 0.1, "positions": "sincos2d"},
        "depth is 6 there, 2 here, positions is learned there, None here, layer_scale is None there"
        r", 1.0 here; model.depth=6 model.positions=\"learned\" model.layer_scale=null$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named(saved, case):
    given, options, message = WRONG[case]
    path = saved / given
    with pytest.raises(ValueError, match=message) as error:
        PretrainedViT(pretrained=path if path.exists() else given, **{**SAME, **options})
    assert "\n" not in str(error.value)


def test_without_weights_it_is_our_vit():
    torch.manual_seed(0)
    ours = PretrainedViT(**SAME)
    assert ours(torch.zeros(1, 3, 160, 160)).shape == (1, 11)
