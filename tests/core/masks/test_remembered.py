"""The edges of a tensor are sorted once, for all layers and steps, and never kept too long."""

import copy
import gc
import os
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import compiling_is_exporting
from torch import nn
from torch.utils.data import DataLoader, Dataset

import attnkit
from attnkit import Edges
from attnkit.core.masks.adjacency import Adjacency
from attnkit.core.masks.edges import remembered_edges

NODES, CHANNELS = 11, 5
WRITES = {
    "in place": lambda tensor, new: tensor.copy_(new),
    "data": lambda tensor, new: tensor.data.copy_(new),
    "data replaced": lambda tensor, new: setattr(tensor, "data", new.clone()),
    "numpy": lambda tensor, new: tensor.numpy().__setitem__(..., new.numpy()),
    "set": lambda tensor, new: tensor.set_(new.clone()),
    "resize": lambda tensor, new: tensor.resize_(0).resize_(new.shape).copy_(new),
    "inference": torch.inference_mode()(lambda tensor, new: tensor.copy_(new)),
}


@pytest.fixture
def sorts(monkeypatch):
    """What was sorted."""
    given = []

    def count(*arguments, of=Adjacency.of):
        given.append(arguments)
        return of(*arguments)

    monkeypatch.setattr(Adjacency, "of", count)
    return given


