"""`python -m attnkit …`, which is also the command `attnkit`."""

import sys


def main() -> int:
    """Run the command line; returns the exit code."""
    from attnkit.launch.main import main as launch

    return launch(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
