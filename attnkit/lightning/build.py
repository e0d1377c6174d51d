"""Objects from configuration: Hydra's `_target_` nodes with an allow-list, and without Hydra.

Hydra's own `instantiate` calls whatever a file names (`torch.load`, `builtins.open`, …). Here the
name is checked before anything is imported, then the object that it names, then the arguments.

A base class alone is not enough: some of torch's modules run code given as an argument
(`torch_geometric.nn.Sequential`), and importing a module already runs it. So only the modules in
`HOMES` may be walked through or define a class.
"""

import functools
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from pkgutil import resolve_name
from types import FunctionType, MethodType, ModuleType
from typing import Any

from attnkit.core.names import nearest
from attnkit.lightning.errors import RunError, UserError, first_line

# Modules with their submodules; their parents may only be passed through (`lightning.Trainer`).
HOMES = (
    "attnkit.core",
    "attnkit.interop",
    "attnkit.finetune",
    "attnkit.layers",
    "attnkit.lightning",
    "attnkit.metrics",
    "attnkit.models",
    "attnkit.interpret",
    "attnkit.tasks",
    "lightning.fabric.plugins",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.core",
    "lightning.pytorch.loggers",
    "lightning.pytorch.plugins",
    "lightning.pytorch.strategies",
    "lightning.pytorch.trainer",
    "timm.layers",
    "timm.models",
    "timm.optim",
    "torch.nn",
    "torch.optim",
    "torch_geometric.nn",
    "torchmetrics",
    "torchvision.models",
    "torchvision.ops",
    "torchvision.transforms",
)

PACKAGES = tuple(dict.fromkeys(home.partition(".")[0] for home in HOMES))

# Only subclasses of these are built from the places above. LightningModule, torchmetrics' Metric
# and torchvision's v2 transforms are `torch.nn.Module`s.
KINDS = (
    "torch.nn.Module",
    "torch.optim.Optimizer",
    "torch.optim.lr_scheduler.LRScheduler",
    "attnkit.lightning.export.Export",
    "attnkit.interpret.report.report.Report",
    "attnkit.tasks.graphs.link_data.Links",
    "lightning.Callback",
    "lightning.LightningDataModule",
    "lightning.Trainer",
    "lightning.pytorch.loggers.Logger",
    "lightning.pytorch.plugins.CheckpointIO",
    "lightning.pytorch.plugins.ClusterEnvironment",
    "lightning.pytorch.plugins.LayerSync",
    "lightning.pytorch.plugins.Precision",
    "lightning.pytorch.strategies.Strategy",
    "torchvision.transforms.Compose",
    "torchvision.transforms.PILToTensor",
    "torchvision.transforms.ToTensor",
)

# Functions that return such objects.
FUNCTIONS = (
    "attnkit.finetune.bitfit",
    "attnkit.finetune.full",
    "attnkit.finetune.head_only",
    "attnkit.finetune.last_blocks",
    "attnkit.finetune.lora",
    "attnkit.lightning.muon",
    "attnkit.lightning.warmup_cosine",
    "attnkit.lightning.warmup_polynomial",
    "attnkit.lightning.warmup_step",
    "attnkit.ViT.from_size",
    "attnkit.interop.timm_network",
    "attnkit.models.timm_backbone",
    "attnkit.tasks.image_classification.attention_network",
    "timm.create_model",
    "torchvision.models.get_model",
)

# Classes of an allowed kind that, or whose subclasses, make code of their arguments (or of names in
# the modules they are given, which torch.fx writes into a source text).
CODE_RUNNING = (
    "timm.models._features_fx.FeatureGraphNet",
    "timm.models._features_fx.GraphExtractNet",
    "torch.fx.graph_module.GraphModule",
    "torch.jit",
    "torch_geometric.nn.sequential.Sequential",
)

# Arguments that make these libraries read (and some unpickle) any file or download, or start a
# program: timm's checkpoints, torchmetrics' language and image models, W&B's service.
REFUSED_ARGUMENTS = {
    "baseline_path",
    "baseline_url",
    "cache_dir",
    "checkpoint_path",
    "feature_extractor_weights_path",
    "model_name_or_path",
    "model_path",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "settings",
}

_ON_THE_WAY = {home.rsplit(".", n)[0] for home in HOMES for n in range(1, home.count(".") + 1)}
_REGISTERED = re.compile(r"[\w.-]+", re.ASCII)  # a name without hf-hub:, local-dir: or a path


