"""The text of `attnkit --help`."""

from collections.abc import Mapping, Sequence
from textwrap import fill

from attnkit.launch.modes import MODES

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


def text(groups: Mapping[str, Sequence[str]]) -> str:
    """Return the help text with the groups and choices of all folders."""
    width = max(map(len, groups), default=0)
    lines = (_wrapped(f"  {name:<{width}}  ", ", ".join(given)) for name, given in groups.items())
    return TEMPLATE.format(groups="\n".join(lines), kinds=_wrapped(" " * 31, ", ".join(MODES)))


def _wrapped(start: str, words: str) -> str:
    indent = " " * len(start)
    return fill(words, _COLUMNS, initial_indent=start, subsequent_indent=indent,
                break_long_words=False, break_on_hyphens=False)  # fmt: skip
