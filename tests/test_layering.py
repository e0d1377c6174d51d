"""Who calls torch's attention, who imports Hydra, no circle of imports, no crowded folder.

That imports run downward is checked by import-linter, in test_house.
"""

import ast
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ATTENTION = {"scaled_dot_product_attention", "flex_attention", "varlen_attn"}
CONFIGURATION = {"hydra", "omegaconf"}
COMPILED = {
    Path("core/kernels/edges/triton_kernels.py"): {"triton"},
    Path("core/kernels/edges/numba_kernels.py"): {"numba", "attnkit"},
    Path("core/kernels/edges/numba_vectors.py"): {"numba", "llvmlite"},
    Path("core/operators/sorting.py"): {"numba", "numpy", "torch", "attnkit"},
}
LARGEST_FOLDER = 16


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
    users -= {Path("checks/model.py")}  # which holds it to the definition
    assert users, "nobody calls torch's attention: this test looks in the wrong place"
    assert {path.parts[0] for path in users} == {"core"}, sorted(map(str, users))


def test_only_launch_imports_hydra(trees):
    users = {path for path, tree in trees.items() if imports_of(tree) & CONFIGURATION}
    assert users, "nobody imports hydra: this test looks in the wrong place"
    assert {path.parts[0] for path in users} == {"launch"}, sorted(map(str, users))


def test_core_needs_only_torch_and_numpy(trees):
    for path, tree in trees.items():
        if path.parts[0] == "core" and path not in COMPILED:
            foreign = (
                imports_of(tree) - {"torch", "numpy", "attnkit"} - set(sys.stdlib_module_names)
            )
            assert not foreign, f"{path} imports {foreign}"


def test_compilers_are_imported_only_where_they_are_used(trees):
    """Triton and numba are not everywhere, and take half a second."""
    for path, expected in COMPILED.items():
        assert imports_of(trees[path]) - set(sys.stdlib_module_names) == expected
    for path, tree in trees.items():
        names = {name for statement in tree.body for name in names_of_import(statement)}
        early = names & {kernels.stem for kernels in COMPILED} if path not in COMPILED else None
        assert not early, f"{path} imports {early} before they are used"


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
    ours.discard("attnkit.core.names")  # which imports nothing
    assert {".".join(module.split(".")[:2]) for module in ours} == {"attnkit.metrics"}


def test_checks_need_only_torch_and_core(trees):
    """So that whoever checks a module of her own waits for torch alone."""
    seen = set()
    for path, tree in trees.items():
        if path.parts[0] == "checks":
            foreign = (
                imports_of(tree) - {"torch", "numpy", "attnkit"} - set(sys.stdlib_module_names)
            )
            assert not foreign, f"{path} imports {foreign}"
            ours = {
                node.module
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and imports_of(node) == {"attnkit"}
            }
            seen |= {".".join(module.split(".")[:2]) for module in ours}
    assert seen == {"attnkit.checks", "attnkit.core"}


def modules_of(trees: dict[Path, ast.Module]) -> dict[str, ast.Module]:
    """The syntax trees by the name under which a module is imported."""
    return {
        ".".join(("attnkit", *path.with_suffix("").parts)).removesuffix(".__init__"): tree
        for path, tree in trees.items()
    }


def imported_by(name: str, tree: ast.Module, modules: dict[str, ast.Module]) -> set[str]:
    """The modules of ours that one imports when it runs, in functions too."""
    typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in names_of(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(full if full in modules else str(node.module) for full in names)
    return (found & modules.keys()) - {name}


def circle_in(modules: dict[str, ast.Module]) -> list[str]:
    """Modules of which each imports the one before, the first being the last; empty without one."""
    graph = {name: imported_by(name, tree, modules) for name, tree in modules.items()}
    assert sum(map(len, graph.values())) >= len(modules) / 2, "hardly anything is imported"
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_circle_of_imports(trees):
    assert circle_in(modules_of(trees)) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import a.z", True),
        ("from a import z", True),
        ("def f():\n    from a.z import name", True),
        ("if TYPE_CHECKING:\n    from a.z import name", False),
        ("text = 'from a import z'", False),
    ],
)
def test_circle_is_found(code, found):
    modules = {"a.y": ast.parse(code), "a.z": ast.parse("from a.y import name")}
    assert set(circle_in(modules)) == ({"a.y", "a.z"} if found else set())


def test_no_folder_is_crowded(trees):
    sizes = Counter(path.parent.as_posix() for path in trees if path.name != "__init__.py")
    assert sizes["launch/config"], "no such folder: this test looks in the wrong place"
    crowded = {folder for folder, size in sizes.items() if size > LARGEST_FOLDER}
    assert not crowded
