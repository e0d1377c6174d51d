"""Planetoid's files: made-up ones against PyG, the real Cora, and hostile ones."""

import copyreg
import os
import pickle
import shutil
from collections import defaultdict

import numpy as np
import pytest
import scipy.sparse
import torch
from torch_geometric.datasets import Planetoid

from attnkit.lightning import UserError
from attnkit.tasks.graphs import PlanetoidData
from attnkit.tasks.graphs.files.pickles import load


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
    graph_files.write_planetoid(tmp_path / "raw", "Cora")
    with pytest.warns(UserWarning, match=r"ind.cora.x, .*not the published file") as caught:
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

    def pickled(content):
        return pickle.dumps(content, protocol=4)

    # getattr(os, "system")(command), which no object can be pickled to
    nested = b"cbuiltins\ngetattr\n(cposix\nsystem\nVsystem\ntR(V" + command.encode() + b"\ntR."
    return {
        "system": (pickled(Calls(os.system, command)), "posix.system"),
        "eval": (pickled(Calls(eval, f"__import__('os').system('{command}')")), "builtins.eval"),
        "in a dict": (pickled({1: [Calls(os.system, command)]}), "posix.system"),
        "nested": (nested, "builtins.getattr"),
        "in a reduce": (pickled(Calls(defaultdict, Calls(os.system, command))), "posix.system"),
        "copyreg": (
            pickled(Calls(copyreg._reconstructor, defaultdict, object, None)),
            "copyreg._reconstructor",
        ),
        "open": (pickled(Calls(open, str(marker), "w")), "io.open"),
        "of a known package": (pickled(Calls(np.memmap, str(marker), "u1", "w+", 0, 1)), "memmap"),
        "old": (b"(S'touch'\nios\nsystem\n.", "os.system"),
    }


@pytest.mark.parametrize("kind", hostile("x"))
def test_hostile_pickles_are_refused_by_name(tmp_path, kind):
    marker, path = tmp_path / "it_ran", tmp_path / "file"
    content, name = hostile(marker)[kind]
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"{path} .*: it names .*{name}, which is refused"):
        load(path)
    assert not marker.exists()


def test_pickles_would_run_if_loaded_otherwise(tmp_path):
    """The same files do harm to who trusts them, or the test above could not fail."""
    marker = tmp_path / "it_ran"
    content, _ = hostile(marker)["system"]
    pickle.loads(content)
    assert marker.exists()


def matrix_with(**changes):
    matrix = scipy.sparse.csr_matrix(np.eye(5, dtype=np.float32))
    vars(matrix).update(changes)
    return matrix


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (matrix_with(indices=np.array([0, 1, 2, 3, 99])), "parts do not fit together"),
        (matrix_with(indices=np.array([0, 1, 2, 3, -1])), "parts do not fit together"),
        (matrix_with(indptr=np.array([0, 1, 2, 3, 4, 500])), "parts do not fit together"),
        (matrix_with(indptr=np.array([0, 4, 2, 3, 4, 5])), "parts do not fit together"),
        (matrix_with(data=np.ones(3)), "parts do not fit together"),
        (np.array([object]), "which is refused"),
        (np.array([{}], dtype=object), "expected numbers"),
        (np.array(["text"]), "expected numbers"),
        ({1: "text"}, "expected a list of nodes at 1"),
        ({1: [2.5]}, "expected a list of nodes at 1"),
        ([1, 2], "a list, expected an array, matrix or dict"),
        (17, "a int, expected an array"),
    ],
)
def test_what_is_no_data_of_planetoid_is_refused(tmp_path, content, message):
    (tmp_path / "file").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(UserError, match=message):
        load(tmp_path / "file")


@pytest.mark.parametrize("cut", [0, 1, 30, 200])
def test_broken_files_are_named(tmp_path, cut):
    whole = pickle.dumps(np.arange(100.0), protocol=2)
    (tmp_path / "file").write_bytes(whole[:cut])
    with pytest.raises(UserError, match="file is not a file of Planetoid"):
        load(tmp_path / "file")
    (tmp_path / "file").write_bytes(whole)
    assert load(tmp_path / "file").tolist() == list(range(100))


def test_arrays_and_matrices_come_back(tmp_path):
    for content in (
        np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        np.array([[True], [False]]),
        np.arange(3, dtype=">f8"),
    ):
        (tmp_path / "file").write_bytes(pickle.dumps(content, protocol=2))
        assert np.array_equal(load(tmp_path / "file"), content)
    (tmp_path / "file").write_bytes(pickle.dumps(matrix_with(), protocol=2))
    found = load(tmp_path / "file")
    assert torch.equal(found.to_dense(), torch.eye(5))


@pytest.mark.parametrize(
    "name", [b"numpy\nndarray", b"numpy\ndtype", b"scipy.sparse.csr\ncsr_matrix"]
)
def test_a_file_cannot_change_how_the_next_is_read(tmp_path, name):
    """BUILD, of the class itself, with an attribute for it."""
    content = b"c" + name + b"\n(N}V__setstate__\ncbuiltins\nlist\nstb."
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UserError, match="is not a file of Planetoid"):
        load(tmp_path / "file")
    (tmp_path / "file").write_bytes(pickle.dumps(matrix_with(), protocol=2))
    assert torch.equal(load(tmp_path / "file").to_dense(), torch.eye(5))


def test_missing_and_misfitting_files_are_named(graph_files, tmp_path):
    with pytest.raises(UserError, match=r"data.root: no ind.cora.\* in"):
        PlanetoidData(tmp_path).setup()
    folder = graph_files.write_planetoid(tmp_path / "raw", "CiteSeer")
    (folder / "ind.citeseer.graph").rename(tmp_path / "graph")
    with pytest.raises(UserError, match=r"has no ind.citeseer.graph"):
        PlanetoidData(tmp_path, "CiteSeer").setup()
    (folder / "ind.citeseer.graph").write_bytes(pickle.dumps({0: [10**6]}, protocol=2))
    with pytest.raises(UserError, match=r"files do not fit together|edge_index has nodes outside"):
        PlanetoidData(tmp_path, "CiteSeer").setup()
    (tmp_path / "graph").rename(folder / "ind.citeseer.graph")
    (folder / "ind.citeseer.test.index").write_text("700\n701")
    message = r"do not fit together: expected .* nodes from 613 on, got .* nodes 700 to 701"
    with pytest.raises(UserError, match=message):
        PlanetoidData(tmp_path, "CiteSeer").setup()
    (folder / "ind.citeseer.test.index").write_text("one")
    with pytest.raises(UserError, match="expected the number of a node per line"):
        PlanetoidData(tmp_path, "CiteSeer").setup()


def test_wrong_arguments_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"root: no such folder: .*nowhere"):
        PlanetoidData(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"name: expected 'Cora', .* got 'NELL'"):
        PlanetoidData(tmp_path, "NELL")
