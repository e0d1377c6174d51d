"""The module on PyG's models: losses and metrics against plain torch and scikit-learn, and runs."""

import csv
import json

import pytest
import sklearn.metrics
import torch
from lightning import seed_everything
from made_graphs import ADAM, CONSTANT, RandomGraph, ready
from task_support import quiet
from torch import nn
from torch.nn import functional as F
from torch_geometric.nn import GAT, GCN

import attnkit
from attnkit.launch.main import main
from attnkit.layers.graph.blocks import SparseDropout, SparseLinear
from attnkit.lightning import ClassReport, UserError
from attnkit.tasks.graphs import (
    DigitsGraphData,
    NodeClassification,
)


def task_of(data, **options):
    # Not GCN: what it divides by counts edges that the last hop of a sample does not have.
    model = GAT(
        data.in_channels, 13, num_layers=2, out_channels=data.num_classes, add_self_loops=False
    )
    return NodeClassification(model, ADAM, CONSTANT, num_classes=data.num_classes, **options)


def test_a_device_takes_the_batch_and_leaves_the_graph():
    """PyG moves a graph in place: a test on a GPU compared keys of both devices."""
    data = ready()
    batches = [next(iter(data.loader(split))) for split in ("train", "val", "test", "predict")]
    for batch in batches:
        batch.to("meta")
    assert batches[0] is batches[1]  # moved once
    data.graph.x = torch.zeros(97, 5)  # what is replaced after setup is trained on
    (batch,) = data.train_dataloader()
    assert batch.x is data.graph.x
    with pytest.raises(RuntimeError, match="call setup"):
        RandomGraph().train_dataloader()
    assert {tensor.device.type for tensor in data.graph.to_dict().values()} == {"cpu"}
    assert data.training_keys().device.type == "cpu"


def test_only_the_stages_nodes_count(tmp_path):
    data = ready()
    frozen = {"_target_": "torch.optim.SGD", "lr": 0.0}
    task = NodeClassification(task_of(data).model, frozen, CONSTANT, num_classes=7)
    trainer = quiet(tmp_path, max_epochs=1)
    trainer.fit(task, datamodule=data)
    found = dict(trainer.callback_metrics)
    found.update(trainer.test(task, datamodule=data, verbose=False)[0])
    graph = data.graph
    with torch.no_grad():
        logits = task.model(graph.x, graph.edge_index)
    for stage in ("train", "val", "test"):
        mask = graph[f"{stage}_mask"]
        expected = F.cross_entropy(logits[mask], graph.y[mask]).item()
        assert float(found[f"{stage}/loss"]) == pytest.approx(expected, rel=1e-5)
        if stage != "train":
            hits = sklearn.metrics.accuracy_score(graph.y[mask], logits[mask].argmax(1))
            assert float(found[f"{stage}/accuracy"]) == pytest.approx(hits)
    assert task.confusion.sum() == 29


def test_gradients_are_those_of_the_training_nodes():
    data = ready()
    task = task_of(data)
    task.log = lambda *_, **__: None
    loss = task.training_step(data.graph, 0)
    graph, mask = data.graph, data.graph.train_mask
    expected = F.cross_entropy(task.model(graph.x, graph.edge_index)[mask], graph.y[mask])
    torch.testing.assert_close(loss, expected)
    ours = torch.autograd.grad(loss, list(task.model.parameters()))
    theirs = torch.autograd.grad(expected, list(task.model.parameters()))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("batch_size", [None, 7])
def test_two_classes_have_the_area_under_the_roc_curve(tmp_path, batch_size):
    data = RandomGraph(2, batch_size=batch_size, num_neighbors=[-1, -1])
    data.setup()
    task = task_of(data)
    found = quiet(tmp_path).test(task, datamodule=data, verbose=False)[0]
    graph, mask = data.graph, data.graph.test_mask
    with torch.no_grad():
        scores = task(graph.x, graph.edge_index).softmax(dim=1)[mask, 1]
    expected = sklearn.metrics.roc_auc_score(graph.y[mask], scores)
    assert found["test/auroc"] == pytest.approx(expected, rel=1e-5)
    assert 0 < expected < 1
    several = quiet(tmp_path).test(task_of(ready()), datamodule=ready(), verbose=False)[0]
    assert "test/auroc" not in several


@pytest.mark.parametrize("batch_size", [None, pytest.param(64, marks=pytest.mark.slow)])
def test_digits_are_learned_from_twenty_of_each(tmp_path, batch_size, capsys):
    seed_everything(1, verbose=False)
    data = DigitsGraphData(batch_size=batch_size, num_neighbors=[5, 5])
    data.setup()
    task = task_of(data, class_names=data.class_names, in_channels=64)
    epochs = 60 if batch_size is None else 15
    trainer = quiet(tmp_path, max_epochs=epochs, callbacks=[ClassReport(tmp_path / "report")])
    trainer.fit(task, datamodule=data)
    assert trainer.test(task, datamodule=data, verbose=False)[0]["test/accuracy"] > 0.9
    assert sum(score.support for score in task.class_scores) == 1000
    with (tmp_path / "report" / "per_class.csv").open() as file:
        assert [row["class"] for row in csv.DictReader(file)] == list("0123456789")
    assert "test, per class" in capsys.readouterr().out


