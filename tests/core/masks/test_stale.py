"""What is kept of a mask is made again where its memory is written to; copies keep nothing."""

import copy
import pickle
from dataclasses import dataclass
from functools import partial
from itertools import product

import pytest
import torch
from support import compiling_is_exporting
from torch.utils import _pytree as pytree

import attnkit
from attnkit import Blocks, Causal, Dense, Edges, Packed, Padding, attend
from attnkit.core.kernels import recompute
from attnkit.core.masks.base import Mask
from attnkit.core.masks.kept import kept_mask
from attnkit.core.scores.kinds import Score
from attnkit.layers.graph.typed_edges import TypedEdges

TOKENS = 8
LENGTHS = torch.tensor([8]), torch.tensor([3])
PLACES = torch.arange(TOKENS)
EDGES = torch.stack([PLACES, PLACES.roll(1)]), torch.stack([PLACES, PLACES.roll(3)])

# of each mask: how it is made of a tensor, that tensor, and another in its place
MASKS = {
    "dense": (Dense, torch.ones(8, 8, dtype=torch.bool), PLACES[:, None] > PLACES - 3),
    "lengths": (Padding, *LENGTHS),
    "real": (Padding, torch.ones(1, 8, dtype=torch.bool), PLACES[None] < 3),
    "packed": (Packed, torch.tensor([3, 5]), torch.tensor([6, 2])),
    "packed keys": (
        lambda keys: Packed(torch.tensor([3, 5]), keys),
        torch.tensor([3, 5]),
        torch.tensor([6, 2]),
    ),
    "blocks": (
        lambda grid: Blocks(grid, 2),
        torch.ones(4, 4, dtype=torch.bool),
        torch.eye(4, dtype=torch.bool),
    ),
    "edges": (lambda edges: Edges(edges, TOKENS), *EDGES),
    "shuffled edges": (lambda edges: Edges(edges, TOKENS), EDGES[1], EDGES[1].flip(0)),
    "and": (lambda lengths: Causal() & Padding(lengths), *LENGTHS),
    "or": (lambda lengths: Padding(lengths) | Dense(torch.eye(8, dtype=torch.bool)), *LENGTHS),
    "not": (lambda lengths: ~Padding(lengths), torch.tensor([2]), torch.tensor([5])),
    "packed and causal": (
        lambda lengths: Packed(lengths) & Causal(),
        torch.tensor([3, 5]),
        torch.tensor([6, 2]),
    ),
}
BACKENDS = {
    name: ("auto", "edges", "edges_numba", "math", "flash")
    if "edges" in name
    else ("auto", "block_sparse", "math", "flash")
    for name in MASKS
}
WRITES = {
    "in place": lambda tensor, new: tensor.copy_(new),
    "data": lambda tensor, new: tensor.data.copy_(new),
    "data replaced": lambda tensor, new: setattr(tensor, "data", new.clone()),
    "numpy": lambda tensor, new: tensor.numpy().__setitem__(..., new.numpy()),
    "set": lambda tensor, new: tensor.set_(new.clone()),
    "resize": lambda tensor, new: tensor.resize_(0).resize_(new.shape).copy_(new),
    "inference": torch.inference_mode()(lambda tensor, new: tensor.copy_(new)),
}
COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda mask: pickle.loads(pickle.dumps(mask)),
    "copy": copy.copy,
    "to": lambda mask: mask.to("cpu"),
}


def tensors():
    return torch.randn(3, 1, 2, TOKENS, 8, generator=torch.Generator().manual_seed(0)).unbind()


def of(mask, tensor_of):
    """The tensor of a copied mask that stands where `tensor_of` stood."""
    leaves = reversed(pytree.tree_leaves(mask))
    return next(leaf for leaf in leaves if getattr(leaf, "shape", None) == tensor_of.shape)


@pytest.mark.parametrize(("name", "write"), [*product(MASKS, WRITES)][::2])
def test_memory_that_is_written_to(name, write):
    make, first, second = MASKS[name]
    for backend in BACKENDS[name]:
        memory = first.clone()
        mask, run = make(memory), partial(attend, *tensors(), backend=backend)
        for content in (first, second, first):
            WRITES[write](memory, content)
            for _ in range(2):  # made, and kept
                output = run(mask=mask)
            assert torch.equal(output, run(mask=make(content.clone()))), backend


