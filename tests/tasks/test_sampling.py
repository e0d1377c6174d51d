"""Sampled neighbours, and a network layer by layer: against PyG and the whole graph at once."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from made_graphs import ADAM, CONSTANT, RandomGraph
from made_graphs import ready as a_graph
from task_support import quiet
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.nn import GAT as PyGGAT
from torch_geometric.nn import GCN
from torch_geometric.typing import WITH_PYG_LIB
from torch_geometric.utils import k_hop_subgraph

import attnkit
from attnkit.lightning import ExactResume, UserError
from attnkit.lightning.resume.sampler import UnpaddedSampler, as_it_is
from attnkit.tasks.graphs import (
    DigitsGraphData,
    EpochSampler,
    InNeighbors,
    NeighborBatches,
    NodeClassification,
    sample_neighbors,
)
from attnkit.tasks.graphs.sampling import Layers, layerwise

NODES, CHANNELS = 211, 5
ALL = -1


def edges(count=1013):
    """Directed, with loops, repeats, nodes nothing leads to and one that everybody leads to."""
    generator = torch.Generator().manual_seed(0)
    star = torch.stack([torch.arange(NODES), torch.full((NODES,), 3)])
    return torch.cat([torch.randint(0, NODES - 7, (2, count), generator=generator), star], dim=1)


def pairs(nodes, edge_index):
    """The edges in the numbers of the whole graph, sorted."""
    return sorted(map(tuple, nodes[edge_index].t().tolist()))


@pytest.mark.parametrize("hops", [0, 1, 2, 3])
def test_all_neighbours_are_the_exact_subgraph(hops):
    edge_index = edges(301)
    seeds = torch.tensor([17, 2, 101, 209])
    sampled = sample_neighbors(InNeighbors.of(edge_index, NODES), seeds, [ALL] * hops)
    subset, _, _, mask = k_hop_subgraph(seeds, hops, edge_index, num_nodes=NODES)
    assert sampled.nodes.sort().values.tolist() == subset.tolist()
    assert sampled.nodes.unique().numel() == sampled.nodes.numel()
    # PyG also gives the edges into the nodes reached last, which no layer looks at.
    inner = k_hop_subgraph(seeds, max(hops - 1, 0), edge_index, num_nodes=NODES)[0]
    needed = mask & torch.isin(edge_index[1], inner) & (hops > 0)
    expected = sorted(map(tuple, edge_index[:, needed].t().tolist()))
    assert pairs(sampled.nodes, sampled.edge_index) == expected


def test_all_neighbours_give_the_outputs_of_the_whole_graph():
    edge_index, x = edges(), torch.randn(NODES, 5, dtype=torch.float64)
    model = GCN(5, 7, num_layers=2, normalize=False).double().eval()
    seeds = torch.tensor([17, 2, 3, 209, 17])
    nodes, local, positions = sample_neighbors(
        InNeighbors.of(edge_index, NODES), seeds, [ALL, ALL]
    )[:3]
    assert torch.equal(nodes[positions], seeds)
    whole = model(x, edge_index)[seeds]
    torch.testing.assert_close(model(x[nodes], local)[positions], whole)


@pytest.mark.parametrize("count", [0, 1, 3, 40])
def test_a_node_keeps_as_many_of_its_edges_as_asked_for(count):
    edge_index = edges()
    seeds = torch.randperm(NODES)[:53]
    nodes, local, _ = sample_neighbors(InNeighbors.of(edge_index, NODES), seeds, [count])[:3]
    available = torch.bincount(edge_index[1], minlength=NODES)
    kept = torch.bincount(nodes[local[1]], minlength=NODES)
    assert torch.equal(kept[seeds], available[seeds].clamp(max=count))
    assert kept.sum() == kept[seeds].sum()
    there = dict.fromkeys(map(tuple, edge_index.t().tolist()), 0)
    for pair in map(tuple, edge_index.t().tolist()):
        there[pair] += 1
    for pair in set(drawn := pairs(nodes, local)):
        assert drawn.count(pair) <= there[pair], "an edge was drawn twice"


def test_hops_start_from_the_new_nodes_only():
    chain = torch.stack([torch.arange(1, 7), torch.arange(6)])  # 6 → 5 → … → 0
    neighbors = InNeighbors.of(chain, 7)
    nodes, local, _ = sample_neighbors(neighbors, torch.tensor([0]), [5, 5, 0, 5])[:3]
    assert nodes.tolist() == [0, 1, 2]
    assert pairs(nodes, local) == [(1, 0), (2, 1)]


def test_draws_are_uniform():
    degree, count, draws = 11, 4, 6000
    star = torch.stack([torch.arange(1, degree + 1), torch.zeros(degree, dtype=torch.int64)])
    # As many copies of the star as draws: one call, and every row must be fair.
    shifts = torch.arange(draws) * (degree + 1)
    edge_index = (star[:, None] + shifts[:, None]).flatten(1)
    neighbors = InNeighbors.of(edge_index, draws * (degree + 1))
    nodes, local, _ = sample_neighbors(
        neighbors, shifts, [count], torch.Generator().manual_seed(5)
    )[:3]
    chosen = (nodes[local[0]] % (degree + 1) - 1).view(-1, count)
    assert len(chosen) == draws
    assert (chosen.sort(dim=1).values.diff(dim=1) > 0).all()  # without replacement
    expected = draws * count / degree
    deviation = (expected * (1 - count / degree)) ** 0.5
    assert ((torch.bincount(chosen.flatten()) - expected).abs() < 4.5 * deviation).all()
    both = torch.zeros(degree, degree)
    for row in chosen.split(1, dim=1):
        for other in chosen.split(1, dim=1):
            both.index_put_((row.flatten(), other.flatten()), torch.ones(draws), accumulate=True)
    pairs_expected = draws * count * (count - 1) / (degree * (degree - 1))
    off = both[~torch.eye(degree, dtype=torch.bool)]
    assert ((off - pairs_expected).abs() < 5 * pairs_expected**0.5).all()


def test_the_generator_decides():
    neighbors, seeds = InNeighbors.of(edges(), NODES), torch.arange(50)

    def draw(seed):
        return sample_neighbors(neighbors, seeds, [2, 2], torch.Generator().manual_seed(seed))

    for one, other in zip(draw(1)[:3], draw(1)[:3], strict=True):
        assert torch.equal(one, other)
    assert pairs(*draw(1)[:2]) != pairs(*draw(2)[:2])


def test_no_seeds_and_no_edges():
    neighbors = InNeighbors.of(torch.empty((2, 0), dtype=torch.int64), 5)
    nodes, local, _ = sample_neighbors(neighbors, torch.tensor([4, 1]), [3, ALL])[:3]
    assert (nodes.tolist(), local.shape) == ([1, 4], (2, 0))
    nodes, local, _ = sample_neighbors(neighbors, torch.tensor([], dtype=torch.int64), [3])[:3]
    assert (nodes.numel(), local.shape) == (0, (2, 0))


def test_a_wrong_number_is_named():
    neighbors = InNeighbors.of(edges(), NODES)
    with pytest.raises(ValueError, match=r"num_neighbors: expected -1 .*, got \[3, -2\]"):
        sample_neighbors(neighbors, torch.tensor([0]), [3, -2])


def graph(sparse=False):
    x = torch.randn(NODES, 5) * (torch.rand(NODES, 5) < 0.4)
    return Data(x=x.to_sparse_csr() if sparse else x, y=torch.arange(NODES) % 3, edge_index=edges())


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches(sparse, workers):
    data, seeds = graph(sparse), torch.arange(0, NODES, 3)
    batches = NeighborBatches(data, seeds, [4, 2], seed=7)
    dense = data.x.to_dense()

    def read(workers):
        return list(DataLoader(batches, 16, num_workers=workers, collate_fn=as_it_is))

    found = read(workers)
    assert torch.cat([batch.n_id[: batch.batch_size] for batch in found]).tolist() == seeds.tolist()
    for batch, again in zip(found, read(0), strict=True):
        assert torch.equal(batch.x.to_dense(), dense[batch.n_id])
        assert torch.equal(batch.y, data.y[batch.n_id])
        assert batch.edge_index.max() < batch.num_nodes
        assert torch.equal(batch.n_id, again.n_id)
        assert torch.equal(batch.edge_index, again.edge_index)


def test_every_epoch_draws_anew_and_a_resumed_one_alike():
    batches = NeighborBatches(graph(), torch.arange(NODES), [2], seed=7)
    sampler = EpochSampler(batches, num_replicas=1, rank=0, shuffle=False)
    loader = DataLoader(batches, 32, sampler=sampler, collate_fn=as_it_is)

    def read(epoch, start=0):
        sampler.set_epoch(epoch)
        sampler.start = start
        return [pairs(batch.n_id, batch.edge_index) for batch in loader]

    assert read(0) == read(0)
    assert read(0) != read(1)
    assert read(1, start=64) == read(1)[2:]


def test_processes_share_the_seeds():
    data = DigitsGraphData(batch_size=64)
    data.setup()
    batches = NeighborBatches(data.graph, data.graph.val_mask.nonzero().flatten(), [3])
    seen = [
        batch.n_id[: batch.batch_size]
        for rank in range(3)
        for batch in DataLoader(
            batches, 64, sampler=UnpaddedSampler(batches, 3, rank), collate_fn=as_it_is
        )
    ]
    assert torch.equal(torch.cat(seen), batches.seeds)


@pytest.mark.skipif(not WITH_PYG_LIB, reason="needs pyg-lib")
def test_pygs_loader_gives_the_same_form():
    data = DigitsGraphData(batch_size=64, sampler="pyg", num_neighbors=[ALL, ALL])
    data.setup()
    ours = DigitsGraphData(batch_size=64, num_neighbors=[ALL, ALL])
    ours.setup()
    for theirs, batch in zip(data.val_dataloader(), ours.val_dataloader(), strict=True):
        assert torch.equal(
            theirs.n_id[: theirs.batch_size].sort().values, batch.n_id[: batch.batch_size]
        )
        assert set(theirs.n_id.tolist()) == set(batch.n_id.tolist())


@pytest.mark.skipif(WITH_PYG_LIB, reason="pyg-lib is there")
def test_without_pyg_lib_its_loader_is_refused():
    data = DigitsGraphData(batch_size=64, sampler="pyg")
    data.setup()
    with pytest.raises(UserError, match=r"data.sampler: pyg needs pyg-lib"):
        data.train_dataloader()


def models():
    sep = {"mlp_ratio": 1.0, "separate_self": True, "norm": "layer"}
    yield "gat", attnkit.GAT(CHANNELS, 16, 5, heads=2)
    yield "gatv2", attnkit.GAT(CHANNELS, 16, 5, heads=2, score="gatv2", residual=True, num_layers=3)
    yield "batch norm", attnkit.GAT(CHANNELS, 16, 5, heads=2, norm="batch")
    yield "one", attnkit.GAT(CHANNELS, 16, 5, num_layers=1)
    yield "sep", attnkit.GAT(CHANNELS, 16, 5, heads=2, **sep)
    yield "transformer", attnkit.GraphTransformer(CHANNELS, 16, 5, heads=2, global_attention=None)


@pytest.mark.parametrize("num_edges", [97, 10**6])
@pytest.mark.parametrize(("name", "model"), list(models()))
def test_logits_are_those_of_the_whole_graph(name, model, num_edges):
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    x, edge_index = torch.randn(NODES, CHANNELS), edges()
    model(x, edge_index)  # statistics of batch norm
    model.eval()
    wanted = torch.tensor([207, 3, 19, 3, 0])
    neighbors = InNeighbors.of(edge_index, NODES)
    with torch.no_grad():
        whole = model(x, edge_index)
    found = layerwise(model.hops, x, neighbors, wanted, num_edges)
    torch.testing.assert_close(found, whole[wanted], atol=1e-5, rtol=1e-5)
    found = layerwise(model.hops, x, neighbors, torch.arange(NODES), num_edges)
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)


def test_sparse_and_half_features():
    model = attnkit.GAT(CHANNELS, 16, 5, heads=2).eval()
    x = (torch.randn(NODES, CHANNELS) * (torch.rand(NODES, CHANNELS) < 0.4)).half()
    neighbors, every = InNeighbors.of(edges(), NODES), torch.arange(NODES)
    with torch.no_grad():
        whole = model(x.float(), edges())
    for given in (x, x.float().to_sparse_csr()):
        found = layerwise(model.hops, given, neighbors, every, 97)
        torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)


def test_models_that_look_everywhere_have_no_layers_of_their_own():
    assert attnkit.GraphTransformer(CHANNELS, 16, 5, heads=2).hops is None


def ready(**options):
    return a_graph(5, **options)


def task_of(model):
    names = list("abcde")
    return NodeClassification(model, ADAM, CONSTANT, num_classes=5, class_names=names)


def test_metrics_and_predictions_are_those_of_the_whole_graph(tmp_path):
    task = task_of(attnkit.GAT(CHANNELS, 16, 5, heads=2))
    whole, batches = ready(), ready(batch_size=16, num_neighbors=[1, 1])
    results = [quiet(tmp_path).test(task, data, verbose=False)[0] for data in (whole, batches)]
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    rows = [quiet(tmp_path).predict(task, data)[0] for data in (whole, batches)]
    assert rows[1]["node"] == list(range(97))
    assert rows[1]["label"] == rows[0]["label"]
    assert rows[1]["probability"] == pytest.approx(rows[0]["probability"], abs=1e-5)
    sampled = ready(batch_size=16, num_neighbors=[1, 1], evaluation="sampled")
    found = quiet(tmp_path).test(task, sampled, verbose=False)[0]
    assert abs(found["test/loss"] - results[0]["test/loss"]) > 1e-3


def test_a_model_without_layers_and_few_batches_are_sampled(tmp_path):
    theirs = task_of(PyGGAT(CHANNELS, 13, num_layers=2, out_channels=5))
    data = ready(batch_size=16, evaluation="layers")
    with pytest.raises(UserError, match="layers needs a model that can be computed layer by layer"):
        quiet(tmp_path).test(theirs, data, verbose=False)
    task = task_of(attnkit.GAT(CHANNELS, 16, 5, heads=2))
    for limit, expected in ((2, False), (1.0, True)):
        trainer = quiet(tmp_path, limit_test_batches=limit)
        trainer.test(task, ready(batch_size=16), verbose=False)
        assert isinstance(trainer.test_dataloaders, Layers) == expected


def test_of_a_sampled_sub_graph_only_what_the_seeds_read_is_computed(tmp_path):
    model = attnkit.GAT(CHANNELS, 16, 5, heads=2, dropout_p=0.0, attention_dropout_p=0.0)
    task = task_of(model)
    task.log = lambda *_, **__: None
    sizes = []
    model.layers[1].register_forward_hook(lambda layer, given, found: sizes.append(len(found)))
    (batch, *_) = ready(batch_size=16, num_neighbors=[5, 3]).loader("train")
    loss = task.training_step(batch, 0)
    seeds = slice(batch.batch_size)
    logits = model(batch.x, batch.edge_index)[seeds]
    expected = torch.nn.functional.cross_entropy(logits, batch.y[seeds])
    torch.testing.assert_close(loss, expected)
    assert sizes == [16, batch.num_nodes]
    ours = torch.autograd.grad(loss, list(model.parameters()))
    theirs = torch.autograd.grad(expected, list(model.parameters()))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("workers", [0, 1])
def test_sampled_training_goes_on_in_the_middle_of_an_epoch(tmp_path, workers):
    def fit(resume=None):
        torch.manual_seed(5 if resume is None else 77)
        task = task_of(attnkit.GAT(CHANNELS, 16, 5, heads=2))
        data = RandomGraph(5, batch_size=16, num_neighbors=[2, 2], num_workers=workers)
        saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
        options = {"max_steps": 6, "enable_checkpointing": True}  # of two an epoch
        trainer = quiet(tmp_path, callbacks=[saving, ExactResume()], **options)
        trainer.fit(task, data, ckpt_path=resume, weights_only=True)
        return task.state_dict()

    whole, resumed = fit(), fit(tmp_path / "step=3.ckpt")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
