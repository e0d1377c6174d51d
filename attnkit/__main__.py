"""`python -m attnkit …`, which is also the command `attnkit`."""

import sys


def main() -> int:
    """Run the command line; returns the exit code."""
    from attnkit.launch.errors import guarded
    from attnkit.launch.processes.openmp import limit_spinning
    from attnkit.launch.signals import end_on_signals, ignore_signals

    limit_spinning()

    def launch() -> int:
        end_on_signals(acknowledge=True)
        from attnkit.launch.main import main

        return main(sys.argv[1:], announce=True)

    code = guarded(launch)
    ignore_signals()
    return code


if __name__ == "__main__":
    sys.exit(main())
