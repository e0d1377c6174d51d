"""The wheel, from a clean copy, in an environment where only the wheel provides attnkit."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import attnkit

COMMON = "attnkit.tasks.image_classification"


def run(*command, folder: Path, fails: bool = False) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode != 0) == fails, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stderr if fails else done.stdout


@pytest.fixture(scope="session")
def copy(repository, tmp_path_factory) -> Path:
    """The repository without what git ignores, so that building leaves nothing in the clone."""
    copy = tmp_path_factory.mktemp("copy") / "attnkit"
    patterns = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__")

    def ignored(folder: str, names: list[str]) -> set[str]:
        at_root = {"build", "dist", "outputs"} if Path(folder) == repository else set()
        return patterns(folder, names) | at_root

    shutil.copytree(repository, copy, symlinks=True, ignore=ignored)
    return copy


@pytest.fixture(scope="session")
def built(copy, tmp_path_factory) -> Path:
    """A folder with the source archive, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("built")
    build = "build", "--no-isolation", "--skip-dependency-check", "--outdir", folder
    run(sys.executable, "-m", *build, folder=copy)
    return folder


@pytest.fixture(scope="session")
def wheel(built) -> Path:
    (wheel,) = built.glob("attnkit-*.whl")
    return wheel


@pytest.fixture
def make_environment(tmp_path_factory):
    """A virtual environment that has our dependencies, but attnkit only as told."""

    def make(*install: str | Path) -> Path:
        folder = tmp_path_factory.mktemp("environment")
        run(sys.executable, "-m", "venv", "--without-pip", folder, folder=folder)
        python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
        packages = run(
            python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder
        )
        # A path in a .pth file does not bring that folder's own .pth files, so the editable
        # attnkit these tests run with stays outside.
        ours = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        Path(packages.strip(), "dependencies.pth").write_text("\n".join(sorted(ours)))
        run(python, "-c", "import yaml", folder=folder)
        run(python, "-c", "import attnkit", folder=folder, fails=True)
        pip = sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"
        run(*pip, "install", "--no-deps", "--no-build-isolation", *install, folder=folder)
        return python

    return make


