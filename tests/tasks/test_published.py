"""Published graphs: Planetoid's and heterophilous files, and PyG's own data sets."""

import copyreg
import os
import pickle
import shutil
from collections import defaultdict
from urllib.error import URLError

import numpy as np
import pytest
import scipy.sparse
import torch
from torch_geometric.data import Data
from torch_geometric.datasets import HeterophilousGraphDataset, KarateClub, Planetoid

from attnkit.lightning import UserError
from attnkit.tasks.graphs import HeterophilousData, PlanetoidData, PyGData, PyGGraphsData
from attnkit.tasks.graphs.datasets.pyg import PyGSet


def same_graphs(ours, theirs):
    assert torch.equal(ours.x, theirs.x)
    assert torch.equal(ours.y, theirs.y)
    assert torch.equal(ours.edge_index, theirs.edge_index)
    for name in ("train_mask", "val_mask", "test_mask"):
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("below", ["CiteSeer/raw", "raw", "."])
def test_equal_to_pyg_with_an_isolated_node(graph_files, tmp_path, protocol, below):
    folder = graph_files.write_planetoid(tmp_path / "ours" / below, protocol=protocol)
    theirs = tmp_path / "theirs"
    shutil.copytree(folder, theirs / "CiteSeer" / "raw")
    before = sorted((tmp_path / "ours").rglob("*"))
    data = PlanetoidData(tmp_path / "ours", "CiteSeer", normalize_features=False)
    data.setup()
    same_graphs(data.graph, Planetoid(str(theirs), "CiteSeer")[0])
    assert sorted((tmp_path / "ours").rglob("*")) == before
    assert data.graph.x[617].count_nonzero() == 0
    assert not data.graph.test_mask[617]
    assert data.graph.train_mask.sum() == 41


def test_without_isolated_nodes(graph_files, tmp_path):
    graph_files.write_planetoid(tmp_path / "PubMed" / "raw", "PubMed", isolated=())
    data = PlanetoidData(tmp_path, "PubMed", normalize_features=False)
    data.setup()
    same_graphs(data.graph, Planetoid(shutil.copytree(tmp_path, f"{tmp_path}_"), "PubMed")[0])


def test_rows_are_normalized_sparse_or_not(graph_files, tmp_path):
    graph_files.write_planetoid(tmp_path / "raw")
    plain, dense, sparse = (
        PlanetoidData(tmp_path, "CiteSeer", **options)
        for options in ({"normalize_features": False}, {}, {"sparse_features": True})
    )
    for data in (plain, dense, sparse):
        data.setup()
    sums = plain.graph.x.sum(dim=1, keepdim=True)
    assert 0 < sums[sums != 0].min().item() < 1  # PyG leaves those
    expected = torch.where(sums == 0, 0, plain.graph.x / sums)
    torch.testing.assert_close(dense.graph.x, expected)
    assert sparse.graph.x.layout == torch.sparse_csr
    torch.testing.assert_close(sparse.graph.x.to_dense(), expected)


def test_other_files_than_the_published_are_read_with_a_warning(graph_files, tmp_path):
    graph_files.write_planetoid(tmp_path / "raw", "Cora", isolated=())
    with pytest.warns(UserWarning, match="not the published files of Cora") as caught:
        PlanetoidData(tmp_path).setup()
    assert "results are not comparable" in str(caught[0].message)


@pytest.mark.data
@pytest.mark.filterwarnings("error::UserWarning:attnkit")
def test_the_real_cora_is_pygs(data_folder, tmp_path):
    data = PlanetoidData(data_folder / "planetoid", normalize_features=False)
    data.setup()
    shutil.copytree(data_folder / "planetoid" / "Cora" / "raw", tmp_path / "Cora" / "raw")
    same_graphs(data.graph, Planetoid(str(tmp_path), "Cora")[0])
    assert data.graph.num_nodes == 2708
    assert data.homophily == pytest.approx(0.81, abs=0.005)
    assert [int(data.graph[f"{n}_mask"].sum()) for n in ("train", "val", "test")] == [
        140,
        500,
        1000,
    ]


# --- files that would run something ---------------------------------------------------------------


