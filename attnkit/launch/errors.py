"""How a command ends when something is wrong: at most three lines and an exit code.

Some libraries hide what an error comes from: data workers, other ranks, the disk, allocators.
"""

import errno
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from attnkit.launch.signals import raise_received
from attnkit.lightning.console import visible
from attnkit.lightning.errors import RunError, StoppedBySignal, UserError, first_line

TRACEBACK = "ATTNKIT_TRACEBACK"  # set to 1 to see where an error came from
WRONG_INPUT, CRASHED, INTERRUPTED = 2, 1, 130

# As torch 2.14 and the allocators and backends below it word what has no class of its own.
_KILLED = re.compile(r"DataLoader worker \(pid.*?(is killed by signal: .*?\.|exited unexpectedly)")
_SHARED = re.compile(r"out of shared memory|shared memory ?\(shm\)|</torch_\w+>")
_IN_WORKER = re.compile(r"^Caught \S+ in (DataLoader worker|pin memory thread)")
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>\S+)')
_PEER = re.compile(r"gloo/|ProcessGroup|NCCL|Connection closed by peer|Connection reset by peer")
_NO_MEMORY = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|(CUDA|HIP|MPS|XPU)\b.*out of memory|_(STATUS_)?ALLOC_FAILED"
)
_WAITED = re.compile(r"[Tt]imed? ?out|[Tt]imeout")


class Interrupted(KeyboardInterrupt):
    """A signal during a run; the message says how to go on. A sweep must not swallow it."""

    def __init__(self, said: str, go_on: str = "", code: int = INTERRUPTED) -> None:
        super().__init__(f"{said}{go_on}")
        self.said = said
        self.code = code


class OutOfMemory(RunError):
    """Training ran out of memory; the message is the allocator's first line."""


def guarded(command: Callable[[], int]) -> int:
    """Run a command and turn whatever it raises into lines on stderr and an exit code."""
    try:
        try:
            return command()
        except Exception:
            raise_received()  # what a signal has broken off may fail in any way
            raise
    except UserError as error:
        return fail(error, WRONG_INPUT)
    except Interrupted as error:
        print(visible(f"\n{error}"), file=sys.stderr)
        return error.code
    except StoppedBySignal as error:
        print(f"\nstopped by {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return fail(error, CRASHED)


def fail(error: Exception, code: int, whose: str = "") -> int:
    """Print an error, after `whose` it is; with ATTNKIT_TRACEBACK=1, all of it."""
    if os.environ.get(TRACEBACK) == "1":
        said = "".join(traceback.format_exception(error)).rstrip()
    else:
        said = f"attnkit: {whose}{summary(error)}"
    print(visible(said), file=sys.stderr, flush=True)
    return code


def summary(error: BaseException) -> str:
    """An error in at most three lines; for an unexpected one, also where in whose code."""
    lines = [line for line in (cause(error) or str(error)).splitlines() if line.strip()]
    if cause(error) or isinstance(error, UserError | RunError):
        return "\n".join(lines[:3])
    first = (lines or ["no message"])[0].strip()
    return (
        f"{type(error).__name__}: {first[:500]}\n  in {place(error)}\n"
        f"  {TRACEBACK}=1 in the environment shows the whole traceback"
    )


# --- what an error comes from ---------------------------------------------------------------------


def is_peer_lost(error: BaseException) -> bool:
    """Whether an error only reports that another process has gone or does not answer."""
    named = any(cls.__name__ == "DistError" for cls in type(error).__mro__)
    return named or (isinstance(error, RuntimeError) and bool(_PEER.search(str(error))))


def is_timeout(error: BaseException) -> bool:
    """Whether a lost peer timed out, rather than disconnected."""
    return bool(_WAITED.search(str(error)))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator had no more: torch's on any device, or Python's."""
    if isinstance(error, MemoryError):
        return True
    named = any(cls.__name__ == "OutOfMemoryError" for cls in type(error).__mro__)
    return named or (isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error))))


def of_allocator(error: BaseException) -> str:
    """What it said, in one line."""
    said = re.sub(r"^\[enforce fail at .*?(?=DefaultCPUAllocator)", "", str(error).strip())
    return " ".join(said.split())[:200] or type(error).__name__


def cause(error: BaseException) -> str:
    """One or two lines for an error whose own message does not say it, or nothing."""
    text = str(error)
    killed = _KILLED.search(text)
    if _SHARED.search(text) or _is_semaphore_refused(error):
        said = killed[0].rstrip(".") if killed else "a DataLoader worker can't send a batch"
        return (
            f"{said}: shared memory is full\n"
            "  make /dev/shm larger (docker run --shm-size=8g), or data.num_workers=0"
        )
    if killed or _is_worker_gone(error):
        said = killed[0].rstrip(".") if killed else "a DataLoader worker has ended"
        return f"{said}\n  the system kills what takes too much memory; fewer workers take less"
    if _IN_WORKER.search(text):
        return _of_worker(text)
    if isinstance(error, UserError | RunError):
        return ""
    if is_out_of_memory(error):
        return f"out of memory in {place(error)}\n  {of_allocator(error)}"
    if isinstance(error, OSError) and error.strerror:
        path = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{path}, in {place(error)}"
    if is_peer_lost(error):
        how = "does not answer" if is_timeout(error) else "has ended"
        said = re.sub(r"\[[^\]]*\](:\d+)?", "", first_line(error)).split(". ")[0].strip()
        return f"another process of this run {how} ({said})"
    return ""


def _is_semaphore_refused(error: BaseException) -> bool:
    """Whether a queue could not be made, whose semaphores are in shared memory."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    return is_full and any(file.endswith("multiprocessing/synchronize.py") for file in files)


def _is_worker_gone(error: BaseException) -> bool:
    """Whether a worker died while it was sending a batch."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return isinstance(error, ConnectionError | EOFError) and any(
        Path(file).parts[-3:-1] == ("utils", "data") for file in files
    )


def place(error: BaseException) -> str:
    """The innermost frame outside the installed libraries: the user's code or attnkit's."""
    frames = [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)]
    return _own(frames)


def _of_worker(text: str) -> str:
    """torch puts the traceback of a worker into the message; its end is the error itself."""
    lines = text.splitlines()
    last = max((i for i, line in enumerate(lines) if _FRAME.match(line)), default=0)
    end = next((i for i in range(last + 1, len(lines)) if lines[i][:1].strip()), len(lines) - 1)
    message = "\n".join(lines[end:])
    name, _, said = message.partition(": ")
    if name.rpartition(".")[2] in (UserError.__name__, RunError.__name__):
        return said
    frames = [(m["file"], int(m["line"]), m["name"]) for m in map(_FRAME.match, lines) if m]
    return f"{lines[end][:500]}\n  in {_own(frames)}, a DataLoader worker"


def _own(frames: Sequence[tuple[str, int | None, str]]) -> str:
    own = [f for f in frames if "site-packages" not in f[0] and "<" not in f[0]]
    if not frames:
        return "?"
    file, line, name = (own or frames)[-1]
    return f"{Path(file).name}:{line} ({name})"
