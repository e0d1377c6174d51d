"""What explanations cost, before they begin."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from attnkit.interpret.graphs.question import GraphQuestion
from attnkit.interpret.methods.grid import patch_grid
from attnkit.interpret.methods.question import looking
from attnkit.interpret.trust.curves import FRACTIONS, FULL_FRACTIONS
from attnkit.interpret.trust.words import ORDERS, word_counts
from attnkit.lightning.explained import Explained

if TYPE_CHECKING:
    from attnkit.interpret.report.report import Report

_JUDGING = {"none": 0, "fast": 70, "full": 200}
_OF_EDGES = {"none": 0, "fast": 210, "full": 2010}
_EXPLAINING = 3  # forwards and a backward
_PATCHES = (8, 8)  # of a model that does not say
_MOST_PATCHES = 256  # that the page leaves out one by one


def cost_of(report: Report, explained: Explained) -> str:
    """How many forwards, and how long they take, from a first batch."""
    forwards, (at_once, ask) = num_forwards(report, explained), _first_batch(report, explained)
    seconds = []
    with looking(explained.model), torch.no_grad():
        for _ in range(2):  # the first one warms up
            start = time.perf_counter()
            ask()
            seconds.append(time.perf_counter() - start)
    what = "of what reaches a node" if explained.kind == "nodes" else "of an image"
    return f"about {forwards:,} forwards {what}, {duration(forwards * min(seconds) / at_once)}"


def num_forwards(report: Report, explained: Explained) -> int:
    """About how many images, or how often a part of a graph, go through the model."""
    methods, is_full = len(report.methods), report.trust == "full"
    if explained.kind == "nodes":
        return len(report.nodes or ()) * methods * (_EXPLAINING + _OF_EDGES[report.trust])
    images = len(explained.inputs)
    if explained.kind == "sentences":
        rows, columns = cast(Any, explained.model).grid
        counts = word_counts(FULL_FRACTIONS if is_full else FRACTIONS, rows * columns)
        longest = max(map(len, explained.words), default=0)
        of_orders = (len(counts) - 3) * (ORDERS + 2 * longest)
        judging = 0 if report.trust == "none" else 2 + rows * columns + of_orders
        return images * methods * (_EXPLAINING + judging)
    patches = patch_grid(explained.model, explained.inputs)
    rows, columns = _PATCHES if patches is None else patches.grid
    page, judging = min(rows * columns, _MOST_PATCHES), _JUDGING[report.trust]
    return images * (methods * (_EXPLAINING + judging) + page)


def _first_batch(report: Report, explained: Explained) -> tuple[int, Callable[[], object]]:
    """How many are asked of at once, and what asks the model."""
    if explained.kind == "nodes":
        question = GraphQuestion(explained.model, explained.inputs, (report.nodes or [0])[0])
        with looking(explained.model):
            question.prepare()
        every = torch.ones_like(question.candidates)
        return 1, lambda: question.ask(every)
    images = explained.inputs[: report.batch_size]
    rest = () if explained.sentences is None else (explained.sentences[: report.batch_size],)
    return len(images), lambda: explained.model(images, *rest)


def duration(seconds: float) -> str:
    """As a reader wants it."""
    if seconds < 1:
        return "less than a second"
    return f"about {seconds:.0f} s" if seconds < 120 else f"about {seconds / 60:.0f} minutes"