class Calls:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def hostile(marker):
    """Pickles, and the name by which each must be refused; a look-up in one runs `touch`."""
    command = f"touch {marker}"
    # getattr(os, "system")(command), which no object can be pickled to
    nested = b"cbuiltins\ngetattr\n(cposix\nsystem\nVsystem\ntR(V" + command.encode() + b"\ntR."
    objects = {
        "posix.system": Calls(os.system, command),
        "builtins.eval": Calls(eval, f"__import__('os').system('{command}')"),
        "copyreg._reconstructor": Calls(copyreg._reconstructor, defaultdict, object, None),
        "io.open": Calls(open, str(marker), "w"),
        "memmap": Calls(np.memmap, str(marker), "u1", "w+", 0, 1),
    }
    pickled = {name: pickle.dumps({1: [made]}, protocol=4) for name, made in objects.items()}
    return {**pickled, "builtins.getattr": nested, "os.system": b"(S'touch'\nios\nsystem\n."}


@pytest.mark.parametrize("name", hostile("x"))
def test_hostile_pickles_are_refused_by_name(graph_files, tmp_path, name):
    marker, folder = tmp_path / "it_ran", graph_files.write_planetoid(tmp_path / "raw")
    (folder / "ind.citeseer.graph").write_bytes(hostile(marker)[name])
    with pytest.raises(
        UserError, match=rf"ind.citeseer.graph .*: it names .*{name}, which is refused"
    ):
        PlanetoidData(tmp_path, "CiteSeer").setup()
    assert not marker.exists()


def test_pickles_would_run_if_loaded_otherwise(tmp_path):
    """The same files do harm to who trusts them, or the test above could not fail."""
    marker = tmp_path / "it_ran"
    pickle.loads(hostile(marker)["posix.system"])
    assert marker.exists()


def matrix_with(**changes):
    matrix = scipy.sparse.csr_matrix(np.eye(5, dtype=np.float32))
    vars(matrix).update({name: np.array(part) for name, part in changes.items()})
    return matrix


NO_FIT = "a sparse matrix whose parts do not fit together"
NOT_PLANETOIDS = [
    (matrix_with(indices=[0, 1, 2, 3, 99]), NO_FIT),
    (matrix_with(indices=[0, 1, 2, 3, -1]), NO_FIT),
    (matrix_with(indptr=[0, 1, 2, 3, 4, 500]), NO_FIT),
    (matrix_with(indptr=[0, 4, 2, 3, 4, 5]), NO_FIT),
    (matrix_with(data=np.ones(3)), NO_FIT),
    (np.array([{}], dtype=object), "expected numbers"),
    (np.array(["text"]), "expected numbers"),
    (np.zeros(2, [("a", "O")]), "expected numbers"),
]
# BUILD, of the class itself, with an attribute for it, which the next file would be read with
OF_THE_CLASS = b"c%b\n(N}V__setstate__\ncbuiltins\nlist\nstb."


@pytest.mark.parametrize(
    ("part", "content", "message"),
    [
        *(("allx", pickle.dumps(held, protocol=2), message) for held, message in NOT_PLANETOIDS),
        *(("allx", OF_THE_CLASS % name, "") for name in (
            b"numpy\nndarray", b"numpy\ndtype", b"scipy.sparse.csr\ncsr_matrix")),
        ("allx", pickle.dumps(np.arange(100.0), protocol=2)[:30], ""),
        ("graph", b"", ""),
    ],
)  # fmt: skip
def test_files_that_would_crash_their_readers_are_named(
    graph_files, tmp_path, part, content, message
):
    folder = graph_files.write_planetoid(tmp_path / "raw")
    whole = (folder / f"ind.citeseer.{part}").read_bytes()
    (folder / f"ind.citeseer.{part}").write_bytes(content)
    named = rf"ind.citeseer.{part} is not a file of Planetoid: .*{message}"
    with pytest.raises(UserError, match=named):
        PlanetoidData(tmp_path, "CiteSeer").setup()
    (folder / f"ind.citeseer.{part}").write_bytes(whole)
    PlanetoidData(tmp_path, "CiteSeer").setup()


