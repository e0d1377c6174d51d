"""level=link: edges held out, the pairs they are told from, what is learned, and bad input."""

import csv
import json
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from lightning import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from made_graphs import ogb_hits, ogb_ranks
from task_support import quiet
from torch import nn
from torch_geometric.data import Data
from torch_geometric.metrics import LinkPredHitRatio, LinkPredMRR
from torch_geometric.nn import GCN
from torch_geometric.transforms import RandomLinkSplit
from torch_geometric.utils import to_undirected
from torchmetrics.functional.classification import binary_average_precision

import attnkit
from attnkit.launch.main import main
from attnkit.lightning import ExactResume, UserError
from attnkit.tasks.graphs import (
    DigitGridsData,
    DigitsGraphData,
    GraphDataModule,
    LinkPrediction,
    Links,
    NodeClassification,
)
from attnkit.tasks.graphs.links import ranks_of
from attnkit.tasks.graphs.negative_pairs import AbsentPairs, HeldOut, present_from

NODES = 23


def a_graph(directed=False, edges=70, **more):
    generator = torch.Generator().manual_seed(3)
    edge_index = torch.randint(NODES, (2, edges), generator=generator)
    edge_index = edge_index if directed else to_undirected(edge_index, num_nodes=NODES)
    return Data(x=torch.randn(NODES, 5, generator=generator), edge_index=edge_index, **more)


class Made(GraphDataModule):
    def __init__(self, graph=None, links=None, held=None, **options):
        links = links or Links(**{} if held else {"num_ranked": 7})
        super().__init__(links=links, **{"batch_size": 6, **options})
        self.made, self.held = graph or a_graph(), held

    def load(self):
        self.link_splits = self.held or {}
        return self.made


def ready(graph=None, links=None, held=None, **options):
    data = Made(graph, links, held, **options)
    data.setup()
    return data


def batches(data, split, epoch=0):
    loader = data.loader(split)
    if split == "train":
        loader.sampler.set_epoch(epoch)
    return list(loader)


def numbers(pairs, num_nodes=NODES):
    """Of pairs [2, …] in any order."""
    low, high = pairs.flatten(1).sort(dim=0).values
    return set((low * num_nodes + high).tolist())


def model(**options):
    return attnkit.GAT(5, 12, 8, heads=3, **options)


# --- pairs that no edge joins ---------------------------------------------------------------------


@pytest.mark.parametrize("edges", [0, 40, 400])
def test_absent_pairs_are_the_complement_of_the_edges(edges):
    graph = a_graph(directed=True, edges=edges)
    absent = AbsentPairs(graph.edge_index, NODES)
    is_absent = torch.ones(NODES, NODES, dtype=torch.bool).fill_diagonal_(False)
    is_absent[tuple(graph.edge_index)] = False
    assert torch.equal(absent.at(torch.arange(len(absent))), is_absent.nonzero().T)
    generator = torch.Generator().manual_seed(1)
    counts = torch.zeros(NODES, NODES)
    drawn = absent.draw(len(absent) * 400, generator)
    counts.index_put_(tuple(drawn), torch.ones(()), accumulate=True)
    assert ((counts > 0) == is_absent).all()
    assert (counts[is_absent] - 400).abs().max() < 6 * 20  # six deviations
    sources = torch.tensor([4, 0, 22, 4])
    some = absent.draw_from(sources, 4000, generator)
    assert torch.equal(some[0], sources[:, None].expand(-1, 4000))
    for row, source in enumerate(sources.tolist()):
        expected = is_absent[source].nonzero().flatten()
        values, counts = some[1, row].unique(return_counts=True)
        assert torch.equal(values, expected)
        share = 4000 / len(expected)
        assert (counts - share).abs().max() < 6 * share**0.5
    rows, targets = present_from(absent.present, torch.arange(NODES), NODES)
    assert is_absent[rows, targets].logical_not().all()
    assert len(rows) == NODES**2 - len(absent)


