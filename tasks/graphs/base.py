"""What the data modules of one graph and of many share: names, sizes and checks of the form."""

from collections.abc import Callable, Sequence
from itertools import combinations, islice
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.types import EVAL_DATALOADERS
from torch import Tensor
from torch_geometric.data import Data

from attnkit.core.arguments import at_least, choice
from attnkit.lightning.errors import UserError
from attnkit.tasks.loaders import SplitData

Target = Literal["classes", "labels", "numbers"]
"""The kind of y: one class, several labels of 0 or 1, or several numbers."""
SPLITS = ("train", "val", "test")
CARRIED = ("edge_attr", "edge_weight")  # attributes of edges, as PyG names them
SHOWN = 5  # classes listed in a warning
CHECKED = 2**24  # numbers that are checked at a time


def checked(
    data: Data,
    target: Target = "classes",
    *,
    predicts: bool = False,
    label_of: Callable[[int], str] = "data: node {}".format,
) -> Data:
    """Return the graph in a uniform form, after checking it.

    y is as `node_targets` returns it, masks are [nodes, splits], and attributes of edges, if there
    are any, are edge_attr [edges, channels] and edge_weight [edges].

    Args:
        data: the graph as loaded.
        target: the kind of y.
        predicts: whether y and masks may be missing; placeholders then replace them.
        label_of: returns where the label of a node is written, for messages.

    Raises:
        UserError: the graph does not have this form.
    """
    if not isinstance(data, Data):
        kind = type(data).__name__
        raise UserError(f"data: load() should give a torch_geometric.data.Data, got {kind}")
    masks = [f"{split}_mask" for split in SPLITS]
    if predicts and isinstance(data.get("x"), Tensor):
        nodes = data.x.shape[0]
        nothing = {name: torch.zeros(nodes, dtype=torch.bool) for name in masks}
        nothing["y"] = torch.full((nodes,), -1)
        data.update({name: made for name, made in nothing.items() if data.get(name) is None})
    for name in ("x", "edge_index", "y", *masks):
        if data.get(name) is None:
            raise UserError(
                f"data: the graph has no {name}; it has {', '.join(sorted(data.keys()))}"
            )
        if not isinstance(data[name], Tensor):
            raise UserError(
                f"data: expected {name} to be a tensor, got {type(data[name]).__name__}"
            )
    count = data.x.shape[0]
    if predicts and target != "classes":
        data.y = torch.full((count, 1), torch.nan)
    data.y = node_targets(data.y, target, count, "data", label_of)
    edges = data.edge_index
    if edges.numel() and (edges.min() < 0 or edges.max() >= count):
        raise UserError(f"data: edge_index has nodes outside 0 to {count - 1}")
    for name in CARRIED:
        values = data.get(name)
        if values is None:
            continue
        if name == "edge_attr" and isinstance(values, Tensor) and values.ndim == 1:
            values = values.unsqueeze(1)
        if name == "edge_weight" and isinstance(values, Tensor) and values.shape[1:] == (1,):
            values = values.flatten()
        dims = 1 + (name == "edge_attr")
        if not isinstance(values, Tensor) or values.ndim != dims or len(values) != edges.shape[1]:
            got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            wanted = [edges.shape[1], "channels"][:dims]
            raise UserError(f"data: expected {name} [{', '.join(map(str, wanted))}], got {got}")
        data[name] = values.float()
    for name in SPLITS:
        mask = data[f"{name}_mask"]
        mask = mask.unsqueeze(1) if mask.ndim == 1 else mask
        if mask.dtype != torch.bool or mask.ndim != 2 or len(mask) != count:
            raise UserError(
                f"data: expected {name}_mask bool [{count}] or [{count}, splits], "
                f"got {mask.dtype} {list(mask.shape)}"
            )
        data[f"{name}_mask"] = mask
    splits = {name: data[f"{name}_mask"].shape[1] for name in SPLITS}
    widest = max(splits.values())
    for name, number in splits.items():
        if number == 1:  # such as one test set for all splits
            data[f"{name}_mask"] = data[f"{name}_mask"].expand(-1, widest)
        elif number != widest:
            raise UserError(f"data: the masks are of different numbers of splits: {splits}")
    return data


def node_targets(
    y: Tensor, target: Target, count: int, where: str, place_of: Callable[[int], str]
) -> Tensor:
    """Return y of a graph's nodes: for classes integers [nodes], else float32 [nodes, outputs].

    Args:
        y: as loaded.
        target: the kind of y.
        count: number of nodes.
        where: the name of the graph, for messages.
        place_of: returns where a node is written, for messages.

    Raises:
        UserError: y has another form.
    """
    got = f"got {y.dtype} {list(y.shape)}"
    if target == "classes":
        y = y.flatten() if y.shape[1:] == (1,) else y
        if y.shape != (count,) or y.is_floating_point():
            raise UserError(
                f"{where}: expected a class per node, y integers [{count}], {got}; "
                "data.target says what it is: classes, labels, numbers"
            )
        return y
    y = y.unsqueeze(1) if y.ndim == 1 else y
    if y.ndim != 2 or len(y) != count or not y.numel():
        raise UserError(f"{where}: expected {target} of each node, y [{count}, {target}], {got}")
    return checked_values(y.float(), target, place_of)


def checked_values(rows: Tensor, target: Target, place_of: Callable[[int], str]) -> Tensor:
    """Return labels or numbers [rows, outputs]; raise a `UserError` at the first wrong value."""
    wrong = rows.isinf()
    if target == "labels":
        wrong = ~(rows.isnan() | (rows == 0) | (rows == 1))
    if len(places := wrong.nonzero()):
        row, column = places[0].tolist()
        expected = "0, 1 or NaN" if target == "labels" else "finite numbers or NaN"
        value = float(rows[row, column])
        raise UserError(f"{place_of(row)}: expected {target} of {expected}, got {value}")
    return rows


