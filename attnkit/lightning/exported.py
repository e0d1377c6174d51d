"""A trained module as a folder without code: config.json, which describes it, and weights.

    config.json           class and arguments, inputs and outputs, versions
    weights.safetensors   tensors and nothing else

The class and all names in its arguments are checked as in any configuration (see build.py).
"""

import hashlib
import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor

from attnkit.lightning.build import build, find
from attnkit.lightning.errors import UserError, first_line
from attnkit.lightning.files import refuse_url, write_text
from attnkit.lightning.modules.module import required_arguments, untrained
from attnkit.lightning.resume.checkpoints import CheckpointError
from attnkit.lightning.versions import versions

CONFIG = "config.json"
WEIGHTS = "weights.safetensors"
FORMAT = "attnkit.export"
VERSION = 1
_TRAINING = ("optimizer", "scheduler")  # arguments that a trained module does not use
_MERGED = "finetune"  # left out, since the weights are merged


def load(path: Any, device: torch.device | str = "cpu") -> LightningModule:
    """Load the trained module of a folder that `run=export` wrote, in evaluation mode.

    It needs no Hydra, no Trainer and no network. Nothing in the folder is run: weights are tensors,
    and config.json may only name what any configuration may; allow packages of your own with
    `attnkit.lightning.allowing("mypackage")`. Only config.json and weights.safetensors are read.

        module = attnkit.load("RUN_DIR")
        module(images)                  ImageClassification: logits of uint8 or float images
        module.classify(images)         names and probabilities
        module.caption(images)          ImageCaptioning: sentences
        module.classify(graph)          NodeClassification

    Args:
        path: the folder, the run folder with `export/` in it, or its weights file.
        device: device of the loaded module.

    Raises:
        CheckpointError: a file is missing, damaged or of a newer format, names a class that may not
            be built, or the weights do not fit the module.
    """
    folder = _folder(path)
    config = _read_config(folder / CONFIG)
    weights = folder / WEIGHTS
    state = _read_weights(weights, config["weights"])
    module = _build(config["module"], folder / CONFIG)
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        problem = " ".join(str(error).splitlines()[1:2]).strip()[:300]
        raise CheckpointError(
            f"these weights do not fit {type(module).__name__}\n  {problem}",
            key=str(weights),
        ) from error
    return module.to(device).eval()


def write_weights(module: LightningModule, path: Path) -> str:
    """Write all tensors of `state_dict()`, tied ones twice; return the SHA-256 of the file."""
    from safetensors.torch import save

    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in module.state_dict().items()
    }
    data = save(tensors)
    path.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def write_config(
    module: LightningModule | None, path: Path, digest: str | None = None, **facts: Any
) -> None:
    """Write config.json with the given facts; without a module, it describes programs alone.

    Raises:
        UserError: the module cannot be built again from its hyper-parameters.
    """
    config: dict[str, Any] = {"format": FORMAT, "format_version": VERSION}
    if module is not None:
        config["module"] = {"_target_": _name_of(type(module)), **_arguments(module)}
        config["weights"] = {"file": WEIGHTS, "sha256": digest}
    config |= {**facts, "versions": versions()}
    try:
        text = json.dumps(config, indent=2, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"hyper-parameters: expected plain data: {error}", key="export") from error
    write_text(path, f"{text}\n")


def _arguments(module: LightningModule) -> dict[str, Any]:
    """Return the module's hyper-parameters, with the defaults of attnkit's classes, which a later
    version may change."""
    given = dict(module.hparams)
    if missing := [name for name in required_arguments(type(module)) if name not in given]:
        raise UserError(
            f"{type(module).__name__} can't be built again: it has no hyper-parameter "
            f"{', '.join(missing)}\n  save_hyperparameters() keeps plain arguments; give the model "
            "as a configuration",
            key="export",
        )
    return {
        name: value if name in _TRAINING else _with_defaults(value)
        for name, value in given.items()
        if name != _MERGED
    }


