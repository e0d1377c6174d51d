"""Captioning from the command line: what the other tasks' runs are proof against, with words."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from attnkit.launch.folder import load_config, save_config
from attnkit.launch.main import main

TINY = (
    "task=captioning", "trainer=cpu", "encoder.dim=16", "encoder.stages=[[8],[8],[16]]",
    "decoder.dim=16", "data.image_size=24", "data.num_train=24", "data.num_val=6",
    "data.num_test=7", "data.batch_size=3", "trainer.max_epochs=1",
    "callbacks.curves=null", "logger.tensorboard=null",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An LSTM that says several words of each scene, and a table with captions of its own."""
    folder = tmp_path_factory.mktemp("captioning")
    command = [*TINY, "decoder=lstm", "decoder.doubly_stochastic=1.0", "trainer.max_epochs=14"]
    command += ["optimizer=adamw", "optimizer.lr=1e-2", "trainer.check_val_every_n_epoch=7"]
    assert main([*command, f"run_dir={folder / 'run'}"]) == 0
    rows = ["image,caption"]
    for number in range(20):
        Image.new("RGB", (24, 24), (number * 10, 70, 110)).save(folder / f"{number}.png")
        rows.append(f"{number}.png,a picture number {number}")
    for name, row in (
        ("good", []),
        ("missing", ["nowhere.png,a picture"]),
        ("empty", ["3.png,  "]),
    ):
        (folder / f"{name}.csv").write_text("\n".join([*rows[:5], *row, *rows[5:]]))
    other = ["data=caption_csv", f"data.table={folder / 'good.csv'}", "data.min_count=1"]
    settings = [s for s in TINY if not s.startswith("data.num")]
    assert main([*settings, *other, "decoder=lstm", f"run_dir={folder / 'other'}"]) == 0
    return folder


def figures(folder: str | Path) -> dict:
    results = json.loads((Path(folder) / "results.json").read_text())
    return {name: value for name, value in results.items() if name.startswith("test/")}


def test_the_vocabulary_is_one_line_of_the_configuration(trained):
    text = (trained / "run/config.yaml").read_text()
    (line,) = [line for line in text.splitlines() if "surrounded" in line]
    assert line.startswith("    words: [a, ")
    checkpoint = torch.load(trained / "run/checkpoints/best.ckpt", weights_only=True)
    vocabulary = checkpoint["hyper_parameters"]["vocabulary"]
    assert yaml.safe_load(text)["module"]["vocabulary"] == vocabulary
    awkward = {"task": "x", "words": ["no", "1", "a: b", "'", "ü\n", "[", "", "# x", "~" * 300]}
    awkward |= {"nested": [[1, 2], {"a": [0.5, None]}], "empty": [], "text": "two\nlines " * 90}
    save_config(Path.cwd(), awkward)
    assert load_config(Path.cwd()) == awkward


@pytest.mark.slow
def test_one_and_two_processes_agree(attnkit, trained):
    """Of 7 scenes in batches of 3, the document frequencies of CIDEr are of all of them."""
    for name in ("cpu", "cpu_ddp"):
        done = attnkit("run=test", f"ckpt={trained}/run", f"trainer={name}", f"run_dir={name}")
        assert done.code == 0, done.err
    assert json.loads((trained / "run/results.json").read_text())["train/doubly_stochastic"] > 0
    one, two = figures("cpu"), figures("cpu_ddp")
    assert one["test/cider_d"] > 0.01
    assert one["test/bleu2"] > 0.05
    assert one["test/compositional/cider"] != one["test/cider"]
    assert one == pytest.approx(two, abs=1e-6)
    assert one == pytest.approx(figures(trained / "run"), abs=1e-6)


