"""Graph data that tests make up, in the formats of the real files; the fixture `graph_files`."""

import gzip
import json
import pickle
from collections import defaultdict

import numpy as np
import scipy.sparse

CLASSES, WIDTH, KNOWN, TRAINED = 3, 11, 613, 41  # of Planetoid's files
HETEROPHILOUS_NODES = 53


def write_planetoid(folder, name="CiteSeer", protocol=2, isolated=(617,)):
    """Eight files as the authors made them; the isolated nodes are described in none."""
    random = np.random.default_rng(0)
    folder.mkdir(parents=True)
    tested = [node for node in range(KNOWN, KNOWN + 23) if node not in isolated]
    random.shuffle(tested)

    def features(count):
        dense = random.random((count, WIDTH)) * (random.random((count, WIDTH)) < 0.3)
        return scipy.sparse.csr_matrix(dense.astype(np.float32))

    def labels(count):
        return np.eye(CLASSES, dtype=np.int32)[random.integers(0, CLASSES, count)]

    graph = defaultdict(list)
    described = [*range(KNOWN), *tested]
    for _ in range(1500):
        one, other = (int(node) for node in random.choice(described, 2))  # some are loops
        graph[one].append(other)
        graph[other].append(one)
    known, known_labels = features(KNOWN), labels(KNOWN)
    parts = {
        "x": known[:TRAINED],
        "y": known_labels[:TRAINED],
        "allx": known,
        "ally": known_labels,
        "tx": features(len(tested)),
        "ty": labels(len(tested)),
        "graph": graph,
    }
    for part, content in parts.items():
        path = folder / f"ind.{name.lower()}.{part}"
        path.write_bytes(pickle.dumps(content, protocol=protocol))
    (folder / f"ind.{name.lower()}.test.index").write_text("".join(f"{node}\n" for node in tested))
    return folder


def heterophilous_arrays():
    """What such a file holds: a binary graph and ten splits."""
    random = np.random.default_rng(0)
    order = np.array([random.permutation(HETEROPHILOUS_NODES) for _ in range(10)])
    return {
        "node_features": random.random((HETEROPHILOUS_NODES, 7)).astype(np.float32),
        "node_labels": random.integers(0, 2, HETEROPHILOUS_NODES),
        "edges": np.array(
            [(i, j) for i in range(HETEROPHILOUS_NODES) for j in range(i) if (i * j) % 11 == 1]
        ),
        "train_masks": order < 27,
        "val_masks": (order >= 27) & (order < 40),
        "test_masks": order >= 40,
    }


def own_arrays(nodes=97, edges=401):
    """The parts of a graph of one's own."""
    random = np.random.default_rng(0)
    order = random.permutation(nodes)
    pairs = np.unique(random.integers(0, nodes, (edges, 2)), axis=0)
    return {
        "edges": pairs[pairs[:, 0] != pairs[:, 1]],
        "features": random.standard_normal((nodes, 5)).astype(np.float32),
        "labels": random.integers(0, 3, nodes),
        "train": order[:31],
        "val": order[31:54],
        "test": order[54:83],
    }


SIZES = (3, 2, 5, 1, 4, 3)  # nodes of graphs


def graphs_arrays(times=1):
    """The parts of six graphs of one's own, or several times six, with their edges in no order."""
    random = np.random.default_rng(0)
    owners = np.repeat(np.arange(6 * times), SIZES * times)
    pairs = np.argwhere((owners[:, None] == owners) & ~np.eye(len(owners), dtype=bool))
    return {
        "graphs": owners,
        "features": random.standard_normal((len(owners), 3)).astype(np.float32),
        "edges": random.permutation(pairs),
        "edge_weight": random.random(len(pairs)).astype(np.float32),
        "labels": np.array([0, 1, 1, 0, 2, 2] * times),
    }


