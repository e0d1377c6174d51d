"""Objects from configuration: Hydra's `_target_` nodes with an allow-list, and without Hydra.

Hydra's own `instantiate` calls whatever a file names (`torch.load`, `builtins.open`, …). Here the
package is checked before anything is imported, and what the name leads to is checked before it is
called.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import Any

from attnkit.lightning.errors import UserError

PACKAGES = (
    "attnkit",
    "lightning",
    "timm",
    "torch",
    "torch_geometric",
    "torchmetrics",
    "torchvision",
)

# Only subclasses of these are built from the packages above. LightningModule, torchmetrics' Metric
# and torchvision's v2 transforms are `torch.nn.Module`s.
KINDS = (
    "torch.nn.Module",
    "torch.optim.Optimizer",
    "torch.optim.lr_scheduler.LRScheduler",
    "lightning.Callback",
    "lightning.LightningDataModule",
    "lightning.Trainer",
    "lightning.pytorch.loggers.Logger",
    "lightning.pytorch.plugins.CheckpointIO",
    "lightning.pytorch.plugins.ClusterEnvironment",
    "lightning.pytorch.plugins.LayerSync",
    "lightning.pytorch.plugins.Precision",
    "lightning.pytorch.strategies.Strategy",
)

# Functions that return such objects.
FUNCTIONS = (
    "attnkit.lightning.warmup_cosine",
    "attnkit.ViT.from_size",
    "timm.create_model",
    "torchvision.models.get_model",
)

_DOTTED = re.compile(r"\w+(\.(?!__)[A-Za-z_]\w*)+")
_allowed: ContextVar[tuple[str, ...]] = ContextVar("attnkit_allowed_packages", default=())


@contextmanager
def allowing(*packages: str) -> Iterator[None]:
    """Inside this context, configurations and checkpoints may also name things from `packages`.

    >>> with allowing("mypackage"):
    ...     module = MyModule.load_from_checkpoint("best.ckpt")
    """
    token = _allowed.set((*_allowed.get(), *packages))
    try:
        yield
    finally:
        _allowed.reset(token)


def build(node: Any, *, allow: Sequence[str] = (), at: str = "", **kwargs: Any) -> Any:
    """Build what a configuration node describes.

    A mapping with `_target_: package.Class` becomes `package.Class(**rest)`, with `_partial_: true`
    a `functools.partial` of it and with `_args_` positional arguments, as in Hydra. Mappings and
    lists are walked; plain values and objects are returned as they are.

    Allowed are subclasses of `KINDS` and the `FUNCTIONS` from `PACKAGES`, and anything that is
    defined in a package of `allow` (or of `allowing`), which only the user may name.

    Args:
        node: plain values, mappings and lists, as read from YAML.
        allow: further top-level packages, the user's own.
        at: the key path of `node`, for messages.
        kwargs: arguments of the outermost target, over those of the node.

    Raises:
        UserError: with the key path and the target, for a refused or missing target and for a
            TypeError or ValueError of its constructor (chained).
    """
    trusted = (*allow, *_allowed.get())
    if kwargs:
        if not _is_target(node):
            raise UserError(f"{at or 'config'}: arguments were given, but there is no _target_")
        node = {**node, **kwargs}
    return _build(node, trusted, at)


def _build(node: Any, trusted: tuple[str, ...], at: str) -> Any:
    if isinstance(node, Mapping):
        built = {
            key: _build(value, trusted, f"{at}.{key}" if at else str(key))
            for key, value in node.items()
        }
        return _call(built, trusted, at) if "_target_" in node else built
    if isinstance(node, Sequence) and not isinstance(node, (str, bytes)):
        built_list = [_build(value, trusted, f"{at}[{i}]") for i, value in enumerate(node)]
        return tuple(built_list) if isinstance(node, tuple) else built_list
    return node


def _call(arguments: dict[str, Any], trusted: tuple[str, ...], at: str) -> Any:
    target = arguments.pop("_target_")
    partial = arguments.pop("_partial_", False)
    positional = arguments.pop("_args_", [])
    where = f"{at}._target_" if at else "_target_"
    for key in arguments:
        if str(key).startswith("_") and str(key).endswith("_"):
            raise UserError(f"{at}.{key}: not known; known are _target_, _partial_ and _args_")
    called = find(target, trusted, where)
    if partial:
        return functools.partial(called, *positional, **arguments)
    try:
        return called(*positional, **arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"{at or 'config'}: {target}: {_first_line(error)}") from error


def find(target: Any, trusted: Sequence[str] = (), where: str = "_target_") -> Any:
    """The class or function a `_target_` names, if it may be called; else a `UserError`."""
    if not isinstance(target, str) or not _DOTTED.fullmatch(target):
        raise UserError(f"{where}: expected a dotted name such as attnkit.ViT, got {target!r}")
    package = target.partition(".")[0]
    packages = (*PACKAGES, *trusted)
    if package not in packages:
        raise UserError(
            f"{where}: {target} is outside the allowed packages ({', '.join(packages)})\n"
            f"if {package} is yours, allow it: allow=[{package}] on the command line, "
            f"`with attnkit.lightning.allowing({package!r})` in Python"
        )
    found = _walk(target, packages, where)
    if not callable(found):
        raise UserError(f"{where}: {target} is a {type(found).__name__}, expected a class")
    home = str(getattr(found, "__module__", None)).partition(".")[0]
    if home in trusted or (home in packages and (_is_kind(found) or _is_listed(found, package))):
        return found
    raise UserError(
        f"{where}: {target} may not be built from a configuration; may be: a module, optimizer,\n"
        "scheduler, callback, logger, data module, metric or transform class, or one of\n"
        f"{', '.join(FUNCTIONS)}"
    )


def _walk(target: str, packages: tuple[str, ...], where: str) -> Any:
    """Follow the dotted name, importing submodules, but never leaving the allowed packages."""
    found: Any = None
    name = ""
    for part in target.split("."):
        name = f"{name}.{part}" if name else part
        at = name if name == target else f"{target}: {name}"
        try:
            if found is None or (isinstance(found, ModuleType) and not hasattr(found, part)):
                module = import_module(name)
            found = module if found is None else getattr(found, part)
        except ModuleNotFoundError as error:
            if error.name and error.name != name and not name.startswith(f"{error.name}."):
                raise UserError(f"{where}: {at} needs {error.name}: not installed") from error
            raise UserError(f"{where}: {at} does not exist{_nearest(part, found)}") from None
        except AttributeError:
            raise UserError(f"{where}: {at} does not exist{_nearest(part, found)}") from None
        if isinstance(found, ModuleType) and found.__name__.partition(".")[0] not in packages:
            raise UserError(f"{where}: {at} leads out of the allowed packages")
    return found


def _is_kind(found: Any) -> bool:
    return inspect.isclass(found) and issubclass(found, _kinds())


@functools.cache
def _kinds() -> tuple[type, ...]:
    kinds = []
    for name in KINDS:
        module, _, cls = name.rpartition(".")
        kinds.append(getattr(import_module(module), cls))
    return tuple(kinds)


def _is_listed(found: Any, package: str) -> bool:
    # By what the name leads to, not by the name: a function may have several public ones.
    names = (name for name in FUNCTIONS if name.partition(".")[0] == package)
    return not inspect.isclass(found) and any(found == _walk(n, PACKAGES, n) for n in names)


def _is_target(node: Any) -> bool:
    return isinstance(node, Mapping) and "_target_" in node


def _nearest(name: str, within: Any) -> str:
    close = get_close_matches(name, dir(within), n=1) if within is not None else []
    return f"; did you mean {close[0]}?" if close else ""


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
