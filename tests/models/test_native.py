"""Images of their own sizes in one packed batch of a `ViT`."""

import copy
import importlib.util

import pytest
import torch
from timm.models.naflexvit import NaFlexVit, batch_patchify
from torch import nn

from attnkit import ViT
from attnkit.interop import from_timm
from attnkit.models import PackedImages

SIZES = [(12, 20), (8, 4), (16, 28), (12, 20), (4, 44)]


def images(sizes=SIZES):
    return [torch.randn(3, *size, dtype=torch.float64) for size in sizes]


def make(**options):
    options = {"positions": "learned", "pooling": "class", **options}
    model = ViT(
        image_size=(12, 16), patch_size=4, num_classes=5, dim=24, depth=3, num_heads=3, **options
    ).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def gradients(model, outputs):
    return torch.autograd.grad(outputs.square().sum(), list(model.parameters()))


@pytest.mark.parametrize("positions", ["learned", "factorized2d", "sincos2d", "rotary2d", None])
@pytest.mark.parametrize("pooling", ["class", "mean", "attention"])
@pytest.mark.parametrize("num_registers", [0, 2])
def test_each_image_is_as_alone_with_its_gradients(positions, pooling, num_registers):
    model = make(positions=positions, pooling=pooling, num_registers=num_registers)
    batch = images()
    together = model(batch)
    alone = torch.cat(
        [copy.deepcopy(model).resize(tuple(one.shape[1:]))(one[None]) for one in batch]
    )
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)
    model.native = True
    in_turn = torch.cat([model(one[None]) for one in batch])
    torch.testing.assert_close(together, in_turn, rtol=1e-9, atol=1e-9)
    for found, expected in zip(gradients(model, together), gradients(model, in_turn), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("positions", ["learned", "rotary2d"])
def test_patches_that_are_left_out_are_as_alone(positions):
    model = make(positions=positions, patch_dropout=0.4, native=True).train()
    batch = images()
    torch.manual_seed(3)
    together = model(batch)
    torch.manual_seed(3)
    alone = torch.cat([model(one[None]) for one in batch])
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(together, model.eval()(batch))


def test_equal_sizes_are_one_tensor_and_the_same():
    model = make()
    batch = images([(12, 16)] * 3)
    torch.testing.assert_close(model(batch), model(torch.stack(batch)), rtol=0, atol=0)


def test_tokens_and_packed_images():
    model = make(num_registers=2)
    batch = images()
    packed = PackedImages.of(batch, (4, 4))
    assert len(packed) == 5
    torch.testing.assert_close(model(packed), model(batch), rtol=0, atol=0)
    tokens = model.tokens(batch)
    assert [len(one) for one in tokens] == [3 + 15, 3 + 2, 3 + 28, 3 + 15, 3 + 11]
    torch.testing.assert_close(model.tokens(packed)[2], tokens[2], rtol=0, atol=0)


def test_layers_come_in_the_order_that_is_asked_for():
    model = make(norm_after_pooling=False)
    batch = torch.stack(images([(12, 16)] * 2))
    first, last = model.layers(batch, [0, 2])
    torch.testing.assert_close(last, model.tokens(batch))
    for found, expected in zip(model.layers(batch, [2, 0, 2]), (last, first, last), strict=True):
        assert torch.equal(found, expected)
    for numbers in ([], [0, 3], [-1]):
        with pytest.raises(ValueError, match=r"numbers: expected blocks from 0 to 2, got \["):
            model.layers(batch, numbers)
    with pytest.raises(TypeError, match=r"images: expected one tensor .* got list"):
        model.layers(list(batch), [0])


def test_positions_made_in_inference_serve_training():
    for positions in ("sincos2d", "rotary2d"):
        model = make(positions=positions)
        with torch.inference_mode():
            model(images([(28, 36), (4, 8)]))
        model(images([(28, 36), (4, 8)])).sum().backward()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([], "expected at least one image, got an empty batch"),
        ([torch.zeros(3, 8, 8), torch.zeros(3, 9, 8)], r"images\[1\]: .* patch_size 4 x 4, got 9"),
        ([torch.zeros(3, 8, 8), torch.zeros(3, 0, 8)], r"images\[1\]: .* got 0 x 8"),
        (
            [torch.zeros(3, 8, 8), torch.zeros(1, 8, 8)],
            r"images\[1\]: expected 3 channels of torch.float32, as images\[0\], got 1",
        ),
        (
            [torch.zeros(3, 8, 8), torch.zeros(3, 8, 4).double()],
            r"images\[1\]: .* got 3 of torch.float64",
        ),
        ([torch.zeros(1, 8, 8), torch.zeros(1, 4, 8)], "expected 3 channels"),
        ([torch.zeros(3, 8, 8), torch.zeros(8, 8)], r"images\[1\]: expected \[channels"),
    ],
)
def test_wrong_images_are_named(batch, message):
    with pytest.raises(ValueError, match=message):
        make().float()(batch)


def test_a_tensor_of_another_size_is_refused_unless_native():
    with pytest.raises(ValueError, match="expected 12 x 16 pixels"):
        make()(torch.zeros(1, 3, 8, 8, dtype=torch.float64))


