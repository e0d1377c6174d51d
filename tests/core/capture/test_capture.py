"""Weights of any model: whoever calls torch's function, and what is not seen is an error."""

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

import attnkit

IMAGE, DIM = 32, 12


def make_vit(**options):
    torch.manual_seed(1)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=IMAGE, patch_size=8, embed_dim=DIM, num_heads=3, depth=3,
        num_classes=5, **options,
    )  # fmt: skip
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def eager_weights(model, x):
    """What timm's own eager attention drops from."""
    seen = []
    handles = []
    for block in model.blocks:
        block.attn.fused_attn = False
        handles.append(block.attn.attn_drop.register_forward_hook(lambda *a: seen.append(a[-1])))
    model(x)
    for block, handle in zip(model.blocks, handles, strict=True):
        block.attn.fused_attn = True
        handle.remove()
    return seen


@pytest.mark.parametrize(
    ("layers", "places"),
    [
        (None, [0, 1, 2]),
        ([-2, 0], [0, 1]),
        ("blocks.1.attn", [1]),
    ],
    ids=str,
)
@torch.no_grad()
def test_a_model_nobody_here_wrote(layers, places):
    model = make_vit()
    x = torch.randn(2, 3, IMAGE, IMAGE)
    expected = eager_weights(model, x)
    output = model(x)
    with attnkit.record_backends() as record:
        model(x)
        model(x[:1])
    with (
        attnkit.record_backends() as captured_record,
        attnkit.capture_attention(model, layers, rows=[0, -2], heads=1) as captured,
    ):
        assert torch.equal(model(x), output)
        model(x[:1])
    assert sorted(captured) == [f"blocks.{place}.attn" for place in places]
    for place in places:
        first, second = captured[f"blocks.{place}.attn"]
        torch.testing.assert_close(first, expected[place][:, [1]][:, :, [0, -2]])
        assert second.shape == (1, 1, 2, 17)
    assert captured_record.counts == record.counts
    assert record.total().total() == 6


class Mixed(nn.Module):
    """Attention that is seen, of a user with weights of their own, and eager."""

    def __init__(self, *kinds):
        super().__init__()
        self.layers = nn.ModuleList(KINDS[kind]() for kind in kinds)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Eager(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.1)
        self.heads = nn.Linear(3, 3)

    def forward(self, x):
        weights = F.softmax(x @ x.transpose(-2, -1), dim=-1)
        weights = self.heads(self.dropout(weights).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return torch.einsum("bhij,bhjd->bhid", weights.contiguous(), x)


class Users(Eager):
    def attention_weights(self, x, rows=None, heads=None):
        weights = (x @ x.transpose(-2, -1)).softmax(dim=-1)
        assert rows is None
        return weights if heads is None else weights[:, [heads]]


class Seen(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


class Gate(nn.Module):
    """A softmax that is not attention: over channels, and over classes with a matrix of weights."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 7))

    def forward(self, x):
        return x * x.softmax(dim=-1) + x.softmax(dim=-1) @ self.weight.T


KINDS = {"eager": Eager, "users": Users, "seen": Seen, "gate": Gate}


def test_a_users_module_is_served_beside_torchs_function():
    model = Mixed("users", "seen", "gate").eval()
    x = torch.randn(2, 3, 5, 7)
    with attnkit.capture_attention(model) as captured:
        model(x)
    assert list(captured) == ["layers.0", "layers.1"]
    torch.testing.assert_close(captured["layers.0"][0], (x @ x.mT).softmax(dim=-1))
    with attnkit.capture_attention(model, "layers.1", heads=2) as captured:
        model(x)
    assert list(captured) == ["layers.1"]
    assert captured["layers.1"][0].shape == (2, 1, 5, 5)
    with attnkit.capture_attention(model, 0, heads=2) as captured:
        model(x)
    assert list(captured) == ["layers.0"]


@pytest.mark.parametrize(
    ("kinds", "layers", "named"),
    [
        (["eager"], None, "layers.0; "),
        (["seen", "eager"], None, "layers.1; "),
        (["seen", "eager"], -1, "layers.1; "),
        (["eager"] * 5, None, "layers.0, layers.1, layers.2 and 2 more; "),
        (["users", "eager"], "*.1", "layers.1; "),
        (["seen", "eager", "seen"], [0, 1], "layers.1; "),
    ],
    ids=str,
)
def test_attention_that_is_not_seen_is_named(kinds, layers, named):
    model = Mixed(*kinds).eval()
    x = torch.randn(2, 3, 5, 7)
    with (
        pytest.raises(ValueError, match=named + r"attnkit.replace_attention\(model\) first"),
        attnkit.capture_attention(model, layers),
    ):
        model(x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_where_they_are_asked_for():
    nested = torch.nested.nested_tensor([torch.randn(3, 5, 7)] * 2)
    model = Mixed("seen")
    with (
        pytest.raises(ValueError, match=r"attention of nested tensors, .* in layers.0; pad them"),
        attnkit.capture_attention(model),
    ):
        model(nested)


def test_eager_layers_that_were_not_asked_for_are_left_alone():
    model = Mixed("seen", "eager", "seen").eval()
    x = torch.randn(2, 3, 5, 7)
    for layers, name in (("*.0", "layers.0"), (-1, "layers.2"), (-3, "layers.0")):
        with attnkit.capture_attention(model, layers) as captured:
            model(x)
        assert list(captured) == [name]


def test_methods_other_than_forward():
    model = make_vit()
    x = torch.randn(2, 3, IMAGE, IMAGE)
    with torch.no_grad(), attnkit.capture_attention(model, -1) as captured:
        model.forward_features(x)
    assert list(captured) == ["blocks.2.attn"]


def test_a_convolution_of_torch_geometric():
    from torch_geometric.nn import GATConv

    torch.manual_seed(1)
    model = nn.ModuleList([GATConv(5, 7, heads=3)])
    x, edges = torch.randn(4, 5), torch.tensor([[0, 1, 2, 3, 3], [1, 2, 0, 0, 2]])
    _, (_, expected) = model[0](x, edges, return_attention_weights=True)
    with attnkit.capture_attention(model) as captured:
        model[0](x, edges)
    torch.testing.assert_close(captured["0"][0], expected.detach())
    with attnkit.capture_attention(model, layers=-1, rows=[4, 0], heads=2) as captured:
        model[0](x, edges)
    torch.testing.assert_close(captured["0"][0], expected.detach()[[4, 0]][:, [2]])
    with (
        pytest.raises(IndexError, match=r"0: rows: there are \d, got 9"),
        attnkit.capture_attention(model, rows=9),
    ):
        model[0](x, edges)
