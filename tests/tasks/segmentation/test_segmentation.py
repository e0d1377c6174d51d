"""Heads, losses, windows and the module of segmentation, on small networks that are trained."""

from functools import partial

import numpy as np
import pytest
import torch
from lightning import LightningDataModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from attnkit import ViT
from attnkit.finetune import head_only, lora
from attnkit.tasks.segmentation import (
    ConvolutionalHead,
    LinearHead,
    QueryHead,
    Segmenter,
    SemanticSegmentation,
    dice_loss,
)
from attnkit.tasks.segmentation.module import slide
from attnkit.tasks.segmentation.segmenter import _RegionOfQuery as RegionOfQuery

HEADS = {
    "linear": LinearHead,
    "per_pixel": partial(LinearHead, per_pixel=True),
    "convolutional": partial(ConvolutionalHead, dim=8),
    "queries": QueryHead,
}
SIZE = (24, 32)
backbone = partial(ViT, dim=24, depth=4, num_heads=2, pooling="mean", norm_after_pooling=False,
                   num_registers=1)  # fmt: skip


def network(head, num_classes=3):
    torch.manual_seed(0)
    sizes = {"image_size": list(SIZE), "in_channels": 3, "num_classes": num_classes}
    return Segmenter(backbone, HEADS[head], **sizes, patch_size=8)


def module(model, **options):
    facts = {"num_classes": 3, "image_size": list(SIZE), "mean": [0.5] * 3, "std": [0.25] * 3}
    rate = partial(torch.optim.Adam, lr=1e-2)
    constant = partial(torch.optim.lr_scheduler.ConstantLR, factor=1.0)
    return SemanticSegmentation(model, rate, constant, **facts, **options)


def halves():
    """An image of three colours, whose places are its classes; a column does not count."""
    masks = torch.zeros(1, *SIZE, dtype=torch.uint8)
    masks[:, :, 12:] = 1
    masks[:, 10:, 20:] = 2
    images = (masks[:, None].expand(-1, 3, -1, -1) * 90 + 20).contiguous()
    masks[:, :, 5] = 255
    return images, masks


def fitted(made, steps=60):
    images, masks = halves()
    loader = DataLoader(TensorDataset(images, masks), 1)
    trainer = Trainer(max_epochs=steps, accelerator="cpu", logger=False, barebones=True)
    trainer.fit(made, loader)
    return made.eval()


@pytest.mark.parametrize("head", HEADS)
def test_every_head_learns_an_image(head):
    images, masks = halves()
    made = fitted(module(network(head)))
    right = made(images).argmax(dim=1) == masks
    assert right[masks != 255].float().mean() > (0.85 if head == "linear" else 0.97)


@pytest.mark.parametrize("head", HEADS)
def test_every_parameter_of_a_head_is_trained(head):
    model = network(head)
    model(torch.randn(2, 3, *SIZE)).square().mean().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_dice_is_the_formula():
    torch.manual_seed(1)
    logits, masks = torch.randn(2, 3, 5, 7), torch.randint(0, 3, (2, 5, 7))
    masks[0][masks[0] == 2] = 0  # a class that is not there
    masks[:, 0] = 255
    expected = []
    for shares, truth in zip(logits.softmax(dim=1), masks, strict=True):
        counts, found = truth != 255, []
        for number in truth[counts].unique():
            p, y = shares[number][counts], (truth[counts] == number).float()
            found.append(1 - 2 * (p * y).sum() / (p.sum() + y.sum()))
        expected.append(torch.stack(found).mean())
    torch.testing.assert_close(dice_loss(logits, masks), torch.stack(expected))


def test_pixels_that_do_not_count_change_no_loss():
    made, (images, masks) = module(network("linear")), halves()
    other = images.float() / 255
    logits = made(other).detach()
    changed = logits.clone()
    changed[..., 5] = 7.0
    masks = masks.long()
    assert torch.equal(made.losses(logits, masks), made.losses(changed, masks))
    nothing = torch.full_like(masks, 255)
    assert made.losses(logits, nothing).tolist() == [0.0]


