"""level=graph: many graphs in one data module, their batches, what is learned, and bad input."""

import csv
import json
import subprocess
import sys
from functools import partial

import pytest
import torch
from lightning import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from task_support import quiet
from torch import nn
from torch_geometric.data import Batch, Data
from torchmetrics.functional.classification import binary_auroc

import attnkit
from attnkit.launch.main import main
from attnkit.lightning import ExactResume, UserError
from attnkit.lightning.callbacks.meter import num_samples
from attnkit.lightning.modules.values import MeanOverLabels
from attnkit.tasks.graphs import (
    DigitGridsData,
    DigitsGraphData,
    GraphClassification,
    GraphsDataModule,
    GraphValues,
    NodeClassification,
)
from attnkit.tasks.graphs.many_graphs import Graphs
from attnkit.tasks.loaders import TokenLists, TokenSampler, cut

SIZES = (3, 1, 7, 2, 5, 11, 4, 6, 2, 9, 3, 8)
EXACT = {"atol": 1e-12, "rtol": 1e-12}


def some_graphs(target="classes", edge_dim=None, sizes=SIZES):
    generator = torch.Generator().manual_seed(3)
    found = []
    for number, size in enumerate(sizes):
        edges = torch.randint(size, (2, 2 * size), generator=generator)
        y = torch.tensor([number % 3])
        if target == "labels":
            y = torch.tensor([[number % 2, number % 3 == 0, torch.nan if number == 4 else 1]])
        elif target == "numbers":
            y = torch.tensor([[size * 10.0, torch.nan if number == 4 else -size]])
        x = torch.randn(size, 5, generator=generator)
        found.append(Data(x=x, edge_index=edges, y=y))
        if edge_dim:
            found[-1].edge_attr = torch.randn(2 * size, edge_dim, generator=generator)
    return found


class Made(GraphsDataModule):
    def __init__(self, graphs, splits=None, **options):
        super().__init__(**{"batch_size": 3, **options})
        self.made, self.splits = graphs, splits

    def load(self):
        self.given_splits = self.splits
        return self.made


def test_graphs_of_two_splits_are_told():
    splits = {"train": torch.tensor([0, 2]), "val": torch.tensor([1]), "test": torch.tensor([2])}
    with pytest.warns(UserWarning, match=r"train and test share graphs \(1, such as 2\)"):
        Made(some_graphs(), splits).setup()


def ready(graphs=None, **options):
    target = options.get("target", "classes")
    data = Made(graphs or some_graphs(target), **options)
    data.setup()
    return data


def model(num_classes=3, **options):
    return attnkit.GraphTransformer(
        5, 12, num_classes, num_layers=2, heads=3, readout="graph", **options
    )


# --- storage and batches --------------------------------------------------------------------------


def test_a_batch_is_pygs_batch_of_its_graphs():
    made = some_graphs(edge_dim=2)
    ours = Graphs.of(made, "classes").batch(torch.tensor([5, 0, 2]))
    theirs = Batch.from_data_list([made[number] for number in (5, 0, 2)])
    for name in ("x", "edge_index", "edge_attr", "y", "batch", "ptr"):
        assert torch.equal(ours[name], theirs[name]), name
    assert ours.number.tolist() == [5, 0, 2]
    assert num_samples(ours) == num_samples(theirs) == 3