def test_a_node_that_is_joined_to_all_is_told_from_any_absent_pair():
    hub = torch.stack([torch.zeros(4, dtype=torch.long), torch.arange(1, 5)])
    absent = AbsentPairs(to_undirected(hub), 5)
    some = absent.draw_from(torch.tensor([0, 2]), 300, torch.Generator().manual_seed(0))
    assert numbers(some[:, 0], 5) == numbers(absent.at(torch.arange(len(absent))), 5)
    assert set(some[1, 1].tolist()) == {1, 3, 4}


# --- what is held out -----------------------------------------------------------------------------


def test_splits_are_pygs_of_the_same_seed():
    data = DigitsGraphData(links=Links(), batch_size=64, seed=5)
    data.setup()
    graph = DigitsGraphData(seed=5).load()
    split = RandomLinkSplit(0.1, 0.2, True, add_negative_train_samples=False,
                            neg_sampling_ratio=0.0)  # fmt: skip
    torch.manual_seed(5)
    theirs = split(Data(edge_index=graph.edge_index, num_nodes=graph.num_nodes))
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    for found, expected in zip(data._link_sets.splits.values(), theirs, strict=True):
        assert torch.equal(found.edge_index, expected.edge_index)
        assert torch.equal(found.edge_label_index, expected.edge_label_index)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("directed", [False, True])
def test_no_edge_that_is_asked_about_carries_a_message(directed):
    graph = a_graph(directed, edge_attr=None)
    graph.edge_attr = (graph.edge_index[0] * NODES + graph.edge_index[1])[:, None].float()
    if not directed:
        graph.edge_attr = graph.edge_index.sum(dim=0)[:, None].float()
    source, target = graph.edge_index
    loops = source == target
    graph.edge_index = torch.cat([graph.edge_index, graph.edge_index[:, :9]], dim=1)  # twice
    graph.edge_attr = torch.cat([graph.edge_attr, graph.edge_attr[:9]])
    data = ready(graph)
    assert data.describe()["directed"] == directed
    every = {(int(i), int(j)) for i, j in zip(source, target, strict=True)} - {
        (int(i), int(i)) for i in source[loops]
    }
    asked = {}
    for split in ("train", "val", "test"):
        asked[split] = set()
        for batch in batches(data, split):
            pairs = {*map(tuple, batch.pairs.T.tolist())}
            asked[split] |= pairs | (set() if directed else {(j, i) for i, j in pairs})
            messages = {*map(tuple, batch.edge_index.T.tolist())}
            assert not messages & (pairs | (set() if directed else {(j, i) for i, j in pairs}))
            others = torch.cat(
                [batch.negatives, batch.get("ranked", batch.negatives).flatten(1)], 1
            )
            absent = {*map(tuple, others.T.tolist())}
            assert not absent & (every | {(i, i) for i in range(NODES)})
            i, j = batch.edge_index
            carried = i * NODES + j if directed else i + j
            assert torch.equal(batch.edge_attr[:, 0], carried.float())
    assert asked["train"] | asked["val"] | asked["test"] == every
    assert not asked["train"] & asked["val"]
    assert not asked["test"] & (asked["train"] | asked["val"])
    [val], [test] = (batches(data, split) for split in ("val", "test"))
    assert {*map(tuple, val.edge_index.T.tolist())} == asked["train"]
    assert {*map(tuple, test.edge_index.T.tolist())} == asked["train"] | asked["val"]
    predicted = batches(data, "predict")[0]
    assert {*map(tuple, predicted.edge_index.T.tolist())} == every


def test_what_is_drawn_depends_on_the_seed_the_epoch_and_the_batch_alone():
    first, again = (batches(ready(), "train", epoch=3) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.pairs, other.pairs)
        assert torch.equal(one.negatives, other.negatives)
    drawn = {str(batch.negatives.tolist()) for batch in first}
    for other in (batches(ready(), "train", epoch=4), batches(ready(seed=1), "train", epoch=3)):
        drawn |= {str(batch.negatives.tolist()) for batch in other}
    assert len(drawn) == 3 * len(first)
    three = ready(links=Links(num_negatives=3))
    assert batches(three, "train")[0].negatives.shape == (2, 18)
    [one], [other] = (batches(ready(), "val") for _ in range(2))
    assert torch.equal(one.ranked, other.ranked)
    assert torch.equal(one.negatives, other.negatives)
    assert torch.equal(one.ranked[0], one.pairs[0][:, None].expand(-1, 7))


