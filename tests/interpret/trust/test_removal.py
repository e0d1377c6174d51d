"""True masking where it is true, and the reason where it is not."""

import pytest
import timm
import torch
import torchvision
from torch import nn

import attnkit
from attnkit.core.key_masking import hide_keys
from attnkit.interpret.methods.question import Question, looking
from attnkit.interpret.trust.removal import NotAvailableError, removal


def ours(**options):
    options = {"dim": 24, "depth": 2, "num_classes": 5, "num_registers": 2} | options
    return attnkit.ViT(image_size=(6, 15), patch_size=(2, 3), in_channels=2, **options)


def timm_vit(pool="token", **options):
    return timm.models.VisionTransformer(
        (6, 15), (2, 3), 2, 5, pool, 24, 2, 3, **{"reg_tokens": 3} | options
    )


def torchvisions():
    model = torchvision.models.VisionTransformer(12, 4, 2, 2, 24, 31, num_classes=5)
    model.conv_proj = nn.Conv2d(2, 24, 4, 4)
    return model


def transformers_vit():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=31,
        image_size=12, patch_size=4, num_channels=2, num_labels=5,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def ready(model):
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model.double().eval()


@pytest.mark.parametrize(
    ("make", "grid", "num_prefix"),
    [
        (ours, (3, 5), 3),
        (lambda: ours(pooling="attention"), (3, 5), 2),
        (timm_vit, (3, 5), 4),
        (lambda: timm_vit("map", class_token=False, reg_tokens=0), (3, 5), 0),
        (torchvisions, (3, 3), 1),
        (transformers_vit, (3, 3), 1),
    ],
    ids=["class", "attention", "timm", "timm map", "torchvision", "transformers"],
)
def test_what_is_hidden_is_gone(make, grid, num_prefix):
    torch.manual_seed(0)
    model = ready(make())
    size = (6, 15) if grid == (3, 5) else (12, 12)
    images = torch.randn(3, 2, *size).double()
    places = grid[0] * grid[1]
    removed = torch.rand(3, places) < 0.5
    question = Question(model, images, 1)
    with looking(model), torch.no_grad():
        answer = removal("mask", question, grid)
        found = answer(images, removed)
        assert (answer(images, removed & False) - question_logits(model, images)).abs().max() < 1e-9
        patch = size[0] // grid[0], size[1] // grid[1]
        pixels = removed.unflatten(1, grid).repeat_interleave(patch[0], 1)
        pixels = pixels.repeat_interleave(patch[1], 2)[:, None]
        torch.testing.assert_close(answer(images.where(~pixels, 9.0), removed), found)
        with hide_keys(removed, num_prefix):
            torch.testing.assert_close(question_logits(model, images), found)
    assert (question_logits(model, images) - found).abs().max() > 1e-3


def question_logits(model, images):
    output = model(images)
    return getattr(output, "logits", output)


class Pooled(nn.Module):
    """Attention of the columns of a map."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, map):
        tokens = map.flatten(1, 2).transpose(1, 2)
        return self.attention(tokens, tokens, tokens)[0].mean(dim=1)


def test_a_place_may_be_several_patches():
    torch.manual_seed(2)
    vit = ready(timm.models.VisionTransformer((8, 12), 2, 2, 5, "token", 24, 2, 3))
    images = torch.randn(3, 2, 8, 12).double()
    removed = torch.tensor([[True, False, False, True], [False] * 4, [False, True, True, True]])
    question = Question(vit, images, 1)
    with looking(vit), torch.no_grad():
        found = removal("mask", question, (2, 2))(images, removed)
        quarters = images.clone()
        for item, place in removed.nonzero().tolist():
            row, column = divmod(place, 2)
            quarters[item, :, 4 * row : 4 * row + 4, 6 * column : 6 * column + 6] = 9.0
        torch.testing.assert_close(removal("mask", question, (2, 2))(quarters, removed), found)
        assert (vit(images) - found)[[0, 2]].abs().amax(dim=1).min() > 1e-3
        with pytest.raises(NotAvailableError, match="a place of 3 x 2 is not some of the model's"):
            removal("mask", question, (3, 2))


def eager():
    vit = timm_vit()
    for block in vit.blocks:
        block.attn.fused_attn = False
    return vit


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: ours(pooling="mean"), "still reach the logits, by a mean over all tokens"),
        (lambda: timm_vit("avg"), "still reach the logits"),
        (eager, "no attention that can be masked ran"),
        (
            lambda: nn.Sequential(nn.Conv2d(2, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            "no attention that can be masked ran",
        ),
        (
            lambda: nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), ours()),
            "still reach the logits",
        ),
        (
            lambda: nn.Sequential(nn.AvgPool2d((2, 3)), Pooled()),
            "a place of 3 x 5 is not some of the model's 1 x 5 patches",
        ),
    ],
    ids=["mean", "timm avg", "eager", "convolutions", "a convolution before", "pooled"],
)
def test_the_reason_where_it_is_not_available(make, reason):
    torch.manual_seed(1)
    model = ready(make())
    question = Question(model, torch.randn(3, 2, 6, 15).double(), 1)
    with looking(model), pytest.raises(NotAvailableError, match=reason):
        removal("mask", question, (3, 5))
