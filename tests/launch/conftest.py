"""A user's own folder, and the command line run in this process or in one of its own."""

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from attnkit.launch.main import main
from attnkit.launch.sweep.record import Trial, read_sweep

TASK = """\
# @package _global_
task: mine
module:
  _target_: mine_of_the_tests.Mine
  width: 11
data:
  _target_: mine_of_the_tests.Data
trainer:
  accelerator: cpu
  max_epochs: 2
"""
LEAN = (
    "callbacks: {curves: null}\nlogger: {tensorboard: null}\n"  # pictures take longer than the run
)

MODULE = """\
import json
import os
import signal
import time
from pathlib import Path

import torch
from lightning import Callback, LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Mine(LightningModule):
    def __init__(
        self,
        width: int,
        lr: float = 0.05,
        fail_at: int | None = None,
        interrupt_at: int | None = None,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))

    def forward(self, x):
        return self.net(x)

    def _step(self, batch, stage):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log(f"{stage}/loss", loss, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch, i):
        if self.current_epoch == self.hparams.fail_at:
            raise RuntimeError("this module fails on purpose")
        if self.current_epoch == self.hparams.interrupt_at:
            raise KeyboardInterrupt
        return self._step(batch, "train")

    def validation_step(self, batch, i):
        self._step(batch, "val")

    def test_step(self, batch, i):
        self._step(batch, "test")

    def predict_step(self, batch, i):
        return {"kind": self.net(batch[0]).argmax(1)}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.hparams.lr)


class StopAt(Callback):
    # a signal to this process during a batch

    def __init__(self, batch: int, signum: int = signal.SIGTERM):
        self.batch, self.signum = batch, signum

    def on_train_batch_start(self, trainer, *args):
        if trainer.fit_loop.total_batch_idx == self.batch and trainer.global_rank == 0:
            os.kill(os.getpid(), self.signum)


class KillAt(Callback):
    # nothing is left to say goodbye

    def __init__(self, epoch: int):
        self.epoch = epoch

    def on_train_epoch_start(self, trainer, *args):
        if trainer.current_epoch == self.epoch:
            os.kill(os.getpid(), signal.SIGKILL)


class Seen(Callback):
    # which devices this process may use; training waits until so many others are at it, too

    def __init__(self, others: int):
        self.others = others

    def on_fit_start(self, trainer, *args):
        folder = Path(trainer.default_root_dir)
        device = os.environ.get("CUDA_VISIBLE_DEVICES")
        (folder / "seen.json").write_text(json.dumps({"device": device, "pid": os.getpid()}))
        last = time.time() + 120
        while len(list(folder.parent.glob("*/seen.json"))) <= self.others:
            if time.time() > last:
                raise RuntimeError("the others never came")
            time.sleep(0.05)


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 13, samples: int = 53):
        super().__init__()
        if samples < 2:
            raise ValueError(f"samples: expected 2 or more, got {samples}")
        self.batch_size, self.samples = batch_size, samples

    def setup(self, stage=None):
        x = torch.randn(self.samples, 5, generator=torch.Generator().manual_seed(7))
        self.set = TensorDataset(x, x.argmax(1) % 3)

    def train_dataloader(self):
        return DataLoader(self.set, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.set, self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.set, self.batch_size)

    def predict_dataloader(self):
        return DataLoader(self.set, batch_size=self.batch_size)


class Unpredictable(Data):
    predict_dataloader = LightningDataModule.predict_dataloader
"""