# --- what is learned ------------------------------------------------------------------------------


def test_ranks_are_those_by_hand():
    edges = torch.tensor([3.0, 1.0, 2.0, torch.nan, 0.5])
    others = torch.tensor([[1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [2.0, 2.0, 9.0], [0.0, 0.0, 0.0],
                           [-1.0, 0.6, torch.inf]])  # fmt: skip
    module = LinkPrediction(model(), hits_at=[1, 3])
    assert ranks_of(edges, others).tolist() == [1, 3, 4, 4, 3]
    shared = torch.tensor([2.0, torch.nan, 0.5, -1.0, 2.0])
    assert ranks_of(edges, shared).tolist() == [2, 4, 4, 6, 5]
    for name, expected in (("mrr", (1 + 1 / 3 + 1 / 4 + 1 / 4 + 1 / 3) / 5), ("hits1", 1 / 5),
                           ("hits3", 3 / 5)):  # fmt: skip
        metric = module.val_metrics[name]
        metric.update(ranks_of(edges, others))
        torch.testing.assert_close(metric.compute(), torch.tensor(expected))
        parts = [type(metric)(metric.most) for _ in range(2)]  # two processes with unequal parts
        for part, rows in zip(parts, (slice(0, 2), slice(2, 5)), strict=True):
            part.update(ranks_of(edges[rows], others[rows]))
        parts[0].merge_state(parts[1])
        torch.testing.assert_close(parts[0].compute(), torch.tensor(expected))


def test_ranks_are_those_of_pyg_and_of_ogb():
    edges, others, shared = torch.randn(41), torch.randn(41, 29), torch.randn(29)
    every = torch.cat([others, edges[:, None]], dim=1).argsort(dim=1, descending=True)
    rows = torch.arange(41)
    theirs = {"mrr": LinkPredMRR(99), "hits3": LinkPredHitRatio(3)}
    module = LinkPrediction(model(), hits_at=[3])
    for name, metric in theirs.items():
        metric.update(every, torch.stack([rows, torch.full_like(rows, 29)]))
        module.val_metrics[name].update(ranks_of(edges, others))
        torch.testing.assert_close(module.val_metrics[name].compute(), metric.compute())
    assert float((1 / ranks_of(edges, others)).mean()) == pytest.approx(
        (1 / ogb_ranks(edges, others)).mean()
    )
    for k in (1, 3, 28, 29, 30):
        found = (ranks_of(edges.round(decimals=1), shared.round(decimals=1)) <= k).float().mean()
        assert float(found) == pytest.approx(
            ogb_hits(edges.round(decimals=1), shared.round(decimals=1), k)
        )


class Two(nn.Linear):
    def forward(self, x, edge_index):
        return super().forward(x), None


class Given(nn.Module):
    """Embeddings that were given, whatever the graph is."""

    def __init__(self, nodes):
        super().__init__()
        self.nodes = nn.Parameter(nodes)

    def forward(self, x, edge_index):
        return self.nodes


@pytest.mark.parametrize("directed", [False, True])
def test_figures_of_a_test_are_those_of_its_pairs(tmp_path, directed):
    nodes = torch.randn(NODES, 6)
    data = ready(a_graph(directed))
    module = LinkPrediction(Given(nodes), directed=directed)
    found = quiet(tmp_path).test(module, datamodule=data, verbose=False)[0]
    scores = nodes[:, :3] @ nodes[:, 3:].T if directed else nodes @ nodes.T
    [batch] = batches(data, "test")
    edges, absent, others = (scores[tuple(p)] for p in (batch.pairs, batch.negatives, batch.ranked))
    ranks = 1 + (others >= edges[:, None]).sum(dim=1)
    assert found["test/mrr"] == pytest.approx(float((1 / ranks).mean()))
    for k in (1, 3, 10):
        assert found[f"test/hits{k}"] == pytest.approx(float((ranks <= k).float().mean()))
    outputs, truth = torch.cat([edges, absent]), torch.arange(2 * len(edges)) < len(edges)
    loss = nn.functional.binary_cross_entropy_with_logits(outputs, truth.float())
    assert found["test/loss"] == pytest.approx(float(loss))
    precision = binary_average_precision(outputs.sigmoid(), truth.long())
    assert found["test/average_precision"] == pytest.approx(float(precision))
    with torch.no_grad():  # a training step is over its pairs, too
        batch = batches(data, "train")[0]
        outputs = torch.cat([scores[tuple(batch.pairs)], scores[tuple(batch.negatives)]])
        truth = (torch.arange(len(outputs)) < batch.pairs.shape[1]).float()
        module.log_train_loss = lambda losses: None
        loss = nn.functional.binary_cross_entropy_with_logits(outputs, truth)
        torch.testing.assert_close(module.training_step(batch, 0), loss)


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("readout", ["node", "edge"])
def test_the_order_of_a_pair_counts_in_directed_graphs_alone(readout, directed):
    network = attnkit.GraphTransformer(
        5, 12, 1 if readout == "edge" else 6, num_layers=1, heads=3, readout=readout
    ).eval()
    module = LinkPrediction(network, directed=directed)
    score = module.scores_of(a_graph(directed))
    pairs = torch.randint(NODES, (2, 4, 9))
    one, other = score(pairs), score(pairs.flip(0))
    assert one.shape == (4, 9)
    assert torch.allclose(one, other, atol=1e-6) != directed
    torch.testing.assert_close(score(pairs[:, 2]), one[2])


def test_a_stopped_training_goes_on_exactly(tmp_path):
    def fit(ckpt=None):
        seed_everything(5)
        constant = partial(torch.optim.lr_scheduler.ConstantLR, factor=1.0)
        module = LinkPrediction(model(dropout_p=0.3), scheduler=constant)
        saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
        run = quiet(
            tmp_path, max_epochs=2, enable_checkpointing=True, callbacks=[ExactResume(), saving]
        )
        run.fit(module, datamodule=Made(), ckpt_path=ckpt, weights_only=True)
        assert run.global_step > 8
        return module

    whole = {name: value.clone() for name, value in fit().state_dict().items()}
    for step in (2, 9):  # in the middle of epochs
        resumed = fit(tmp_path / f"step={step}.ckpt").state_dict()
        for name, value in whole.items():
            assert torch.equal(value, resumed[name]), (step, name)


def test_no_edge_of_a_training_is_tested(tmp_path):
    data = ready()
    module = LinkPrediction(model())
    quiet(tmp_path, max_steps=1, limit_val_batches=0).fit(module, datamodule=data)
    seen = numbers(torch.cat([data._link_sets.splits[s].edge_label_index for s in ("train", "val")],
                             dim=1))  # fmt: skip
    tested = []
    module.on_test_batch_start = lambda batch, *_: tested.append(batch.pairs)
    quiet(tmp_path).test(module, datamodule=Made(), verbose=False)
    assert len(tested.pop()[0]) == len(batches(ready(), "test")[0].pairs[0])
    other = Made(seed=1)
    with pytest.warns(UserWarning, match=r"test: [0-9]+ of [0-9]+ edges; the others were in"):
        quiet(tmp_path).test(module, datamodule=other, verbose=False)
    assert numbers(tested[0]) == numbers(batches(ready(seed=1), "test")[0].pairs) - seen


# --- the command ----------------------------------------------------------------------------------

SMALL = ["task=graph", "level=link", "model.hidden_channels=8", "model.num_classes=8"]


def test_trains_tests_and_predicts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [f"n{number}" for number in range(NODES)]
    graph = a_graph()
    np.savez("mine.npz", edges=graph.edge_index, features=graph.x, nodes=np.array(names))
    assert main([*SMALL, "trainer=cpu", "data=graph_files", "data.root=mine.npz",
                 "data.batch_size=9", "trainer.max_epochs=2", "run_dir=made"]) == 0  # fmt: skip
    results = json.loads((tmp_path / "made/results.json").read_text())
    assert results["test/hits1"] <= results["test/mrr"] <= 1
    [batch] = batches(ready(graph), "test")
    with (tmp_path / "made/scored_pairs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [*("source", "target", "source_name", "target_name", "is_edge"),
                             "probability"]  # fmt: skip
    assert rows[0]["target_name"] == f"n{rows[0]['target']}"
    for kind, pairs in (("1", batch.pairs), ("0", batch.negatives)):
        some = [row for row in rows if row["is_edge"] == kind]
        said = torch.tensor([[int(row["source"]), int(row["target"])] for row in some]).T
        assert len(some) == len(numbers(said)) == min(40, len(numbers(pairs)))  # each pair once
        assert numbers(said) <= numbers(pairs)
        probability = [float(row["probability"]) for row in some]
        assert probability == sorted(probability, reverse=True)
    assert (tmp_path / "made/link_scores.png").stat().st_size > 9_000
    assert main(["run=predict", "ckpt=made", "run_dir=said", "data.links.top_k=3"]) == 0
    with (tmp_path / "said/predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["source", "target", "source_name", "target_name", "probability"]
    assert [int(row["source"]) for row in rows] == [n for n in range(NODES) for _ in range(3)]
    assert rows[0]["target_name"] == f"n{rows[0]['target']}"
    data = ready(graph)
    said = torch.tensor([[int(row["source"]), int(row["target"])] for row in rows]).T
    assert numbers(said) <= numbers(
        data._link_sets.absent.at(torch.arange(len(data._link_sets.absent)))
    )
    module = LinkPrediction.load_from_checkpoint(tmp_path / "made/checkpoints/best.ckpt").eval()
    LinkPrediction(**module.hparams)  # an export builds it so
    with torch.no_grad():
        every = module.scores_of(graph)(torch.cartesian_prod(*[torch.arange(NODES)] * 2).T)
    best = every.view(NODES, NODES)[5].sigmoid()
    best[[5, *graph.edge_index[1][graph.edge_index[0] == 5].tolist()]] = -1
    found = [float(row["probability"]) for row in rows if row["source"] == "5"]
    assert found == pytest.approx(best.topk(3).values.tolist(), abs=1e-5)


@pytest.mark.slow
def test_two_ranks_test_as_one_and_train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "attnkit"]
    subprocess.run([*command, *SMALL, "trainer=cpu_ddp", "trainer.max_epochs=1",
                    "run_dir=two"], check=True, timeout=600)  # fmt: skip
    assert main(["run=test", "ckpt=two", "trainer=cpu", "run_dir=one"]) == 0
    one, two = (
        json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two")
    )
    for name in ("loss", "average_precision", "mrr", "hits1", "hits10"):
        assert one[f"test/{name}"] == pytest.approx(two[f"test/{name}"], rel=1e-5), name


# --- bad input ------------------------------------------------------------------------------------

COMPLETE = Data(x=torch.ones(4, 5), edge_index=(1 - torch.eye(4)).nonzero().T)
FEW = Data(x=torch.ones(9, 5), edge_index=to_undirected(torch.tensor([[0, 1, 2], [1, 2, 3]])))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Links(val_fraction=0.5, test_fraction=0.5), "val_fraction, test_fraction"),
        (lambda: Links(num_ranked=0), "num_ranked: expected at least 1, got 0"),
        (lambda: Made(batch_size=None), "batch_size: with links: expected the edges of a step"),
        (lambda: Made(positions="laplacian"), "positions: it is for the nodes .* expected None"),
        (lambda: Made(sampler="pyg"), "sampler: it is for the nodes"),
        (lambda: Made(split=1), "split: it is for the nodes .* expected 0, got 1"),
        (lambda: Made(target="labels"), "target: it is for the nodes .* expected classes, got la"),
        (lambda: Made(num_neighbors=[5]), r"num_neighbors: it .* expected \[10, 10\], got \[5\]"),
        (lambda: ready(COMPLETE), "data: all of its 4 nodes are joined .* expected pairs without"),
        (lambda: ready(FEW).summary(), r"links.val_fraction: expected at least one edge, got 0.1"),
        (lambda: ready(Data(x=torch.ones(3, 5), edge_index=torch.zeros(2, 0).long())).summary(),
         "data.links.val_fraction: .* of 0 edges"),
        (lambda: ready(batch_size=40).loader("train"),
         r"data.batch_size: expected at most 2\d, half of the \d+ edges to train on: .* got 40"),
        (lambda: LinkPrediction(model(), hits_at=[0]), "hits_at: expected at least 1, got 0"),
        (lambda: LinkPrediction(model(), hits_at=10), r"hits_at: expected a list of ranks .* 10"),
        (lambda: ready(held={"test": HeldOut(torch.ones(2, 3).long())}),
         "data.link_splits: expected val and test, got test"),
        (lambda: ready(held=dict.fromkeys(("val", "test"), HeldOut(torch.ones(3).long()))),
         r"data: expected edges, int64 \[2, …\], got torch.int64 \[3\]"),
        (lambda: ready(held=dict.fromkeys(("val", "test"), HeldOut(torch.ones(2, 3).long(),
                                                                   torch.ones(2, 4, 9).long()))),
         "data: expected absent pairs of 3 edges, got 4"),
        (lambda: Made(links={"top_k": 1}), "links: expected Links, got dict"),
        (lambda: DigitsGraphData(links=Links(), batch_size=9, num_val=300).setup(),
         "data.num_val: it is for the nodes .* expected 500, got 300"),
    ],
)  # fmt: skip
def test_bad_settings_are_named(make, message):
    with pytest.raises((UserError, ValueError), match=message):
        make()


