"""Wrong input: exit code 2, at most three lines, what and where it is, nothing created."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from attnkit.launch.config.compose import Composer
from attnkit.launch.decide import Request
from attnkit.lightning import UserError


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


SHIPPED = [
    # choices, groups and keys
    ("model=vit_tinny", "model has no choice 'vit_tinny'; did you mean vit_tiny?"),
    ("task=captioning level=graph", "level=graph: the task has no levels; leave it out, or choose"),
    ("task=vit level=graph", "level=graph: task=vit has image and image_values"),
    ("task=graph level=image", "level=image: task=graph has node and node_values and link and"),
    ("modle=vit", "modle: attnkit has no such key; did you mean mod"),
    ("model.depht=3", "model.depht: attnkit.ViT has no such key; did you mean depth?"),
    ("trainer.max_epohcs=3", "lightning.Trainer has no such key; did you mean max_epochs?"),
    ("callbacks.kernel.verbose=true", "callbacks.kernel: expected a mapping with _target_"),
    ("callbacks.progres=null", "callbacks.progres: nothing to switch off; did you mean progress?"),
    ("callbacks.cost=null", "cost: nothing to switch off; expected callbacks.steps.cost=false"),
    ("callbacks.defaults=null", "callbacks.defaults: nothing to switch off"),
    ("callbacks.last.every_seconds=9", "only callbacks.checkpoint.every_seconds is set"),
    ("run=export ckpt={file} export.folder=${nope}", "export.folder: ${nope} names no"),
    # values
    ("model.depth=abc", "model.depth: expected int, got 'abc' (str)"),
    ("model.positions=learnt", "did you mean learned?"),
    ("model.score=cosin", "'cosin' (str); did you mean cosine?"),
    ("model.score=3", "model.score: expected Literal['scaled_dot', 'dot', 'cosine', "),
    (
        "+callbacks.x={_target_:attnkit.GraphAttention,in_channels:3,out_channels:5,fill_value:maen}",
        "callbacks.x.fill_value: expected float | Tensor | Literal['mean', 'add', 'min', 'max', "
        "'mul'], got 'maen' (str); did you mean mean?",
    ),
    ("trainer.max_epochs=1.5", "trainer.max_epochs: expected Optional[int], got 1.5 (float)"),
    ("trainer.limit_batches=few", "trainer.limit_batches: expected int | float | None, got 'few'"),
    ("trainer.limit_batches=0", "trainer.limit_batches: expected more than 0, got 0"),
    ("trainer.minutes=0", "trainer.minutes: expected more than 0, got 0"),
    ("trainer.timeout_seconds=-1", "trainer.timeout_seconds: expected more than 0, got -1"),
    ("trainer.accumulate_grad_batches=0", "trainer.accumulate_grad_batches: expected at least 1"),
    ("trainer.check_val_every_n_epoch=0", "check_val_every_n_epoch: expected at least 1, got 0"),
    ("precision=bf17-mixd", "did you mean bf16-mixed?"),
    ("seeds=0", "seeds: expected 1 to 1000 runs, got 0"),
    ("run=predict ckpt={file} images=/nope", "images: no file or folder /nope"),
    ("nodes=[1]", "nodes: attnkit has no such key; of run=explain: explain.nodes=[12,51]"),
    ("task=vit init=nope", "init: no file "),
    ("trainer.minutes=inf", "trainer.minutes: expected more than 0"),
    ("optimizer.betas=[0.9]", "optimizer.betas: expected tuple["),
    ("run=trian", "got 'trian'; did you mean train?"),
    ("run=bench seeds=2", "seeds=2: has no effect in run=bench; only in run=train, check"),
    ("seed=-1", "seed: expected 0 to 4294967295, got -1"),
    ("splits=0", "splits: expected all, or 1 to 1000 runs, got 0"),
    ("splits=all", "splits: the data has no split to choose (data.split)"),
    (
        "task=graph data=heterophilous data.root={folder} data.num_splits=10 splits=20",
        "splits=20: the data has 10",
    ),
    ("splits=2 seeds=2", "splits: not together with seeds"),
    ("compile=fastest", "compile: expected bool | Literal["),
    ("data.batch_size=null", "data.batch_size: expected int, got None"),
    # targets
    ("optimizer._target_=torch.optim.AdamWW", "torch.optim has no 'AdamWW'; did you mean AdamW?"),
    ("model._target_=attnkit.models.vitt.ViT", "attnkit.models has no 'vitt'; did you mean vit?"),
    ("model._target_=nowhere_at_all.ViT", "no module named 'nowhere_at_all'; --config-dir"),
    ("model._target_=yaml.safe_load", "model._target_: yaml.safe_load is outside the allowed pack"),
    # what can't be read, what is missing
    ("model.depth", "model.depth: expected key=value or group=choice"),
    ("model.depth=[1", "model.depth=[1: this value can't be read"),
    ("model.dim=${dimm}", "model.dim: ${dimm} names no key"),
    ("data=image_folder", "data.root: a value is needed: data.root=…"),
    ("run=test ckpt=/nope.ckpt", "ckpt: no file /nope.ckpt"),
    ("resume=/nope", "resume: no folder /nope"),
    ("resume={folder}", "resume: no run in {folder} (it has no config.yaml)"),
    ("resume=latest", "resume=latest: no run under"),
    ("--config-dir /nope", "--config-dir: no folder /nope"),
    ("~callbacks.kernel", "~callbacks.kernel: there is no such key; did you mean kernels?"),
    ("~callbacks.kernels.verbose=true", "~callbacks.kernels.verbose=True: its value is False"),
    ("callbacks.curves=[1]", "callbacks.curves=[1]: Cannot merge DictConfig with ListConfig"),
    # what contradicts itself
    ("run=test", "run=test: needs ckpt=PATH"),
    ("run=predict ckpt={file}", "run=predict: needs images=PATH"),
    ("task=channel attention=none attention.reduction=3", "attention=none has no options"),
    ("ckpt={file}", "has no effect in run=train; only in run=test, predict, explain, exp"),
    ("resume={folder} run_dir=x", "run_dir=x: not together with resume"),
    ("run_dir={file}", "run_dir: {file} is a file"),
    ("run_dir={folder}", "run_dir: {folder} is not empty"),
    ("run=test ckpt=a/1_model.depth=2", "/a/1_model.depth=2"),
    ("optimizer.lr=0.1,0.2", "optimizer.lr=0.1,0.2: several values"),
    ("trainer.logger=false", "trainer.logger: set elsewhere: logger.<name>"),
    ("hydra.verbose=true", "hydra.verbose: not used by attnkit"),
    ("-m resume=latest", "resume=latest: no sweep under"),
    ("-m run_dir=a,b", "run_dir=a,b: must be the same for all trials"),
    ("--mutlirun", "did you mean --multirun?"),
    # no choice, no number, too many
    ("task=null", "task=null: expected a choice or a mapping"),
    ("seed=1e3", "seed: expected int, got 1000.0 (float)"),
    ("optimizer.lr=inf", "optimizer.lr: expected a finite number, got inf"),
    ("trainer.max_epochs=0", "trainer.max_epochs: expected at least 1"),
    ("trainer.gradient_clip_val=-1", "trainer.gradient_clip_val: expected at least 0, got -1"),
    ("callbacks.curves.path=3", "callbacks.curves.path: expected str | os.PathLike[str] | None"),
    ("run_dir=", "run_dir=: expected a folder"),
    ("resume={folder} run=test", "run=test: not together with resume"),
    # records
    ("run=reproduce reproduce.name=coora", "no record 'coora'; did you mean cora?"),
    ("run=reproduce reproduce.name=cora", "cora: needs data.root=PATH, the folder of ind.cora."),
    ("run=reproduce reproduce.name=[dates,cora] data.root=/nope", "data.root: no folder /nope"),
    ("run=reproduce reproduce.nam=cora", "run=reproduce has no such key; did you mean name?"),
    ("run=reproduce reproduce.minutes=-1", "reproduce.minutes: expected more than 0, got -1"),
    ("run=reproduce data.batch_size=3", "as they are; below data only data.root=PATH"),
    ("reproduce.name=cora", "has no effect in run=train; only in run=reproduce"),
    ("-m run=reproduce reproduce.name=cora,pubmed", "run=reproduce: not with -m"),
    ("experiment=dates", "attnkit run=reproduce reproduce.name=dates"),
    # Hydra's own words
    ("run_dir=a hydra.run.dir=b", "hydra.run.dir=b and run_dir=a: both name the folder"),
    ("hydra.sweep.dir=a", "hydra.sweep.dir=a: only with -m"),
    ("-m seed=1,2 hydra.run.dir=a", "hydra.run.dir=a: is for a single run"),
    ("-m seed=1,2 hydra.sweep.subdir=a", "trials 0 and 1 would share the folder a"),
    ("-m seed=1,2 hydra.sweep.subdir=a/${seed}", "expected the name of one folder"),
    ("-m seed=1,2 hydra.sweep.dir=a,b", "hydra.sweep.dir=a,b: expected one value"),
    ("-m resume=x hydra.sweep.dir=a", "not together with resume=x, which has a folder"),
    ("hydra.job.name=a hydra.run.dir=b", "hydra.job.name=a: has no effect"),
    ("hydra.job.name=a/b", "expected a name for a folder"),
    ("hydra/job_logging=default", "hydra/job_logging: not used by attnkit"),
    # sweeps
    ("run=retry", "sweep: missing; give sweep=PATH"),
    ("run=retry sweep=. model.depth=3", "model.depth=3: can't be changed when a run is resumed"),
    ("-m run=retry sweep=x seed=1,2", "run=retry: not with -m"),
    ("-m seed=1,2 hydra/launcher=slurm", "there is no launcher of this name"),
    ("-m seed=1,2 hydra/sweeper=other", "attnkit itself combines the values"),
    ("-m optimizer.lr=interval(1e-4,1e-2)", "let Optuna choose: hydra/sweeper=optuna"),
    ("-m optimizer=glob(zz*)", "glob(…) matches no choice of its group"),
    ("seed=1 hydra/sweeper=optuna", "hydra/sweeper=optuna: only with -m"),
    ("run=report sweep=.", "(it has no sweep.json)"),
    ("run=report sweep=nowhere", "sweep: no folder"),
    ("run=report sweep=latest", "sweep=latest: no sweep under"),
    ("run=report", "sweep: missing; give sweep=PATH"),
    ("run=report sweep=. seed=3", "seed=3: not for run=report"),
    ("-m run=report sweep=x seed=1,2", "run=report: not with -m"),
    # the direction of a metric
    (
        "callbacks.checkpoint.monitor=val/accuracy callbacks.checkpoint.mode=min",
        "callbacks.checkpoint.mode: got min, but more of 'val/accuracy' is better: give max",
    ),
    (
        "callbacks=early_stopping callbacks.early_stopping.mode=max",
        "callbacks.early_stopping.mode: got max, but less of 'val/loss' is better: give min",
    ),
    (
        "scheduler=plateau scheduler.monitor=val/f1 scheduler.mode=min",
        "scheduler.mode: got min, but more of 'val/f1' is better: give max",
    ),
    (
        "callbacks.checkpoint.monitor=val/score",
        "callbacks.checkpoint.mode: expected min or max: the name of 'val/score' does not show",
    ),
]


QUESTIONS = {
    "": "attnkit --help",
    "--cfg job ~callbacks.kernels ~callbacks.curves": "epochs",
    # in this order: of the old callback, `verbose` would be left
    "--cfg job ~callbacks.kernels callbacks.kernels={_target_:attnkit.lightning.FiniteLoss}": (
        "kernels:\n    _target_: attnkit.lightning.FiniteLoss"
    ),
    "--cfg job +model.depth=3 ++vars.new.one=2": "new:\n    one: 2",
    "--cfg job ~model.score callbacks.curves=null ~callbacks.curves": "depth",
    "--help": "callbacks",
    "--version": "attnkit ",
    "--cfg job": "task: ",
    "--cfg job --resolve model=vit_tiny data=cifar10": "dim: 192",
    "--shell-completion query=bash": "model=vit_tiny",
}


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A folder that holds a file."""
    folder = tmp_path_factory.mktemp("full")
    (folder / "file.ckpt").write_text("not a checkpoint")
    return folder


