"""Graphs in files of one's own and in OGB's folders: equal in every form; wrong ones are named."""

import gzip
import importlib.util
import os

import numpy as np
import pytest
import torch

from attnkit.launch.main import main
from attnkit.lightning import UserError
from attnkit.tasks.graphs import GraphFilesData, OGBFilesData


def ready(root, kind=GraphFilesData, **options):
    data = kind(root, **options)
    data.setup()
    return data


def same_as(data, arrays):
    graph = data.graph
    torch.testing.assert_close(graph.x, torch.from_numpy(arrays["features"]), rtol=0, atol=0)
    assert graph.y.tolist() == arrays["labels"].tolist()
    assert graph.edge_index.t().tolist() == arrays["edges"].tolist()
    for name in ("train", "val", "test"):
        nodes = graph[f"{name}_mask"].nonzero().flatten().tolist()
        assert nodes == sorted(arrays[name].tolist())


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("ending", ["npy", "csv", "tsv", "txt.gz"])
def test_every_form_is_the_same_graph(graph_files, tmp_path, ending):
    arrays = graph_files.own_arrays()
    root = graph_files.write_own(tmp_path / "mine", arrays, ending)
    before = sorted(root.iterdir())
    data = ready(root)
    same_as(data, arrays)
    assert (data.num_classes, data.in_channels) == (3, 5)
    assert sorted(root.iterdir()) == before


def test_one_npz_in_the_names_of_pyg(graph_files, tmp_path):
    arrays = graph_files.own_arrays()
    masks = {f"{n}_mask": np.isin(np.arange(97), arrays[n]) for n in ("train", "val", "test")}
    names = {"x": arrays["features"], "y": arrays["labels"], "edge_index": arrays["edges"].T}
    np.savez(tmp_path / "graph.npz", **names, **masks)
    same_as(ready(tmp_path / "graph.npz"), arrays)


def test_parquet(graph_files, tmp_path):
    arrays = graph_files.own_arrays()
    root = graph_files.write_own(tmp_path, arrays)
    (root / "edges.npy").unlink()
    if importlib.util.find_spec("pyarrow") is None:
        (root / "edges.parquet").write_bytes(b"PAR1")
        with pytest.raises(UserError, match=r"Parquet needs pyarrow: pip install 'attnkit\[parq"):
            ready(root)
        return
    import pyarrow
    from pyarrow.parquet import write_table

    table = pyarrow.table(dict(zip("ab", arrays["edges"].T, strict=True)))
    write_table(table, root / "edges.parquet")
    same_as(ready(root), arrays)
    (root / "edges.parquet").write_bytes((root / "edges.parquet").read_bytes()[:-9])
    with pytest.raises(UserError, match=r"edges.parquet: cannot be read"):
        ready(root)


def test_headers_comments_and_empty_lines(graph_files, tmp_path):
    arrays = graph_files.own_arrays()
    root = graph_files.write_own(tmp_path, arrays)
    lines = [f"{a}\t{b}" for a, b in arrays["edges"].tolist()]
    (root / "edges.npy").unlink()
    (root / "edges.tsv").write_text("\n".join(["# SNAP", "", "source\ttarget", "", *lines]))
    same_as(ready(root), arrays)


def test_words_for_nodes_and_classes(graph_files, tmp_path):
    arrays = graph_files.own_arrays()
    root = graph_files.write_own(tmp_path, {"features": arrays["features"]})
    names = [f"node {number}" for number in range(97)]
    classes = np.array(["dog", "ant", "cat"])
    (root / "nodes.txt").write_text("\n".join(names))
    pairs = [f"{names[a]},{names[b]}" for a, b in arrays["edges"].tolist()]
    (root / "edges.csv").write_text("\n".join(["from,to", *pairs]))
    (root / "labels.csv").write_text("\n".join(["kind", *classes[arrays["labels"]]]))
    for split in ("train", "val", "test"):
        (root / f"{split}.txt").write_text("\n".join(names[node] for node in arrays[split]))
    data = ready(root)
    assert data.node_names == names
    assert data.class_names == ["ant", "cat", "dog"]
    same_as(data, {**arrays, "labels": np.array([2, 0, 1])[arrays["labels"]]})
    (root / "classes.txt").write_text("\n".join(classes))
    data = ready(root)
    assert data.class_names == classes.tolist()
    same_as(data, arrays)


