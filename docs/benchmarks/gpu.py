"""Measures attnkit on one GPU: tests, kernels, steps and jobs.

    python docs/benchmarks/gpu.py runs/gpu                        everything, at most nine minutes
    python docs/benchmarks/gpu.py runs/gpu --parts edges vit      these parts
    python docs/benchmarks/gpu.py runs/gpu --device cpu           small sizes, to see that it runs
    python docs/benchmarks/gpu.py runs/gpu --cifar CIFAR10        CIFAR-10 as train/… and test/…

Each part is a process of its own with a time limit, so that one that fails or hangs loses nothing
else; first the checks, side by side, then what is timed, one by one. After each, runs/gpu/gpu.json
and runs/gpu/gpu.md are written anew. Nothing is downloaded; a part whose data or package is missing
says so in its row.
"""

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from itertools import chain
from pathlib import Path

import torch

# seconds at most, on the GPU; without cifar under nine minutes where none reaches its limit
# side by side: nothing is timed
CHECKS = {"doctor": 120, "tests": 150, "kernels": 180, "syncs": 60, "jobs": 240}
TIMED = {"choice": 120, "edges": 60, "windows": 60, "vit": 90, "decoding": 60, "cifar": 240}
LIMITS = CHECKS | TIMED
Row = dict[str, object]


sys.path[:0] = [str(Path(__file__).resolve().parents[2])]  # where attnkit is not installed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", nargs="+", choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=540, help="no part starts after these")
    parser.add_argument("--cifar", type=Path, help="folder of CIFAR-10, for the part cifar")
    parser.add_argument("--in-this-process", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_this_process:
        write_rows(arguments.in_this_process, arguments)
        return 0
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: needs a CUDA device, found none; --device cpu runs small sizes")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    results = {"versions": versions(arguments.device), "parts": {}}
    start = time.monotonic()

    def run(part: str) -> dict:
        left = arguments.seconds - (time.monotonic() - start)
        return run_part(part, min(LIMITS[part], left), arguments)

    checks, timed = ([part for part in some if part in arguments.parts] for some in (CHECKS, TIMED))
    with ThreadPoolExecutor() as pool:
        for part, found in chain(
            zip(checks, pool.map(run, checks), strict=True), ((part, run(part)) for part in timed)
        ):
            results["parts"][part] = found
            (arguments.folder / "gpu.json").write_text(json.dumps(results, indent=1))
            (arguments.folder / "gpu.md").write_text(markdown(results))
    print(markdown(results))
    return int(any(part["failed"] for part in results["parts"].values()))


def run_part(part: str, limit: float, arguments: argparse.Namespace) -> dict:
    """The rows of a part, whether and how it failed, and the seconds it took."""
    if limit < 5:
        return {"rows": [], "failed": "not started: no time was left", "seconds": 0.0}
    rows = arguments.folder / f"{part}.jsonl"
    rows.unlink(missing_ok=True)
    log = arguments.folder / f"{part}.log"
    command = [sys.executable, __file__, *sys.argv[1:], "--in-this-process", part]
    start = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, env=environment()
        )
        try:
            code = process.wait(limit)
            failed = f"exit code {code}: {last_line(log)}" if code else ""
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            failed = f"stopped after {limit:.0f} s"
    found = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    seconds = round(time.monotonic() - start, 1)
    print(f"{part}: {len(found)} rows, {seconds} s. {failed}", flush=True)
    return {"rows": found, "failed": failed, "seconds": seconds}


def environment() -> dict[str, str]:
    here = Path(__file__).resolve().parent
    paths = [str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def write_rows(part: str, arguments: argparse.Namespace) -> None:
    module = importlib.import_module(f"gpu_parts.{part}")
    torch.manual_seed(0)
    with (arguments.folder / f"{part}.jsonl").open("a") as file:
        for row in module.rows(arguments.device, arguments):
            print(row, flush=True)
            file.write(json.dumps(row) + "\n")
            file.flush()


def versions(device: str) -> dict[str, str]:
    import lightning
    import timm
    import torch_geometric

    import attnkit

    packages = (torch, lightning, timm, torch_geometric)
    found = {package.__name__: package.__version__ for package in packages}
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    cuda = {"cuda": str(torch.version.cuda)} if device == "cuda" else {}
    when = {"date": date.today().isoformat(), "device": name, "cores": str(os.cpu_count())}
    python = {"python": platform.python_version()}
    return when | python | {"attnkit": attnkit.__version__} | found | cuda


def markdown(results: dict) -> str:
    """Return the results of all parts as Markdown tables."""
    lines = [", ".join(f"{name} {value}" for name, value in results["versions"].items())]
    for name, part in results["parts"].items():
        lines += ["", f"### {name}, {part['seconds']} s", ""]
        lines += [f"Failed: {part['failed']}", ""] if part["failed"] else []
        lines += table(part["rows"])
    return "\n".join(lines) + "\n"


def table(rows: list[Row]) -> Iterable[str]:
    """Yield the lines of tables; a new table begins where the columns of rows change."""
    header: list[str] = []
    for row in rows:
        if list(row) != header:
            yield from [""] if header else []
            header = list(row)
            yield "| " + " | ".join(header) + " |"
            yield "|---" * len(header) + "|"
        yield "| " + " | ".join(str(value) for value in row.values()) + " |"


if __name__ == "__main__":
    sys.exit(main())
