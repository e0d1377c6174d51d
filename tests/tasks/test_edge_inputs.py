"""What edges carry reaches the models that take it; weights of classes, and sampled depth."""

import numpy as np
import pytest
import torch
from made_graphs import ADAM, CONSTANT, RandomGraph
from task_support import quiet
from torch.nn import functional as F
from torch_geometric.nn import GAT, GCN

import attnkit
from attnkit.lightning import UserError
from attnkit.tasks.graphs import (
    GraphFilesData,
    NodeClassification,
    OGBFilesData,
)

EDGES, CARRIES = 401, 3


class Random(RandomGraph):
    """Edges with features and weights."""

    def load(self):
        generator = torch.Generator().manual_seed(4)
        attributes = torch.randint(0, 9, (EDGES, CARRIES), generator=generator)
        weights = torch.rand(EDGES, 1, generator=generator)
        return super().load().update({"edge_attr": attributes, "edge_weight": weights})


def ready(**options):
    data = Random(3, **options)
    with pytest.warns(UserWarning, match=r"edges carry edge_attr \[401, 3\] and edge_weight \[401"):
        data.setup()
    return data


def task_of(model, **options):
    return NodeClassification(model, ADAM, CONSTANT, num_classes=3, **options).eval()


def models():
    sep = {"mlp_ratio": 1.0, "separate_self": True, "norm": "layer"}
    both = {"edge_dim": CARRIES, "heads": 2, "num_layers": 2}
    local = {"global_attention": None}
    yield "gat", attnkit.GAT(5, 16, 3, **both), ["edge_attr"]
    yield "sep", attnkit.GAT(5, 16, 3, **both, **sep), ["edge_attr"]
    yield "transformer", attnkit.GraphTransformer(5, 16, 3, **both, **local), ["edge_attr"]
    yield "global", attnkit.GraphTransformer(5, 16, 3, **both), ["edge_attr"]
    joined = attnkit.GraphTransformer(5, 16, 3, **both, **local, expander_degree=2)
    yield "exphormer", joined, ["edge_attr"]
    yield "PyG's GAT", GAT(5, 13, 2, 3, edge_dim=CARRIES), ["edge_attr"]
    yield "PyG's GCN", GCN(5, 13, 2, 3, normalize=False), ["edge_weight"]
    yield "GAT without", attnkit.GAT(5, 16, 3, heads=2), []
    joined = attnkit.GraphTransformer(5, 16, 3, heads=2, **local, num_virtual_nodes=1)
    yield "exphormer without", joined, []
    yield "PyG's GAT without", GAT(5, 13, 2, 3), []
    yield "Polynormer", attnkit.Polynormer(5, 16, 3, heads=2), []
    yield "SGFormer", attnkit.SGFormer(5, 16, 3), []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "read"), [pytest.param(*case, id=name) for name, *case in models() if case[1]]
)
def test_what_edges_carry_reaches_the_model(tmp_path, model, read):
    """The whole graph, a stage's part of it, sub-graphs with all neighbours, and layers."""
    whole, task = ready(), task_of(model)
    graph = whole.graph
    given = {name: graph[name] for name in read}
    with torch.no_grad():
        expected = model(graph.x, graph.edge_index, **given)
        torch.testing.assert_close(task.logits(graph), expected)
        logits, _ = task._of_stage("train", graph)
        torch.testing.assert_close(logits, expected[graph.train_mask])
        for key in given:
            other = graph.clone().update({key: graph[key] + torch.rand_like(graph[key])})
            assert not torch.allclose(task.logits(other), expected)
    if getattr(model, "num_hops", 2) is None:
        return  # sees the nodes of a sub-graph only
    for evaluation in ("sampled", *(["layers"] if hasattr(model, "hops") else [])):
        data = ready(batch_size=17, num_neighbors=[-1, -1], evaluation=evaluation)
        trainer = quiet(tmp_path)
        found = trainer.predict(task, datamodule=data)
        found = torch.tensor([p for batch in found for p in batch["probability"]])
        best = expected.softmax(dim=1).max(dim=1).values
        torch.testing.assert_close(found, best, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "read"), [pytest.param(*case, id=name) for name, *case in models()]
)
def test_what_the_model_does_not_read_is_said(tmp_path, model, read):
    unread = [key for key in ("edge_attr", "edge_weight") if key not in read]
    with pytest.warns(UserWarning, match=f"{' and '.join(unread)} of the edges: not used"):
        quiet(tmp_path, limit_val_batches=0).validate(task_of(model), datamodule=ready())


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_other_edges_is_refused(tmp_path):
    model = attnkit.GAT(5, 16, 3, edge_dim=2)
    with pytest.raises(UserError, match=r"expected edge_attr \[edges, 2\].* got \[edges, 3\]"):
        quiet(tmp_path).validate(task_of(model), datamodule=ready())


