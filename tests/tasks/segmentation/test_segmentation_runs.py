"""Segmentation from the command line: what runs leave, and that it is read again."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from attnkit.launch.main import main

TINY = (
    "task=segmentation", "trainer=cpu", "backbone.dim=24", "backbone.depth=2", "optimizer=adamw",
    "data.image_size=24", "data.num_train=24", "data.num_val=6", "data.num_test=7",
    "data.batch_size=3", "data.horizontal_flip=0.5", "model.patch_size=8", "callbacks.curves=null",
    "logger.tensorboard=null", "trainer.max_epochs=2", "scheduler=constant",  # as of one epoch
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("segmentation")
    assert main([*TINY, f"run_dir={folder / 'run'}"]) == 0
    for number, size in enumerate(((40, 30), (19, 61))):
        path = folder / "pictures" / "inner" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise(size, 80).convert("RGB").save(path)
    return folder


def own_pictures(root, count):
    """A folder of pictures of different sizes, with masks of 3 classes."""
    draw = np.random.default_rng(0)
    for name in ("images", "masks"):
        (root / name).mkdir(parents=True)
    for number in range(count):
        size = 26 + number, 31, 3
        pixels = draw.integers(0, 256, size).astype(np.uint8)
        Image.fromarray(pixels).save(root / f"images/{number}.jpg")
        Image.fromarray(pixels[..., 0] // 86).save(root / f"masks/{number}.png")
    return root


def own(root):
    """The command of a training on such a folder."""
    of_files = [f"data.root={root}", "data.val_fraction=0.2", "data.test_fraction=0.2"]
    tiny = [c for c in TINY if not c.startswith("data.num")]
    return [*tiny, "data=segmentation_files", "data.num_workers=0", *of_files]


def figures(folder):
    results = json.loads((folder / "results.json").read_text())
    return {name: value for name, value in results.items() if name.startswith("test/")}


def test_a_run_leaves_its_tables_and_pictures(trained):
    run = trained / "run"
    found = figures(run)
    rows = (run / "per_class.csv").read_text().splitlines()
    assert rows[0] == "class,iou,precision,recall,f1,support"
    assert [row.split(",")[0] for row in rows[1:3]] == ["background", "circle"]
    assert sum(int(row.rpartition(",")[2]) for row in rows[1:]) == 7 * 24 * 24
    assert 0 < found["test/miou"] < found["test/accuracy"] < 1
    sheet = Image.open(run / "examples.png")
    assert sheet.width == 3 * 24 * 7  # enlarged to 168 pixels a row
    assert (run / "confusion_matrix.png").exists()


def test_a_resumed_run_ends_as_an_uninterrupted_one(trained, tmp_path):
    half = tmp_path / "half"
    assert main([*TINY, f"run_dir={half}", "trainer.max_epochs=1"]) == 0
    assert main([f"resume={half}", "trainer.max_epochs=2"]) == 0
    states = [
        torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for folder in (trained / "run", half)
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert figures(half) == pytest.approx(figures(trained / "run"))


def test_windows_are_one_setting_of_data_and_module(trained, tmp_path, capfd):
    assert main([*TINY, "module.windows=true", f"run_dir={tmp_path / 'wrong'}"]) == 2
    said = capfd.readouterr().err
    assert "module.windows: got true, but data.windows is false" in said
    assert "Traceback" not in said
    run = tmp_path / "run"
    root = own_pictures(tmp_path / "own", 6)
    windows = ["data.windows=true", "data.crop_min_area=null"]
    assert main([*own(root), *windows, f"run_dir={run}"]) == 0
    assert main(["run=test", f"ckpt={run}", f"run_dir={tmp_path / 'test'}"]) == 0
    assert figures(tmp_path / "test") == pytest.approx(figures(run))


@pytest.mark.parametrize("levels", [[0, 1, 2], [0, 255, 255]])
def test_a_folder_of_test_alone_has_the_classes_of_the_module(levels, tmp_path):
    root = own_pictures(tmp_path / "own", 7)
    for path in (root / "masks").iterdir():
        mask = np.array(levels, dtype=np.uint8)[np.asarray(Image.open(path))]
        Image.fromarray(mask).save(path)
    for folder in ("images", "masks"):
        for split, numbers in (("train", "0123"), ("val", "4"), ("test", "56")):
            (root / folder / split).mkdir()
            for number in numbers:
                (path,) = (root / folder).glob(f"{number}.*")
                path.rename(root / folder / split / path.name)
    assert main([*own(root), f"run_dir={tmp_path / 'run'}"]) == 0
    for path in (root / "masks/test").iterdir():  # the last class is not there
        if levels[1] == 1:
            Image.fromarray(np.asarray(Image.open(path)).clip(max=1)).save(path)
    again = ["run=test", f"ckpt={tmp_path / 'run'}"]
    assert main([*again, f"run_dir={tmp_path / 'whole'}"]) == 0
    for folder in ("images", "masks"):
        shutil.copytree(root / folder / "test", tmp_path / "alone" / folder / "test")
    alone = f"data.root={tmp_path / 'alone'}"
    assert main([*again, alone, f"run_dir={tmp_path / 'test'}"]) == 0
    assert figures(tmp_path / "test") == pytest.approx(figures(tmp_path / "whole"))


@pytest.mark.parametrize("windows", ["false", "true"])
def test_predicted_masks_are_indexed_pictures_of_the_same_size(trained, tmp_path, windows):
    command = ["run=predict", f"ckpt={trained / 'run'}", f"images={trained / 'pictures'}"]
    assert main([*command, f"module.windows={windows}", f"run_dir={tmp_path / 'out'}"]) == 0
    rows = (tmp_path / "out" / "predictions.csv").read_text().splitlines()
    names, *shares = (row.split(",") for row in rows)
    assert names[:3] == ["path", "share(background)", "share(circle)"]
    for number, size in enumerate(((40, 30), (19, 61))):
        mask = Image.open(tmp_path / "out" / "masks" / "inner" / f"{number}.jpg.png")
        assert (mask.mode, mask.size) == ("P", size)
        counts = np.bincount(np.asarray(mask).flatten(), minlength=9) / np.prod(size)
        assert [float(cell) for cell in shares[number][1:]] == pytest.approx(counts, abs=1e-6)
        overlay = Image.open(tmp_path / "out" / "overlays" / "inner" / f"{number}.jpg.png")
        assert (overlay.mode, overlay.size) == ("RGB", size)


def test_a_pixel_is_explained(trained, tmp_path, capfd):
    command = ["run=explain", f"ckpt={trained / 'run'}", "explain.trust=none"]
    pictures = f"images={trained / 'pictures'}"
    for number, more in enumerate(([], [pictures])):
        made = [*command, *more, "module.region=[3,5]", "explain.num_images=2"]
        assert main([*made, f"run_dir={tmp_path / str(number)}"]) == 0, capfd.readouterr().err
        assert "rows 3 to 3, columns 5 to 5" in capfd.readouterr().out
    assert main([*command, "module.region=[3,99]", f"run_dir={tmp_path / 'wrong'}"]) == 2
    assert "region: expected a pixel" in capfd.readouterr().err


def test_an_export_gives_the_logits_of_the_module(trained, tmp_path):
    command = ["run=export", f"ckpt={trained / 'run'}", "export.formats=[safetensors,torch_export]"]
    assert main([*command, f"run_dir={tmp_path / 'out'}"]) == 0
    program = torch.export.load(tmp_path / "out/export/model.pt2").module()
    images = torch.randint(0, 256, (2, 3, 24, 24), dtype=torch.uint8)
    assert program(images).shape == (2, 9, 24, 24)
    config = json.loads((tmp_path / "out/export/config.json").read_text())
    assert config["classes"][0] == "background"
