"""Many graphs in files of one's own: equal in every form; what is wrong is named with its place."""

import csv
import gzip

import numpy as np
import pytest
import torch

from attnkit.launch.main import main
from attnkit.lightning import UserError
from attnkit.tasks.graphs import GraphsFilesData

OWNERS = np.repeat(np.arange(6), (3, 2, 5, 1, 4, 3))  # of the nodes of graph_files.graphs_arrays
NAMES = ("f", "b", "a", "c", "e", "d")
SPLITS = {"train": np.array([4, 0, 1]), "val": np.array([2]), "test": np.array([5, 3])}


def written(graph_files, folder, ending="csv", **changes):
    parts = graph_files.graphs_arrays() | SPLITS | changes
    given = {name: part for name, part in parts.items() if isinstance(part, np.ndarray)}
    graph_files.write_own(folder, given, ending)
    for name, text in parts.items():
        if isinstance(text, str):
            (folder / f"{name}.csv").write_text(text)
    return folder


def ready(folder, stage="fit", **options):
    data = GraphsFilesData(folder, **options)
    data.setup(stage)
    return data


@pytest.mark.parametrize("ending", ["npy", "csv", "txt.gz", "npz"])
def test_every_form_is_the_same_graphs(graph_files, tmp_path, ending):
    parts = graph_files.graphs_arrays() | SPLITS
    if ending == "npz":
        np.savez(tmp_path / "all.npz", **parts)
        data = ready(tmp_path / "all.npz")
    else:
        data = ready(written(graph_files, tmp_path, ending))
    graphs = data.graphs
    assert graphs.sizes.tolist() == list(graph_files.SIZES)
    np.testing.assert_array_equal(graphs.x, parts["features"])
    assert graphs.y.tolist() == parts["labels"].tolist()
    weight_of = {tuple(edge): w for edge, w in zip(parts["edges"].tolist(), parts["edge_weight"],
                                                   strict=True)}  # fmt: skip
    found = dict(zip(map(tuple, graphs.edge_index.T.tolist()), graphs.edge_weight, strict=True))
    assert found == pytest.approx(weight_of)
    owners = OWNERS[graphs.edge_index[0].numpy()]
    assert (owners == np.sort(owners)).all()  # as `Graphs` needs them
    for name in ("train", "val", "test"):
        assert data.sets[name].numbers.tolist() == sorted(parts[name].tolist())
    batch = graphs.batch(torch.tensor([2]))
    assert batch.num_edges == 5 * 4
    assert int(batch.edge_index.max()) == 4


def test_graphs_by_name_and_values_with_a_header(graph_files, tmp_path):
    names = "graph\n" + "".join(f"{NAMES[owner]}\n" for owner in OWNERS)
    values = "height,width\n1.5,3\n,2\n2,nan\n4,1\n5,1\n6,7\n"
    splits = {"train": "a\ne\nf\n", "val": "d\n", "test": "b\nc\n"}
    root = written(graph_files, tmp_path, graphs=names, labels=values, **splits)
    data = ready(root, target="numbers")
    assert data.graph_names == list(NAMES)
    assert data.class_names == ["height", "width"]
    assert data.sets["train"].numbers.tolist() == [0, 2, 4]
    assert data.sets["test"].numbers.tolist() == [1, 3]
    wanted = torch.tensor([[1.5, 3], [torch.nan, 2], [2, torch.nan], [4, 1], [5, 1], [6, 7]])
    torch.testing.assert_close(data.graphs.y, wanted, equal_nan=True)
    for second, word in ((torch.nan, ""), (2, "2")):  # whole numbers beyond int64 alone, too
        labels = f"1\n{word}\n3\n4\n5\n6e23\n"
        root = written(graph_files, tmp_path / f"one{word}", labels=labels)
        found = torch.cat([graph.y for graph in GraphsFilesData(root, target="numbers").load()])
        wanted = torch.tensor([1, second, 3, 4, 5, 6e23])
        torch.testing.assert_close(found.flatten(), wanted, equal_nan=True)