def test_a_checkpoint_alone_is_enough(attnkit, refused, trained):
    """Also for data with other words: the numbers are those of the checkpoint's vocabulary."""
    shutil.copy(trained / "run/checkpoints/best.ckpt", "alone.ckpt")
    alone = ("task=captioning", "ckpt=alone.ckpt", "trainer=cpu")
    done = attnkit(*alone, "run=test", *TINY[5:10], "run_dir=test")
    assert done.code == 0, done.err
    assert figures("test") == figures(trained / "run")
    found = {}
    for name, command in (("alone", alone), ("run", (f"ckpt={trained}/run",))):
        done = attnkit(
            *command, "run=predict", f"images={trained / '7.png'}", f"run_dir=predict_{name}"
        )
        assert done.code == 0, done.err
        found[name] = Path(f"predict_{name}/predictions.csv").read_text()
    assert found["alone"] == found["run"]
    for change in ("module.method=beam", "decoder=lstm_hard", "encoder.dim=8"):
        refused(f"{change}: can't change what alone.ckpt holds", *alone, "run=test", change)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("vit", "task=vit: ImageClassification has no vocabulary"),
        ("graph", "task=graph: NodeClassification has no vocabulary"),
    ],
)
def test_the_checkpoint_of_another_task_is_told(refused, trained, task, said):
    shutil.copy(trained / "run/checkpoints/best.ckpt", "alone.ckpt")
    refused(said, "run=export", f"task={task}", "ckpt=alone.ckpt")
    assert [path.name for path in Path.cwd().iterdir()] == ["alone.ckpt"]


def test_decoding_changes_in_the_run_folder(attnkit, trained):
    beams = ("module.method=beam", "module.num_beams=3", "module.length_penalty=1.0")
    done = attnkit("run=test", f"ckpt={trained}/run", *beams, "run_dir=beam")
    assert done.code == 0, done.err
    assert figures("beam") != figures(trained / "run")


TEST = "run=test ckpt={run}"
WRONG = [
    # data
    ("data=caption_csv data.table={folder}/missing.csv", "line 6: no such image: {folder}/nowhere"),
    ("data=caption_csv data.table={folder}/empty.csv", "line 6: an empty caption of 3.png"),
    ("data.min_count=1000", "data.min_count: no word occurs 1000 times"),
    # parts that do not fit
    ("decoder=lsmt", "decoder has no choice 'lsmt'; did you mean lstm?"),
    ("decoder.max_words=3", "max_words: expected 3 to 4 with START and END"),
    ("encoder.image_size=32", "image_size: got 24, but the encoder was made for 32 x 32 pixels"),
    # decoding
    ("module.method=bean", "method: expected 'greedy', 'beam' or 'sample', got 'bean'"),
    # what was trained with something else
    (f"{TEST} data.image_size=32", "data.image_size: got 32, but the module was made for 24"),
    ("run=test ckpt={mixed}", "does not fit the model\n  size mismatch for model.decoder.embed"),
    ("resume={mixed} trainer.max_epochs=20", "last.ckpt does not fit the model"),
    (
        "run=explain ckpt={run} images={folder}/0.png explain.layer=1",
        "run=explain: layers: 1 is none of the 1 attention layers",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("command", "message"), WRONG)
def test_wrong_settings(refused, trained, tmp_path, command, message):
    names = {"folder": trained, "run": trained / "run", "mixed": tmp_path / "mixed"}
    if "{mixed}" in command:  # a run with the checkpoints of one that had other words
        shutil.copytree(trained / "run", tmp_path / "mixed")
        for name in ("best", "last"):
            shutil.copy(trained / f"other/checkpoints/{name}.ckpt", tmp_path / "mixed/checkpoints")
    words = command.format(**names).split(" ")
    if not any(word.startswith(("run=", "resume=")) for word in words):
        same = {word.partition("=")[0] for word in words}
        words = [s for s in TINY if s.partition("=")[0] not in same] + words
        if any(word.startswith("data=") for word in words):
            words = [word for word in words if not word.startswith("data.num")]
    refused(message.format(**names), *words)


def test_other_data_has_the_numbers_of_the_modules_words(attnkit, trained):
    """`words` of a batch are of the vocabulary that the module brings, however late it comes."""
    from attnkit.tasks.captioning import CaptionCsvData, ImageCaptioning

    module = ImageCaptioning.load_from_checkpoint(trained / "run/checkpoints/best.ckpt")
    data = CaptionCsvData(trained / "good.csv", min_count=1)
    data.setup()
    own = data.sets["val"][0]["words"]
    data.trainer = type("Trainer", (), {"lightning_module": module, "num_devices": 1})()
    data.setup("test")
    words = data.sets["val"][0]["words"]
    assert words.shape[1] == module.max_words != own.shape[1]
    said = module.tokenizer.decode(words[0])
    assert said == "a picture <unknown> <unknown>"
    assert not torch.equal(words[0, : own.shape[1]], own[0])
