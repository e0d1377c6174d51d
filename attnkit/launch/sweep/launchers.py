"""Where trials run: here, one after the other, or several at once, each a process of its own.

`basic` runs them in this process. `joblib` starts a few at a time from threads, and submitit's
executors from jobs. Thread or job, each starts one trial and watches over it. So a trial that is
killed fails alone, has its GPU before torch is there, and ends its step on Ctrl-C.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attnkit.launch.command import key_of
from attnkit.launch.config.compose import Composer
from attnkit.launch.config.hydra_words import is_launcher, settings
from attnkit.launch.config.signatures import Signature, signature_of
from attnkit.launch.errors import INTERRUPTED
from attnkit.launch.job import folder as folders
from attnkit.launch.processes import gpus
from attnkit.launch.signals import held_back
from attnkit.launch.sweep.record import OUTPUT, read_sweep
from attnkit.launch.sweep.trial import Order, as_json, run_trial, save_error
from attnkit.lightning.errors import StoppedBySignal, UserError
from attnkit.lightning.files import absolute, replacing

BASIC = "basic"
_POLL = 0.1
_GRACE = 30.0  # seconds a trial has to end by itself once whoever watches it has to end
_STOPPED = (INTERRUPTED, 128 + signal.SIGTERM)


@dataclass(frozen=True)
class Joblib:
    """The settings of hydra/launcher=joblib."""

    n_jobs: int = -1
    """How many trials at once. -1: one for each CPU, -2: one less, …"""


@dataclass(frozen=True)
class Submitit:
    """The settings of hydra/launcher=submitit_slurm; submitit_local has those before partition."""

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


_SHARED = ("timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes",
           "name", "stderr_to_stdout")  # fmt: skip
_CLUSTERS = {"submitit_local": "local", "submitit_slurm": "slurm"}
_LAUNCHERS = (BASIC, "joblib", *_CLUSTERS)


@dataclass(frozen=True)
class Launch:
    """A launcher that was found to be there; `run` runs trials by it."""

    name: str
    settings: Joblib | Submitit | None = None
    job_name: str = "attnkit"

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
            close = get_close_matches(name, _LAUNCHERS, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UserError(f"{what}: there is none of this name{hint}\n  {', '.join(_LAUNCHERS)}")
        if name in _CLUSTERS and find_spec("submitit") is None:
            raise UserError(
                f"{what}: the package submitit is not installed\n  pip install 'attnkit[submitit]'"
            )
        given = settings(composer, words, "hydra.launcher", _signature(name), what)
        made = None if name == BASIC else (Submitit if name in _CLUSTERS else Joblib)(**given)
        if isinstance(made, Joblib) and made.n_jobs == 0:
            raise UserError("hydra.launcher.n_jobs=0: expected 1 or more, or -1 for all CPUs")
        if isinstance(made, Submitit) and (made.nodes, made.tasks_per_node) != (1, 1):
            raise UserError(
                "hydra.launcher.nodes and tasks_per_node: expected 1, got "
                f"{made.nodes} and {made.tasks_per_node}\n"
                "  a trial is one task, which starts its own ranks: trainer.devices=N"
            )
        if name == "submitit_slurm" and shutil.which("sbatch") is None:
            raise UserError(
                f"{what}: no SLURM here (no command sbatch)\n"
                "  submitit_local and joblib run the trials on this machine"
            )
        return cls(name, made, composer.job_name or cls.job_name)

    def run(self, order: Order, numbers: Sequence[int]) -> None:
        """Run these trials and wait for them.

        Raises:
            KeyboardInterrupt, StoppedBySignal: a signal came; the trials have ended their steps.
        """
        if self.name == BASIC:
            for number in numbers:
                run_trial(order, number)
            return
        stop = Path(order.sweep) / f".stop_{uuid.uuid4().hex[:8]}"
        apart = _Apart(order, str(Path.cwd()), str(stop))
        if self.name != "submitit_slurm":  # the trials share this machine
            found = gpus.visible()
            order = replace(order, devices=found) if len(found) > 1 else order
            own = {k: v for k, v in os.environ.items() if k == gpus.VARIABLE}
            apart = replace(apart, order=order, gpus=own)
        try:
            self._wait(apart, numbers, stop)
        finally:
            stop.unlink(missing_ok=True)

    def _wait(self, apart: "_Apart", numbers: Sequence[int], stop: Path) -> None:
        """The first signal tells every trial to end its step, the second one to end at once."""
        jobs: list[Any] = []
        stopped: KeyboardInterrupt | StoppedBySignal | None = None
        while True:
            try:
                with held_back():  # what is started leaves signals to this thread
                    jobs = jobs or self._submit(apart, numbers)
                    if all(job.done() for job in jobs):
                        break
                time.sleep(_POLL)
            except (KeyboardInterrupt, StoppedBySignal) as error:
                signum = getattr(error, "signum", signal.SIGINT)
                _tell(stop, signal.SIGKILL if stopped else signum)
                name = signal.Signals(signum).name
                print(f"\n{name}: the trials end their steps", file=sys.stderr, flush=True)
                stopped = error
        if stopped:
            raise stopped
        for job in jobs:
            if problem := job.exception():  # not a trial's, which is in its folder
                raise problem

    def _submit(self, apart: "_Apart", numbers: Sequence[int]) -> list[Any]:
        """A job for each trial, with the methods `done` and `exception`."""
        if isinstance(self.settings, Joblib):
            many = self.settings.n_jobs
            many = many if many > 0 else max(1, (os.cpu_count() or 1) + 1 + many)
            pool = ThreadPoolExecutor(min(many, len(numbers)))
            jobs = [pool.submit(apart, number) for number in numbers]
            pool.shutdown(wait=False)
            return jobs
        assert isinstance(self.settings, Submitit)
        return self._executor(self.settings, apart.order.sweep).map_array(
            replace(apart, is_job=True), numbers
        )

    def _executor(self, settings: Submitit, sweep: str) -> Any:
        import submitit

        cluster = _CLUSTERS[self.name]
        values = asdict(settings)
        folder = values.pop("submitit_folder") or f"{sweep}/.submitit/%j"
        values["name"] = values["name"] or self.job_name
        retries = {"slurm_max_num_timeout": values.pop("max_num_timeout")}
        executor = submitit.AutoExecutor(absolute(folder), cluster=cluster, **retries)
        known = _signature(self.name).parameters
        executor.update_parameters(
            **{k if k in _SHARED else f"{cluster}_{k}": v for k, v in values.items() if k in known}
        )
        return executor


def _signature(name: str) -> Signature:
    if name == BASIC:
        return Signature({})
    found = signature_of(f"{__name__}.{'Submitit' if name in _CLUSTERS else 'Joblib'}")
    assert found is not None
    if name == "submitit_local":
        own = ("submitit_folder", *_SHARED)
        return Signature({k: v for k, v in found.parameters.items() if k in own})
    return found


@dataclass(frozen=True)
class _Apart:
    """Runs a trial as a process of its own and watches over it; plain data, for other machines."""

    order: Order
    working_dir: str
    stop: str
    """The file by which the command tells all trials, on whatever machine, to end."""
    gpus: dict[str, str] | None = None
    """CUDA_VISIBLE_DEVICES of the command, if it had one, where that is what counts: submitit's
    local jobs have one that hides every GPU."""
    is_job: bool = False
    """Whether this is a process of its own, which ends with the one that started it."""

    def __call__(self, number: int) -> None:
        if Path(self.stop).exists():
            return
        environment = dict(os.environ)
        if self.gpus is not None:
            environment.pop(gpus.VARIABLE, None)
            environment |= self.gpus
        command = [sys.executable, "-m", "attnkit.launch.sweep.trial", as_json(self.order)]
        folder = read_sweep(Path(self.order.sweep)).trials[number].folder
        folders.create(folder, fresh=False)
        with (folder / OUTPUT).open("ab") as output:
            begin = output.tell()
            with held_back():
                process = subprocess.Popen(
                    [*command, str(number)],
                    env=environment,
                    cwd=self.working_dir,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            print(f"trial {number} begins", flush=True)
            told = _watch(process, Path(self.stop), os.getppid() if self.is_job else None)
        with (folder / OUTPUT).open("rb") as output:
            output.seek(begin)
            said = output.read().decode(errors="replace").splitlines()
        self._tell_end(number, process.returncode, told, said)

    def checkpoint(self, number: int) -> Any:
        """What submitit starts when a job was preempted or timed out: the same once more."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, number)

    def _tell_end(self, number: int, code: int, told: bool, said: list[str]) -> None:
        """A word on screen; a process that ended without one has failed."""
        trial = read_sweep(Path(self.order.sweep)).trials[number]
        if code and not told and code not in _STOPPED and trial.state != "failed":
            text = f"ended with exit code {code}"
            if code < 0:
                text = f"killed by {signal.Signals(-code).name}"
            last = [line.strip()[:500] for line in said if line.strip()][-1:]
            save_error(trial.folder, "\n  ".join([text, *last]))
            trial = read_sweep(Path(self.order.sweep)).trials[number]
        line = trial.error.splitlines()[0] if trial.error else ""
        print(f"trial {number} {trial.state}{f': {line}' if line else ''}", flush=True)


def _watch(process: "subprocess.Popen[bytes]", stop: Path, parent: int | None) -> bool:
    """Wait for a trial; pass on what the command tells. Returns whether it was told to end."""
    told = 0
    try:
        while process.poll() is None:
            time.sleep(_POLL)
            if (signum := _told(stop)) != told:
                told = signum
                process.send_signal(signum)
            if parent not in (None, os.getppid()):  # who started this job has been killed
                break
    finally:  # also when a batch system ends this job, which it does in good time
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
        with suppress(OSError):  # its own workers, too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return bool(told)


def _tell(stop: Path, signum: int) -> None:
    with replacing(stop) as file:
        file.write(str(int(signum)).encode())


def _told(stop: Path) -> int:
    try:
        return int(stop.read_text())
    except (OSError, ValueError):
        return 0
