"""PyG's own data sets: with and without masks, refused and failed ones."""

import os
import pickle
from urllib.error import URLError

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.datasets import KarateClub, Planetoid

from attnkit.lightning import UserError
from attnkit.tasks.graphs import PlanetoidData, PyGData, PyGGraphsData
from attnkit.tasks.graphs.datasets.pyg import PyGSet


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


class Harm:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_files_that_would_run_something_are_refused(graph_files, tmp_path):
    folder = graph_files.write_planetoid(tmp_path / "Cora" / "raw", "Cora", isolated=())
    marker = tmp_path / "it_ran"
    (folder / "ind.cora.graph").write_bytes(pickle.dumps(Harm(f"touch {marker}"), protocol=2))
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
    torch.save(Harm(f"touch {marker}"), processed)
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
def test_wrong_arguments_are_named(arguments, message):
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
