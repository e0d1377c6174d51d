"""Who may call torch's attention, and who may import Hydra.

That imports run downward is checked by import-linter, in test_house.
"""

import ast
import sys
from pathlib import Path

import pytest

ATTENTION = {"scaled_dot_product_attention", "flex_attention", "varlen_attn"}
CONFIGURATION = {"hydra", "omegaconf"}
KERNELS = Path("core/edges_kernels.py")


@pytest.fixture(scope="module")
def trees(repository) -> dict[Path, ast.Module]:
    """The syntax tree of each source file, by its path in the package."""
    folders = {"attnkit": Path(), "tasks": Path("tasks"), "conf": Path("conf")}
    trees = {
        inside / path.relative_to(repository / folder): ast.parse(path.read_text(), str(path))
        for folder, inside in folders.items()
        for path in sorted((repository / folder).rglob("*.py"))
    }
    assert {path.parts[0] for path in trees} >= {"core", "lightning", "launch", "models", "tasks"}
    return trees


def names_of(tree: ast.AST) -> set[str]:
    """Every name, attribute and imported name in a file; not what is written in strings."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.alias):
            names.update(node.name.split("."))
    return names


def imports_of(tree: ast.Module) -> set[str]:
    """The top-level packages a file imports, at any depth of its code."""
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported.add(node.module.partition(".")[0])
    return imported


def test_only_core_calls_torchs_attention(trees):
    users = {path for path, tree in trees.items() if names_of(tree) & ATTENTION}
    assert users, "nobody calls torch's attention: this test looks in the wrong place"
    assert {path.parts[0] for path in users} == {"core"}, sorted(map(str, users))


def test_only_launch_imports_hydra(trees):
    users = {path for path, tree in trees.items() if imports_of(tree) & CONFIGURATION}
    assert users, "nobody imports hydra: this test looks in the wrong place"
    assert {path.parts[0] for path in users} == {"launch"}, sorted(map(str, users))


def test_core_needs_only_torch(trees):
    for path, tree in trees.items():
        if path.parts[0] == "core" and path != KERNELS:
            foreign = imports_of(tree) - {"torch", "attnkit"} - set(sys.stdlib_module_names)
            assert not foreign, f"{path} imports {foreign}"


def test_triton_is_imported_only_where_it_is_used(trees):
    """torch brings Triton on Linux, and not everywhere."""
    assert imports_of(trees[KERNELS]) == {"triton"}
    for path, tree in trees.items():
        names = {name for statement in tree.body for name in names_of_import(statement)}
        assert KERNELS.stem not in names, f"{path} imports {KERNELS} before it is used"


def names_of_import(statement: ast.stmt) -> set[str]:
    if not isinstance(statement, ast.Import | ast.ImportFrom):
        return set()
    return names_of(statement) | set((getattr(statement, "module", None) or "").split("."))


def test_metrics_need_only_torch_and_torchmetrics(trees):
    imported = {
        name
        for path, tree in trees.items()
        if path.parts[0] == "metrics"
        for name in imports_of(tree) - set(sys.stdlib_module_names)
    }
    assert imported == {"torch", "torchmetrics", "attnkit"}
    ours = {
        node.module
        for path, tree in trees.items()
        if path.parts[0] == "metrics"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and imports_of(node) == {"attnkit"}
    }
    assert {".".join(module.split(".")[:2]) for module in ours} == {"attnkit.metrics"}


def test_checks_need_only_torch_and_core(trees):
    """So that whoever checks a module of her own waits for torch alone."""
    seen = set()
    for path, tree in trees.items():
        if path.parts[0] == "checks":
            foreign = imports_of(tree) - {"torch", "attnkit"} - set(sys.stdlib_module_names)
            assert not foreign, f"{path} imports {foreign}"
            ours = {
                node.module
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and imports_of(node) == {"attnkit"}
            }
            seen |= {".".join(module.split(".")[:2]) for module in ours}
    assert seen == {"attnkit.checks", "attnkit.core"}
