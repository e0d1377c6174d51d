"""What the layers of a model do with an image, as maps and as a picture."""

from functools import partial

import matplotlib
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attnkit import (
    CBAM,
    ChannelAttention,
    MultiHeadAttention,
    SpatialAttention,
    SqueezeExcitation,
    ViT,
    capture_attention,
    explain,
)
from attnkit.interpret.layer_maps import LayerMap, draw_layer, layer_maps
from attnkit.interpret.picture import Scale, overlaid
from attnkit.lightning import Explained


class Bright(nn.Module):
    """Its tokens are the means of 7 x 7 patches; each looks at the brightest."""

    def __init__(self, num_prefix_tokens: int = 0) -> None:
        super().__init__()
        self.num_prefix_tokens = num_prefix_tokens
        self.attention = MultiHeadAttention(1, num_heads=1)
        with torch.no_grad():  # queries are 1, keys are ten times the brightness
            self.attention.in_proj.weight.copy_(torch.tensor([[0.0], [10.0], [1.0]]))
            self.attention.in_proj.bias.copy_(torch.tensor([1.0, 0.0, 0.0]))

    def forward(self, images):
        patches = F.avg_pool2d(images.mean(1, keepdim=True), 7).flatten(2).transpose(1, 2)
        return self.attention(F.pad(patches, (0, 0, self.num_prefix_tokens, 0)))


