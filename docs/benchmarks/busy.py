"""How OpenMP's threads wait, on an idle machine and beside other busy processes.

    python docs/benchmarks/busy.py [--loads 0 1 3] [--only vit graph captioning kernels]

Runs short versions of the three default jobs, and a few kernels, under several settings of libgomp,
alternating in one run, beside 0, 1 and 3 processes of torch that multiply small matrices. Prints
the median seconds and their ratio to libgomp's own setting (300,000 spins before a thread sleeps).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

SETTINGS = {
    "default": {"GOMP_SPINCOUNT": "300000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "2,000 spins": {"GOMP_SPINCOUNT": "2000"},
    "10,000 spins": {"GOMP_SPINCOUNT": "10000"},
}
JOBS = {
    "vit": "task=vit trainer.max_epochs=8",
    "graph": "task=graph trainer.max_epochs=60",
    "captioning": "task=captioning trainer.max_epochs=1 trainer.limit_train_batches=100 "
    "trainer.limit_val_batches=10 trainer.limit_test_batches=2",
}
BUSY = """
import torch
x, w = torch.randn(256, 512), torch.randn(512, 512)
while True:
    y = torch.tanh(x @ w)
"""
KERNELS = """
import json, statistics, sys, time
import torch, attnkit

torch.manual_seed(0)
def rand(*shape):
    return torch.randn(*shape, requires_grad=True)

edges = attnkit.Edges(torch.randint(50_000, (2, 500_000)), 50_000)
nodes = [rand(1, 4, 50_000, 16) for _ in range(3)]
tokens = [rand(1, 4, 2048, 64) for _ in range(3)]
window = [rand(1, 4, 8192, 64) for _ in range(3)]
maps, spatial = rand(1, 64, 64, 64), attnkit.SpatialAttention(64, num_heads=1)
vit = attnkit.ViT.from_size("tiny", image_size=64, num_classes=10)
images = torch.randn(8, 3, 64, 64)
word, memory = torch.randn(1, 8, 1, 64), torch.randn(1, 8, 196, 64)

def decode():
    with torch.no_grad():
        for _ in range(300):
            attnkit.attend(word, memory, memory)

def both(output):
    output.sum().backward()

programs = {
    "flash 2,048": lambda: both(attnkit.attend(*tokens)),
    "window 8,192": lambda: both(attnkit.attend(*window, mask=attnkit.Window(64, 64))),
    "edges 500,000": lambda: both(attnkit.attend(*nodes, mask=edges)),
    "spatial 64 x 64": lambda: both(spatial(maps)),
    "ViT-Tiny, 8 images": lambda: both(vit(images)),
    "300 decoding steps": decode,
}
seconds = {}
for name, program in programs.items():
    times = []
    for _ in range(2 + int(sys.argv[1])):
        start = time.perf_counter()
        program()
        times.append(time.perf_counter() - start)
    seconds[name] = statistics.median(times[2:])
print(json.dumps(seconds))
"""


def environment(setting: str) -> dict[str, str]:
    others = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    return {**others, **SETTINGS[setting]}


def job_seconds(arguments: str, setting: str) -> float:
    """Run a job and return its seconds from results.json, without the imports of the command."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        command = [sys.executable, "-m", "attnkit", *arguments.split(), f"run_dir={run_dir}"]
        subprocess.run(command, env=environment(setting), check=True, stdout=subprocess.DEVNULL)
        return json.loads((run_dir / "results.json").read_text())["seconds"]


def kernel_seconds(setting: str, calls: int) -> dict[str, float]:
    command = [sys.executable, "-c", KERNELS, str(calls)]
    done = subprocess.run(command, env=environment(setting), check=True, capture_output=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=7, help="of each kernel in a round")
    parser.add_argument("--loads", type=int, nargs="*", default=[0, 1, 3])
    parser.add_argument("--only", nargs="*", default=[*JOBS, "kernels"])
    parser.add_argument("--settings", nargs="*", default=[*SETTINGS])
    arguments = parser.parse_args()
    for load in arguments.loads:
        others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(load)]
        seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        try:
            for turn in range(arguments.rounds):
                names = arguments.settings
                for setting in names[turn % len(names) :] + names[: turn % len(names)]:
                    for name in arguments.only:
                        if name in JOBS:
                            seconds[name][setting].append(job_seconds(JOBS[name], setting))
                        else:
                            for kernel, value in kernel_seconds(setting, arguments.calls).items():
                                seconds[kernel][setting].append(value)
        finally:
            for other in others:
                other.kill()
        print(f"\nbeside {load} busy processes: median seconds (ratio to default)")
        for name, times in seconds.items():
            medians = {s: statistics.median(t) for s, t in times.items()}
            base = medians.get("default", next(iter(medians.values())))
            cells = [f"{s} {m:.3g} ({m / base:.2f})" for s, m in medians.items()]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
