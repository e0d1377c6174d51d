"""The commands and code of docs/finetuning.md run, with random weights for pretrained ones."""

import re
import shlex
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from attnkit.launch.main import main

PAGE = (Path(__file__).parent.parent / "docs" / "finetuning.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for language, code in BLOCKS if language == "bash" for line in code.splitlines()]
SNIPPETS = [code for language, code in BLOCKS if language == "python"]
# Smaller networks of timm's for those of the page.
SMALL = {"vit_small_patch16_224": "test_vit", "resnet18": "test_resnet"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a reader stands: her photos and weights, and nothing else."""
    folder = tmp_path_factory.mktemp("reader")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 9, 40, 50, 3), dtype=np.uint8)
    for name, images in zip(("cat", "dog"), pixels, strict=True):
        (folder / "photos" / "train" / name).mkdir(parents=True)
        for number, image in enumerate(images):
            Image.fromarray(image).save(folder / "photos" / "train" / name / f"{number}.png")
    network = timm.create_model("test_vit", num_classes=11)
    (folder / "weights").mkdir()
    save_file(network.state_dict(), folder / "weights" / "net.safetensors")
    timm.models.save_for_hf(
        network, folder / "weights" / "hf", model_config={"num_classes": 11},
        safe_serialization=True,
    )  # fmt: skip
    kind = pytest.importorskip("transformers").Dinov2Model
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 56}
    kind(kind.config_class(**sizes)).save_pretrained(folder / "weights" / "tower")
    return folder


@pytest.fixture
def _random_weights(monkeypatch):
    """What timm would download: it builds the network, and leaves it random."""
    create = timm.create_model

    def offline(name, pretrained=False, **options):
        return create(name, pretrained and "pretrained_cfg_overlay" in options, **options)

    monkeypatch.setattr(timm, "create_model", offline)


def test_there_are_commands():
    assert len(COMMANDS) >= 7
    assert any(name in PAGE for name in SMALL)


@pytest.mark.slow
@pytest.mark.usefixtures("_random_weights")
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_shortened(command, folder, monkeypatch, capfd):
    """In the order of the page, in one folder: later ones use what earlier ones left."""
    for name, small in SMALL.items():
        command = command.replace(f"name={name}", f"name={small}")
    words = shlex.split(command.removeprefix("python -m attnkit "))
    if any(word.startswith("task=") for word in words):
        words += ["trainer.limit_batches=1", "data.batch_size=2", "trainer.max_epochs=1",
                  "callbacks.curves=null", "logger.tensorboard=null"]  # fmt: skip
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    assert main([*words, "trainer=cpu"] if "run=export" not in words else words) == 0
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("code", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippets(code, folder, monkeypatch):
    monkeypatch.chdir(folder)
    torch.manual_seed(0)
    exec(compile(code, "finetuning.md", "exec"), {"__name__": "__main__"})
