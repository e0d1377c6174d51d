"""One rank of a run. It reads the written config.yaml, without composing it again.

`main` runs in a process that start_ranks.py starts. Under torchrun or srun, `follow` runs in every
process except rank 0.
"""

import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

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
from attnkit.launch.processes.start_ranks import Report
from attnkit.launch.processes.torchrun import Launcher, leave_group
from attnkit.launch.signals import end_on_signals, ignore_signals, raise_received
from attnkit.lightning.errors import StoppedBySignal, UserError

if TYPE_CHECKING:
    from attnkit.launch.run import Run

_ENDING = 5.0  # seconds that rank 0 has to report how it ends after an error


def main(argv: Sequence[str]) -> int:
    """Run the rank that the environment names; the parent process reports its errors.

    Args:
        argv: the arguments of start_ranks.py, as one JSON text.
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