def test_sparse_features_give_what_dense_ones_do(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.dropout, self.embed = SparseDropout(0.0), SparseLinear(64, 16)
            self.convolution = GCN(16, 16, num_layers=1, out_channels=10)

        def forward(self, x, edge_index):
            return self.convolution(self.embed(self.dropout(x)).relu(), edge_index)

    losses = []
    for sparse in (False, True):
        seed_everything(1, verbose=False)
        data = DigitsGraphData(sparse_features=sparse)
        task = NodeClassification(Net(), ADAM, CONSTANT, num_classes=10)
        trainer = quiet(tmp_path, max_epochs=5)
        trainer.fit(task, datamodule=data)
        losses.append(trainer.callback_metrics["val/loss"].item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("batch_size", [None, 10])
def test_every_node_is_predicted_once_in_order(tmp_path, batch_size):
    data = ready(3, batch_size=batch_size, num_neighbors=[-1, -1])
    task = task_of(data, class_names=data.class_names)
    batches = quiet(tmp_path).predict(task, datamodule=data)
    rows = {name: [v for batch in batches for v in batch[name]] for name in batches[0]}
    assert rows["node"] == list(range(97))
    with torch.no_grad():
        best = task(data.graph.x, data.graph.edge_index).softmax(dim=1).max(dim=1)
    assert rows["label"] == ["abc"[number] for number in best.indices]
    assert rows["probability"] == pytest.approx(best.values.tolist(), rel=1e-5)


def test_data_the_module_was_not_made_for_is_refused(tmp_path):
    data = ready()
    with pytest.raises(UserError, match=r"its nodes have 5 features, but .* made for 6"):
        quiet(tmp_path).test(task_of(data, in_channels=6), datamodule=data, verbose=False)
    task = task_of(data, class_names=list("gfedcba"))
    with pytest.raises(UserError, match="classes are not those"):
        quiet(tmp_path).test(task, datamodule=data, verbose=False)


@pytest.fixture
def command(graph_files, tmp_path, monkeypatch, capfd):
    """`attnkit …` with a model of PyG's to choose, in an empty folder."""
    graph_files.write_model(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        code = main(["--config-dir", "mine", *arguments])
        return code, capfd.readouterr()

    return call


def test_from_the_command_line(tmp_path, command):
    quick = ("trainer=cpu", "trainer.max_epochs=2", "logger.tensorboard=null",
             "callbacks.curves=null", "callbacks.nodes=null")  # fmt: skip
    code, shown = command("task=graph", "model=gcn", *quick, "run_dir=run", "data.batch_size=64")
    assert code == 0, shown.err
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["steps"] == 2 * 4
    assert 0 < results["val/loss_best"] < 10
    assert (tmp_path / "run" / "per_class.csv").is_file()

    code, shown = command("run=predict", "ckpt=run", "run_dir=told", "data.batch_size=null")
    assert code == 0, shown.err
    with (tmp_path / "told" / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    columns = [f"p({number})" for number in range(10)]
    assert list(rows[0]) == ["node", "label", "probability", *columns]
    assert [int(row["node"]) for row in rows] == list(range(1797))

    for wrong, message in (
        (["run=predict", "ckpt=run", "images=mine"], "predicts its own data; leave it out"),
        (["run=predict", "ckpt=run", "predict.attention=true"], "predict.attention: model: GCN"),
        (
            ["run=explain", "ckpt=run", "predict.top_k=3"],
            "has no effect in run=explain",
        ),
        (["run=predict", "ckpt=run", "data.split=1"], "data.split: expected 0, the only one"),
        (["task=graph", "model=gcn", "data=planetoid"], "data.root"),
        (["task=graph", "model=gcn", "data=pyg", "data.name=Karate"], "did you mean KarateClub?"),
        (["task=graph", "model=gcn", "data=pyg", "data.name=Entities"], "cannot be read"),
    ):
        code, shown = command(*wrong)
        assert code == 2, wrong
        assert message in shown.err, (wrong, shown.err)
        assert len(shown.err.strip().splitlines()) <= 3


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_a_stage_computes_what_its_nodes_depend_on(layers):
    data = ready()
    model = attnkit.GAT(5, 16, 7, num_layers=layers)
    module = NodeClassification(model, ADAM, CONSTANT, num_classes=7).eval()
    computed = []
    model.layers[0].register_forward_hook(lambda _, __, output: computed.append(len(output)))
    whole = model(data.graph.x, data.graph.edge_index)
    for stage in ("train", "val", "test"):
        mask = data.graph[f"{stage}_mask"]
        computed.clear()
        for _ in range(2):
            logits, labels = module._of_stage(stage, data.graph)
            torch.testing.assert_close(logits, whole[mask])
            assert torch.equal(labels, data.graph.y[mask])
        assert computed[0] == computed[1]
        if layers == 2:
            assert int(mask.sum()) < computed[0] < 97
        if layers == 1:
            assert computed[0] == int(mask.sum())


def test_another_graph_is_another_part():
    """Of the same edges too."""
    data = ready()
    module = NodeClassification(attnkit.GAT(5, 16, 7), ADAM, CONSTANT, num_classes=7).eval()
    for graph in (data.graph, data.graph.clone().update({"x": -data.graph.x})):
        graph.edge_index = data.graph.edge_index
        logits, _ = module._of_stage("train", graph)
        expected = module.model(graph.x, graph.edge_index)[graph.train_mask]
        torch.testing.assert_close(logits, expected)