def graph(num_edges=31, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(NODES, (2, num_edges), generator=generator)


class Layers(nn.Module):
    """Layers that are given the tensor itself, as users write them."""

    def __init__(self, depth=3, **options):
        super().__init__()
        torch.manual_seed(0)
        options = {"score": "gat", "add_self_loops": True, "backend": "edges"} | options
        sizes = [CHANNELS, 12, 12][:depth]
        self.layers = nn.ModuleList(attnkit.GraphAttention(size, 4, 3, **options) for size in sizes)

    def forward(self, x, edge_index):
        for layer in self.layers:
            x = layer(x, edge_index).relu()
        return x


X = torch.randn(NODES, CHANNELS, generator=torch.Generator().manual_seed(1))


def loose(tensor):
    return remembered_edges(tensor, NODES, NODES)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_layers_and_steps_sort_once(mode, sorts):
    model, edge_index = Layers(), graph().to(torch.int32)
    with mode():
        outputs = [model(X, edge_index) for _ in range(3)]
    assert len(sorts) == 1
    outputs.append(model(X, edge_index))  # trained on what inference sorted
    outputs[-1].sum().backward()
    assert len(sorts) == 1
    for output in outputs:
        assert torch.equal(output, model(X, Edges(edge_index, NODES)))


def test_numbers_are_compared_once_a_layer(monkeypatch):
    model, edge_index = Layers(), graph()
    model(X, edge_index)
    compared = []
    monkeypatch.setattr(
        "attnkit.core.masks.kept._equal", lambda *pair: compared.append(pair) or torch.equal(*pair)
    )
    model(X, edge_index).sum().backward()
    assert len(compared) == len(model.layers)


@pytest.mark.parametrize("write", WRITES)
def test_memory_that_is_written_to(write):
    model, memory = Layers(), graph()
    for seed in (0, 1, 0):
        content = graph(seed=seed)
        WRITES[write](memory, content)
        for _ in range(2):
            output = model(X, memory)
        assert torch.equal(output, model(X, Edges(content, NODES)))
    memory, resized = graph(), graph(37, seed=2)
    model(X, memory)
    memory.resize_(resized.shape).copy_(resized)
    assert torch.equal(model(X, memory), model(X, Edges(resized, NODES)))


@pytest.mark.parametrize(
    ("backend", "loops", "row", "node"),
    [("auto", True, 0, -1), ("edges", False, 1, NODES), ("reference", True, 1, -1)],
)
def test_a_node_that_is_not_there_after_a_write(backend, loops, row, node):
    name = ("source", "target")[row]
    layer = attnkit.GraphAttention(CHANNELS, 4, add_self_loops=loops, backend=backend)
    for write in (lambda t: t.__setitem__((row, 3), node), lambda t: t.numpy().fill(node)):
        memory = graph()
        layer(X, memory)
        write(memory)
        name = "source" if memory[0, 3] == node else name
        with pytest.raises(IndexError, match=f"edge_index: the {name} nodes go from"):
            layer(X, memory)
        memory.copy_(graph())
        layer(X, memory)
    edges = Edges(memory, NODES)
    edges.adjacency  # noqa: B018
    memory.numpy()[row, 3] = node
    with pytest.raises(IndexError, match="edge_index: the"):
        edges.adjacency  # noqa: B018


def test_other_readers_name_a_node_that_is_not_there():
    memory = graph()
    edges = Edges(memory, NODES)
    memory.numpy()[0, 3] = -1
    with pytest.raises(IndexError, match="edge_index: the source nodes go from -1"):
        edges.dense(NODES, NODES, torch.device("cpu"))
    place = torch.zeros((), dtype=torch.long)
    with pytest.raises(IndexError, match="edge_index: the source nodes go from -1"):
        edges.allows(place, place, place, place, NODES, NODES)


def test_what_is_remembered_goes_with_the_tensor():
    model, edge_index = Layers(), graph()
    model(X, edge_index).sum().backward()
    edges = loose(edge_index)
    assert loose(edge_index) is edges
    alive = [weakref.ref(each) for each in (edges, edges.with_loops, edges.with_loops.adjacency)]
    del edges
    gc.disable()  # at once, without looking for circles
    try:
        assert None not in [each() for each in alive]
        del edge_index
        assert [each() for each in alive] == [None] * 3
    finally:
        gc.enable()


def test_a_model_carries_none_of_it():
    model, edge_index = Layers(), graph()
    size = len(pickle.dumps(model))
    model(X, edge_index)
    assert len(pickle.dumps(model)) == size
    assert len(pickle.dumps(edge_index)) == len(pickle.dumps(graph()))
    twin, copied = copy.deepcopy((model, edge_index))
    assert loose(copied) is not loose(edge_index)
    copied.copy_(graph(seed=1))
    assert torch.equal(twin(X, copied), model(X, Edges(graph(seed=1), NODES)))
    assert torch.equal(model(X, edge_index), model(X, Edges(graph(), NODES)))


def test_other_sizes_are_others(sorts):
    edge_index = graph()
    for targets, sources in ((NODES, NODES), (NODES, 13), (17, NODES), (NODES, NODES)):
        edges = remembered_edges(edge_index, targets, sources)
        assert edges.sizes == (targets, sources)
        assert edges.adjacency.num_targets == targets
    with pytest.raises(IndexError, match="edge_index: the source nodes go from"):
        remembered_edges(edge_index, NODES, 2)
    assert remembered_edges(edge_index, NODES, NODES) is edges


def test_the_last_64_graphs_of_a_list_are_remembered(monkeypatch):
    monkeypatch.setattr("attnkit.core.masks.kept.MOST", 3)
    graphs = [graph(seed=seed) for seed in range(5)]
    made = [weakref.ref(loose(each)) for each in graphs]
    assert [each() is not None for each in made] == [False, False, True, True, True]
    assert [loose(each) is one() for each, one in zip(graphs[2:], made[2:], strict=True)] == [
        True
    ] * 3
    loose(graphs[2]), loose(graphs[0])
    assert [each() is not None for each in made] == [False, False, False, True, True]


def test_where_new_tensors_are_made_does_not_matter():
    edge_index = graph(5003)
    with torch.device("meta"):
        edges = loose(edge_index)
        assert edges.adjacency.offsets.is_cpu
    assert loose(edge_index).adjacency is edges.adjacency
    expected = Edges(edge_index, NODES).adjacency
    assert torch.equal(edges.adjacency.by_source, expected.by_source)


def test_memory_that_two_tensors_share():
    memory = graph(40)
    view = memory[:, :29]
    assert loose(view) is loose(view)
    assert loose(memory[:, :29]) is not loose(view)  # another object, and the first is gone
    expected = loose(view).adjacency
    memory.copy_(graph(40, seed=3))
    assert loose(view).adjacency is not expected
    assert torch.equal(
        loose(view).adjacency.source, Edges(graph(40, seed=3)[:, :29], NODES).adjacency.source
    )


SPARSE = {
    "coo": lambda matrix: matrix.to_sparse_coo(),
    "csr": lambda matrix: matrix.to_sparse_csr(),
    "csc": lambda matrix: matrix.to_sparse_csc(),
}


@pytest.mark.parametrize("layout", SPARSE)
def test_sparse_matrices(layout, sorts):
    model = Layers()
    dense = torch.zeros(NODES, NODES)
    dense[graph()[1], graph()[0]] = 1
    matrix = SPARSE[layout](dense)
    for _ in range(2):
        output = model(X, matrix)
    assert len(sorts) == 1
    assert torch.equal(output, model(X, SPARSE[layout](dense)))
    columns = {"coo": lambda: matrix.indices()[1], "csr": matrix.col_indices} | {
        "csc": matrix.row_indices
    }
    numbers = columns[layout]()
    numbers.numpy()[...] = (numbers.numpy() + 1) % NODES
    output = model(X, matrix)
    torch.testing.assert_close(output, model(X, SPARSE[layout](matrix.to_dense())))


def test_edge_index_of_pyg(sorts):
    pyg = pytest.importorskip("torch_geometric")
    model = Layers()
    given = pyg.EdgeIndex(graph())
    for _ in range(2):
        output = model(X, given)
    assert len(sorts) == 1
    assert torch.equal(output, model(X, graph()))
    given[:, :7] = graph(7, seed=1)
    written = given.as_tensor().clone()
    assert torch.equal(model(X, given), model(X, Edges(written, NODES)))


class AsGpu(torch.Tensor):
    """A tensor of the CPU whose numbers may not be compared, as those of a GPU."""


def test_on_a_gpu_what_torch_counts_tells(monkeypatch):
    """Of a tensor whose numbers are not looked at, its version and its place are."""
    monkeypatch.setattr("attnkit.core.masks.kept._equal", lambda *given: True)
    memory = graph()
    first = loose(memory)
    assert loose(memory) is first
    for name in ("in place", "data replaced", "set", "resize"):
        content = graph(seed=3)
        before = loose(memory)
        WRITES[name](memory, content)
        assert loose(memory) is not before, name
        assert torch.equal(loose(memory).adjacency.source, Edges(content, NODES).adjacency.source)


def test_other_integers_and_tensors_of_other_classes_are_read_at_each_call():
    small = graph().to(torch.int16)
    assert loose(small) is not loose(small)
    small.numpy()[...] = graph(seed=1).numpy()
    assert torch.equal(loose(small).edge_index, graph(seed=1))
    own = graph().as_subclass(AsGpu)
    assert loose(own) is not loose(own)


def test_threads():
    model, edge_index = Layers(), graph(5003)
    expected = model(X, Edges(edge_index, NODES))
    with ThreadPoolExecutor(8) as pool:
        for output in pool.map(lambda _: model(X, edge_index), range(32)):
            torch.testing.assert_close(output, expected)


class Computed(Dataset):
    """Outputs of a model on a tensor that the process which forked had seen."""

    def __init__(self):
        self.model, self.edge_index = Layers().eval(), graph(5003)  # so many that numba sorts them
        self.model(X, self.edge_index)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index % 2:
            self.edge_index.copy_(graph(5003, seed=index))
        with torch.no_grad():
            return self.model(X, self.edge_index), self.edge_index


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that are forked")
def test_forked_workers():
    data = Computed()
    for outputs, edges in DataLoader(data, 1, num_workers=2, multiprocessing_context="fork"):
        fresh = data.model(X, Edges(edges[0], NODES))
        torch.testing.assert_close(outputs[0], fresh)
    assert torch.equal(data.edge_index, graph(5003))


def test_programs_read_none_of_it():
    model, edge_index = Layers(1).eval(), graph()
    model(X, edge_index)  # remembered now
    whole = Layers(1, backend="auto").eval()
    compiled = whole if compiling_is_exporting() else model
    compiled = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    exported = torch.export.export(whole, (X, edge_index)).module()
    for edges in (edge_index, graph(seed=1)):
        expected = model(X, Edges(edges.clone(), NODES))
        torch.testing.assert_close(compiled(X, edges), expected)
        torch.testing.assert_close(exported(X, edges), expected)
    edge_index.numpy()[...] = graph(seed=2).numpy()
    expected = model(X, Edges(graph(seed=2), NODES))
    torch.testing.assert_close(compiled(X, edge_index), expected)
    torch.testing.assert_close(exported(X, edge_index), expected)


def test_transforms_remember_nothing():
    edge_index = graph()
    edges = loose(edge_index)
    seen = []
    torch.func.grad(lambda x: seen.append(loose(edge_index)) or x.sum())(X)
    torch.vmap(lambda x: seen.append(loose(edge_index)) or x)(X)
    torch.jit.trace(lambda x: seen.append(loose(edge_index)) or x, X, check_trace=False)
    assert len(seen) >= 3
    assert len({id(each) for each in (edges, *seen)}) == 1 + len(seen)
    assert loose(edge_index) is edges


@pytest.mark.gpu
def test_a_gpu_is_waited_for_in_the_first_step_alone():
    model, x = Layers(backend="auto").cuda(), X.cuda()
    edge_index = graph().cuda()
    for _ in range(2):
        model(x, edge_index).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(x, edge_index).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    edge_index.copy_(graph(seed=1))
    expected = model(x, Edges(graph(seed=1).cuda(), NODES))
    torch.testing.assert_close(model(x, edge_index), expected)
    edge_index[0, 3] = NODES
    for _ in range(2):
        with pytest.raises(IndexError, match="edge_index: the source nodes go from"):
            model(x, edge_index)


@pytest.mark.gpu
def test_another_stream_sorts_for_itself():
    edge_index = graph().cuda()
    first = loose(edge_index)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert loose(edge_index) is not first
    with torch.inference_mode():
        made = graph().cuda()
    assert loose(made) is not loose(made)
