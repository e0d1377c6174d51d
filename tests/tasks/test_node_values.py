"""level=node_values: several labels or numbers of each node, of one graph and of many."""

import csv
import json

import numpy as np
import pytest
import sklearn.metrics
import torch
from lightning import seed_everything
from made_graphs import RandomGraph
from task_support import quiet
from torch.nn import functional as F
from torch_geometric.data import Data

import attnkit
from attnkit.interpret.report import Report
from attnkit.launch.main import main
from attnkit.lightning import UserError
from attnkit.tasks.graphs import (
    DigitGridsData,
    DigitsGraphData,
    GraphFilesData,
    GraphsDataModule,
    NodeClassification,
    NodePredictions,
    NodeValues,
    OGBFilesData,
    PlanetoidData,
    PyGData,
    PyGGraphsData,
)
from attnkit.tasks.graphs.splits import node_keys

NODES = 97


def values_of(target, generator, count=NODES):
    if target == "classes":
        return torch.randint(-1, 3, (count,), generator=generator)
    if target == "labels":
        y = torch.randint(0, 2, (count, 3), generator=generator).float()
    else:
        y = 50 + 9 * torch.randn(count, 3, generator=generator)
    y[torch.rand(y.shape, generator=generator) < 0.2] = torch.nan
    y[y.isnan().all(dim=1)] = 1.0
    return y


class Random(RandomGraph):
    """A random graph; a fifth of the labels or numbers is unknown."""

    def load(self):
        y = values_of(self.target, torch.Generator().manual_seed(3))
        return super().load().update({"y": y})


class Made(GraphsDataModule):
    """Graphs that were made before, of which the nodes are learned."""

    def __init__(self, graphs, splits=None, **options):
        super().__init__(**{"level": "node", "batch_size": 2, **options})
        self.made, self.splits = graphs, splits

    def load(self):
        self.given_splits = self.splits
        return self.made


def some_graphs(target):
    generator = torch.Generator().manual_seed(5)
    return [
        Data(
            x=torch.randn(size, 5, generator=generator),
            edge_index=torch.randint(size, (2, 2 * size), generator=generator),
            y=values_of(target, generator, size),
        )
        for size in (9, 4, 7, 12, 5, 8)
    ]


def module_of(data, target, num_outputs=3, model=None, **options):
    model = model or attnkit.GAT(5, 12, num_outputs, heads=2, num_layers=2)
    if target == "classes":
        return NodeClassification(model, num_classes=num_outputs, **options)
    return NodeValues(model, target=target, num_outputs=num_outputs, **options)


# --- one graph ------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["labels", "numbers"])
@pytest.mark.parametrize("batch_size", [None, 7])
def test_known_values_of_the_stages_nodes_count(tmp_path, target, batch_size):
    """Of the whole graph, and with all neighbours layer by layer."""
    seed_everything(1, verbose=False)
    data = Random(target=target, batch_size=batch_size, num_neighbors=[-1, -1])
    module = module_of(data, target)
    if target == "numbers":  # as after a training
        module.target_mean = torch.full((3,), 50.0)
        module.target_deviation = torch.tensor([9.0, 8.0, 7.0])
    found = quiet(tmp_path).test(module, datamodule=data, verbose=False)[0]
    graph, mask = data.graph, data.graph.test_mask
    with torch.no_grad():
        plain = module.model.eval()(graph.x, graph.edge_index)[mask]
    y = graph.y[mask]
    known = ~y.isnan()
    assert 0.5 < known.float().mean() < 1
    if target == "labels":
        loss = F.binary_cross_entropy_with_logits(plain[known], y[known])
        f1 = sklearn.metrics.f1_score(y[known], (plain > 0)[known])
        assert found["test/micro_f1"] == pytest.approx(f1)
        areas = [
            sklearn.metrics.roc_auc_score(y[known[:, n], n], plain[known[:, n], n])
            for n in range(3)
        ]
        assert found["test/auroc"] == pytest.approx(np.mean(areas), rel=1e-5)
    else:
        outputs = plain * module.target_deviation + module.target_mean
        errors = (outputs - y).abs()
        loss = (errors / module.target_deviation)[known].mean()
        assert found["test/mae"] == pytest.approx(float(errors[known].mean()), rel=1e-5)
    assert found["test/loss"] == pytest.approx(float(loss), rel=1e-5)


