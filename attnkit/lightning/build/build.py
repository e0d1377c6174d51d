"""Objects from configuration: Hydra's `_target_` nodes with an allow-list, and without Hydra.

Hydra's own `instantiate` calls whatever a file names (`torch.load`, `builtins.open`, …). Here the
name is checked before anything is imported, then the object that it names, then the arguments. The
tables are in allowlist.py.
"""

import functools
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from pkgutil import resolve_name
from types import FunctionType, MethodType, ModuleType
from typing import Any

from attnkit.core.names import nearest
from attnkit.lightning.build import allowlist
from attnkit.lightning.build.allowlist import FUNCTIONS, KINDS, PACKAGES
from attnkit.lightning.errors import RunError, UserError, first_line

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

    Allowed are subclasses of `KINDS` that are defined in `HOMES`, the `FUNCTIONS` (see
    allowlist.py), and anything that is defined in a package of `allow` (or of `allowing`), which
    only the user may name. A string is never looked up as a function.

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
    trusted = allowlist.own(trusted)
    if problem := allowlist.objection(target, trusted):
        raise UserError(f"{where}: {problem}")
    found = _walk(target, trusted, where)
    if not callable(found):
        raise UserError(f"{where}: {target} is a {type(found).__name__}, expected a class")
    home = str(getattr(found, "__module__", None))
    if home.partition(".")[0] in trusted or _is_listed(found):
        return found
    if inspect.isclass(found) and allowlist.is_home(home) and issubclass(found, _kinds()):
        if allowlist.runs_code(found):
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
                if inside.partition(".")[0] not in trusted and not allowlist.is_place(inside):
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
    try:
        bound = inspect.signature(called).bind_partial(*positional, **arguments)
    except (TypeError, ValueError):  # the call itself raises it
        given = dict(arguments)
    else:
        given = {**bound.arguments, **bound.kwargs}
    return allowlist.refused_argument(called.__name__, given)
