"""The ranks of a run: their start, one process each, and what each of them does.

The command itself is not a rank. It starts the ranks on the written configuration, passes signals
on, leaves none behind, and reports once which of them failed and how. (If Lightning starts them,
rank 0 is the parent of the others, and is killed without a message when one of them dies.) `main`
runs in such a process; under torchrun or srun, `follow` runs in every process except rank 0.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from attnkit.launch import folder as folders
from attnkit.launch.errors import (
    CRASHED,
    INTERRUPTED,
    TRACEBACK,
    WRONG_INPUT,
    OutOfMemory,
    fail,
    is_peer_lost,
    is_timeout,
    summary,
)
from attnkit.launch.processes.process import (
    command_of,
    end_on_signals,
    held_back,
    ignore_signals,
    raise_received,
)
from attnkit.launch.processes.torchrun import VARIABLES, Launcher, leave_group
from attnkit.lightning.errors import RunError, StoppedBySignal, UserError
from attnkit.lightning.resume.stop_signals import STOPPING, Once, handle, put_back

if TYPE_CHECKING:
    from attnkit.launch.run import Run


GRACE = 3.0  # seconds that the other ranks have to end by themselves once a rank has failed
PATIENCE = 10.0  # seconds that all ranks have to end after a second signal
_POLL = 0.05


class RanksStopped(StoppedBySignal):
    """Raised when a signal has stopped all ranks; `step` is the number of steps done."""

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(signum)
        self.step = step


@dataclass
class Report:
    """A rank's report that it did not end normally."""

    code: int
    text: str = ""
    why: Literal["", "peer gone", "peer silent", "no memory"] = ""
    """The kind of failure: another rank has gone or does not answer, or training ran out of
    memory."""
    signum: int | None = None
    """The signal that stopped the rank."""
    step: int = 0
    when: float = field(default_factory=time.time)

    @property
    def is_own(self) -> bool:
        """Whether the rank itself failed, and was not only affected by another one or a signal."""
        return self.signum is None and not self.why.startswith("peer")


def start(run: Mapping[str, Any], count: int) -> None:
    """Start `main` with these arguments, in a process for each rank, and wait until all have ended.

    Raises:
        UserError, RunError, OutOfMemory: the error of the rank that failed first.
        RanksStopped: a signal came, and every rank has ended.
    """
    with tempfile.TemporaryDirectory(prefix="attnkit-") as folder:
        ranks = _Ranks(run, count, Path(folder))
        try:
            ranks.wait()
        finally:
            ranks.end()
        ranks.judge()