@dataclass
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _unchanged(monkeypatch, tmp_path):
    """Commands start in an empty folder and leave the module path and the warnings alone."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine_of_the_tests", raising=False)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)


@pytest.fixture(scope="session")
def hers(tmp_path_factory) -> Path:
    """A folder with a task of her own, task/mine.yaml, and a module; task/full.yaml draws, too."""
    folder = tmp_path_factory.mktemp("hers")
    (folder / "task").mkdir()
    (folder / "task" / "mine.yaml").write_text(TASK + LEAN)
    (folder / "task" / "full.yaml").write_text(TASK)
    (folder / "mine_of_the_tests.py").write_text(MODULE)
    return folder


@pytest.fixture
def attnkit(capfd):
    """Run a command line in this process."""

    def run(*argv: object) -> Done:
        capfd.readouterr()
        code = main([str(a) for a in argv])
        return Done(code, *capfd.readouterr())

    return run


@pytest.fixture
def refused(attnkit):
    """Run a command that must be refused, with this in its message; nothing is left behind, unless
    the run has begun."""

    def check(message: str, *argv: object, by=attnkit, begun: bool = False) -> Done:
        before = sorted(Path.cwd().rglob("*"))
        done = by(*argv)
        assert done.code == 2, done
        assert message in done.err
        assert len(done.err.strip().splitlines()) <= 3, done.err
        assert "Traceback" not in done.err
        assert begun or sorted(Path.cwd().rglob("*")) == before
        return done

    return check


class Trials:
    """What a sweep left behind, read from the files of its trials alone."""

    @staticmethod
    def states(folder: Path | str) -> list[str]:
        return [trial.state for trial in read_sweep(Path(folder)).trials]

    @staticmethod
    def rows(folder: Path | str, name: str = "table.csv") -> list[dict]:
        """Of table.csv, or of trials.csv."""
        with Path(folder, name).open(newline="") as file:
            return list(csv.DictReader(file))

    @staticmethod
    def steps(trial: Trial) -> list[int]:
        """The steps whose training was logged; one that was trained twice has them twice."""
        with (trial.folder / "metrics.csv").open(newline="") as file:
            return [int(row["step"]) for row in csv.DictReader(file) if row["train/loss"]]

    @staticmethod
    def starts(trial: Trial) -> list[str]:
        """Each time that its training began, by its own log, which only grows."""
        log = trial.folder / "run.log"
        text = log.read_text() if log.exists() else ""
        return re.findall(r"^\S+ \S+ \w+ · (train.*?) ·", text, re.MULTILINE)


@pytest.fixture
def found() -> Trials:
    """Reads the folder of a sweep."""
    return Trials()


@pytest.fixture
def mine(attnkit, hers):
    """Run her task."""
    return lambda *argv: attnkit("--config-dir", hers, "task=mine", *argv)


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    """A run folder as it should be, which nobody changes."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    small = ("model.dim=24", "model.depth=1", "trainer=cpu", "trainer.limit_batches=2")
    lean = ("trainer.max_epochs=1", "callbacks.curves=null", "callbacks.classes=null")
    assert main([*small, *lean, f"run_dir={folder}"]) == 0
    return folder


@pytest.fixture(scope="session")
def unruly(tmp_path_factory) -> tuple[str, ...]:
    """Arguments of a task that goes wrong on demand: the module is tests/launch/mischief.py."""
    folder = tmp_path_factory.mktemp("unruly")
    (folder / "task").mkdir()
    (folder / "task" / "unruly.yaml").write_text(
        "# @package _global_\ntask: unruly\nmodule: {_target_: mischief.Model}\n"
        "data: {_target_: mischief.Data}\ncallbacks: {curves: null}\n"
    )
    shutil.copy(Path(__file__).with_name("mischief.py"), folder)
    return ("--config-dir", str(folder), "task=unruly")


PATIENCE = 600
"""Seconds for a command to come to something: where others use the machine, a start alone takes
two minutes."""


class Command:
    """A command line in a process of its own; nothing of it is left when the test is over."""

    def __init__(self, argv: tuple[object, ...], launch: tuple[str, ...], **environment: str):
        self.process = subprocess.Popen(
            [*launch, "-m", "attnkit", *map(str, argv)],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def when(self, ready: Callable[[], object]) -> "Command":
        """Wait until something is so."""
        last = time.monotonic() + PATIENCE
        while not ready():
            assert time.monotonic() < last, "it never came to that"
            assert self.process.poll() is None, self.done().out
            time.sleep(0.05)
        return self

    def send(self, signum: int) -> "Command":
        self.process.send_signal(signum)
        return self

    def done(self, timeout: float = PATIENCE) -> Done:
        out, _ = self.process.communicate(timeout=timeout)
        return Done(self.process.returncode, out, out)


def processes(mark: object) -> dict[int, str]:
    """The processes that have this in their command line or environment, by their number."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text().replace("\0", " ")
            own = str(mark) in command + (folder / "environ").read_text()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if own and state != "Z" and int(folder.name) != os.getpid():
            found[int(folder.name)] = command
    return found


@pytest.fixture
def start(tmp_path):
    """Start a command line in a process of its own."""
    mark = f"ATTNKIT_TEST={tmp_path}"

    def run(*argv: object, launch: tuple[str, ...] = (sys.executable,), **environment: str):
        name, _, value = mark.partition("=")
        return Command(argv, launch, **{name: value}, **environment)

    run.left = lambda: processes(mark)
    yield run
    for number in processes(mark):
        os.kill(number, signal.SIGKILL)
