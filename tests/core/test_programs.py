"""Programs of torch.compile, torch.export and ONNX take other batches and tokens than the
example's, and do not grow with them."""

import inspect
import io

import pytest
import torch
from support import with_gradients
from torch.export import Dim

import attnkit
from attnkit import (
    Blocks,
    Causal,
    Dense,
    Edges,
    Packed,
    Padding,
    Window,
    Window2d,
    attend,
)
from attnkit.core.kernels import linear, recompute
from attnkit.core.masks.base import Mask, as_mask

GRID = 9  # tokens of masks that are for one number of them


def reversed_edges(key):
    places = torch.arange(key.shape[2])
    return Edges(torch.stack([places, places.flip(0)]), key.shape[2])


def two_sequences(lengths, key):
    return Packed(torch.stack([lengths[0], key.shape[2] - lengths[0]]))


def lower_blocks():
    return Blocks(torch.ones(3, 3).tril().bool(), 3)


# of lengths [batch] and the key
SQUARE = {
    "none": lambda lengths, key: None,
    "causal": lambda lengths, key: Causal(),
    "padding": lambda lengths, key: Padding(lengths),
    "padding_booleans": lambda lengths, key: Padding(torch.arange(key.shape[2]) < lengths[:, None]),
    "causal_padding": lambda lengths, key: Causal() & Padding(lengths),
    "window": lambda lengths, key: Window(2, 1),
    "one_sided": lambda lengths, key: Window(2, None),
    "window_padding": lambda lengths, key: Window(2, 1) & Padding(lengths),
    "window_causal_padding": lambda lengths, key: Window(2, 1) & Causal() & Padding(lengths),
    "packed": lambda lengths, key: two_sequences(lengths, key),
    "packed_causal": lambda lengths, key: two_sequences(lengths, key) & Causal(),
    "packed_padding": lambda lengths, key: two_sequences(lengths, key) & Padding(lengths),
    "packed_edges": lambda lengths, key: two_sequences(lengths, key) & reversed_edges(key),
    "edges": lambda lengths, key: reversed_edges(key),
    "edges_padding": lambda lengths, key: reversed_edges(key) & Padding(lengths),
    "dense": lambda lengths, key: torch.arange(key.shape[2]) % 3 > 0,
    "dense_of_items": lambda lengths, key: Dense(
        (torch.arange(key.shape[2]) < lengths[:, None])[:, None, None]
    ),
    "or": lambda lengths, key: Causal() | Padding(lengths),
    "not": lambda lengths, key: ~Padding(lengths) & Causal(),
    "not_edges": lambda lengths, key: ~reversed_edges(key),
}
CROSS = {
    "top_left": lambda lengths, key: Causal("top_left"),
    "bottom_right": lambda lengths, key: Causal("bottom_right"),
    "cross_padding": lambda lengths, key: Padding(lengths),
    "bottom_right_padding": lambda lengths, key: Causal("bottom_right") & Padding(lengths),
    "window_bottom_right": lambda lengths, key: Window(2, 1, "bottom_right"),
}
FIXED = {
    "window2d": lambda lengths, key: Window2d(3, 3, 1, 1),
    "window2d_padding": lambda lengths, key: Window2d(3, 3, 1, 1) & Padding(lengths),
    "blocks": lambda lengths, key: lower_blocks(),
    "blocks_padding": lambda lengths, key: lower_blocks() & Padding(lengths),
}
MASKS = SQUARE | CROSS | FIXED
OPTIONS = {
    "dot": {},
    "additive": {"score": attnkit.Additive(torch.linspace(-1, 1, 8))},
    "gaussian": {"score": "gaussian"},
    "linear": {"normalizer": "linear"},
    "hard": {"normalizer": attnkit.Hard(None)},
    "delta_rule": {"normalizer": "delta_rule"},
}
BY_DELTA_RULE = ("causal", "causal_padding")
# one of each kind beside the dot product of all
OF_EACH_KIND = (
    "none",
    *BY_DELTA_RULE,
    "padding",
    "window_padding",
    "packed_causal",
    "edges_padding",
    "not",
    "top_left",
    "bottom_right",
)
CASES = [
    (mask, option)
    for option in OPTIONS
    for mask in (MASKS if option == "dot" else OF_EACH_KIND)
    if option != "delta_rule" or mask in BY_DELTA_RULE
]
QUICK = [("causal_padding", "dot"), ("padding", "additive")]


