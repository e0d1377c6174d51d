"""Launchers of trials: in this process one after the other, or several processes at once.

`basic` runs trials in this process. `joblib` starts several at a time from threads, and submitit's
executors start them from jobs. Each thread or job starts one trial as a process and watches it. So
a trial that is killed fails alone, gets its GPU before torch is imported, and ends its step on
Ctrl-C.
"""

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from queue import Queue
from tempfile import TemporaryFile
from typing import Any

from attnkit.core.names import nearest
from attnkit.launch import folder as folders
from attnkit.launch.command import key_of
from attnkit.launch.config.compose import Composer
from attnkit.launch.config.hydra_words import is_launcher, settings
from attnkit.launch.errors import INTERRUPTED
from attnkit.launch.processes.process import command_of, held_back
from attnkit.launch.sweep.record import OUTPUT, progress
from attnkit.launch.sweep.trials import Order, line_of, run_here, save_error
from attnkit.lightning.errors import StoppedBySignal, UserError
from attnkit.lightning.files import absolute, write_text

BASIC = "basic"
_POLL = 0.1
_SAFE_PATH = "PYTHONSAFEPATH"
"""Variable that keeps `python -m` of Python 3.11 from importing from the working directory."""
_GRACE = 30.0  # seconds that a trial has to end by itself when its watcher must end
_ENDED = ("done", "failed", "pruned")
_STOPPED = (INTERRUPTED, 128 + signal.SIGTERM)


@dataclass(frozen=True)
class Basic:
    """hydra/launcher=basic: one trial after the other, in this process. It has no settings."""

    def run(self, orders: Sequence[Order]) -> None:
        """Run these trials."""
        for order in orders:
            run_here(order)


class _Apart:
    """A launcher that runs each trial in a process of its own, watched by a job."""

    def submit(self, watch: "_Watch", orders: Sequence[Order], devices: Sequence[str]) -> list[Any]:
        """Submit a job for each trial; return the jobs, which have methods `done` and `exception`.

        Args:
            watch: the function that a job calls.
            devices: GPUs to distribute, one to each trial that needs one; empty: no distribution.
        """
        raise NotImplementedError

    def run(self, orders: Sequence[Order]) -> None:
        """Run these trials and wait for them.

        On the first signal every trial ends its step and stops; on the second one it is killed.

        Raises:
            KeyboardInterrupt, StoppedBySignal: a signal came, and the trials have stopped.
        """
        stop = orders[0].trial.folder.with_name(f".stop_{uuid.uuid4().hex[:8]}")
        devices = () if isinstance(self, Slurm) else visible_gpus()  # SLURM assigns GPUs itself
        watch = _Watch(str(Path.cwd()), stop, ",".join(devices))
        shared = devices if len(devices) > 1 else ()
        jobs: list[Any] = []
        stopped: KeyboardInterrupt | StoppedBySignal | None = None
        while True:
            try:
                with held_back():  # threads started here leave signals to this one
                    jobs = jobs or self.submit(watch, orders, shared)
                    if all(job.done() for job in jobs):
                        break
                time.sleep(_POLL)
            except (KeyboardInterrupt, StoppedBySignal) as error:
                signum = getattr(error, "signum", signal.SIGINT)
                write_text(stop, str(int(signal.SIGKILL if stopped else signum)))
                name = signal.Signals(signum).name
                print(f"\n{name}: the trials end their steps", file=sys.stderr, flush=True)
                stopped = error
        stop.unlink(missing_ok=True)
        if stopped:
            raise stopped
        for job in jobs:
            if problem := job.exception():  # the launcher's; a trial's error is in its folder
                raise problem


@dataclass(frozen=True)
class Joblib(_Apart):
    """hydra/launcher=joblib and its settings."""

    n_jobs: int = -1
    """Number of trials that run at once. -1: one for each CPU, -2: one less, …"""

    def submit(self, watch: "_Watch", orders: Sequence[Order], devices: Sequence[str]) -> list[Any]:
        """Return futures of threads; a trial that needs a GPU waits for a free one."""
        free: Queue[str] = Queue()
        for device in devices:
            free.put(device)

        def run(order: Order) -> None:
            device = free.get() if devices and order.one_gpu else ""
            try:
                watch(order, device)
            finally:
                if device:
                    free.put(device)

        count = self.n_jobs
        count = count if count > 0 else max(1, (os.cpu_count() or 1) + 1 + count)
        pool = ThreadPoolExecutor(min(count, len(orders)))
        jobs = [pool.submit(run, order) for order in orders]
        pool.shutdown(wait=False)
        return jobs


@dataclass(frozen=True)
class Submitit(_Apart):
    """hydra/launcher=submitit_local and its settings."""

    submitit_folder: str | Path | None = None
    """The folder of submitit's logs; by default .submitit/%j in the folder of the sweep."""
    timeout_min: int = 60
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    tasks_per_node: int = 1
    mem_gb: float | None = None
    nodes: int = 1
    name: str | None = None
    stderr_to_stdout: bool = False

    def submit(self, watch: "_Watch", orders: Sequence[Order], devices: Sequence[str]) -> list[Any]:
        """Return submitit's jobs; trials that need a GPU get the devices in turn."""
        import submitit
        from submitit.core.utils import environment_variables

        cluster = "slurm" if isinstance(self, Slurm) else "local"
        shared = {one.name for one in fields(Submitit)}
        given = asdict(self).items()
        values = {name if name in shared else f"slurm_{name}": value for name, value in given}
        logs = values.pop("submitit_folder") or watch.stop.with_name(".submitit") / "%j"
        own = {name: values.pop(name) for name in [*values] if name == "slurm_max_num_timeout"}
        executor = submitit.AutoExecutor(absolute(str(logs)), cluster=cluster, **own)
        executor.update_parameters(**values)
        turns = cycle(devices or [""])
        chosen = [next(turns) if order.one_gpu else "" for order in orders]
        with environment_variables(**{_SAFE_PATH: "1"}):  # for submitit's own processes
            return executor.map_array(watch, orders, chosen)


