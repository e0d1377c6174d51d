"""The figures of a run as two tables: its metrics, stage by stage, and what they cost."""

from collections.abc import Iterator, Mapping

from rich.table import Table

from attnkit.lightning.console import cell, seconds, with_prefix

_COLUMNS = {
    ("test/", ""): "test",
    ("val/", "_best"): "val, best epoch",
    ("val/", "_last"): "val, last epoch",
    ("val/", ""): "val",
}
"""For each stage and ending of a metric's name, the column that it stands in."""


def tables(title: str, results: Mapping[str, float]) -> Iterator[Table]:
    """The metrics of results.json, a row for each and a column for each stage, and all else."""
    shown = {name: text for name, text in _texts(results).items() if f"{name}_last" not in results}
    metrics: dict[str, dict[str, str]] = {}
    for name in list(shown):
        metric, column = _place(name)
        if column:
            metrics.setdefault(metric, {})[column] = shown.pop(name)
    if metrics:
        columns = [c for c in _COLUMNS.values() if any(c in row for row in metrics.values())]
        table = Table("metric", title=title, title_justify="left")
        for column in columns:
            table.add_column(column, justify="right")
        for metric in sorted(metrics):
            table.add_row(cell(metric), *(metrics[metric].get(column, "") for column in columns))
        if "best_epoch" in results and "test" in columns:
            table.caption = "test: the checkpoint of the best epoch"
            table.caption_justify = "left"
        yield table
    if shown:
        rest = Table(title=None if metrics else title, title_justify="left", show_header=False)
        rest.add_column()
        rest.add_column(justify="right")
        for name in sorted(shown, key=lambda name: ("/" not in name, name)):
            rest.add_row(cell(name), shown[name])
        yield rest


def _texts(results: Mapping[str, float]) -> dict[str, str]:
    """Every figure as it is shown, with its deviation over several seeds."""
    several = results["num_seeds"] > 1
    texts = {}
    for name, value in results.items():
        if name.endswith("_std") or name == "num_seeds" or name.startswith("kernels/"):
            continue
        texts[name] = _text(name, value)
        if several and f"{name}_std" in results:
            texts[name] += f" ± {_text(name, results[f'{name}_std'])}"
    if several:
        texts["num_seeds"] = str(int(results["num_seeds"]))
    kernels = sorted({n.rpartition("/")[2] for n in results if n.startswith("kernels/")})
    if kernels:
        texts["attention kernels"] = ", ".join(kernels)
    return texts


def _place(name: str) -> tuple[str, str]:
    """The metric and the column of a figure: no column for one of no stage that is shown."""
    for (stage, ending), column in _COLUMNS.items():
        if name.startswith(stage) and name.endswith(ending):
            return name.removeprefix(stage).removesuffix(ending), column
    return name, ""


def _text(name: str, value: float) -> str:
    if name.startswith("difference/"):
        return f"{value:.1e}"
    if name.endswith("_per_second"):
        return f"{with_prefix(value)}/s"
    if name.endswith("seconds"):
        return seconds(value)
    whole = float(value).is_integer() and abs(value) >= 1 and not _place(name)[1]
    return f"{value:,.0f}" if whole else f"{value:.4f}"
