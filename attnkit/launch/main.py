"""The command line: arguments, help, a run or a sweep, exit codes."""

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from attnkit import __version__
from attnkit.core.names import nearest
from attnkit.launch.errors import guarded
from attnkit.launch.processes.torchrun import Launcher, launched
from attnkit.lightning.errors import UserError
from attnkit.lightning.files import absolute


def main(argv: Sequence[str] | None = None, *, announce: bool = False) -> int:
    """Run a command line and return the exit code.

    Exit codes: 2 for wrong input, 1 for a crash, 130 for Ctrl-C, 143 for SIGTERM or SIGUSR1.

    Args:
        argv: the arguments; None for those of the process.
        announce: print a line at once, since reading configurations and importing torch takes time.
    """
    launcher = launched()

    def command() -> int:
        # Garbage collection takes a quarter of the time of importing and composing, and finds
        # nothing. It is enabled again before the job is carried out.
        gc.disable()
        try:
            return _main(sys.argv[1:] if argv is None else list(argv), launcher, announce)
        finally:
            gc.enable()

    if launcher and launcher.rank:
        from attnkit.launch.processes.one_rank import follow

        return follow(launcher, command)
    code = guarded(command)
    if launcher:
        launcher.dismiss(code)
    return code


def _main(argv: list[str], launcher: Launcher | None, announce: bool) -> int:
    if argv[:1] == ["doctor"]:
        from attnkit.launch.doctor import command

        return command(argv[1:])
    args = _parser().parse_intermixed_args(argv)
    if args.version:
        print(f"attnkit {__version__}")
        return 0
    if not argv:
        from attnkit.launch.help import SHORT

        print(SHORT)
        return 0
    if announce and not (args.help or args.cfg or args.shell_completion):
        print(f"attnkit {__version__}, starting", flush=True)
    from attnkit.launch.config.groups import CONFIG_NAME, folders, groups

    config_dir = absolute(args.config_dir) if args.config_dir else None
    if args.help:
        from attnkit.launch.help import text

        print(text(groups(folders(config_dir))))
        return 0
    from attnkit.launch.config.compose import Composer, readable

    args.overrides = [readable(override) for override in args.overrides]
    composer = Composer(config_dir)
    if args.shell_completion:
        composer.hydra.shell_completion(CONFIG_NAME, args.overrides)
        return 0
    from attnkit.launch.config import hydra_words

    overrides, words = hydra_words.read(composer, args.overrides, multirun=args.multirun)
    if args.cfg:
        return _show(composer, overrides, resolve=args.resolve)
    if args.resolve:
        raise UserError("--resolve: only with --cfg job")
    if args.config and (args.multirun or args.cfg):
        raise UserError("--config: not with -m or --cfg; it begins one run")
    if args.multirun:
        if launcher:
            raise UserError(
                f"-m: not under {launcher.name}, which starts the processes of one run\n"
                "  without it, attnkit starts them for every trial"
            )
        from attnkit.launch.sweep.start import sweep

        gc.enable()
        return sweep(composer, overrides, words)

    from attnkit.launch.decide import Request, decide
    from attnkit.launch.modes import named

    base = _base(args.config) if args.config else None
    request = Request.read(composer, overrides, words, base)
    if base and (request.config.get("resume") or not request.mode.reads("optimizer")):
        raise UserError(
            f"--config: begins a new run; not with resume= or run={request.mode.name}, "
            "which have their own configuration"
        )
    if launcher and launcher.rank:
        if request.mode.is_run:  # rank 0 refuses others
            launcher.job = decide(request)
        return 0  # rank 0 starts the run
    gc.enable()
    if not request.mode.is_run:
        return named(request.mode.function)(request, launcher)
    from attnkit.launch.several import carry_out

    carry_out(decide(request), launcher)
    return 0


def _base(given: str) -> Path:
    """Return the config.yaml that `--config` names, directly or by its run folder."""
    path = absolute(given)
    path = path / "config.yaml" if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"--config: no file {path}; expected a run folder or its config.yaml")
    return path


def _show(composer: "Composer", overrides: Sequence[str], *, resolve: bool) -> int:  # type: ignore[name-defined] # noqa: F821
    from omegaconf import OmegaConf

    from attnkit.launch.decide import Request

    request = Request.read(composer, overrides)
    if not OmegaConf.missing_keys(request.config):
        request.plain(request.config, run_dir=str(request.folder()))
    print(OmegaConf.to_yaml(request.config, resolve=resolve), end="")
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        unknown = [w for w in message.split() if w.startswith("-")]
        flags = [f for action in self._actions for f in action.option_strings]
        hint = nearest(unknown[0], flags) if unknown else ""
        raise UserError(f"{message}{hint or '; --help lists the options'}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="attnkit", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    for flags in (("--help", "-h"), ("--version",), ("--resolve",), ("--multirun", "-m")):
        parser.add_argument(*flags, action="store_true")
    parser.add_argument("--shell-completion", "-sc", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config")
    return parser