def test_labels_are_truths_or_0_and_1(graph_files, tmp_path):
    text = "ring,tree\nTrue,0\nFalse,1\n,1\nTrue,0\nFalse,0\nTrue,1\n"
    data = ready(written(graph_files, tmp_path, labels=text), target="labels")
    assert data.class_names == ["ring", "tree"]
    assert data.graphs.y[:, 0].nan_to_num(9).tolist() == [1, 0, 9, 1, 0, 1]
    assert data.graphs.y[:, 1].tolist() == [0, 1, 1, 0, 0, 1]
    for header in ("1st,tree", "2 legs,True friend"):
        text = text.replace(text.partition("\n")[0], header)
        data = ready(written(graph_files, tmp_path / "c", labels=text), target="labels")
        assert data.class_names == header.split(",")
    made = ready(written(graph_files, tmp_path / "b", labels=np.eye(6, 4), ending="npy"),
                 target="labels")  # fmt: skip
    assert made.class_names == ["0", "1", "2", "3"]


def test_nodes_of_many_graphs(graph_files, tmp_path):
    labels = np.arange(18) % 4
    data = ready(written(graph_files, tmp_path, labels=labels), level="node")
    assert data.graphs.y.tolist() == labels.tolist()
    values = np.stack([labels / 2, labels + 1], axis=1)
    data = ready(written(graph_files, tmp_path, labels=values), level="node", target="numbers")
    np.testing.assert_array_equal(data.graphs.y, values)
    assert data.graphs.batch(torch.tensor([2])).y.tolist() == values[5:10].tolist()
    root = written(graph_files, tmp_path, labels=np.where(np.arange(18)[:, None] == 7, 2, 1))
    with pytest.raises(UserError, match=r"labels.csv, line 8: expected labels of 0, 1 or NaN, got"):
        ready(root, level="node", target="labels")


def test_undirected_and_without_splits(graph_files, tmp_path):
    parts = graph_files.graphs_arrays(4)
    half = parts["edges"][parts["edges"][:, 0] < parts["edges"][:, 1]]
    lacking = dict.fromkeys(("train", "val", "test", "edge_weight"))
    root = written(graph_files, tmp_path, **(parts | lacking | {"edges": half}))
    data = ready(root, undirected=True)
    assert data.graphs.edge_index.shape[1] == len(parts["edges"])
    assert [len(items) for items in data.sets.values()] == [15, 3, 6]


def test_predicts_without_labels_and_splits(graph_files, tmp_path):
    root = written(graph_files, tmp_path, labels=None, val=None)
    assert len(ready(root, "predict").graphs) == 6


