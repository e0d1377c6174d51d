"""Tokens lie where the model made them, wherever special tokens stand and whatever the size."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import attnkit
from attnkit.core.capture.watch import watch_attention
from attnkit.interpret.layer_maps import layer_maps
from attnkit.interpret.methods.grid import find_grid, patch_grid, token_grids
from attnkit.interpret.report.attention import MOST_ROWS, attention_of, heads_data

DIM = 12


class Patches(nn.Module):
    """Patches embedded in one of several ways, special tokens around them, one attention."""

    def __init__(self, way="convolution", before=0, behind=0, patch=(4, 4)):
        super().__init__()
        self.way, self.before, self.patch = way, before, patch
        self.embed = nn.Conv2d(3, DIM, patch, patch)
        self.special = nn.Parameter(torch.randn(1, before + behind, DIM))
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.between = nn.Conv2d(DIM, DIM, 3, padding=1, groups=DIM)
        self.head = nn.Linear(DIM, 5)

    def forward(self, images):
        high, wide = self.patch
        if self.way == "padded":
            below, right = -images.shape[2] % high, -images.shape[3] % wide
            images = F.pad(images, (0, right, 0, below))
        if self.way == "product":  # nothing returns a map
            folded = F.unfold(images, self.patch, stride=self.patch).transpose(1, 2)
            tokens = F.linear(folded, self.embed.weight.flatten(1))
        else:
            map = self.embed(images)
            if self.way == "convolution between":
                map = map + 0.3 * self.between(map)
            if self.way == "convolution between, unseen":
                map = map + 0.3 * F.conv2d(map, self.between.weight, padding=1, groups=DIM)
            tokens = map.flatten(2).transpose(1, 2)
        special = self.special.expand(len(images), -1, -1)
        if self.way == "mean":  # as CLIP's attention pooling
            special = special + tokens.mean(dim=1, keepdim=True)
        tokens = torch.cat([special[:, : self.before], tokens, special[:, self.before :]], dim=1)
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        return self.head(tokens.mean(dim=1))


def keys(model, images):
    with torch.no_grad(), watch_attention(model) as calls:
        model(images)
    return calls[0].key.transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("way", "before", "behind"),
    [
        ("convolution", 0, 0),
        ("convolution", 2, 3),
        ("padded", 0, 1),
        ("product", 1, 0),
        ("product", 2, 3),
        ("convolution between", 1, 0),
        ("convolution between, unseen", 2, 3),
        ("mean", 0, 1),
        ("mean", 2, 3),
    ],
)
def test_a_patch_that_is_changed_changes_the_token_of_its_place(way, before, behind):
    draw = torch.Generator().manual_seed(before + 5 * behind)
    for _ in range(6):
        patch = tuple(torch.randint(3, 6, (2,), generator=draw).tolist())
        model = Patches(way, before, behind, patch).eval()
        size = [int(torch.randint(2 * p, 7 * p, (), generator=draw)) for p in patch]
        images = torch.randn(1, 3, *size, generator=draw)
        unchanged = keys(model, images)
        grid = find_grid(model, images, unchanged.shape[1])
        whole = [
            -(-n // p) if way == "padded" else n // p for n, p in zip(size, patch, strict=True)
        ]
        assert grid[:4] == (*whole, before, behind), (size, patch)
        for row in range(size[0] // patch[0]):
            for column in range(size[1] // patch[1]):
                other = images.clone()
                top, left = row * patch[0], column * patch[1]
                other[..., top : top + patch[0], left : left + patch[1]] += 1
                change = (keys(model, other) - unchanged).abs().sum(dim=2)[0]
                assert int(change.argmax()) == before + row * grid.columns + column


def test_tokens_that_are_no_grid_are_asked_for():
    class Shuffled(Patches):
        def forward(self, images):
            tokens = self.embed(images).flatten(2).transpose(1, 2)[:, self.order]
            return self.head(self.attention(tokens, tokens, tokens)[0].mean(dim=1))

    model, images = Shuffled().eval(), torch.randn(1, 3, 12, 20)
    model.order = torch.randperm(15, generator=torch.Generator().manual_seed(1))
    with pytest.raises(ValueError, match=r"15 tokens do not form a grid .*; give grid=\(rows"):
        attnkit.explain(model, images, method="attention")
    seen = attnkit.explain(model, images, method="attention", grid=(3, 5))
    assert seen.map.shape == (1, 3, 5)
    model.order = torch.arange(15)
    assert attnkit.explain(model, images, method="attention").map.shape == (1, 3, 5)


def test_what_is_given_has_to_fit():
    model, images = Patches(before=1, behind=2).eval(), torch.randn(2, 3, 8, 12)
    seen = attnkit.explain(model, images, method="attention", grid=(2, 3), num_prefix_tokens=1)
    torch.testing.assert_close(seen.map, attnkit.explain(model, images, method="attention").map)
    torch.testing.assert_close(seen.share, 1 - seen.map.flatten(1).sum(dim=1) / seen.tokens.sum(1))
    with pytest.raises(
        ValueError, match=r"num_prefix_tokens: 5 of 9 tokens are not of a grid of 2"
    ):
        attnkit.explain(model, images, method="attention", grid=(2, 2))
    with pytest.raises(ValueError, match=r"9 tokens do not form a grid .* behind 2 prefix tokens"):
        attnkit.explain(model, images, method="attention", num_prefix_tokens=2)


class Attending(Patches):
    """With attention of attnkit's own."""

    def __init__(self, before, behind):
        super().__init__(before=before, behind=behind)
        own = attnkit.MultiHeadAttention(DIM, 2)
        self.attention = own
        for parameter in own.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, images):
        tokens = self.embed(images).flatten(2).transpose(1, 2)
        special = self.special.expand(len(images), -1, -1)
        tokens = torch.cat([special[:, : self.before], tokens, special[:, self.before :]], dim=1)
        return self.head((tokens + self.attention(tokens)).mean(dim=1))


