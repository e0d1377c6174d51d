"""run=check against the job it tells of: time, peak memory, multiply-adds; in turns.

    python docs/benchmarks/check.py vit graph [--rounds 2] [--cpu] [-- trainer.max_epochs=3 …]

Each in a process of its own. A job that early stopping ended is compared with the time told
less that of the epochs it left out. With --cpu, both clocks are the processor time of the process,
which other work on the machine hardly changes; with OMP_NUM_THREADS=1.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import machine, table

CHECK = """
import json, sys, time
if sys.argv.pop(1) == "cpu":
    time.perf_counter = time.process_time
from attnkit.launch.modes.check import check
from attnkit.launch.config.compose import Composer
from attnkit.launch.decide import Request, decide
figures = check(decide(Request.read(Composer(None), ["run=check", *sys.argv[1:]])))
print("figures " + json.dumps(figures))
"""

# The peak is printed before the process ends, when torch's libraries touch some 100 MiB more.
JOB = """
import resource, sys
from attnkit.launch.main import main
code = main(sys.argv[1:])
print("peak", 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
sys.exit(code)
"""


def ended(command: list[str], cpu: bool) -> tuple[str, float]:
    """Run a command; return its output and its seconds."""
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    seconds = usage.ru_utime + usage.ru_stime if cpu else time.perf_counter() - started
    return printed, seconds


def checked(overrides: list[str], cpu: bool) -> tuple[dict[str, float], float]:
    clock = "cpu" if cpu else "wall"
    printed, seconds = ended([sys.executable, "-c", CHECK, clock, *overrides], cpu)
    line = next(line for line in printed.splitlines() if line.startswith("figures "))
    return json.loads(line.removeprefix("figures ")), seconds


def done(overrides: list[str], cpu: bool) -> tuple[dict[str, float], float, int]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-c", JOB, *overrides, f"run_dir={run}"]
        printed, seconds = ended(command, cpu)
        peak = int(printed.rpartition("peak ")[2])
        return json.loads((run / "results.json").read_text()), seconds, peak


def compared(task: str, overrides: list[str], rounds: int, cpu: bool) -> dict[str, str]:
    given = [f"task={task}", *overrides]
    times, peaks, costs = [], [], []
    for number in range(rounds):
        if number % 2:  # alternate, since the first run warms the machine for the second
            results, seconds, peak = done(given, cpu)
            figures, cost = checked(given, cpu)
        else:
            figures, cost = checked(given, cpu)
            results, seconds, peak = done(given, cpu)
        missing = figures["epochs"] - results["epochs"]
        told = figures["seconds"] - missing * figures["epoch_seconds"]
        times.append((told, seconds))
        peaks.append((figures["peak_memory"], peak))
        costs.append(cost)
        said = ", ".join(f"{a:.1f} s told, {b:.1f} s taken" for a, b in times[-1:])
        print(f"{task} {number}: {said}; {results['epochs']} epochs", file=sys.stderr, flush=True)
    count = results.get("multiply_adds", "")
    return {
        "task": task,
        "time told": " ".join(f"{a:.0f}" for a, _ in times) + " s",
        "taken": " ".join(f"{b:.0f}" for _, b in times) + " s",
        "ratio": f"{statistics.median(a / b for a, b in times):.3f}",
        "peak told": " ".join(f"{a / 2**20:.0f}" for a, _ in peaks) + " MiB",
        "taken ": " ".join(f"{b / 2**20:.0f}" for _, b in peaks) + " MiB",
        "ratio ": f"{statistics.median(a / b for a, b in peaks):.3f}",
        "multiply-adds told": f"{figures['multiply_adds']:,.0f}",
        "of the job": f"{count:,.0f}" if count else "",
        "the check took": " ".join(f"{cost:.0f}" for cost in costs) + " s",
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("tasks", nargs="+")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cpu", action="store_true")
    own, _, overrides = " ".join(sys.argv[1:]).partition(" -- ")
    arguments = parser.parse_args(own.split())
    print(machine())
    given = overrides.split(), arguments.rounds, arguments.cpu
    print(table([compared(task, *given) for task in arguments.tasks]))
