"""Attention in a convolutional network from the command line, and the table that compares them."""

import csv
import json
from pathlib import Path

import pytest
import timm
import torch

QUICK = (
    "trainer=cpu", "trainer.max_epochs=1", "trainer.limit_batches=2", "callbacks.curves=null",
    "callbacks.classes=null", "logger.tensorboard=null", "backbone.num_blocks=1",
)  # fmt: skip


def results_of(folder: str) -> dict:
    return json.loads((Path(folder) / "results.json").read_text())


def test_options_are_read(attnkit):
    sizes = {}
    for name, options in {
        "none": ["attention=none"],
        "se": ["attention=se"],
        "narrow": ["attention=se", "attention.reduction=2"],
        "stages": ["attention=se", "model.where=stages", "model.start_as_identity=true"],
        "one": ["attention=se", "model.where=stages.2"],
    }.items():
        done = attnkit("task=channel", *QUICK, *options, f"run_dir={name}")
        assert done.code == 0, done.err
        sizes[name] = results_of(name)["parameters"]
    expansions = {h: 2 * w * h + h + w for w, h in ((16, 1), (32, 2), (64, 4))}
    assert sizes["se"] - sizes["none"] == sum(expansions.values())
    assert sizes["narrow"] - sizes["none"] == sum(w * w + w // 2 + w for w in (16, 32, 64))
    assert sizes["stages"] == sizes["se"] + 3  # one block a stage, and a γ for each
    assert sizes["one"] == sizes["none"] + expansions[4]
    state = torch.load("one/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert [name for name in state if "attention.reduce.weight" in name] == [
        "model.stages.2.0.attention.reduce.weight"
    ]


@pytest.mark.slow
def test_a_checkpoint_alone_is_enough(attnkit):
    done = attnkit("task=spatial", *QUICK, "attention=window", "run_dir=run")
    assert done.code == 0, done.err
    Path("alone.ckpt").write_bytes(Path("run/checkpoints/best.ckpt").read_bytes())
    done = attnkit("run=test", "ckpt=run", "trainer=cpu", "run_dir=again")
    assert done.code == 0, done.err
    done = attnkit("task=spatial", "run=test", "ckpt=alone.ckpt", "trainer=cpu", "run_dir=alone")
    assert done.code == 0, done.err
    assert results_of("again")["test/loss"] == results_of("alone")["test/loss"]
    done = attnkit("run=test", "ckpt=run", "attention=se", "run_dir=other")
    assert done.code == 2
    assert "does not fit the model" in done.err


def test_timms_network(attnkit):
    done = attnkit(
        "task=channel", *QUICK[:-1], "backbone=timm", "backbone.name=test_resnet",
        "model.where=blocks", "attention=xca", "run_dir=run",
    )  # fmt: skip
    assert done.code == 0, done.err
    state = torch.load("run/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert any("layer1.0.attention" in name for name in state)


@pytest.mark.slow
def test_a_checkpoint_needs_no_pretrained_weights(attnkit, monkeypatch):
    """Which cannot be had here: timm is asked, and given weights of its first ones."""
    asked, create = [], timm.create_model

    def offline(name, pretrained, **kwargs):
        asked.append(pretrained)
        return create(name, **kwargs)

    monkeypatch.setattr(timm, "create_model", offline)
    backbone = ("backbone=timm", "backbone.name=test_resnet", "backbone.pretrained=true")
    done = attnkit("task=channel", *QUICK[:-1], *backbone, "run_dir=run")
    assert done.code == 0, done.err
    few = "trainer.limit_batches=2"
    done = attnkit("run=test", "ckpt=run", "trainer=cpu", few, "run_dir=again")
    assert done.code == 0, done.err
    assert asked == [True, False]  # made, tested


@pytest.mark.slow
def test_all_in_one_table(attnkit):
    """The ablation: figures beside costs, what was tuned in words, a picture."""
    done = attnkit(
        "-m", "task=spatial", *QUICK, "attention=none,eca,spatial", "seeds=2", "run_dir=sweep"
    )
    assert done.code == 0, done.err
    with Path("sweep/table.csv").open(newline="") as file:
        rows = {row["attention"]: row for row in csv.DictReader(file)}
    added = {name: int(float(row["multiply_adds"])) for name, row in rows.items()}
    assert added["none"] < added["eca"] < added["spatial"]
    assert int(float(rows["eca"]["parameters"])) == int(float(rows["none"]["parameters"])) + 9
    assert all(float(row["step_seconds"]) > 0 for row in rows.values())
    markdown = Path("sweep/table.md").read_text()
    assert markdown.count("±") >= 3 * 2
    assert "The trials differ in attention. All else is the same" in markdown
    assert "seeds in each: 2" in markdown
    assert "sweep/parameters.png" in done.out
    assert {row["n"] for row in rows.values()} == {"2"}
    assert all(float(row["test/accuracy_std"]) >= 0 for row in rows.values())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("attention=ses", "attention has no choice 'ses'; did you mean se?"),
        ("attention.reduction=0", "reduction: expected at least 1, got 0"),
        ("attention.kernel=3", "attention.kernel: attnkit.layers.SqueezeExcitation has no such"),
        ("model.where=layer9*", "where: expected 'blocks', 'stages' or a glob"),
        ("backbone.num_blocks=0", "num_blocks: expected at least 1, got 0"),
        ("task=vit", "ViT takes no argument 'attention', so it has no effect"),
    ],
)
def test_wrong_settings(attnkit, override, message):
    command = ["task=channel", "attention=se", override]
    if override.startswith(("task", "attention=")):
        command.remove("task=channel" if override[0] == "t" else "attention=se")
    done = attnkit(*command)
    assert done.code == 2
    assert message in done.err
    assert len(done.err.strip().splitlines()) <= 3
    assert list(Path.cwd().iterdir()) == []
