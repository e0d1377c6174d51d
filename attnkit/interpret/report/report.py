"""`Report` explains inputs by chosen methods, judges the maps and writes the results."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from attnkit.core.arguments import at_least
from attnkit.interpret.explain import explain
from attnkit.interpret.explanation import Explanation
from attnkit.interpret.layer_maps import draw_layer
from attnkit.interpret.methods.graph_question import GraphQuestion
from attnkit.interpret.methods.grid import patch_grid
from attnkit.interpret.methods.question import looking
from attnkit.interpret.methods.table import METHODS, methods_of
from attnkit.interpret.methods.words import grid_of
from attnkit.interpret.picture import save
from attnkit.interpret.report.attention import MOST_CELLS
from attnkit.interpret.report.findings import PAGE, Findings, Judged, findings_of, table_of
from attnkit.interpret.report.kinds import KINDS, apart, arrays_of
from attnkit.interpret.report.page import picture_section, write_page
from attnkit.interpret.trust.curves import FRACTIONS, FULL_FRACTIONS
from attnkit.interpret.trust.words import ORDERS, word_counts
from attnkit.lightning.protocols import Explained

LAYERS = "layers.png"
MOST_IMAGES = 64
_JUDGING = {"none": 0, "fast": 70, "full": 200}
_OF_EDGES = {"none": 0, "fast": 210, "full": 2010}
_EXPLAINING = 3  # cost of an explanation in forwards: a forward and a backward
_PATCHES = (8, 8)  # assumed for a model whose patches are not known


class Report:
    """Explanations of images, sentences, nodes, pairs or graphs as a page, a table and arrays.

        report = attnkit.interpret.report.Report(methods=["attention", "relevance"])
        found = report(Explained(vit, images, pictures=images), "seen")
        print(found.rows[0]["gap_mean"])

    The report writes `explain.html`, `scores.csv` and `maps.npz` to the folder.

    Args:
        method: a method of `attnkit.explain`, which the page shows first. None: the first of
            `methods`, or relevance if the model has attention over the whole image, else Grad-CAM;
            for captioners without attention layers, their attention to the image.
        methods: several methods, each with its rows and maps.
        trust: "fast" and "full" judge each map as `attnkit.trust` does, "full" with `full=True`;
            "none" does not judge.
        num_images: number of images, or graphs, to show, at most 64.
        target: the class to explain, by name or number; None: the predicted one. It is required if
            a node has several numbers.
        nodes: numbers of nodes of a graph.
        pairs: pairs of nodes of a graph, for a model that predicts whether an edge joins them.
        graphs: numbers of some of many graphs; None: all.
        against: another checkpoint, whose maps of images are shown next to the first ones.
        layer: a layer to draw as well, by its position or its name (`*` matches anything):
            attention over the image as a multiple of uniform attention, attention over channels,
            or gates; for sentences its attention at each word. This writes `layers.png`, and the
            numbers to `maps.npz` as `layer_<name>`.
        batch_size: images in a forward.
        seed: seed of random orders.
        device: device of the model; None: a GPU if there is one.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        method: str | None = None,
        *,
        methods: Sequence[str] | None = None,
        trust: Literal["fast", "full", "none"] | None = "fast",
        num_images: int = 8,
        target: str | int | None = None,
        nodes: Sequence[int] | None = None,
        pairs: Sequence[Sequence[int]] | None = None,
        graphs: Sequence[int] | None = None,
        against: str | Path | None = None,
        layer: int | str | None = None,
        batch_size: int = 64,
        seed: int = 0,
        device: str | None = None,
    ) -> None:
        trust = trust or "none"  # YAML may give None for an empty value
        if trust not in _JUDGING:
            raise ValueError(f"trust: expected one of {', '.join(_JUDGING)}, got {trust!r}")
        at_least(1, num_images=num_images, batch_size=batch_size)
        at_least(0, seed=seed)
        if num_images > MOST_IMAGES:
            raise ValueError(
                f"num_images: expected {MOST_IMAGES} or fewer, which a page can show, got "
                f"{num_images}; for whole test sets there is attnkit.metrics.PerturbationGap"
            )
        for name, some in (("methods", methods), ("graphs", graphs)):
            if some is not None and not some:
                raise ValueError(f"{name}: expected some, got none")
        asked = [*([method] if method else []), *(methods or [])]
        self.methods = [*dict.fromkeys(asked)]
        self._chooses = not asked
        self.trust, self.num_images, self.target = trust, num_images, target
        self.nodes = None if nodes is None else list(nodes)
        self.pairs = None if pairs is None else list(map(tuple, pairs))
        self.graphs = None if graphs is None else [*dict.fromkeys(graphs)]
        self.against, self.layer = against, layer
        self.batch_size, self.seed, self.device = batch_size, seed, device

    def check(self, explained: Explained) -> None:
        """Check the settings before any long computation; choose the method if none was given.

        Raises:
            ValueError: a method, a class, nodes, graphs or other arguments that do not fit.
        """
        kind, known = explained.kind, KINDS[explained.kind]
        for name, why in known.refused.items():
            if (given := getattr(self, name)) is not None:
                raise ValueError(f"{name}: expected none for {kind}, got {given!r}; {kind} {why}")
        if self._chooses:
            self.methods = [usual_method(explained)]
        for method in self.methods:
            if method not in (methods := methods_of(known.unit)):
                raise ValueError(
                    f"method: expected one of {', '.join(methods)} for {kind}, got {method!r}"
                )
        if self.target is not None:
            blind = next((m for m in self.methods if not METHODS[m].has_target), None)
            if blind is not None:
                raise ValueError(
                    f"target: {blind!r} gives the same map for every class; leave one of them out"
                )
            self.class_of(explained)
        elif explained.of == "logit" and len(explained.class_names) > 1:
            some = ", ".join(explained.class_names[:10])
            raise ValueError(
                f"target: expected which number of a node to explain: {some}; got none"
            )
        if kind == "nodes":
            _check_nodes("nodes", self.nodes, len(explained.inputs[0]), "nodes=[12,51]")
        if kind == "pairs":
            if not all(len(pair) == 2 for pair in self.pairs or ()):
                raise ValueError(f"pairs: expected two nodes each, got {self.pairs}")
            ends = [node for pair in self.pairs or () for node in pair]
            _check_nodes("pairs", ends, len(explained.inputs["x"]), "pairs=[[3,7]]")
        unknown = set(self.graphs or ()).difference(explained.graphs or ())
        if unknown:
            given = ", ".join(map(str, explained.graphs or ()))
            raise ValueError(f"graphs: expected some of {given}, got {min(unknown)}")
        if self.layer is not None:
            draw_layer(explained.alone(0), self.layer)

    def class_of(self, explained: Explained) -> int | None:
        """Return the number of the class to explain; None: the predicted one.

        Raises:
            ValueError: there is no such class.
        """
        names, target = list(explained.class_names), self.target
        if target is None:
            return None
        if isinstance(target, int):
            if target < 0 or (names and target >= len(names)):
                last = len(names) - 1
                raise ValueError(f"target: expected a class from 0 to {last}, got {target}")
            return target
        if target not in names:
            some = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
            raise ValueError(
                f"target: expected the name of a class ({some or 'there are none'}) or its number, "
                f"got {target!r}"
            )
        return names.index(target)

    def cost(self, explained: Explained) -> str:
        """Return the number of forwards and the time this will take, measured on a first batch.

        Call `check` before.
        """
        forwards, (at_once, ask) = self.num_forwards(explained), self._first_batch(explained)
        seconds = []
        with looking(explained.model), torch.no_grad():
            for _ in range(2):  # the first one warms up
                start = time.perf_counter()
                ask()
                seconds.append(time.perf_counter() - start)
        time_it_takes = duration(forwards * min(seconds) / at_once)
        return f"about {forwards:,} forwards {KINDS[explained.kind].asks}, {time_it_takes}"

    def num_forwards(self, explained: Explained) -> int:
        """Return the approximate number of forwards, counted in images or graphs."""
        methods = len(self.methods)
        if KINDS[explained.kind].unit == "edge":
            return len(self._each(explained)) * methods * (_EXPLAINING + _OF_EDGES[self.trust])
        images = len(explained.inputs)
        parts = [explained.alone(n) for n in range(images)] if explained.has_sizes else [explained]
        if explained.kind == "sentences":
            return images // len(parts) * methods * sum(map(self._forwards_of_words, parts))
        each = [patch_grid(part.model, part.inputs) for part in parts]
        grids = [_PATCHES if patches is None else patches.grid for patches in each]
        # the page shows p without each single patch
        of_page = [min(rows * columns, MOST_CELLS) for rows, columns in grids]
        of_page *= images // len(parts)
        return images * methods * (_EXPLAINING + _JUDGING[self.trust]) + sum(of_page)

    def _forwards_of_words(self, explained: Explained) -> int:
        """Return the number of forwards for each image, all of one size, and method."""
        rows, columns = grid_of(explained.model, explained.inputs)
        counts = word_counts(FULL_FRACTIONS if self.trust == "full" else FRACTIONS, rows * columns)
        longest = max(map(len, explained.words), default=0)
        judging = 2 + rows * columns + (len(counts) - 3) * (ORDERS + 2 * longest)
        return _EXPLAINING + (0 if self.trust == "none" else judging)

    def _first_batch(self, explained: Explained) -> tuple[int, Callable[[], object]]:
        """Return the size of a first batch, and a function that runs the model on it."""
        if KINDS[explained.kind].unit == "edge":
            _, inputs, index = self._each(explained)[0]
            question = GraphQuestion(explained.model, inputs, **index)
            with looking(explained.model):
                question.prepare()
            every = torch.ones_like(question.candidates)
            return 1, lambda: question.ask(every)
        images = explained.inputs[: self.batch_size]
        rest = () if explained.sentences is None else (explained.sentences[: self.batch_size],)
        return len(images), lambda: explained.model(images, *rest)

    def _each(self, explained: Explained) -> list[tuple[int, Any, dict[str, Any]]]:
        """Return the inputs that are explained one by one: for each its place, as in `Judged`, and
        the inputs and other arguments for `attnkit.explain`."""
        inputs, of = explained.inputs, {"of": explained.of}
        if explained.kind == "nodes":
            return [(node, inputs, {"index": node, **of}) for node in self.nodes or ()]
        if explained.kind == "pairs":
            pairs = enumerate(self.pairs or ())
            return [(place, inputs, {"index": pair, **of}) for place, pair in pairs]
        if explained.graphs is not None:
            given = list(explained.graphs)
            places = (given.index(number) for number in self.graphs or given)
            return [(place, inputs[place], {}) for place in places]
        if explained.has_sizes:
            return [(place, image[None], {}) for place, image in enumerate(inputs)]
        return [(0, inputs, {})]

    def __call__(
        self,
        explained: Explained,
        folder: str | os.PathLike[str],
        *,
        title: str = "Explanations",
        facts: Sequence[str] = (),
        against: Explained | None = None,
    ) -> Findings:
        """Explain, judge and write; return the findings.

        Args:
            explained: the model and its inputs.
            folder: folder for the files.
            title: title of the page.
            facts: facts for the page, on the model and on the choice of images.
            against: another model with the same images.

        Raises:
            ValueError, TypeError, RuntimeError: as `attnkit.explain` and `attnkit.trust`.
        """
        self.check(explained)
        name, kind = explained.kind, KINDS[explained.kind]
        if against is not None and (why := kind.refused.get("against")):
            raise ValueError(f"against: expected none for {name}; {name} {why}")
        asked: Any = self.class_of(explained)
        found = []
        for place, inputs, index in self._each(explained):
            one, compared = explained, against
            if explained.has_sizes:
                one, compared = explained.alone(place), against and against.alone(place)
            target = asked if one.sentences is None else one.sentences
            for method in self.methods:
                seen = explain(explained.model, inputs, target, method, **index)
                other = None if compared is None else _of_other(compared, seen)
                found.append(Judged(method, seen, self._judged(one, seen), other, place))
        rows = kind.rows(explained, found)
        summary = kind.summary(rows)
        findings = Findings(
            rows,
            arrays_of(explained, found),
            sections=[
                section
                for part in apart(explained, found)
                for section in kind.sections(*part, self.batch_size)
            ],
            shown=table_of(summary, kind.columns),
            caption=kind.caption if any(one.trust for one in found) else "",
            said=findings_of(summary, kind.worth, kind.called),
        )
        folder = Path(folder)
        if self.layer is not None:
            drawn = draw_layer(explained.of_one_size(), self.layer)
            of_layers = {f"layer_{name}": one.cpu().numpy() for name, one in drawn.maps.items()}
            findings.arrays |= of_layers
            save(folder / LAYERS, drawn.figure)
            findings.sections.append(picture_section(folder / LAYERS, drawn.caption))
        findings.write(folder)
        untested = "These maps were not tested against random ones. " * (self.trust == "none")
        write_page(
            folder / PAGE,
            findings.sections,
            title=title,
            facts=facts,
            found=findings.said,
            reading=untested + kind.reading,
            table=findings.shown,
            caption=findings.caption,
        )
        return findings

    def _judged(self, explained: Explained, seen: Explanation) -> Any:
        """Judge an explanation; return None if that was not requested, or for a single edge."""
        full = self.trust == "full"
        of_edges = KINDS[explained.kind].unit == "edge"
        if self.trust == "none" or (of_edges and int(seen.candidates.sum()) < 2):
            return None
        if of_edges:
            return seen.trust(num_draws=200 if full else 20, seed=self.seed)
        masks = {"masks": explained.masks} if explained.kind == "images" else {}
        return seen.trust(full=full, seed=self.seed, batch_size=self.batch_size, **masks)


