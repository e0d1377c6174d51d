"""Runs the doctor on the device for a minute."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import attnkit


def rows(device: str, arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    report = attnkit.doctor(quick=True, record=False)
    folder: Path = arguments.folder
    (folder / "doctor.md").write_text(report.markdown() + "\n")
    for row in report.rows:
        if row.device == device:
            name = f"{row.attention}, {row.dtype} on {device}"
            found = [f"{f.what}: {f.seen}" for f in report.failures if f.attention == name]
            cells = {what: seen.replace("NaN", "not finite") for what, seen in row.cells.items()}
            yield {"attention": name, "cases": row.num_cases, **cells,
                   "failures": "; ".join(found) or "none"}  # fmt: skip
