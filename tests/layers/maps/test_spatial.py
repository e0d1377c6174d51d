"""Spatial attention: parity, equal forms, what changes nothing, and the sizes there may be."""

import copy
import math

import pytest
import torch
from timm.layers import NonLocalAttn
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import attnkit
from attnkit import SpatialAttention
from attnkit.layers import spatial
from attnkit.layers.spatial import criss_cross_edges

BATCH, CHANNELS, HEIGHT, WIDTH = 3, 10, 5, 7

PATTERNS = {
    "full": {},
    "heads": {"num_heads": 2, "inner_channels": 6, "value_channels": 14, "score": "cosine"},
    "max": {"pool": 2},
    "average": {"pool": 3, "pooling": "average"},
    "window": {"pattern": "window", "radius": 1},
    "axial": {"pattern": "axial"},
    "criss_cross": {"pattern": "criss_cross"},
    "edges": {"pattern": "criss_cross", "backend": "edges"},
}


def randomised(module):
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.double()


def some(batch=BATCH, height=HEIGHT, width=WIDTH, **options):
    options = {"dtype": torch.float64, "requires_grad": True, **options}
    return torch.randn(batch, CHANNELS, height, width, **options)


def gradients(output, *wanted):
    weights = (torch.arange(output.numel()) % 17 - 8).view_as(output) / 8
    return torch.autograd.grad(output, wanted, weights.to(output.dtype))


def as_convolutions(layer):
    """The projections as 1 × 1 convolutions that have no part in what is tested: query, key,
    value, output."""
    attention = layer.attention
    weights = attention.in_proj.weight.split(attention.sizes)
    biases = attention.in_proj.bias.split(attention.sizes)
    pairs = [*zip(weights, biases, strict=True)]
    pairs.append((attention.out_proj.weight, attention.out_proj.bias))
    return [lambda x, w=w, b=b: F.conv2d(x, w[..., None, None], b) for w, b in pairs]


@pytest.mark.parametrize("use_scale", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_equals_timms_non_local_block(use_scale, training):
    theirs = NonLocalAttn(CHANNELS, use_scale=use_scale, rd_channels=6)
    theirs = randomised(theirs).train(training)
    nn.init.uniform_(theirs.norm.running_var, 0.5, 2.0)
    score = attnkit.ScaledDot(CHANNELS**-0.5) if use_scale else "dot"
    ours = SpatialAttention(CHANNELS, inner_channels=6, score=score, residual=None).double()
    parts = theirs.t, theirs.p, theirs.g
    ours.attention.load_state_dict(
        {
            "in_proj.weight": torch.cat([part.weight for part in parts]).flatten(1),
            "in_proj.bias": torch.cat([part.bias for part in parts]),
            "out_proj.weight": theirs.z.weight.flatten(1),
            "out_proj.bias": theirs.z.bias,
        }
    )
    norm = copy.deepcopy(theirs.norm)  # each with statistics of its own
    x = some()
    expected = theirs(x)
    output = x + norm(ours(x))
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    found = gradients(output, x, ours.attention.in_proj.weight, ours.attention.out_proj.weight)
    x_gradient, *others = gradients(expected, x, *(p.weight for p in (*parts, theirs.z)))
    wanted = x_gradient, torch.cat(others[:3]).flatten(1), others[3].flatten(1)
    for ours_, theirs_ in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours_, theirs_, rtol=1e-9, atol=1e-10)


