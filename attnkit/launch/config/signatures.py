"""Reads the arguments of a `_target_` from its source: the constructor is the only schema.

A config node `{_target_: package.module.Class, key: value}` is valid if the constructor of Class
takes `key` and `value`. Importing the class would import torch (seconds) and run foreign code
before it is allowed, so the source file is parsed instead. For what can't be read this way
(compiled code, names created at run time) the result is `None`, and the constructor itself checks.
Values are checked against annotations, which are read as they are written and never evaluated.
"""

import ast
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from os.path import isfile
from pathlib import Path
from typing import Any

MAX_HOPS = 12  # re-exports and base classes followed before giving up


@dataclass(frozen=True)
class Parameter:
    """One argument of a constructor: its annotation (None accepts anything) and its module."""

    name: str
    annotation: ast.expr | None
    required: bool
    module: "Module"


@dataclass(frozen=True)
class Signature:
    """The arguments of a target; `open` means that it also takes other names (`**kwargs`)."""

    parameters: dict[str, Parameter]
    open: bool = False


@dataclass(eq=False)
class Module:
    """One parsed source file."""

    name: str
    path: Path
    names: dict[str, ast.AST] = field(default_factory=dict)
    stars: list[ast.ImportFrom] = field(default_factory=list)
    is_package: bool = False

    def package(self, level: int) -> str:
        """Return the package that a relative import of this level starts from."""
        parts = self.name.split(".")
        return ".".join(parts[: len(parts) - level + self.is_package])


def takes_images(node: Mapping[str, Any] | None) -> bool:
    """Return whether `predict` is data that reads images=…; if not, `data` is predicted."""
    if not node or "_target_" not in node:
        return False
    signature = signature_of(node["_target_"])
    return signature is None or signature.open or "images" in signature.parameters


def signature_of(target: str) -> Signature | None:
    """Return the signature of a class or function at a dotted path; None if it can't be read."""
    found = _find(target)
    try:
        return _signature(*found) if found else None
    except RecursionError:  # an annotation nested too deeply
        return None


def known(target: str) -> Signature:
    """Return the signature of a target that certainly exists."""
    found = signature_of(target)
    assert found is not None, target
    return found


def missing_part(target: str) -> tuple[str, str, list[str]] | None:
    """Return the module at which a dotted path ends, the name that it lacks, and its names.

    The result is None if the source does not show that.
    """
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module = _module(".".join(parts[:cut]))
        if module is None:
            continue
        names = set(module.names)
        beside = list(module.path.parent.iterdir()) if module.is_package else []
        names |= {path.name.partition(".")[0] for path in beside}
        if parts[cut] in names or "__getattr__" in names or module.stars:
            return None
        return module.name, parts[cut], sorted(n for n in names if not n.startswith("_"))
    return None


def source_of(target: str) -> Path | None:
    """Return the file or package folder of a dotted path's root."""
    spec = _root(target.partition(".")[0])
    if spec is None:
        return None
    if spec.origin and spec.has_location:
        return Path(spec.origin)
    return next((Path(p) for p in spec.submodule_search_locations or []), None)


# --- finding a definition -------------------------------------------------------------------------


def _root(name: str) -> ModuleSpec | None:
    """Find a top-level name with Python's own finder, which imports nothing for such a name."""
    try:
        return find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None


def _module(name: str) -> Module | None:
    """Find a module by walking folders, since Python's finder would import its packages."""
    root, *rest = name.split(".")
    spec = _root(root)
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or [])
    path = spec.origin if spec.origin and spec.origin.endswith(".py") else None
    for part in rest:
        for folder in folders:  # strings, since Path objects would take most of the time
            if isfile(package := f"{folder}/{part}/__init__.py"):
                path, folders = package, [f"{folder}/{part}"]
                break
            if isfile(module := f"{folder}/{part}.py"):
                path, folders = module, []
                break
        else:
            return None
    try:
        return _parsed(name, path, os.stat(path).st_mtime_ns) if path else None
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


