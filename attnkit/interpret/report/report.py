"""`Report`: what is explained, by which methods, and how far it is judged."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from attnkit.core.arguments import at_least
from attnkit.interpret.methods.table import METHODS, methods_of
from attnkit.interpret.page.page import write_page
from attnkit.interpret.page.section import Table
from attnkit.interpret.report.asked import Asked, Step
from attnkit.interpret.report.cost import cost_of
from attnkit.interpret.report.findings import PAGE, Findings
from attnkit.interpret.report.images import explain_images
from attnkit.interpret.report.nodes import explain_nodes
from attnkit.interpret.report.sentences import explain_sentences
from attnkit.interpret.usual_method import usual_method
from attnkit.lightning.explained import Explained

MOST_IMAGES = 64
TRUSTS = ("fast", "full", "none")
_UNITS = {"images": "patch", "sentences": "word", "nodes": "edge"}
_NO_NODES = "are explained image by image; leave it out"
_WITHOUT: Mapping[str, Mapping[str, str]] = {
    "images": {"nodes": _NO_NODES},
    "sentences": {
        "nodes": _NO_NODES,
        "target": "are explained for each word they have; leave it out",
        "against": "of another model may be others; explain it in a run of its own, with ckpt=",
    },
    "nodes": {},
}
"""By what is explained, arguments that it does not have, and why."""


class Report:
    """Explanations of images, sentences or nodes as a page, a table and arrays.

        report = attnkit.interpret.report.Report(methods=["attention", "relevance"])
        found = report(Explained(vit, images, pictures=images), "seen")
        print(found.rows[0]["gap_mean"])

    Leaves `explain.html`, `scores.csv` and `maps.npz` in the folder.

    Args:
        method: of `attnkit.explain`; what the page shows first. None: the first of `methods`, or
            relevance where the model has attention over the whole image, else Grad-CAM, and of
            captioners without layers of attention what they attend to.
        methods: several of them, each with its rows and maps.
        trust: "fast" and "full" judge each map, as `attnkit.trust` does, with `full=True` or
            without; "none" does not.
        num_images: how many images to show, at most 64.
        target: the class to explain, its name or its number; None: the predicted one.
        nodes: of a graph, their numbers.
        against: another checkpoint, whose maps are shown next to the first ones.
        batch_size: images in a forward.
        seed: of random orders.
        device: where the model runs; None: a GPU if there is one.

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
        against: str | Path | None = None,
        batch_size: int = 64,
        seed: int = 0,
        device: str | None = None,
    ) -> None:
        trust = trust or "none"  # of YAML, where none is null
        if trust not in TRUSTS:
            raise ValueError(f"trust: expected one of {', '.join(TRUSTS)}, got {trust!r}")
        at_least(1, num_images=num_images, batch_size=batch_size)
        at_least(0, seed=seed)
        if num_images > MOST_IMAGES:
            raise ValueError(
                f"num_images: expected {MOST_IMAGES} or fewer, which a page can show, got "
                f"{num_images}; for whole test sets there is attnkit.metrics.PerturbationGap"
            )
        if methods is not None and not methods:
            raise ValueError("methods: expected some, got none")
        asked = [*([method] if method else []), *(methods or [])]
        self.methods = [*dict.fromkeys(asked)]
        self._chooses = not asked
        self.trust, self.num_images, self.target = trust, num_images, target
        self.nodes = None if nodes is None else list(nodes)
        self.against, self.batch_size, self.seed, self.device = against, batch_size, seed, device

    def check(self, explained: Explained) -> None:
        """Check the settings before anything that takes long; choose the method if none was given.

        Raises:
            ValueError: a method, a class, nodes or other arguments that this does not have.
        """
        kind, known = explained.kind, methods_of(_UNITS[explained.kind])
        for name, why in _WITHOUT[kind].items():
            if (given := getattr(self, name)) is not None:
                raise ValueError(f"{name}: expected none for {kind}, got {given!r}; {kind} {why}")
        if self._chooses:
            self.methods = [usual_method(explained)]
        for method in self.methods:
            if method not in known:
                raise ValueError(
                    f"method: expected one of {', '.join(known)} for {kind}, got {method!r}"
                )
        if self.target is not None:
            blind = next((m for m in self.methods if not METHODS[m].has_target), None)
            if blind is not None:
                raise ValueError(
                    f"target: {blind!r} gives the same map for every class; leave one of them out"
                )
            self.class_of(explained)
        if kind == "nodes":
            self._check_nodes(explained)

    def class_of(self, explained: Explained) -> int | None:
        """The number of the class that is asked for.

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
        """How many forwards this will take, and how long, from a first batch; after `check`."""
        return cost_of(self._asked(explained), explained)

    def num_steps(self, explained: Explained) -> int:
        """How often `step` is called."""
        if explained.kind == "nodes":
            return len(self.methods) * len(self.nodes or ())
        return len(self.methods) * (1 if self.trust == "none" else 2) + 1

    def __call__(
        self,
        explained: Explained,
        folder: str | os.PathLike[str],
        *,
        title: str = "Explanations",
        facts: Sequence[str] = (),
        against: Explained | None = None,
        step: Step = lambda doing: None,
    ) -> Findings:
        """Explain, judge and write; returns what was found.

        Args:
            explained: the model and what it is asked.
            folder: where to write.
            title: of the page.
            facts: about the model and how the images were chosen, for the page.
            against: another model and the same images.
            step: told what is done next.

        Raises:
            ValueError, TypeError, RuntimeError: as `attnkit.explain` and `attnkit.trust`.
        """
        self.check(explained)
        asked = self._asked(explained)
        if explained.kind == "images":
            found = explain_images(asked, explained, against, step)
        elif explained.kind == "sentences":
            found = explain_sentences(asked, explained, step)
        else:
            found = explain_nodes(asked, explained, against, step)
        folder = Path(folder)
        found.write(folder)
        facts = [*facts, f"table: {found.caption}"] if found.caption else facts
        headings, *rows = found.shown
        table = Table([heading.replace("\n", " ") for heading in headings], rows)
        write_page(folder / PAGE, title=title, facts=facts, table=table, sections=found.sections)
        return found

    def _asked(self, explained: Explained) -> Asked:
        return Asked(
            methods=tuple(self.methods),
            target=self.class_of(explained),
            trust=self.trust,
            nodes=tuple(self.nodes or ()),
            batch_size=self.batch_size,
            seed=self.seed,
        )

    def _check_nodes(self, explained: Explained) -> None:
        number = len(explained.inputs[0])
        if not self.nodes:
            raise ValueError(
                f"nodes: expected the numbers of the nodes to explain, 0 to {number - 1}, such as "
                "nodes=[12,51]"
            )
        for node in self.nodes:
            if not 0 <= node < number:
                raise ValueError(f"nodes: expected numbers from 0 to {number - 1}, got {node}")
