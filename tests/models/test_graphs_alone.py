"""In evaluation a graph alone equals itself in any batch and at any place of it, in every model,
and so do gradients."""

import pytest
import torch
from torch_geometric.data import Batch, Data

from attnkit import GAT, Edges, GraphTransformer, Polynormer, SGFormer

IN, HIDDEN, CLASSES, EDGE_DIM = 5, 12, 3, 2
SIZES = (7, 1, 11, 2, 7)  # two of the same size
READOUTS = "node", "graph", "edge"
READINGS = *({"readout": readout} for readout in READOUTS), {"readout": "graph", "pool": "mean"}
ORDERS = {"as given": [0, 1, 2, 3, 4], "the other way": [4, 3, 2, 1, 0], "two": [2, 0]}

GATS = {
    "gat": {},
    "gatv2, batch norm": {"score": "gatv2", "norm": "batch"},
    "linear layers, batch norm": {"first_linear": True, "last_linear": True, "norm": "batch"},
    "gat_sep": {"mlp_ratio": 1.0, "separate_self": True, "norm": "layer"},
    "gat, graph": {"readout": "graph"},
    "gat, max": {"readout": "graph", "pool": "max", "num_layers": 1, "norm": "batch"},
    "gat, edge": {"readout": "edge"},
    "gat_sep, graph": {"mlp_ratio": 1.0, "separate_self": True, "readout": "graph"},
    "gat_sep, edge": {"mlp_ratio": 1.0, "norm": "batch", "readout": "edge"},
}
EXPANDER = {"global_attention": None, "expander_degree": 4}
TRANSFORMERS = {
    "softmax": {},
    "linear": {"global_attention": "linear"},
    "without local": {"local": None},
    "local alone": {"global_attention": None},
    "gatv2 along edges": {"local": "gatv2", "edge_dim": EDGE_DIM},
    "expander": EXPANDER,
    "expander and softmax": {"expander_degree": 2, "edge_dim": EDGE_DIM},
    "virtual nodes": {"global_attention": None, "num_virtual_nodes": 2},
    "Exphormer": {**EXPANDER, "num_virtual_nodes": 1, "edge_dim": EDGE_DIM},
}


def transformer(**options):
    model = GraphTransformer(IN, HIDDEN, CLASSES, num_layers=2, heads=3, **options)
    model.takes_features = "edge_dim" in options
    return model


def models():
    for name, options in GATS.items():
        yield name, lambda options=options: GAT(IN, HIDDEN, CLASSES, heads=3, **options)
    for own in READINGS:
        yield (
            ", ".join(("SGFormer", *own.values())),
            lambda own=own: SGFormer(IN, HIDDEN, CLASSES, num_layers=2, heads=2, **own),
        )
        yield (
            ", ".join(("Polynormer", *own.values())),
            lambda own=own: Polynormer(IN, HIDDEN, CLASSES, num_local_layers=2, heads=3, **own),
        )
    for name, options in TRANSFORMERS.items():
        for readout in READOUTS if name in ("softmax", "Exphormer") else READOUTS[:1]:
            own = {"readout": readout, **options}
            yield f"{name}, {readout}", lambda own=own: transformer(**own)


MODELS = dict(models())


def randomised(module):
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    return module.double().eval()


@pytest.fixture(scope="module")
def graphs():
    generator = torch.Generator().manual_seed(0)
    found = []
    for size in SIZES:
        num_edges = 3 * size if size > 1 else 0
        rand = {"generator": generator, "dtype": torch.float64}
        found.append(
            Data(
                x=torch.randn(size, IN, **rand),
                edge_index=torch.randint(size, (2, num_edges), generator=generator),
                edge_attr=torch.randn(num_edges, EDGE_DIM, **rand),
                pair_index=torch.randint(size, (2, 3), generator=generator),
            )
        )
    return found


def logits(model, data, **options):
    """Of the nodes, the graphs or the pairs of the data, by the model's readout."""
    if isinstance(data, Batch):
        options["batch"] = data.batch
    if model.readout == "edge":
        options["pairs"] = data.pair_index
    if getattr(model, "takes_features", False):
        options["edge_attr"] = data.edge_attr
    return model(data.x, data.edge_index, **options)


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_of_a_batch_is_alone(name, graphs):
    model = randomised(MODELS[name]())
    parameters = [*model.parameters()]
    alone = [logits(model, graph) for graph in graphs]
    for order in ORDERS.values():
        together = logits(model, Batch.from_data_list([graphs[place] for place in order]))
        apart = torch.cat([alone[place] for place in order])
        torch.testing.assert_close(together, apart)
        gradients = [
            torch.autograd.grad(
                rows.square().sum(), parameters, retain_graph=True, materialize_grads=True
            )
            for rows in (together, apart)
        ]
        torch.testing.assert_close(*gradients)
    assert sum(map(len, alone)) == {"node": sum(SIZES), "graph": 5, "edge": 15}[model.readout]
    assert len({tuple(row.tolist()) for rows in alone for row in rows}) > 4


def test_edges_that_are_kept_are_those_of_the_graphs(graphs):
    """The same `Edges` as a batch and as one graph: expander edges are of the first, then the
    other."""
    model = randomised(MODELS["Exphormer, node"]())
    batch = Batch.from_data_list(graphs)
    edges = Edges(batch.edge_index, batch.num_nodes)
    as_batch = model(batch.x, edges, batch.edge_attr, batch=batch.batch)
    as_one = model(batch.x, edges, batch.edge_attr)
    assert not torch.allclose(as_batch, as_one)
    torch.testing.assert_close(as_one, model(batch.x, batch.edge_index, batch.edge_attr))
    torch.testing.assert_close(as_batch, model(batch.x, edges, batch.edge_attr, batch=batch.batch))


def test_a_batch_of_other_nodes_is_refused(graphs):
    for name in ("gat", "SGFormer, node", "Polynormer, graph", "local alone, node"):
        with pytest.raises(ValueError, match=r"batch: expected \[7 nodes\], as x has, got \[5\]"):
            MODELS[name]()(graphs[0].x.float(), graphs[0].edge_index, batch=torch.zeros(5).long())