@pytest.mark.parametrize(("before", "behind"), [(1, 0), (0, 1), (2, 3)])
def test_whatever_names_tokens_knows_those_behind_the_patches(before, behind):
    torch.manual_seed(3)
    model, images = Attending(before, behind).eval(), torch.randn(2, 3, 12, 20)
    with attnkit.capture_attention(model) as captured:
        model(images)
    weights = captured["attention"][0]  # [batch, heads, tokens, tokens], of a grid of 3 x 5
    is_patch = torch.zeros(weights.shape[-1], dtype=torch.bool)
    is_patch[before : before + 15] = True
    others = weights[..., ~is_patch].sum(dim=-1)
    seen = attnkit.explain(model, images, method="attention")
    assert (seen.num_prefix_tokens, seen.num_suffix_tokens) == (before, behind)
    torch.testing.assert_close(seen.share, others.mean(dim=(1, 2)))
    assert f"class and register tokens: {100 * seen.share[0]:.0f} %" in repr(seen)
    queries = torch.linspace(0, len(is_patch) - 1, min(MOST_ROWS, len(is_patch))).round().long()
    attention = attention_of(seen)
    torch.testing.assert_close(attention.looks[0].prefix, others.mean(dim=1)[:, is_patch])
    named = [
        tile["says"].partition("; ")[2].partition(" gets most")[0]
        for tile in heads_data(attention, 0)["tiles"]
    ]
    for head, name in enumerate(named):
        token = int(weights[0, head, queries].mean(dim=0).argmax())
        row, column = divmod(token - before, 5)
        patch = f"the patch at row {row}, column {column}"
        assert name == (patch if is_patch[token] else f"class or register token {token}")
    (layer,) = layer_maps(model, images, -1)
    took = 1 - layer.values.sum(dim=(1, 2)) / weights.shape[-1]
    torch.testing.assert_close(layer.share, took)
    places = torch.tensor([(row, column) for row in range(3) for column in range(5)]).float()
    between = weights[:, :, is_patch][..., is_patch]
    distance = (between * torch.cdist(places, places)).sum((0, 2, 3)) / between.sum((0, 2, 3))
    rows = attnkit.diagnose_attention(model, images).rows
    assert [row["distance"] for row in rows] == pytest.approx(distance.tolist(), rel=1e-4)
    assert [row["prefix"] for row in rows] == pytest.approx(others.mean(dim=(0, 2)).tolist())


def test_tokens_in_windows_have_the_grid_of_a_window():
    class Windows(Patches):
        def forward(self, images):
            map = self.embed(images)  # 4 x 6 places, windows of 2 x 3
            windows = map.unflatten(3, (2, 3)).unflatten(2, (2, 2)).permute(0, 2, 4, 3, 5, 1)
            tokens = windows.reshape(-1, 6, DIM)
            tokens = self.attention(tokens, tokens, tokens)[0]
            return self.head(tokens.reshape(len(images), -1, DIM).mean(dim=1))

    grids = token_grids(Windows().eval(), torch.randn(2, 3, 16, 24))
    assert [(size, grid[:4]) for (_, size), grid in grids.items()] == [(6, (2, 3, 0, 0))]


class Blocks(nn.Module):
    """As MobileViT, whose blocks have a `patch_size` that counts places of a map."""

    def __init__(self):
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, DIM, 3, 2, 1), nn.Conv2d(DIM, 5, 1)
        self.block.patch_size = 2

    def forward(self, images):
        return self.block(self.stem(images)).mean(dim=(2, 3))


def test_the_patches_of_an_image_are_those_of_what_is_given_the_image():
    images = torch.randn(2, 3, 14, 26)
    assert patch_grid(Blocks().eval(), images) is None
    assert attnkit.explain(Blocks(), images, method="input_gradient").map.shape == (2, 14, 26)
    model = Patches()
    model.patch_size = (4, 4)
    patches = patch_grid(model, images)
    assert patches.grid == (3, 6)
    assert patches.covered == (12, 24)
    seen = attnkit.explain(model, images, 3, "input_gradient")
    given = images.requires_grad_()
    (gradient,) = torch.autograd.grad(model.eval()(given)[:, 3].sum(), given)
    expected = F.avg_pool2d(gradient.abs().sum(dim=1)[:, None], 4)[:, 0] * 16
    torch.testing.assert_close(seen.map, expected)
    model.way = "padded"
    assert patch_grid(model, images).grid == (4, 7)
    assert attnkit.explain(model, images.detach(), 3, "input_gradient").map.shape == (2, 4, 7)