def gradient_unless_written(output, inputs):
    """None where it is refused, since the mask was written to."""
    try:
        return torch.autograd.grad(output.square().sum(), inputs)[0]
    except RuntimeError as error:
        if not any(said in str(error) for said in ("written to between", "inplace operation")):
            raise
        return None


@pytest.mark.parametrize("name", MASKS)
def test_memory_that_is_written_to_before_the_backward(name, monkeypatch):
    """The gradient is of what was computed, or there is none."""
    make, first, then = MASKS[name]
    inputs = torch.randn(3, 1, 2, TOKENS, 4, generator=torch.Generator().manual_seed(0))
    inputs = inputs.requires_grad_()
    served = 0
    monkeypatch.setattr(recompute, "LEAST_KEYS", 2)
    monkeypatch.setattr(recompute, "ROWS", 2)
    monkeypatch.setattr(recompute, "KEPT", 0)
    for backend in ("block_sparse", "blockwise", "flash", "math", "edges", "edges_numba"):
        given = first.clone()
        try:
            output = attend(*inputs.unbind(), mask=make(given), backend=backend)
            expected = attend(*inputs.unbind(), mask=make(first.clone()), backend=backend)
        except attnkit.UnsupportedError:
            continue
        served += 1
        (right,) = torch.autograd.grad(expected.square().sum(), inputs)
        given.copy_(then)
        found = gradient_unless_written(output, inputs)
        assert found is None or torch.equal(found, right), backend
    assert served > 1


@dataclass(frozen=True, eq=False, slots=True)
class Slotted(Mask):
    tables: list

    def allows(self, batch, head, query, key, num_queries, num_keys):
        return self.tables[0][query, key]


class Own(Mask):
    def __init__(self, table):
        self.table = table

    def allows(self, batch, head, query, key, num_queries, num_keys):
        return self.table[query, key]


class Squared(Score):
    def uncapped(self, query, key):
        return -((query @ key.mT) ** 2)


@dataclass(frozen=True)
class Scaled(Score):
    factor: torch.Tensor

    def uncapped(self, query, key):
        return (query @ key.mT) * self.factor


def grid(tokens):
    return torch.rand(tokens, tokens, generator=torch.Generator().manual_seed(1)) > 0.5


OWN = {
    "own": Own,
    "slotted": lambda table: Slotted([table]),
    "and": lambda table: Own(table) & Causal(),
    "or, beside": lambda table: Own(torch.eye(TOKENS, dtype=torch.bool)) | Dense(table),
    "not": lambda table: ~Own(table),
}


@pytest.mark.parametrize("name", OWN)
def test_a_mask_of_the_users_that_is_written_to_before_the_backward(name, monkeypatch):
    monkeypatch.setattr(recompute, "KEPT", 0)
    monkeypatch.setitem(recompute.BLOCK_SCORES, "cpu", 2 * 2 * TOKENS)
    query = tensors()[0].requires_grad_()
    for options in ({"backend": "block_sparse"}, {"backend": "blockwise"}, {"normalizer": "hard"}):
        table = grid(TOKENS)
        output = attend(query, *tensors()[1:], mask=OWN[name](table), **options)
        table.fill_(True)
        with pytest.raises(RuntimeError, match="mask: its numbers were written to between"):
            output.sum().backward()


def written(what, mask=None, score="dot", backend="auto"):
    """The backward after one of the tensors of a call was written to."""
    inputs = {name: t.clone() for name, t in zip(("query", "key", "value"), tensors(), strict=True)}
    inputs["bias"] = torch.randn(1, 1, TOKENS, TOKENS)
    leaf = inputs["query"].requires_grad_()
    inputs["query"] = leaf * 1
    output = attend(**inputs, mask=mask, score=score, backend=backend)
    factor = getattr(score, "factor", None)
    with torch.no_grad():
        (factor if what == "factor" else inputs[what]).zero_()
    return torch.autograd.grad(output.sum(), leaf)


def test_a_bias_that_is_written_to_before_the_backward():
    with pytest.raises(RuntimeError, match="bias: its numbers were written to between"):
        written("bias", mask=attnkit.Window(2, 2), backend="block_sparse")


