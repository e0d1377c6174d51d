"""Where trials run: Hydra's launcher `basic`, one after the other here, or one in other processes.

Of the others (joblib, submitit_local, submitit_slurm, …) a worker only starts the trial, as a
process of its own, and watches over it. So a trial that is killed fails alone, gets its GPU before
torch is there, and ends its step on Ctrl-C whatever the launcher would do to it.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.util import find_spec
from multiprocessing import resource_tracker
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import HydraContext
from omegaconf import DictConfig

from attnkit.launch.config._hydra import Callbacks
from attnkit.launch.config.compose import Composer, quoted
from attnkit.launch.errors import INTERRUPTED
from attnkit.launch.processes import gpus as devices
from attnkit.launch.signals import held_back
from attnkit.launch.sweep.record import key_of, read_sweep
from attnkit.launch.sweep.trial import Order, as_json, run_trial, save_error
from attnkit.lightning.errors import StoppedBySignal, UserError
from attnkit.lightning.files import replacing

BASIC = "basic"
# Launchers that share this machine between the trials: by the GPUs it has.
_SHARING = ("joblib", "submitit_local")
_EXTRAS = {"joblib": "joblib", "submitit_local": "submitit", "submitit_slurm": "submitit"}
_POLL = 0.1
_GRACE = 30.0  # seconds a trial has to end by itself once its worker has to
_STOPPED = (INTERRUPTED, 128 + signal.SIGTERM)


@dataclass(frozen=True)
class Launch:
    """Hydra's launcher, composed and found to be there; `run` runs trials by it."""

    composer: Composer
    overrides: tuple[str, ...]
    name: str

    @classmethod
    def read(cls, composer: Composer, overrides: Sequence[str]) -> "Launch":
        """The launcher that Hydra's overrides among these choose.

        Raises:
            UserError: it is not installed, or not with these settings, or not on this machine.
        """
        overrides = [o for o in overrides if key_of(o).startswith("hydra")]
        chosen = [o for o in overrides if key_of(o) == "hydra/launcher"]
        name = chosen[-1].partition("=")[2] if chosen else BASIC
        extra = _EXTRAS.get(name)
        if extra and find_spec(f"hydra_plugins.hydra_{extra}_launcher") is None:
            raise UserError(
                f"hydra/launcher={name}: its package is not installed\n"
                f"  pip install 'attnkit[{extra}]', or hydra-{extra}-launcher"
            )
        known = composer.loader.get_group_options("hydra/launcher")
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UserError(
                f"hydra/launcher={name}: there is none of this name{hint}\n  {', '.join(known)}"
            )
        composer.hydra_config(overrides)
        if name == "submitit_slurm" and shutil.which("sbatch") is None:
            raise UserError(
                f"hydra/launcher={name}: no SLURM here (no command sbatch)\n"
                "  submitit_local and joblib run the trials on this machine"
            )
        return cls(composer, tuple(overrides), name)

    def run(self, order: Order, numbers: Sequence[int]) -> None:
        """Run these trials and wait for them.

        Raises:
            KeyboardInterrupt, StoppedBySignal: a signal came; the trials have ended their steps.
        """
        if self.name == BASIC:
            return self._launch(_Here(order, tuple(numbers)))
        found = devices.visible() if self.name in _SHARING else ()
        if len(found) > 1:
            order = replace(order, devices=found)
        given = {k: v for k, v in os.environ.items() if k == devices.VARIABLE}
        stop = Path(order.sweep) / f".stop_{uuid.uuid4().hex[:8]}"
        gpus = given if self.name in _SHARING else None
        task = _Apart(order, tuple(numbers), str(Path.cwd()), str(stop), gpus)
        return self._launch_stoppable(task, stop)

    def _launch(self, task: "_Here | _Apart") -> None:
        folders = [f"hydra.sweep.dir={quoted(task.order.sweep)}", "hydra.sweep.subdir=."]
        config = self.composer.hydra_config([*self.overrides, *folders])
        context = HydraContext(self.composer.loader, Callbacks())
        launcher = Plugins.instance().instantiate_launcher(context, task, config)
        for returned in launcher.launch([[] for _ in task.numbers], initial_job_idx=0):
            _ = returned.return_value  # raises what went wrong outside of a trial

    def _launch_stoppable(self, task: "_Apart", stop: Path) -> None:
        """In a thread, without signals for whatever it starts: they are for this process alone.

        The first one tells every trial to end its step, the second one to end at once.
        """
        errors: list[BaseException] = []
        ended = threading.Event()  # not join(): interrupted, it takes the thread for ended

        def launch() -> None:
            try:
                with held_back():
                    self._launch(task)
            except BaseException as error:
                errors.append(error)
            finally:
                ended.set()

        # Python's tracker of shared memory, which joblib starts, would let SIGINT through again.
        if os.name == "posix":
            resource_tracker.ensure_running()
        threading.Thread(target=launch, name="launcher", daemon=True).start()
        stopped: KeyboardInterrupt | StoppedBySignal | None = None
        while not ended.is_set():
            try:
                ended.wait(_POLL)
            except (KeyboardInterrupt, StoppedBySignal) as error:
                signum = getattr(error, "signum", signal.SIGINT)
                _tell(stop, signal.SIGKILL if stopped else signum)
                name = signal.Signals(signum).name
                print(f"\n{name}: the trials end their steps", file=sys.stderr, flush=True)
                stopped = error
        stop.unlink(missing_ok=True)
        if stopped:
            raise stopped
        if errors:
            raise errors[0]


@dataclass(frozen=True)
class _Here:
    """A trial in this process."""

    order: Order
    numbers: tuple[int, ...]

    def __call__(self, _: DictConfig) -> None:
        run_trial(self.order, self.numbers[HydraConfig.get().job.num])


@dataclass(frozen=True)
class _Apart:
    """A trial in a process of its own, started and watched by a worker of the launcher's."""

    order: Order
    numbers: tuple[int, ...]
    working_dir: str
    stop: str
    """The file by which the command tells all trials, on whatever machine, to end."""
    gpus: dict[str, str] | None
    """CUDA_VISIBLE_DEVICES of the command, if it had one, where that is what counts:
    submitit_local gives its workers one that hides every GPU."""

    def __call__(self, _: DictConfig) -> None:
        number = self.numbers[HydraConfig.get().job.num]
        if Path(self.stop).exists():
            return
        environment = dict(os.environ)
        if self.gpus is not None:
            environment.pop(devices.VARIABLE, None)
            environment |= self.gpus
        command = [
            sys.executable,
            "-m",
            "attnkit.launch.sweep.trial",
            as_json(self.order),
            str(number),
        ]
        with tempfile.TemporaryFile() as output:
            with held_back():
                process = subprocess.Popen(
                    command,
                    env=environment,
                    cwd=self.working_dir,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            print(f"trial {number} begins", flush=True)
            told = _watch(process, Path(self.stop))
            output.seek(0)
            said = output.read().decode(errors="replace").splitlines()
        self._tell_end(number, process.returncode, told, said)

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


def _watch(process: "subprocess.Popen[bytes]", stop: Path) -> bool:
    """Wait for a trial; pass on what the command tells. Returns whether it was told to end."""
    parent = os.getppid()
    told = 0
    try:
        while process.poll() is None:
            time.sleep(_POLL)
            if (signum := _told(stop)) != told:
                told = signum
                process.send_signal(signum)
            if os.getppid() != parent:  # who started this worker has been killed
                break
    finally:  # also when the launcher itself ends this worker, which SLURM's does in good time
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
        with suppress(OSError):  # its own workers, too
            os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
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
