"""The heterophilous graphs' npz files: a made-up one against PyG, and the real Minesweeper."""

import shutil

import numpy as np
import pytest
import torch
from torch_geometric.datasets import HeterophilousGraphDataset

from attnkit.lightning import UserError
from attnkit.tasks.graphs import HeterophilousData


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
