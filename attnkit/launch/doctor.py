"""`attnkit doctor`: compares every attention of this machine or of a model with its definition."""

import argparse
import json
import os
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from attnkit.core.names import nearest
from attnkit.lightning.errors import UserError

USAGE = """\
attnkit doctor [MODEL.py:FUNCTION] [--quick] [--only NAME] [--markdown FILE] [--json FILE]

Compares every attention that this machine can run with its definition: attnkit's kernels, torch's,
and those of torch_geometric. The exit code is 1 if something is wrong.

  MODEL.py:FUNCTION  also check the attention of a model; the function returns the model and its
                     inputs as (model, input, …)
  --quick            takes less than 20 s on two cores; without it, times are measured too, in less
                     than 120 s
  --only NAME        check only attentions with NAME in their name, such as flash or PyG
  --markdown FILE    write the report, with a program for each finding, to paste into an issue
  --json FILE        write the report as numbers
"""


def command(argv: Sequence[str]) -> int:
    """Run `attnkit doctor ARGV` and return the exit code, which is 1 if something is wrong."""
    args = _parser().parse_args(argv)
    if args.help:
        print(USAGE, end="")
        return 0
    for file in (args.markdown, args.json):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            reason = "is a folder; name a file" if file.is_dir() else f"no folder {file.parent}"
            raise UserError(f"{file}: {reason}")
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # silences torch's profiler
    model, inputs = _built(args.model) if args.model else (None, ())
    from attnkit.checks.doctor import doctor

    options: dict[str, Any] = {"quick": args.quick, "only": args.only, "progress": _shown}
    try:
        report = doctor(model, inputs, **options)
    except ValueError as error:
        text = str(error)
        raise UserError(f"--{text}" if text.startswith("only:") else f"doctor: {text}") from error
    finally:
        _shown(1.0, "")
    print(report)
    if args.markdown:
        args.markdown.write_text(report.markdown() + "\n", encoding="utf-8")
    if args.json:
        args.json.write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
    return 0 if report else 1


def _built(given: str) -> tuple[Any, tuple[Any, ...]]:
    """Return the model and its inputs from the function that `FILE.py:FUNCTION` names."""
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
    """Draw a progress bar on a terminal, in one line that is overwritten."""
    if sys.stderr.isatty():
        done = int(20 * share)
        bar = f"{'━' * done}{'─' * (20 - done)} {100 * share:3.0f} %  {what[:48]:<48}"
        seconds = time.monotonic() - _started
        print(f"\r{bar} {seconds:4.0f} s" if what else f"\r{'':<90}\r", end="", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"doctor: {message}; attnkit doctor --help lists the options")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="attnkit doctor", add_help=False, allow_abbrev=False)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    return parser
