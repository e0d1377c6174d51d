"""The ranks of a run, a process each: started together, told of signals, none left behind.

The command itself is not a rank. It starts them on the written configuration, passes signals on and
says once which of them went wrong and how. (Where Lightning starts them, rank 0 is the parent of
the others, and is killed without a word when one of them dies.)
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from attnkit.launch.errors import CRASHED, WRONG_INPUT, OutOfMemory
from attnkit.launch.processes.python import command_of
from attnkit.launch.processes.torchrun import VARIABLES
from attnkit.launch.signals import held_back
from attnkit.lightning.errors import RunError, StoppedBySignal, UserError
from attnkit.lightning.resume.stop_signals import STOPPING, Once, handle, put_back

GRACE = 3.0  # seconds the others have to end by themselves once a rank has failed
PATIENCE = 10.0  # seconds all have to end after a second signal
_POLL = 0.05


class RanksStopped(StoppedBySignal):
    """A signal has stopped all ranks, after so many steps."""

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(signum)
        self.step = step


def _own_output() -> int | None:
    """Where this process prints, if that is a file: what it starts prints there, too."""
    sys.stdout.flush()
    try:
        return sys.stdout.fileno()
    except OSError:
        return None


@dataclass
class Report:
    """A rank's report of an end that was not normal."""

    code: int
    text: str
    when: float = field(default_factory=time.time)
    signum: int | None = None
    step: int = 0
    peer_gone: bool = False
    """It only noticed that another rank had gone."""
    peer_silent: bool = False
    """It timed out waiting for another rank."""
    no_memory: bool = False
    """Its memory did not suffice for the batches of training."""


def start(run: Mapping[str, Any], count: int) -> None:
    """Start one_rank.py with these arguments, once for each rank, and wait.

    Raises:
        UserError, RunError: the failure of the rank that failed first; OutOfMemory too.
        RanksStopped: a signal came, and every rank has ended.
    """
    with tempfile.TemporaryDirectory(prefix="attnkit-") as folder, _kept_signals() as signals:
        ranks = _Ranks(run, count, Path(folder))
        try:
            ranks.wait(signals)
        finally:
            ranks.kill()
        ranks.judge(signals)


class _Ranks:
    def __init__(self, run: Mapping[str, Any], count: int, folder: Path) -> None:
        self.folder = folder
        environment = {k: v for k, v in os.environ.items() if k not in VARIABLES}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        environment |= {"NODE_RANK": "0", "WORLD_SIZE": str(count)}
        given = json.dumps({"run": run, "report": str(folder), "parent": os.getpid()})
        arguments = command_of("attnkit.launch.processes.one_rank", given)
        with held_back():
            self.processes = [
                subprocess.Popen(
                    arguments,
                    env={**environment, "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=_own_output(),
                    start_new_session=True,  # the terminal's Ctrl-C is for the command alone
                )
                for rank in range(count)
            ]
        self.reports: dict[int, Report | None] = {}
        """Of the ranks that have ended by themselves."""

    def wait(self, signals: list[int]) -> None:
        """Until every rank has ended, or one has failed and the others had time to notice."""
        told, deadline = 0, math.inf
        while self._running() and (now := time.time()) <= deadline:
            while told < len(signals):
                told += 1
                if told > 1:
                    deadline = min(deadline, now + PATIENCE)
                for process in self.processes:
                    process.send_signal(signals[told - 1])
            # Failed, not stopped: who stops may still wait for a checkpoint to be written.
            if any(report and report.signum is None for report in self.reports.values()):
                deadline = min(deadline, now + GRACE)
            time.sleep(_POLL)

    def kill(self) -> None:
        """Whatever is still there, a rank's own workers included."""
        for process in self.processes:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def judge(self, signals: list[int]) -> None:
        """Raise the error of the run as a whole, if there is one."""
        failures = {rank: report for rank, report in self.reports.items() if report}
        step = max((report.step for report in failures.values()), default=0)
        stops = [r.signum for r in failures.values() if r.signum is not None]
        own = {
            rank: report
            for rank, report in failures.items()
            if report.signum is None and not report.peer_gone and not report.peer_silent
        }
        if not own and (signals or stops):
            raise RanksStopped((signals or stops)[0], step)
        if not failures:
            return
        rank, report = min((own or failures).items(), key=lambda item: item[1].when)
        late = [str(r) for r in range(len(self.processes)) if r not in self.reports]
        if report.peer_silent and late:
            raise RunError(
                f"rank {', '.join(late)} does not answer; the other ranks gave up waiting\n"
                "  trainer.timeout_seconds sets how long they wait"
            )
        if report.no_memory:
            raise OutOfMemory(f"rank {rank}: {report.text}")
        alike = [r for r in own.values() if r.text == report.text]
        text = report.text if len(alike) > 1 else f"rank {rank}: {report.text}"
        raise (UserError if report.code == WRONG_INPUT else RunError)(text)

    def _running(self) -> bool:
        """Whether a rank still runs; notes what has become of the others."""
        for rank, process in enumerate(self.processes):
            if rank not in self.reports and process.poll() is not None:
                self.reports[rank] = self._report(rank)
        return len(self.reports) < len(self.processes)

    def _report(self, rank: int) -> Report | None:
        """Its own, or what its end tells."""
        code = self.processes[rank].returncode
        if code == 0:
            return None
        with suppress(OSError, ValueError):
            return Report(**json.loads((self.folder / str(rank)).read_text("utf-8")))
        if code > 0:
            return Report(CRASHED, f"ended with exit code {code}")
        if -code in STOPPING:
            return Report(CRASHED, "", signum=-code)
        text = f"killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            text += "\n  the system does so to what takes too much memory"
        return Report(CRASHED, text)


@contextmanager
def _kept_signals() -> Iterator[list[int]]:
    """Signals are recorded, not acted on; an echo of the last one is ignored."""
    signals: list[int] = []
    once = Once()

    def keep(signum: int, _: FrameType | None) -> None:
        if once.is_new():
            signals.append(signum)

    before = handle(keep)
    try:
        yield signals
    finally:
        put_back(before)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
