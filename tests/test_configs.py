"""Every shipped configuration of every group composes, checks, trains two batches and predicts."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from attnkit.launch.main import main
from attnkit.tasks.image_classification import CIFAR10Data, MemoryImages

CONF = Path(__file__).resolve().parent.parent / "conf"
FILES = sorted(p.relative_to(CONF) for p in CONF.glob("*/*.yaml"))
ELSEWHERE = {Path("trainer/cpu_ddp.yaml")}  # takes its steps in launch/test_vit.py
GRAPHS = {
    "dictionary_lookup",
    "digits_graph",
    "gat",
    "gat_sep",
    "gatv2",
    "graph",
    "graph_transformer",
    "heterophilous",
    "planetoid",
    "pyg",
}
CNNS = {"channel", "cnn", "spatial"}
CAPTIONS = {
    "caption_csv",
    "captioner",
    "captioning",
    "coco_captions",
    "karpathy",
    "looks",
    "scenes",
}
QUICK = (
    "trainer.max_epochs=1", "trainer.limit_batches=2", "data.batch_size=3", "callbacks.last=null",
    "callbacks.curves=null", "logger.tensorboard=null",
)  # fmt: skip


# Attention that is none of torch's, or none.
WITHOUT_KERNELS = {"bam", "cbam", "coordinate", "eca", "none", "scse", "se"}
# What has nothing to predict.
UNPREDICTED = {"dictionary_lookup"}


def test_there_are_configurations():
    assert len(FILES) >= 18
    groups = {path.parent.name for path in FILES}
    assert {"task", "model", "data", "optimizer", "scheduler", "trainer", "callbacks"} <= groups


@pytest.mark.parametrize("path", ["config.yaml", *map(str, FILES)])
def test_says_what_it_is(path):
    first = (CONF / path).read_text().removeprefix("# @package _global_\n").splitlines()[0]
    assert first.startswith("# ")
    assert len(first) > 20


def _cases():
    """Of all, training; of tasks and most models, check and prediction too; of all with -m slow."""
    for path in FILES:
        if path not in ELSEWHERE:
            quick = path.parent.name in ("task", "model") and path.stem != "vit_base"
            yield pytest.param(path, True, id=f"{path}", marks=[] if quick else pytest.mark.slow)
            if not quick:
                yield pytest.param(path, False, id=f"{path}-trains")


def test_every_configuration_is_a_case():
    assert {case.values[0] for case in _cases() if case.values[1]} == set(FILES) - ELSEWHERE


@pytest.mark.parametrize(("path", "whole"), list(_cases()))
def test_checks_trains_and_predicts(path, whole, graph_files, tmp_path, monkeypatch, capfd):
    group, choice = path.parent.name, path.stem
    monkeypatch.chdir(tmp_path)
    command = [f"{group}={choice}", *QUICK]
    if group != "trainer":
        command.append("trainer=cpu")
    if (group, choice) == ("logger", "wandb"):
        pytest.importorskip("wandb.sdk")  # not the folder of that name
        command.append("logger.wandb.offline=true")
    used = {choice, *_defaults(yaml.safe_load((CONF / path).read_text()) or {})}
    if used & GRAPHS:
        command.append("task=graph")
    elif used & CAPTIONS or group in ("encoder", "decoder"):
        command += ["task=captioning", f"{group}={choice}", "encoder.dim=16", "decoder.dim=16"]
        if choice == "timm":
            command.append("encoder.name=test_resnet")
        if group == "data" and choice != "scenes":
            command += _captions(choice, tmp_path / "captions")
        else:
            command += ["data.num_train=9", "data.num_val=3", "data.num_test=3"]
    elif used & CNNS or group in ("attention", "backbone"):
        command += ["task=spatial", f"{group}={choice}", "backbone.num_blocks=1"]
        if choice == "timm":
            command[-1] = "backbone.name=test_resnet"
    elif group != "model":
        command += ["model.dim=24", "model.depth=1"]
    if "planetoid" in used:
        graph_files.write_planetoid(tmp_path / "graph", "Cora", isolated=())
        command.append(f"data.root={tmp_path / 'graph'}")
    if "heterophilous" in used:
        np.savez(tmp_path / "minesweeper.npz", **graph_files.heterophilous_arrays())
        command.append(f"data.root={tmp_path}")
    if "image_folder" in used:
        command.append(f"data.root={_images(tmp_path / 'images')}")
    if "cifar10" in used:  # 170 MB that are not here: random images of its size instead
        monkeypatch.setattr(CIFAR10Data, "load", _random_images)
        monkeypatch.setattr(CIFAR10Data, "prepare_data", lambda self: None)

    before = set(tmp_path.rglob("*"))
    run = tmp_path / "run"
    code = main(["run=check", *command] if whole else [*command, f"run_dir={run}"])
    assert not whole or set(tmp_path.rglob("*")) == before
    if group == "trainer" and choice in ("gpu", "ddp", "fsdp") and not torch.cuda.is_available():
        assert code == 2
        assert "trainer: " in capfd.readouterr().err
        assert not run.exists()
        return
    assert code == 0, capfd.readouterr().err
    if whole:
        said = capfd.readouterr().out
        assert "multiply-adds of a sample" in said
        assert ("kernel of" in said) == (not used & WITHOUT_KERNELS)
        assert main([*command, f"run_dir={run}"]) == 0, capfd.readouterr().err
    results = json.loads((run / "results.json").read_text())
    assert results["steps"] == 2
    figure = "test/bleu1" if "task=captioning" in command else "test/accuracy"
    assert 0 <= results[figure] <= 1

    if not whole:
        return
    predict = ["run=predict", f"ckpt={run}", f"run_dir={tmp_path / 'predicted'}"]
    if "task=graph" not in command:
        predict.append(f"images={_pictures(tmp_path / 'pictures')}")
    if used & UNPREDICTED:
        assert main(predict) == 2
        assert "has no predict_dataloader" in capfd.readouterr().err
        return
    assert main(predict) == 0, capfd.readouterr().err
    rows = (tmp_path / "predicted" / "predictions.csv").read_text().splitlines()
    assert len(rows) > 2


def _defaults(config):
    return [
        v for line in config.get("defaults", []) if isinstance(line, dict) for v in line.values()
    ]


def _pictures(root):
    root.mkdir()
    for number in range(2):
        Image.new("RGB", (33, 31), (number * 90, 70, 110)).save(root / f"{number}.png")
    return root


def _images(root):
    for name in ("cats", "dogs"):
        (root / "train" / name).mkdir(parents=True)
        for number in range(7):
            Image.new("RGB", (19, 17), (number * 30, 70, 110)).save(
                root / "train" / name / f"{number}.png"
            )
    return root


def _captions(choice, root):
    """Twenty captioned pictures in the form of a data set, and the keys that say where they are."""
    root.mkdir()
    names = [f"{number}.png" for number in range(20)]
    for number, name in enumerate(names):
        Image.new("RGB", (32, 32), (number * 10, 70, 110)).save(root / name)
    sentences = [f"a picture number {number}" for number in range(20)]
    file = root / "captions.json"
    command = [f"data.annotations={file}", f"data.images={root}", "data.min_count=1"]
    if choice == "caption_csv":
        rows = [f"{name},{sentence}" for name, sentence in zip(names, sentences, strict=True)]
        (root / "captions.csv").write_text("\n".join(["image,caption", *rows]))
        return [f"data.table={root / 'captions.csv'}", "data.min_count=1"]
    if choice == "karpathy":
        images = [
            {"filename": name, "split": "train", "sentences": [{"raw": sentence}]}
            for name, sentence in zip(names, sentences, strict=True)
        ]
        file.write_text(json.dumps({"images": images}))
        return command
    images = [{"id": number, "file_name": name} for number, name in enumerate(names)]
    captions = [{"image_id": n, "caption": s} for n, s in enumerate(sentences)]
    file.write_text(json.dumps({"images": images, "annotations": captions}))
    return command


def _random_images(self):
    images = torch.randint(0, 256, (53, 3, 32, 32), dtype=torch.uint8)
    labels = torch.arange(53) % 10
    return {"train": MemoryImages(images, labels), "test": MemoryImages(images, labels)}, list(
        "abcdefghij"
    )
