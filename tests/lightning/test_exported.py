"""`attnkit.load`: what it gives back, and all that can be wrong with a folder."""

import functools
import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Data

import attnkit
from attnkit.lightning import CheckpointError, Export, UserError
from attnkit.tasks.graphs import NodeClassification
from attnkit.tasks.image_classification import ImageClassification

VIT = {
    "_target_": "attnkit.ViT", "image_size": 8, "patch_size": 4, "in_channels": 1,
    "num_classes": 3, "dim": 24, "depth": 1, "num_heads": 3,
}  # fmt: skip
ARGUMENTS = {"num_classes": 3, "mean": [0.5], "std": [0.25], "image_size": 8, "in_channels": 1}
IMAGES = torch.arange(5 * 64, dtype=torch.uint8).view(5, 1, 8, 8)


def vit(**arguments):
    torch.manual_seed(0)
    return ImageClassification(VIT, **{**ARGUMENTS, **arguments}).eval()


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "export"
    Export(folder, [])(vit(class_names=["cat", "dog", "owl"]))
    return folder


@pytest.fixture
def folder(original, tmp_path):
    """A copy to spoil."""
    return Path(shutil.copytree(original, tmp_path / "export"))


def change(folder, **values):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in values.items():
        *above, last = key.split("__")
        node = functools.reduce(dict.__getitem__, above, config)
        node[last] = value
    path.write_text(json.dumps(config))


def replace_weights(folder, data):
    """Other weights, whose digest is right."""
    (folder / "weights.safetensors").write_bytes(data)
    change(folder, weights__sha256=hashlib.sha256(data).hexdigest())


def tensors(folder):
    from safetensors.torch import load

    return load((folder / "weights.safetensors").read_bytes())


def as_bytes(state):
    from safetensors.torch import save

    return save(state)


@pytest.mark.parametrize("way", ["folder", "run", "weights", "text"])
def test_every_way_to_name_it(original, way):
    named = {
        "folder": original,
        "run": original.parent,
        "weights": original / "weights.safetensors",
        "text": str(original),
    }
    module = attnkit.load(named[way])
    assert isinstance(module, ImageClassification)
    assert not module.training
    assert torch.equal(module(IMAGES), vit()(IMAGES))
    rows = module.classify(IMAGES)
    assert rows["label"] == [pairs[0][0] for pairs in rows["top5"]]
    assert set(rows["label"]) <= {"cat", "dog", "owl"}


def test_device_training_on_and_defaults_that_are_written_out(original):
    module = attnkit.load(original, "meta")
    assert all(tensor.is_meta for tensor in module.parameters())
    module = attnkit.load(original).train()
    module(IMAGES.float() / 255).sum().backward()
    assert all(p.grad is not None for p in module.parameters() if p.requires_grad)
    model = json.loads((original / "config.json").read_text())["module"]["model"]
    assert (model["qkv_bias"], model["norm_eps"], model["dim"]) == (True, 1e-6, 24)


def test_nodes(tmp_path):
    gat = {"_target_": "attnkit.GAT", "in_channels": 5, "hidden_channels": 8, "num_classes": 3}
    module = NodeClassification(gat, num_classes=3, in_channels=5).eval()
    Export(tmp_path / "export", [])(module)
    graph = Data(x=torch.randn(7, 5), edge_index=torch.randint(0, 7, (2, 23)))
    rows = attnkit.load(tmp_path).classify(graph)
    assert rows == module.classify(graph)
    assert rows["node"] == list(range(7))


