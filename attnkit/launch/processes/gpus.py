"""Finds the GPUs that this process may use, without torch."""

import os
import re
import subprocess

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible() -> tuple[str, ...]:
    """Return the NVIDIA GPUs that this process may use, as named in CUDA_VISIBLE_DEVICES."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        names = [name.strip() for name in given.split(",")]
        wrong = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
        return tuple(names[:wrong])  # CUDA also stops at the first invalid name
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return listed(done.stdout) if done.returncode == 0 else ()


def listed(text: str) -> tuple[str, ...]:
    """Return the names in the output of `nvidia-smi -L`; for a divided GPU, its MIG devices."""
    found: list[str] = []
    for line in text.splitlines():
        if match := re.search(r"UUID: ((?:GPU|MIG)-[\w/-]+)", line):
            if match[1].startswith("MIG-") and found and found[-1].startswith("GPU-"):
                found.pop()
            found.append(match[1])
    return tuple(found)