def test_grids_are_of_the_patches():
    with pytest.raises(ValueError, match="expected 6 patches in total"):
        PackedImages(torch.zeros(6, 48), [(2, 2)])


def of_naflex(batch, patch):
    """A batch of images as timm's NaFlexViT takes it, padded."""
    cut = [batch_patchify(one[None], (patch, patch)) for one in batch]
    most = max(patches.shape[1] for patches, _ in cut)
    patches = torch.zeros(len(batch), most, cut[0][0].shape[2])
    places = torch.zeros(len(batch), most, 2, dtype=torch.long)
    valid = torch.zeros(len(batch), most, dtype=torch.bool)
    for number, (found, (rows, columns)) in enumerate(cut):
        count = rows * columns
        patches[number, :count], valid[number, :count] = found[0], True
        both = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        places[number, :count] = torch.stack(both, dim=-1).flatten(0, 1)
    return {"patches": patches, "patch_coord": places, "patch_valid": valid}


@pytest.mark.parametrize(
    ("pooling", "class_token", "registers", "kind"),
    [("map", False, 0, "linear"), ("avg", False, 2, "linear"), ("token", True, 1, "linear")],
)
def test_naflexvit_by_copied_weights(pooling, class_token, registers, kind):
    theirs = NaFlexVit(
        patch_size=4, embed_dim=24, depth=3, num_heads=3, global_pool=pooling, num_classes=5,
        class_token=class_token, reg_tokens=registers, pos_embed_grid_size=(5, 7), init_values=0.1,
        embed_proj_type=kind,
    ).eval()  # fmt: skip
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = from_timm(theirs)
    batch = [one.float() for one in images()]
    mine, expected = ours(batch), theirs(of_naflex(batch, 4))
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
    same = torch.stack(batch[:1])
    torch.testing.assert_close(ours(same), theirs(same), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"pos_embed_interp_mode": "bilinear"},  # SigLIP 2
        {"pos_embed_interp_mode": "bilinear", "pos_embed_antialias": False},
        {"pos_embed_ar_preserving": True, "pos_embed_grid_size": (5, 7)},
        {"pos_embed": "factorized", "pos_embed_grid_size": (5, 7)},
        {"pos_embed": "factorized", "pos_embed_ar_preserving": True},
    ],
)
def test_positions_of_naflexvit_are_resampled_as_theirs(options):
    options = {"pos_embed_grid_size": (6, 6), **options}
    theirs = NaFlexVit(
        patch_size=4, embed_dim=24, depth=2, num_heads=3, global_pool="avg", num_classes=5,
        **options,
    ).eval()  # fmt: skip
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = from_timm(theirs)
    batch = [one.float() for one in images([*SIZES, (24, 24), (20, 28), (36, 24)])]
    torch.testing.assert_close(ours(batch), theirs(of_naflex(batch, 4)), rtol=1e-5, atol=1e-5)
    for one in batch:
        resized = copy.deepcopy(ours).resize(tuple(one.shape[1:]))
        torch.testing.assert_close(resized(one[None]), ours([one]), rtol=1e-5, atol=1e-5)
    batch[0].requires_grad_()
    ours(batch).square().sum().backward()
    theirs(of_naflex([one.detach() for one in batch], 4)).square().sum().backward()
    for mine, other in (
        [(ours.position_table.grad[0], theirs.embeds.pos_embed.grad.flatten(0, 2))]
        if ours.factorized_positions is None
        else [
            (ours.factorized_positions.row_table.grad, theirs.embeds.pos_embed_y.grad[0]),
            (ours.factorized_positions.column_table.grad, theirs.embeds.pos_embed_x.grad[0]),
        ]
    ):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pos_embed": "none"}, "positions 'none', expected 'learned' or 'factorized'"),
        ({"pos_embed": "none", "rope_type": "axial"}, "rotary positions"),
        ({"pos_embed_use_grid_sample": True}, "positions by grid_sample"),
        ({"pos_embed_interp_mode": "nearest"}, "positions resampled by 'nearest'"),
        (
            {"pos_embed_align_corners": True, "pos_embed_antialias": False},
            "positions with aligned corners",
        ),
        (
            {
                "pos_embed": "factorized", "pos_embed_ar_preserving": True,
                "pos_embed_grid_size": (5, 7),
            },
            "keep the aspect of a grid that is not square",
        ),
    ],
)  # fmt: skip
def test_naflexvit_with_other_positions_is_refused(options, message):
    theirs = NaFlexVit(patch_size=4, embed_dim=24, depth=1, num_heads=3, **options)
    with pytest.raises(ValueError, match=message):
        from_timm(theirs)


def test_the_benchmark_compares_equal_logits(repository, monkeypatch):
    folder = repository / "docs" / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    spec = importlib.util.spec_from_file_location("native_benchmark", folder / "native.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    model, batch = script.model_of(160), script.spread()[:3]
    torch.testing.assert_close(model(batch), script.padded(model, batch), rtol=1e-4, atol=1e-5)
