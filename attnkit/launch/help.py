"""What `attnkit --help` says."""

from collections.abc import Mapping, Sequence

from attnkit.launch.job.kinds import KINDS

SHORT = """\
attnkit: train, test and use attention models. For example

  attnkit task=vit                                  train on scikit-learn's digits, in a minute
  attnkit task=vit data=image_folder data.root=DIR  on your own images, one folder per class
  attnkit run=check task=vit                        its cost, time and memory; leaves nothing
  attnkit run=predict ckpt=RUN_DIR images=PATH      label a folder or a file; writes a CSV
  attnkit --help                                    all that there is
  attnkit --cfg job task=vit                        every key and its value"""

TEMPLATE = """\
attnkit: train, test and use attention models. Settings are key=value, parts are group=choice.

  attnkit task=vit                                  train, then test the best checkpoint
  attnkit task=vit data=image_folder data.root=DIR  on your own images, one folder per class
  attnkit -m task=spatial attention=none,se,cbam    attentions in one network, compared
  attnkit run=check task=vit                        its cost, time and memory; leaves nothing
  attnkit run=bench task=vit                        its speed, and which kernel wins here
  attnkit run=test ckpt=RUN_DIR                     test again; its configuration is known
  attnkit run=predict ckpt=RUN_DIR images=PATH      label a folder or a file; writes a CSV
  attnkit run=inspect ckpt=RUN_DIR images=PATH      of captions: where it looked at each word
  attnkit run=explain ckpt=RUN_DIR images=PATH      where it looks, how far to trust it: one page
  attnkit run=explain ckpt=RUN_DIR explain.nodes=[12]      of a graph
  attnkit run=explain model=timm model.name=NAME images=PATH    a network nobody trained here
  attnkit run=export ckpt=RUN_DIR                   safe weights, torch.export, ONNX
  attnkit resume=latest                             go on after an interruption
  attnkit -m optimizer.lr=1e-3,2e-3 seeds=3         one run for each value, one ranked table
  attnkit -m resume=latest                          go on with a sweep; nothing runs twice
  attnkit run=retry sweep=SWEEP_DIR                 run its failed trials again
  attnkit run=report sweep=latest                   its table, plots and best run, so far

(The same with `python -m attnkit`.)

Groups and their choices
{groups}

Keys of every task
  run={kinds}   what to do
  seed=0  seeds=1              seeds=N: N runs, mean and spread
  splits=all                   the same over the fixed splits of the data
  trainer.max_epochs=N         how long
  trainer.limit_batches=N      a quick look: N batches (or a fraction) of everything
  trainer.gradient_clip_val=X  trainer.accumulate_grad_batches=N
  precision=32|bf16-mixed|…    compile=false|true|max-autotune
  trainer.oom_retry=false      out of memory: do not try again with half the batch
  trainer=cpu_ddp|ddp|fsdp     several processes; rank_logs=true: a log of each
  run_dir=PATH                 default: outputs/<task>/<date_time>
  resume=RUN_DIR|latest        ckpt=PATH  images=PATH
Any argument of a constructor named in the configuration may be set, e.g. model.qk_norm=true.

Options
  --cfg job [--resolve]        print the configuration and stop
  -m, --multirun               one run for each combination of values: key=a,b
  hydra/sweeper=optuna         -m: Optuna chooses: key='interval(1e-4,1e-2)', a,b, range(1,9);
                               hydra.sweeper.n_trials=20, sampler=tpe, pruner=median, …
  hydra/launcher=joblib        several at once; also submitit_local, submitit_slurm
  --config RUN_DIR key=value   a new run with the configuration of an earlier one
  --config-dir DIR             your own folder: its task/*.yaml, model/*.yaml, … and modules
  allow=[PACKAGE]              let the configuration name classes of your own package
  --shell-completion install=bash|zsh|fish     eval "$(attnkit --shell-completion install=bash)"
  --help, --version
A wrong setting ends with exit code 2 and says what is right; ATTNKIT_TRACEBACK=1 shows where."""


def text(groups: Mapping[str, Sequence[str]]) -> str:
    """The help, with the groups and choices of all folders."""
    width = max(map(len, groups), default=0)
    lines = [f"  {name:<{width}}  {', '.join(choices)}" for name, choices in groups.items()]
    return TEMPLATE.format(groups="\n".join(lines), kinds="|".join(KINDS))