def _filled(text, full):
    return text.replace("{folder}", str(full)).replace("{file}", str(full / "file.ckpt"))


@pytest.fixture(scope="module")
def ends(full, tmp_path_factory):
    """How each command ends, all of them run in one process that needs no torch."""
    commands = [*QUESTIONS, *(command for command, _ in SHIPPED)]
    here = tmp_path_factory.mktemp("here")
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("without_torch.py")],
        input=json.dumps([_filled(command, full).split() for command in commands]),
        env={**os.environ, "COMP_LINE": "attnkit model="},
        cwd=here, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert list(full.iterdir()) == [full / "file.ckpt"]
    return dict(zip(commands, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize(("command", "answer"), QUESTIONS.items())
def test_question_that_needs_no_torch(ends, command, answer):
    end = ends[command]
    assert end["code"] == 0, end
    assert answer in end["out"]
    assert end["heavy"] == []
    assert end["left"] == []


@pytest.mark.parametrize("command", ["", "--help"])
def test_help_fits_a_terminal_of_80_columns(ends, command):
    assert [line for line in ends[command]["out"].splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(("command", "message"), SHIPPED)
def test_wrong_command(ends, full, command, message):
    end = ends[command]
    _check(Done(end["code"], end["out"], end["err"]), _filled(message, full))
    assert end["heavy"] == []
    assert end["left"] == []


def test_null_for_what_another_choice_of_files_brings():
    request = Request.read(Composer(), ["task=vit", "callbacks.ema=null"])
    assert request.plain(request.config, run_dir="run")[0]["callbacks"]["ema"] is None


@pytest.mark.parametrize("message", ["data: attnkit.tasks.image_cl", "root: no such folder: /nope"])
def test_wrong_folder_that_the_data_refuses(attnkit, message):
    _check(attnkit("data=image_folder", "data.root=/nope"), message)
    assert os.listdir(".") == []


FILES = {
    # her YAML: Hydra itself would accept most of these
    "unknown key": ("trainer:\n  max_epohcs: 3", "trainer.max_epohcs", "wrong.yaml:5"),
    "unknown argument": ("module:\n  widht: 3", "did you mean width?", "wrong.yaml:5"),
    "wrong type": ("module:\n  width: wide", "module.width: expected int", "wrong.yaml:5"),
    "interpolation": (
        "module:\n  width: ${vars.wdth}",
        "${vars.wdth} names no key",
        "wrong.yaml:5",
    ),
    "missing value": ("data:\n  samples: ???", "data.samples: a value is needed", "wrong.yaml:5"),
    "tabs": ("trainer:\n\tmax_epochs: 3", "not valid YAML", "wrong.yaml:5:1"),
    "given twice": ("seed: 1\nseed: 2", "not valid YAML: found duplicate key seed", "wrong.yaml:5"),
    "no such class": ("module:\n  _target_: mine_of_the_tests.Main", "did you mean Mine?", ":5"),
    "allow in a file": ("allow: [os]", "allow: set in a file", ""),
    "callback without target": ("callbacks: {mine: {x: 1}}", "callbacks.mine: expected a", ":4"),
    "circle": ("vars: {a: '${vars.b}', b: '${vars.a}'}", "Recursive interpolation", "wrong.yaml:4"),
    "no such resolver": (
        "vars: {a: '${foo:1}'}",
        "vars.a: Unsupported interpolation type foo",
        ":4",
    ),
    "list for a number": ("module: {lr: [1]}", "module.lr: expected float, got [1] (list)", ":4"),
    "word for a trainer": ("trainer: fast", "trainer: expected dict", "wrong.yaml:4"),
    "no data": ("data: null", "data: missing", "wrong.yaml:4"),
    "date": ("module: {width: 2024-01-01}", "got '2024-01-01' (str)", "wrong.yaml:4"),
    "no space": ("module: {width:3}", "did you mean width?", "wrong.yaml:4"),
    "number as a key": ("module: {1: 2}", "module.1: mine_of_the_tests.Mine has no such", ":4"),
    "null as a target": ("module: {_target_: null}", "module._target_: expected a dotted", ":4"),
    "hydra's directive": ("module: {_convert_: all}", "module._convert_: ", "wrong.yaml:4"),
    "two documents": ("---\ntask: x", "not valid YAML", "wrong.yaml:4:1"),
    "merge": ("module: {<<: [1]}", "not valid YAML: expected a mapping for merging", ":4:15"),
    "too deep": (f"vars: {'[' * 300}{']' * 300}", "nested too deeply", "wrong.yaml"),
    "environment": ("vars: {a: '${oc.env:NOT_SET}'}", "'NOT_SET' not found", "wrong.yaml:4"),
    "defaults of itself": ("defaults: [wrong, _self_]", "lead back to themselves", "wrong.yaml"),
    "defaults as a text": ("defaults: mine", "must be a list (got str)", "wrong.yaml"),
    "number in defaults": ("defaults: [3]", "Unsupported type in defaults : int", "wrong.yaml"),
    "group that is none": ("defaults: [/datta: digits]", "Could not find 'datta/digits'", "wrong"),
    "no such default": ("defaults: [/model: vitt]", "did you mean vit?", "wrong.yaml:4"),
}


@pytest.mark.parametrize("case", FILES)
def test_wrong_file(attnkit, hers, tmp_path, case):
    text, message, where = FILES[case]
    (tmp_path / "task").mkdir()
    body = "" if "defaults" in text else "defaults: [mine, _self_]"
    (tmp_path / "task" / "mine.yaml").write_text((hers / "task" / "mine.yaml").read_text())
    (tmp_path / "task" / "wrong.yaml").write_text(
        f"# @package _global_\n{body}\ntask: mine\n{text}\n"
    )
    (tmp_path / "mine_of_the_tests.py").write_text((hers / "mine_of_the_tests.py").read_text())
    done = attnkit("--config-dir", tmp_path, "task=wrong")
    _check(done, message)
    assert where in done.err
    assert os.listdir(".") == []


WHOLE = {
    "empty": "",
    "a comment": "# @package _global_\n",
    "a list": "- a\n- b\n",
    "a word": "hello",
    "a number": "3",
    "no package": "task: mine\nmodule: {_target_: mine_of_the_tests.Mine, width: 3}\n",
}


@pytest.mark.parametrize("case", WHOLE)
def test_file_that_is_no_task(attnkit, tmp_path, case):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "wrong.yaml").write_text(WHOLE[case])
    done = attnkit("--config-dir", tmp_path, "task=wrong")
    _check(done, "task: a value is needed" if case == "a comment" else "wrong.yaml: ")
    assert os.listdir(".") == []


def test_file_that_is_no_text(attnkit, tmp_path):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "wrong.yaml").write_bytes(b"# @package _global_\ntask: \xff\xfe\n")
    done = attnkit("--config-dir", tmp_path, "task=wrong")
    _check(done, "not text in UTF-8")
    assert "wrong.yaml" in done.err


def test_constructor_has_the_last_word(mine):
    _check(mine("data.samples=1"), "samples: expected 2 or more, got 1")
    assert os.listdir(".") == []


def test_part_the_module_does_not_take(mine):
    _check(mine("optimizer=sgd"), "takes no argument 'optimizer', so it has no effect")


def test_module_that_changes_between_two_commands_is_read_again(attnkit, hers, tmp_path):
    shutil.copytree(hers, tmp_path / "copy")
    command = ("--config-dir", tmp_path / "copy", "task=mine", "module.depth=wide")
    _check(attnkit(*command), "Mine has no such key")
    module = tmp_path / "copy" / "mine_of_the_tests.py"
    module.write_text(module.read_text().replace("width: int,", "width: int, depth: int = 3,"))
    _check(attnkit(*command), "module.depth: expected int, got 'wide' (str)")


def test_her_module_needs_consent(attnkit, hers, monkeypatch):
    monkeypatch.syspath_prepend(hers)  # as `python -m` does with the current folder
    target = "module={_target_: mine_of_the_tests.Mine, width: 3}"
    _check(attnkit(target), "is outside the allowed packages")
    assert "allow=[mine_of_the_tests]" in attnkit(target).err


def test_traceback_on_request(attnkit, monkeypatch):
    monkeypatch.setenv("ATTNKIT_TRACEBACK", "1")
    done = attnkit("model.depth=abc")
    assert done.code == 2
    assert "Traceback" in done.err


def _check(done, message):
    assert done.code == 2, done
    assert message in done.err
    assert len(done.err.splitlines()) <= 3
    assert "Traceback" not in done.err
    assert done.out == ""


# --- what an error carries for a program ----------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "key", "expected", "given"),
    [
        ("model.depth=abc", "model.depth", "int", "abc"),
        ("seeds=0", "seeds", "1 to 1000 runs", 0),
        ("trainer.log_every_n_steps=-1", "trainer.log_every_n_steps", "at least 0", -1),
        ("model._target_=3", "model._target_", "a dotted name", 3),
        ("callbacks.mine=3", "callbacks.mine", "a mapping with _target_", 3),
        ("model._target_=os.system", "model._target_", "", None),
        ("model.dim=${modle.depth}", "model.dim", "", None),
        ("data.root=???", "data.root", "", None),
    ],
)
def test_key_expected_given_and_where(override, key, expected, given):
    request = Request.read(Composer(), [override])
    with pytest.raises(UserError) as caught:
        request.plain(request.config, run_dir="run")
    error = caught.value
    assert (error.key, error.expected, error.given) == (key, expected, given)
    assert str(error).startswith(f"{key}: ")
    assert error.where == ("" if "???" in override else override)
    assert str(error).endswith(f"\n  in {override}") or not error.where
