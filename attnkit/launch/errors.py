"""How a command ends when something is wrong: at most three lines and an exit code.

Errors of data workers, other ranks, the disk and allocators often hide their cause; `cause` finds
it.
"""

import errno
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from attnkit.launch.processes.process import raise_received
from attnkit.lightning.console import visible
from attnkit.lightning.errors import RunError, StoppedBySignal, UserError, first_line

TRACEBACK = "ATTNKIT_TRACEBACK"  # set to 1 to see where an error came from
WRONG_INPUT, CRASHED, INTERRUPTED = 2, 1, 130
MOST_HALVINGS = 3  # how often a batch that takes too much memory is halved

# Messages of torch 2.14, its allocators and its backends for errors without a class of their own.
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
    """Raised when a signal stops a run; the message says how to continue.

    It is no `Exception`, so that a sweep does not swallow it.
    """

    def __init__(self, reason: str, go_on: str = "", code: int = INTERRUPTED) -> None:
        super().__init__(f"{reason}{go_on}")
        self.reason = reason
        self.code = code


class OutOfMemory(RunError):
    """Training ran out of memory; the message is the allocator's first line."""


def guarded(command: Callable[[], int]) -> int:
    """Run a command and turn whatever it raises into lines on stderr and an exit code."""
    try:
        try:
            return command()
        except Exception:
            raise_received()  # code that a signal interrupts may fail in any way
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
    """Print an error after the prefix `whose` and return the exit code.

    With ATTNKIT_TRACEBACK=1 in the environment, print the whole traceback.
    """
    if os.environ.get(TRACEBACK) == "1":
        text = "".join(traceback.format_exception(error)).rstrip()
    else:
        text = f"attnkit: {whose}{summary(error)}"
    print(visible(text), file=sys.stderr, flush=True)
    return code


def summary(error: BaseException) -> str:
    """Return an error in at most three lines; for an unexpected one, also its file and line."""
    lines = [line for line in (cause(error) or str(error)).splitlines() if line.strip()]
    if cause(error) or isinstance(error, UserError | RunError):
        return "\n".join(lines[:3])
    first = (lines or ["no message"])[0].strip()
    return (
        f"{type(error).__name__}: {first[:500]}\n  in {place(error)}\n"
        f"  {TRACEBACK}=1 in the environment shows the whole traceback"
    )


# --- the cause of an error ------------------------------------------------------------------------


def is_peer_lost(error: BaseException) -> bool:
    """Return whether an error only reports that another process ended or does not answer."""
    named = any(cls.__name__ == "DistError" for cls in type(error).__mro__)
    return named or (isinstance(error, RuntimeError) and bool(_PEER.search(str(error))))


def is_timeout(error: BaseException) -> bool:
    """Return whether a lost peer timed out instead of disconnecting."""
    return bool(_WAITED.search(str(error)))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator ran out of memory: torch's on any device, or Python's."""
    if isinstance(error, MemoryError):
        return True
    named = any(cls.__name__ == "OutOfMemoryError" for cls in type(error).__mro__)
    return named or (isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error))))


def allocator_message(error: BaseException) -> str:
    """Return the message of an allocator in one line."""
    text = re.sub(r"^\[enforce fail at .*?(?=DefaultCPUAllocator)", "", str(error).strip())
    return " ".join(text.split())[:200] or type(error).__name__


def cause(error: BaseException) -> str:
    """Return one or two lines on the cause of an error if its message hides it, else nothing."""
    text = str(error)
    killed = _KILLED.search(text)
    if _SHARED.search(text) or _is_semaphore_refused(error):
        event = killed[0].rstrip(".") if killed else "a DataLoader worker can't send a batch"
        return (
            f"{event}: shared memory is full\n"
            "  make /dev/shm larger (docker run --shm-size=8g), or data.num_workers=0"
        )
    if killed or _is_worker_gone(error):
        event = killed[0].rstrip(".") if killed else "a DataLoader worker has ended"
        return (
            f"{event}\n"
            "  the system kills processes that take too much memory; fewer workers take less"
        )
    if _IN_WORKER.search(text):
        return _worker_error(text)
    if isinstance(error, UserError | RunError):
        return ""
    if is_out_of_memory(error):
        return f"out of memory in {place(error)}\n  {allocator_message(error)}"
    if isinstance(error, OSError) and error.strerror:
        path = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{path}, in {place(error)}"
    if is_peer_lost(error):
        how = "does not answer" if is_timeout(error) else "has ended"
        message = re.sub(r"\[[^\]]*\](:\d+)?", "", first_line(error)).split(". ")[0].strip()
        return f"another process of this run {how} ({message})"
    return ""


def _is_semaphore_refused(error: BaseException) -> bool:
    """Return whether a queue could not be made because shared memory had no room for semaphores."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    return is_full and any(file.endswith("multiprocessing/synchronize.py") for file in files)


def _is_worker_gone(error: BaseException) -> bool:
    """Return whether a worker died while it was sending a batch."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return isinstance(error, ConnectionError | EOFError) and any(
        Path(file).parts[-3:-1] == ("utils", "data") for file in files
    )


def place(error: BaseException) -> str:
    """Return the innermost frame outside installed libraries: in the user's code or attnkit's."""
    frames = [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)]
    return _own(frames)


def _worker_error(text: str) -> str:
    """Return a data worker's error, which ends the traceback that torch puts into its message."""
    lines = text.splitlines()
    last = max((i for i, line in enumerate(lines) if _FRAME.match(line)), default=0)
    end = next((i for i in range(last + 1, len(lines)) if lines[i][:1].strip()), len(lines) - 1)
    message = "\n".join(lines[end:])
    name, _, reason = message.partition(": ")
    if name.rpartition(".")[2] in (UserError.__name__, RunError.__name__):
        return reason
    frames = [(m["file"], int(m["line"]), m["name"]) for m in map(_FRAME.match, lines) if m]
    return f"{lines[end][:500]}\n  in {_own(frames)}, a DataLoader worker"


def _own(frames: Sequence[tuple[str, int | None, str]]) -> str:
    own = [f for f in frames if "site-packages" not in f[0] and "<" not in f[0]]
    if not frames:
        return "?"
    file, line, name = (own or frames)[-1]
    return f"{Path(file).name}:{line} ({name})"