def test_by_command(graph_files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = "".join(f"{NAMES[owner]}\n" for owner in OWNERS)
    splits = {"train": "e\nf\nb\n", "val": "a\n", "test": "d\nc\n"}
    written(graph_files, tmp_path / "six", graphs=names, **splits)
    few = ("model.hidden_channels=8", "trainer.max_epochs=1", "trainer=cpu", "run_dir=made")
    assert main(["task=graph", "level=graph", "data=graphs_files", "data.root=six", *few]) == 0
    (tmp_path / "six/labels.csv").unlink()
    assert main(["run=predict", "ckpt=made", "run_dir=said"]) == 0
    rows = list(csv.DictReader((tmp_path / "said/predictions.csv").open()))
    assert [(row["graph"], row["name"]) for row in rows] == [
        (str(number), name) for number, name in enumerate(NAMES)
    ]


# --- bad input ------------------------------------------------------------------------------------


def rows(values):
    return "".join(f"{value}\n" for value in values)


def owners(**changes):
    return rows(changes.get(f"_{place}", owner) for place, owner in enumerate(OWNERS))


NUMBERS = {"target": "numbers"}
BAD = {
    "not in order": ({"graphs": owners(_4=0)},
                     "graphs.csv, line 5: expected graph 1 or 2, got 0: graphs are numbered"),
    "skips one, which has no nodes": ({"graphs": rows(OWNERS + (OWNERS > 1))},
                                      "graphs.csv, line 6: expected graph 1 or 2, got 3"),
    "from 1 on": ({"graphs": rows(OWNERS + 1)}, "graphs.csv, line 1: expected graph 0, got 1"),
    "no whole number": ({"graphs": owners(_2=0.5)},
                        "graphs.csv: expected whole numbers or names, got float64"),
    "names apart": ({"graphs": rows([*"aaabbccccc", *"adddd", *"fff"])},
                    "graphs.csv, line 11: the nodes of graph 'a' are not together; sort"),
    "rows of nodes": ({"graphs": rows(OWNERS[:-1])}, "graphs.csv: expected 18 rows, the graph of"),
    "two columns": ({"graphs": rows(f"{one},1" for one in OWNERS)}, r"each node, got \[18, 2\]"),
    "labels of fewer": ({"labels": rows([0, 1, 2])},
                        "labels.csv: expected 6 labels, one per graph, got 3"),
    "numbers of more": ({"labels": rows(["1.5,2"] * 8)} | NUMBERS,
                        "labels.csv: expected 6 rows of numbers, one per graph, got .8, 2."),
    "a header, or an empty line": ({"labels": "label\na\nb\n\nb\na\nb\n"},
                                   "labels.csv, line 4: is empty, which may be a row without a"),
    "a class below": ({"labels": rows([0, 1, -4, 0, 0, 0])},
                      "labels.csv, line 3: graph 2 is of class -4"),
    "between two graphs": ({"edges": "1,2\n0,1\n2,3\n1,2\n", "edge_weight": None},
                           "edges.csv, line 3: joins node 2 of graph 0 and node 3 of graph 1"),
    "between, of an array": ({"edges": np.array([[0, 1], [1, 2], [0, 17]]), "edge_weight": None,
                              "ending": "npy"},
                             "edges.npy, edge 2: joins node 0 of graph 0 and node 17 of graph 5"),
    "an unknown graph": ({"test": rows([3, 6])},
                         "test.csv, line 2: there is no graph 6: expected 0 to 5"),
    "an unknown name": ({"graphs": rows(NAMES[one] for one in OWNERS), "train": rows("abe"),
                         "val": rows("d"), "test": rows(["c", "g"])},
                        "test.csv, line 2: 'g' is not the name of a graph"),
    "an unknown name alone": ({"graphs": rows(NAMES[one] for one in OWNERS), "train": rows("abe"),
                               "val": rows("g"), "test": rows("cd")},
                              "val.csv: expected names of graphs, got 'g' alone, which is none"),
    "several masks": ({"train": rows(["True,True"] * 6)}, r"train.csv: expected a mask .6., got"),
    "a split is missing": ({"val": None}, "has no val"),
    "neither 0 nor 1": ({"labels": "a,b\n" + rows(["0,1"] * 3 + ["1,2"] + ["0,0"] * 2),
                         "target": "labels"},
                        "labels.csv, line 5: expected labels of 0, 1 or NaN, got 2"),
    "no number": ({"labels": "a,b\n" + rows(["0,1"] * 3 + ["1,NA"] + ["0,0"] * 2)} | NUMBERS,
                  "labels.csv, line 5: expected a number, or nothing where it is not known, "
                  "got 'NA'"),
    "not finite": ({"labels": rows(["0,1.5"] * 3 + ["1,-inf"] + ["0,0"] * 2)} | NUMBERS,
                   "labels.csv, line 4: expected numbers of finite numbers or NaN, got -inf"),
    "an index": ({"labels": "graph,a\n" + rows(f"{one},{one + 0.5}" for one in range(6))} | NUMBERS,
                 "labels.csv: the first column counts the rows or names the graphs"),
    "of train, not known": ({"labels": rows([0, -1, 1, 0, 2, 2])},
                            "labels.csv, line 2: graph 1: it is in train, but has no class"),
    "no known numbers": ({"labels": rows([*["nan,1"] * 2, "1,1", "2,1", "nan,1", "2,1"])} | NUMBERS,
                         "no graph of train has a value of number 0"),
    "features": ({"features": rows(["1,2,3"] * 7 + ["1,inf,3"] + ["1,2,3"] * 10)},
                 "features.csv, line 8, feature 1, is inf, expected finite numbers"),
    "no graphs": ({"graphs": None}, "has no file graphs or batch"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_named(graph_files, tmp_path, name):
    changes, message = BAD[name]
    options = {"target": changes.get("target", "classes")}
    root = written(graph_files, tmp_path, **{k: v for k, v in changes.items() if k != "target"})
    with pytest.raises(UserError, match=message) as error:
        ready(root, **options)
    assert "\n" not in str(error.value)


def test_a_truncated_file_is_named(graph_files, tmp_path):
    root = written(graph_files, tmp_path, graphs=None)
    packed = gzip.compress(rows(OWNERS).encode())
    (root / "graphs.csv.gz").write_bytes(packed[:-9])
    with pytest.raises(UserError, match=r"graphs\.csv\.gz: ends early"):
        ready(root)
