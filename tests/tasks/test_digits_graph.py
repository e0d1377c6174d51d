"""The default graph, and what every graph data module does with what `load()` gives it."""

import warnings

import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import NearestNeighbors
from torch_geometric.data import Data

from attnkit.lightning import UserError
from attnkit.tasks.graphs import DigitsGraphData, GraphDataModule


def ready(**options):
    data = DigitsGraphData(**options)
    data.setup()
    return data


def test_edges_join_nearest_neighbours_both_ways():
    graph = ready(k=7).graph
    pixels, labels = load_digits(return_X_y=True)
    distances, _ = NearestNeighbors(n_neighbors=8).fit(pixels).kneighbors(pixels)
    kth = torch.from_numpy(distances[:, -1])  # itself is the first
    source, target = graph.edge_index
    between = (torch.from_numpy(pixels)[source] - torch.from_numpy(pixels)[target]).norm(dim=1)
    assert (between <= torch.maximum(kth[source], kth[target]) + 1e-9).all()
    assert (source != target).all()
    assert torch.bincount(target).min() >= 7
    assert graph.is_undirected()
    assert graph.y.tolist() == labels.tolist()
    torch.testing.assert_close(graph.x, torch.from_numpy(pixels / 16).float())


def test_split_is_planetoids_protocol_and_the_seeds():
    graph = ready(seed=3).graph
    masks = torch.stack([graph.train_mask, graph.val_mask, graph.test_mask])
    assert masks.sum(dim=1).tolist() == [200, 500, 1000]
    assert masks.sum(dim=0).max() == 1
    assert torch.bincount(graph.y[graph.train_mask]).tolist() == [20] * 10
    assert torch.equal(ready(seed=3).graph.train_mask, graph.train_mask)
    assert not torch.equal(ready(seed=4).graph.train_mask, graph.train_mask)
    assert not torch.equal(ready(seed=4).graph.test_mask, graph.test_mask)


def test_describes_itself():
    data = ready()
    assert data.describe() == {
        "in_channels": 64,
        "out_channels": 10,
        "num_classes": 10,
        "num_outputs": 10,
        "class_names": list("0123456789"),
        "target": "classes",
    }
    assert (data.num_splits, data.is_undirected) == (1, True)
    source, target = data.graph.edge_index
    same = (data.graph.y[source] == data.graph.y[target]).float().mean().item()
    assert data.homophily == pytest.approx(same)
    assert same > 0.9
    text = str(data)
    assert "1,797 nodes" in text
    assert "(undirected), 64 features, 10 classes, homophily 0.9" in text
    assert "200 / 500 / 1,000" in text
    assert "not set up" in str(DigitsGraphData())


def test_the_whole_graph_is_one_batch():
    data = ready()
    loaders = data.train_dataloader(), data.val_dataloader(), data.predict_dataloader()
    batches = {id(batch): batch for loader in loaders for batch in loader}
    assert [len(loader) for loader in loaders] == [1, 1, 1]
    (batch,) = batches.values()  # one for all stages, so that a GPU holds it once
    assert batch.edge_index is data.graph.edge_index


def test_batches_cover_their_split():
    data = ready(batch_size=64, num_neighbors=[3, 3])
    for name in ("train", "val", "test"):
        loader = getattr(data, f"{name}_dataloader")()
        seen = torch.cat([batch.n_id[: batch.batch_size] for batch in loader])
        mask = data.graph[f"{name}_mask"]
        assert torch.equal(seen.sort().values, mask.nonzero().flatten())
    predicted = [batch.n_id[: batch.batch_size] for batch in data.predict_dataloader()]
    assert torch.equal(torch.cat(predicted), torch.arange(1797))


def test_features_can_be_normalized_and_sparse():
    plain = ready().graph.x
    expected = plain / plain.sum(dim=1, keepdim=True)
    torch.testing.assert_close(ready(normalize_features=True).graph.x, expected)
    both = ready(normalize_features=True, sparse_features=True).graph.x
    assert both.layout == torch.sparse_csr
    assert both.values().numel() == plain.count_nonzero()
    torch.testing.assert_close(both.to_dense(), expected)
    assert torch.equal(ready(sparse_features=True).graph.x.to_dense(), plain)


class Given(GraphDataModule):
    """A graph of 7 nodes, changed as a test says."""

    def __init__(self, change=lambda data: None, **options):
        super().__init__(**options)
        self.change = change

    def load(self):
        mask = torch.eye(7, dtype=torch.bool)
        data = Data(
            x=torch.randn(7, 5),
            y=torch.arange(7) % 3,
            edge_index=torch.tensor([[0, 1], [1, 2]]),
            train_mask=mask[:, :2],
            val_mask=mask[:, 2:4],
            test_mask=mask[:, 5],  # one for both splits
        )
        self.change(data)
        return data