def test_numbers_are_learned_and_predicted_in_the_units_of_the_data(tmp_path):
    seed_everything(1, verbose=False)
    data = Random(target="numbers")
    data.class_names = ["a", "b", "c"]
    module = module_of(data, "numbers", class_names=data.class_names)
    quiet(tmp_path, max_epochs=1).fit(module, datamodule=data)
    y = data.train_labels
    for column in range(3):
        known = y[~y[:, column].isnan(), column]
        torch.testing.assert_close(module.target_mean[column], known.mean())
        torch.testing.assert_close(module.target_deviation[column], known.std(unbiased=False))
    (rows,) = quiet(tmp_path).predict(module, datamodule=data)
    with torch.no_grad():
        plain = module.model.eval()(data.graph.x, data.graph.edge_index)
    expected = (plain * module.target_deviation + module.target_mean)[:, 1]
    assert list(rows) == ["node", "a", "b", "c"]
    torch.testing.assert_close(torch.tensor(rows["b"]), expected)


def test_nodes_are_known_again_by_their_values():
    data = Random(target="numbers")
    data.setup()
    keys = node_keys(data.graph)
    changed = data.graph.clone()
    changed.y[5, 0] = 7.0
    assert (node_keys(changed) != keys).nonzero().flatten().tolist() == [5]


# --- many graphs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["classes", "labels", "numbers"])
def test_nodes_of_other_graphs_are_tested(tmp_path, target):
    seed_everything(1, verbose=False)
    graphs = some_graphs(target)
    parts = {
        "train": torch.tensor([0, 2]),
        "val": torch.tensor([5]),
        "test": torch.tensor([3, 1, 4]),
    }
    data = Made(graphs, parts, target=target)
    model = attnkit.GraphTransformer(5, 12, 3, heads=2)  # whose nodes see all of their own graph
    module = module_of(data, target, model=model)
    found = quiet(tmp_path).test(module, datamodule=data, verbose=False)[0]
    y = torch.cat([graphs[number].y for number in (3, 1, 4)])
    with torch.no_grad():
        module.eval()
        outputs = torch.cat([module(graphs[n].x, graphs[n].edge_index) for n in (3, 1, 4)])
    if target == "classes":
        known = y >= 0
        assert not known.all()
        expected = F.cross_entropy(outputs[known], y[known])
        accuracy = (outputs.argmax(dim=1) == y)[known].float().mean()
        assert found["test/accuracy"] == pytest.approx(float(accuracy))
        assert len(data.train_labels) == sum(int((graphs[n].y >= 0).sum()) for n in (0, 2))
    else:
        expected = module.losses(outputs, y).mean()
        assert torch.equal(data.train_labels.isnan(), torch.cat([graphs[0].y, graphs[2].y]).isnan())
    assert found["test/loss"] == pytest.approx(float(expected), rel=1e-5)
    batches = quiet(tmp_path).predict(module, datamodule=data)
    rows = {name: [v for batch in batches for v in batch[name]] for name in batches[0]}
    places = [(g, n) for g, graph in enumerate(graphs) for n in range(graph.num_nodes)]
    assert list(zip(rows["graph"], rows["node"], strict=True)) == places
    assert "nodes" in data.summary()[0] or target == "classes"


def test_attention_of_many_graphs_is_refused(tmp_path):
    data = Made(some_graphs("labels"), target="labels")
    looks = NodePredictions(tmp_path, attention=True)
    with pytest.raises(UserError, match=r"predict\.attention: expected one graph"):
        quiet(tmp_path, callbacks=[looks]).predict(module_of(data, "labels"), datamodule=data)