@pytest.mark.parametrize(
    ("part", "content"),
    [
        ("graph", pickle.dumps({1: "text"}, protocol=2)),
        ("graph", pickle.dumps([1, 2], protocol=2)),
        ("test.index", b"one"),
    ],
)
def test_files_that_are_no_planetoids_are_named(graph_files, tmp_path, part, content):
    folder = graph_files.write_planetoid(tmp_path / "raw")
    (folder / f"ind.citeseer.{part}").write_bytes(content)
    with pytest.raises(UserError, match=rf"{folder}: the files cannot be read together: \w+: "):
        PlanetoidData(tmp_path, "CiteSeer").setup()


def test_missing_and_misfitting_files_are_named(graph_files, tmp_path):
    with pytest.raises(UserError, match=r"data.root: no ind.cora.\* in"):
        PlanetoidData(tmp_path).setup()
    folder = graph_files.write_planetoid(tmp_path / "raw", "CiteSeer")
    (folder / "ind.citeseer.graph").rename(tmp_path / "graph")
    with pytest.raises(UserError, match=r"has no ind.citeseer.graph"):
        PlanetoidData(tmp_path, "CiteSeer").setup()
    (folder / "ind.citeseer.graph").write_bytes(pickle.dumps({0: [10**6]}, protocol=2))
    with pytest.raises(UserError, match="edge_index has nodes outside"):
        PlanetoidData(tmp_path, "CiteSeer").setup()


def test_wrong_arguments_of_planetoid_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"root: no such folder: .*nowhere"):
        PlanetoidData(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"name: expected 'Cora', .* got 'NELL'"):
        PlanetoidData(tmp_path, "NELL")


def same_as_pygs(data, theirs, split):
    for name in ("x", "y"):
        assert torch.equal(data.graph[name], theirs[name])
    assert torch.equal(data.graph.edge_index, theirs.edge_index)
    for name in ("train_mask", "val_mask", "test_mask"):
        assert torch.equal(data.graph[name], theirs[name][:, split])


@pytest.mark.parametrize("below", [".", "raw", "amazon_ratings/raw"])
@pytest.mark.parametrize("split", [0, 9])
def test_equal_to_pyg(graph_files, tmp_path, below, split):
    folder = tmp_path / "ours" / below
    folder.mkdir(parents=True)
    np.savez(folder / "amazon_ratings.npz", **graph_files.heterophilous_arrays())
    theirs = tmp_path / "theirs" / "amazon_ratings" / "raw"
    shutil.copytree(folder, theirs)
    before = sorted((tmp_path / "ours").rglob("*"))
    data = HeterophilousData(tmp_path / "ours", "amazon-ratings", split=split)
    data.setup()
    same_as_pygs(
        data, HeterophilousGraphDataset(str(tmp_path / "theirs"), "amazon-ratings")[0], split
    )
    assert data.num_splits == 10
    assert data.is_undirected
    assert sorted((tmp_path / "ours").rglob("*")) == before


@pytest.mark.data
def test_the_real_minesweeper_is_pygs(data_folder, tmp_path):
    raw = tmp_path / "minesweeper" / "raw"
    raw.mkdir(parents=True)
    shutil.copy(data_folder / "heterophilous" / "minesweeper.npz", raw)
    data = HeterophilousData(data_folder / "heterophilous", split=4)
    data.setup()
    same_as_pygs(data, HeterophilousGraphDataset(str(tmp_path), "minesweeper")[0], 4)
    assert (data.graph.num_nodes, data.graph.num_edges, data.num_splits) == (10000, 78804, 10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"edges": None}, "minesweeper.npz has no array edges"),
        ({"test_masks": np.full((10, 53), 2)}, r"test_masks: expected masks of 0 and 1"),
        ({"edges": np.zeros((3, 5), dtype=np.int64)}, r"edges: expected \[edges, 2\]"),
        ({"node_labels": np.array([{}] * 53)}, "node_labels is not a whole array: it holds Py"),
    ],
)
def test_other_files_are_refused(graph_files, tmp_path, change, message):
    content = {**graph_files.heterophilous_arrays(), **change}
    content = {name: array for name, array in content.items() if array is not None}
    np.savez(tmp_path / "minesweeper.npz", **content)
    with pytest.raises(UserError, match=message) as caught:
        HeterophilousData(tmp_path).setup()
    assert "minesweeper.npz" in str(caught.value)


