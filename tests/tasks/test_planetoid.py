"""Planetoid's files: made-up ones against PyG, the real Cora, and hostile ones."""

import copyreg
import os
import pickle
import shutil
from collections import defaultdict

import numpy as np
import pytest
import torch
from torch_geometric.datasets import Planetoid

from attnkit.lightning import UserError
from attnkit.tasks.graphs import PlanetoidData


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
    with pytest.raises(UserError, match=rf"PlanetoidData reads names .*{name}, which is refused"):
        PlanetoidData(tmp_path, "CiteSeer").setup()
    assert not marker.exists()


def test_pickles_would_run_if_loaded_otherwise(tmp_path):
    """The same files do harm to who trusts them, or the test above could not fail."""
    marker = tmp_path / "it_ran"
    pickle.loads(hostile(marker)["posix.system"])
    assert marker.exists()


@pytest.mark.parametrize(
    ("part", "content"),
    [
        ("graph", pickle.dumps({1: "text"}, protocol=2)),
        ("graph", pickle.dumps([1, 2], protocol=2)),
        ("graph", b""),
        ("allx", pickle.dumps(np.arange(100.0), protocol=2)[:30]),
        ("allx", pickle.dumps(np.array(["text"]), protocol=2)),
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


def test_wrong_arguments_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"root: no such folder: .*nowhere"):
        PlanetoidData(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"name: expected 'Cora', .* got 'NELL'"):
        PlanetoidData(tmp_path, "NELL")