def has_target(y: Tensor) -> Tensor:
    """Return bool [rows]: whether the class, or at least one label or number, is known."""
    known = ~y.isnan() if y.is_floating_point() else y >= 0
    return known if known.ndim == 1 else known.any(dim=1)


def check_training(y: Tensor, target: Target, names: Sequence[str], kind: str) -> None:
    """Raise a `UserError` if a label or number is unknown in all rows to train on.

    Args:
        y: [rows, outputs] of the rows to train on.
        target: the kind of y.
        names: names of the outputs; if empty, their numbers are used.
        kind: what a row is: "node" or "graph".
    """
    for place, is_empty in enumerate(y.isnan().all(dim=0).tolist()):
        if is_empty:
            name = names[place] if names else place
            raise UserError(f"data: no {kind} of train has a value of {target[:-1]} {name}")


def check_finite(x: Tensor, place_of: Callable[[int], str]) -> None:
    """Raise a `UserError` at the first feature that is not finite, checking part by part."""
    sparse = None if x.layout == torch.strided else x.to_sparse_coo().coalesce()
    values = x if sparse is None else sparse.values()
    rows = max(1, CHECKED * max(1, len(values)) // max(1, values.numel()))
    for start in range(0, len(values), rows):
        part = values[start : start + rows]
        wrong = (~part.isfinite()).nonzero()
        if not len(wrong):
            continue
        first = wrong[0].clone()
        value = float(part[tuple(first)])
        first[0] += start
        node, *feature = (first if sparse is None else sparse.indices()[:, first[0]]).tolist()
        where = place_of(node) + f", feature {feature[0]}," * bool(feature)
        raise UserError(f"{where} is {value}, expected finite numbers")


def oddities_of(data: Data) -> list[str]:
    """Return warnings about properties of a graph that are allowed but seldom intended."""
    found = []
    for one, other in combinations(SPLITS, 2):
        both = (data[f"{one}_mask"] & data[f"{other}_mask"]).nonzero().flatten()
        if len(both):
            found.append(f"{one} and {other} share nodes ({len(both):,}, such as {int(both[0])})")
    if data.y.ndim == 1:
        found += _odd_classes(data)
    if not data.edge_index.numel():
        found.append("there are no edges")
    return found


def _odd_classes(data: Data) -> list[str]:
    """Return warnings about classes without nodes, or without nodes to train on."""
    found = []
    used = torch.stack([data[f"{split}_mask"] for split in SPLITS]).any(dim=0)
    seen = data.y[data.train_mask].unique()
    unseen = data.y[used & ~torch.isin(data.y, seen)].unique().tolist()
    if unseen:
        found.append(f"no training node has class {_some(unseen)}")
    known = set(data.y.unique().tolist())
    empty = list(islice((c for c in range(max(known)) if c not in known), SHOWN + 1))
    if empty:
        found.append(f"no node has class {_some(empty)}")
    return found


def _some(classes: list[int]) -> str:
    """Return the first few classes as text."""
    return ", ".join(map(str, classes[:SHOWN])) + (", …" if len(classes) > SHOWN else "")


class DescribedGraphs(SplitData):
    """Data module with a class, labels or numbers as the target of each node or graph."""

    targets: tuple[Target, ...]
    """Allowed values of `target`."""

    def __init__(self, target: Target, num_workers: int, seed: int) -> None:
        super().__init__()
        choice(self.targets, target=target)
        at_least(0, num_workers=num_workers, seed=seed)
        self.target: Target = target
        self.num_workers = num_workers
        self.seed = seed
        self.predicts = False
        """Whether targets and splits are not read, and may be missing."""
        self.class_names: list[str] = []
        self._stored: Any = None

    @property
    def stored(self) -> Any:
        """The object with x, y and edge_attr of all nodes and edges, after `setup`."""
        if self._stored is None:
            raise RuntimeError("call setup() first: nothing is loaded yet")
        return self._stored

    @property
    def num_outputs(self) -> int:
        """Number of classes, labels or numbers of a node or graph."""
        return self.num_classes if self.target == "classes" else self.stored.y.shape[1]

    @property
    def num_classes(self) -> int:
        return max(int(self.stored.y.max()) + 1, len(self.class_names))

    @property
    def in_channels(self) -> int:
        """Number of features of a node."""
        return self.stored.x.shape[1]

    def check_names(self, kind: str, names: list[str] | None, count: int) -> None:
        """Raise a `UserError` if the number of names of nodes, graphs or classes is wrong."""
        if names is not None and len(names) != count:
            each = "" if kind == "class" else f", one for each {kind}"
            raise UserError(f"data: expected {count} {kind}_names{each}, got {len(names)}")

    def name_outputs(self) -> None:
        """Check the names of classes, labels or numbers; number them if they have none.

        For prediction there are none, since the module has them.
        """
        self.class_names = [] if self.predicts else self.class_names
        if not self.predicts:
            self.check_names("class", self.class_names or None, self.num_outputs)
            self.class_names = self.class_names or [*map(str, range(self.num_outputs))]

    def describe(self) -> dict[str, Any]:
        """Return the facts that a model and a module need, as plain values; after `setup`."""
        edge_attr = self.stored.edge_attr
        return {
            "in_channels": self.in_channels,
            "out_channels": self.num_outputs,  # what PyG's models call it
            "num_classes": self.num_outputs,
            "num_outputs": self.num_outputs,
            "class_names": self.class_names,
            "target": self.target,
            **({} if edge_attr is None else {"edge_dim": edge_attr.shape[1]}),
        }

    def predict_dataloader(self) -> EVAL_DATALOADERS:
        return self.loader("predict")
