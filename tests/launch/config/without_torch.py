"""Run commands one after the other in one process; said of each: its end, and heavy imports.

Reads [[argument, …], …] as JSON and writes a list of {code, out, err, heavy, left}.
"""

import contextlib
import io
import json
import os
import sys

from attnkit.launch.main import main

HEAVY = {"torch", "lightning", "numpy", "rich"}


def run(argv: list[str]) -> dict[str, object]:
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        code = main(argv)
    return {
        "code": code,
        "out": out.getvalue(),
        "err": err.getvalue(),
        "heavy": sorted(HEAVY & set(sys.modules)),
        "left": os.listdir("."),
    }


if __name__ == "__main__":
    ends = [run(argv) for argv in json.load(sys.stdin)]
    json.dump(ends, sys.stdout)
