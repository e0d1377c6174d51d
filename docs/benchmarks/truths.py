"""Helpers of the ground truth scripts: rows in a file, and tables of them."""

import json
from collections.abc import Callable, Collection, Iterable
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from measure import table

Row = dict[str, Any]
"""`truth`, `model`, `seed` and `method`; `score`, which of the `measure` "mass" is told over
`chance`; `right`, the share of the test that is answered right, and `without`, of these, what still
is without the evidence; `num`, how many are scored; and what `COLUMNS` names."""
SANITY = {"class sensitivity": "class_sensitivity", "random weights": "random_weights"}
FACTS = {"answered right": "right", "without it": "without"}
COLUMNS = {"pointing": "pointing", "gap, mean colour": "gap", **SANITY}


def kept(
    file: Path,
    seeds: int,
    cases: Iterable[tuple[str, str]],
    rows_of: Callable[[str, str, int], list[Row]],
) -> list[Row]:
    """The rows of the file, after those of each seed, truth and model that it lacks were added."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(row["truth"], row["model"], row["seed"]) for row in rows}
    for seed, (truth, model) in product(range(seeds), cases):
        if (truth, model, seed) not in done:
            print(f"{truth}, {model}, seed {seed}", flush=True)
            known = {"truth": truth, "model": model, "seed": seed}
            more = [known | row for row in rows_of(truth, model, seed)]
            with file.open("a") as out:
                out.writelines(json.dumps(row) + "\n" for row in more)
            rows += more
    return rows


def overview(rows: list[Row]) -> str:
    """A table for each network: what each method finds of each truth, mean ± standard deviation
    over seeds; and of `SANITY`, if truths are several, their smallest and largest mean."""
    parts = []
    for model, of_model in parted(rows, "model").items():
        truths, lines = parted(of_model, "truth"), []
        for method, of_method in parted(of_model, "method").items():
            by_truth = parted(of_method, "truth")
            found = {truth: spread(map(score, some)) for truth, some in by_truth.items()}
            sane = {name: ends(by_truth.values(), key) for name, key in SANITY.items()}
            lines.append({"map": f"`{method}`"} | found | sane)
        networks = {truth: list(parted(some, "seed").values()) for truth, some in truths.items()}
        empty = dict.fromkeys(SANITY, "")
        for name, key in FACTS.items():
            facts = {t: spread(some[0].get(key) for some in each) for t, each in networks.items()}
            if {*facts.values()} != {"–"}:
                lines.append({"map": name} | facts | empty)
        seeds = {truth: str(len(each)) for truth, each in networks.items()}
        lines.append({"map": "seeds"} | seeds | empty)
        parts.append(f"**{model}**\n\n{table(lines)}")
    return "\n\n".join(parts)


def details(rows: list[Row]) -> str:
    """A table for each network and truth, with all that is known of each method."""
    parts = []
    for model, of_model in parted(rows, "model").items():
        for truth, some in parted(of_model, "truth").items():
            columns = {name: key for name, key in COLUMNS.items() if any(key in r for r in some)}
            lines = [
                {"map": f"`{method}`", "found": spread(map(score, of_method))}
                | {n: spread(row.get(key) for row in of_method) for n, key in columns.items()}
                for method, of_method in parted(some, "method").items()
            ]
            number, chance = (mean(row[key] for row in some) for key in ("num", "chance"))
            head = f"**{model}, {truth}**: {number:.0f} scored a seed, chance {chance:.3f}"
            parts.append(f"{head}\n\n{table(lines)}")
    return "\n\n".join(parts)


def parted(rows: list[Row], key: str) -> dict[Any, list[Row]]:
    values = dict.fromkeys(row[key] for row in rows)
    return {value: [row for row in rows if row[key] == value] for value in values}


def score(row: Row) -> float:
    """Mass over chance, or AUROC."""
    return row["score"] / (row["chance"] if row["measure"] == "mass" else 1)


def spread(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    return number(mean(known)) + (f" ± {stdev(known):.2f}" if len(known) > 1 else "")


def ends(parts: Collection[list[Row]], key: str) -> str:
    if len(parts) == 1:
        return spread(row.get(key) for some in parts for row in some)
    means = [mean(row[key] for row in some) for some in parts if key in some[0]]
    found = dict.fromkeys(number(end) for end in (min(means), max(means))) if means else ["–"]
    return " to ".join(found)


def number(value: float) -> str:
    return f"{value:.2f}".replace("-0.00", "0.00").replace("-", "−")