@lru_cache(maxsize=512)
def _parsed(name: str, file: str, changed: int) -> Module:
    """Return the module, parsed once for each state of its file, as a process may run again."""
    path = Path(file)
    module = Module(name, path, is_package=path.name == "__init__.py")
    body = ast.parse(path.read_bytes()).body
    _collect(body, module.names)
    module.stars = [n for n in body if isinstance(n, ast.ImportFrom) and n.names[0].name == "*"]
    return module


def _collect(body: list[ast.stmt], names: dict[str, ast.AST]) -> None:
    """Collect top-level definitions, also those inside `if` and `try` (such as TYPE_CHECKING)."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name != "*":
                    names[alias.asname or alias.name] = node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    names[target.id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            names[node.target.id] = node.value
        elif isinstance(node, ast.If):
            _collect([*node.body, *node.orelse], names)
        elif isinstance(node, ast.Try):
            _collect([*node.body, *(s for h in node.handlers for s in h.body)], names)


def _find(dotted: str) -> tuple[ast.AST, Module] | None:
    """Return the definition at `package.module.Name[.attribute]`, following re-exports."""
    parts = dotted.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module = _module(".".join(parts[:cut]))
        if module is None:
            continue
        found = lookup(parts[cut], module)
        for part in parts[cut + 1 :]:
            if found is None or not isinstance(found[0], ast.ClassDef):
                return None
            inner: dict[str, ast.AST] = {}
            _collect(found[0].body, inner)
            found = (inner[part], found[1]) if part in inner else None
        return found
    return None


def lookup(name: str, module: Module, hops: int = 0) -> tuple[ast.AST, Module] | None:
    """Return the definition behind a name in a module, and the module that contains it."""
    node = module.names.get(name)
    if hops > MAX_HOPS:
        return None
    if node is None:
        sources = (_module(_source(module, star)) for star in module.stars)
        found = (lookup(name, source, hops + 1) for source in sources if source)
        return next((f for f in found if f), None)
    if isinstance(node, ast.Name) and node.id != name:  # Alias = Other
        return lookup(node.id, module, hops + 1)
    if not isinstance(node, ast.ImportFrom):
        return node, module
    source = _source(module, node)
    original = next(a.name for a in node.names if (a.asname or a.name) == name)
    if source == module.name:
        return None
    target = _module(source)
    return lookup(original, target, hops + 1) if target else None


def _source(module: Module, node: ast.ImportFrom) -> str:
    base = module.package(node.level) if node.level else ""
    return ".".join(p for p in (base, node.module) if p)


# --- reading a signature --------------------------------------------------------------------------


def _signature(node: ast.AST, module: Module, hops: int = 0) -> Signature | None:
    if isinstance(node, ast.FunctionDef):
        decorators = {ast.unparse(d) for d in node.decorator_list}
        return _arguments(node, module, bound="classmethod" in decorators)
    if not isinstance(node, ast.ClassDef) or hops > MAX_HOPS:
        return None
    init = next(
        (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None
    )
    if init is None and any("dataclass" in ast.unparse(d) for d in node.decorator_list):
        base = _inherited(node, module, hops)
        inherited = base.parameters if base else {}
        return Signature({**inherited, **_fields(node, module)}, base is None or base.open)
    if init is None:
        return _inherited(node, module, hops)
    own = _arguments(init, module, bound=True)
    if own.open and _passes_kwargs_on(init):
        base = _inherited(node, module, hops)
        if base is not None:
            merged = {n: p for n, p in base.parameters.items() if n not in own.parameters}
            optional = {
                n: Parameter(n, p.annotation, False, p.module) for n, p in merged.items()
            }  # optional, since the subclass may pass them itself
            return Signature({**own.parameters, **optional}, base.open)
    return own


def _inherited(node: ast.ClassDef, module: Module, hops: int) -> Signature | None:
    """Return the signature of the constructor that a class inherits; None if it can't be read."""
    ancestors = _ancestors(node, module, hops)
    for found in ancestors:
        if found is not None and _has_constructor(found[0]):
            return _signature(*found, hops + 1)
    return None if None in ancestors else Signature({})