def test_miou_is_that_of_numpy():
    made = module(network("linear"))
    torch.manual_seed(2)
    images = torch.randint(0, 256, (3, 3, *SIZE), dtype=torch.uint8)
    masks = torch.randint(0, 2, (3, *SIZE), dtype=torch.uint8)  # the third class never
    masks[0, :3] = 255
    loader = DataLoader(TensorDataset(images, masks), 2)
    (found,) = Trainer(accelerator="cpu", logger=False).test(made, loader, verbose=False)
    predicted, truth = made(images).argmax(dim=1).numpy(), masks.numpy()
    counts, ious = truth != 255, []
    for number in range(3):
        p, y = (predicted == number)[counts], (truth == number)[counts]
        ious += [(p & y).sum() / (p | y).sum()] if (p | y).any() else []
    assert found["test/miou"] == pytest.approx(np.mean(ious))
    assert found["test/accuracy"] == pytest.approx((predicted == truth)[counts].mean())
    of_classes = [score.iou for score in made.class_scores if score.iou is not None]
    assert of_classes == pytest.approx(ious)


@pytest.mark.parametrize("windows", [False, True])
def test_pictures_in_which_nothing_counts_change_no_figure(windows):
    made = module(network("linear"), windows=windows)
    images, masks = halves()
    images, masks = images.expand(3, -1, -1, -1), masks.repeat(3, 1, 1)
    masks[:2] = 255

    def figures(count):
        loader = DataLoader(TensorDataset(images[-count:], masks[-count:]), 1)
        trainer = Trainer(accelerator="cpu", logger=False)
        (tested,) = trainer.test(made, loader, verbose=False)
        (validated,) = trainer.validate(made, loader, verbose=False)
        return {**tested, **validated}

    assert figures(3) == figures(1)
    masks[:] = 255
    assert figures(2).keys() == figures(1).keys() >= {"val/miou", "test/loss"}
    assert {score.support for score in made.class_scores} == {0}


def test_a_window_as_large_as_the_image_is_the_whole():
    model = network("per_pixel").eval()
    images = torch.randn(2, 3, *SIZE)
    with torch.no_grad():
        assert torch.equal(slide(model, images, SIZE), model(images))


def test_windows_cover_every_pixel_and_are_averaged():
    seen = []

    def model(images):
        seen.append(images)
        return images * 2

    torch.manual_seed(3)
    images = torch.randn(1, 2, 29, 41)
    torch.testing.assert_close(slide(model, images, (11, 13), 0.5), images * 2)
    assert all(window.shape[-2:] == (11, 13) for window in seen)
    small = torch.randint(0, 256, (1, 1, 3, 5), dtype=torch.uint8)
    assert torch.equal(slide(lambda x: x.float(), small, (7, 7)), small.float())


def test_a_picture_of_any_size_gets_its_logits():
    for windows in (False, True):
        made = module(network("linear"), windows=windows, overlap=0.5).eval()
        for shape in ((19, 23), (40, 70), SIZE):
            picture = torch.randint(0, 256, (3, *shape), dtype=torch.uint8)
            with torch.no_grad():
                logits = made.segment(picture)
            assert logits.shape == (3, *shape)
            if shape == SIZE:
                torch.testing.assert_close(logits, made(picture[None])[0])


def test_a_query_sees_its_own_region():
    regions = torch.tensor([[[True, False, False], [False, True, True]]])
    mask = RegionOfQuery(regions, num_prefix_tokens=1).dense(6, 6, torch.device("cpu"))
    expected = torch.ones(6, 6, dtype=torch.bool)  # 2 queries, 1 register, 3 patches
    expected[:2, 3:] = regions[0]
    assert torch.equal(mask[0, 0], expected)


def test_masked_blocks_answer_from_the_regions_of_their_queries():
    model, images = network("queries").train(), torch.rand(2, 3, *SIZE)
    masked = model(images)
    model.head.masked_share = 0.0
    plain = model(images)
    torch.testing.assert_close(masked[:, 0], plain[:, 0])  # answered before the first block
    assert not torch.allclose(masked[:, -1], plain[:, -1])


def test_the_share_of_masked_blocks_falls_to_nothing():
    made = module(network("queries"))
    fitted(made, steps=4)
    assert 0 < made.model.head.masked_share < 0.5
    made.model.head.anneal(1.0)
    assert made.model.head.masked_share == 0


