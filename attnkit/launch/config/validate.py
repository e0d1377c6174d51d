"""Checks every key of a configuration against its constructor, without torch or writing.

Problems are raised as `UserError`, which names the key, the given value, the expected one, where it
was written and the nearest right name.
"""

import math
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from attnkit.core.names import nearest
from attnkit.launch.command import dotted_key
from attnkit.launch.config import schema, signatures
from attnkit.launch.config.files import Origins
from attnkit.launch.config.signatures import Signature
from attnkit.lightning.best import contradiction, mode_of
from attnkit.lightning.errors import UserError
from attnkit.lightning.files import absolute

TRAINER = "lightning.Trainer"
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the loader of libyaml, if installed
_DIRECTIVES = {"_target_", "_partial_", "_args_"}


def validate(config: dict[str, Any], origins: Origins) -> None:
    """Check the whole configuration, and make its relative paths absolute in place."""
    check_arguments("", config, signatures.known(schema.TARGET), origins, what="attnkit")
    _settle_modes(config, origins)
    for key in schema.OBJECTS:
        node = config.get(key)
        if node:
            if "_target_" not in node:
                message = "missing: the class to build"
                if key in schema.MODEL_PARTS:  # the choice "none" is a mapping without keys
                    message += f"; {key}=none has no options"
                raise _problem(origins, f"{key}._target_", message, at=key)
            check_node(key, node, origins, given=_given(key, config))
    for key in schema.COLLECTIONS:
        for name, node in (config.get(key) or {}).items():
            if node is None:
                _check_switched_off(key, name, origins)
                continue
            if not isinstance(node, dict) or "_target_" not in node:
                hint = "; null leaves it out"
                if isinstance(node, dict):
                    hint = nearest(name, [n for n in config[key] if n != name])
                if files("attnkit.conf").joinpath(f"{key}/{name}.yaml").is_file():
                    hint = f"; {key}={name} brings it"
                elif name in schema.BROUGHT[key]:
                    hint = f"; of what a run brings itself {schema.BROUGHT[key][name]}"
                expected = "a mapping with _target_"
                raise _problem(origins, f"{key}.{name}", hint, expected=expected, given=node)
            check_node(f"{key}.{name}", node, origins)
    _check_trainer(config.get("trainer") or {}, config.get("precision"), origins)
    predicts_images = config.get("images") is not None
    for key in ("module",) if predicts_images else ("module", "data"):
        if not config.get(key):
            raise _problem(origins, key, "missing: the task names no class for it", at="task")
    _check_values(config, origins)
    _check_parts(config, origins)


def _check_switched_off(key: str, name: str, origins: Origins) -> None:
    """Refuse null for a name that no configuration file contains: it would change nothing."""
    at = f"{key}.{name}"
    if not origins.typed(at) or name in _shipped(key) or origins.written(at):
        return
    former = schema.FORMER.get(name) if key == "callbacks" else None
    hint = f"; {former}" if former else nearest(name, _shipped(key))
    raise _problem(origins, at, f"nothing to switch off{hint}")


@cache
def _shipped(key: str) -> frozenset[str]:
    """Return the names of callbacks or loggers that a shipped file lists, or that every run has."""
    conf, names = files("attnkit.conf"), set(schema.BROUGHT[key])
    for folder in (key, "task", "level"):
        for file in conf.joinpath(folder).iterdir():
            listed = yaml.load(file.read_bytes(), _Loader) or {}
            names.update(listed if folder == key else listed.get(key) or ())
    return frozenset(names - {"defaults"})  # Hydra's