@pytest.mark.slow
def test_needs_no_hydra_and_no_launch(original):
    code = (
        "import sys, attnkit\n"
        "assert 'torch' not in sys.modules\n"
        f"module = attnkit.load({str(original)!r})\n"
        "found = {name for name in sys.modules if name.split('.')[0] in "
        "('hydra', 'omegaconf', 'onnx', 'onnxscript', 'onnxruntime')}\n"
        "found |= {name for name in sys.modules if name.startswith('attnkit.launch')}\n"
        "assert not found, found\n"
        "assert module._trainer is None\n"
        "print(type(module).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "ImageClassification", done.stderr


def test_pretrained_backbones_need_no_network(tmp_path, monkeypatch):
    backbone = {
        "_target_": "attnkit.models.timm_backbone", "_partial_": True,
        "name": "test_resnet",
    }  # fmt: skip
    model = {
        "_target_": "attnkit.tasks.image_classification.attention_network", "backbone": backbone,
        "image_size": 32, "in_channels": 3, "num_classes": 3,
    }  # fmt: skip
    facts = {**ARGUMENTS, "mean": [0.5] * 3, "std": [0.5] * 3, "in_channels": 3, "image_size": 32}
    Export(tmp_path / "export", [])(ImageClassification(model, **facts))
    change(tmp_path / "export", module__model__backbone__pretrained=True)

    def refuse(*args, **kwargs):
        raise AssertionError("it went to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert attnkit.load(tmp_path / "export").model is not None


def damaged(folder):
    path = folder / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def without(state, name):
    return {key: value for key, value in state.items() if key != name}


WRONG = {
    "no config": (lambda f: (f / "config.json").unlink(), r"not an export: it has no config\.json"),
    "no weights": (lambda f: (f / "weights.safetensors").unlink(), "No such file"),
    "cut off": (lambda f: (f / "config.json").write_text('{"format": '), "not an intact export"),
    "not text": (
        lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"),
        "not an intact export",
    ),
    "too deep": (lambda f: (f / "config.json").write_text("[" * 10**5), "not an intact export"),
    "a list": (lambda f: (f / "config.json").write_text("[]"), "not written by attnkit"),
    "another": (lambda f: change(f, format="gguf"), "not written by attnkit"),
    "newer": (lambda f: change(f, format_version=2), "newer than this attnkit, which reads 1"),
    "no version": (lambda f: change(f, format_version="1"), "format_version: expected"),
    "no module": (lambda f: change(f, module=None), "module: expected a mapping with _target_"),
    "no digest": (lambda f: change(f, weights={}), "weights: expected a mapping with sha256"),
    "damaged": (damaged, "the weights are damaged"),
    "no tensors": (lambda f: replace_weights(f, b"GGUF" * 99), "not a safetensors file"),
    "empty": (lambda f: replace_weights(f, b""), "not a safetensors file"),
    "missing": (
        lambda f: replace_weights(f, as_bytes(without(tensors(f), "model.head.bias"))),
        r"these weights do not fit ImageClassification\n  Missing key.*model\.head\.bias",
    ),
    "extra": (
        lambda f: replace_weights(f, as_bytes({**tensors(f), "a": torch.ones(3)})),
        r'Unexpected key.*"a"',
    ),
    "shape": (lambda f: change(f, module__model__dim=48), r"size mismatch for model\."),
    "argument": (lambda f: change(f, module__nonsense=3), "nonsense"),
    "value": (lambda f: change(f, module__num_classes=1), "num_classes: expected at least 2"),
    "number": (lambda f: change(f, module__mean=3), "TypeError"),
    "no such class": (lambda f: change(f, module__model___target_="attnkit.VIT"), "does not exist"),
    "no module class": (
        lambda f: change(f, module___target_="attnkit.ViT"),
        "not a LightningModule",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(folder, case):
    spoil, message = WRONG[case]
    spoil(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        attnkit.load(folder)
    assert str(folder) in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


def test_wrong_paths(original, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "last.ckpt").write_bytes(b"")
    for path, message in (
        (tmp_path / "nowhere", "no such file"),
        (tmp_path, f"run=export ckpt={tmp_path}"),
        (tmp_path / "last.ckpt", "run=export ckpt="),
        (original / "config.json", r"its weights\.safetensors"),
        ("https://example.org/export", "URL"),
    ):
        with pytest.raises(CheckpointError, match=message):
            attnkit.load(path)


class Call:
    """Unpickled, it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


HOSTILE = {
    "module": {"module___target_": "canary.Net"},
    "os.system": {"module___target_": "os.system"},
    "torch.load": {"module___target_": "torch.load"},
    "load_from_checkpoint": {
        "module___target_": "attnkit.tasks.image_classification.ImageClassification."
        "load_from_checkpoint"
    },
    "a trainer": {"module___target_": "lightning.Trainer"},
    "model": {"module__model___target_": "canary.Net"},
    "launch": {"module__model___target_": "attnkit.launch.main.main"},
    "inside": {"module__model__positions": {"_target_": "canary.run"}},
    "_args_": {"module__model___args_": [{"_target_": "canary.run"}]},
    "optimizer": {"module__optimizer": {"_target_": "canary.run"}},
    "scheduler": {"module__scheduler": {"_target_": "builtins.exec"}},
    "_instantiator": {"module___instantiator": "canary.run"},
    "_partial_": {"module___partial_": True},
    "a path": {"module__model": {"_target_": "timm.create_model", "model_name": "resnet18",
                                 "checkpoint_path": "evil.pth"}},
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_strangers_config_runs_nothing(folder, trace, case):
    change(folder, **HOSTILE[case])
    with pytest.raises(CheckpointError) as caught:
        attnkit.load(folder)
    assert len(str(caught.value).splitlines()) <= 4


def test_a_strangers_weights_run_nothing_and_programs_are_not_read(folder, trace):
    torch.save({"x": Call(str(trace))}, folder / "model.pt2")
    assert attnkit.load(folder) is not None
    for legacy in (False, True):
        file = io.BytesIO()
        torch.save({"x": Call(str(trace))}, file, _use_new_zipfile_serialization=not legacy)
        replace_weights(folder, file.getvalue())
        with pytest.raises(CheckpointError, match="not a safetensors file"):
            attnkit.load(folder)


def test_own_classes_are_named(tmp_path, monkeypatch):
    (tmp_path / "hers_to_export.py").write_text(
        "import lightning, torch\n"
        "class Mine(lightning.LightningModule):\n"
        "    def __init__(self, width, network=None):\n"
        "        super().__init__()\n"
        "        self.save_hyperparameters(ignore=['network'])\n"
        "        self.net = network or torch.nn.Linear(width, 2)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mine = __import__("hers_to_export").Mine
    written = Export(tmp_path / "export")
    with attnkit.lightning.allowing("hers_to_export"):
        assert "has no method programs()" in written(mine(3)).left_out["onnx"]
        assert torch.equal(attnkit.load(tmp_path).net.weight, attnkit.load(tmp_path).net.weight)
        with pytest.raises(UserError, match="these weights do not fit Mine"):
            Export(tmp_path / "other")(mine(3, torch.nn.Linear(5, 2)))
    with pytest.raises(CheckpointError, match="allowing"):
        attnkit.load(tmp_path)


def test_what_cannot_be_exported(tmp_path, monkeypatch):
    given = ImageClassification(attnkit.ViT(**{k: v for k, v in VIT.items() if k != "_target_"}),
                                **ARGUMENTS)  # fmt: skip
    with pytest.raises(UserError, match="no hyper-parameter model"):
        Export(tmp_path / "object", ["safetensors"])(given)
    with pytest.raises(ValueError, match="formats: expected some of"):
        Export(tmp_path, ["tensorflow"])
    monkeypatch.setattr("attnkit.lightning.export.find_spec", lambda name: None)
    (tmp_path / "given").mkdir()
    for name in ("asked", "given"):
        with pytest.raises(UserError, match=r"onnx: needs onnx.*\n  pip install 'attnkit\[onnx\]'"):
            Export(tmp_path / name, ["onnx"])(vit())
    (tmp_path / "given").rmdir()  # empty, as it was
    assert list(tmp_path.iterdir()) == []
    written = Export(tmp_path / "asked")(vit())
    assert "needs onnx" in written.left_out["onnx"]
    assert sorted((tmp_path / "asked").iterdir()) == sorted(written.files)
    assert list(written.differences) == ["model.pt2"]
    with pytest.raises(UserError, match="is not empty"):
        Export(tmp_path / "asked")(vit())


@pytest.mark.parametrize("given", ["configuration", "object"])
def test_a_network_changed_in_python_gives_programs_alone(given, tmp_path):
    module = vit()
    if given == "object":
        module = ImageClassification(module.model, **ARGUMENTS)
    module.model.head = torch.nn.Sequential(module.model.head, torch.nn.Linear(3, 3))
    with pytest.raises(UserError, match="can't be built again"):
        Export(tmp_path / "asked", ["safetensors"])(module)
    written = Export(tmp_path / "export", ["torch_export"])(module)
    assert "can't be built again" in written.left_out["safetensors"]
    assert sorted(os.listdir(tmp_path / "export")) == ["config.json", "model.pt2"]
    program = torch.export.load(tmp_path / "export" / "model.pt2").module()
    torch.testing.assert_close(program(IMAGES), module(IMAGES))
    with pytest.raises(CheckpointError, match=r"holds programs and no weights; load model\.pt2 by"):
        attnkit.load(tmp_path / "export")


class Untraceable(ImageClassification):
    def forward(self, images):
        return super().forward(images) if images.float().sum() > 0 else images


class Wrong(ImageClassification):
    def forward(self, images):
        return super().forward(images) + (1 if torch.compiler.is_exporting() else 0)


@pytest.mark.parametrize(
    ("cls", "cause"),
    [(Untraceable, "GuardOn"), pytest.param(Wrong, "outputs differ by ", marks=pytest.mark.slow)],
)
def test_what_a_model_does_not_allow_is_left_out(cls, cause, tmp_path, capfd):
    module = cls(VIT, **ARGUMENTS)
    with pytest.raises(UserError, match="export: torch_export: ") as caught:
        Export(tmp_path / "asked", ["torch_export"])(module)
    assert cause in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "asked").exists()
    with attnkit.lightning.allowing(cls.__module__.partition(".")[0]):
        written = Export(tmp_path / "rest")(module)
        assert cause in written.left_out["torch_export"]
        assert sorted(os.listdir(tmp_path / "rest")) == ["config.json", "weights.safetensors"]
    out, err = capfd.readouterr()
    assert not out
    assert "forward" not in err