def test_a_random_split_is_of_nodes_with_a_label(graph_files, tmp_path):
    arrays = {
        k: v for k, v in graph_files.own_arrays().items() if k not in ("train", "val", "test")
    }
    arrays["labels"][:11] = -1
    root = graph_files.write_own(tmp_path, arrays)
    graph = ready(root, seed=3).graph
    used = torch.stack([graph[f"{name}_mask"] for name in ("train", "val", "test")]).sum(dim=0)
    assert used.tolist() == [0] * 11 + [1] * 86
    assert torch.equal(ready(root, seed=3).graph.train_mask, graph.train_mask)
    assert not torch.equal(ready(root, seed=4).graph.train_mask, graph.train_mask)


def test_undirected_edges_are_there_once(graph_files, tmp_path):
    arrays = graph_files.own_arrays()
    data = ready(graph_files.write_own(tmp_path, arrays), undirected=True)
    pairs = {tuple(pair) for pair in arrays["edges"].tolist()}
    expected = sorted(pairs | {(b, a) for a, b in pairs})
    assert sorted(map(tuple, data.graph.edge_index.t().tolist())) == expected


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int8])
def test_only_the_rows_of_a_batch_are_read(graph_files, tmp_path, kind):
    arrays = graph_files.own_arrays()
    arrays["features"] = (arrays["features"] * 7).astype(kind)
    data = ready(graph_files.write_own(tmp_path, arrays), batch_size=7)
    assert data.graph.x.dtype == torch.from_numpy(arrays["features"]).dtype
    for batch in data.val_dataloader():
        expected = torch.from_numpy(arrays["features"]).float()[batch.n_id]
        torch.testing.assert_close(batch.x, expected, rtol=0, atol=0)
    # Written behind its back, and seen: nothing was copied.
    on_disk = np.load(tmp_path / "features.npy", mmap_mode="r+")
    on_disk[:] = 1
    on_disk.flush()
    assert all((batch.x == 1).all() for batch in data.val_dataloader())


def test_oddities_are_counted(graph_files, tmp_path):
    arrays = graph_files.own_arrays()
    more = [arrays["edges"][:3], [[4, 4], [5, 5]]]
    arrays["edges"] = np.concatenate([arrays["edges"], *more])
    root = graph_files.write_own(tmp_path, arrays)
    expected = r"edges.npy: 3 edges are given again and 2 lead from a node to itself; they count"
    with pytest.warns(UserWarning, match=expected):
        data = ready(root)
    same_as(data, arrays)


def test_splits_that_overlap_are_said(graph_files, tmp_path):
    arrays = graph_files.own_arrays()
    arrays["val"][:2] = arrays["train"][:2]
    expected = f"train and val share nodes .2, such as {min(arrays['train'][:2])}."
    with pytest.warns(UserWarning, match=expected):
        ready(graph_files.write_own(tmp_path, arrays))


def test_a_node_twice_in_a_split_is_said(graph_files, tmp_path):
    arrays = graph_files.own_arrays()
    arrays["val"] = np.append(arrays["val"], arrays["val"][2])
    expected = f"val.npy: node {arrays['val'][2]} is there more than once; it counts once"
    with pytest.warns(UserWarning, match=expected):
        data = ready(graph_files.write_own(tmp_path, arrays))
    same_as(data, graph_files.own_arrays())


def test_numbers_of_classes_with_gaps_are_said(graph_files, tmp_path):
    arrays = graph_files.own_arrays()
    arrays["labels"] = 3 * arrays["labels"]
    with pytest.warns(UserWarning, match=r"data: no node has class 1, 2, 4, 5"):
        ready(graph_files.write_own(tmp_path, arrays))