class _Ranks:
    """The processes of a run's ranks."""

    def __init__(self, run: Mapping[str, Any], count: int, folder: Path) -> None:
        from lightning.fabric.plugins.environments.lightning import find_free_network_port

        self.folder = folder
        self.reports: dict[int, Report | None] = {}
        """Reports of the ranks that have ended by themselves."""
        self.signals: list[int] = []
        """The signals received, without repetitions of the same event."""
        self._once = Once()
        environment = {k: v for k, v in os.environ.items() if k not in VARIABLES}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{find_free_network_port()}"}
        environment |= {"NODE_RANK": "0", "WORLD_SIZE": str(count)}
        given = json.dumps({"run": run, "report": str(folder), "parent": os.getpid()})
        output = None
        with suppress(OSError):  # stdout may have no file descriptor
            output = sys.stdout.fileno()
        sys.stdout.flush()
        with held_back():
            self.processes = [
                subprocess.Popen(
                    command_of("attnkit.launch.processes.ranks", given),
                    env={**environment, "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    start_new_session=True,  # the terminal's Ctrl-C is for the command alone
                )
                for rank in range(count)
            ]
            self._handlers = handle(self._pass_on)

    def _pass_on(self, signum: int, _: FrameType | None) -> None:
        if self._once.is_new():
            self.signals.append(signum)
            for process in self.processes:
                process.send_signal(signum)

    def wait(self) -> None:
        """Wait until every rank has ended, or one has failed and the others had time to notice."""
        deadline = math.inf
        while len(self.reports) < len(self.processes) and time.monotonic() <= deadline:
            time.sleep(_POLL)
            for rank, process in enumerate(self.processes):
                if rank not in self.reports and process.poll() is not None:
                    self.reports[rank] = self._report(rank, process.returncode)
            # Only for failures: ranks that a signal stops may still be writing a checkpoint.
            if any(report and report.signum is None for report in self.reports.values()):
                deadline = min(deadline, time.monotonic() + GRACE)
            if len(self.signals) > 1:
                deadline = min(deadline, time.monotonic() + PATIENCE)

    def end(self) -> None:
        """Kill whatever is still there, a rank's own workers included."""
        for process in self.processes:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        put_back(self._handlers)

    def judge(self) -> None:
        """Raise the error of the run as a whole, if there is one."""
        failures = {rank: report for rank, report in self.reports.items() if report}
        own = {rank: report for rank, report in failures.items() if report.is_own}
        stops = self.signals or [r.signum for r in failures.values() if r.signum is not None]
        if stops and not own:
            raise RanksStopped(stops[0], max((r.step for r in failures.values()), default=0))
        if not failures:
            return
        rank, report = min((own or failures).items(), key=lambda item: item[1].when)
        late = [str(r) for r in range(len(self.processes)) if r not in self.reports]
        if report.why == "peer silent" and late:
            raise RunError(
                f"rank {', '.join(late)} does not answer; the other ranks gave up waiting\n"
                "  trainer.timeout_seconds sets how long they wait"
            )
        if report.why == "no memory":
            raise OutOfMemory(f"rank {rank}: {report.text}")
        alike = [r for r in own.values() if r.text == report.text]
        text = report.text if len(alike) > 1 else f"rank {rank}: {report.text}"
        raise (UserError if report.code == WRONG_INPUT else RunError)(text)

    def _report(self, rank: int, code: int) -> Report | None:
        """Return the report that a rank has written, or else one by its exit code."""
        if code == 0:
            return None
        with suppress(OSError, ValueError):
            return Report(**json.loads((self.folder / str(rank)).read_text("utf-8")))
        if code > 0:
            return Report(CRASHED, f"ended with exit code {code}")
        if -code in STOPPING:
            return Report(CRASHED, signum=-code)
        text = f"killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            text += "\n  the system kills processes that take too much memory"
        return Report(CRASHED, text)


# --- one rank -------------------------------------------------------------------------------------


_ENDING = 5.0  # seconds that rank 0 has to report how it ends after an error


def main(argv: Sequence[str]) -> int:
    """Run the rank that the environment names; the parent process reports its errors.

    Args:
        argv: what `start` has written, as one JSON text.
    """
    given = json.loads(argv[0])
    end_with(given["parent"])
    rank = int(os.environ["LOCAL_RANK"])
    try:
        end_on_signals()  # delivers a signal that was blocked until now
        report = _run(rank, **given["run"])
    except StoppedBySignal as error:  # before the run began, or again while it was ending
        report = Report(error.code, signum=error.signum)
    ignore_signals()
    if report is None:
        leave_group()
        return 0
    Path(given["report"], str(rank)).write_text(json.dumps(asdict(report)), "utf-8")
    return report.code


def follow(launcher: Launcher, command: Callable[[], int]) -> int:
    """Check the command line, carry out the runs of rank 0, and end with its exit code.

    Rank 0 reports errors; this rank reports only errors that it alone has.
    """
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            report = _reported(command)
        message = launcher.hear()
        while report is None and "exit" not in message:
            job = launcher.job
            options = {"allow": job.allow, "path": job.paths, "alone": job.alone}
            report = _run(launcher.rank, **message, **options)
            if report is None or not report.is_own:
                message = launcher.hear(math.inf if report is None else _ENDING)
    except StoppedBySignal as error:
        return error.code
    except KeyboardInterrupt:
        return INTERRUPTED
    if report is not None and "exit" not in message:
        if report.text:
            print(f"attnkit: rank {launcher.rank}: {report.text}", file=sys.stderr)
        return report.code
    if message["exit"] == 0:
        leave_group()
    return int(message["exit"])


def end_with(parent: int) -> None:
    """Watch the process that started this one; when it ends, end this one and its workers."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        for worker in multiprocessing.active_children():
            worker.kill()
        os._exit(CRASHED)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _run(
    rank: int, run_dir: str, log: str, alone: bool, allow: Sequence[str], path: Sequence[str]
) -> Report | None:
    """Carry out one run; return a report if it went wrong."""
    runs: list[Run] = []

    def run() -> None:
        from attnkit.launch import console
        from attnkit.launch.run import Run
        from attnkit.lightning.build import allowing
        from attnkit.lightning.resume.signals import fork_apart

        fork_apart()
        sys.path.extend(p for p in path if p not in sys.path)
        console.quiet(rank)
        with allowing(*allow):
            config = folders.load_config(Path(run_dir))
            with console.logging_to(Path(log), rank, own=bool(config.get("rank_logs"))):
                runs.append(Run(config, alone=alone))
                raise_received()
                runs[0].carry_out()

    report = _reported(run)
    if report and runs and hasattr(runs[0], "trainer"):
        report.step = runs[0].trainer.global_step
    return report


def _reported(run: Callable[[], object]) -> Report | None:
    """Call a function; return a report of its error, or None."""
    try:
        try:
            run()
            return None
        except Exception:
            raise_received()
            raise
    except Exception as error:
        code = WRONG_INPUT if isinstance(error, UserError) else CRASHED
        if os.environ.get(TRACEBACK) == "1":
            fail(error, code)
        report = Report(code, summary(error))
        if is_peer_lost(error):
            report.why = "peer silent" if is_timeout(error) else "peer gone"
        elif isinstance(error, OutOfMemory):
            report.why = "no memory"
        return report
    except StoppedBySignal as error:
        return Report(error.code, signum=error.signum)
    except KeyboardInterrupt:
        return Report(INTERRUPTED, signum=signal.SIGINT)