def test_equals_danets_position_attention():
    """Queries and keys of an eighth of the channels, values of all, no projection after."""
    channels = 16
    layer = randomised(
        SpatialAttention(channels, inner_channels=2, value_channels=channels, score="dot")
    )
    with torch.no_grad():
        layer.attention.out_proj.weight.copy_(torch.eye(channels))
        layer.attention.out_proj.bias.zero_()
    x = torch.randn(BATCH, channels, HEIGHT, WIDTH, dtype=torch.float64, requires_grad=True)
    query, key, value, _ = (f(x).flatten(2) for f in as_convolutions(layer))
    attention = torch.bmm(query.transpose(1, 2), key).softmax(dim=-1)
    expected = torch.bmm(value, attention.transpose(1, 2)).view_as(x)
    expected = layer.residual.gamma * expected + x
    output = layer(x)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    wanted = [x, layer.attention.in_proj.weight, layer.residual.gamma]
    for ours, theirs in zip(gradients(output, *wanted), gradients(expected, *wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ["auto", "edges"])
@pytest.mark.parametrize("size", [(5, 7), (7, 5), (1, 6), (6, 1), (1, 1)], ids=str)
def test_equals_ccnets_criss_cross_attention(size, backend):
    """Scores of the column without the pixel, and of the row, in one softmax."""
    height, width = size
    layer = randomised(SpatialAttention(CHANNELS, inner_channels=4, value_channels=8, score="dot",
                                        pattern="criss_cross", backend=backend))  # fmt: skip
    x = some(height=height, width=width)
    *projections, out = as_convolutions(layer)
    query, key, value = (f(x) for f in projections)
    in_column = torch.einsum("bcyx,bczx->byxz", query, key)
    itself = torch.eye(height, dtype=torch.bool)[:, None]
    in_column = in_column.masked_fill(itself, -math.inf)
    in_row = torch.einsum("bcyx,bcyz->byxz", query, key)
    weights = torch.cat([in_column, in_row], dim=-1).softmax(dim=-1)
    of_column, of_row = weights.split([height, width], dim=-1)
    seen = torch.einsum("byxz,bczx->bcyx", of_column, value)
    seen = seen + torch.einsum("byxz,bcyz->bcyx", of_row, value)
    expected = x + layer.residual.gamma * out(seen)
    output = layer(x)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    wanted = [x, *layer.parameters()]
    for ours, theirs in zip(gradients(output, *wanted), gradients(expected, *wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("num_heads", [1, 2])
def test_equals_axial_attention_by_loops(num_heads):
    layer = randomised(SpatialAttention(CHANNELS, num_heads=num_heads, pattern="axial"))
    x = some()
    y = torch.stack([layer.attention(x[:, :, i].mT).mT for i in range(HEIGHT)], dim=2)
    y = x + layer.residual.gamma * y
    z = torch.stack([layer.column_attention(y[..., j].mT).mT for j in range(WIDTH)], dim=3)
    expected = y + layer.column_residual.gamma * z
    output = layer(x)
    torch.testing.assert_close(output, expected)
    wanted = [x, *layer.parameters()]
    for ours, theirs in zip(gradients(output, *wanted), gradients(expected, *wanted), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("size", [(5, 7), (6, 4), (2, 1)], ids=str)
@pytest.mark.parametrize("pooling", ["max", "average"])
def test_pooled_keys_by_loops(pooling, size):
    """A last row or column that fills no pool is pooled for itself."""
    layer = randomised(SpatialAttention(CHANNELS, num_heads=2, pool=2, pooling=pooling))
    x = some(height=size[0], width=size[1])
    squares = [
        x[:, :, i : i + 2, j : j + 2].flatten(2)
        for i in range(0, size[0], 2)
        for j in range(0, size[1], 2)
    ]
    keys = [square.amax(-1) if pooling == "max" else square.mean(-1) for square in squares]
    expected = layer.attention(x.flatten(2).mT, torch.stack(keys, dim=1)).mT.view_as(x)
    torch.testing.assert_close(layer(x), x + layer.residual.gamma * expected)


def test_pooled_after_the_projection_is_the_same_for_averages():
    """As non-local networks' code has it."""
    layer = randomised(SpatialAttention(CHANNELS, pool=2, pooling="average", residual="add"))
    x = some(height=6, width=8)
    query, key, value, out = as_convolutions(layer)
    key, value = (F.avg_pool2d(f(x), 2).flatten(2) for f in (key, value))
    scores = query(x).flatten(2).mT @ key / CHANNELS**0.5
    expected = x + out((scores.softmax(-1) @ value.mT).mT.view_as(x))
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"pattern": "window", "radius": max(HEIGHT, WIDTH) - 1},
        {"pattern": "window", "radius": 1000},
        {"pool": 1},
    ],
    ids=str,
)
def test_forms_that_are_full(options):
    full = randomised(SpatialAttention(CHANNELS, num_heads=2, inner_channels=6))
    layer = SpatialAttention(CHANNELS, num_heads=2, inner_channels=6, **options).double()
    layer.load_state_dict(full.state_dict())
    x = some()
    output, expected = layer(x), full(x)
    torch.testing.assert_close(output, expected)
    for ours, theirs in zip(
        gradients(output, x, *layer.parameters()),
        gradients(expected, x, *full.parameters()),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("size", [(1, 9), (9, 1)], ids=str)
def test_on_a_line_criss_cross_is_full(size):
    full = randomised(SpatialAttention(CHANNELS))
    layer = SpatialAttention(CHANNELS, pattern="criss_cross").double()
    layer.load_state_dict(full.state_dict())
    x = some(height=size[0], width=size[1])
    torch.testing.assert_close(layer(x), full(x))


@pytest.mark.parametrize("name", PATTERNS)
def test_who_sees_whom(name):
    """By the gradient of one pixel's output."""
    layer = randomised(SpatialAttention(CHANNELS, **PATTERNS[name], residual=None))
    x = some(1)
    row, column = 2, 3
    (gradient,) = torch.autograd.grad(layer(x)[0, :, row, column].square().sum(), x)
    seen = gradient[0].norm(dim=0) > 1e-9
    rows, columns = torch.arange(HEIGHT)[:, None], torch.arange(WIDTH)
    everything = torch.ones(HEIGHT, WIDTH, dtype=torch.bool)
    cross = (rows == row) | (columns == column)
    expected = {
        "window": ((rows - row).abs() <= 1) & ((columns - column).abs() <= 1),
        "criss_cross": cross,
        "edges": cross,
    }.get(name, everything)
    if name != "max":  # which of four pixels has the largest value differs from channel to channel
        assert torch.equal(seen, expected)
    with attnkit.capture_attention(layer) as weights:
        layer(x)
    assert set(weights) == ({"attention", "column_attention"} if name == "axial" else {"attention"})
    captured = weights["attention"][0]
    torch.testing.assert_close(captured.sum(-1), torch.ones_like(captured[..., 0]))
    if name == "axial":
        assert captured.shape == (HEIGHT, 1, WIDTH, WIDTH)
        assert weights["column_attention"][0].shape == (WIDTH, 1, HEIGHT, HEIGHT)
        return
    side = layer.pool
    size = math.ceil(HEIGHT / side), math.ceil(WIDTH / side)
    looked = captured[:, :, row * WIDTH + column].unflatten(-1, size)
    assert looked.shape == (1, 2 if name == "heads" else 1, *size)
    if name in ("window", "criss_cross", "edges"):
        assert torch.equal(looked[0, 0] > 0, expected)


@pytest.mark.parametrize("name", PATTERNS)
def test_neighbours_in_the_batch_and_layout_change_nothing(name):
    layer = randomised(SpatialAttention(CHANNELS, **PATTERNS[name]))
    x = some()
    output = layer(x)
    other = torch.cat([x[:1], 100 * some(2)])
    torch.testing.assert_close(layer(other)[:1], output[:1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer(x[1:2]), output[1:2], rtol=1e-12, atol=1e-12)
    last = layer(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(last, output)
    assert output.is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(copy.deepcopy(layer)(x), output)
    assert not any("edge" in key for key in layer.state_dict())


@pytest.mark.parametrize("name", PATTERNS)
def test_passes_the_checks_of_attention(name):
    layer = SpatialAttention(CHANNELS, **PATTERNS[name], dropout_p=0.0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    attnkit.assert_attention(
        layer,
        dim=CHANNELS,
        call=lambda layer, tokens: layer(tokens.mT[..., None]).squeeze(-1).mT,
    )


@pytest.mark.parametrize("name", PATTERNS)
def test_gradcheck(name):
    layer = randomised(SpatialAttention(3, **{**PATTERNS[name], **SMALL.get(name, {})}))
    x = torch.randn(2, 3, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, x)


SMALL = {"heads": {"inner_channels": 4, "value_channels": 2}}


def is_exporting(x):
    return torch.zeros_like(x) + int(torch.compiler.is_exporting())


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
def test_compiled(name):
    """In one graph, but for edges, which no layer over edges is."""
    torch._dynamo.reset()
    layer = randomised(SpatialAttention(CHANNELS, **PATTERNS[name]))
    x = some()
    fullgraph = "criss_cross" not in PATTERNS[name].values()
    if not fullgraph and torch.compile(is_exporting, backend="eager")(x).any():
        pytest.skip("this torch (2.11) says that it exports while it compiles")
    compiled = torch.compile(layer, fullgraph=fullgraph, backend="aot_eager")
    output, expected = compiled(x), layer(x)
    torch.testing.assert_close(output, expected)
    wanted = [x, *layer.parameters()]
    for ours, theirs in zip(gradients(output, *wanted), gradients(expected, *wanted), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", PATTERNS)
def test_autocast(name):
    layer = SpatialAttention(CHANNELS, **PATTERNS[name])
    nn.init.constant_(layer.residual.gamma, 0.5)
    x = some(dtype=torch.float32)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)
    (gradient,) = gradients(output, x)
    (exact,) = gradients(expected, x)
    assert (gradient - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("name", [name for name in PATTERNS if name != "edges"])
@pytest.mark.parametrize("size", [(0, 5, 7), (1, 1, 1), (2, 1, 13), (2, 17, 1)], ids=str)
def test_any_size(name, size):
    layer = randomised(SpatialAttention(CHANNELS, **PATTERNS[name]))
    x = some(*size)
    output = layer(x)
    assert output.shape == x.shape
    assert all(gradient.isfinite().all() for gradient in gradients(output, x, *layer.parameters()))


@pytest.mark.parametrize("pattern", ["full", "axial"])
def test_residual(pattern):
    x = some()
    begins = SpatialAttention(CHANNELS, pattern=pattern).double()
    assert torch.equal(begins(x), x)
    found = dict(zip(dict(begins.named_parameters()), gradients(begins(x), *begins.parameters()),
                     strict=True))  # fmt: skip
    assert all((gradient != 0).any() == ("gamma" in name) for name, gradient in found.items())
    none, add = (
        SpatialAttention(CHANNELS, pattern=pattern, residual=kind).double()
        for kind in (None, "add")
    )
    add.load_state_dict(none.state_dict())
    if pattern == "full":
        torch.testing.assert_close(add(x), x + none(x))
    else:
        nn.init.zeros_(add.column_attention.out_proj.weight)
        first = x + none.attention(x.permute(0, 2, 3, 1).flatten(0, 1)).unflatten(
            0, (BATCH, HEIGHT)
        ).permute(0, 3, 1, 2)
        torch.testing.assert_close(add(x), first)


@pytest.mark.parametrize("height", [1, 3, 6])
@pytest.mark.parametrize("width", [1, 4])
def test_edges_of_the_criss_cross(height, width):
    edges = criss_cross_edges(height, width, torch.device("cpu"))
    assert edges.num_edges == height * width * (height + width - 1)
    assert not edges.has_repeated
    y, x = torch.arange(height * width) // width, torch.arange(height * width) % width
    expected = (y[:, None] == y) | (x[:, None] == x)
    size = height * width
    assert torch.equal(edges.dense(size, size, torch.device("cpu"))[0, 0], expected)
    assert criss_cross_edges(height, width, torch.device("cpu")) is edges


def test_compiled_layers_read_the_edges_that_are_kept(monkeypatch):
    """Sorting them at each call would take longer than attention does."""
    layer = randomised(SpatialAttention(CHANNELS, pattern="criss_cross"))
    x = some()
    expected = layer(x)
    built = []

    def build(*arguments):
        built.append(arguments)
        return attnkit.Edges(*arguments)

    monkeypatch.setattr(spatial, "Edges", build)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager")(x), expected)
    assert not built


def test_costs_what_it_says(flash_is_counted):
    """Multiply-adds as torch counts them, and parameters; of patterns that go through SDPA."""
    channels, inner, values, pixels = 12, 6, 10, HEIGHT * WIDTH
    x = torch.randn(1, channels, HEIGHT, WIDTH)
    for options, keys, times in (
        ({}, pixels, 1),
        ({"pattern": "axial"}, WIDTH + HEIGHT, 2),
    ):
        layer = SpatialAttention(channels, inner_channels=inner, value_channels=values, **options)
        parameters = sum(p.numel() for p in layer.parameters())
        one = 2 * (inner + values) * channels + 2 * inner + values + channels + 1
        assert parameters == times * one
        plain = SpatialAttention(
            channels, inner_channels=inner, value_channels=values, bias=False, **options
        )
        fewer = sum(p.numel() for p in plain.parameters())
        assert fewer == times * (2 * (inner + values) * channels + 1)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            layer(x)
        projections = 2 * pixels * channels * (inner + values)
        # the CPU's kernel reads both in the larger width
        attention = pixels * keys * 2 * max(inner, values)
        assert counter.get_total_flops() == 2 * (times * projections + attention)


def test_dropout_of_the_weights_in_training_only():
    layer = randomised(SpatialAttention(CHANNELS, dropout_p=0.5))
    x = some()
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


def test_kernels_are_on_record():
    layers = nn.ModuleDict(
        {
            "full": SpatialAttention(CHANNELS),
            "window": SpatialAttention(CHANNELS, pattern="window", radius=1),
            "criss_cross": SpatialAttention(CHANNELS, pattern="criss_cross"),
        }
    )
    x = torch.randn(1, CHANNELS, 48, 48)
    with attnkit.record_backends(layers) as record, torch.no_grad():
        for layer in layers.values():
            layer(x)
    assert {name: [*kernels] for name, kernels in record.counts.items()} == {
        "full.attention": ["flash"],
        "window.attention": ["block_sparse"],
        "criss_cross.attention": ["edges_numba"],
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 0}, "channels: expected at least 1, got 0"),
        ({"num_heads": 3}, "num_heads: 3 does not divide inner_channels 10"),
        ({"num_heads": 0}, "num_heads: expected at least 1, got 0"),
        (
            {"num_heads": 2, "value_channels": 7},
            "num_heads: 2 does not divide value_channels 7",
        ),
        ({"inner_channels": 0}, "inner_channels: expected at least 1, got 0"),
        ({"pattern": "rows"}, "pattern: expected 'full', 'window', 'axial' or.*got 'rows'"),
        ({"radius": 2}, "radius: only for the pattern 'window', got 2 with 'full'"),
        ({"pattern": "window", "radius": -1}, "radius: expected at least 0, got -1"),
        ({"pool": 0}, "pool: expected at least 1, got 0"),
        ({"pattern": "axial", "pool": 2}, "pool: only for the pattern 'full', got 2 with 'axial'"),
        ({"pool": 2, "pooling": "sum"}, "pooling: expected 'max', 'average' or None, got 'sum'"),
        ({"pooling": "max"}, "pooling: only with a pool above 1, got 'max'"),
        ({"residual": "scale"}, "residual: expected 'gamma', 'add' or None, got 'scale'"),
        ({"score": "cosin"}, "score: expected one of scaled_dot.*got 'cosin'"),
        (
            {"pattern": "axial", "score": attnkit.learned_scores.CosineScore(1, 10)},
            "score: 'axial' has two attentions, which need a module each",
        ),
        ({"dropout_p": 1.0}, "dropout_p: expected 0 <= dropout_p < 1, got 1.0"),
        ({"backend": "flahs"}, "backend: expected 'auto' or one of"),
    ],
    ids=str,
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        SpatialAttention(**{"channels": CHANNELS, **options})


@pytest.mark.parametrize("shape", [(3, 10, 5), (3, 9, 5, 7)], ids=str)
def test_features_that_do_not_fit_are_named(shape):
    message = rf"features: expected \[batch, 10, .*one pixel, got \[{shape[0]}, {shape[1]}, "
    with pytest.raises(ValueError, match=message):
        SpatialAttention(CHANNELS)(torch.zeros(shape))


def test_exported_before_it_ever_ran():
    spatial._kept_edges.cache_clear()
    layer = SpatialAttention(8, pattern="criss_cross").eval()
    x = torch.randn(1, 8, 5, 6)
    exported = torch.export.export(layer, (x,)).module()
    torch.testing.assert_close(exported(x), layer(x))


def test_maps_without_a_pixel_are_refused():
    for pattern in ("full", "criss_cross"):
        with pytest.raises(ValueError, match=r"features: expected .* at least one pixel"):
            SpatialAttention(8, pattern=pattern)(torch.randn(1, 8, 0, 3))


def test_sizes_alone_are_enough_on_the_meta_device():
    with torch.device("meta"):
        assert SpatialAttention(8)(torch.randn(2, 8, 5, 3)).shape == (2, 8, 5, 3)