MODELS = {
    "GraphTransformer": lambda: model(edge_dim=2),
    "Exphormer": lambda: model(global_attention=None, expander_degree=4, num_virtual_nodes=1),
    "GAT": lambda: attnkit.GAT(5, 12, 3, heads=3, edge_dim=2, readout="graph"),
    "SGFormer": lambda: attnkit.SGFormer(5, 12, 3, readout="graph"),
    "Polynormer": lambda: attnkit.Polynormer(
        5, 12, 3, num_local_layers=2, heads=3, readout="graph", local_steps=0
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_alone_equals_itself_in_a_batch(name):
    seed_everything(1)
    module = GraphClassification(MODELS[name](), num_classes=3).double().eval()
    graphs = Graphs.of(some_graphs(edge_dim=2), "classes")
    graphs.x, graphs.edge_attr = graphs.x.double(), graphs.edge_attr.double()
    together = module.outputs(graphs.batch(torch.arange(len(SIZES))))
    for number, row in enumerate(together):
        alone = module.outputs(graphs.batch(torch.tensor([number])))
        torch.testing.assert_close(alone[0], row, **EXACT)
        one = graphs.batch(torch.tensor([number]))
        features = {"edge_attr": one.edge_attr} if getattr(module.model, "edge_dim", None) else {}
        without = module.model(one.x, one.edge_index, **features)
        torch.testing.assert_close(without, row[None], **EXACT)  # it is one graph
    assert together.std(dim=0).min() > 1e-4  # graphs differ


# --- batches by tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3])
def test_batches_by_tokens_hold_every_graph_once_and_are_as_many_in_every_epoch(world):
    items = ready(some_graphs() * 4, batch_size=None, batch_nodes=13).sets["train"]
    numbers, orders = set(), set()
    for epoch in range(5):
        samplers = [TokenSampler(items, world, rank, seed=7) for rank in range(world)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        parts = [list(sampler) for sampler in samplers]
        assert {len(part) for part in parts} == {len(sampler) for sampler in samplers}
        numbers.add(len(parts[0]))
        orders.add(str(parts))
        lists = [one for part in parts for one in part]
        assert sorted(n for one in lists for n in one) == list(range(len(items)))
        most = max(int(items.sizes[one].sum()) for one in lists)
        assert most <= 13 + int(items.sizes.max())
    assert len(numbers) == 1
    assert min(numbers) > 1
    assert len(orders) == 5


def test_cutting_gives_every_part_a_graph_and_about_the_same_nodes():
    assert cut(torch.tensor([4] * 6), 3) == [2, 2, 2]
    assert cut(torch.tensor([100, 1, 1, 1]), 3) == [1, 1, 2]
    assert cut(torch.tensor([1, 1, 1, 100]), 3) == [2, 1, 1]


def test_evaluation_by_tokens_is_in_order_and_within_the_limit():
    data = ready(batch_size=None, batch_nodes=13)
    loader = data.loader("predict")
    batches = list(loader)
    assert torch.cat([batch.number for batch in batches]).tolist() == list(range(len(SIZES)))
    assert max(len(batch.x) for batch in batches) <= 13
    assert isinstance(loader.sampler, TokenLists)
    assert len(loader) == len(batches)


@pytest.mark.parametrize("by", [{"batch_size": 4}, {"batch_size": None, "batch_nodes": 25}])
def test_a_stopped_training_goes_on_exactly(tmp_path, by):
    def fit(ckpt=None):
        seed_everything(5)
        constant = partial(torch.optim.lr_scheduler.ConstantLR, factor=1.0)
        network = model(dropout_p=0.3)
        module = GraphClassification(network, scheduler=constant, num_classes=3)
        saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
        run = quiet(
            tmp_path, max_epochs=2, enable_checkpointing=True, callbacks=[ExactResume(), saving]
        )
        run.fit(module, datamodule=Made(some_graphs() * 2, **by), ckpt_path=ckpt, weights_only=True)
        assert 6 <= run.global_step <= 10
        return module

    whole = fit()
    weights = {name: value.clone() for name, value in whole.state_dict().items()}
    for step in (2, 5):  # in the middle of epochs
        resumed = fit(tmp_path / f"step={step}.ckpt").state_dict()
        for name, value in weights.items():
            assert torch.equal(value, resumed[name]), (step, name)


# --- what is learned ------------------------------------------------------------------------------


def test_unknown_values_count_in_nothing():
    module = GraphValues(model(3), target="labels", num_outputs=3)
    outputs = torch.tensor([[2.0, -1.0, 5.0], [1.0, 3.0, -2.0]])
    truth = torch.tensor([[1.0, 0.0, torch.nan], [0.0, torch.nan, 1.0]])
    losses = module.losses(outputs, truth)
    known = nn.functional.binary_cross_entropy_with_logits(
        torch.tensor([2.0, -1.0, 1.0, -2.0]), torch.tensor([1.0, 0.0, 0.0, 1.0]), reduction="none"
    )
    torch.testing.assert_close(losses, known)
    metrics = module.metrics()
    for metric in metrics.values():
        metric.update(outputs, truth)
    assert metrics["accuracy"].compute() == 0.5
    assert metrics["auroc"].compute() == 1  # only the first label has 0 and 1: 2 > 1
    metrics["auroc"].reset()
    metrics["auroc"].update(outputs[:1], truth[:1])
    assert metrics["auroc"].compute().isnan()


def test_numbers_are_predicted_in_the_units_of_the_data(tmp_path):
    data = ready(target="numbers")
    module = GraphValues(model(2), target="numbers", num_outputs=2)
    quiet(tmp_path, max_epochs=1).fit(module, datamodule=data)
    values = data.train_labels
    for column in range(2):
        known = values[:, column][~values[:, column].isnan()]
        torch.testing.assert_close(module.target_mean[column], known.mean())
        torch.testing.assert_close(module.target_deviation[column], known.std(unbiased=False))
    batch = data.graphs.batch(torch.arange(3))
    with torch.no_grad():
        plain = module.eval().model(batch.x, batch.edge_index, batch=batch.batch)
        expected = plain * module.target_deviation + module.target_mean
        torch.testing.assert_close(module.outputs(batch), expected)
    truth = torch.tensor([[30.0, torch.nan]])
    mean, deviation = module.target_mean, module.target_deviation
    expected = (mean[0] + deviation[0] - 30).abs() / deviation[0]
    found = module.losses(mean[None] + deviation[None], truth)
    torch.testing.assert_close(found, expected[None])
    metrics = module.metrics()
    for metric in metrics.values():
        metric.update(torch.tensor([[33.0, 1.0], [26.0, 1.0]]), truth.expand(2, -1))
    assert metrics["mae"].compute() == 3.5
    torch.testing.assert_close(metrics["rmse"].compute(), torch.tensor(12.5).sqrt())


def test_all_predictions_have_a_column():
    with pytest.raises(ValueError, match=r"class_names: expected names that differ.* 'name'; re"):
        GraphValues(model(2), target="numbers", num_outputs=2, class_names=["size", "name"])
    with pytest.raises(ValueError, match="got 'a'"):
        GraphValues(model(2), target="labels", num_outputs=2, class_names=["a", "a"])
    names = ["graph", *map(str, range(1000))]  # more than have a column each
    module = GraphValues(model(1001), target="labels", num_outputs=1001, class_names=names)
    batch = Graphs.of(some_graphs(), "classes").batch(torch.arange(2))
    found = module.eval().classify(batch)["labels"]
    wanted = module.outputs(batch).sigmoid()
    for row, pairs in zip(wanted, found, strict=True):
        assert [name for name, _ in pairs] == [names[n] for n in (row > 0.5).nonzero().flatten()]
        assert all(p > 0.5 for _, p in pairs)
        assert len(pairs) > 100


def test_overfitting_validates_batches_by_tokens(tmp_path):
    class Sees(GraphClassification):
        def validation_step(self, batch, batch_idx):
            self.seen.append(batch.number.tolist())

    module = Sees(model(), num_classes=3)
    module.seen = []
    data = Made(some_graphs() * 4, batch_size=None, batch_nodes=13)
    options = {"overfit_batches": 2, "max_epochs": 2}
    quiet(tmp_path, **options).fit(module, datamodule=data)
    first, again = module.seen[:2], module.seen[2:]
    assert first == again
    assert first == [batch.number.tolist() for batch in data.loader("val")][:2]
    assert max(map(len, first)) > 1


def test_what_is_explained_of_a_graph_has_its_answer():
    seed_everything(1)
    module = GraphClassification(model(edge_dim=2), num_classes=3).eval()
    batch = Graphs.of(some_graphs(edge_dim=2), "classes").batch(torch.tensor([5, 1, 2]))
    given = module.explained(batch)
    assert (given.kind, given.graphs, given.truth.tolist()) == ("graphs", [5, 1, 2], [2, 1, 2])
    for row, inputs in zip(module.outputs(batch), given.inputs, strict=True):
        torch.testing.assert_close(module.model(**inputs)[0], row)
    seen = attnkit.explain(given.model, given.inputs[2])
    assert seen.method == "relevance"
    assert seen.edges.shape == (14,)
    lost = attnkit.explain(given.model, given.inputs[2], int(seen.target), "occlusion").edges
    for edge in (0, 9):  # what an edge carries goes with it
        rest = torch.arange(14) != edge
        thin = given.inputs[2] | {
            "edge_index": given.inputs[2]["edge_index"][:, rest],
            "edge_attr": given.inputs[2]["edge_attr"][rest],
        }
        left = module.model(**thin)[0, int(seen.target)]
        torch.testing.assert_close(seen.logit - left, lost[edge], atol=1e-5, rtol=1e-4)


def test_graphs_without_edges_are_not_explained():
    graphs = some_graphs()
    graphs[4].edge_index = torch.empty(2, 0, dtype=torch.int64)
    parts = {"train": [0, 1, 2], "val": [3, 5], "test": [4, 6, 7, 9, 10]}
    data = ready(graphs, splits={name: torch.tensor(part) for name, part in parts.items()})
    batch, how = data.to_explain(3)
    assert batch.number.tolist() == [6, 7, 9]  # of classes 0, 1 and again 0, as 4 has no edges
    assert how == "shown: 3 of 5 test graphs, from each class in turn"
    with pytest.raises(UserError, match=r"explain.graphs: graph 4 has no edges to explain"):
        data.to_explain(3, [3, 4])
    for wrong in ("a", 1.0, -1):
        with pytest.raises(UserError, match=r"explain.graphs: expected numbers from 0 to \d+, got"):
            data.to_explain(3, [wrong])


def test_accuracy_of_a_test_is_that_of_its_graphs(tmp_path):
    data = ready(batch_size=2)
    module = GraphClassification(model(), num_classes=3).eval()
    found = quiet(tmp_path).test(module, datamodule=data, verbose=False)[0]
    numbers = data.sets["test"].numbers
    batch = data.graphs.batch(numbers)
    right = (module.outputs(batch).argmax(dim=1) == batch.y).float().mean()
    assert found["test/accuracy"] == pytest.approx(float(right))


# --- the command ----------------------------------------------------------------------------------


def run(*words):
    assert main([*words, "trainer=cpu", "+trainer.enable_model_summary=false"]) == 0


@pytest.mark.parametrize(
    ("level", "data", "columns"),
    [
        ("graph", "data.batch_size=200", ["graph", "label", "probability", "p(0)"]),
        ("graph_values", "data.batch_size=null data.batch_nodes=9000", ["graph", "ink", "width"]),
    ],
)
def test_trains_tests_and_predicts(tmp_path, monkeypatch, level, data, columns):
    monkeypatch.chdir(tmp_path)
    few = "trainer.limit_batches=2 model=gat model.hidden_channels=8"
    run("task=graph", f"level={level}", *data.split(), *few.split(), "trainer.max_epochs=1",
        "run_dir=made")  # fmt: skip
    results = json.loads((tmp_path / "made/results.json").read_text())
    assert results["test/accuracy" if columns[1] != "ink" else "test/mae"] >= 0
    assert main(["run=predict", "ckpt=made", "run_dir=said"]) == 0
    rows = list(csv.reader((tmp_path / "said/predictions.csv").open()))
    assert rows[0][: len(columns)] == columns
    assert [row[0] for row in rows[1:]] == [str(number) for number in range(1797)]


@pytest.mark.slow
def test_two_ranks_end_as_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["task=graph", "level=graph", "model.hidden_channels=8", "model.dropout_p=0",
             "trainer.max_epochs=1", "trainer.limit_train_batches=4"]  # fmt: skip
    assert main([*small, "trainer=cpu", "data.batch_size=8", "run_dir=one"]) == 0
    command = [sys.executable, "-m", "attnkit", *small, "trainer=cpu_ddp", "data.batch_size=4"]
    subprocess.run([*command, "run_dir=two"], check=True, timeout=600)
    one, two = (
        json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two")
    )
    for name in ("test/loss", "test/accuracy", "train/loss"):
        assert one[name] == pytest.approx(two[name], rel=1e-4), name


def test_the_digits_are_their_inked_pixels():
    graphs, images = list(DigitGridsData().load()), load_digits().images
    for number in (0, 5, 1796):
        graph = graphs[number]
        rows, columns = graph.x[:, 1:9].argmax(dim=1), graph.x[:, 9:].argmax(dim=1)
        ink = torch.from_numpy(images[number] / 16).float()
        assert torch.equal(graph.x[:, 0], ink[rows, columns])
        assert len(graph.x) == int((ink > 0).sum())
        source, target = graph.edge_index
        steps = torch.stack([rows[source] - rows[target], columns[source] - columns[target]])
        assert steps.abs().amax(dim=0).eq(1).all()
        near = (rows[:, None] - rows).abs().maximum((columns[:, None] - columns).abs()) == 1
        assert int(near.sum()) == graph.num_edges  # every neighbour with ink, in both directions
    assert graphs[0].y.tolist() == [0]


# --- bad input ------------------------------------------------------------------------------------


def changed(number, **values):
    graphs = some_graphs(values.pop("target", "classes"))
    for name, value in values.items():
        graphs[number][name] = value
    return graphs


def with_edges(name, values):
    graphs = some_graphs()
    for graph in graphs:
        graph[name] = values(graph.num_edges)
    return graphs


ONES = {name: torch.tensor([place]) for place, name in enumerate(("train", "val", "test"))}
A_NAN = torch.where(torch.arange(55) == 16, torch.nan, 0.0).view(11, 5)
BAD = [
    (changed(2, x=torch.empty(0, 5)), {}, "graph 2: it has no nodes"),
    (changed(3, x=torch.zeros(2, 4)), {},
     "graph 3: expected 5 features of a node, as before, got 4"),
    (changed(1, edge_index=torch.tensor([[0, 0], [0, 1]])), {},
     "graph 1: edge 1 joins 0 and 1, expected nodes 0 to 0"),
    (changed(4, edge_index=torch.arange(4)), {},
     r"graph 4: expected edge_index \[2, edges\], got \[4\]"),
    (changed(4, edge_index=torch.zeros(2, 3)), {},
     "graph 4: expected edge_index of int64 or int32, got torch.float32"),
    (changed(5, x=A_NAN), {}, "graph 5: x of its node 3, feature 1, is nan"),
    (changed(6, y=torch.zeros(1, 2)), {}, "graph 6: expected y to be one class, an integer, got "
     r"torch.float32 \[1, 2\]; data.target"),
    (changed(2, y=1), {}, "graph 2: expected y as a tensor, got int"),
    (changed(3, y=torch.tensor([10**9])), {},
     "graph 3: expected a class of 0 to [0-9]+, got 100000"),
    ([], {}, "no graphs"),
    ([some_graphs()[0], 7], {}, "graph 1: expected a Data, got int"),
    ([Data(x=torch.ones(2, 3), edge_index=torch.zeros(2, 0).long())], {}, "no graph has a class"),
    (changed(0, edge_attr=torch.zeros(6, 2)), {}, "expected edge_attr in every graph or in none"),
    (with_edges("edge_attr", lambda edges: torch.full((edges, 2), torch.nan)), {},
     "graph 0: edge_attr of its edge 0 is not a finite number"),
    (with_edges("edge_attr", lambda edges: torch.zeros(edges, 2, 2)), {},
     r"graph 0: expected edge_attr \[edges, channels\] of [0-9]+ edges, got"),
    (with_edges("edge_weight", lambda edges: torch.zeros(edges, 2)), {},
     r"graph 0: expected edge_weight \[edges\] of [0-9]+ edges, got"),
    (changed(7, target="labels", y=torch.tensor([[1.0, 2.0, 0.0]])), {"target": "labels"},
     "graph 7: expected labels of 0, 1 or NaN, got 2.0"),
    (changed(7, target="numbers", y=torch.tensor([[1.0, torch.inf]])), {"target": "numbers"},
     "graph 7: expected numbers of finite numbers or NaN, got inf"),
    (changed(7, target="numbers", y=torch.tensor([[1.0]])), {"target": "numbers"},
     "graph 7: expected 2 numbers, as before, got 1"),
    (changed(2, y=torch.tensor([-1])), {"splits": ONES},
     "graph 2: it is in test, but has no class"),
    (changed(0, target="numbers", y=torch.tensor([[1.0, torch.nan]])),
     {"splits": ONES, "target": "numbers"}, "no graph of train has a value of number 1"),
    (some_graphs(), {"splits": ONES | {"test": torch.tensor([999])}},
     "expected graphs 0 to [0-9]+ for test, got 999 to 999"),
    (some_graphs(), {"batch_size": None, "batch_nodes": 10},
     "batch_nodes: expected at least 11, .* graph 5, got 10"),
]  # fmt: skip


@pytest.mark.parametrize(("graphs", "options", "message"), BAD, ids=[case[2] for case in BAD])
def test_bad_graphs_are_named(graphs, options, message):
    with pytest.raises(UserError, match=message):
        Made(graphs, **options).setup()


def test_graphs_and_nodes_of_a_batch_exclude_each_other():
    with pytest.raises(ValueError, match="batch_nodes: replaces batch_size"):
        Made([], batch_size=3, batch_nodes=5)


def test_targets_are_not_read_to_predict():
    data = Made(changed(0, y="not known yet"))
    data.setup("predict")
    assert len(data.graphs) == len(some_graphs("classes"))


def test_scores_of_confident_models():
    """torchmetrics alone makes equal what is above 17."""
    score = MeanOverLabels(binary_auroc)
    score.update(torch.tensor([[20.0], [30.0], [40.0], [50.0]]), torch.tensor([[0], [0], [1], [1]]))
    assert score.compute() == 1.0


@pytest.mark.parametrize(
    ("module", "data", "message"),
    [
        (lambda: GraphClassification(model(), num_classes=3), lambda: ready(target="numbers"),
         "data.target=numbers: GraphClassification learns classes; level=graph_values learns"),
        (lambda: GraphClassification(model(), num_classes=3), DigitsGraphData,
         "DigitsGraphData is for level=node"),
        (lambda: NodeClassification(model(), num_classes=3), ready, "Made is for level=graph"),
        (lambda: GraphClassification(nn.Linear(5, 3), num_classes=3), ready,
         "Linear takes no batch"),
        (lambda: GraphClassification(attnkit.SGFormer(5, 8, 3), num_classes=3), ready,
         "model.readout: expected graph, got node"),
        (lambda: GraphClassification(model(), num_classes=3, in_channels=4), ready,
         "its nodes have 5 features, but the module was made for 4"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_named(tmp_path, module, data, message):
    with pytest.raises(UserError, match=message):
        quiet(tmp_path, max_epochs=1).fit(module(), datamodule=data())