def test_no_npz_and_no_split(graph_files, tmp_path):
    with pytest.raises(UserError, match=r"data.root: no minesweeper.npz in"):
        HeterophilousData(tmp_path).setup()
    (tmp_path / "minesweeper.npz").write_bytes(b"no archive")
    with pytest.raises(UserError, match=r"is not a whole .npz: another kind of file"):
        HeterophilousData(tmp_path).setup()
    (tmp_path / "minesweeper.npz").write_bytes(b"")
    with pytest.raises(UserError, match=r"is not a whole .npz: No data left"):
        HeterophilousData(tmp_path).setup()
    np.savez(tmp_path / "minesweeper.npz", **graph_files.heterophilous_arrays())
    with pytest.raises(UserError, match=r"data.split: expected 0 to 9, got 10"):
        HeterophilousData(tmp_path, split=10).setup()
    with pytest.raises(ValueError, match="root: no such folder"):
        HeterophilousData(tmp_path / "nowhere")


def test_an_error_without_a_message_is_named(graph_files, tmp_path, monkeypatch):
    np.savez(tmp_path / "minesweeper.npz", **graph_files.heterophilous_arrays())

    def fail(*args, **kwargs):
        raise ValueError

    monkeypatch.setattr(np, "load", fail)
    with pytest.raises(UserError, match=r"not a whole .npz: ValueError"):
        HeterophilousData(tmp_path).setup()


def test_files_of_this_form_by_any_name(graph_files, tmp_path):
    """Masks of 0 and 1, another number of splits, and edges that the authors leave directed."""
    arrays = graph_files.heterophilous_arrays()
    for split in ("train", "val", "test"):
        arrays[f"{split}_masks"] = arrays[f"{split}_masks"][:3].astype(np.int64)
    for name in ("chameleon_filtered", "chameleon_filtered_directed"):
        np.savez(tmp_path / f"{name}.npz", **arrays)
        data = HeterophilousData(tmp_path, name, split=2)
        data.setup()
        assert data.graph.num_edges == len(arrays["edges"]) * (2 - ("directed" in name))
        assert data.graph.val_mask.tolist() == arrays["val_masks"][2].astype(bool).tolist()
    with pytest.raises(UserError, match=r"expected data.num_splits=10 splits, got 3"):
        HeterophilousData(tmp_path, name, num_splits=10).setup()


def ready(*arguments, **options):
    data = PyGData(*arguments, **options)
    data.prepare_data()
    data.setup()
    return data


def test_missing_masks_are_made_by_the_seed():
    data = ready("KarateClub", seed=3)
    theirs = KarateClub()[0]
    assert torch.equal(data.graph.edge_index, theirs.edge_index)
    assert torch.equal(data.graph.y, theirs.y)
    masks = torch.stack([data.graph[f"{name}_mask"] for name in ("train", "val", "test")])
    assert masks.sum(dim=0).tolist() == [1] * 34
    assert torch.equal(ready("KarateClub", seed=3).graph.train_mask, data.graph.train_mask)
    assert not torch.equal(ready("KarateClub", seed=4).graph.train_mask, data.graph.train_mask)
    more = ready("KarateClub", val_fraction=0.1, test_fraction=0.1)
    assert more.graph.train_mask.sum() > data.graph.train_mask.sum()


def test_options_reach_the_class():
    options = {"avg_num_nodes": 97, "num_channels": 13, "num_classes": 3, "task": "node"}
    data = ready("FakeDataset", options=options)
    assert data.in_channels == 13
    assert 60 < data.graph.num_nodes < 140
    assert data.num_classes == 3


def test_given_masks_are_used(graph_files, tmp_path):
    """Cora of made-up files, as PyG reads it and as we do."""
    graph_files.write_planetoid(tmp_path / "Cora" / "raw", "Cora", isolated=())
    data = ready("Planetoid", tmp_path, {"name": "Cora"})
    ours = PlanetoidData(tmp_path, normalize_features=False)
    with pytest.warns(UserWarning, match="not the published files"):
        ours.setup()
    for name in ("x", "y", "edge_index", "train_mask", "val_mask", "test_mask"):
        assert torch.equal(data.graph[name], ours.graph[name]), name