def test_a_split_is_chosen_from_several():
    for split, train in ((0, 0), (1, 1)):
        data = Given(split=split)
        assert data.num_splits == 2  # before setup
        data.setup()
        graph = data.graph
        assert graph.train_mask.nonzero().flatten().tolist() == [train]
        assert graph.val_mask.nonzero().flatten().tolist() == [train + 2]
        assert graph.test_mask.nonzero().flatten().tolist() == [5]
    assert not data.is_undirected


def test_a_row_without_features_stays():
    data = Given(lambda data: data.x[4].zero_(), normalize_features=True, sparse_features=True)
    data.setup()
    sums = data.graph.x.to_dense().abs().sum(dim=1)
    torch.testing.assert_close(sums, torch.tensor([1.0, 1, 1, 1, 0, 1, 1]))


@pytest.mark.parametrize(("rows", "layout"), [(1, torch.sparse_csr), (2, torch.strided)])
def test_features_are_sparse_where_few_are_not_zero(rows, layout):
    def words(data):
        x = torch.zeros(7, 5)
        x[:rows, :3] = 1.0  # 3 of 35, or 6
        data.update({"x": x})

    data = Given(words, sparse_features=None)
    data.setup()
    assert data.graph.x.layout == layout
    assert data.graph.x.to_dense().sum() == 3 * rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("val_mask"), "no val_mask; it has edge_index, test_mask"),
        (lambda data: data.update({"y": data.y.float()}), "a class per node, y integers"),
        (lambda data: data.update({"y": data.y[:3]}), r"y integers \[7\], got torch.int64 \[3\]"),
        (lambda data: data.edge_index.add_(5), "edge_index has nodes outside 0 to 6"),
        (lambda data: data.update({"val_mask": data.val_mask[:4]}), "expected val_mask bool"),
        (
            lambda data: data.update({"val_mask": torch.ones(7, 3, dtype=torch.bool)}),
            "different numbers of splits",
        ),
        (
            lambda data: data.update({"val_mask": torch.zeros(7, dtype=torch.bool)}),
            "no nodes for val in split 0",
        ),
        (lambda data: data.y[0].fill_(-1), "data: node 0 of train has no label"),
        (lambda data: data.update({"y": data.y.tolist()}), "expected y to be a tensor, got list"),
        (
            lambda data: data.x[3, 2].fill_(float("nan")),
            "x of node 3, feature 2, is nan, expected finite numbers",
        ),
        (
            lambda data: data.update({"x": with_infinity(data.x).to_sparse_csr()}),
            "x of node 4, feature 1, is inf",
        ),
    ],
)
def test_wrong_graphs_are_named(change, message):
    with pytest.raises(UserError, match=message):
        Given(change).setup()


def with_infinity(x):
    x[1] = 0  # so that places among the numbers are not those of the matrix
    x[4, 1] = float("inf")
    return x


@pytest.mark.parametrize("loaded", [[1, 2], None, "graph"])
def test_what_is_no_graph_is_named(loaded):
    class Wrong(Given):
        def load(self):
            return loaded

    with pytest.raises(UserError, match=r"load\(\) should give a torch_geometric.data.Data, got"):
        Wrong().setup()


def test_what_is_odd_is_said_at_once():
    def odd(data):
        data.update({"edge_index": data.edge_index[:, :0], "test_mask": data.val_mask})

    with pytest.warns(UserWarning, match="data: ") as said:
        Given(odd).setup()
    (line,) = (str(one.message) for one in said if str(one.message).startswith("data: "))
    assert line == (
        "data: val and test share nodes (1, such as 2); no training node has class 2; "
        "there are no edges"
    )


def test_nothing_odd_is_in_our_own_data():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DigitsGraphData().setup()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k: expected at least 1, got 0"),
        ({"num_val": 0}, "num_val: expected at least 1"),
        ({"split": -1}, "split: expected at least 0, got -1"),
        ({"batch_size": 0}, "batch_size: expected at least 1, got 0"),
        ({"num_neighbors": []}, "num_neighbors: expected a number per layer"),
        ({"num_neighbors": [3, -2]}, "num_neighbors: expected a number per layer"),
        ({"sampler": "dgl"}, "sampler: expected 'attnkit' or 'pyg', got 'dgl'"),
        ({"num_workers": -1}, "num_workers: expected at least 0"),
        ({"seed": -1}, "seed: expected at least 0"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        DigitsGraphData(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": 1}, "data.split: expected 0, the only one, got 1"),
        ({"num_train_per_class": 175}, "data.num_train_per_class: expected at most 174"),
        ({"num_test": 1098}, "data.num_val, data.num_test: expected together at most 1597"),
    ],
)
def test_what_the_digits_do_not_have_is_named(options, message):
    with pytest.raises(UserError, match=message):
        DigitsGraphData(**options).setup()