def _check_nodes(name: str, given: Sequence[int] | None, count: int, such: str) -> None:
    """Raise a ValueError if no nodes are given, or a number is out of range."""
    if not given:
        raise ValueError(
            f"{name}: expected the numbers of nodes to explain, 0 to {count - 1}, such as {such}"
        )
    for node in given:
        if not 0 <= node < count:
            raise ValueError(f"{name}: expected numbers from 0 to {count - 1}, got {node}")


def _of_other(against: Explained, seen: Explanation) -> Explanation:
    """Explain the same classes of the same images for another model."""
    target = seen.target if seen.has_target else None
    other = explain(against.model, against.inputs, target, seen.method)
    if other.map.shape != seen.map.shape:
        ours, theirs = (" x ".join(map(str, one.map.shape[1:])) for one in (seen, other))
        raise ValueError(
            f"against: its maps are {theirs}, the first model's {ours}; expected the same grid"
        )
    return other


def usual_method(explained: Explained) -> str:
    """Return the method that `attnkit.explain` chooses by default, for the first input."""
    if explained.kind in ("nodes", "pairs"):
        index = (0, 1) if explained.of_pairs else 0
        return explain(explained.model, explained.inputs, index=index).method
    if explained.kind == "graphs":
        return explain(explained.model, explained.inputs[0]).method
    first = explained.alone(0)
    return explain(first.model, first.inputs, first.sentences).method


def duration(seconds: float) -> str:
    """Return a duration in words."""
    if seconds < 1:
        return "less than a second"
    return f"about {seconds:.0f} s" if seconds < 120 else f"about {seconds / 60:.0f} minutes"