def _ancestors(
    node: ast.ClassDef, module: Module, hops: int
) -> list[tuple[ast.ClassDef, Module] | None]:
    """Return the ancestors of a class in Python's order: base by base, each after all classes
    that derive from it. None stands for a class that can't be read."""
    order: list[tuple[ast.ClassDef, Module] | None] = []
    for base in node.bases:
        text = ast.unparse(base)
        found = lookup(text, module) if "." not in text else None
        if text == "object":
            continue
        if found is None or not isinstance(found[0], ast.ClassDef) or hops > MAX_HOPS:
            order.append(None)
        else:
            order += [(found[0], found[1]), *_ancestors(found[0], found[1], hops + 1)]
    last = {id(found[0]): place for place, found in enumerate(order) if found}
    return [f for place, f in enumerate(order) if f is None or last[id(f[0])] == place]


def _has_constructor(node: ast.ClassDef) -> bool:
    """Return whether a class defines a constructor, or is a dataclass."""
    written = any(isinstance(n, ast.FunctionDef) and n.name == "__init__" for n in node.body)
    return written or any("dataclass" in ast.unparse(d) for d in node.decorator_list)


def _arguments(function: ast.FunctionDef, module: Module, *, bound: bool) -> Signature:
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    first_default = len(positional) - len(args.defaults)
    parameters = {
        a.arg: Parameter(a.arg, a.annotation, i < first_default, module)
        for i, a in enumerate(positional)
        if not (bound and i == 0)
    }
    for a, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        parameters[a.arg] = Parameter(a.arg, a.annotation, default is None, module)
    return Signature(parameters, open=args.kwarg is not None)


def _fields(node: ast.ClassDef, module: Module) -> dict[str, Parameter]:
    """Return the fields that a dataclass defines itself, as arguments."""
    return {
        n.target.id: Parameter(n.target.id, n.annotation, n.value is None, module)
        for n in node.body
        if isinstance(n, ast.AnnAssign)
        and isinstance(n.target, ast.Name)
        and "ClassVar" not in ast.unparse(n.annotation)
    }


def _passes_kwargs_on(init: ast.FunctionDef) -> bool:
    """Return whether a constructor passes its keyword arguments to `super().__init__`."""
    kwargs = init.args.kwarg
    return kwargs is not None and any(
        isinstance(n, ast.Call)
        and ast.unparse(n.func) == "super().__init__"
        and any(k.arg is None and ast.unparse(k.value) == kwargs.arg for k in n.keywords)
        for n in ast.walk(init)
    )


# --- values against annotations -------------------------------------------------------------------

_SEQUENCES = {"list", "List", "Sequence", "Iterable", "Collection", "set", "Set", "tuple", "Tuple"}
_MAPPINGS = {"dict", "Dict", "Mapping", "MutableMapping"}


def accepts(parameter: Parameter, value: Any) -> bool:
    """Return whether a plain value fits an annotation; one that is not understood accepts all."""
    return parameter.annotation is None or _fits(parameter.annotation, value, parameter.module, 0)


def takes_path(parameter: Parameter) -> bool:
    """Return whether the annotation mentions a path; relative paths are then made absolute."""
    return parameter.annotation is not None and any(
        isinstance(n, ast.Name | ast.Attribute) and ast.unparse(n).split(".")[-1] == "Path"
        for n in ast.walk(parameter.annotation)
    )


def expected(parameter: Parameter) -> str:
    """Return the annotation as text, with its aliases expanded."""
    if parameter.annotation is None:
        return "anything"
    return ast.unparse(_written_out(parameter.annotation, parameter.module))


