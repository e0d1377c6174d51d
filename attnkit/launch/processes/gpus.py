"""A GPU for each of several trials that run at once on a machine.

A process that has one holds a lock on a file for it, in a folder of this user's below the machine's
temporary folder; the kernel frees it with the process. All sweeps of a user share these locks.
"""

import os
import re
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from attnkit.launch.processes.locks import locked
from attnkit.lightning.errors import UserError

VARIABLE = "CUDA_VISIBLE_DEVICES"
_POLL = 0.2


def visible() -> tuple[str, ...]:
    """The NVIDIA GPUs this process may use, as CUDA_VISIBLE_DEVICES names them; without torch."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        names = [name.strip() for name in given.split(",")]
        wrong = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
        return tuple(names[:wrong])  # CUDA, too, reads no further
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return listed(done.stdout) if done.returncode == 0 else ()


def listed(text: str) -> tuple[str, ...]:
    """The names in the output of `nvidia-smi -L`; of a GPU that is divided (MIG), its parts'."""
    found: list[str] = []
    for line in text.splitlines():
        if match := re.search(r"UUID: ((?:GPU|MIG)-[\w/-]+)", line):
            if match[1].startswith("MIG-") and found and found[-1].startswith("GPU-"):
                found.pop()
            found.append(match[1])
    return tuple(found)


def is_wanted(trainer: Mapping[str, Any]) -> bool:
    """Whether a trainer with these arguments takes one GPU, whichever it is."""
    kind = trainer.get("accelerator") or "auto"
    return kind in ("auto", "gpu", "cuda") and trainer.get("devices") in (1, "1")


@contextmanager
def reserved(names: Sequence[str], folder: Path | None = None) -> Iterator[str]:
    """One of these devices, which is this process's until the block ends; waits for a free one."""
    folder = _own(folder or Path(tempfile.gettempdir()) / f"attnkit-devices-{os.getuid()}")
    while True:
        for name in names:
            with locked(folder / (re.sub(r"[^\w-]", "_", name) + ".lock")) as mine:
                if mine:
                    yield name
                    return
        time.sleep(_POLL)


def _own(folder: Path) -> Path:
    """A folder that only this user can write to: anyone may make one of this name in /tmp.

    Raises:
        UserError: another user has made it, or it is not a folder.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise UserError(
            f"{folder}: this folder for the locks of the GPUs belongs to another user\n"
            "  remove it, or set TMPDIR to your own folder, the same for all sweeps"
        )
    folder.chmod(0o700)
    return folder
