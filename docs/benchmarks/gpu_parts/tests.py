"""The tests marked `gpu`."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

FAILED = 12  # failures that are named


def rows(device: str, _) -> Iterator[dict]:
    root = Path(__file__).resolve().parents[3]
    options = ["-n", "12", "--maxprocesses", "12", "--dist", "load", "--tb=short"]
    where = "tests/core" if device == "cuda" else "tests/core/kernels/test_block_sparse.py"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", *options, "-p", "no:cacheprovider"]
    done = subprocess.run([*command, where], cwd=root, capture_output=True, text=True, check=False)
    print(done.stdout[-60_000:], done.stderr[-2_000:])
    counts = dict.fromkeys(("passed", "failed", "skipped", "errors"), 0)
    for number, what in re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout[-400:]):
        counts["errors" if what.startswith("error") else what] = int(number)
    yield {"tests": "marked gpu", **counts}
    for name in re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.M)[:FAILED]:
        yield {"failed test": name}