@pytest.mark.parametrize("what", ["query", "key", "value", "bias", "factor"])
def test_what_a_score_of_the_users_reads_is_written_to_before_the_backward(what, monkeypatch):
    monkeypatch.setitem(recompute.BLOCK_SCORES, "cpu", 2 * 2 * TOKENS)
    score = Scaled(torch.ones(1)) if what == "factor" else Squared()
    with pytest.raises(RuntimeError, match=f"{what}: its numbers were written to between"):
        written(what, score=score, backend="blockwise")


@pytest.mark.parametrize("clone", COPIES)
@pytest.mark.parametrize("name", MASKS)
def test_copies_keep_nothing(name, clone):
    make, first, second = MASKS[name]
    for backend in BACKENDS[name]:
        mask = make(first.clone())
        attend(*tensors(), mask=mask, backend=backend)
        other = COPIES[clone](mask)
        if clone in ("deepcopy", "pickle"):
            names = [name for name, part in vars(other).items() if type(part).__name__ == "Kept"]
            assert not names
        memory, mask_version = of(other, first), of(mask, first)._version
        for _ in range(1 + mask_version):  # at least as often as the mask's own
            memory.copy_(second)
        output = attend(*tensors(), mask=other, backend=backend)
        assert torch.equal(output, attend(*tensors(), mask=make(second.clone()), backend=backend))
        content = second if clone in ("copy", "to") else first  # which share memory
        output = attend(*tensors(), mask=mask, backend=backend)
        assert torch.equal(output, attend(*tensors(), mask=make(content.clone()), backend=backend))


@pytest.mark.parametrize("name", MASKS)
def test_what_is_not_written_to_is_kept(name):
    make, first, _ = MASKS[name]
    mask = make(first.clone())
    made = [kept_mask(mask, TOKENS, TOKENS, first.device, torch.float32) for _ in range(2)]
    assert made[0] is made[1]
    if name == "edges":
        for part in ("adjacency", "with_loops", "without_loops"):
            assert getattr(mask, part) is getattr(mask, part)


@pytest.mark.parametrize("write", WRITES)
def test_layers_of_a_graph_with_loops_and_far_edges(write):
    torch.manual_seed(0)
    x = torch.randn(TOKENS, 8)
    layers = [
        attnkit.GraphAttention(8, 4, 2),
        attnkit.GAT(8, 8, 3, num_layers=2, heads=2).eval(),
        attnkit.GraphTransformer(8, 8, 3, num_layers=1, heads=2, expander_degree=2).eval(),
    ]
    for layer in layers:
        memory = EDGES[0].clone()
        edges = Edges(memory, TOKENS)
        for content in (*EDGES, EDGES[0]):
            WRITES[write](memory, content)
            for _ in range(2):
                output = layer(x, edges)
            fresh = copy.deepcopy(layer)(x, Edges(content.clone(), TOKENS))
            assert torch.equal(output, fresh)


def test_typed_edges_are_a_copy():
    numbers, types = EDGES[0].clone(), torch.zeros(TOKENS, dtype=torch.long)
    edges = TypedEdges(numbers, TOKENS, types, 2)
    before = edges.edge_index.clone(), edges.edge_type.clone()
    numbers.zero_()
    types.fill_(1)
    assert torch.equal(edges.edge_index, before[0])
    assert torch.equal(edges.edge_type, before[1])


def test_what_compiled_code_reads_is_refused_once_written_to():
    if compiling_is_exporting():
        pytest.skip("this torch (2.11) says that it exports while it compiles")
    query, key, value = tensors()
    memory = EDGES[0].clone()
    edges = Edges(memory, TOKENS)
    expected = attend(query, key, value, mask=edges, backend="edges")  # sorted now, and kept
    compiled = torch.compile(
        lambda query: attend(query, key, value, mask=edges, backend="edges"),
        backend="aot_eager",
        fullgraph=True,
    )
    torch.testing.assert_close(compiled(query), expected)
    memory.numpy()[...] = EDGES[1].numpy()
    with pytest.raises(RuntimeError, match="mask: its numbers were written to"):
        compiled(query)
    expected = attend(query, key, value, mask=Edges(EDGES[1], TOKENS), backend="edges")
    assert torch.equal(attend(query, key, value, mask=edges, backend="edges"), expected)
    torch.testing.assert_close(compiled(query), expected)
