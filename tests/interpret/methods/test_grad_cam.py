"""Grad-CAM takes what is of images: models of timm whose tensors look like maps and are none."""

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from attnkit.interpret import explain
from attnkit.interpret.methods.hooks import module_runs

SMALL = {"img_size": 64}
# options, the grid, and the module whose tokens or map are taken
MODELS = {
    "vit_tiny_patch16_224": (SMALL | {"depth": 2}, (4, 4), "blocks.1.attn"),
    "deit_tiny_distilled_patch16_224": (SMALL | {"depth": 2}, (4, 4), "blocks.1.attn"),
    "cait_xxs24_224": (SMALL | {"depth": 2}, (4, 4), "blocks_token_only.1.norm1"),
    "convit_tiny": (SMALL | {"depth": 3, "local_up_to_layer": 2}, (4, 4), "blocks.2.norm1"),
    "mixer_s32_224": (SMALL, (2, 2), "norm"),
    "swin_tiny_patch4_window7_224": (SMALL | {"window_size": 4, "depths": [1, 1]}, (8, 8), "norm"),
    "tnt_s_legacy_patch16_224": (SMALL | {"depth": 2}, (4, 4), "blocks.1.norm_out"),
    "hiera_tiny_224": ({"stages": (1, 1, 1, 1)}, (7, 7), "blocks.3"),
    "mobilevit_xxs": ({}, (8, 8), "final_conv"),
    "resnet10t": ({}, (6, 6), "layer4"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_an_image_has_the_same_map_alone(name):
    torch.manual_seed(0)
    options, grid, module = MODELS[name]
    model = timm.create_model(name, num_classes=5, **options).eval()
    for head in model.modules():
        if isinstance(head, nn.Linear) and head.out_features == 5:
            nn.init.normal_(head.weight)
    size = options.get("img_size", model.default_cfg["input_size"][-1])
    images = torch.randn(2, 3, size, size)
    both = explain(model, images, method="grad_cam")
    alone = explain(model, images[:1], both.target[:1], "grad_cam")
    assert both.map.shape == (2, *grid)
    assert any(f"module {module!r}" in note for note in both.notes), both.notes
    assert both.notes == alone.notes
    largest = float(both.map[:1].max())
    assert largest > 0
    torch.testing.assert_close(alone.map, both.map[:1], atol=1e-4 * largest, rtol=1e-3)


class Attend(nn.Module):
    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value)


class Heads(nn.Module):
    """Attention that runs in a child module."""

    def __init__(self):
        super().__init__()
        self.qkv, self.attend = nn.Linear(12, 36), Attend()

    def forward(self, tokens):
        query, key, value = self.qkv(tokens).unflatten(2, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        return tokens + self.attend(query, key, value).transpose(1, 2).flatten(2)


class Network(nn.Module):
    def __init__(self, is_sequence_first):
        super().__init__()
        self.is_sequence_first = is_sequence_first
        self.patches, self.head = nn.Conv2d(3, 12, 4, 4), nn.Linear(12, 5)
        layer = nn.TransformerEncoderLayer(12, 3, 16)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.body = encoder if is_sequence_first else nn.Sequential(Heads(), Heads())

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        if self.is_sequence_first:
            return self.head(self.body(tokens.transpose(0, 1)).mean(dim=0))
        return self.head(self.body(tokens).mean(dim=1))


@pytest.mark.parametrize("batch", [1, 2, 6])  # 6: as many images as tokens
@pytest.mark.parametrize("is_sequence_first", [True, False])
def test_tokens_come_first_or_attention_is_in_a_child(is_sequence_first, batch):
    torch.manual_seed(1)
    model, images = Network(is_sequence_first).eval(), torch.randn(batch, 3, 8, 12)
    seen = explain(model, images, 3, "grad_cam")
    layer = model.body.layers[1] if is_sequence_first else model.body[1]
    given = []
    around = getattr(layer, "self_attn", layer)
    handle = around.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    y = model(images.requires_grad_())[:, 3].sum()
    handle.remove()
    (gradient,) = torch.autograd.grad(y, given)
    tokens = given[0].detach()
    if is_sequence_first:
        tokens, gradient = tokens.transpose(0, 1), gradient.transpose(0, 1)
    expected = torch.einsum("bic,bc->bi", tokens, gradient.mean(dim=1)).relu()
    torch.testing.assert_close(seen.map.flatten(1), expected)


def test_a_module_that_returns_tokens_or_a_map_may_be_named():
    torch.manual_seed(1)
    model, images = Network(is_sequence_first=False).eval(), torch.randn(2, 3, 8, 12)
    for name in ("patches", "body.0"):
        seen = explain(model, images, 3, "grad_cam", layers=name)
        assert any(f"of the module {name!r}" in note for note in seen.notes)
        with module_runs(model) as runs:
            y = model(images)[:, 3].sum()
        (taken,) = (run.made[0] for run in runs if run.name == name)
        (gradient,) = torch.autograd.grad(y, taken)
        tokens = taken.detach()
        if name == "patches":
            tokens, gradient = (t.flatten(2).transpose(1, 2) for t in (tokens, gradient))
        expected = torch.einsum("bic,bc->bi", tokens, gradient.mean(dim=1)).relu()
        torch.testing.assert_close(seen.map.flatten(1), expected)
    with pytest.raises(ValueError, match=r"layers: the module 'head' returns no map .* no tokens"):
        explain(model, images, 3, "grad_cam", layers="head")


def test_weights_of_tokens_by_tokens_are_no_map():
    class Eager(nn.Module):
        """The softmax of 4 x 4 tokens has the proportions of the image."""

        def __init__(self):
            super().__init__()
            self.patches, self.head = nn.Conv2d(3, 12, 4, 4), nn.Linear(12, 5)
            self.qkv, self.softmax, self.norm = (
                nn.Linear(12, 36), nn.Softmax(dim=-1), nn.LayerNorm(12)
            )  # fmt: skip

        def forward(self, images):
            tokens = self.patches(images).flatten(2).transpose(1, 2)
            query, key, value = self.qkv(self.norm(tokens))[:, :, None].chunk(3, dim=-1)
            query, key, value = (t.transpose(1, 2) for t in (query, key, value))
            weights = self.softmax(query @ key.mT)
            return self.head((weights @ value)[:, 0].mean(dim=1))

    torch.manual_seed(1)
    seen = explain(Eager(), torch.randn(2, 3, 16, 16), 3, "grad_cam")
    assert seen.map.shape == (2, 4, 4)
    assert "tokens of the module 'norm'" in seen.notes
