import matplotlib
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.image import imread
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

from attnkit import (
    CBAM,
    ChannelAttention,
    MultiHeadAttention,
    SpatialAttention,
    SqueezeExcitation,
    ViT,
    capture_attention,
)
from attnkit.lightning import AttentionMaps, UserError
from attnkit.lightning.maps.layers import LayerMap, find_grid, layer_maps
from attnkit.lightning.maps.overlay import overlaid
from attnkit.lightning.maps.picture import draw_maps


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
@pytest.mark.parametrize("rollout", [False, True])
def test_the_map_lies_over_the_image_as_the_patches_do(num_prefix_tokens, rollout):
    image = torch.zeros(3, 21, 35)  # 3 x 5 patches
    image[:, 7:14, 21:28] = 1.0
    model = Bright(num_prefix_tokens)
    weights = AttentionMaps(rollout=rollout).attention_map(model, image)
    assert weights.shape == (3, 5)
    expected = torch.ones(3, 5)
    expected[1, 3] = torch.e**10
    expected = expected / (expected.sum() + num_prefix_tokens)
    if rollout:  # (weights + identity) / 2; without a class token the mean over queries
        expected = expected / 2 + (0 if num_prefix_tokens else 1 / 30)
    torch.testing.assert_close(weights, expected)


class Tokens(nn.Module):
    """Two blocks with a class token, the last one for all tokens or for that token only."""

    def __init__(self, last_row_only: bool) -> None:
        super().__init__()
        self.num_prefix_tokens = 1
        self.last_row_only = last_row_only
        self.embed = nn.Conv2d(1, 6, 2, stride=2)
        self.class_token = nn.Parameter(torch.randn(1, 1, 6))
        self.first = MultiHeadAttention(6, num_heads=3)
        self.last = MultiHeadAttention(6, num_heads=3)

    def forward(self, images):
        tokens = self.embed(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(tokens), -1, -1), tokens], 1)
        tokens = tokens + self.first(tokens)
        return self.last(tokens[:, :1], tokens) if self.last_row_only else self.last(tokens)[:, :1]


def test_rollout_is_the_product_of_the_layers():
    image = torch.randn(1, 6, 10)
    model = Tokens(last_row_only=False)
    images = image[None]
    tokens = model.embed(images).flatten(2).transpose(1, 2)
    tokens = torch.cat([model.class_token, tokens], 1)
    first = model.first.attention_weights(tokens)[0].mean(0)
    last = model.last.attention_weights(tokens + model.first(tokens))[0].mean(0)
    eye = torch.eye(16)
    expected = ((last + eye) / 2 @ (first + eye) / 2)[0, 1:].reshape(3, 5)
    torch.testing.assert_close(
        AttentionMaps(rollout=True).attention_map(model, image), expected.detach()
    )
    torch.testing.assert_close(
        AttentionMaps().attention_map(model, image), last[0, 1:].reshape(3, 5).detach()
    )
    torch.testing.assert_close(
        AttentionMaps(layer="first").attention_map(model, image),
        first[0, 1:].reshape(3, 5).detach(),
    )


@pytest.mark.parametrize("rollout", [False, True])
def test_a_last_block_for_the_class_token_only_gives_the_same(rollout):
    image = torch.randn(1, 6, 10)
    model, short = Tokens(False), Tokens(True)
    short.load_state_dict(model.state_dict())
    maps = AttentionMaps(rollout=rollout)
    torch.testing.assert_close(maps.attention_map(short, image), maps.attention_map(model, image))


