"""Positional encodings of nodes: what they are, and that a model reads them or says why not."""

import pytest
import torch
from made_graphs import RandomGraph
from task_support import quiet
from torch_geometric.utils import to_dense_adj, to_undirected

import attnkit
from attnkit.launch.main import main
from attnkit.lightning import UserError
from attnkit.tasks.graphs import NodeClassification
from attnkit.tasks.graphs.features import node_positions

NODES, DIM = 127, 5  # more than 100, from which on PyG's eigenvectors are sparse


class Simple(RandomGraph):
    """Connected, without loops and repeated edges."""

    def load(self):
        data = super().load()
        ring = torch.arange(NODES)
        edges = torch.cat([data.edge_index, torch.stack([ring, ring.roll(1)])], dim=1)
        return data.update({"edge_index": edges[:, edges[0] != edges[1]].unique(dim=1)})


def ready(**options):
    data = Simple(2, NODES, **options)
    data.setup()
    return data


def test_random_walks_come_back():
    graph = ready().graph
    found = node_positions(graph, "random_walk", DIM)
    step = to_dense_adj(graph.edge_index, max_num_nodes=NODES)[0]
    step = step / step.sum(dim=1, keepdim=True).clamp(min=1)
    powers = [torch.linalg.matrix_power(step, number).diag() for number in range(1, DIM + 1)]
    torch.testing.assert_close(found, torch.stack(powers, dim=1))
    assert found[:, 1:].std() > 0


def test_eigenvectors_are_those_of_the_laplacian():
    graph = ready().graph
    found = node_positions(graph, "laplacian", DIM, seed=1).double()
    adjacency = to_dense_adj(to_undirected(graph.edge_index), max_num_nodes=NODES)[0].double()
    degree = adjacency.sum(dim=1)
    root = torch.where(degree > 0, degree, 1).rsqrt()
    identity = torch.diag((degree > 0).double())
    laplacian = identity - root[:, None] * adjacency * root
    values = torch.linalg.eigvalsh(laplacian)[1 : DIM + 1]
    torch.testing.assert_close(laplacian @ found, found * values, atol=1e-5, rtol=1e-5)
    again = node_positions(graph, "laplacian", DIM, seed=1).double()
    assert torch.equal(found, again)
    state = torch.get_rng_state()
    other = node_positions(graph, "laplacian", DIM, seed=2).double()
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.allclose(other, found)
    torch.testing.assert_close(other.abs(), found.abs(), atol=1e-5, rtol=1e-4)
    with pytest.raises(UserError, match="position_dim: expected at most 125"):
        node_positions(graph, "laplacian", 126)


def test_batches_carry_those_of_their_nodes():
    data = ready(positions="laplacian", position_dim=DIM, batch_size=7)
    assert data.describe()["position_dim"] == DIM
    for batch in data.loader("train"):
        assert torch.equal(batch.positions, data.graph.positions[batch.n_id])
    assert "position_dim" not in ready().describe()
    assert "positions" not in ready().graph


@pytest.mark.parametrize(
    ("positions", "model", "message"),
    [
        ("laplacian", attnkit.GAT(5, 8, 2), "GAT reads none; model=graph_transformer does"),
        ("laplacian", attnkit.GraphTransformer(5, 8, 2, position_dim=4), "Transformer reads 4"),
        (None, attnkit.GraphTransformer(5, 8, 2, position_dim=4), "data.position_dim=4, .* null"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, positions, model, message):
    data = ready(positions=positions, position_dim=DIM)
    with pytest.raises(UserError, match=message):
        quiet(tmp_path).test(NodeClassification(model, num_classes=2), datamodule=data)


def test_the_model_learns_their_number_from_the_data(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    command = (
        "task=graph", "model=exphormer", "data=pyg", "data.positions=laplacian",
        "data.position_dim=3", "model.random_signs=true", "trainer=cpu", "trainer.max_epochs=1",
        "run_dir=run", "callbacks.curves=null", "callbacks.classes=null", "callbacks.nodes=null",
        "logger.tensorboard=null",
    )  # fmt: skip
    assert main(command) == 0, capfd.readouterr().err
    predict = ("run=predict", "ckpt=run", "predict.attention=true", "predict.top_k=50")
    assert main([*predict, "run_dir=told"]) == 0, capfd.readouterr().err
    rows = (tmp_path / "told" / "attention.csv").read_text().splitlines()
    assert sum("virtual 0" in row for row in rows) == 2 * 34  # of each node and layer
    assert main(["run=explain", "ckpt=run", "run_dir=seen"]) == 2
    assert "a model that reads positions is not explained" in capfd.readouterr().err


@pytest.mark.parametrize("global_attention", [None, "softmax"])
def test_training_reads_the_positions_of_the_nodes_it_reads(global_attention):
    """Local attention alone reads a part of the graph in training; the outputs are the same."""
    data = ready(positions="random_walk", position_dim=DIM)
    graph = data.graph
    graph.train_mask = torch.arange(NODES) < 2
    model = attnkit.GraphTransformer(
        5, 8, 2, num_layers=1, global_attention=global_attention, position_dim=DIM
    )
    task = NodeClassification(model, num_classes=2).eval()
    logits, labels = task._of_stage("train", graph)
    assert bool(task._parts) == (global_attention is None)
    torch.testing.assert_close(logits, task.logits(graph)[:2])
    moved = graph.positions.roll(1, dims=0)
    whole = model(graph.x, graph.edge_index, positions=moved)
    assert not torch.allclose(logits, whole[:2])
    assert torch.equal(labels, graph.y[:2])