@pytest.mark.parametrize("num_prefix_tokens", [0, 1, 3])
def test_the_map_lies_over_the_image_as_the_patches_do(num_prefix_tokens):
    image = torch.zeros(3, 21, 35)  # 3 x 5 patches
    image[:, 7:14, 21:28] = 1.0
    (found,) = layer_maps(Bright(num_prefix_tokens), image[None], -1)
    expected = torch.ones(3, 5)
    expected[1, 3] = torch.e**10
    tokens = 15 + num_prefix_tokens
    torch.testing.assert_close(found.values[0], tokens * expected / (expected.sum() + tokens - 15))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_registers": 2},
        {"pooling": "mean"},
        {"pooling": "attention"},
        {"pooling": "attention", "class_token": True},
        {"pooling": "mean", "num_registers": 2},
        {"pooling": "mean", "positions": "rotary2d"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_the_last_layer_of_our_vit(options):
    """The class token's row, the pooling's, or the mean over the patches that are averaged."""
    vit, images = make_vit(**options), torch.randn(2, 3, 6, 10)
    with torch.no_grad():  # so that the layers look at different places
        for parameter in vit.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    with capture_attention(vit) as captured:
        vit(images)
    *_, weights = (weights[0].mean(1) for weights in captured.values())
    is_mean = options.get("pooling") == "mean"
    shown = weights[:, -15:].mean(1) if is_mean else weights[:, 0]
    expected = shown[:, -15:].reshape(2, 3, 5)
    assert expected.std() > 1e-3
    (found,) = layer_maps(vit, images, -1)
    torch.testing.assert_close(found.values, expected * weights.shape[2])
    seen = explain(vit, images, method="attention")
    if options.get("pooling") != "attention":  # which is a layer of its own there
        torch.testing.assert_close(found.values, seen.map * weights.shape[2])
    if seen.share is not None:
        torch.testing.assert_close(found.share, seen.share)


def test_a_layer_that_the_answer_does_not_depend_on_is_drawn_too():
    """As one that begins as the identity: the mean over all queries."""
    images = torch.randn(2, 6, 4, 5)
    model = nn.Sequential(SpatialAttention(6), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    (found,) = layer_maps(model, images, -1)
    with capture_attention(model) as captured:
        model(images)
    (weights,) = captured["0.attention"]
    torch.testing.assert_close(found.values, 20 * weights.mean(dim=(1, 2)).reshape(2, 4, 5))


def make_vit(**options):
    options = {"dim": 12, "depth": 2, "num_heads": 3, "num_classes": 3, **options}
    return ViT(image_size=(6, 10), patch_size=2, **options).eval()


@pytest.fixture
def picture(monkeypatch):
    """Makes the figure of one image under a map, and its rows of panels."""
    return partial(drawn, monkeypatch)


def drawn(monkeypatch, one, name="a"):
    monkeypatch.setattr("attnkit.interpret.layer_maps.layer_maps", lambda *_: [one])
    images = torch.zeros(1, 1, 6, 10, dtype=torch.uint8)
    figure = draw_layer(Explained(nn.Flatten(), images, images, names=[name]), -1).figure
    bars = "attention / uniform attention", "gate, mean of channels"
    return figure, [axes for axes in figure.axes if axes.get_ylabel() not in bars]


def test_an_even_map_looks_even_and_has_a_scale(picture):
    even = LayerMap("blocks.1.attention", torch.ones(1, 3, 5))
    figure, (top, below) = picture(even)
    assert top.get_title("left") == "a\npredicted: 0"
    assert below.get_title("left") == "blocks.1.attention"
    (bar,) = (axes for axes in figure.axes if axes not in (top, below))
    assert bar.get_ylabel() == "attention / uniform attention"
    assert bar.get_ylim() == (0, 2)  # so that its colour is the middle one
    assert not list(below.texts)
    uneven = even._replace(values=torch.tensor([[[0.5, 7.0]]]), share=torch.tensor([0.613]))
    figure, (_, below) = picture(uneven)
    assert figure.axes[-1].get_ylim() == (0, 7)
    assert [text.get_text() for text in below.texts] == ["class and register tokens: 61 %"]
    gate = LayerMap("gate", torch.full((1, 3, 5), 0.5), "gate, mean of channels")
    assert picture(gate)[0].axes[-1].get_ylim() == (0, 1)


def test_a_title_that_would_be_a_formula(picture, tmp_path):
    figure, _ = picture(LayerMap("a", torch.ones(1, 3, 5)), r"$5 or $\frac")
    figure.savefig(tmp_path / "picture.png")
    assert figure.axes[0].get_title("left") == "\\$5 or \\$\\frac\npredicted: 0"


def test_each_place_has_one_colour_and_the_image_shows_through():
    """Of 6 x 7 pixels and 2 x 3 places: rows 0 to 2, columns 0 to 2, 3 and 4, 5 and 6."""
    values = np.array([[0.0, 0.5, 1.0], [2.0, 0.25, 0.75]])
    scale = Scale(0.0, 1.0, "OrRd")
    white = overlaid(np.ones((6, 7, 3)), values, scale)
    assert white.shape == (240, 280, 3)  # 40 for each pixel
    colour = matplotlib.colormaps["OrRd"]
    for (row, column), pixels in {
        (0, 0): white[:120, :94], (0, 1): white[:120, 94:187], (1, 2): white[120:, 187:],
    }.items():  # fmt: skip
        expected = np.broadcast_to(colour(values[row, column])[:3], pixels.shape)
        np.testing.assert_allclose(pixels, expected)
    np.testing.assert_allclose(white[239, 0], colour(1.0)[:3])  # beyond the scale's end
    black = overlaid(np.zeros((6, 7, 3)), values, scale)
    np.testing.assert_allclose(black, 0.68 * white)


def test_gates_of_channels_are_a_curve(picture):
    gate = LayerMap("se", torch.tensor([[0.2, 0.9, 0.4]]), "gate", is_over_image=False)
    _, (_, below) = picture(gate)
    (line,) = below.get_lines()
    assert line.get_ydata() == pytest.approx([0.2, 0.9, 0.4])
    assert (below.get_ylim(), below.get_ylabel()) == ((0, 1), "gate")


def test_what_each_kind_of_layer_gives():
    images = torch.rand(2, 6, 8, 8)
    attention, gate = "attention / uniform attention", "gate"
    kinds = {
        "cbam": (CBAM(6, reduction=2), "gate, mean of channels", True, (8, 8)),
        "se": (SqueezeExcitation(6, reduction=2), gate, False, (6,)),
        "channel": (ChannelAttention(6), attention, False, (6, 6)),
        "spatial": (SpatialAttention(6), attention, True, (8, 8)),
    }
    for name, (layer, label, is_over_image, shape) in kinds.items():
        model = nn.Sequential(layer).eval()
        (found,) = layer_maps(model, images, -1)
        assert (found.label, found.is_over_image) == (label, is_over_image), name
        assert found.values.shape == (2, *shape), name
        if label == attention:
            assert found.values.mean() == pytest.approx(1, abs=1e-4)  # of uniform attention
        else:
            assert found.values.min() > 0
            assert found.values.max() < 1


class Windows(nn.Module):
    """Attention within the upper and the lower half."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(1, num_heads=1)

    def forward(self, images):
        return self.attention(images.mean(1).reshape(2 * len(images), -1, 1))


def test_windows_are_refused():
    with pytest.raises(ValueError, match="layer: 'attention' attends within 2 parts of the image"):
        layer_maps(Windows(), torch.rand(3, 3, 6, 5), -1)


def test_the_maps_of_a_batch_have_the_titles_of_what_is_explained():
    """By the file's last two names, the class, and the prediction of the largest logit."""
    vit, images = make_vit(), torch.randn(2, 3, 6, 10)
    known = {"truth": torch.tensor([2, 0]), "names": ["x/cat/1.png", "y"]}
    given = Explained(vit, images, images, ["a", "b", "c"], **known)
    figure, maps, _ = draw_layer(given, "*")
    assert [*maps] == ["blocks.0.attention", "blocks.1.attention"]
    for number, image in enumerate(images):
        for one in layer_maps(vit, image[None], "*"):
            torch.testing.assert_close(maps[one.layer][number], one.values[0])
    predicted = ["abc"[number] for number in vit(images).argmax(1)]
    titles = [axes.get_title("left") for axes in figure.axes]
    assert titles[:2] == [
        f"cat/1.png\ntrue: c\npredicted: {predicted[0]}", f"y\ntrue: a\npredicted: {predicted[1]}"
    ]  # fmt: skip