def choices(parameter: Parameter) -> list[str]:
    """Return the strings that a Literal annotation allows, for suggestions."""
    if parameter.annotation is None:
        return []
    nodes = ast.walk(_written_out(parameter.annotation, parameter.module))
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def _written_out(node: ast.expr, module: Module, hops: int = 0) -> ast.expr:
    """Return an annotation with its aliases (`Size = int | tuple[int, int]`) expanded."""

    class Aliases(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.expr:
            found = lookup(name.id, module) if hops < MAX_HOPS else None
            if found is None or not isinstance(found[0], ast.BinOp | ast.Subscript):
                return name
            return _written_out(found[0], found[1], hops + 1)

        def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
            self.generic_visit(node)
            if ast.unparse(node.value) == "Annotated":  # Annotated[Tensor, "its shape"]
                return node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node
            if _literal_choices(node) != [node] and isinstance(node.slice, ast.Tuple):
                # Literal[Name, "other"]
                node.slice.elts = [
                    choice for inner in node.slice.elts for choice in _literal_choices(inner)
                ]
            return node

    return Aliases().visit(ast.parse(ast.unparse(node), mode="eval").body)


def _literal_choices(node: ast.expr) -> list[ast.expr]:
    """Return the choices of a Literal; another node is a choice itself."""
    if not isinstance(node, ast.Subscript) or not ast.unparse(node.value).endswith("Literal"):
        return [node]
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]


def _fits(node: ast.expr, value: Any, module: Module, hops: int) -> bool:
    if hops > MAX_HOPS or (isinstance(value, Mapping) and "_target_" in value):
        return True  # an object to be built; the constructor checks its class
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return any(_fits(side, value, module, hops) for side in (node.left, node.right))
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):  # a forward reference
            return _fits(ast.parse(node.value, mode="eval").body, value, module, hops + 1)
        return value is None if node.value is None else True
    if isinstance(node, ast.Subscript):
        return _fits_subscript(node, value, module, hops)
    name = ast.unparse(node).split(".")[-1]
    if name in _PLAIN:
        return _PLAIN[name](value)
    found = lookup(name, module) if isinstance(node, ast.Name) else None
    if found is not None and isinstance(found[0], ast.expr):  # Size = int | tuple[int, int]
        return _fits(found[0], value, found[1], hops + 1)
    if found is not None and isinstance(found[0], ast.ClassDef):  # no plain value is a Tensor
        bases = {ast.unparse(base).split(".")[-1] for base in found[0].bases}
        return bool(bases & {"str", "int", "Enum", "StrEnum", "IntEnum"}) or not isinstance(
            value, str | int | float
        )
    return True


def _fits_subscript(node: ast.Subscript, value: Any, module: Module, hops: int) -> bool:
    name = ast.unparse(node.value).split(".")[-1]
    inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if name == "Optional":
        return value is None or _fits(inner[0], value, module, hops)
    if name == "Union":
        return any(_fits(n, value, module, hops) for n in inner)
    if name == "Annotated":
        return _fits(inner[0], value, module, hops)
    if name == "Literal":
        return any(
            type(n.value) is type(value) and n.value == value  # 1 is not True
            if isinstance(n, ast.Constant)
            else _fits(n, value, module, hops)  # the name of another Literal
            for n in inner
        )
    if name in _MAPPINGS:
        return isinstance(value, Mapping)
    if name == "PathLike":
        return isinstance(value, str)
    if name not in _SEQUENCES:
        return True
    if not isinstance(value, list | tuple):
        return False
    fixed = name in {"tuple", "Tuple"} and ast.unparse(inner[-1]) != "..."
    if fixed:
        return len(value) == len(inner) and all(
            _fits(n, v, module, hops) for n, v in zip(inner, value, strict=True)
        )
    return all(_fits(inner[0], v, module, hops) for v in value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


_PLAIN = {
    "int": _is_int,
    "float": lambda v: isinstance(v, float) or _is_int(v),
    "bool": lambda v: isinstance(v, bool),
    "str": lambda v: isinstance(v, str),
    "Path": lambda v: isinstance(v, str),
    "PathLike": lambda v: isinstance(v, str),
    "None": lambda v: v is None,
    **{n: lambda v: isinstance(v, list | tuple) for n in _SEQUENCES},
    **{n: lambda v: isinstance(v, Mapping) for n in _MAPPINGS},
}