def test_both_directions_of_an_edge_are_held_out_whatever_they_carry():
    graph = a_graph()
    weights = torch.rand(NODES, NODES)
    graph.edge_weight = weights[tuple(graph.edge_index)]
    data = ready(graph)
    assert not data.describe()["directed"]
    for split in ("train", "val", "test"):
        for batch in batches(data, split):
            assert not numbers(batch.pairs) & numbers(batch.edge_index)
            torch.testing.assert_close(batch.edge_weight, weights[tuple(batch.edge_index)])


def test_a_graph_of_too_few_edges_to_split_is_predicted_and_says_what_it_is():
    data = Made(FEW)
    data.setup("predict")
    assert str(data) == "Made: an undirected graph of 9 nodes with 5 features"
    assert len(batches(data, "predict")[0].sources) == 9


def test_labels_of_the_nodes_are_not_read():
    graph = a_graph(y=torch.rand(NODES, 3), train_mask=[1, 2])
    assert len(batches(ready(graph), "val")) == 1


@pytest.mark.parametrize(
    ("module", "data", "message"),
    [
        (lambda: LinkPrediction(model()), lambda: DigitsGraphData(), "is for level=node"),
        (lambda: LinkPrediction(model()), DigitGridsData, "is for level=graph"),
        (lambda: NodeClassification(model(), num_classes=8), Made, "is for level=link"),
        (lambda: LinkPrediction(model(), in_channels=4), Made, "5 features, but the module"),
        (lambda: LinkPrediction(GCN(5, 4, 1, 7), directed=True), lambda: Made(a_graph(True)),
         r"expected an even number of channels, \[23, 6\], got \[23, 7\]"),
        (lambda: LinkPrediction(attnkit.GraphTransformer(5, 6, 2, heads=3, readout="edge")), Made,
         r"expected one logit for each pair, \[24, 1\], got \[24, 2\]"),
        (lambda: LinkPrediction(Two(5, 5)), Made, "expected a row for each node, got tuple"),
        (lambda: LinkPrediction(model(readout="graph")), Made,
         "model.readout: expected node or edge, got graph"),
        (lambda: NodeClassification(model(readout="graph"), num_classes=8), DigitsGraphData,
         "model.readout: expected node, got graph"),
        (lambda: LinkPrediction(attnkit.GraphTransformer(5, 6, 2, heads=3, position_dim=4)), Made,
         "model.position_dim: links have no positions: expected null, got 4"),
        (lambda: LinkPrediction(Given(torch.ones(3, 4))), Made,
         r"expected a row for each node, \[23, 4\], got \[3, 4\]"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_named(tmp_path, module, data, message):
    with pytest.raises(UserError, match=message):
        quiet(tmp_path, max_epochs=1).fit(module(), datamodule=data())