def _settle_modes(config: dict[str, Any], origins: Origins) -> None:
    """Set `mode` (min or max) of callbacks and scheduler from their metric if it is not given.

    A given mode must be that of the metric, unless nothing is trained.
    """
    trains = config.get("run") in ("train", "check")
    callbacks = {f"callbacks.{k}": node for k, node in (config.get("callbacks") or {}).items()}
    for key, node in {**callbacks, "scheduler": config.get("scheduler")}.items():
        monitor = node.get("monitor") if isinstance(node, dict) else None
        if not isinstance(monitor, str) or not _has_mode(node):
            continue
        right = mode_of(monitor)
        mode = node.get("mode") or right or (None if trains else "min")
        if mode is None:
            message = f"expected min or max: the name of {monitor!r} does not show which is better"
            raise _problem(origins, f"{key}.mode", message, at=key)
        if trains and (wrong := contradiction(monitor, mode, right)):
            raise _problem(origins, f"{key}.mode", wrong, at=key)
        node["mode"] = mode


def _has_mode(node: Mapping[str, Any]) -> bool:
    signature = signatures.signature_of(str(node.get("_target_")))
    return "mode" in node or (signature is not None and "mode" in signature.parameters)


def _check_values(config: dict[str, Any], origins: Origins) -> None:
    for key, (expected, is_right) in schema.NUMBERS.items():
        node, _, name = key.rpartition(".")
        value = (config.get(node) or {} if node else config).get(name)
        if isinstance(value, int | float) and not is_right(value):
            raise _problem(origins, key, expected=expected, given=value)
    for part in ("optimizer", "scheduler"):
        for key, value in (config.get(part) or {}).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise _problem(origins, f"{part}.{key}", expected="a finite number", given=value)
    task = config.get("task", "")
    if not task or Path(task).name != task or task.startswith("."):
        raise _problem(origins, "task", expected="a name for a folder", given=task)


def _check_parts(config: dict[str, Any], origins: Origins) -> None:
    """Remove parts that the module or the model does not take; refuse such a part if typed."""
    for whole, parts in (("module", schema.PARTS), ("model", schema.MODEL_PARTS)):
        target = (config.get(whole) or {}).get("_target_")
        signature = signatures.signature_of(target) if target else Signature({})
        if signature is None or signature.open:
            continue
        for part in parts:
            if config.get(part) is None or part in signature.parameters:
                continue
            if origins.typed(part):
                message = f"{target or whole} takes no argument {part!r}, so it has no effect"
                raise _problem(origins, part, message)
            config[part] = None


def _given(key: str, config: Mapping[str, Any]) -> set[str]:
    """Return the arguments that the launcher passes itself."""
    if key in ("module", "model"):
        parts = schema.PARTS if key == "module" else schema.MODEL_PARTS
        return {part for part in parts if config.get(part)}
    return {"images"} if key == "predict" else set()


def _check_trainer(node: dict[str, Any], precision: Any, origins: Origins) -> None:
    for key in node:
        if key in schema.ELSEWHERE:
            message = f"set elsewhere: {schema.ELSEWHERE[key]}"
            raise _problem(origins, f"trainer.{key}", message)
        if key in schema.UNUSED and node[key]:
            raise _problem(origins, f"trainer.{key}", f"not used here: {schema.UNUSED[key]}")
    if node.get("overfit_batches"):
        for key in ("limit_batches", "limit_train_batches", "limit_val_batches"):
            if node.get(key) is not None:
                message = f"not together with {key}: it limits train and val itself"
                raise _problem(origins, "trainer.overfit_batches", message)
    if node.get("minutes") is not None:
        for key in ("max_epochs", "max_steps", "max_time"):
            typed = any(dotted_key(word) == f"trainer.{key}" for word in origins.overrides)
            if typed and node.get(key) is not None:
                message = "not together with trainer.minutes; give one, or trainer.minutes=null"
                raise _problem(origins, f"trainer.{key}", message)
    parameters = {
        **signatures.known(TRAINER).parameters,
        **signatures.known(schema.TRAINER_EXTRAS).parameters,
    }
    only = Signature({"precision": parameters["precision"]})
    check_arguments("", {"precision": precision}, only, origins, what=TRAINER)
    taken = Signature({k: p for k, p in parameters.items() if k not in schema.ELSEWHERE})
    check_arguments("trainer", node, taken, origins, what=TRAINER)


