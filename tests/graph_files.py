"""Graph data that tests make up, in the formats of the real files; the fixture `graph_files`."""

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
