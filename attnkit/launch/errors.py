"""How a command ends when something is wrong: at most three lines and an exit code."""

import os
import sys
import traceback
from collections.abc import Callable

from attnkit.launch.causes import cause, place
from attnkit.launch.signals import raise_received
from attnkit.lightning.errors import RunError, StoppedBySignal, UserError

TRACEBACK = "ATTNKIT_TRACEBACK"  # set to 1 to see where an error came from
WRONG_INPUT, CRASHED, INTERRUPTED = 2, 1, 130


class Interrupted(KeyboardInterrupt):
    """A signal during a run; the message says how to go on. A sweep must not swallow it."""

    def __init__(self, message: str, code: int = INTERRUPTED) -> None:
        super().__init__(message)
        self.code = code


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
        print(f"\n{error}", file=sys.stderr)
        return error.code
    except StoppedBySignal as error:
        print(f"\nstopped by {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return fail(error, CRASHED)


def fail(error: Exception, code: int) -> int:
    """Print an error; with ATTNKIT_TRACEBACK=1, all of it."""
    if os.environ.get(TRACEBACK) == "1":
        traceback.print_exception(error)
    else:
        print(f"attnkit: {summary(error)}", file=sys.stderr)
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