@dataclass(frozen=True)
class Slurm(Submitit):
    """hydra/launcher=submitit_slurm and its settings."""

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


Launcher = Basic | Joblib | Submitit
_LAUNCHERS: dict[str, type[Launcher]] = {
    BASIC: Basic,
    "joblib": Joblib,
    "submitit_local": Submitit,
    "submitit_slurm": Slurm,
}


def read_launcher(composer: Composer, words: Sequence[str], at_once: int = 1) -> Launcher:
    """Return the launcher that Hydra's words choose.

    Args:
        composer: the composer that parses the words.
        words: Hydra's settings on the command line.
        at_once: number of trials that are started at once.

    Raises:
        UserError: the launcher is not installed, its settings are wrong, or it can't run here.
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
    if isinstance(made, Basic) and at_once > 1:
        raise UserError(
            f"hydra.sweeper.n_jobs={at_once}: {what} runs one at a time\n"
            "  add hydra/launcher=joblib, which runs several"
        )
    if isinstance(made, Joblib) and made.n_jobs == 0:
        raise UserError("hydra.launcher.n_jobs=0: expected 1 or more, or -1 for all CPUs")
    if isinstance(made, Submitit):
        if (made.nodes, made.tasks_per_node) != (1, 1):
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
        return replace(made, name=made.name or composer.job_name or "attnkit")
    return made


@dataclass(frozen=True)
class _Watch:
    """Runs a trial as a process and watches it; picklable, so that other machines can call it."""

    working_dir: str
    stop: Path
    """The file by which the command sends a signal to all trials, on any machine."""
    devices: str = ""
    """The GPUs of this machine, which submitit's local jobs hide from their environment."""
    safe_path: str = field(default_factory=lambda: os.environ.get(_SAFE_PATH, ""))
    command: list[str] = field(default_factory=lambda: command_of("attnkit.launch.sweep.trials"))
    """Built in this process, since submitit's processes import from the working directory."""

    def __call__(self, order: Order, device: str = "") -> None:
        """Run a trial; `device` is the GPU assigned to it, if there is one."""
        if self.stop.exists():
            return
        folder = folders.create(order.trial.folder, fresh=False)
        environment = {**os.environ, _SAFE_PATH: self.safe_path}
        if device or self.devices:
            environment[_GPUS] = device or self.devices
        with (folder / OUTPUT).open("ab") as output, TemporaryFile() as given:
            begin = output.tell()
            pickle.dump(order, given)
            given.seek(0)
            with held_back():
                process = subprocess.Popen(
                    self.command,
                    env=environment,
                    cwd=self.working_dir,
                    stdin=given,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            sent = self._watch(process)
        code = process.returncode
        if code and not sent and code not in _STOPPED and progress(folder) not in _ENDED:
            text = f"ended with exit code {code}"
            if code < 0:
                text = f"killed by {signal.Signals(-code).name}"
            lines = (folder / OUTPUT).read_bytes()[begin:].decode(errors="replace").splitlines()
            last = [line.strip()[:500] for line in lines if line.strip()][-1:]
            save_error(folder, "\n  ".join([text, *last]))
        trial = order.trial.now()
        line = f"  {trial.error.splitlines()[0]}" if trial.state == "failed" else ""
        print(f"{line_of(trial)}{line}", flush=True)

    def checkpoint(self, order: Order, device: str = "") -> Any:
        """Return the job that submitit starts after a preemption or a timeout: the same again."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, order, device)

    def _watch(self, process: "subprocess.Popen[bytes]") -> int:
        """Wait for a trial and pass on signals of the command; return the last one sent, or 0."""
        sent = 0
        try:
            while process.poll() is None:
                time.sleep(_POLL)
                with suppress(OSError):
                    if (signum := int(self.stop.read_text())) != sent:
                        sent = signum
                        process.send_signal(signum)
        finally:  # also if a batch system ends this job
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE)
            with suppress(OSError):  # also kills the trial's own workers
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return sent


# --- GPUs -----------------------------------------------------------------------------------------


_GPUS = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> tuple[str, ...]:
    """Return the NVIDIA GPUs that this process may use, as named in CUDA_VISIBLE_DEVICES."""
    given = os.environ.get(_GPUS)
    if given is not None:
        names = [name.strip() for name in given.split(",")]
        wrong = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
        return tuple(names[:wrong])  # CUDA also stops at the first invalid name
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return listed_gpus(done.stdout) if done.returncode == 0 else ()


def listed_gpus(text: str) -> tuple[str, ...]:
    """Return the names in the output of `nvidia-smi -L`; for a divided GPU, its MIG devices."""
    found: list[str] = []
    for line in text.splitlines():
        if match := re.search(r"UUID: ((?:GPU|MIG)-[\w/-]+)", line):
            if match[1].startswith("MIG-") and found and found[-1].startswith("GPU-"):
                found.pop()
            found.append(match[1])
    return tuple(found)
