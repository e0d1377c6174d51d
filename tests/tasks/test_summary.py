"""What a run says of its data: held against the files that are there."""

import csv
import re

import pytest
import torch
from PIL import Image

from attnkit.launch.main import main
from attnkit.tasks.graphs import DigitsGraphData
from attnkit.tasks.summary import class_lines

QUICK = (
    "trainer=cpu", "trainer.max_epochs=1", "trainer.limit_batches=1", "callbacks.curves=null",
    "callbacks.steps.cost=false", "logger.tensorboard=null", "data.num_workers=0",
)  # fmt: skip


@pytest.fixture
def photos(tmp_path):
    """Uneven classes, one broken file, one that is not an image."""
    numbers = {"train": {"cats": 60, "dogs": 180}, "val": {"cats": 7, "dogs": 5}}
    for split, classes in numbers.items():
        for name, count in classes.items():
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                colour = (number, 2 * number % 256, 200)
                Image.new("RGB", (20, 16), colour).save(folder / f"{number}.png")
    (tmp_path / "photos" / "train" / "cats" / "broken.png").write_text("no image")
    (tmp_path / "photos" / "train" / "cats" / "notes.txt").write_text("notes")
    return tmp_path / "photos"


def test_of_a_folder_of_images(photos, tmp_path, capfd):
    run = tmp_path / "run"
    words = ["model.dim=24", "model.depth=1", "data=image_folder", f"data.root={photos}"]
    code = main([*QUICK, "task=vit", *words, "data.image_size=16", f"run_dir={run}"])
    said = capfd.readouterr()
    assert code == 0, said.err
    log = (run / "run.log").read_text()
    before = said.out.partition("\nepoch 1/1")[0].splitlines()
    lines = [line for line in before if re.match(r"data: |  \S", line)]
    taken = int(re.match(r"data: (\d+) train", lines[0])[1])
    assert lines[0] == f"data: {taken} train, 12 val, {240 - taken} test images in 2 classes"
    assert re.match(
        r"  in train 5\d \(cats\) to 1\d\d \(dogs\) of a class, 3(\.\d+)? times", lines[1]
    )
    assert lines[1].endswith("; train/val/test of each:")
    assert re.match(r"  cats: 5\d/7/\d, dogs: 1\d\d/5/\d+", lines[2])
    assert lines[3] == "  RGB, 16 × 16 pixels, in patches of 2 × 2"
    assert re.match(r"  mean (0\.\d{3} ?){3}, deviation (0\.\d{3} ?){3}", lines[4])
    assert len(lines) == 5
    for line in lines:
        assert line in log
    # what was left out is on screen and in run.log
    for left_out in ("1 × .txt", "broken.png"):
        assert left_out in said.err
        assert left_out in log


def test_many_classes_are_summed_up():
    labels = {"train": torch.arange(12).repeat_interleave(5), "val": torch.zeros(3).long()}
    assert class_lines(labels, [f"c{i}" for i in range(12)]) == ["  in train 5 of each class"]
    labels["train"] = torch.cat([labels["train"], torch.zeros(15).long()])
    (line,) = class_lines(labels, [f"c{i}" for i in range(12)])
    assert line.startswith("  in train 5 (c1) to 20 (c0) of a class")
    assert line.endswith(", 4 times as many")
    few = class_lines({"train": torch.tensor([0, 0, 1])}, ["a", "b", "none"])
    assert few == [
        "  in train 0 (none) to 2 (a) of a class; train of each:",
        "  a: 2, b: 1, none: 0",
    ]


def test_of_a_graph_and_of_captions(tmp_path):
    graph = DigitsGraphData()
    graph.setup()
    lines = graph.summary()
    counts = [int(graph.graph[f"{name}_mask"].sum()) for name in ("train", "val", "test")]
    found = [int(text.replace(",", "")) for text in re.findall(r"(\d[\d,]*) \w", lines[0])]
    assert found == [*counts, 10]
    assert f"{graph.graph.num_edges:,} edges" in lines[1]
    assert len(lines) <= 8

    from attnkit.tasks.captioning import CaptionCsvData

    with (tmp_path / "captions.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "caption", "split"])
        for number in range(20):
            Image.new("RGB", (16, 16), (number, 0, 0)).save(tmp_path / f"{number}.png")
            for colour in ("dark", "red"):
                split = "train" if number < 12 else "val" if number < 16 else "test"
                writer.writerow([f"{number}.png", f"a {colour} square", split])
    data = CaptionCsvData(tmp_path / "captions.csv", split_column="split", min_count=1)
    data.setup()
    lines = data.summary()
    assert lines[0] == "data: 12 train, 4 val, 4 test images"
    assert lines[1].startswith("  captions: 24 train, 8 val, 8 test; ")
    assert lines[2].startswith("  RGB, 16 × 16 pixels")
