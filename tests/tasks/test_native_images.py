"""Folders of images that keep their own sizes: `data.native=true`."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from attnkit import ViT
from attnkit.lightning.errors import UserError
from attnkit.lightning.protocols import Explained
from attnkit.tasks.image_classification import ImageClassification, ImageFolderData
from attnkit.tasks.images.data import ImagePaths
from attnkit.tasks.images.decode import OwnSize, UndecodableImageError
from attnkit.tasks.images.native import crop_patches
from attnkit.tasks.loaders import TokenSampler


@pytest.fixture
def folder(tmp_path):
    """23 pictures a class, with sides of 5 to 46 pixels."""
    rng = np.random.default_rng(0)
    for name in ("dots", "stripes"):
        (tmp_path / name).mkdir()
        for number in range(23):
            height, width = rng.integers(5, 47, 2)
            y, x = np.mgrid[:height, :width]
            waves = np.sin(x / 2) * (np.sin(y / 2) if name == "dots" else 1)
            pixels = (127 + 100 * waves + rng.normal(0, 9, waves.shape)).clip(0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / name / f"{number:02}.png")
    return tmp_path


def ready(folder, **options):
    options = {"native": True, "max_tokens": 211, "patch_size": 5, "num_workers": 0, **options}
    data = ImageFolderData(folder, val_fraction=0.2, test_fraction=0.2, **options)
    data.setup()
    return data


@pytest.mark.parametrize(
    ("height", "width", "grid"),
    [(50, 20, (5, 2)), (54, 26, (5, 3)), (10, 10, (1, 1)), (990, 990, (7, 7)), (2000, 100, (32, 2)),
     (10, 9000, (1, 50)), (5000, 90, (50, 1))],
)  # fmt: skip
def test_sides_are_whole_patches_and_large_pictures_shrink(height, width, grid):
    how = OwnSize(10, 50)
    if grid == (32, 2):
        grid = (25, 2)  # rounding would give 64 patches
    found = how.grid(height, width)
    assert found[0] * found[1] <= 50
    assert found == grid


def test_a_side_below_a_patch_is_refused():
    with pytest.raises(UndecodableImageError, match=r"30 × 9 pixels, .* below the patch of 10"):
        OwnSize(10, 50).grid(9, 30)


@pytest.mark.parametrize("memory_gb", [None, 0])
def test_batches_keep_sizes_and_stay_within_max_tokens(folder, memory_gb):
    data = ready(folder, memory_gb=memory_gb, augment=None)
    assert data.sets["train"].reads_files is (memory_gb == 0)
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        shapes = set()
        for images, labels in loader:
            assert len(images) == len(labels)
            assert sum(one.shape[1] * one.shape[2] // 25 for one in images) <= 211
            shapes |= {one.shape for one in images}
            assert all(one.shape[0] == 1 and one.shape[1] % 5 == one.shape[2] % 5 == 0
                       for one in images)  # fmt: skip
        assert len(shapes) > 3
    seen = [int(label) for _, labels in data.train_dataloader() for label in labels]
    assert len(seen) == len(data.sets["train"])
    mean, std = data.sets["train"].mean_and_std()
    pixels = torch.cat([one.flatten() for one in data.sets["train"].fetch(torch.arange(len(seen)))])
    assert mean[0] == pytest.approx(float(pixels.double().mean()) / 255)
    assert std[0] == pytest.approx(float(pixels.double().std(correction=0)) / 255)


def test_ranks_share_an_epoch_and_an_epoch_starts_in_its_middle(folder):
    items = ready(folder).items("train")
    samplers = [TokenSampler(items, 2, rank, seed=7) for rank in range(2)]
    lists = [list(sampler) for sampler in samplers]
    assert len(lists[0]) == len(lists[1]) == len(samplers[0])
    assert sorted(n for part in lists for batch in part for n in batch) == list(range(len(items)))
    samplers[0].start = 1
    assert list(samplers[0]) == lists[0][1:]


def test_training_images_are_parts_of_whole_patches():
    torch.manual_seed(0)
    image = torch.arange(40 * 60).reshape(1, 40, 60)
    sizes = set()
    for _ in range(50):
        part = crop_patches(image, 0.3, 5)
        height, width = part.shape[1:]
        assert height % 5 == width % 5 == 0
        assert height * width >= 0.2 * 40 * 60
        first = int(part[0, 0, 0])
        rows, columns = divmod(first, 60)
        torch.testing.assert_close(part, image[:, rows : rows + height, columns : columns + width])
        sizes.add((height, width))
    assert len(sizes) > 4


def test_broken_and_tiny_files_are_named_and_left_out(folder, capsys):
    (folder / "dots" / "broken.png").write_bytes(b"no picture")
    Image.new("L", (30, 3)).save(folder / "dots" / "flat.png")
    with pytest.raises(UserError, match=r"2 of 48 files cannot .*\n.*broken.*flat.* patch of 5"):
        ready(folder)
    data = ready(folder, skip_corrupt=True)
    assert sum(map(len, data.sets.values())) == 46
    capsys.readouterr()
    ready(folder, skip_corrupt=True, max_image_tokens=20)
    assert "more than 20 patches and are shrunk to that" in capsys.readouterr().err
    paths = sorted(map(str, (folder / "dots").iterdir()))
    images, left = ImagePaths(paths, OwnSize(5, 50), 1).__getitems__(range(len(paths)))
    assert len(images) == len(left) == 23


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"native": False, "max_tokens": 50}, "max_tokens: needs native=True, got 50"),
        ({"native": False, "max_tokens": None, "patch_size": 5}, "patch_size: needs native"),
        ({"sampling": "balanced"}, "sampling: not with native=True"),
        ({"drop_last": True}, "drop_last: not with native=True"),
        ({"crop_pct": 0.9}, "crop_pct: not with native=True"),
        ({"max_image_tokens": 150}, "at most half of max_tokens=211, got 150"),
    ],
)
def test_options_that_do_not_fit_are_refused(folder, options, message):
    options = {"native": True, "max_tokens": 211, **options}
    with pytest.raises(ValueError, match=message):
        ImageFolderData(folder, **options)


def module_for(data, **options):
    facts = data.describe()
    native, patch = facts.pop("native"), facts.pop("patch_size")
    model = ViT(
        image_size=facts["image_size"], patch_size=patch, in_channels=facts["in_channels"],
        num_classes=2, dim=24, depth=2, num_heads=3, native=native,
    )  # fmt: skip
    return ImageClassification(model, **facts, **options)


def test_a_batch_is_classified_as_its_images_alone(folder):
    data = ready(folder)
    module = module_for(data).eval()
    images, labels = next(iter(data.val_dataloader()))
    together = module.predict_step((images, labels), 0)
    alone = [module.predict_step((one[None], label[None]), 0)
             for one, label in zip(images, labels, strict=True)]  # fmt: skip
    assert together["truth"] == [one["truth"][0] for one in alone]
    torch.testing.assert_close(
        together["probability"], [one["probability"][0] for one in alone], rtol=1e-5, atol=1e-5
    )
    assert module.explained((images[:1], labels[:1])).inputs.shape[1:] == images[0].shape
    several = module.explained((images, labels))
    assert [one.shape for one in several.inputs] == [one.shape for one in images]
    assert "images of different sizes" in several.notes[0]
    assert several.alone(1).pictures.shape[1:] == images[1].shape
    as_one = several.of_one_size()
    assert as_one.inputs.shape == as_one.pictures.shape
    assert as_one.inputs.shape[0] == len(images)
    assert "are resized to" in as_one.notes[-1]


def test_a_page_has_the_maps_of_each_image_on_its_own_grid(folder, tmp_path_factory):
    from attnkit.interpret.report import Report

    out = tmp_path_factory.mktemp("page")
    data = ready(folder)
    module = module_for(data).eval()
    images, labels = next(iter(data.val_dataloader()))
    explained = module.explained((images[:3], labels[:3]))
    explained.names = ["one", "two", "three"]
    report = Report(methods=["relevance", "occlusion"])
    found = report(explained, out / "all")
    alone = []
    for place, image in enumerate(images[:3]):
        one = report(explained.alone(place), out / str(place))
        alone.append(one)
        rows, columns = (side // 5 for side in image.shape[1:])
        for method in ("relevance", "occlusion"):
            values = found.arrays[f"map_{method}_{place}"]
            assert values.shape == (rows, columns)
            np.testing.assert_allclose(values, one.arrays[f"map_{method}"][0], rtol=1e-4, atol=1e-5)
        section = found.sections[place]
        assert section["shape"] == f"{image.shape[2]} / {image.shape[1]}"
        assert (section["data"]["rows"], section["data"]["columns"]) == (rows, columns)
        assert section["caption"] == one.sections[0]["caption"]
    for number, row in enumerate(found.rows):
        each = [one.rows[number] for one in alone]
        assert row["map"] == each[0]["map"]
        assert row["images"] == 3
        for name in ("gap_mask", "gap_mean", "similarity_random_weights"):
            if row.get(name) is not None:
                mean = np.mean([one[name] for one in each])
                np.testing.assert_allclose(row[name], mean, rtol=1e-4, atol=1e-5)
        errors = [one["gap_mask_random"] for one in each]
        np.testing.assert_allclose(row["gap_mask_random"], np.square(errors).sum() ** 0.5 / 3)
    better = found.rows[0]["gap_mask"] > found.rows[0]["gap_mask_random"]
    said = found.rows[0]["verdict_mask"].split("; ")[0]
    assert said == ("better than random" if better else "no better than random")
    gaps = found.arrays["gap_mask_relevance"]
    np.testing.assert_allclose(gaps.mean(), found.rows[0]["gap_mask"], rtol=1e-5)


def test_one_of_several_sizes_is_a_batch_with_its_own_evidence():
    sizes = ((10, 20), (15, 5))
    images = [torch.rand(3, *size) for size in sizes]
    masks = [torch.rand(size) > 0.5 for size in sizes]
    explained = Explained(nn.Identity(), images, pictures=images, masks=masks, names=["a", "b"])
    alone = explained.alone(1)
    assert torch.equal(alone.inputs, images[1][None])
    assert torch.equal(alone.masks, masks[1][None])
    assert (alone.has_sizes, alone.name(0)) == (False, "b")


def test_a_batch_judged_one_by_one_is_judged_as_a_batch():
    import attnkit
    from attnkit.interpret.trust.judge import pooled

    torch.manual_seed(0)
    model = ViT(image_size=20, patch_size=5, num_classes=3, dim=24, depth=2, num_heads=3).eval()
    images = torch.randn(4, 3, 20, 20)
    images -= images.mean((2, 3), keepdim=True)  # patches that are removed get the mean colour
    seen = [attnkit.explain(model, one[None], method="input_gradient") for one in images]
    trusts = [one.trust(orders=2) for one in seen]
    together = pooled(trusts)
    whole = attnkit.explain(model, images, method="input_gradient").trust(orders=2)
    for name in ("gap in p, mean colour", "class sensitivity"):
        assert together[name].map == pytest.approx(whole[name].map, abs=2e-3)
        gradient = whole[name].input_gradient  # ties of the centred map are random
        assert together[name].input_gradient == pytest.approx(gradient, abs=2e-3)
    assert together.num_images == 4
    assert set(together.verdicts) == set(whole.verdicts)
    assert pooled(trusts[:1]) is trusts[0]


def test_commands_train_test_and_predict(folder, tmp_path_factory, capfd):
    from attnkit.launch.main import main

    out = tmp_path_factory.mktemp("runs")
    common = [
        "task=vit", "data=image_folder", f"data.root={folder}", "data.native=true",
        "data.max_tokens=211", "data.patch_size=5", "trainer.accelerator=cpu", "data.num_workers=0",
        "model.dim=24", "model.depth=2", "model.patch_dropout=0.2", "model.drop_path=0.1",
    ]  # fmt: skip
    assert main([*common, "trainer.max_epochs=2", f"run_dir={out}/whole"]) in (0, None)
    text = capfd.readouterr()
    assert "images of their own sizes" in text.out + text.err
    results = json.loads((out / "whole" / "results.json").read_text())
    assert results["test/accuracy"] >= 0
    predict = ["run=predict", f"ckpt={out}/whole", f"images={folder}", f"run_dir={out}/p"]
    assert main(predict) in (0, None)
    assert len((out / "p" / "predictions.csv").read_text().splitlines()) == 47
    capfd.readouterr()
    assert main([*common, f"distill.teacher={out}/whole", f"run_dir={out}/student"]) == 2
    said = capfd.readouterr().err
    assert "distill.teacher: expected images of one size, got data.native=true; data.nat" in said


def test_a_network_of_timm_by_name_trains_and_explains(folder, tmp_path_factory, capfd):
    from attnkit.launch.main import main

    out = tmp_path_factory.mktemp("runs")
    common = [
        "task=vit", "model=timm", "model.name=test_vit", "+model.patch_size=5", "data=image_folder",
        f"data.root={folder}", "data.native=true", "data.max_tokens=211", "data.patch_size=5",
        "trainer.accelerator=cpu", "data.num_workers=0", "trainer.max_epochs=1",
    ]  # fmt: skip
    assert main([*common, f"run_dir={out}/whole"]) in (0, None)
    results = json.loads((out / "whole" / "results.json").read_text())
    assert results["test/accuracy"] >= 0
    explain = ["run=explain", f"ckpt={out}/whole", "explain.num_images=2", f"run_dir={out}/seen"]
    capfd.readouterr()
    assert main(explain) in (0, None)
    assert "each has its own grid" in capfd.readouterr().out
    maps = np.load(out / "seen" / "maps.npz")
    assert {"map_relevance_0", "map_relevance_1"} <= set(maps)


def test_a_network_of_timm_with_other_parts_is_refused_in_a_line(folder, tmp_path_factory, capfd):
    from attnkit.launch.main import main

    common = [
        "task=vit", "model=timm", "data=image_folder", f"data.root={folder}", "data.native=true",
        "data.max_tokens=211", "data.patch_size=5", "trainer.accelerator=cpu",
        f"run_dir={tmp_path_factory.mktemp('runs')}/never", "data.num_workers=0",
    ]  # fmt: skip
    for name, has in {
        "vit_small_patch16_rope_224": "rotary positions",
        "swin_tiny_patch4_window7_224": "attention in windows",
        "test_resnet": "test_resnet is timm's ResNet; expected a plain",
    }.items():
        assert main([*common, f"model.name={name}"]) == 2
        said = capfd.readouterr().err.strip().split("\n")[-1]
        assert f"native: {name} is timm's" in said
        assert has in said


def test_pretrained_weights_of_timm_are_those_of_the_images_alone(stand_in, tmp_path):
    from attnkit.interop import timm_network

    file = tmp_path / "net.pth"
    torch.save(stand_in.state_dict(), file)
    ours = timm_network("test_vit", 3, stand_in.num_classes, weights=file, native=True).eval()
    size = stand_in.patch_embed.img_size
    images = torch.randn(2, 3, *size)
    torch.testing.assert_close(ours(images), stand_in.eval()(images), rtol=1e-5, atol=1e-5)
    small = torch.randn(3, 48, 80)
    together = ours([images[0], small])
    import timm

    theirs = timm.create_model("test_vit", num_classes=stand_in.num_classes, dynamic_img_size=True)
    theirs.load_state_dict(stand_in.state_dict())
    alone = theirs.eval()(small[None])
    torch.testing.assert_close(together[1:], alone, rtol=1e-5, atol=1e-5)


def test_a_model_of_one_size_is_refused(folder):
    data = ready(folder)
    module = module_for(data)
    module.model.native = False

    class Trainer:
        lightning_module = module
        world_size, global_rank = 1, 0

    data.trainer = Trainer()
    with pytest.raises(UserError, match="ViT takes images of one size alone"):
        data.setup("fit")
