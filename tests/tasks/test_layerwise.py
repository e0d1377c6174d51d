"""Layer by layer and in blocks: the logits, metrics and predictions of the whole graph at once."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from made_graphs import ADAM, CONSTANT, RandomGraph
from made_graphs import ready as a_graph
from task_support import quiet
from torch_geometric.nn import GAT as PyGGAT

import attnkit
from attnkit.lightning import ExactResume, UserError
from attnkit.tasks.graphs import InNeighbors, NodeClassification
from attnkit.tasks.graphs.sampling import Layers, layerwise

NODES, CHANNELS = 211, 5


def edges(count=1013):
    """Directed, with loops, repeats, nodes nothing leads to and one that everybody leads to."""
    generator = torch.Generator().manual_seed(0)
    star = torch.stack([torch.arange(NODES), torch.full((NODES,), 3)])
    return torch.cat([torch.randint(0, NODES - 7, (2, count), generator=generator), star], dim=1)


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