def test_files_that_would_run_something_are_refused(graph_files, tmp_path):
    folder = graph_files.write_planetoid(tmp_path / "Cora" / "raw", "Cora", isolated=())
    marker = tmp_path / "it_ran"
    (folder / "ind.cora.graph").write_bytes(
        pickle.dumps(Calls(os.system, f"touch {marker}"), protocol=2)
    )
    with pytest.raises(UserError, match=r"that Planetoid reads names posix.system"):
        ready("Planetoid", tmp_path, {"name": "Cora"})
    assert not marker.exists()
    with pytest.raises(AttributeError):  # what the command returned is not a dict
        Planetoid(str(tmp_path), "Cora")  # without the guard
    assert marker.exists()
    assert pickle.loads(pickle.dumps(PyGData)) is PyGData  # nobody else is held to it


def test_processed_files_that_would_run_something_are_refused(graph_files, tmp_path):
    graph_files.write_planetoid(tmp_path / "Cora" / "raw", "Cora", isolated=())
    ready("Planetoid", tmp_path, {"name": "Cora"})
    (processed,) = (tmp_path / "Cora" / "processed").glob("data.pt")
    marker = tmp_path / "it_ran"
    torch.save(Calls(os.system, f"touch {marker}"), processed)
    with pytest.raises(UserError, match="Planetoid"):
        ready("Planetoid", tmp_path, {"name": "Cora"})
    assert not marker.exists()


def test_a_failed_download_is_one_line(tmp_path, monkeypatch):
    def no_network(*_, **__):
        raise URLError("no route to host")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("torch_geometric.io.fs.cp", no_network)
    monkeypatch.setattr("urllib.request.urlopen", no_network)
    with pytest.raises(UserError, match=r"PolBlogs cannot be read: .*no route to host") as caught:
        PyGData("PolBlogs").prepare_data()
    assert "\n" not in str(caught.value)
    assert str(PyGData("PolBlogs")._set._arguments["root"]).startswith(str(tmp_path / "cache"))


def test_several_graphs_are_refused():
    with pytest.raises(UserError, match="expected one graph, FakeDataset holds 3"):
        ready("FakeDataset", options={"num_graphs": 3})


def test_a_label_of_the_graph_is_refused():
    with pytest.raises(UserError, match="a class per node"):
        ready("FakeDataset", options={"task": "graph"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("KarateKlub",), "has no 'KarateKlub'; did you mean KarateClub"),
        (("os",), "has no 'os'"),
        (("KarateClub", "."), "root: KarateClub reads no files"),
        (("KarateClub", None, {"colour": 1}), "options.colour: KarateClub takes transform"),
        (("KarateClub", None, {"transform": {}}), "options.transform: expected a text, number"),
        (("Planetoid", None, {"root": "."}), "options.root: Planetoid takes"),
    ],
)
def test_wrong_arguments_of_pyg_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        PyGData(*arguments)


def test_wrong_fractions_are_named():
    with pytest.raises(ValueError, match="val_fraction, test_fraction"):
        PyGData("KarateClub", val_fraction=0.6, test_fraction=0.5)


def test_many_graphs_of_a_class():
    options = {"num_graphs": 30, "avg_num_nodes": 9, "num_channels": 5, "num_classes": 3}
    data = PyGGraphsData("FakeDataset", options={**options, "task": "graph"})
    data.setup()
    assert len(data.graphs) == 30
    assert data.describe()["in_channels"] == 5
    assert data.num_outputs == 3
    assert sum(len(items) for items in data.sets.values()) == 30
    with pytest.raises(UserError, match="KarateClub holds one graph, expected many"):
        PyGGraphsData("KarateClub").setup()
    with pytest.raises(ValueError, match="datasets has no 'Zinc'"):
        PyGGraphsData("Zinc")


def test_splits_of_a_class_are_kept(monkeypatch):
    def read(self, split):
        count = {"train": 5, "val": 2, "test": 3}[split]
        edges = torch.zeros(2, 1, dtype=torch.int64)
        return [Data(x=torch.ones(2, 4), edge_index=edges, y=torch.tensor([1.5]))] * count

    monkeypatch.setattr(PyGSet, "read", read)
    data = PyGGraphsData("ZINC", target="numbers")
    data.setup()
    parts = {name: items.numbers.tolist() for name, items in data.sets.items()}
    assert parts == {"train": [0, 1, 2, 3, 4], "val": [5, 6], "test": [7, 8, 9]}