def _with_defaults(node: Any) -> Any:
    if isinstance(node, list | tuple):
        return [_with_defaults(value) for value in node]
    if not isinstance(node, Mapping):
        return node
    node = {key: _with_defaults(value) for key, value in node.items()}
    target = node.get("_target_")
    if isinstance(target, str) and target.startswith("attnkit.") and "_args_" not in node:
        for name, parameter in inspect.signature(find(target)).parameters.items():
            default = parameter.default
            if isinstance(default, tuple):
                default = list(default)
            if default is None or isinstance(default, bool | int | float | str | list):
                node.setdefault(name, default)
    return node


def _name_of(cls: type) -> str:
    """Return the shortest dotted name under which a class can be imported."""
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        raise UserError(f"{cls.__qualname__} can't be imported; put it into a module", key="export")
    package = ""
    for part in cls.__module__.split("."):
        package = f"{package}.{part}" if package else part
        if getattr(sys.modules.get(package), cls.__qualname__, None) is cls:
            return f"{package}.{cls.__qualname__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def _folder(path: Any) -> Path:
    refuse_url(path, "export", CheckpointError)
    given = Path(path).expanduser()
    if not given.exists():
        raise CheckpointError(f"{given}: no such file or folder")
    if given.is_file():
        if given.name != WEIGHTS:
            hint = "; export it: attnkit run=export ckpt=FILE" if given.suffix == ".ckpt" else ""
            raise CheckpointError(f"{given}: expected a folder or its {WEIGHTS}{hint}")
        given = given.parent
    for folder in (given, given / "export"):
        if (folder / CONFIG).is_file():
            return folder
    is_run = (given / "checkpoints").is_dir()
    hint = f"; of a run: attnkit run=export ckpt={given}" if is_run else ""
    raise CheckpointError(f"{given}: not an export: it has no {CONFIG}{hint}")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"not an intact export: {first_line(error, named=True)}", key=str(path)
        ) from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise CheckpointError(f"not written by attnkit's export (format {FORMAT!r})", key=str(path))
    version = config.get("format_version")
    if type(version) is not int or version < 1:
        raise CheckpointError(f"format_version: expected 1 or more, got {version!r}", key=str(path))
    if version > VERSION:
        raise CheckpointError(
            f"format {version} is newer than this attnkit, which reads {VERSION}\n"
            "  pip install --upgrade attnkit",
            key=str(path),
        )
    if "module" not in config and config.get("programs"):
        files = [file for node in config["programs"].values() for file in node["files"].values()]
        raise CheckpointError(
            f"this export holds programs and no weights; load {', '.join(files)} by "
            "torch.export.load or onnxruntime",
            key=str(path),
        )
    for key, inside in (("module", "_target_"), ("weights", "sha256")):
        node = config.get(key)
        if not isinstance(node, dict) or not isinstance(node.get(inside), str):
            raise CheckpointError(f"{key}: expected a mapping with {inside}", key=str(path))
    return config


def _read_weights(path: Path, node: Mapping[str, Any]) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load as tensors_of

    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(str(error.strerror), key=str(path)) from error
    try:
        is_whole = hashlib.sha256(data).hexdigest() == node["sha256"]
        weights = tensors_of(data) if is_whole else {}
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"not a safetensors file: {first_line(error, named=True)}", key=str(path)
        ) from error
    if not is_whole:
        raise CheckpointError("the weights are damaged or were replaced", key=str(path))
    return weights


def _build(node: Mapping[str, Any], path: Path) -> LightningModule:
    arguments = {key: untrained(value) for key, value in node.items()}
    target = arguments.pop("_target_")
    if bad := next((key for key in arguments if key.startswith("_")), None):
        raise CheckpointError(f"module.{bad}: not known", key=str(path))
    try:
        make = build({"_target_": target, "_partial_": True}, at="module").func
        if not (isinstance(make, type) and issubclass(make, LightningModule)):
            raise UserError(f"module._target_: {target} is not a LightningModule")
        return make(**arguments)
    except UserError as error:
        raise CheckpointError(str(error), key=str(path)) from error
    except Exception as error:  # a constructor given anything may raise anything
        raise CheckpointError(
            f"module: {target}: {first_line(error, named=True)}", key=str(path)
        ) from error
