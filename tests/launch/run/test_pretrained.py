"""Fine-tuning by one command; random weights that timm saved stand in for pretrained ones."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

QUICK = ("trainer=cpu", "trainer.max_epochs=1", "trainer.limit_batches=2", "data.batch_size=4",
         "callbacks.curves=null", "callbacks.classes=null", "logger.tensorboard=null")  # fmt: skip
TIMM = ("task=vit", "model=timm")


class Evil:
    def __reduce__(self):
        return os.mkdir, ("was_run",)


@pytest.fixture(scope="module")
def saved(stand_in, stand_in_files):
    """Weights for 11 classes, in a folder with another mean; photos; bad files."""
    folder = stand_in_files
    torch.save({"state_dict": stand_in.state_dict(), "more": Evil()}, folder / "evil.pth")
    (folder / "junk.pth").write_bytes(b"junk")
    (folder / "empty").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (3, 9, 40, 50, 3), dtype=np.uint8)
    for name, images in zip(("cat", "dog", "eel"), pixels, strict=True):
        (folder / "photos" / "train" / name).mkdir(parents=True)
        for number, image in enumerate(images):
            Image.fromarray(image).save(folder / "photos" / "train" / name / f"{number}.png")
    return folder


@pytest.fixture
def photos(saved):
    return ("data=image_folder", f"data.root={saved / 'photos'}")


def config_of(run):
    return yaml.safe_load(Path(run, "config.yaml").read_text())


def results_of(run):
    return json.loads(Path(run, "results.json").read_text())


def test_what_is_set_is_not_taken_from_the_weights(attnkit, saved, photos):
    """And a folder says which network it holds; grey images get the mean over the colours."""
    done = attnkit(*TIMM, *QUICK, *photos, f"model.weights={saved / 'hf'}", "data.image_size=64",
                   "data.in_channels=1", "module.std=[0.25]", "run_dir=run")  # fmt: skip
    assert done.code == 0, done.err
    config = config_of("run")
    assert config["model"]["name"] == "test_vit"
    assert config["model"]["image_size"] == 64
    assert config["module"]["mean"] == pytest.approx([0.2])
    assert config["module"]["std"] == [0.25]


def test_backbones_are_normalised_as_they_were_trained(attnkit, saved, photos):
    done = attnkit("task=spatial", "attention=none", "backbone=timm", "backbone.name=test_vit",
                   f"backbone.weights={saved / 'hf'}", "data.image_size=64", *photos, *QUICK,
                   "run_dir=run")  # fmt: skip
    assert done.code == 0, done.err
    assert config_of("run")["module"]["mean"] == [0.1, 0.2, 0.3]


@pytest.mark.parametrize("form", ["hf", "net.safetensors"])
def test_our_network_with_timms_weights(attnkit, saved, photos, form):
    """Of a plain file, mean and deviation are not known."""
    size = ("model.dim=64", "model.depth=6", "model.num_heads=2", "model.mlp_ratio=3")
    done = attnkit("task=vit", "model=vit_small", *size, f"model.pretrained={saved / form}",
                   "model.score=cosine", *photos, *QUICK, "run_dir=run")  # fmt: skip
    assert done.code == 0, done.err
    assert "its head for 11 classes is replaced by one for 3" in done.out
    assert ("has no mean and std" in done.out) == (form != "hf")
    config = config_of("run")
    assert config["model"]["patch_size"] == 16
    assert config["data"]["image_size"] == 160
    assert (config["module"]["mean"] == [0.1, 0.2, 0.3]) == (form == "hf")
    held = torch.load("run/checkpoints/best.ckpt", weights_only=True)["hyper_parameters"]
    assert held["model"]["pretrained"] is None


@pytest.mark.slow
def test_a_run_starts_from_another(attnkit, photos):
    """With another head, the size and the mean of the earlier one; resumed, tested without it."""
    small = ("task=vit", "model.dim=24", "model.depth=1")
    assert attnkit(*small, *QUICK, "run_dir=earlier").code == 0
    done = attnkit(*small, *QUICK, *photos, "init=earlier", "optimizer.lr=0", "run_dir=run")
    assert done.code == 0, done.err
    best = Path("earlier/checkpoints/best.ckpt").absolute()
    said = (
        f"init: weights of {best}; its head is left out: head.weight is [10, 24] there, "
        "[3, 24] here; head.bias is [10] there, [3] here"
    )
    assert said in done.out
    assert said in Path("run/run.log").read_text()
    earlier, config = config_of("earlier"), config_of("run")
    assert config["init"] == str(best)
    assert config["data"]["image_size"] == 8
    assert config["module"]["mean"] == earlier["module"]["mean"]
    weights = [
        torch.load(f"{run}/checkpoints/best.ckpt", weights_only=True)["state_dict"]
        for run in ("earlier", "run")
    ]
    block = "model.blocks.0.mlp.fc1.weight"
    assert torch.equal(weights[0][block], weights[1][block])
    shutil.rmtree("earlier")
    for again in ("run=test ckpt=run trainer=cpu", "resume=run trainer.max_epochs=2"):
        done = attnkit(*again.split(" "))
        assert done.code == 0, done.err
    assert "init: " not in done.out


VIT = ("model.name=test_vit",)
WRONG = {
    "name": (("model.name=test_vitt",), "expected a name of timm's registry, got 'test_vitt'"),
    "no weights for it": (
        ("model.name=vit_small_patch16_18x2_224", "model.pretrained=true"),
        "pretrained: timm has no weights for vit_small_patch16_18x2_224",
    ),
    "no network": (
        ("model.name=vit_tiny_patch16_224", "model.pretrained=true"),
        "the weights of vit_tiny_patch16_224 cannot be loaded: no network connection to the hub",
    ),
    "no network to a hub": (
        ("model.weights=hf-hub:nobody/nothing",),
        "model.weights: hf-hub:nobody/nothing cannot be loaded: no network connection to the hub",
    ),
    "code": ((*VIT, "model.weights={saved}/evil.pth"), "would run code"),
    "junk": ((*VIT, "model.weights={saved}/junk.pth"), "junk.pth: not a file of weights"),
    "no weights in it": ((*VIT, "model.weights={saved}/empty"), "no weights in this folder"),
    "another network": (
        ("model.name=test_vit2", "model.weights={saved}/net.safetensors"),
        "does not fit test_vit2: reg_token is only here; ",
    ),
    "both": ((*VIT, "model.pretrained=true", "model.weights={saved}/hf"), "not together with weig"),
    "size": ((*VIT, "data.image_size=50"), "image_size: test_vit cannot take 50 x 50 pixels"),
    "no classifier": ((*VIT, "model.features_only=true", "data.image_size=32"), "not a classifier"),
    "argument": ((*VIT, "model.depht=3"), "unexpected keyword argument 'depht'"),
    "ours: another network": (
        ("task=vit", "model=vit_small", "model.pretrained={saved}/hf"),
        "hf is another network: dim is 64 there, 384 here, ",
    ),
    "ours: no such name": (
        ("task=vit", "model=vit_small", "model.pretrained=vit_smal"),
        "model.pretrained: no file or folder vit_smal",
    ),
    "init: no run": (("task=vit", "init={saved}/photos"), "init: no checkpoints/best.ckpt in"),
    "init: another network": (
        ("task=vit", "init={saved}/net.safetensors"),
        "does not fit the model: class_token is only here; ",
    ),
    "init: and weights": (
        (*TIMM, *VIT, "init={saved}/net.safetensors", "model.weights={saved}/hf"),
        "init: not together with pretrained weights of model",
    ),
    "file by another name": ((*VIT, "model.checkpoint_path=x"), "leads to a file or program"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_weights_and_sizes(refused, saved, case):
    given, message = WRONG[case]
    given = [text.replace("{saved}", str(saved)) for text in given]
    named = bool(given) and given[0].startswith(("task=", "run=", "resume="))
    refused(message, *(() if named else TIMM), *given)
