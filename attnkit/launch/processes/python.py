"""What every process of attnkit's own does first: ranks, trials and the command itself."""

import io
import sys


def command_of(module: str, *words: str) -> list[str]:
    """A command that ends with what `main` of this module returns, in this environment.

    It imports from where this process does. `python -m` would look into the working directory
    first, where a statistics.py or queue.py of the user's may lie, and its option `-P` is of
    Python 3.11.
    """
    begin = (
        f"import sys; sys.path[:] = {sys.path!a}\n"
        f"from {__name__} import print_anything; print_anything()\n"
        f"from {module} import main; sys.exit(main(sys.argv[1:]))"
    )
    return [sys.executable, "-c", begin, *words]


def print_anything() -> None:
    r"""From now on write characters that the output's encoding lacks as `\u2013`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