@pytest.mark.parametrize("rollout", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_registers": 2},
        {"pooling": "mean"},
        {"pooling": "attention"},
        {"pooling": "mean", "num_registers": 2},
        {"pooling": "mean", "positions": "rotary2d"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_our_vit(options, rollout):
    vit, image = make_vit(**options), torch.randn(3, 6, 10)
    with torch.no_grad():  # so that the layers look at different places
        for parameter in vit.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    with capture_attention(vit) as captured:
        vit(image[None])
    first, second, *pool = (weights[0][0].mean(0) for weights in captured.values())
    eye = torch.eye(len(first))
    rows = second
    if rollout:
        rows = (second + eye[: len(second)]) / 2 @ ((first + eye) / 2)
    if pool:
        rows = pool[0] @ rows if rollout else pool[0]
    shown = rows.mean(0) if options.get("pooling") == "mean" else rows[0]
    expected = shown[-15:].reshape(3, 5)
    assert expected.std() > 1e-3
    weights = AttentionMaps(rollout=rollout).attention_map(vit, image)
    torch.testing.assert_close(weights, expected)


def make_vit(**options):
    options = {"dim": 12, "depth": 2, "num_heads": 3, "num_classes": 3, **options}
    return ViT(image_size=(6, 10), patch_size=2, **options).eval()


def test_registers_are_no_class_token():
    image = torch.randn(3, 6, 10)
    vit = make_vit(pooling="mean", num_registers=2)
    with capture_attention(vit, layers=-1) as captured:
        vit(image[None])
    (weights,) = captured["blocks.1.attention"]
    expected = weights[0].mean(0).mean(0)[2:].reshape(3, 5)  # over heads and over queries
    torch.testing.assert_close(AttentionMaps().attention_map(vit, image), expected)


def test_attention_pooling_beside_a_class_token():
    image = torch.randn(3, 6, 10)
    vit = make_vit(pooling="attention", class_token=True)
    assert AttentionMaps().attention_map(vit, image).shape == (3, 5)
    with pytest.raises(ValueError, match="rollout: the layers have different tokens, 16 and 15"):
        AttentionMaps(rollout=True).attention_map(vit, image)


@pytest.mark.parametrize(
    ("tokens", "size", "prefix", "expected"),
    [
        (196, (224, 224), range(9), (0, (14, 14))),
        (197, (224, 224), range(9), (1, (14, 14))),
        (201, (224, 224), range(9), (5, (14, 14))),
        (201, (224, 224), [5], (5, (14, 14))),
        (15, (21, 35), range(9), (0, (3, 5))),
        (16, (21, 35), range(9), (1, (3, 5))),
        (16, (35, 21), range(9), (1, (5, 3))),
        (7, (2, 14), range(9), (0, (1, 7))),
    ],
)
def test_find_grid(tokens, size, prefix, expected):
    assert find_grid(tokens, *size, prefix) == expected


def test_tokens_that_are_no_grid():
    message = "197 tokens do not form a grid over an image of 224 x 280 after 0 or 2 prefix tokens"
    with pytest.raises(ValueError, match=message):
        find_grid(197, 224, 280, [0, 2])


def picture(*maps):
    """The figure of one image under these maps, and its rows of panels."""
    image = torch.zeros(1, 1, 6, 10, dtype=torch.uint8)
    figure = draw_maps(image, [maps], ["true: a\nsays: b (93 %)"])
    return figure, [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]


def test_an_even_map_looks_even_and_has_a_scale():
    even = LayerMap("blocks.1.attention", "attention", torch.ones(3, 5), "image")
    figure, (top, below) = picture(even)
    assert top.get_title() == "true: a\nsays: b (93 %)"
    assert below.get_title("left") == "blocks.1.attention"
    (bar,) = (axes for axes in figure.axes if axes not in (top, below))
    assert bar.get_ylabel() == "attention: 1 is even"
    assert bar.get_ylim() == (0, 2)  # so that its colour is the middle one
    assert not list(below.texts)
    uneven = even._replace(values=torch.tensor([[0.5, 7.0]]), prefix=0.613)
    figure, (_, below) = picture(uneven)
    assert figure.axes[-1].get_ylim() == (0, 7)
    assert [text.get_text() for text in below.texts] == ["class and registers took 61 %"]
    gate = LayerMap("gate", "gate", torch.full((3, 5), 0.5), "image")
    assert picture(gate)[0].axes[-1].get_ylim() == (0, 1)


def test_each_place_has_one_colour_and_the_image_shows_through():
    """Of 6 x 7 pixels and 2 x 3 places: rows 0 to 2, columns 0 to 2, 3 and 4, 5 and 6."""
    values = np.array([[0.0, 0.5, 1.0], [2.0, 0.25, 0.75]])
    white = overlaid(np.ones((6, 7, 3)), values, top=1.0)
    assert white.shape == (240, 280, 3)  # 40 for each pixel
    scale = matplotlib.colormaps["OrRd"]
    for (row, column), pixels in {
        (0, 0): white[:120, :94], (0, 1): white[:120, 94:187], (1, 2): white[120:, 187:],
    }.items():  # fmt: skip
        expected = np.broadcast_to(scale(values[row, column])[:3], pixels.shape)
        np.testing.assert_allclose(pixels, expected)
    np.testing.assert_allclose(white[239, 0], scale(1.0)[:3])  # beyond the scale's end
    black = overlaid(np.zeros((6, 7, 3)), values, top=1.0)
    np.testing.assert_allclose(black, 0.68 * white)


def test_what_the_prefix_took():
    vit = make_vit(num_registers=2)
    image = torch.randn(3, 6, 10)
    (found,), _ = layer_maps(vit, image, -1, None)
    with capture_attention(vit, layers=-1) as captured:
        vit(image[None])
    (weights,) = captured["blocks.1.attention"]
    assert found.prefix == pytest.approx(float(weights[0].mean(0)[0, :3].sum()), abs=1e-6)
    assert layer_maps(make_vit(pooling="mean"), image, -1, None)[0][0].prefix is None


def test_gates_of_channels_are_a_curve():
    gate = LayerMap("se", "gate", torch.tensor([0.2, 0.9, 0.4]), "channels")
    _, (_, below) = picture(gate)
    (line,) = below.get_lines()
    assert line.get_ydata() == pytest.approx([0.2, 0.9, 0.4])
    assert (below.get_ylim(), below.get_ylabel()) == ((0, 1), "gate")


def test_what_each_kind_of_layer_gives():
    image = torch.rand(6, 8, 8)
    kinds = {
        "cbam": (CBAM(6, reduction=2), "gate", "image", (8, 8)),
        "se": (SqueezeExcitation(6, reduction=2), "gate", "channels", (6,)),
        "channel": (ChannelAttention(6), "attention", "pairs of channels", (6, 6)),
        "spatial": (SpatialAttention(6), "attention", "image", (8, 8)),
    }
    for name, (layer, kind, over, shape) in kinds.items():
        model = nn.Sequential(layer).eval()
        (found,), _ = layer_maps(model, image, -1, None)
        assert (found.kind, found.over, tuple(found.values.shape)) == (kind, over, shape), name
        if kind == "attention":
            assert found.values.mean() == pytest.approx(1, abs=1e-4)  # a multiple of even attention
        else:
            assert found.values.min() > 0
            assert found.values.max() < 1


def test_draws_in_a_plain_trainer(small_net, loader, make_trainer, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, name="", version="")
    maps = AttentionMaps(num_images=3, every_n_epochs=2)
    trainer = make_trainer(callbacks=[maps], logger=logger, max_epochs=4)
    module = small_net()
    module.class_names = [f"digit {number}" for number in range(10)]
    trainer.fit(module, loader, loader)
    trainer.test(module, loader, verbose=False)

    files = sorted(path.name for path in (tmp_path / "attention_maps").iterdir())
    assert files == ["epoch_001.png", "epoch_003.png", "test.png"]
    assert imread(tmp_path / "attention_maps" / "epoch_003.png").std() > 0.1
    assert len(EventAccumulator(str(tmp_path)).Reload().Images("val/attention")) == 2


def test_one_image_of_each_class(small_net, digits, make_trainer, tmp_path, monkeypatch):
    """The first batches of a test set that is in order hold one class only."""
    order = digits.tensors[1].argsort(stable=True)
    in_order = DataLoader(Subset(digits, order.tolist()), batch_size=4)
    titles = []
    monkeypatch.setattr(
        "attnkit.lightning.callbacks.attention_maps.draw_maps",
        lambda images, maps, said: titles.append(said) or draw_maps(images, maps, said),
    )
    maps = AttentionMaps(num_images=4, folder=tmp_path / "maps")
    make_trainer(callbacks=[maps]).test(small_net(), in_order, verbose=False)
    (said,) = titles
    assert [title.split("\n")[0] for title in said] == [f"true: {number}" for number in range(4)]
    assert all("says: " in title for title in said)
    assert [path.name for path in (tmp_path / "maps").iterdir()] == ["test.png"]


def test_training_is_the_same_with_it(small_net, loader, make_trainer):
    weights = []
    for callbacks in ([], [AttentionMaps()]):
        torch.manual_seed(3)
        module = small_net()
        make_trainer(callbacks=callbacks).fit(module, loader, loader)
        weights.append(module.attention.in_proj.weight)
    assert torch.equal(*weights)


def test_a_model_without_attention_fails_before_training(small_net, loader, make_trainer):
    module = small_net()
    module.attention = nn.Identity()
    trainer = make_trainer(callbacks=[AttentionMaps()], num_sanity_val_steps=0)
    with pytest.raises(UserError, match="neither attention with weights nor gates"):
        trainer.fit(module, loader, loader)
    assert trainer.global_step == 0
    with pytest.raises(UserError, match="layer: 3 is none of the 1 layers attention"):
        make_trainer(callbacks=[AttentionMaps(layer=3)]).test(small_net(), loader)


def test_refuses():
    with pytest.raises(ValueError, match="num_images: expected 1 or more, got 0"):
        AttentionMaps(num_images=0)


class Axial(nn.Module):
    """Positions are the means of 7 x 7 pixels; each looks at the brightest of its row, then of its
    column, in which all are then as bright as the brightest of their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.spatial = SpatialAttention(1, pattern="axial", residual=None)
        with torch.no_grad():
            for attention in (self.spatial.attention, self.spatial.column_attention):
                attention.in_proj.weight.copy_(torch.tensor([[0.0], [10.0], [1.0]]))
                attention.in_proj.bias.copy_(torch.tensor([1.0, 0.0, 0.0]))
                attention.out_proj.weight.fill_(1.0)
                attention.out_proj.bias.zero_()

    def forward(self, images):
        return self.spatial(F.avg_pool2d(images.mean(1, keepdim=True), 7))


def test_axial_attention_is_drawn_along_rows_and_columns():
    image = torch.zeros(3, 21, 35)  # 3 x 5 positions
    image[:, 7:14, 21:28] = 1.0
    model = Axial().eval()
    (rows, columns), _ = layer_maps(model, image, "*", None)
    assert [rows.layer, columns.layer] == ["spatial.attention", "spatial.column_attention"]
    share = torch.e**10 / (torch.e**10 + 4)
    expected = torch.ones(3, 5)
    expected[1] = 5 * (1 - share) / 4
    expected[1, 3] = 5 * share
    torch.testing.assert_close(rows.values, expected)
    after = model.spatial.attention.in_proj.weight[2].item() * share  # how bright row 1 is then
    share = torch.e ** (10 * after) / (torch.e ** (10 * after) + 2)
    expected = torch.full((3, 5), 3 * (1 - share) / 2)
    expected[1] = 3 * share
    torch.testing.assert_close(columns.values, expected)
    assert rows.over == columns.over == "image"


def test_a_map_of_one_row_or_column():
    for size, shapes in (((7, 35), [(1, 5), (1, 5)]), ((21, 7), [(3, 1), (3, 1)])):
        found, _ = layer_maps(Axial().eval(), torch.rand(3, *size), "*", None)
        assert [one.values.shape for one in found] == shapes


class Windows(nn.Module):
    """Attention within the upper and the lower half."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(1, num_heads=1)

    def forward(self, images):
        return self.attention(images.mean(1).reshape(2, -1, 1))


def test_windows_are_refused():
    with pytest.raises(UserError, match="layer: 'attention' attends within 2 parts of the image"):
        layer_maps(Windows(), torch.rand(3, 6, 5), -1, None)