def ogb(root, **options):
    return ready(root, OGBFilesData, **options)


def test_ogb_as_published(graph_files, tmp_path):
    arrays = graph_files.write_ogb(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    data = ogb(tmp_path)
    same_as(data, arrays)
    assert data.class_names == ["arxiv cs na", "arxiv cs mm", "arxiv cs lo"]
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "split" / "random").mkdir()
    with pytest.raises(UserError, match=r"split_name: .* which has random, time, got None"):
        ogb(tmp_path)
    same_as(ogb(tmp_path, split_name="time"), arrays)


def test_ogb_in_binary_form(graph_files, tmp_path):
    arrays = graph_files.write_ogb(tmp_path)
    for path in (tmp_path / "raw").iterdir():
        path.unlink()
    labels = arrays["labels"].astype(np.float32)[:, None]
    unused = next(n for n in range(97) if not any(n in arrays[s] for s in ("train", "val", "test")))
    labels[unused] = np.nan  # as of ogbn-papers100M
    np.savez(
        tmp_path / "raw" / "data.npz",
        edge_index=arrays["edges"].T, node_feat=arrays["features"], num_nodes_list=[97],
    )  # fmt: skip
    np.savez(tmp_path / "raw" / "node-label.npz", node_label=labels)
    arrays["labels"][unused] = -1
    same_as(ogb(tmp_path), arrays)


def text(name, content):
    """A change of the folder: a part as text."""

    def change(root):
        (root / name.replace(".csv", ".npy").replace(".gz", "")).unlink(missing_ok=True)
        data = content.encode() if isinstance(content, str) else content
        (root / name).write_bytes(data)

    return change


def array(name, content):
    """A change of the folder: a part as an array."""
    return lambda root: np.save(root / f"{name}.npy", content)


def cut(name, size):
    """A change of the folder: a file without its end."""

    def change(root):
        (root / name).write_bytes((root / name).read_bytes()[:size])

    return change


def ones(nodes=97):
    return np.ones((nodes, 5), np.float32)


def one_wrong(value):
    features = ones()
    features[41, 3] = value
    return features