def check_node(key: str, node: dict[str, Any], origins: Origins, given: Iterable[str] = ()) -> None:
    """Check a node with `_target_`, and all such nodes below it."""
    target = node["_target_"]
    if not isinstance(target, str):
        raise _problem(origins, f"{key}._target_", expected="a dotted name", given=target)
    signature = signatures.signature_of(target)
    if signature is None:
        _check_exists(key, target, origins)
    else:
        arguments = {k: v for k, v in node.items() if k not in _DIRECTIVES}
        check_arguments(key, arguments, signature, origins, what=target)
        node.update(arguments)  # with absolute paths
        if not node.get("_partial_") and "_args_" not in node:
            missing = [
                n
                for n, p in signature.parameters.items()
                if p.required and n not in node and n not in given
            ]
            # The optimizer's parameters, the scheduler's optimizer and the model to fine-tune
            # come from the module.
            if missing and key not in ("optimizer", "scheduler", "finetune"):
                message = f"missing: {target} needs it"
                if key == "attention":  # called for each feature map
                    message += "; the network gives it if the file has the line\n  _partial_: true"
                raise _problem(origins, f"{key}.{missing[0]}", message, at=key)
    for name, value in node.items():
        _check_below(f"{key}.{name}", value, origins)


def _check_below(key: str, value: Any, origins: Origins) -> None:
    if isinstance(value, dict):
        if "_target_" in value:
            check_node(key, value, origins)
        else:
            for name, item in value.items():
                _check_below(f"{key}.{name}", item, origins)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_below(f"{key}.{index}", item, origins)


def _check_exists(key: str, target: str, origins: Origins) -> None:
    """Report a target that cannot be read: a wrong name, or one that the parser cannot follow."""
    if "." not in target:
        raise _problem(origins, f"{key}._target_", expected="package.Class", given=target)
    if signatures.source_of(target) is None:
        root = target.partition(".")[0]
        message = f"no module named {root!r}; --config-dir names the folder of your own modules"
        raise _problem(origins, f"{key}._target_", message)
    if missing := signatures.missing_part(target):
        package, name, names = missing
        message = f"{package} has no {name!r}{nearest(name, names)}"
        raise _problem(origins, f"{key}._target_", message)


def check_arguments(
    key: str,
    node: dict[str, Any],
    signature: Signature,
    origins: Origins,
    *,
    what: str,
) -> None:
    """Check the keys of a node against a signature; make its paths absolute in place."""
    prefix = f"{key}." if key else ""
    for name, value in node.items():
        parameter = signature.parameters.get(name)
        if parameter is None:
            if signature.open:
                continue
            known = sorted(signature.parameters)
            if not key:
                known.append("experiment")  # a group without a key of its own
            some = ", ".join(known[:12]) + (", …" if len(known) > 12 else "")
            hint = nearest(name, known) or (f"; it has {some}" if known else "")
            if name in schema.INSTEAD and not key.startswith("finetune"):
                hint = f"; {schema.INSTEAD[name]}"
            raise _problem(origins, f"{prefix}{name}", f"{what} has no such key{hint}")
        if value is None and key in schema.NULLABLE:
            continue
        if not signatures.accepts(parameter, value):
            hint = nearest(value, signatures.choices(parameter)) if isinstance(value, str) else ""
            expected = signatures.expected(parameter)
            raise _problem(origins, f"{prefix}{name}", hint, expected=expected, given=value)
        if isinstance(value, str) and signatures.takes_path(parameter) and _is_path(name, value):
            node[name] = str(absolute(value))


def _is_path(name: str, value: str) -> bool:
    """Return whether a text for a path is one, and not a URL, a name on a hub or of a model."""
    if "://" in value or value.startswith("hf-hub:") or (name, value) == ("resume", "latest"):
        return False
    return name != "pretrained" or absolute(value).exists()


def _problem(origins: Origins, key: str, message: str = "", at: str = "", **info: Any) -> UserError:
    """Return an error about a key, with the place of the key or else of the key `at`."""
    return UserError(message, key=key, where=origins.of(key) or (at and origins.of(at)), **info)
