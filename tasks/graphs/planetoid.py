"""Reads Cora, CiteSeer and PubMed from the files of the Planetoid repository."""

import hashlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.io.planetoid import edge_index_from_dict

from attnkit.core.arguments import choice, existing
from attnkit.lightning.errors import UserError
from attnkit.tasks.graphs.data import GraphDataModule, to_sparse_csr
from attnkit.tasks.graphs.files.pickles import load
from attnkit.tasks.graphs.splits import masks

PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")  # x is a part of allx
NUM_VAL = 500

# SHA-256 of the published files, as far as known.
DIGESTS = {
    "ind.cora.x": "23cfa55d91c6f624233f5eb7b6e3f141f1bd2b2ae39608a63cf5d084bb27baab",
    "ind.cora.tx": "b9afbaa4a400df991f6f02ef677e1e44da55ffc04801fd02f9e673987829226a",
    "ind.cora.allx": "9419ba2f26f5c35243db64aba110e0f35a04851609e0dc5433450676ca6b8543",
    "ind.cora.y": "94465c14eb53e04ca262198dcbb2521ee8af60fb3f3d546cd6ca24a511b0e7d1",
    "ind.cora.ty": "41f5ac76596a1699cc33f53084a2419e92961c42bb75f36fc38e616d348532ad",
    "ind.cora.ally": "2b998f5cc7fedc86e7f97ca2498f47a1ffc1462c29e2d578b23bf3f62b6e7d71",
    "ind.cora.graph": "58f13302f39dde8852dad6fe6d15b89b077b6d7f837626bce671ef80344b383d",
    "ind.cora.test.index": "297ce89af2b51a6a194181c7dbe1796c6a1cf9cd9349a88383b1b1e227867875",
}


class PlanetoidData(GraphDataModule):
    """A citation graph with its public split.

    20 nodes per class are for training, 500 nodes for validation and 1,000 for the test.

    Reads the eight files `ind.<name>.*` in `root/<name>/raw`, `root/raw` or `root`, as
    torch_geometric downloads them, and never writes there. They are pickles, but nothing in them is
    run: a file that names anything but numbers, lists and sparse matrices is refused. A file that
    differs from the published one is read all the same, with a warning that results on it are not
    comparable.

    The graph equals that of `torch_geometric.datasets.Planetoid`, except that `normalize_features`
    also divides rows with a sum below 1 (PubMed's), as GAT's authors do. Nodes that no file
    describes (CiteSeer's 15) have no features and class 0, as in PyG, and are in no split.

    Source: Yang et al., Revisiting Semi-Supervised Learning with Graph Embeddings, 2016.

    Args:
        root: the folder.
        name: Cora, CiteSeer or PubMed.

    The other arguments are those of `GraphDataModule`.

    Raises:
        ValueError: `root` is not a folder, or the name is unknown.
        UserError: in `setup`, if files are missing, refused or do not fit together.
    """

    targets = ("classes",)

    def __init__(
        self,
        root: str | Path,
        name: Literal["Cora", "CiteSeer", "PubMed"] = "Cora",
        *,
        normalize_features: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(normalize_features=normalize_features, **options)
        choice(("Cora", "CiteSeer", "PubMed"), name=name)
        self.root = existing("root", root, folder=True)
        self.graph_name: str = name

    def load(self) -> Data:
        files = self._files()
        _warn_if_unpublished(files.values())
        read = {part: load(files[part]) for part in PARTS[1:-1]}
        tested = _numbers(files["test.index"])
        try:
            return _assembled(tested, **read)
        except (ValueError, TypeError, AttributeError, RuntimeError, IndexError) as error:
            folder = files["graph"].parent
            raise UserError(f"{folder}: the files do not fit together: {error}") from error

    def _files(self) -> dict[str, Path]:
        prefix = f"ind.{self.graph_name.lower()}"
        folders = [self.root / self.graph_name / "raw", self.root / "raw", self.root]
        for folder in folders:
            files = {part: folder / f"{prefix}.{part}" for part in PARTS}
            missing = [path.name for path in files.values() if not path.is_file()]
            if not missing:
                return files
            if len(missing) < len(PARTS):
                raise UserError(f"data.root: {folder} has no {', '.join(missing)}")
        raise UserError(
            f"data.root: no {prefix}.* in {self.root}, its raw/ or its {self.graph_name}/raw/; "
            "they are in the folder data of github.com/kimiyoung/planetoid"
        )


def _assembled(tested: Tensor, tx: Any, allx: Any, y: Any, ty: Any, ally: Any, graph: Any) -> Data:
    """Return the graph.

    Row i of `tx` and `ty` describes node tested[i]; `allx` and `ally` describe the nodes before.
    """
    count = int(tested.max()) + 1
    first, width = allx.shape
    if tested.min() != first or tx.shape != (len(tested), width):
        raise ValueError(
            f"expected {len(tested)} rows of {width} features for nodes from {first} on, got "
            f"{list(tx.shape)} for nodes {tested.min()} to {tested.max()}"
        )
    rows, columns = tx.indices()
    entries = torch.cat([allx.indices(), torch.stack([tested[rows], columns])], dim=1)
    values = torch.cat([allx.values(), tx.values()])
    x = torch.sparse_coo_tensor(entries, values, (count, width), check_invariants=True)

    one_hot = np.zeros((count, ally.shape[1]))
    one_hot[:first] = ally
    one_hot[tested.numpy()] = ty
    return Data(
        x=to_sparse_csr(x.coalesce()),
        y=torch.from_numpy(one_hot.argmax(axis=1)),
        edge_index=edge_index_from_dict(graph, count),
        **masks(count, torch.arange(len(y)), torch.arange(NUM_VAL) + len(y), tested),
    )


def _numbers(path: Path) -> Tensor:
    try:
        numbers = [int(word) for word in path.read_text().split()]
    except ValueError as error:
        raise UserError(f"{path}: expected the number of a node per line") from error
    if not numbers or len(set(numbers)) != len(numbers):
        raise UserError(f"{path}: expected numbers of nodes, each once")
    return torch.tensor(numbers)


def _warn_if_unpublished(files: Any) -> None:
    known = [path for path in files if path.name in DIGESTS]
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in known}
    if differing := [name for name, digest in found.items() if digest != DIGESTS[name]]:
        rank_zero_warn(
            f"{', '.join(differing)}: not the published file (SHA-256 differs); "
            "results are not comparable"
        )
