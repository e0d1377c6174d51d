"""What users type and read, as names: commands, settings, public names, errors, files of runs.

`python tests/launch/freeze.py` writes them to frozen.json, which test_frozen.py holds the package
to. frozen.json also says what to try: settings ("composed"), wrong commands ("ends"), commands of
runs, and which of them are "quick". In "released" is what may go, with the sentence that lets it.
"""

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from attnkit.launch.main import SHORT, TEMPLATE, main

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("frozen.json")
FROZEN = json.loads(FILE.read_text("utf-8"))


def without_runs() -> dict[str, Any]:
    """What is found without training, within seconds."""
    ends = {command: list(said(command)) for command in FROZEN["ends"]}
    return {"commands": commands(), **settings(), "names": names(), "ends": ends}


def composed() -> dict[str, str]:
    """How every command and setting composes."""
    return {command: composes(command) for command in sorted({*commands(), *FROZEN["composed"]})}


def ended(words: list[str]) -> tuple[int, str, str]:
    """The exit code, the output and the errors of a command that is run in this process."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = main(words)
    return code, out.getvalue(), err.getvalue()


def said(command: str) -> tuple[int, str]:
    """The exit code and the first line of the errors."""
    code, _, err = ended(shlex.split(command))
    return code, err.partition("\n")[0]


# --- commands and settings ------------------------------------------------------------------------

_WORD = r" (?:'[^']*'|--(?:cfg|config|config-dir) \S+|-[\w-]+|~?[\w./+]+=\S*)"
_COMMAND = re.compile(rf"(?:.* -m )?attnkit((?:{_WORD})+)")  # what is said beside it is left out
# The values of a sweep: a,b or range(…) or tag(log,interval(…)). Group 1 is the first of them.
_VALUES = re.compile(r"=(?:tag\(log,)?(?:int\()?(?:interval|range|choice)?\(?([^,()\[\]{}]+),.*")
# Commands that ask for no configuration, or need a folder that is not there.
_NEEDS_MORE = re.compile(
    r"(.* )?(--help|--shell-completion|--config-dir|(ckpt|sweep|resume)=|run=reproduce)"
)


def commands() -> list[str]:
    """The arguments of each command that README, docs, help and headers of conf/ show."""
    headers = [*ROOT.glob("conf/task/*.yaml"), *ROOT.glob("conf/experiment/*.yaml")]
    lines = [*SHORT.splitlines(), *TEMPLATE.splitlines()]
    for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *headers):
        text = re.sub(r" *\\\n[# ]*", " ", path.read_text("utf-8"))  # join a continued line
        text = re.sub(r" \[([\w.]+=[^\]]+)\]", r" \1", text)  # [an option]
        lines += re.split(r"[`\n]", text)
    found = (_COMMAND.match(line.strip("# ")) for line in lines)
    return sorted({match[1].strip() for match in found if match})


def composes(command: str) -> str:
    """`composes`, or why not; nothing is written, and no folder has to be there."""
    words = shlex.split(command)
    if "--config" in words:  # its keys; a run of its own is in test_origin
        del words[words.index("--config") : words.index("--config") + 2]
    if "-m" in words:
        words = [_VALUES.sub(r"=\1", word) for word in words]
    code, out, err = ended([*words, *([] if "--cfg" in words else ["--cfg", "job"])])
    if code == 0 and "task: " in out:
        return "composes"
    return "needs more" if _NEEDS_MORE.match(command) else err.partition("\n")[0]


def settings() -> dict[str, Any]:
    """The keys of every task, those of one task alone, and the choices of each group."""
    groups: dict[str, list[str]] = {}
    for path in sorted(ROOT.glob("conf/*/*.yaml")):
        groups.setdefault(path.parent.name, []).append(path.stem)
    of_task = {}
    for task in groups["task"]:
        _, out, _ = ended([f"task={task}", "--cfg", "job"])
        of_task[task] = {*keys(yaml.safe_load(out))}
    shared = set.intersection(*of_task.values())
    own = {task: sorted(found - shared) for task, found in of_task.items()}
    return {"keys": sorted(shared), "keys of a task": own, "choices": groups}


def keys(node: Any, above: str = "") -> list[str]:
    """The keys of nested mappings, with dots; of a list, those of its first item."""
    if isinstance(node, list):
        return keys(node[0], above) if node else []
    if not isinstance(node, dict) or above in _DIFFERS:
        return []
    inner = ((f"{above}{name}", value) for name, value in node.items())
    return [found for key, value in inner for found in (key, *keys(value, f"{key}."))]


# Mappings in origin.json whose keys depend on the machine.
_DIFFERS = ("starts.packages.", "starts.git.", "starts.attnkit_git.", "starts.devices.")

# --- names ----------------------------------------------------------------------------------------


def names() -> dict[str, list[str]]:
    """The public names of each package and each `_target_` of conf/ that are there.

    A frozen name is there if it can be imported, whether or not it is listed.
    """
    texts = [path.read_text("utf-8") for path in ROOT.glob("conf/**/*.yaml")]
    targets = {target for text in texts for target in re.findall(r"_target_: ([\w.]+)", text)}
    found = {}
    for package, frozen in FROZEN["names"].items():
        if package == "_target_":
            found[package] = sorted(target for target in {*targets, *frozen} if _has(target))
        else:
            known = {*_listed(package), *frozen}
            found[package] = sorted(name for name in known if _has(f"{package}.{name}"))
    return found


def _listed(package: str) -> list[str]:
    module = import_module(package)
    if hasattr(module, "__all__"):
        return module.__all__
    # other modules are there because names were imported from them
    public = [name for name in dir(module) if name[0] != "_"]
    return [n for n in public if not isinstance(getattr(module, n), types.ModuleType)]


def _has(dotted: str) -> bool:
    module, _, name = dotted.rpartition(".")
    try:
        return hasattr(import_module(module), name)
    except ImportError:
        return False


# --- runs -----------------------------------------------------------------------------------------


def runs(folders: Iterable[str]) -> dict[str, Any]:
    """How each command ends and what it leaves in its folder, below the working directory."""
    Path("photos").mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (24, 24), (100, 90, 30)).save(Path("photos", f"{name}.png"))
    return {folder: run(folder, FROZEN["runs"][folder]) for folder in folders}


def run(folder: str, frozen: dict[str, Any]) -> dict[str, Any]:
    given = {key: frozen[key] for key in ("command", "signal") if key in frozen}
    command = f"{frozen['command']} run_dir={folder}"
    if "signal" in frozen:
        ended = {"exit": stopped(folder, command, signal.Signals[frozen["signal"]])}
    else:
        code, line = said(command)
        ended = {"exit": code, "said": line if code else ""}
    return {**given, **ended, **left(Path(folder))}


def stopped(folder: str, command: str, signum: int) -> int:
    """The exit code of a training that a signal stops after an epoch."""
    null = subprocess.DEVNULL
    words = [sys.executable, "-m", "attnkit", *shlex.split(command)]
    with subprocess.Popen(words, stdout=null, stderr=null) as process:
        while not Path(folder, "metrics.csv").exists() and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(signum)
        return process.wait()


def left(folder: Path) -> dict[str, Any]:
    """The files below a folder, the columns of its tables and the keys of its figures."""
    found: dict[str, Any] = {"files": set()}
    for path in filter(Path.is_file, folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        found["files"].add(re.sub(r"events\.out\..*", "events.out.*", name))
        # what is alike in every folder, of one
        if (
            path.suffix == ".csv"
            or name in ("results.json", "sweep.json")
            or str(folder) == "train"
        ):
            found[name] = contents(path)
    return {name: sorted(inside) for name, inside in sorted(found.items()) if inside}


def contents(path: Path) -> set[str]:
    """Keys or columns, without names of kernels, which differ between machines."""
    found = []
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            found = next(csv.reader(file))
    elif path.suffix == ".json":
        found = keys(json.loads(path.read_text()))
    elif path.name == "config.yaml":
        found = [*yaml.safe_load(path.read_text())]
    elif path.suffix == ".ckpt":
        import torch

        saved = torch.load(path, weights_only=True)
        found = [*saved, *(f"hyper_parameters.{name}" for name in saved["hyper_parameters"])]
    return {re.sub(r"^(kernels/\w+|backend)/.*", r"\1/*", name) for name in found}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as here:
        os.chdir(here)
        found = {**without_runs(), "composed": composed(), "runs": runs(FROZEN["runs"])}
    found |= {key: FROZEN[key] for key in ("quick", "released")}
    FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