def is_place(module: str) -> bool:
    """Whether a module may be imported and searched for what a `_target_` names."""
    return module in _ON_THE_WAY or is_home(module)


def is_home(module: str) -> bool:
    """Whether a class of an allowed kind in this module may be built."""
    return any(module == home or module.startswith(f"{home}.") for home in HOMES)


def is_unknown(package: str) -> bool:
    """Whether only the user can allow a package: it is neither listed here nor Python's own."""
    return package not in PACKAGES and package not in sys.stdlib_module_names


def own(packages: Iterable[str]) -> tuple[str, ...]:
    """Return those of the packages that the user can allow."""
    return tuple(filter(is_unknown, packages))


def objection(target: Any, trusted: Sequence[str] = ()) -> str | None:
    """Return why a `_target_` may not be built, as far as its name shows; None if it may."""
    package, *inner = target.split(".") if isinstance(target, str) else [""]
    if (
        not inner
        or not all(part.isidentifier() for part in (package, *inner))
        or any(part.startswith("__") for part in inner)
    ):
        return f"expected a dotted name such as attnkit.ViT, got {target!r:.100}"
    if package in own(trusted):
        return None
    if package not in PACKAGES:
        named = ", ".join((*PACKAGES, *own(trusted)))
        problem = f"{target} is outside the allowed packages ({named})"
        if not is_unknown(package):
            return problem
        return (
            f"{problem}\n  if {package} is yours: allow=[{package}] or --config-dir its folder, "
            f"in Python `with attnkit.lightning.allowing({package!r})`"
        )
    if target in FUNCTIONS:
        return None
    if private := next((part for part in inner if part.startswith("_")), None):
        return f"{target} may not be built from a configuration: {private} is private"
    parents = [target.rsplit(".", n)[0] for n in range(len(inner), 0, -1)]
    if closed := next((p for p in parents if not is_place(p)), None):
        places = [home for home in HOMES if home.startswith(f"{package}.")]
        hint = nearest(closed, places, cutoff=0.85)
        return (
            f"{target} may not be built from a configuration{hint}\n"
            f"  of {package}, allowed are {', '.join(places)}"
        )
    return None


def runs_code(cls: type) -> bool:
    """Whether a class of an allowed kind runs its arguments as code."""
    names = [f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__]
    return any(f"{name}.".startswith(f"{bad}.") for name in names for bad in CODE_RUNNING)


_allowed: ContextVar[tuple[str, ...]] = ContextVar("attnkit_allowed_packages", default=())


@contextmanager
def allowing(*packages: str) -> Iterator[None]:
    """Inside this context, configurations and checkpoints may also name parts of `packages`.

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

    Allowed are subclasses of `KINDS` that are defined in `HOMES`, the `FUNCTIONS`, and anything
    that is defined in a package of `allow` (or of `allowing`), which only the user may name. A
    string is never looked up as a function.

    Args:
        node: plain values, mappings and lists, as read from YAML.
        allow: further top-level packages, the user's own.
        at: the key path of `node`, for messages.
        kwargs: arguments of the outermost target, which override those of the node.

    Raises:
        UserError: a refused or missing target, or an error of its constructor (chained); the
            message has the key path and the target. Of errors of the user's own classes, only
            TypeError, ValueError and RuntimeError are taken to be about the arguments.
    """
    trusted = (*allow, *_allowed.get())
    if kwargs:
        if not (isinstance(node, Mapping) and "_target_" in node):
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
    if not isinstance(positional, (list, tuple)):
        raise UserError(f"{at}._args_: expected a list, got {type(positional).__name__}")
    called = find(target, trusted, where)
    foreign = called.__module__.partition(".")[0] in PACKAGES
    if foreign and (problem := _refused_argument(called, positional, arguments)):
        raise UserError(f"{at or 'config'}: {target}: {problem}")
    if partial:
        return functools.partial(called, *positional, **arguments)
    try:
        return called(*positional, **arguments)
    except (UserError, RunError):
        raise
    except Exception as error:
        if not foreign and not isinstance(error, (TypeError, ValueError, RuntimeError)):
            raise
        named = not isinstance(error, (TypeError, ValueError))
        message = first_line(error, named=named)
        raise UserError(f"{at or 'config'}: {target}: {message}") from error


