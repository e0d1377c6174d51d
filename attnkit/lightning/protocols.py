"""Protocols with which data modules and task modules describe their data and what to explain."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional


@runtime_checkable
class DescribedData(Protocol):
    """A LightningDataModule that describes its data; a run fills in the model's nulls from it.

        class Cells(LightningDataModule):
            def describe(self):
                return {"image_size": 64, "in_channels": 3, "num_classes": 2,
                        "class_names": ["healthy", "infected"],
                        "mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2]}

    It may also have a method `summary()` that returns a list of lines, printed and logged before a
    run. Both are optional: without `describe()`, `ImageClassification` looks at the first batches
    (`attnkit.tasks.image_classification.describe_batches`).
    """

    def describe(self) -> Mapping[str, Any]:
        """Return plain values by the names of arguments of the module and of the model.

        Call it after `prepare_data()` and `setup("fit")`, before module and model are built. Each
        value fills the argument of its name where the configuration leaves it null; names that
        are not arguments are ignored. Images: `image_size` (side in pixels, or [height, width]),
        `patch_size`, `in_channels`, `num_classes`, `class_names`, and of the training pixels on the
        scale from 0 to 1 `mean` and `std` per channel; of batches that the data module normalises
        itself `normalized_by`, a dict of the `mean` and `std` that it used. Nodes of a graph:
        `in_channels`, `out_channels`, `num_classes`, `class_names`.
        """
        ...


@dataclass(eq=False)
class Explained:
    """A batch for `attnkit.explain`, and what a page shows with its maps.

    `run=explain` works for any LightningModule that has a method `explained(batch)`, which returns
    this:

        class Cells(LightningModule):
            def explained(self, batch):
                images, labels = batch
                return Explained(self, images, pictures=images, truth=labels)

    model: returns logits [batch, classes] of `inputs`; or a captioner; or a model of a graph.
    inputs: images as the model takes them, or a list [channels, height, width] of several sizes,
        for which `pictures` and `masks` are lists too; (x, edge_index) of a graph whose nodes are
        explained; a dictionary of the arguments besides `pairs`, if pairs are explained; or a list
        of dictionaries of arguments, for a model with one answer for each graph.
    of: what of an answer is explained, as in `attnkit.explain`.
    pictures: the images [batch, channels, height, width] as people see them; None: a graph.
    class_names: names of the classes, or of a graph's; empty: their numbers.
    truth: the right class of each image, node or graph; below 0 or None: unknown.
    names: names of the images, such as their files, or of the graphs; empty: their numbers.
    masks: bool [batch, height, width], where the evidence of the right answer is, for
        `attnkit.trust`; None: unknown.
    true_edges: function from a node, or the index of one of several graphs, to the edges that its
        right answer depends on, bool [edges].
    sentences: the captions of a captioner; `words`: the texts of their words.
    named: for each sentence, from the index of a word to the mask of what it names; empty: unknown.
    notes: what a reader should know, one sentence each.
    graphs: the numbers in the data of a list of graphs.
    of_pairs: whether the model answers for pairs of nodes.
    """

    model: nn.Module
    inputs: Any
    pictures: Any = None
    class_names: Sequence[str] = ()
    truth: Annotated[Tensor, "batch", int] | None = None
    names: Sequence[str] = ()
    masks: Any = None
    true_edges: Callable[[int], Tensor | None] | None = None
    sentences: Annotated[Tensor, "batch words", int] | None = None
    words: Sequence[Sequence[str]] = ()
    named: Sequence[Mapping[int, Annotated[Tensor, "height width", bool]]] = ()
    notes: list[str] = field(default_factory=list)
    graphs: Sequence[int] | None = None
    of_pairs: bool = False
    of: Literal["probability", "sigmoid", "logit"] = "probability"

    @property
    def kind(self) -> str:
        """The kind of inputs: `images`, `sentences`, `nodes`, `pairs` or `graphs`."""
        if self.sentences is not None:
            return "sentences"
        if self.graphs is not None:
            return "graphs"
        if self.of_pairs:
            return "pairs"
        return "nodes" if self.pictures is None else "images"

    @property
    def has_sizes(self) -> bool:
        """Whether the images have several sizes, each with a grid of its own."""
        return self.kind in ("images", "sentences") and isinstance(self.inputs, list)

    def alone(self, number: int) -> "Explained":
        """Return one image, or sentence, as a batch of its own."""
        part = slice(number, number + 1)
        found = {name: getattr(self, name) for name in _OF_EACH}
        cut: dict[str, Any] = {
            name: None if each is None else each[part] for name, each in found.items()
        }
        if self.has_sizes:
            lists = ("inputs", "pictures", "masks")
            cut |= {name: each and each[0][None] for name in lists if (each := cut[name])}
        return replace(self, **cut)

    def of_one_size(self) -> "Explained":
        """Return images of several sizes as one tensor of the median size, with a note about it;
        others unchanged."""
        if not self.has_sizes:
            return self
        sizes = sorted((image.shape[-2:] for image in self.inputs), key=lambda size: size.numel())
        size = sizes[len(sizes) // 2]
        note = f"images of different sizes are resized to {size[0]} × {size[1]} pixels"
        made = [
            torch.cat([functional.interpolate(one[None], size, mode="bilinear", antialias=True)
                       for one in images])
            for images in (self.inputs, self.pictures)
        ]  # fmt: skip
        return replace(
            self, inputs=made[0], pictures=made[1], masks=None, notes=[*self.notes, note]
        )

    def name(self, number: int) -> str:
        """Return the name of an image, or its number."""
        return self.names[number] if self.names else f"image {number}"

    def class_name(self, number: int) -> str:
        """Return the name of a class, or its number; "not known" below 0."""
        if number < 0:
            return "not known"
        return self.class_names[number] if number < len(self.class_names) else str(number)


_OF_EACH = ("inputs", "pictures", "truth", "names", "masks", "sentences", "words", "named")


def by_turns(labels: Sequence[int], count: int) -> list[int]:
    """Return indices of labels: the first of each class, then the second of each, and so on."""
    seen: dict[int, int] = {}
    turns = []
    for row, label in enumerate(labels):
        seen[label] = seen.get(label, -1) + 1
        turns.append((seen[label], label, row))
    return [row for _, _, row in sorted(turns)[:count]]


def num_rows(batch: Any) -> int:
    """Return the number of rows of a batch, by its first tensor or list of images of any sizes."""
    if isinstance(batch, Tensor):
        return len(batch)
    values = batch.values() if isinstance(batch, Mapping) else batch
    some = values if isinstance(values, Iterable) else ()
    return next((len(value) for value in some if _has_rows(value)), 0)


def _has_rows(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(image, Tensor) and image.ndim == 3 for image in value)
    return isinstance(value, Tensor) and value.ndim > 0