def write_own(folder, arrays=None, ending="npy"):
    """A folder with a file for each part, .npy or text."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in (arrays or own_arrays()).items():
        if ending == "npy":
            np.save(folder / f"{name}.npy", array)
        else:
            write_text(folder / f"{name}.{ending}", array)
    return folder


def write_text(path, array):
    """Rows with commas, or with tabs in a .tsv; packed, if the name says so."""
    between = "\t" if ".tsv" in path.name else ","
    rows = (between.join(map(str, np.atleast_1d(row).tolist())) for row in array)
    text = "".join(f"{row}\n" for row in rows).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def write_ogb(folder):
    """The folder of a graph of OGB as published, and what it holds."""
    arrays = own_arrays()
    files = {
        "raw/edge": arrays["edges"],
        "raw/node-feat": arrays["features"],
        "raw/node-label": arrays["labels"],
        "raw/num-node-list": [97],
        "raw/num-edge-list": [len(arrays["edges"])],
        "split/time/train": arrays["train"],
        "split/time/valid": arrays["val"],
        "split/time/test": arrays["test"],
    }
    for name, array in files.items():
        write_text(folder / f"{name}.csv.gz", array)
    names = ["label idx,arxiv category", "0,arxiv cs na", "1,arxiv cs mm", "2,arxiv cs lo"]
    write_text(folder / "mapping" / "labelidx2arxivcategeory.csv.gz", names)
    return arrays


PPI_SIZES = {"train": (9, 5, 7, 4), "valid": (6,), "test": (8, 4)}  # nodes of each graph


def write_ppi(folder):
    """PyG's folder of PPI with raw files as published, of few nodes, and the labels by split."""
    random = np.random.default_rng(0)
    (folder / "raw").mkdir(parents=True)
    labels = {}
    for split, sizes in PPI_SIZES.items():
        starts, count = np.cumsum([0, *sizes]), sum(sizes)
        links = [
            {"source": int(start) + node, "target": int(start) + (node + 1) % size}
            for start, size in zip(starts, sizes, strict=False)
            for node in range(size)
        ]
        graph = {"directed": False, "multigraph": False, "graph": {},
                 "nodes": [{"id": node} for node in range(count)], "links": links}  # fmt: skip
        labels[split] = random.integers(0, 2, (count, 4))
        labels[split][:2] = [[0] * 4, [1] * 4]  # each label is there
        arrays = {
            "feats": random.standard_normal((count, 5)),
            "graph_id": np.repeat(np.arange(len(sizes)) + 3, sizes),
            "labels": labels[split],
        }
        for name, array in arrays.items():
            np.save(folder / "raw" / f"{split}_{name}.npy", array)
        (folder / "raw" / f"{split}_graph.json").write_text(json.dumps(graph))
    return labels


MODEL = """\
# A model that is not attnkit's: any that takes nodes and edges is trained.
_target_: torch_geometric.nn.GCN
in_channels: null
hidden_channels: 11
num_layers: 2
out_channels: null
"""


def write_model(folder):
    """A configuration folder in which `model=gcn` can be chosen."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "gcn.yaml").write_text(MODEL)
    return folder


LINK_NODES = 31


def link_arrays(kind):
    """What the files of a link set of OGB hold: the edges of `raw`, and by split those of its .pt.

    `kind` is "collab", with edges between papers' authors by year, some of which are in several
    years; "ddi", the same without features; or "citation", of papers that cite others.
    """
    random = np.random.default_rng(0)
    pairs = np.array([(i, j) for i in range(LINK_NODES) for j in range(i) if (i * j + i) % 4 == 1])
    pairs = random.permutation(pairs)
    others = np.array([(i, j) for i in range(LINK_NODES) for j in range(i) if (i * j + i) % 4 == 2])
    others = random.permutation(others)
    known = {"train": pairs[22:], "valid": pairs[:10], "test": pairs[10:22]}
    if kind == "citation":
        splits = {
            name: {"source_node": edges[:, 0], "target_node": edges[:, 1]}
            for name, edges in known.items()
        }
        for name in ("valid", "test"):
            beside = random.integers(1, LINK_NODES, (len(known[name]), 19))
            splits[name]["target_node_neg"] = (known[name][:, 1:] + beside) % LINK_NODES
        return known["train"], splits
    known["train"] = np.concatenate([known["train"], known["train"][:5]])
    known["test"] = np.concatenate([known["test"], known["train"][:2]])  # of a later year again
    splits = {name: {"edge": edges} for name, edges in known.items()}
    splits["valid"]["edge_neg"], splits["test"]["edge_neg"] = others[:37], others[37:80]
    if kind == "collab":
        for split in splits.values():
            split["year"] = np.full(len(split["edge"]), 2017)
            split["weight"] = random.integers(1, 4, len(split["edge"]))
    return known["train"], splits


def write_links(folder, kind="collab"):
    """A link set of OGB, as it is unpacked."""
    import torch

    edges, splits = link_arrays(kind)
    raw, split = folder / "raw", folder / "split" / "time"
    raw.mkdir(parents=True)
    split.mkdir(parents=True)
    tables = {"edge": edges, "num-node-list": [[LINK_NODES]], "num-edge-list": [[len(edges)]]}
    if kind != "ddi":
        tables["node-feat"] = np.random.default_rng(1).random((LINK_NODES, 5)).round(3)
    for name, rows in tables.items():
        with gzip.open(raw / f"{name}.csv.gz", "wt") as file:
            file.writelines(",".join(map(str, row)) + "\n" for row in np.asarray(rows).tolist())
    for name, arrays in splits.items():
        torch.save(arrays, split / f"{name}.pt")
    return folder
