"""Attention in a convolutional network from the command line, and the table that compares them."""

import json
from pathlib import Path

import pytest
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


def test_timms_network(attnkit):
    done = attnkit(
        "task=channel", *QUICK[:-1], "backbone=timm", "backbone.name=test_resnet",
        "model.where=blocks", "attention=xca", "run_dir=run",
    )  # fmt: skip
    assert done.code == 0, done.err
    state = torch.load("run/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert any("layer1.0.attention" in name for name in state)


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
def test_wrong_settings(refused, override, message):
    command = ["task=channel", "attention=se", override]
    if override.startswith(("task", "attention=")):
        command.remove("task=channel" if override[0] == "t" else "attention=se")
    refused(message, *command)