@pytest.mark.parametrize("method", [head_only, lora])
@pytest.mark.parametrize("head", ["per_pixel", "convolutional", "queries"])
def test_fine_tuning_trains_the_head_and_keeps_the_rest(method, head):
    made = module(network(head), finetune=method)
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    fitted(made, steps=2)
    after = made.model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(name.startswith("head.") for name in moved)
    assert all(name.startswith("head.") or "lora_" in name for name in moved)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"region": [3]}, "region: expected a pixel"),
        ({"region": [1.5, 3]}, r"region: expected whole numbers of pixels, got \[1.5, 3\]"),
        ({"region": 3}, "region: expected a pixel"),
        ({"region": [0, 0, 25, 3]}, "within 24 x 32 pixels"),
        ({"overlap": 1.0}, "overlap: expected a share"),
        ({"dice_weight": -1}, "dice_weight: expected at least 0"),
    ],
)
def test_wrong_arguments_are_named(given, said):
    with pytest.raises(ValueError, match=said):
        module(network("linear"), **given)


def test_a_class_that_was_not_counted_weighs_one():
    counts = torch.tensor([300, 100, 0])

    class Counted(LightningDataModule):
        class_counts = counts

        def train_dataloader(self):
            return DataLoader(TensorDataset(*halves()), 1)

    made = module(network("linear"), class_weights="balanced")
    trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False, barebones=True)
    trainer.fit(made, Counted())
    torch.testing.assert_close(made.class_weights, torch.tensor([400 / 900, 400 / 300, 1.0]))


def test_a_network_of_native_sizes_becomes_one_of_its_head():
    sizes = {"image_size": list(SIZE), "in_channels": 3, "num_classes": 3, "patch_size": 8}
    model = Segmenter(partial(backbone, native=True), LinearHead, **sizes)
    with pytest.raises(ValueError, match="expected 24 x 32 pixels"):
        model(torch.zeros(1, 3, 16, 32))


def test_rotary_positions_turn_patches_and_leave_queries():
    sizes = {"image_size": list(SIZE), "in_channels": 3, "num_classes": 3, "patch_size": 8}
    model = Segmenter(partial(backbone, positions="rotary2d"), QueryHead, **sizes).eval()
    prefix, patches = 3 + model.backbone.num_prefix_tokens, 12
    query = torch.randn(1, 2, prefix + patches, model.backbone.head_dim)
    turned, _ = model.head.rotary(query, query)
    assert torch.equal(turned[..., :prefix, :], query[..., :prefix, :])
    there = query[..., 3:, :]
    assert torch.equal(turned[..., 3:, :], model.backbone.rotary(there, there)[0])
    images = torch.rand(2, 3, *SIZE)
    logits = model(images)
    assert logits.shape == (2, 3, *SIZE)
    model.head.rotary = None
    assert not torch.allclose(model(images), logits)


def test_heads_name_what_they_cannot_take():
    sizes = {"image_size": list(SIZE), "in_channels": 3, "num_classes": 3, "patch_size": 8}
    with pytest.raises(ValueError, match="less than the backbone's 4 blocks, got 4"):
        Segmenter(backbone, partial(QueryHead, num_blocks=4), **sizes)
    with pytest.raises(ValueError, match="expected 4 blocks or more"):
        Segmenter(partial(backbone, depth=3), ConvolutionalHead, **sizes)
    with pytest.raises(ValueError, match="backbone: expected a Vision Transformer"):
        Segmenter(lambda **_: torch.nn.Identity(), LinearHead, **sizes)


def test_a_pixel_is_explained_and_a_box():
    images, masks = halves()
    for region, truth in ([10, 3], 0), ([12, 22, 20, 30], 2), (None, 1):
        made = module(network("linear"), region=region).eval()
        found = made.explained((images, masks))
        whole = made(images)
        box = made.region
        part = whole[..., box[0] : box[2], box[1] : box[3]].mean(dim=(-2, -1))
        torch.testing.assert_close(found.model(found.inputs), part)
        assert found.truth.tolist() == [truth]
