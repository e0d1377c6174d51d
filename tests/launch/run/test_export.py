"""`run=export` from the command line."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import attnkit as toolkit
from attnkit.lightning import allowing


def files(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_from_a_run_folder(attnkit, run):
    before = files(run)
    done = attnkit("run=export", f"ckpt={run}", "run_dir=ex", "export.formats=[torch_export]")
    assert done.code == 0, done.err
    assert files(run) == before
    export = Path("ex/export")
    assert {path.name for path in export.iterdir()} == {
        "config.json", "model.pt2", "weights.safetensors",
    }  # fmt: skip
    assert str(export.absolute()) in done.out
    assert "left out" not in done.out
    results = json.loads(Path("ex/results.json").read_text())
    assert results["difference/model.pt2"] <= 1e-5
    state = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"]
    module = toolkit.load("ex")
    assert module.state_dict().keys() == state.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())
    images = torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8)
    program = torch.export.load(export / "model.pt2").module()
    assert torch.allclose(program(images), module(images), atol=1e-5)


def test_from_a_checkpoint_alone_and_from_its_run(attnkit, run, tmp_path):
    shutil.copy(run / "checkpoints" / "best.ckpt", tmp_path / "alone.ckpt")
    for given, folder in ((tmp_path / "alone.ckpt", "one"), (run, "two")):
        done = attnkit("run=export", f"ckpt={given}", f"run_dir={folder}", "export.formats=[]")
        assert done.code == 0, done.err
    assert toolkit.load("one").class_names == toolkit.load("two").class_names
    one, two = (Path(name, "export", "weights.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


def test_what_a_module_does_not_allow(mine, attnkit, hers):
    done = mine("run_dir=run", "trainer.max_epochs=1", "callbacks.curves=null")
    assert done.code == 0, done.err
    with_folder = ("--config-dir", hers, "run=export", "task=mine", "ckpt=run")
    done = attnkit(*with_folder, "run_dir=ex")
    assert done.code == 0, done.err
    for name in ("torch_export", "onnx"):
        assert f"{name}: left out: Mine has no method programs()" in " ".join(done.out.split())
    with allowing("mine_of_the_tests"):
        assert toolkit.load("ex").hparams.width == 11
    done = attnkit(*with_folder, "run_dir=other", "export.formats=[onnx]")
    assert done.code == 2
    assert done.err.strip() == "attnkit: export: onnx: Mine has no method programs()"
    assert not Path("other").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("run=export", "run=export: needs ckpt=PATH"),
        ("run=export resume=RUN", "not together with resume"),
        ("run=export ckpt=RUN seeds=2", "has no effect in run=export; only in run=train, check"),
        ("run=export ckpt=RUN export.formats=[tensorflow]", "export.formats: expected"),
        ("run=export ckpt=RUN export=null", "run=export: needs export"),
        ("run=export ckpt=RUN trainer.devices=2", "has no effect in run=export"),
        ("run=export ckpt=RUN model.dim=48", "does not fit the model"),
        ("run=export ckpt=RUN export.folder=RUN", "is not empty"),
        ("run=export ckpt=RUN export.folder=RUN/config.yaml", "export.folder: "),
        ("run=export ckpt=RUN export.folder=RUN/config.yaml/x", "can't be written to"),
    ],
)
def test_wrong_input(refused, run, arguments, said):
    before = files(run)
    refused(said, *arguments.replace("RUN", str(run)).split(), "run_dir=ex")
    assert files(run) == before


def test_the_extra_is_named(attnkit, run, monkeypatch):
    monkeypatch.setattr("attnkit.lightning.export.find_spec", lambda name: None)
    done = attnkit("run=export", f"ckpt={run}", "run_dir=ex", "export.formats=[onnx]")
    assert done.code == 2
    assert done.err.splitlines() == [
        "attnkit: export: onnx: needs onnx, onnxscript, onnxruntime: not installed",
        "  pip install 'attnkit[onnx]'",
    ]