@pytest.mark.parametrize("target", ["labels", "numbers"])
def test_each_label_or_number_of_a_node_is_explained(tmp_path, target):
    data = Random(target=target)
    data.setup("predict")
    data.setup("fit")
    module = module_of(data, target).eval()
    if target == "numbers":
        module.target_mean.fill_(50.0)
        module.target_deviation.fill_(9.0)
    given = module.explained(data.graph)
    outputs = module(data.graph.x, data.graph.edge_index)[7, 2].detach()
    seen = attnkit.explain(given.model, given.inputs, 2, index=7, of=given.of)
    said = outputs.sigmoid() if target == "labels" else outputs
    assert float(seen.probability) == pytest.approx(float(said), rel=1e-5)
    kept = seen.edge_index[:, ~(torch.arange(seen.edge_index.shape[1]) == seen.edges.argmax())]
    without = module(data.graph.x, kept)[7, 2].detach()
    fidelity = seen.fidelity(ks=[1], num_draws=2)
    after = without.sigmoid() if target == "labels" else without
    assert fidelity.rows[0]["plus"] == pytest.approx(float(said - after), abs=1e-3)
    report = Report(methods=["occlusion"], nodes=[7], target="2", trust="none")
    [row] = report(given, tmp_path).rows
    assert (row["class"], row["label"], row["predicted"]) == ("2", None, None)


def test_nodes_of_many_graphs_are_not_explained():
    data = Made(some_graphs("classes"), target="classes")
    data.setup("predict")
    with pytest.raises(UserError, match="run=explain: the nodes of many graphs are not explained"):
        module_of(data, "classes").explained(next(iter(data.predict_dataloader())))


def test_a_number_that_is_called_as_a_column_is_refused():
    with pytest.raises(ValueError, match=r"columns graph and node and name of .* got 'node'"):
        module_of(None, "numbers", class_names=["a", "node", "b"])


def test_ppi_as_pyg_reads_it(graph_files, tmp_path):
    pytest.importorskip("networkx", minversion="3.4")  # PyG asks it for what older ones do not know
    labels = graph_files.write_ppi(tmp_path / "ppi")
    data = PyGGraphsData("PPI", tmp_path / "ppi", level="node", target="labels", batch_size=2)
    data.prepare_data()
    data.setup()
    sizes = {"train": [9, 5, 7, 4], "val": [6], "test": [8, 4]}
    assert {name: items.sizes.tolist() for name, items in data.sets.items()} == sizes
    for name, split in (("train", "train"), ("val", "valid"), ("test", "test")):
        y = torch.cat([batch.y for batch in data.loader(name)])
        expected = torch.from_numpy(labels[split]).float()
        assert sorted(y.tolist()) == sorted(expected.tolist()), name
    assert data.describe()["num_outputs"] == 4
    module = module_of(data, "labels", 4)
    assert quiet(tmp_path).test(module, datamodule=data, verbose=False)[0]["test/micro_f1"] >= 0


# --- files ----------------------------------------------------------------------------------------


def own(graph_files, folder, labels, name="labels.csv", **others):
    arrays = graph_files.own_arrays()
    del arrays["labels"]
    graph_files.write_own(folder, arrays | others)
    (folder / name).write_text(labels)
    return folder


def test_columns_of_labels_are_read(graph_files, tmp_path):
    rows = [["", "1"], ["0", "nan"], *([str(n % 2), str(n % 3)] for n in range(2, NODES))]
    text = "\n".join([",height,width", *(f"{n},{','.join(row)}" for n, row in enumerate(rows))])
    data = GraphFilesData(own(graph_files, tmp_path / "a", text), target="numbers")
    data.setup()
    assert data.class_names == ["height", "width"]
    y = data.graph.y
    assert y.isnan().nonzero().tolist() == [[0, 0], [1, 1]]
    assert y[5].tolist() == [1, 2]
    one = own(graph_files, tmp_path / "b", "\n".join(["warm", *["True", "False", ""] * 32, "True"]))
    arrays = {name: np.load(one / f"{name}.npy") for name in ("train", "val", "test")}
    arrays = {name: nodes[nodes % 3 < 2] for name, nodes in arrays.items()}
    graph_files.write_own(one, arrays)
    data = GraphFilesData(one, target="labels")
    data.setup()
    assert data.class_names == ["warm"]
    assert data.graph.y[:2].tolist() == [[1], [0]]
    assert data.graph.y[2].isnan().all()