class Attention(torch.nn.Module):
    def __init__(self, mask, option):
        super().__init__()
        self.mask, self.option = MASKS[mask], OPTIONS[option]

    def forward(self, query, key, lengths):
        options = dict(self.option)
        if options.get("normalizer") == "delta_rule":
            options["normalizer"] = attnkit.DeltaRule(key.sigmoid().mean(-1))
        return attend(query, key, 2 * key, mask=self.mask(lengths, key), **options)


def drawn(batch, num_queries, num_keys):
    generator = torch.Generator().manual_seed(batch + 10 * num_queries)
    query, key = (
        torch.randn(batch, 2, tokens, 8, generator=generator) for tokens in (num_queries, num_keys)
    )
    lengths = torch.randint(0, num_keys + 1, (batch,), generator=generator)
    lengths[-1] = 0  # whose queries may look nowhere
    return query, key, lengths


def sizes(mask, varies):
    """(batch, queries, keys) of the example, then of the others."""
    tokens = GRID if mask in FIXED else 7
    more = 4 if mask in CROSS else 0
    for batch, num_queries, further in ((3, tokens, 0), (2, 5, 3), (5, 13, 1), (7, 70, 2)):
        batch = batch if "batch" in varies else 3
        num_queries, further = (num_queries, further) if "tokens" in varies else (tokens, 0)
        yield batch, num_queries, num_queries + (more + further if more else 0)


def dynamic_shapes(mask, varies):
    batch = {0: Dim("batch")} if "batch" in varies else {}
    queries = {2: Dim("queries")} if "tokens" in varies else {}
    keys = {2: Dim("keys")} if queries and mask in CROSS else queries
    return batch | queries, batch | keys, batch


def check_exported(mask, option, varies):
    module = Attention(mask, option)
    example, *others = sizes(mask, varies)
    program = torch.export.export(
        module, drawn(*example), dynamic_shapes=dynamic_shapes(mask, varies)
    ).module()
    for size in (example, *others):
        torch.testing.assert_close(program(*drawn(*size)), module(*drawn(*size)))


def check_onnx(mask, option, path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    varies = "batch" if mask in FIXED else "batch and tokens"
    module = Attention(mask, option).eval()
    example, *others = sizes(mask, varies)
    torch.onnx.export(
        module, drawn(*example), path / "attention.onnx", dynamo=True, verbose=False,
        dynamic_shapes=dynamic_shapes(mask, varies),
    )  # fmt: skip
    session = onnxruntime.InferenceSession(path / "attention.onnx")
    names = [given.name for given in session.get_inputs()]
    for size in (example, *others):
        inputs = dict(zip(("query", "key", "lengths"), drawn(*size), strict=True))
        (output,) = session.run(None, {name: inputs[name].numpy() for name in names})
        torch.testing.assert_close(torch.from_numpy(output), module(**inputs))


def num_nodes(function, *inputs):
    """Of the graph that torch.compile makes, with what runs of it equal to the function."""
    found = []

    def count(graph, _):
        found.append(len(graph.graph.nodes))
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=False, backend=count)
    torch.testing.assert_close(compiled(*inputs), function(*inputs))
    (number,) = found
    return number


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


def test_every_mask_is_there():
    kinds = {
        kind.__name__
        for kind in vars(attnkit).values()
        if inspect.isclass(kind) and issubclass(kind, Mask) and kind is not Mask
    }
    source = inspect.getsource(inspect.getmodule(drawn))
    assert kinds
    assert not [kind for kind in kinds if f"{kind}(" not in source]


@pytest.mark.parametrize(("mask", "option"), QUICK)
def test_exported_takes_other_batches_and_tokens(mask, option):
    check_exported(mask, option, "batch and tokens")


# one of each kind, and of each way to combine them
INPUTS = (
    "causal", "padding", "padding_booleans", "window", "one_sided", "packed", "edges", "dense",
    "bottom_right", "window2d", "blocks", "causal_padding", "packed_edges", "or", "not",
)  # fmt: skip


