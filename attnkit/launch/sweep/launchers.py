"""Where trials run: here, one after the other, or several at once, each a process of its own.

`basic` runs them in this process. `joblib` starts a few at a time from threads, and submitit's
executors from jobs. Thread or job, each starts one trial and watches over it. So a trial that is
killed fails alone, has its GPU before torch is there, and ends its step on Ctrl-C.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from queue import Queue
from typing import Any

from attnkit.core.nearest import nearest
from attnkit.launch import folder as folders
from attnkit.launch.command import key_of
from attnkit.launch.config.compose import Composer
from attnkit.launch.config.hydra_words import is_launcher, settings
from attnkit.launch.errors import INTERRUPTED
from attnkit.launch.processes import gpus
from attnkit.launch.processes.python import command_of
from attnkit.launch.signals import held_back
from attnkit.launch.sweep.record import OUTPUT, Trial, read_sweep
from attnkit.launch.sweep.trial import Order, line_of, run_here, save_error, takes_one_gpu
from attnkit.lightning.errors import StoppedBySignal, UserError
from attnkit.lightning.files import absolute, replacing

BASIC = "basic"
_POLL = 0.1
_SAFE_PATH = "PYTHONSAFEPATH"
"""With it `python -m` does not import from the working directory, from Python 3.11 on."""
_GRACE = 30.0  # seconds a trial has to end by itself once whoever watches it has to end
_STOPPED = (INTERRUPTED, 128 + signal.SIGTERM)


@dataclass(frozen=True)
class Basic:
    """hydra/launcher=basic has no settings."""


@dataclass(frozen=True)
class Joblib:
    """The settings of hydra/launcher=joblib."""

    n_jobs: int = -1
    """How many trials at once. -1: one for each CPU, -2: one less, …"""


@dataclass(frozen=True)
class Submitit:
    """The settings of hydra/launcher=submitit_local."""

    submitit_folder: str | Path | None = None
    """Of its logs; by default .submitit/%j in the folder of the sweep."""
    timeout_min: int = 60
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    tasks_per_node: int = 1
    mem_gb: float | None = None
    nodes: int = 1
    name: str | None = None
    stderr_to_stdout: bool = False


@dataclass(frozen=True)
class Slurm(Submitit):
    """The settings of hydra/launcher=submitit_slurm."""

    partition: str | None = None
    qos: str | None = None
    comment: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    gres: str | None = None
    cpus_per_gpu: int | None = None
    gpus_per_task: int | None = None
    mem_per_gpu: str | None = None
    mem_per_cpu: str | None = None
    account: str | None = None
    signal_delay_s: int = 120
    max_num_timeout: int = 0
    additional_parameters: dict[str, Any] | None = None
    array_parallelism: int = 256
    setup: list[str] | None = None


_LAUNCHERS = {
    BASIC: Basic,
    "joblib": Joblib,
    "submitit_local": Submitit,
    "submitit_slurm": Slurm,
}


@dataclass(frozen=True)
class Launch:
    """A launcher that was found to be there; `run` runs trials by it."""

    settings: Any
    """One of the classes above."""
    job_name: str

    @classmethod
    def read(cls, composer: Composer, words: Sequence[str]) -> "Launch":
        """The launcher that these words of Hydra's choose.

        Raises:
            UserError: it is not installed, or not with these settings, or not on this machine.
        """
        words = [w for w in words if is_launcher(w)]
        chosen = [w for w in words if key_of(w) == "hydra/launcher"]
        name = chosen[-1].partition("=")[2] if chosen else BASIC
        what = f"hydra/launcher={name}"
        if name not in _LAUNCHERS:
            hint = nearest(name, _LAUNCHERS)
            raise UserError(
                f"{what}: there is no launcher of this name{hint}\n  {', '.join(_LAUNCHERS)}"
            )
        kind = _LAUNCHERS[name]
        if issubclass(kind, Submitit) and find_spec("submitit") is None:
            raise UserError(
                f"{what}: the package submitit is not installed\n  pip install 'attnkit[submitit]'"
            )
        made = kind(**settings(composer, words, "hydra.launcher", kind, what))
        if isinstance(made, Joblib) and made.n_jobs == 0:
            raise UserError("hydra.launcher.n_jobs=0: expected 1 or more, or -1 for all CPUs")
        if isinstance(made, Submitit) and (made.nodes, made.tasks_per_node) != (1, 1):
            raise UserError(
                "hydra.launcher.nodes and tasks_per_node: expected 1, got "
                f"{made.nodes} and {made.tasks_per_node}\n"
                "  a trial is one task, which starts its own ranks: trainer.devices=N"
            )
        if isinstance(made, Slurm) and shutil.which("sbatch") is None:
            raise UserError(
                f"{what}: no SLURM here (no command sbatch)\n"
                "  submitit_local and joblib run the trials on this machine"
            )
        return cls(made, composer.job_name or "attnkit")

    @property
    def is_basic(self) -> bool:
        """Whether it runs one trial at a time, in this process."""
        return isinstance(self.settings, Basic)

    def run(self, order: Order, numbers: Sequence[int]) -> None:
        """Run these trials and wait for them.

        Raises:
            KeyboardInterrupt, StoppedBySignal: a signal came; the trials have ended their steps.
        """
        if self.is_basic:
            for number in numbers:
                run_here(order, number)
            return
        stop = Path(order.sweep) / f".stop_{uuid.uuid4().hex[:8]}"
        devices = () if isinstance(self.settings, Slurm) else gpus.visible()  # SLURM gives its own
        sharing = set()
        if len(devices) > 1:
            trials = read_sweep(Path(order.sweep)).trials
            sharing = {number for number in numbers if takes_one_gpu(order, trials[number])}
        apart = _Apart(order, str(Path.cwd()), str(stop), ",".join(devices))
        try:
            self._wait(lambda: self._submit(apart, numbers, devices, sharing), stop)
        finally:
            stop.unlink(missing_ok=True)

    def _wait(self, submit: Callable[[], list[Any]], stop: Path) -> None:
        """The first signal tells every trial to end its step, the second one to end at once."""
        jobs: list[Any] = []
        stopped: KeyboardInterrupt | StoppedBySignal | None = None
        while True:
            try:
                with held_back():  # what is started leaves signals to this thread
                    jobs = jobs or submit()
                    if all(job.done() for job in jobs):
                        break
                time.sleep(_POLL)
            except (KeyboardInterrupt, StoppedBySignal) as error:
                signum = getattr(error, "signum", signal.SIGINT)
                with replacing(stop) as file:
                    file.write(str(int(signal.SIGKILL if stopped else signum)).encode())
                name = signal.Signals(signum).name
                print(f"\n{name}: the trials end their steps", file=sys.stderr, flush=True)
                stopped = error
        if stopped:
            raise stopped
        for job in jobs:
            if problem := job.exception():  # not a trial's, which is in its folder
                raise problem

    def _submit(
        self,
        apart: "_Apart",
        numbers: Sequence[int],
        devices: Sequence[str],
        sharing: Collection[int],
    ) -> list[Any]:
        """A job for each trial, with the methods `done` and `exception`.

        Args:
            apart: what a job does.
            numbers: of the trials.
            devices: the GPUs of this machine.
            sharing: the trials that take one of them each.
        """
        if isinstance(self.settings, Submitit):
            from submitit.core.utils import environment_variables

            turns = cycle(devices or [""])
            chosen = [next(turns) if number in sharing else "" for number in numbers]
            executor = self._executor(apart.order.sweep)
            with environment_variables(**{_SAFE_PATH: "1"}):  # of submitit's own processes
                return executor.map_array(apart, numbers, chosen)
        free: Queue[str] = Queue()
        for device in devices:
            free.put(device)

        def run(number: int) -> None:
            device = free.get() if number in sharing else ""
            try:
                apart(number, device)
            finally:
                if device:
                    free.put(device)

        many = self.settings.n_jobs
        many = many if many > 0 else max(1, (os.cpu_count() or 1) + 1 + many)
        pool = ThreadPoolExecutor(min(many, len(numbers)))
        jobs = [pool.submit(run, number) for number in numbers]
        pool.shutdown(wait=False)
        return jobs

    def _executor(self, sweep: str) -> Any:
        import submitit

        cluster = "slurm" if isinstance(self.settings, Slurm) else "local"
        shared = {one.name for one in fields(Submitit)}
        given = asdict(self.settings).items()
        values = {name if name in shared else f"slurm_{name}": value for name, value in given}
        folder = absolute(values.pop("submitit_folder") or f"{sweep}/.submitit/%j")
        values["name"] = values["name"] or self.job_name
        own = {name: values.pop(name) for name in [*values] if name == "slurm_max_num_timeout"}
        executor = submitit.AutoExecutor(folder, cluster=cluster, **own)
        executor.update_parameters(**values)
        return executor


@dataclass(frozen=True)
class _Apart:
    """Runs a trial as a process of its own and watches over it; plain data, for other machines."""

    order: Order
    working_dir: str
    stop: str
    """The file by which the command tells all trials, on whatever machine, to end."""
    devices: str = ""
    """The GPUs of this machine: submitit's local jobs have an environment that hides them."""
    safe_path: str = field(default_factory=lambda: os.environ.get(_SAFE_PATH, ""))
    command: list[str] = field(default_factory=lambda: command_of("attnkit.launch.sweep.trial"))
    """Made here, for submitit's processes import from the working directory."""

    def __call__(self, number: int, device: str = "") -> None:
        """Run a trial; `device` is the GPU that it is given, if it is given one."""
        if Path(self.stop).exists():
            return
        order = json.dumps(asdict(self.order))
        folder = self._trial(number).folder
        folders.create(folder, fresh=False)
        environment = {**os.environ, _SAFE_PATH: self.safe_path}
        if device or self.devices:
            environment[gpus.VARIABLE] = device or self.devices
        with (folder / OUTPUT).open("ab") as output:
            begin = output.tell()
            with held_back():
                process = subprocess.Popen(
                    [*self.command, order, str(number)],
                    env=environment,
                    cwd=self.working_dir,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            told = self._watch(process)
        trial = self._trial(number)
        code = process.returncode
        if code and not told and code not in _STOPPED and trial.state != "failed":
            text = f"ended with exit code {code}"
            if code < 0:
                text = f"killed by {signal.Signals(-code).name}"
            said = (folder / OUTPUT).read_bytes()[begin:].decode(errors="replace").splitlines()
            last = [line.strip()[:500] for line in said if line.strip()][-1:]
            save_error(folder, "\n  ".join([text, *last]))
            trial = self._trial(number)
        line = f"  {trial.error.splitlines()[0]}" if trial.state == "failed" else ""
        print(f"{line_of(trial)}{line}", flush=True)

    def checkpoint(self, number: int, device: str = "") -> Any:
        """What submitit starts when a job was preempted or timed out: the same once more."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, number, device)

    def _trial(self, number: int) -> Trial:
        return read_sweep(Path(self.order.sweep)).trials[number]

    def _watch(self, process: "subprocess.Popen[bytes]") -> int:
        """Wait for a trial; pass on what the command tells. Returns the signal that it told."""
        told = 0
        try:
            while process.poll() is None:
                time.sleep(_POLL)
                with suppress(OSError):
                    if (signum := int(Path(self.stop).read_text())) != told:
                        told = signum
                        process.send_signal(signum)
        finally:  # also when a batch system ends this job, which it does in good time
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE)
            with suppress(OSError):  # its own workers, too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return told
