"""Checks plain values against annotations, without evaluating the annotations."""

import ast
from collections.abc import Mapping
from typing import Any

from attnkit.launch.config.signatures import MAX_HOPS, Module, Parameter, lookup

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
            if _is_literal(node) and isinstance(node.slice, ast.Tuple):  # Literal[Name, "other"]
                node.slice.elts = [
                    choice for inner in node.slice.elts for choice in _literal_choices(inner)
                ]
            return node

    return Aliases().visit(ast.parse(ast.unparse(node), mode="eval").body)


def _is_literal(node: ast.expr) -> bool:
    return isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal")


def _literal_choices(node: ast.expr) -> list[ast.expr]:
    if not isinstance(node, ast.Subscript) or not _is_literal(node):
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
