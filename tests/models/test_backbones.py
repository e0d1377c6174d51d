"""timm's networks with weights of others; random ones that timm saved stand in for them."""

import logging
import os

import numpy as np
import pytest
import timm
import torch

from attnkit.models.backbones import timm_backbone
from attnkit.models.preprocessing import expected_images
from attnkit.models.weights import read_weights

SIZE = {"image_size": 160}


class Evil:
    def __reduce__(self):
        return os.mkdir, ("was_run",)


@pytest.fixture(scope="module")
def vit(stand_in):
    return stand_in


@pytest.fixture(scope="module")
def saved(vit, stand_in_files):
    """Its weights in each form, and what are not weights."""
    folder, state = stand_in_files, vit.state_dict()
    torch.save(state, folder / "net.pth")
    torch.save({"state_dict": state, "epoch": 3}, folder / "timm.pth.tar")
    lightning = {f"model.{name}": tensor for name, tensor in state.items()}
    torch.save({"state_dict": {**lightning, "mean": torch.ones(3)}}, folder / "run.ckpt")
    for name, prefix in {
        "compiled": "model._orig_mod.",
        "of_net": "net.",
        "ddp": "module.",
    }.items():
        torch.save(
            {"state_dict": {prefix + n: t for n, t in state.items()}}, folder / f"{name}.pth"
        )
    torch.save({"model_state_dict": dict(state), "epoch": 3}, folder / "tutorial.pth")
    torch.save(
        {
            "weights": state,
            "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}},
            "best": np.float64(0.9),
            "when": np.int64(3),
        },
        folder / "numpy.pth",
    )
    zeros = {n: 0 * t for n, t in state.items()}
    scaler = {"scale": torch.ones(1)}
    torch.save({"scaler": scaler, "net": state, "loss": torch.ones(1)}, folder / "beside.pth")
    torch.save({"model": zeros, "ema": state}, folder / "ema.pth")
    twice = {prefix + n: t for prefix in ("model.", "criterion.model.") for n, t in state.items()}
    torch.save({"state_dict": twice}, folder / "twice.pth")
    two = {"lightning": ("model.", "ema."), "moco": ("module.momentum.", "module.backbone.")}
    for name, prefixes in two.items():
        both = {prefixes[0] + n: t for n, t in state.items()}
        both |= {prefixes[1] + n: t for n, t in zeros.items()}
        torch.save({"state_dict": both}, folder / f"two_{name}.pth")
    student = {f"backbone.{n}": t for n, t in zeros.items()}
    torch.save({"student": student, "teacher": state, "epoch": 3}, folder / "two_dino.pth")
    torch.save({f"other.{n}.x": t for n, t in state.items()}, folder / "foreign.pth")
    (folder / "transformers").mkdir()
    (folder / "transformers" / "config.json").write_text(
        '{"architectures": ["ViTForImageClassification"], "model_type": "vit"}'
    )
    torch.save({"state_dict": state, "more": Evil()}, folder / "evil.pth")
    torch.save([1, 2], folder / "list.pth")
    torch.save({"a": 3}, folder / "number.pth")
    torch.save({}, folder / "nothing.pth")
    (folder / "junk.pth").write_bytes(b"junk")
    (folder / "junk.safetensors").write_bytes(b"junk")
    (folder / "empty").mkdir()
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{")
    return folder


def test_timms_by_name():
    torch.manual_seed(0)
    ours = timm_backbone("resnet10t", in_channels=1, num_classes=5).eval()
    torch.manual_seed(0)
    theirs = timm.create_model("resnet10t", in_chans=1, num_classes=5).eval()
    images = torch.randn(2, 1, 32, 32)
    assert torch.equal(ours(images), theirs(images))


def test_a_tag_of_weights_that_are_not_there():
    with pytest.raises(ValueError, match=r"timm has no weights vit_tiny_patch16_224\.in9k; there"):
        timm_backbone("vit_tiny_patch16_224.in9k", in_channels=3, num_classes=5)


@pytest.mark.parametrize("name", ["resnet19", "hf-hub:someone/model", "local-dir:/tmp", "", None])
def test_only_names_of_the_registry(name):
    with pytest.raises(ValueError, match="name: expected a name of timm's registry"):
        timm_backbone(name, in_channels=3, num_classes=5)


def test_weights_that_cannot_be_had(monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("no network\nand more")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(ValueError, match="the weights of resnet18 cannot be loaded: no network"):
        timm_backbone("resnet18", in_channels=3, num_classes=5, pretrained=True)


@pytest.mark.parametrize(
    "form",
    ["net.safetensors", "net.pth", "of_net.pth", "timm.pth.tar", "run.ckpt", "hf", "compiled.pth",
     "ddp.pth", "tutorial.pth", "numpy.pth", "beside.pth", "ema.pth",
     "twice.pth"],
)  # fmt: skip
def test_every_form_of_weights(vit, saved, form):
    images = torch.randn(2, 3, 160, 160)
    network = timm_backbone("test_vit", 3, 11, weights=saved / form, **SIZE).eval()
    assert torch.equal(network(images), vit(images))
    assert "state_dict" not in network.pretrained_cfg


def test_a_head_that_does_not_fit_is_left_out(vit, saved, caplog):
    caplog.set_level(logging.INFO, "attnkit")
    network = timm_backbone("test_vit", 3, 4, weights=saved / "net.pth", **SIZE).eval()
    said = [r.getMessage() for r in caplog.records if r.name == "attnkit.models.backbones"]
    assert said == [f"weights: {saved}/net.pth: its head for 11 classes is replaced by one for 4"]
    images = torch.randn(2, 3, 160, 160)
    torch.testing.assert_close(network.forward_features(images), vit.forward_features(images))
    assert network.head.weight.std() > 0


def test_weights_are_fitted_to_images_of_another_size(vit, saved):
    options = {"img_size": (96, 64), "in_chans": 1, "num_classes": 11}
    overlay = {"state_dict": dict(vit.state_dict()), "num_classes": 11}
    theirs = timm.create_model(
        "test_vit", pretrained=True, pretrained_cfg_overlay=overlay, **options
    )
    ours = timm_backbone("test_vit", 1, 11, weights=saved / "hf", image_size=(96, 64))
    images = torch.randn(2, 1, 96, 64)
    assert torch.equal(ours.eval()(images), theirs.eval()(images))


def test_arguments_pass_through():
    network = timm_backbone("test_vit", 3, 4, drop_path=0.2, global_pool="avg")
    assert network.blocks[-1].drop_path1.drop_prob == pytest.approx(0.2)
    assert network.global_pool == "avg"


WRONG = {
    "code": ("evil.pth", {}, r"it holds more than weights and would run code \(\w+\.mkdir\)"),
    "no file": ("nope.pth", {}, "weights: no file or folder .*nope.pth"),
    "no weights in the folder": ("empty", {}, "no weights in this folder: no model.safetensors or"),
    "config.json": ("broken", {}, "broken: its config.json cannot be read"),
    "junk": ("junk.pth", {}, "junk.pth: not a file of weights, or damaged"),
    "junk, safely": ("junk.safetensors", {}, "junk.safetensors: not a file of weights, or damaged"),
    "a list": ("list.pth", {}, "list.pth: not a file of weights"),
    "a number": ("number.pth", {}, "expected tensors by name, got int"),
    "nothing": ("nothing.pth", {}, "expected tensors by name, got nothing"),
    "another network": (
        "net.pth", {"name": "test_vit2"},
        r"net.pth does not fit test_vit2: (\S+ is \[.*\] there, \[.*\] here|\S+ is only here); .* "
        r"and \d+ more$",
    ),
    "foreign names": (
        "foreign.pth", {}, r"its names are other\.cls_token\.x, .* more; expected cls_token, pos_"
    ),
    "two attributes": ("two_lightning.pth", {}, "two_lightning.pth: there are two networks in it, "
                       "under 'ema.' and 'model.'; expected one"),
    "momentum": ("two_moco.pth", {}, "under 'module.backbone.' and 'module.momentum.'"),
    "two keys": ("two_dino.pth", {}, "under 'student.backbone.' and 'teacher.'"),
    "of transformers": ("transformers", {}, r"model of transformers \(ViTForImageClassification\)"),
    "another norm": (
        "net.pth", {"global_pool": "avg"},
        r"fc_norm\.weight is only here; .*; model\.fc_norm=false creates the norm that these",
    ),
    "another name": ("hf", {"name": "test_vit2"}, "holds test_vit, but name is test_vit2"),
    "another pooling": ("hf", {"global_pool": "avg"}, "was made with global_pool=token, here"),
    "both": ("net.pth", {"pretrained": True}, "pretrained: not together with weights"),
    "size": ("net.pth", {"image_size": 50}, "image_size: test_vit cannot take 50 x 50 pix.*160"),
    "hub": ("hf-hub:nobody/nothing", {}, "cannot be loaded: no network connection to the hub"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_weights(saved, tmp_path, monkeypatch, case):
    given, options, message = WRONG[case]
    monkeypatch.chdir(tmp_path)
    weights = given if given.startswith("hf-hub") else saved / given
    with pytest.raises(ValueError, match=message) as error:
        timm_backbone(
            **{"name": "test_vit", "in_channels": 3, "num_classes": 4, **SIZE, **options},
            weights=weights,
        )
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_the_setting_that_a_message_names_loads_the_weights(saved):
    network = timm_backbone(
        "test_vit", 3, 11, weights=saved / "net.pth", global_pool="avg", fc_norm=False, **SIZE
    )
    assert torch.equal(network.norm.weight, torch.load(saved / "net.pth")["norm.weight"])


def test_what_is_no_classifier():
    with pytest.raises(ValueError, match="name: test_vit is not a classifier: it gives list of"):
        timm_backbone("test_vit", 3, 4, features_only=True, **SIZE)


def test_no_retries_where_the_hub_is_out_of_reach(monkeypatch):
    """Six of them, and a minute, with what huggingface_hub does by itself."""
    import socket

    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    asked = []

    def unknown(*args, **kwargs):
        asked.append(args[0])
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ValueError, match="no network connection to the hub, and not in its cache"):
        read_weights("hf-hub:nobody/nothing")
    assert asked == ["huggingface.co"]
    assert not hub.HF_HUB_OFFLINE


def test_what_weights_expect_of_images(saved):
    timms, ours = "attnkit.models.timm_backbone", "attnkit.interop.PretrainedViT"
    own = expected_images({"_target_": timms, "name": "test_vit", "pretrained": True})
    assert own == {
        "name": "test_vit", "patch_size": None, "image_size": 160, "in_channels": 3,
        "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "crop_pct": 0.95,
    }  # fmt: skip
    of_timm = {"_target_": "timm.create_model", "model_name": "test_vit", "pretrained": True}
    assert expected_images(of_timm) == own
    folder, file = str(saved / "hf"), str(saved / "net.pth")
    of_folder = expected_images({"_target_": timms, "name": None, "weights": folder})
    assert of_folder["mean"] == [0.1, 0.2, 0.3]
    assert of_folder["name"] == "test_vit"
    of_file = expected_images({"_target_": timms, "name": "test_vit", "weights": file})
    assert of_file == {**own, "patch_size": 16}  # by its first layer
    assert expected_images({"_target_": ours, "pretrained": "test_vit"}) == own
    assert expected_images({"_target_": ours, "pretrained": folder})["mean"] == [0.1, 0.2, 0.3]
    sizes = {"patch_size": 16, "image_size": 160, "in_channels": 3}
    assert expected_images({"_target_": ours, "pretrained": file}) == sizes
    of_vit = expected_images({"_target_": ours, "pretrained": "vit_small_patch14_dinov2"})
    assert (of_vit["image_size"], of_vit["patch_size"]) == (518, 14)
    assert expected_images({"_target_": timms, "name": "test_vit", "pretrained": False}) == {}
    with pytest.raises(ValueError, match="weights: no file or folder /nope"):
        expected_images({"_target_": timms, "name": "test_vit", "weights": "/nope"})


def test_of_other_classes_nothing_is_known():
    """Whose arguments of these names may mean anything."""
    assert expected_images({"_target_": "mine.Net", "pretrained": "/nope", "weights": [1.0]}) == {}
    assert expected_images({"_target_": "mine.Net", "name": "mine", "pretrained": True}) == {}