PACKED = gzip.compress(b"".join(b"%d,%d\n" % (n % 97, n * n % 97) for n in range(9999)))
BAD = {
    "words": (
        text("edges.csv", "1,2\n3,4\nfive,6\n"),
        "edges.csv, line 3: expected 2 whole numbers, got 'five,6'",
    ),
    "floats": (
        text("edges.csv", "a,b\n1,2\n3,4.5\n"),
        "edges.csv, line 3: expected 2 whole numbers, got '3,4.5'",
    ),
    "three columns": (
        text("edges.csv", "1,2,0.5\n"),
        "edges.csv, line 1: expected 2 whole numbers, got '1,2,0.5'",
    ),
    "a line of one": (
        text("edges.csv", "1,2\n\n3\n"),
        "edges.csv, line 3: expected 2 whole numbers, got '3'",
    ),
    "huge": (text("edges.csv", "1,99999999999999999999\n"), "edges.csv, line 1: expected 2 whole"),
    "gaps": (
        text("edges.csv", "a,b\n\n1,2\n3,1044\n"),
        "edges.csv, line 4: there is no node 1044: expected 0 to 96; for other numb",
    ),
    "negative": (text("edges.csv", "1,-2\n"), "edges.csv, line 1: there is no node -2"),
    "no text": (
        text("edges.csv", b"1,2\n\xff\xfe\n"),
        "edges.csv, line 2: expected 2 whole numbers, got '\\\\xff",
    ),
    "gz ends early": (
        text("edges.csv.gz", PACKED[: len(PACKED) // 2]),
        "edges.csv.gz: ends early, after line ",
    ),
    "gz that is none": (
        text("edges.csv.gz", b"1,2\n"),
        "edges.csv.gz: cannot be read: Not a gzipped",
    ),
    "float array": (
        array("edges", np.ones((2, 9))),
        "edges.npy: expected whole numbers [2, edges] or [edges, 2], got float64",
    ),
    "array of three": (
        array("edges", np.ones((3, 9), int)),
        "edges.npy: expected whole numbers [2, edges]",
    ),
    "gaps in an array": (
        array("edges", np.array([[1, 2, 3], [4, 5, 97]])),
        "edges.npy, edge 2: there is no node 97",
    ),
    "npy ends early": (cut("edges.npy", 300), "edges.npy: ends early, after 300 bytes"),
    "header ends early": (cut("edges.npy", 30), "edges.npy: is not an array: "),
    "empty": (cut("features.npy", 0), "features.npy: is empty"),
    "objects": (array("labels", np.array([{}] * 97)), "labels.npy: is not an array: "),
    "NaN": (
        array("features", one_wrong(np.nan)),
        "features.npy: node 41, feature 3, is nan, expected finite numbers",
    ),
    "infinite in text": (
        text("features.csv", "a,b\n" + "1,2\n" * 9 + "3,inf\n" + "1,2\n" * 87),
        "features.csv, line 11, feature 1, is inf",
    ),
    "words for features": (
        text("features.csv", "1,2\n3,x\n"),
        "features.csv, line 2: expected 2 numbers, got '3,x'",
    ),
    "features of one dimension": (
        array("features", np.ones(97)),
        "features.npy: expected numbers [nodes, channels], got float64 [97]",
    ),
    "few labels": (
        array("labels", np.zeros(96, int)),
        "labels.npy: expected 97 labels, one per node, got 96",
    ),
    "few labels in text": (
        text("labels.csv", "0\n" * 96),
        "labels.csv: expected 97 labels, one per node, got 96",
    ),
    "several labels": (
        array("labels", np.zeros((97, 2), int)),
        "labels.npy: expected a whole number per node, got int64 [97, 2]",
    ),
    "half a label": (
        array("labels", np.full(97, 0.5)),
        "labels.npy: expected a whole number per node, got float64 [97]",
    ),
    "class without a name": (text("classes.csv", "a\nb\n"), "labels.npy: node "),
    "unknown class": (
        lambda root: (
            text("classes.csv", "a\nb\n")(root),
            text("labels.csv", "a\n" * 96 + "c\n")(root),
        ),
        "labels.csv, line 97: 'c' is not the name of a class",
    ),
    "unlabelled": (
        text("labels.csv", "class\n" + "0\n1\n" * 48 + "-1\n"),
        "labels.csv, line 98: node 96 of train has no label",
    ),
    "unlabelled, array": (
        array("labels", np.full(97, -1)),
        "labels.npy: node ",
    ),
    "negative label": (
        text("labels.csv", "0\n" * 90 + "-2\n" + "1\n" * 6),
        "labels.csv, line 91: node 90 is of class -2, expected one from 0 on, or -1 for none",
    ),
    "no nodes": (
        array("features", np.ones((0, 5))),
        "features.npy: expected nodes and channels, got [0, 5]",
    ),
    "no channels": (
        array("features", np.ones((97, 0))),
        "features.npy: expected nodes and channels, got [97, 0]",
    ),
    "empty split": (array("val", np.array([], int)), "val.npy: is empty, expected nodes"),
    "empty split in text": (text("val.csv", "node\n"), "val.csv: is empty, expected nodes"),
    "empty mask": (array("val", np.zeros(97, bool)), "val.npy: is empty, expected nodes"),
    "short mask": (
        array("val", np.ones(96, bool)),
        "val.npy: expected numbers of nodes, or a mask bool [97]",
    ),
    "split outside": (
        text("test.csv", "3\n97\n"),
        "test.csv, line 2: there is no node 97: expected 0 to 96",
    ),
    "split outside, array": (
        array("test", np.array([3, -1])),
        "test.npy, place 1: there is no node -1",
    ),
    "one split is not there": (lambda root: (root / "val.npy").unlink(), "has no val"),
    "no features": (
        lambda root: (root / "features.npy").unlink(),
        "has no file features or x with an ending of .npy",
    ),
    "twice": (text("x.csv", "1,2\n"), "expected one of"),
    "few names": (text("nodes.csv", "a\nb\n"), "nodes.csv: expected 97 names, got 2"),
    "a name twice": (text("nodes.csv", "a\n" * 97), "nodes.csv: 'a' occurs twice"),
    "unknown name": (
        lambda root: (
            text("nodes.csv", "".join(f"n{i}\n" for i in range(97)))(root),
            text("edges.csv", "from,to\nn1,n2\nn3,m4\n")(root),
        ),
        "edges.csv, line 3: 'm4' is not the name of a node",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_files_are_named(graph_files, tmp_path, case):
    change, message = BAD[case]
    root = graph_files.write_own(tmp_path)
    change(root)
    with pytest.raises(UserError) as caught:
        ready(root)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


BAD_OGB = {
    "raw/edge": (lambda packed: packed[:-40], "edge.csv.gz: ends early, after line "),
    "raw/node-feat": (
        lambda packed: gzip.compress(b"1,2\n" * 96),
        "node-feat.csv.gz: expected 97 rows, got 96",
    ),
    "raw/node-label": (
        lambda packed: gzip.compress(b"0,1\n" * 97),
        "node-label.csv.gz: expected a whole number per node, got int64 [97, 2]",
    ),
    "raw/num-node-list": (
        lambda packed: gzip.compress(b"3\n4\n"),
        "num-node-list.csv.gz: expected the size of one graph, got 2",
    ),
    "raw/num-edge-list": (
        lambda packed: gzip.compress(b"7\n"),
        "edge.csv.gz: expected 7 edges, got 38",
    ),
    "split/time/valid": (None, "time has no valid.csv.gz"),
}


@pytest.mark.parametrize("name", BAD_OGB)
def test_wrong_folders_of_ogb_are_named(graph_files, tmp_path, name):
    graph_files.write_ogb(tmp_path)
    change, message = BAD_OGB[name]
    path = tmp_path / f"{name}.csv.gz"
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError) as caught:
        ogb(tmp_path)
    assert message in str(caught.value)


def test_a_wrong_file_is_one_line_and_leaves_nothing(graph_files, tmp_path, monkeypatch, capfd):
    graph_files.write_own(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    quick = ("task=graph", "trainer=cpu")
    before = sorted(os.listdir())
    text("edges.csv", "1,2\n3,x\n")(tmp_path / "mine")
    for wrong, message in (
        (
            "data=graph_files data.root=mine",
            "edges.csv, line 2: expected 2 whole numbers, got '3,x'",
        ),
        ("data=graph_files data.root=nowhere", "GraphFilesData: root: no such folder or .npz: "),
        ("data=ogb_files data.root=mine", "has no folder raw"),
    ):
        assert main([*quick, *wrong.split(), "run_dir=made"]) == 2
        said = capfd.readouterr().err
        assert message in said
        assert len(said.strip().splitlines()) == 1, said
        assert sorted(os.listdir()) == before


@pytest.mark.slow
def test_more_ranks_than_seeds(graph_files, tmp_path, monkeypatch, capfd):
    arrays = graph_files.own_arrays()
    arrays["train"] = arrays["train"][:1]
    graph_files.write_own(tmp_path / "mine", arrays)
    monkeypatch.chdir(tmp_path)
    files = ("task=graph", "data=graph_files", "data.root=mine", "data.batch_size=8")
    assert main([*files, "trainer=cpu_ddp", "run_dir=made"]) == 2
    said = capfd.readouterr().err.strip()
    assert "data: 1 train nodes are too few for 2 processes" in said
    assert len(said.splitlines()) == 1, said
    assert os.listdir() == ["mine"]
