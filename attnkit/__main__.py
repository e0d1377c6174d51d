"""`python -m attnkit …`, which is also the command `attnkit`."""

import os
import sys


def main() -> int:
    """Run the command line; returns the exit code."""
    from attnkit.launch.errors import guarded
    from attnkit.launch.processes.process import (
        end_on_signals,
        ignore_signals,
        limit_spinning,
        print_anything,
    )

    limit_spinning()
    print_anything()

    def launch() -> int:
        end_on_signals(acknowledge=True)
        from attnkit.launch.main import main

        return main(sys.argv[1:], announce=True)

    code = guarded(launch)
    ignore_signals()
    return code


def _import_as_installed() -> None:
    """Not from the working directory, which `python -m` puts first: it may hold a statistics.py.

    Where attnkit itself lies there, it comes last.
    """
    here = os.getcwd()
    if sys.path[0] in ("", here):
        del sys.path[0]
        if os.path.dirname(os.path.dirname(__file__)) == here:
            sys.path.append(here)


if __name__ == "__main__":
    _import_as_installed()
    sys.exit(main())