@pytest.mark.parametrize("mask", INPUTS)
def test_every_mask_is_an_input_of_a_program(mask):
    """What torch.export puts in the place of its tensors and numbers is not checked."""

    class Module(torch.nn.Module):
        def forward(self, query, key, mask):
            return attend(query, key, key, mask=mask)

    query, key, lengths = drawn(*next(sizes(mask, "batch")))
    given = query, key, as_mask(MASKS[mask](lengths, key))
    program = torch.export.export(Module(), given)
    torch.testing.assert_close(program.module()(*given), Module()(*given))
    torch.export.save(program, io.BytesIO())


def test_heads_and_numbers_that_are_traced():
    options = {"scale": 0.3, "mask": Causal()}
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="eager")
    for num_heads in (2, 3):
        inputs = torch.randn(3, 2, num_heads, 6, 8).unbind()
        torch.testing.assert_close(compiled(*inputs, **options), attend(*inputs, **options))
    options["scale"] = 0.4
    torch.testing.assert_close(compiled(*inputs, **options), attend(*inputs, **options))


@pytest.mark.slow
@pytest.mark.parametrize(("mask", "option"), [case for case in CASES if "delta_rule" not in case])
def test_every_mask_in_onnx(mask, option, tmp_path):
    """All but the delta rule, whose triangular system torch cannot translate, and says so."""
    check_onnx(mask, option, tmp_path)


@pytest.mark.parametrize("option", ["linear", "hard"])
def test_what_an_exported_program_cannot_tell_is_named(option):
    with pytest.raises(attnkit.UnsupportedError, match="whether Edges has duplicates"):
        check_exported("edges", option, "batch")


def test_bottom_right_compiled_for_any_lengths():
    def function(query, key, lengths):
        return attend(query, key, key, mask=Causal("bottom_right"))

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    for size in ((2, 7, 10), (3, 16, 19), (3, 11, 30), (5, 13, 13)):
        inputs = drawn(*size)
        torch.testing.assert_close(compiled(*inputs), function(*inputs))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["line", "grid"])
def test_windows_do_not_grow_with_batch_and_tokens(name):
    def nodes(batch, scale):
        query, key, lengths = drawn(batch, 400 * scale, 400 * scale)
        mask = Window(8, 5) & Padding(lengths) if name == "line" else Window2d(20 * scale, 20, 2, 1)
        return num_nodes(
            lambda query, key: attend(query, key, key, mask=mask, backend="block_sparse"),
            query,
            key,
        )

    assert nodes(2, 1) == nodes(5, 3)


@pytest.mark.parametrize(
    ("mask", "value_dim"),
    [
        (Window(5, 3), 12),
        pytest.param(Window2d(11, 12, 1, 1, 11), 5, marks=pytest.mark.slow),
        pytest.param(Window(5, 3) & Padding(torch.tensor([53])), 8, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compiled_windows_with_values_of_other_channels(mask, value_dim):
    """The scale is that of the queries' own channels, not of those they are filled up to."""
    torch._dynamo.reset()
    shapes = (8, 8, value_dim)
    tensors = [torch.randn(1, 2, 143, d, dtype=torch.float64, requires_grad=True) for d in shapes]

    def compute(query, key, value):
        return attend(query, key, value, mask=mask, backend="block_sparse")

    compiled = torch.compile(compute, fullgraph=True, backend="aot_eager")
    expected = with_gradients(tensors, mask=mask, backend="reference")
    torch.testing.assert_close(with_gradients(tensors, compiled), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask", "option"),
    [case for case in CASES if case[0] not in FIXED and case[1] not in ("gaussian", "delta_rule")],
)
def test_programs_do_not_grow_with_batch_and_tokens(mask, option, monkeypatch):
    monkeypatch.setattr(recompute, "BLOCK_SCORES", {"cpu": 1})
    monkeypatch.setattr(linear, "SEGMENT_ELEMENTS", {"cpu": 1})
    more = 4 if mask in CROSS else 0
    module = Attention(mask, option)
    # of these sizes on: below, there are fewer parts than a program may have
    sizes = ((3, 1024), (5, 2048)) if option == "linear" else ((16, 256), (48, 512))
    few, many = (num_nodes(module, *drawn(batch, tokens, tokens + more)) for batch, tokens in sizes)
    assert many <= few
