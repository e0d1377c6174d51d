"""Writes docs/records.md from the records in conf/experiment and from docs/reproduced.csv.

python docs/records.py
"""

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path

from attnkit.launch.records import Record, grouped, read, verdict

HEAD = """# Records

Written by `python docs/records.py` from the files in `conf/experiment/`; a test holds it to them.

A record is an experiment file with a section `record`. It states a figure that a paper or this
documentation claims, and the figure that was measured here. Running the experiment measures it
again.

    python -m attnkit run=reproduce                              # lists them
    python -m attnkit run=reproduce reproduce.name=digits_vit    # runs one again
    python -m attnkit run=reproduce 'reproduce.name=[cora,citeseer]' data.root=PATH
    python -m attnkit run=reproduce reproduce.minutes=20 data.root=PATH
    python -m attnkit experiment=cora data.root=PATH             # as an ordinary run

`data.root` is the folder with the data files, or a folder that contains `planetoid`,
`heterophilous` and `cifar10`. `seeds=N` runs another number of seeds or splits.
`reproduce.minutes=N` runs the shortest records first, as many as fit into N minutes by the times
below, and names each record that it leaves out, with the reason. Each record gets its own folder in
`outputs/reproduce/<date_time>`, next to `table.csv` and `table.md`. If a record fails, its error is
in the table, the others still run, and the exit code is 1. A figure that disagrees is not a
failure.

## The verdict

A new figure `m ± s` is compared with the published one, or with ours if nothing was published. It
is `within spread` if

    |m − m_ref| ≤ max(√(s² + s_ref²), half a unit of the last digit of m_ref)

Otherwise the verdict is `above` or `below`, which says on which side the number lies, not which is
better. `s` is the standard deviation over seeds or splits, and 0 if there was a single run or if
none is known. This is a rule of thumb for a few seeds, not a significance test. A record may set
its own `tolerance` instead of half a unit.

## Add one

Write a file in `conf/experiment/`, or in `experiment/` of your `--config-dir`. It begins with
`# @package _global_`, sets what the run needs (`defaults` with `override /task: …`, `seeds` or
`splits`), and ends with

    record:
      what: GAT on Cora                       # what is measured
      paper: Veličković et al. 2018           # or where it is claimed
      table: "table 2: GAT, public split"
      url: https://arxiv.org/abs/1710.10903
      metric: test/accuracy                   # of results.json
      unit: "%"                               # "": as in results.json
      published: {mean: 83.0, std: 0.7, runs: 100}
      ours: {mean: 83.05, std: 0.37, runs: 10}
      date: "2026-11-23"
      machine: 2 CPU cores (AMD EPYC), torch 2.15
      minutes: 4                              # of all runs on this machine
      data: {folder: planetoid, file: ind.cora.graph}
      gpu: false                              # true: takes too long without one
      why: …                                  # instead of ours: why there is none
      note: …                                 # what differs from the paper

Write down only what a run has given. A record may name a `script` instead of a run: its path is
relative to the folder above `conf/`, and its `main(seed, picture)` returns the figure. Then run
`python docs/records.py`.

## All of them

Shares in %. Verdict: of our figure against the published one. Time: of all runs of the record, most
of them beside other work on the machine; where it is missing, `reproduce.minutes` leaves the record
out.
"""

AGAIN = """\
## Run again

`run=reproduce reproduce.minutes=60`, 2026-11-27, one thread of two cores (Intel Xeon, AVX-512),
torch 2.14.1, beside other processes. It chose 27 records, of 43 minutes on the machines of their
figures. The hour ended after 16; ten more were run on the same day by name, and `scenes` was not.
Each figure is compared with the published one, or with ours if nothing was published. The rows are
in `docs/reproduced.csv`.
"""

NUMBERS = {"published", "ours", "runs", "time"}


def rows(records: list[Record]) -> Iterator[str]:
    """A table of these records, without columns that are empty."""
    names = "record", "what", "published", "ours", "verdict", "runs", "time", "measured", "remarks"
    table = []
    for record in records:
        ours, published = record.ours, record.published
        cells = [
            f"`{record.name}`",
            record.what,
            str(published or ""),
            str(ours or ""),
            verdict(ours, published) if ours and published else "",
            str(ours.runs or "") if ours else "",
            record.time,
            f"{record.date}, {record.machine}" if ours else "",
            ". ".join(filter(None, (f"not run: {record.why}" if record.why else "", record.note))),
        ]
        table.append([cell.replace("|", chr(92) + "|") for cell in cells])
    shown = [place for place, column in enumerate(zip(*table, strict=True)) if any(column)]
    yield _line(names[place] for place in shown)
    yield _line("---:" if names[place] in NUMBERS else "---" for place in shown)
    for cells in table:
        yield _line(cells[place] for place in shown)


def again() -> Iterator[str]:
    """The table of the records that were run again."""
    yield _line(("record", "published", "on record", "now", "runs", "verdict", "minutes"))
    yield _line(("---", "---:", "---:", "---:", "---:", "---", "---:"))
    with Path(__file__).with_name("reproduced.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            kinds = "published", "on_record", "now"
            figures = [" ± ".join(filter(None, (row[k], row.get(f"{k}_std")))) for k in kinds]
            minutes = f"{float(row['seconds']) / 60:.1f}"
            yield _line((f"`{row['record']}`", *figures, row["runs"], row["verdict"], minutes))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def page() -> str:
    sections = [HEAD]
    conf = Path(__file__).resolve().parents[1] / "conf"
    for group, records in grouped(read([conf]).values()).items():
        url = records[0].url
        heading = f"[{records[0].paper}]({url}), {records[0].table}" if url else group
        sections.append(f"### {heading}\n")
        measured = [record for record in records if record.ours]
        for part in (measured, [record for record in records if not record.ours]):
            sections += [*rows(part), ""] if part else []
    return "\n".join([*sections, AGAIN, *again(), ""])


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(page())
