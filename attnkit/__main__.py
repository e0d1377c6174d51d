"""`python -m attnkit …`, which is also the command `attnkit`."""

import sys


def main() -> int:
    """Run the command line; returns the exit code."""
    from attnkit.launch.errors import guarded
    from attnkit.launch.signals import end_on_signals, ignore_signals

    end_on_signals()

    def launch() -> int:
        from attnkit.launch.main import main

        return main(sys.argv[1:])

    code = guarded(launch)
    ignore_signals()
    return code


if __name__ == "__main__":
    sys.exit(main())