def find(target: Any, trusted: Sequence[str] = (), where: str = "_target_") -> Any:
    """Return the class or function that a `_target_` names; raise `UserError` if it is refused."""
    trusted = own(trusted)
    if problem := objection(target, trusted):
        raise UserError(f"{where}: {problem}")
    found = _walk(target, trusted, where)
    if not callable(found):
        raise UserError(f"{where}: {target} is a {type(found).__name__}, expected a class")
    home = str(getattr(found, "__module__", None))
    if home.partition(".")[0] in trusted or _is_listed(found):
        return found
    if inspect.isclass(found) and is_home(home) and issubclass(found, _kinds()):
        if runs_code(found):
            raise UserError(
                f"{where}: {target} may not be built from a configuration: "
                "it runs its arguments as code"
            )
        return found
    raise UserError(
        f"{where}: {target} may not be built from a configuration; allowed are: a module,\n"
        "  optimizer, scheduler, callback, logger, data module, metric or transform class,\n"
        f"  or one of {', '.join(FUNCTIONS)}"
    )


def _walk(target: str, trusted: tuple[str, ...], where: str) -> Any:
    """Follow the dotted name, importing submodules, but never leaving the allowed places."""
    package, *parts = target.split(".")
    found = _imported(package, target, where, None)
    name = package
    for part in parts:
        name = f"{name}.{part}"
        at = name if name == target else f"{target}: {name}"
        if isinstance(found, ModuleType):
            # Not getattr: a module's own __getattr__ may import what was not allowed.
            lazy = found.__name__.partition(".")[0] in ("attnkit", *trusted)
            if part not in vars(found) and not (lazy and hasattr(found, part)):
                found = _imported(name, at, where, found)
                continue
            found = getattr(found, part)
            if isinstance(found, ModuleType):
                inside = found.__name__
                if inside.partition(".")[0] not in trusted and not is_place(inside):
                    raise UserError(f"{where}: {at} leads out of the allowed packages")
        elif inspect.isclass(found) and hasattr(found, part):
            found = getattr(found, part)
        else:
            raise UserError(f"{where}: {at} does not exist{nearest(part, dir(found))}")
    return found


def _imported(name: str, at: str, where: str, parent: ModuleType | None) -> ModuleType:
    part = name.rpartition(".")[2]
    if name.count(".") and not hasattr(parent, "__path__"):
        raise UserError(f"{where}: {at} does not exist{nearest(part, dir(parent))}")
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name and error.name != name and not name.startswith(f"{error.name}."):
            raise UserError(f"{where}: {at} needs {error.name}: not installed") from error
        raise UserError(f"{where}: {at} does not exist{nearest(part, dir(parent))}") from None


def _kinds() -> tuple[type, ...]:
    """Return the kinds; not those of attnkit whose file is not imported, since no class can derive
    from them yet."""
    return tuple(
        resolve_name(kind)
        for kind in KINDS
        if not kind.startswith("attnkit.") or kind.rpartition(".")[0] in sys.modules
    )


def _is_listed(found: Any) -> bool:
    # Objects are compared, not names: a function may have several public names.
    if not isinstance(found, (FunctionType, MethodType)):
        return False
    package = found.__module__.partition(".")[0]
    names = (name for name in FUNCTIONS if name.partition(".")[0] == package)
    alike = (name for name in names if name.rpartition(".")[2] == found.__name__)
    return any(found == _walk(name, (), name) for name in alike)


def _refused_argument(
    called: Any, positional: Sequence[Any], arguments: Mapping[str, Any]
) -> str | None:
    """Return why these arguments may not come from a configuration; None if they may."""
    try:
        bound = inspect.signature(called).bind_partial(*positional, **arguments)
    except (TypeError, ValueError):  # the call itself raises it
        given = dict(arguments)
    else:
        given = {**bound.arguments, **bound.kwargs}
    for name, value in given.items():
        if name in REFUSED_ARGUMENTS and value is not None:
            return f"{name} leads to a file or program: a configuration may not set it; use Python"
        registered = isinstance(value, str) and _REGISTERED.fullmatch(value)
        if (called.__name__, name) == ("create_model", "model_name") and not registered:
            return f"model_name: expected a name of timm's registry, got {value!r:.100}"
    return None