def test_a_random_split_is_of_nodes_with_a_value(graph_files, tmp_path):
    arrays = graph_files.own_arrays()
    arrays = {name: arrays[name] for name in ("edges", "features")}
    arrays["y"] = np.random.default_rng(0).standard_normal((NODES, 2))
    arrays["y"][:20] = np.nan
    np.savez(tmp_path / "graph.npz", **arrays)
    data = GraphFilesData(tmp_path / "graph.npz", target="numbers")
    data.setup()
    used = torch.stack([data.graph[f"{name}_mask"] for name in ("train", "val", "test")]).sum(0)
    assert used.tolist() == [0] * 20 + [1] * 77


def table(wrong, at=7, header="a,b"):
    rows = ["1,0" if n % 2 else "0,1" for n in range(NODES)]
    rows[at] = wrong
    return "\n".join([header, *rows])


BAD = {
    "word": ("labels", table("1,x"), "labels.csv, line 9: expected a number, or .* got 'x'"),
    "two": ("labels", table("1,2"), "labels.csv, line 9: node 7: expected labels of 0, 1 or NaN"),
    "infinite": ("numbers", table("1,inf"), "line 9: node 7: expected numbers of finite numbers"),
    "short": ("numbers", "1,2\n3,4\n", r"expected 97 rows of numbers, one per node, got \[2, 2\]"),
    "index": (
        "numbers",
        "\n".join(["node,a", *(f"{n},{n * n}" for n in range(NODES))]),
        "the first column counts the rows or names the nodes: it is an index, or a number",
    ),
    "empty": ("numbers", table("1,"), None),
    "never": (
        "numbers",
        "\n".join(["a,b", *["1,"] * NODES]),
        "data: no node of train has a value of number b",
    ),
    "classes": ("classes", table("0,1"), "expected a whole number per node"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_wrong_tables_are_named(graph_files, tmp_path, case):
    target, text, message = BAD[case]
    data = GraphFilesData(own(graph_files, tmp_path / "a", text), target=target)
    if message is None:
        data.setup()
        return
    with pytest.raises(UserError, match=message) as caught:
        data.setup()
    assert "\n" not in str(caught.value)


def test_names_of_columns_are_as_many(graph_files, tmp_path):
    folder = own(graph_files, tmp_path / "a", table("0,1"))
    (folder / "classes.txt").write_text("one\ntwo\nthree\n")
    with pytest.raises(UserError, match="expected 3 labels, one for each of the names in classes"):
        GraphFilesData(folder, target="labels").setup()


def test_proteins_of_ogb(graph_files, tmp_path):
    """Labels in columns, features on edges only."""
    arrays = graph_files.write_ogb(tmp_path)
    random = np.random.default_rng(1)
    features = random.random((len(arrays["edges"]), 8)).round(3)
    labels = random.integers(0, 2, (NODES, 5))
    (tmp_path / "raw/node-feat.csv.gz").unlink()
    graph_files.write_text(tmp_path / "raw/edge-feat.csv.gz", features)
    graph_files.write_text(tmp_path / "raw/node-label.csv.gz", labels)
    data = OGBFilesData(tmp_path, target="labels")
    data.setup()
    assert torch.equal(data.graph.y, torch.from_numpy(labels).float())
    for node in (0, 40):
        into = features[arrays["edges"][:, 1] == node]
        mean = into.mean(axis=0) if len(into) else np.zeros(8)
        np.testing.assert_allclose(data.graph.x[node].numpy(), mean, rtol=1e-5)
    labels[3, 2] = 7
    graph_files.write_text(tmp_path / "raw/node-label.csv.gz", labels)
    with pytest.raises(UserError, match=r"node-label.csv.gz, line 4: node 3: .* got 7.0"):
        OGBFilesData(tmp_path, target="labels").setup()


# --- what does not fit together -------------------------------------------------------------------


def one_value(target, y):
    class One(Random):
        def load(self):
            return super().load().update({"y": y})

    return One(target=target)


@pytest.mark.parametrize(
    ("module", "data", "message"),
    [
        (lambda: module_of(None, "classes"), lambda: Random(target="labels"),
         "data.target=labels: NodeClassification learns classes; level=node_values learns labels"),
        (lambda: module_of(None, "labels"), lambda: Random(target="numbers"),
         "data.target=numbers: NodeValues learns labels"),
        (lambda: module_of(None, "labels"), lambda: DigitGridsData(target="labels"),
         "DigitGridsData is for level=graph.* NodeValues is for level=node; data.level=node"),
        (lambda: module_of(None, "labels"), lambda: one_value("labels", torch.ones(5, 3)),
         r"expected labels of each node, y \[97, labels\], got torch.float32 \[5, 3\]"),
        (lambda: module_of(None, "classes"), lambda: one_value("classes", torch.ones(97, 3)),
         "expected a class per node, y integers .*data.target says what it is"),
        (lambda: module_of(None, "labels"), lambda: Made(some_graphs("numbers"), target="labels"),
         "graph 0: node 0: expected labels of 0, 1 or NaN, got"),
        (lambda: module_of(None, "labels"),
         lambda: Made([*some_graphs("labels")[:5], some_graphs("classes")[5]], target="labels"),
         "graph 5: .*expected"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_named(tmp_path, module, data, message):
    with pytest.raises(UserError, match=message):
        quiet(tmp_path, max_epochs=1).fit(module(), datamodule=data())


def test_wrong_arguments_are_named(tmp_path):
    with pytest.raises(
        UserError, match=r"data\.target: expected labels or numbers, which NodeValues"
    ):
        NodeValues(attnkit.GAT(5, 8, 3), target="classes", num_outputs=3)
    with pytest.raises(ValueError, match="target: expected 'classes', got 'numbers'"):
        PlanetoidData(tmp_path, target="numbers")
    with pytest.raises(ValueError, match="level: expected 'graph' or 'node', got 'link'"):
        Made([], level="link")


def test_pyg_sets_may_hold_numbers(monkeypatch):
    graph = Random(target="numbers").load()
    for name in ("train_mask", "val_mask", "test_mask"):
        del graph[name]
    monkeypatch.setattr("attnkit.tasks.graphs.datasets.pyg.PyGSet.read", lambda self: [graph])
    data = PyGData("KarateClub", target="numbers")
    data.setup()
    assert int(data.graph.train_mask.sum()) == 59  # of 97, less a fifth twice


# --- the command ----------------------------------------------------------------------------------


def run(*words):
    assert main([*words]) == 0


def columns(folder):
    rows = list(csv.reader((folder / "predictions.csv").open()))
    return rows[0], len(rows) - 1


def test_trains_and_predicts_a_new_graph(graph_files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = own(graph_files, tmp_path / "first", table("0,"))
    run("task=graph", "level=node_values", "model=gat", "data=graph_files", f"data.root={first}",
        "data.target=labels", "trainer=cpu", "trainer.max_epochs=1", "logger.tensorboard=null",
        "callbacks.curves=null", "run_dir=made")  # fmt: skip
    results = json.loads((tmp_path / "made/results.json").read_text())
    assert {"test/auroc", "test/micro_f1", "test/average_precision"} <= results.keys()
    assert (tmp_path / "made/attention_entropy.csv").is_file()
    second = graph_files.write_own(tmp_path / "second", graph_files.own_arrays(53, 201))
    (second / "labels.npy").unlink()
    run("run=predict", "ckpt=made", f"data.root={second}", "run_dir=said",
        "predict.attention=true")  # fmt: skip
    assert columns(tmp_path / "said") == (["node", "p(a)", "p(b)"], 53)
    assert (tmp_path / "said/attention.csv").is_file()


@pytest.mark.slow
def test_the_digits_are_learned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("task=graph", "level=node_values", "trainer=cpu", "run_dir=made", "seed=1",
        "optimizer.lr=0.02", "trainer.max_epochs=100")  # fmt: skip
    found = json.loads((tmp_path / "made/results.json").read_text())
    data = DigitsGraphData(target="numbers", seed=1)
    data.setup()
    y = data.graph.y
    constant = (
        (y[data.graph.test_mask] - y[data.graph.train_mask].median(dim=0).values).abs().mean()
    )
    assert found["test/mae"] < 0.87 * constant