def test_the_wheel_holds_the_package_and_nothing_else(wheel, repository):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {
        "attnkit",
        f"attnkit-{attnkit.__version__}.dist-info",
    }
    expected = {
        f"attnkit/{prefix}{path.relative_to(repository / folder).as_posix()}"
        for folder, prefix in (("attnkit", ""), ("tasks", "tasks/"), ("conf", "conf/"))
        for pattern in ("*.py", "*.yaml", "py.typed", "templates/*")
        for path in (repository / folder).rglob(pattern)
    }
    assert {f"attnkit/{name}" for name in ("tasks/__init__.py", "conf/config.yaml")} <= expected
    assert {name for name in names if name.startswith("attnkit/")} == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_every_folder_of_the_wheel_is_a_declared_package(wheel, repository):
    """Else setuptools warns, for each, that it may be left out one day."""
    text = (repository / "pyproject.toml").read_text()
    declared = re.search(r"^packages = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert declared
    held = (n for n in zipfile.ZipFile(wheel).namelist() if n.startswith("attnkit/"))
    folders = {name.rpartition("/")[0].replace("/", ".") for name in held}
    assert folders == set(re.findall(r'"(.+)"', declared[1]))


def test_the_source_archive_holds_what_git_does(built, repository):
    (archive,) = built.glob("attnkit-*.tar.gz")
    with tarfile.open(archive) as file:
        held = {name.partition("/")[2] for name in file.getnames()}
    listed = subprocess.run(("git", "ls-files"), cwd=repository, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs a clone")
    linked = {"attnkit/conf", "attnkit/tasks"}  # to conf/ and tasks/, which are held
    assert {n for n in listed.stdout.splitlines() if not n.startswith(".")} - held <= linked


def test_the_citation_is_of_this_version(repository):
    cited = yaml.safe_load((repository / "CITATION.cff").read_text())
    assert cited["version"] == attnkit.__version__
    changes = (repository / "CHANGELOG.md").read_text()
    assert f"## {cited['version']} ({cited['date-released']})" in changes


@pytest.mark.slow
def test_the_wheel_runs_from_anywhere(wheel, make_environment, repository, tmp_path):
    python = make_environment(wheel)
    installed = run(python, "-c", "import attnkit; print(attnkit.__file__)", folder=tmp_path)
    assert str(python.parent.parent) in installed
    for command in ([python, "-m", "attnkit"], [python.with_name("attnkit")]):
        for folder in (tmp_path, repository):
            shown = run(*command, "--cfg", "job", "task=vit", folder=folder)
            assert "task: vit" in shown
    run(python, "-c", f"import {COMMON}", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_wheel_runs_a_users_own_parts(wheel, make_environment, repository, tmp_path):
    """The folder that docs/extending.md shows, with an installed attnkit, from another folder."""
    page = (repository / "docs" / "extending.md").read_text()
    blocks = re.findall(r"^```\w+ file=(mine/\S+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^python -m attnkit --config-dir mine (.*)$", page, re.MULTILINE)
    assert len(commands) == 7
    for name, code in blocks:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    attnkit = make_environment(wheel), "-m", "attnkit", "--config-dir", "../mine"
    for number, words in enumerate(commands):
        quick = "trainer.max_epochs=1", "trainer.limit_batches=2", f"run_dir={number}"
        run(*attnkit, *words.split(), *quick, folder=elsewhere)
        assert (elsewhere / str(number) / "results.json").is_file()
        assert (elsewhere / str(number) / "checkpoints" / "best.ckpt").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lenient", "strict", "compat"])
def test_editable(mode, make_environment, copy, tmp_path):
    python = make_environment("-e", copy, "--config-settings", f"editable_mode={mode}")
    for folder in (tmp_path, copy):
        assert "task: vit" in run(
            python, "-m", "attnkit", "--cfg", "job", "task=vit", folder=folder
        )
        run(python, "-c", f"import {COMMON}", folder=folder)


def test_what_is_imported_is_declared(copy, wheel):
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith("dist-info/METADATA"))
        lines = files.read(name).decode().splitlines()
    declared: dict[bool, set[str]] = {False: set(), True: set()}  # by: of an extra
    for line in lines:
        if (found := re.match(r"Requires-Dist: ([\w-]+)", line)) and "dev" not in line.partition(
            "extra =="
        )[2]:
            declared["extra ==" in line].add(found[1].lower())
    packages = metadata.packages_distributions()
    imported, at_once = set(), set()
    for path in [*(copy / "attnkit").rglob("*.py"), *(copy / "tasks").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names: set[str] = set()
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = {node.module.partition(".")[0]}
            imported |= names
            if names and node.col_offset == 0:
                at_once |= names
    foreign = imported - set(sys.stdlib_module_names) - {"attnkit"}
    assert {"torch", "hydra"} <= foreign
    # comes with torch where there are GPUs for it, and is imported only where it is found
    for name in sorted(foreign - {"triton"}):
        distributions = {distribution.lower() for distribution in packages.get(name, [name])}
        # an extra's only where it is used
        allowed = declared[False] | (set() if name in at_once else declared[True])
        assert distributions & allowed, f"{name} is imported, {distributions} is not declared"


def test_tasks_is_attnkit_tasks_only(repository):
    message = run(sys.executable, "-c", "import tasks", folder=repository, fails=True)
    assert "attnkit.tasks" in message.strip().splitlines()[-1]


def test_importing_the_table_does_not_import_torch(tmp_path):
    command = "import sys, attnkit, attnkit.lightning.errors; print('torch' in sys.modules)"
    assert run(sys.executable, "-c", command, folder=tmp_path).strip() == "False"


@pytest.mark.parametrize("module", ["attnkit", "attnkit.lightning"])
def test_every_public_name_is_there(module):
    table = __import__(module, fromlist=["__all__"])
    assert table.__all__
    for name in table.__all__:
        assert getattr(table, name) is not None, name
    assert set(table.__all__) <= set(dir(table))
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = table.nothing_like_this
