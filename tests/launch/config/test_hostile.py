"""Configurations as untrusted input: what they name is refused before any of it runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from attnkit.launch.config.permission import Consent
from attnkit.lightning.build import find
from attnkit.lightning.errors import UserError

CANARY = """\
from pathlib import Path
Path(__file__).with_name("trace").write_text("canary was here")
class Net: pass
def run(*args, **kwargs): return Path(__file__).with_name("trace").write_text("canary ran")
"""


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """A module on the path that leaves a trace when it is imported."""
    folder = tmp_path / "canary"
    folder.mkdir()
    (folder / "canary.py").write_text(CANARY)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "canary", raising=False)
    yield folder
    assert not (folder / "trace").exists()


@pytest.mark.slow
def test_nothing_hostile_is_built_run_or_imported(tmp_path):
    (tmp_path / "canary.py").write_text(CANARY)
    script = Path(__file__).with_name("hostile.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["targets"] > 139
    assert found["nodes"] > 20
    assert found["passed"] == []
    assert found["seen"] == []
    assert found["imported"] == []
    assert any("canary.py" in event for event in found["control"])
    assert (tmp_path / "trace").exists()  # of the control


ALIASES = [
    "attnkit.ViT", "attnkit.MultiHeadAttention", "attnkit.lightning.EMA", "attnkit.ViT",
    "attnkit.lightning.MetricsCSV", "attnkit.lightning.Progress",
    "attnkit.lightning.Pruning",
    "attnkit.tasks.image_classification.DigitsData", "lightning.Trainer", "lightning.Callback",
    "lightning.pytorch.Trainer", "lightning.pytorch.callbacks.EarlyStopping",
    "lightning.pytorch.loggers.CSVLogger", "lightning.pytorch.loggers.TensorBoardLogger",
    "lightning.pytorch.plugins.TorchCheckpointIO", "lightning.pytorch.strategies.DDPStrategy",
    "lightning.pytorch.plugins.environments.LightningEnvironment", "timm.create_model",
    "timm.models.VisionTransformer", "timm.layers.DropPath", "timm.optim.Lion", "torch.nn.Linear",
    "torch.nn.parallel.DistributedDataParallel", "torch.optim.AdamW", "torch.optim.Adafactor",
    "torch.optim.lr_scheduler.OneCycleLR", "torch.optim.swa_utils.SWALR",
    "torch_geometric.nn.GATConv", "torch_geometric.nn.models.GCN", "torchmetrics.Accuracy",
    "torchmetrics.MetricCollection", "torchmetrics.classification.MulticlassAccuracy",
    "torchvision.models.ResNet", "torchvision.models.get_model", "torchvision.ops.MLP",
    "torchvision.transforms.v2.Compose", "torchvision.transforms.Compose",
    "torchvision.transforms.v2.RandomHorizontalFlip",
]  # fmt: skip


@pytest.mark.parametrize("target", ALIASES)
def test_what_people_use_may_be_named(target):
    assert callable(find(target))
    assert Consent().check({"model": {"_target_": target}}) == ()


def test_pretrained_weights_of_timms_own_may_be_asked_for(monkeypatch):
    import timm

    from attnkit.lightning.build import build

    node = {"_target_": "timm.create_model", "model_name": "resnet18", "pretrained": True}
    assert build({**node, "_partial_": True}).func is timm.create_model


COMMANDS = [
    "model={_target_: os.system, command: touch here}",
    "model._target_=torch.load",
    "model._target_=torch.utils.cpp_extension.load_inline",
    "optimizer._target_=torch.distributed.run.main",
    "module._target_=attnkit.launch.main.main",
    "data._target_=attnkit.launch.folder.take_back",
    "callbacks.x={_target_: lightning.pytorch.cli.SaveConfigCallback}",
    "logger.x={_target_: canary.Net}",
    "+vars.x=[{y: {_target_: canary.Net}}]",
    "model={_target_: torch.nn.Sequential, _args_: [{_target_: canary.Net}]}",
    "+vars.t=canary.Net model._target_=${vars.t}",
    "trainer.strategy={_target_: canary.Net}",
    "allow=[os] model._target_=os.system",
    "allow=[attnkit] model._target_=attnkit.launch.main.main",
    "model={_target_: timm.create_model,model_name: resnet18,checkpoint_path: evil.ckpt}",
    "model={_target_: torch_geometric.nn.Sequential,input_args: 'x: canary.run()',modules: []}",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_hostile_command(attnkit, canary, command):
    _check(attnkit(*_words(command)))
    assert os.listdir(".") == []


FILES = {
    "in a list": "vars: [1, [{_target_: canary.Net}]]",
    "in _args_": "module: {_args_: [{_target_: canary.Net}]}",
    "by interpolation": "vars: {t: canary.Net}\nmodule: {_target_: '${vars.t}'}",
    "by a resolver": "module: {_target_: '${oc.env:NOT_SET,canary.Net}'}",
    "in a callback": "callbacks: {x: {_target_: canary.run}}",
    "allowed by itself": "allow: [canary]\nmodule: {_target_: canary.Net}",
    "python tag": "vars: !!python/object/apply:canary.run []",
    "hydra's callbacks": "hydra: {callbacks: {x: {_target_: canary.run}}}",
    "hydra's logging": "hydra: {job_logging: {handlers: {x: {(): canary.run}}}}",
    "hydra's environment": "hydra: {job: {env_set: {PYTHONSTARTUP: canary.py}}}",
    "hydra's search path": "hydra: {searchpath: ['pkg://canary']}",
}


@pytest.mark.parametrize("case", FILES)
@pytest.mark.parametrize("sweep", [[], ["-m", "seed=1,2"]])
def test_hostile_file(attnkit, hers, canary, tmp_path, case, sweep):
    folder = _folder(hers, tmp_path)
    text = "# @package _global_\ndefaults: [mine, _self_]\ntask: mine\n" + FILES[case]
    (folder / "task" / "wrong.yaml").write_text(text)
    _check(attnkit("--config-dir", folder, "task=wrong", *sweep))
    assert os.listdir(".") == []


def test_primary_configuration_cannot_be_replaced(attnkit, hers, canary, tmp_path):
    folder = _folder(hers, tmp_path)
    (folder / "config.yaml").write_text("hydra: {searchpath: ['pkg://canary']}\ntask: x")
    done = _check(attnkit("--config-dir", folder, "task=mine"))
    assert "would replace attnkit's own" in done.err


TAMPERED = {
    "another module": {"module": {"_target_": "canary.Net"}},
    "a callback": {"callbacks": {"x": {"_target_": "canary.run"}}},
    "with permission": {"allow": ["canary"], "module": {"_target_": "canary.Net"}},
    "python's own": {"data": {"_target_": "os.system", "command": "touch here"}},
    "an interpolation": {"vars": {"t": "canary.Net"}, "model": {"_target_": "${vars.t}"}},
    "attnkit's own": {"data": {"_target_": "attnkit.launch.main.main", "argv": ["--help"]}},
}


@pytest.mark.parametrize("case", TAMPERED)
@pytest.mark.parametrize("command", ["resume=run", "run=test ckpt=run", "run=predict ckpt=run"])
def test_hostile_run_folder(attnkit, canary, case, command):
    checkpoints = Path("run/checkpoints")
    checkpoints.mkdir(parents=True)
    for name in ("best.ckpt", "last.ckpt"):
        (checkpoints / name).write_bytes(b"never read")
    config = {
        "task": "vit",
        "run": "train",
        "seeds": 1,
        "seed": 0,
        "run_dir": str(Path("run").absolute()),
        "module": {"_target_": "attnkit.tasks.image_classification.ImageClassification"},
        "model": None,
        "data": {"_target_": "attnkit.tasks.image_classification.DigitsData"},
        "predict": {"_target_": "attnkit.tasks.image_classification.PredictData"},
        **TAMPERED[case],
    }
    Path("run/config.yaml").write_text(yaml.safe_dump(config))
    images = ["images=run"] if "predict" in command else []
    done = _check(attnkit(*command.split(" "), *images))
    assert "_target_" in done.err
    assert os.listdir(".") == ["run"]


@pytest.mark.parametrize("scheme", ["http", "https", "s3", "hf", "file", "gs", "memory"])
@pytest.mark.parametrize("key", ["run=test ckpt", "run=predict images=. ckpt", "resume", "run_dir"])
def test_url(attnkit, scheme, key):
    done = _check(attnkit(*f"{key}={scheme}://host.invalid/run/best.ckpt".split(" ")))
    assert "is a URL, expected a local path" in done.err
    assert os.listdir(".") == []


def test_url_in_python():
    from attnkit.tasks.image_classification import ImageClassification

    for url in ("https://host.invalid/best.ckpt", "file:///best.ckpt", "zip::s3://host/best"):
        with pytest.raises(UserError, match="is a URL, expected a local path"):
            ImageClassification.load_from_checkpoint(url)


def _words(command):
    """Split at spaces that are followed by another key=value."""
    words = []
    for word in command.split(" "):
        if words and words[-1].count("{") > words[-1].count("}"):
            words[-1] += f" {word}"
        else:
            words.append(word)
    return words


def _folder(hers, tmp_path):
    folder = tmp_path / "given"
    (folder / "task").mkdir(parents=True)
    (folder / "task" / "mine.yaml").write_text((hers / "task" / "mine.yaml").read_text())
    (folder / "mine_of_the_tests.py").write_text((hers / "mine_of_the_tests.py").read_text())
    return folder


def _check(done):
    assert done.code == 2, done
    assert 0 < len(done.err.strip().splitlines()) <= 3, done.err
    assert done.out == ""
    return done
