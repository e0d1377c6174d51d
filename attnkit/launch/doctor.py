"""`attnkit doctor`: every attention of this machine, or of a model, held to the definition."""

import argparse
import json
import os
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from attnkit.core.nearest import nearest
from attnkit.lightning.errors import UserError

USAGE = """\
attnkit doctor [MODEL.py:FUNCTION] [--quick] [--only NAME] [--markdown FILE] [--json FILE]

Holds every attention that this machine can run to its definition: attnkit's kernels, torch's, and
those of torch_geometric. Exit code 1 where something is wrong.

  MODEL.py:FUNCTION  also the attention of a model: the function gives the model and what it is
                     called with, as (model, input, …)
  --quick            below 20 s on two cores; the whole takes below 120 s and also measures times
  --only NAME        attentions with NAME in their name, such as flash or PyG
  --markdown FILE    the report with a program for each finding, to be pasted into an issue
  --json FILE        the report in numbers
"""


def command(argv: Sequence[str]) -> int:
    """Run `attnkit doctor ARGV`; returns the exit code, 1 where something is wrong."""
    args = _parser().parse_args(argv)
    if args.help:
        print(USAGE, end="")
        return 0
    for file in (args.markdown, args.json):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            said = "is a folder; name a file" if file.is_dir() else f"no folder {file.parent}"
            raise UserError(f"{file}: {said}")
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # torch's profiler tells what it does
    model, inputs = _built(args.model) if args.model else (None, ())
    from attnkit.checks.doctor.run import doctor

    options: dict[str, Any] = {"quick": args.quick, "only": args.only, "progress": _shown}
    try:
        report = doctor(model, inputs, **options)
    except ValueError as error:
        said = str(error)
        raise UserError(f"--{said}" if said.startswith("only:") else f"doctor: {said}") from error
    finally:
        _shown(1.0, "")
    print(report)
    if args.markdown:
        args.markdown.write_text(report.markdown() + "\n", encoding="utf-8")
    if args.json:
        args.json.write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
    return 0 if report else 1


def _built(given: str) -> tuple[Any, tuple[Any, ...]]:
    """The model and its inputs, of the function that `FILE.py:FUNCTION` names."""
    file, _, name = given.rpartition(":")
    if not file.endswith(".py") or not name:
        raise UserError(f"doctor: expected MODEL.py:FUNCTION, got {given!r}")
    if not Path(file).is_file():
        raise UserError(f"doctor: no file {file}")
    sys.path.insert(0, str(Path(file).resolve().parent))
    names = runpy.run_path(file)
    if not callable(names.get(name)):
        functions = [key for key, value in names.items() if callable(value)]
        raise UserError(f"doctor: {file} has no function {name!r}{nearest(name, functions)}")
    built = names[name]()
    if not isinstance(built, tuple) or len(built) < 2:
        raise UserError(
            f"doctor: expected {name}() to return (model, input, …), got {type(built).__name__}"
        )
    return built[0], built[1:]


_started = time.monotonic()


def _shown(share: float, what: str) -> None:
    """A bar on a terminal, in one line that is written over."""
    if sys.stderr.isatty():
        done = int(20 * share)
        bar = f"{'━' * done}{'─' * (20 - done)} {100 * share:3.0f} %  {what[:48]:<48}"
        seconds = time.monotonic() - _started
        print(f"\r{bar} {seconds:4.0f} s" if what else f"\r{'':<90}\r", end="", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"doctor: {message}; attnkit doctor --help shows what there is")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="attnkit doctor", add_help=False, allow_abbrev=False)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    return parser
