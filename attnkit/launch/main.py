"""The command line: arguments, help, a run or a sweep, exit codes."""

import argparse
import gc
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import NoReturn

from attnkit import __version__
from attnkit.core.names import nearest
from attnkit.launch.errors import guarded
from attnkit.launch.modes import MODES
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
        from attnkit.launch.processes.ranks import follow

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
        print(SHORT)
        return 0
    if announce and not (args.help or args.cfg or args.shell_completion):
        print(f"attnkit {__version__}, starting", flush=True)
    from attnkit.launch.config.files import CONFIG_NAME, folders, groups

    config_dir = absolute(args.config_dir) if args.config_dir else None
    if args.help:
        print(_help(groups(folders(config_dir))))
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


# --- the help -------------------------------------------------------------------------------------


SHORT = """\
attnkit: train, test and use attention models. For example

  attnkit task=vit                             train on scikit-learn's digits
  attnkit task=vit data=image_folder data.root=DIR
                                               your images, a folder per class
  attnkit run=check task=vit                   estimate time, memory, …
  attnkit run=predict ckpt=RUN_DIR images=PATH label images; writes a CSV
  attnkit doctor                               check attention on this machine
  attnkit --help                               all commands and settings
  attnkit --cfg job task=vit                   every key and its value"""

_COLUMNS = 80

TEMPLATE = """\
attnkit: train, test and use attention models.
Settings are key=value, parts are group=choice. `python -m attnkit` is the same.

Train
  attnkit task=vit                             train, then test the best epoch
  attnkit task=vit data=image_folder data.root=DIR
                                               your images, a folder per class
  attnkit run=check task=vit                   estimate time, memory, …
  attnkit run=bench task=vit                   speed by part, fastest kernel
  attnkit resume=latest                        continue after an interruption

Use a trained model
  attnkit run=test ckpt=RUN_DIR                test again
  attnkit run=predict ckpt=RUN_DIR images=PATH label images; writes a CSV
  attnkit run=explain ckpt=RUN_DIR images=PATH a page that shows where it looks
                                               and how far to trust the maps
  attnkit run=explain ckpt=RUN_DIR explain.nodes=[12]
                                               the same for nodes of a graph
  attnkit run=explain model=timm model.name=NAME images=PATH
                                               a network trained elsewhere
  attnkit run=explain ckpt=RUN_DIR explain.trust=none explain.layer=-1
                                               only maps, of the last layer
  attnkit run=export ckpt=RUN_DIR              safetensors, torch.export, ONNX

Compare
  attnkit -m task=spatial attention=none,se,cbam seeds=3
                                               a run for each, a ranked table
  attnkit -m resume=latest                     finish a sweep
  attnkit run=retry sweep=SWEEP_DIR            run its failed trials again
  attnkit run=report sweep=latest              its table, plots and best run
  attnkit run=reproduce                        published results and ours
  attnkit run=reproduce reproduce.name=NAME    run one again and compare

Check the machine
  attnkit doctor                               compare every attention with its
                                               definition
  attnkit doctor model.py:build                also the attention of your model

Groups and their choices
{groups}

Keys of every task
  run=KIND                     what to do:
{kinds}
  seed=0  seeds=N              N runs, their mean and spread
  splits=all                   a run for each fixed split of the data
  trainer.max_epochs=N         how long; or trainer.minutes=N
  trainer.limit_batches=N      a quick look: N batches (or a share) of all data
  trainer.gradient_clip_val=X  trainer.accumulate_grad_batches=N
  precision=32|bf16-mixed|…    compile=false|true|max-autotune
  trainer.oom_retry=false      do not halve the batch when memory runs out
  trainer=cpu_ddp|ddp|fsdp     several processes; rank_logs=true: a log of each
  run_dir=PATH                 default: outputs/<task>/<date_time>
  resume=RUN_DIR|latest        ckpt=PATH  images=PATH
Any argument of a constructor that the configuration names can be set:
model.qk_norm=true.

Options
  --cfg job [--resolve]        print the configuration and stop
  -m, --multirun               a run for each combination of values: key=a,b
  hydra/sweeper=optuna         -m: Optuna chooses; key='interval(1e-4,1e-2)',
                               a,b or range(1,9); hydra.sweeper.n_trials=20, …
  hydra/launcher=joblib        several at once; submitit_local, submitit_slurm
  --config RUN_DIR key=value   a new run with the configuration of another
  --config-dir DIR             your own folder with task/*.yaml and modules
  allow=[PACKAGE]              let the configuration name classes of a package
  --shell-completion install=bash|zsh|fish
                               eval "$(attnkit --shell-completion install=bash)"
  --help, --version
A wrong setting ends with exit code 2 and a message that names the right one.
ATTNKIT_TRACEBACK=1 in the environment also shows the traceback."""


def _help(groups: Mapping[str, Sequence[str]]) -> str:
    """Return the help text with the groups and choices of all folders."""
    width = max(map(len, groups), default=0)
    lines = (_wrapped(f"  {name:<{width}}  ", ", ".join(given)) for name, given in groups.items())
    return TEMPLATE.format(groups="\n".join(lines), kinds=_wrapped(" " * 31, ", ".join(MODES)))


def _wrapped(start: str, words: str) -> str:
    indent = " " * len(start)
    return fill(words, _COLUMNS, initial_indent=start, subsequent_indent=indent,
                break_long_words=False, break_on_hyphens=False)  # fmt: skip