def test_edge_features_of_ogb(graph_files, tmp_path):
    arrays = graph_files.write_ogb(tmp_path)
    values = np.random.default_rng(0).random((len(arrays["edges"]), 2)).astype(np.float32)
    graph_files.write_text(tmp_path / "raw" / "edge-feat.csv.gz", values)
    data = OGBFilesData(tmp_path)
    with pytest.warns(UserWarning, match="edges carry edge_attr"):
        data.setup()
    assert np.allclose(data.graph.edge_attr, values)
    assert data.describe()["edge_dim"] == 2
    graph_files.write_text(tmp_path / "raw" / "edge-feat.csv.gz", values[1:])
    with pytest.raises(UserError, match=r"edge-feat.csv.gz: expected \d+ rows, got \d+"):
        OGBFilesData(tmp_path).setup()


@pytest.mark.parametrize(
    ("model", "depth"),
    [
        (attnkit.GAT(5, 16, 3, num_layers=5, norm="batch"), 5),
        (attnkit.GraphTransformer(5, 16, 3, num_layers=3), 3),
        (attnkit.SGFormer(5, 16, 3, num_convolutions=4), 4),
        (GCN(5, 13, 3, 3), 3),
    ],
)
def test_sampling_fewer_hops_than_layers_is_said(tmp_path, model, depth):
    for hops in (depth - 1, depth):
        data = ready(batch_size=17, num_neighbors=[3] * hops)
        nothing = {"limit_train_batches": 0, "limit_val_batches": 0}
        with pytest.warns(UserWarning, match="of the edges: not used") as said:
            quiet(tmp_path, max_epochs=1, **nothing).fit(task_of(model), datamodule=data)
        found = [str(w.message) for w in said if "num_neighbors" in str(w.message)]
        assert len(found) == (hops < depth), found
        assert all(f"training sees {hops} hops" in one for one in found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("given", ["balanced", [0.5, 2, 1], {"fox": 1.0, "cat": 0.5, "dog": 2}])
def test_class_weights_are_in_the_loss_of_training(tmp_path, given):
    data, names = ready(), ["cat", "dog", "fox"]
    task = task_of(GCN(5, 13, 2, 3), class_names=names, class_weights=given)
    data.class_names, labels = names, data.train_labels
    weights = torch.tensor([0.5, 2, 1])
    if given == "balanced":
        weights = len(labels) / (3 * labels.bincount(minlength=3))
        trainer = quiet(tmp_path, max_epochs=1)
        trainer.fit(task, datamodule=data)
        assert {"train/loss", "train/plain_loss"} <= set(trainer.callback_metrics)
    torch.testing.assert_close(task.class_weights, weights)
    task.log, task.trainer = (lambda *_, **__: None), None
    logits = task.eval().logits(data.graph)[data.graph.train_mask]
    expected = F.cross_entropy(logits, labels, weights, reduction="none").mean()
    torch.testing.assert_close(task.training_step(data.graph, 0), expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cat": 1, "dog": 2}, "for each of cat, dog, fox, got none of 'fox'"),
        ({"cat": 1, "dog": 2, "fix": 1}, "for each of cat, dog, fox, got unknown 'fix'"),
        ({"cat": 1, "dog": 2, "fox": -1}, "'balanced' or numbers of 0 or more, got"),
        ({"cat": 1, "dog": 2, "fox": "many"}, "'balanced' or numbers of 0 or more, got"),
        ([1, 2], r"expected 3 \(num_classes\), got 2"),
        ("balance", "'balanced' or numbers of 0 or more, got 'balance'"),
        ([1, float("nan"), 1], "'balanced' or numbers of 0 or more, got"),
    ],
)
def test_wrong_class_weights_are_named(given, message):
    with pytest.raises(ValueError, match=f"class_weights: .*{message}"):
        task_of(GCN(5, 13, 2, 3), class_names=["cat", "dog", "fox"], class_weights=given)


@pytest.mark.parametrize("batch_size", [None, 17])
def test_a_new_graph_without_labels_is_predicted(graph_files, tmp_path, batch_size):
    """Which is refused to train or test on."""
    arrays = graph_files.own_arrays()
    root = graph_files.write_own(
        tmp_path / "new", {name: arrays[name] for name in ("features", "edges")}
    )
    model = attnkit.GAT(5, 16, 3, heads=2)
    task = task_of(model, class_names=["cat", "dog", "fox"])
    data = GraphFilesData(root, split=4, batch_size=batch_size)  # of the run that trained
    found = quiet(tmp_path).predict(task, datamodule=data)
    labels = [label for batch in found for label in batch["label"]]
    graph = data.graph
    expected = model(graph.x, graph.edge_index).argmax(dim=1)
    assert labels == [task.class_names[number] for number in expected]
    with pytest.raises(UserError, match="has no file labels or y"):
        data.setup("fit")
    np.save(root / "labels.npy", np.zeros(97) - 1)  # and labels that name nothing do not matter
    assert len(quiet(tmp_path).predict(task, datamodule=GraphFilesData(root))[0]["label"]) == 97
