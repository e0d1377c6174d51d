"""Spatial and context attention: parity, equal forms, and who sees whom."""

import copy
import math

import pytest
import torch
from layer_support import PATTERNS, assert_same, randomised
from timm.layers import GlobalContext, NonLocalAttn
from torch import nn
from torch.nn import functional as F

import attnkit
from attnkit import ContextAttention, SpatialAttention
from attnkit.layers import spatial
from attnkit.layers.spatial import criss_cross_edges

BATCH, CHANNELS, HEIGHT, WIDTH = 3, 10, 5, 7


def some(batch=BATCH, height=HEIGHT, width=WIDTH, channels=CHANNELS, dtype=torch.float64):
    return torch.randn(batch, channels, height, width, dtype=dtype, requires_grad=True)


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
    theirs = randomised(NonLocalAttn(CHANNELS, use_scale=use_scale, rd_channels=6)).train(training)
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
    output, expected = x + norm(ours(x)), theirs(x)
    wanted = [x, theirs.z.weight]
    assert_same(output, expected, [x, ours.attention.out_proj.weight], wanted)
    towards = torch.randn_like(expected)
    (found,) = torch.autograd.grad(x + norm(ours(x)), ours.attention.in_proj.weight, towards)
    theirs_of = torch.autograd.grad(theirs(x), [part.weight for part in parts], towards)
    torch.testing.assert_close(found, torch.cat(theirs_of).flatten(1), rtol=1e-9, atol=1e-10)


def test_equals_danets_position_attention():
    """Queries and keys of an eighth of the channels, values of all, no projection after."""
    channels = 16
    layer = randomised(
        SpatialAttention(channels, inner_channels=2, value_channels=channels, score="dot")
    )
    with torch.no_grad():
        layer.attention.out_proj.weight.copy_(torch.eye(channels))
        layer.attention.out_proj.bias.zero_()
    x = some(channels=channels)
    query, key, value, _ = (f(x).flatten(2) for f in as_convolutions(layer))
    attention = torch.bmm(query.transpose(1, 2), key).softmax(dim=-1)
    expected = torch.bmm(value, attention.transpose(1, 2)).view_as(x)
    expected = layer.residual.gamma * expected + x
    assert_same(layer(x), expected, [x, layer.attention.in_proj.weight, layer.residual.gamma])


@pytest.mark.parametrize("backend", ["auto", "edges"])
@pytest.mark.parametrize("size", [(5, 7), (1, 6), (6, 1), (1, 1)], ids=str)
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
    assert_same(layer(x), expected, [x, *layer.parameters()])


@pytest.mark.parametrize("num_heads", [1, 2])
def test_equals_axial_attention_by_loops(num_heads):
    layer, x = randomised(SpatialAttention(CHANNELS, num_heads=num_heads, pattern="axial")), some()
    y = torch.stack([layer.attention(x[:, :, i].mT).mT for i in range(HEIGHT)], dim=2)
    y = x + layer.residual.gamma * y
    z = torch.stack([layer.column_attention(y[..., j].mT).mT for j in range(WIDTH)], dim=3)
    expected = y + layer.column_residual.gamma * z
    assert_same(layer(x), expected, [x, *layer.parameters()], rtol=1e-7, atol=1e-7)
    add = SpatialAttention(CHANNELS, num_heads=num_heads, pattern="axial", residual="add").double()
    add.load_state_dict({n: p for n, p in layer.state_dict().items() if "gamma" not in n})
    for residual in (layer.residual, layer.column_residual):
        nn.init.ones_(residual.gamma)
    torch.testing.assert_close(add(x), layer(x))


@pytest.mark.parametrize("size", [(5, 7), (2, 1)], ids=str)
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
    ("options", "size"),
    [
        ({"pattern": "window", "radius": max(HEIGHT, WIDTH) - 1}, (HEIGHT, WIDTH)),
        ({"pattern": "window", "radius": 1000}, (HEIGHT, WIDTH)),
        ({"pattern": "criss_cross"}, (1, 9)),
        ({"pattern": "criss_cross"}, (9, 1)),
    ],
    ids=str,
)
def test_forms_that_are_full(options, size):
    full = randomised(SpatialAttention(CHANNELS, num_heads=2, inner_channels=6))
    layer = SpatialAttention(CHANNELS, num_heads=2, inner_channels=6, **options).double()
    layer.load_state_dict(full.state_dict())
    x = some(height=size[0], width=size[1])
    ours, theirs = [x, *layer.parameters()], [x, *full.parameters()]
    assert_same(layer(x), full(x), ours, theirs, rtol=1e-7, atol=1e-7)


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
    size = math.ceil(HEIGHT / layer.pool), math.ceil(WIDTH / layer.pool)
    looked = captured[:, :, row * WIDTH + column].unflatten(-1, size)
    assert looked.shape == (1, 2 if name == "heads" else 1, *size)
    if name in ("window", "criss_cross", "edges"):
        assert torch.equal(looked[0, 0] > 0, expected)


@pytest.mark.parametrize("name", PATTERNS)
def test_passes_the_checks_of_attention(name):
    layer = SpatialAttention(CHANNELS, **PATTERNS[name])
    attnkit.assert_attention(
        randomised(layer).float(),
        dim=CHANNELS,
        call=lambda layer, tokens: layer(tokens.mT[..., None]).squeeze(-1).mT,
    )


@pytest.mark.parametrize("height", [1, 3])
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
    layer, x, built = randomised(SpatialAttention(CHANNELS, pattern="criss_cross")), some(), []
    expected = layer(x)
    monkeypatch.setattr(spatial, "Edges", lambda *given: built.append(1) or attnkit.Edges(*given))
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager")(x), expected)
    assert not built


def test_exported_before_it_ever_ran():
    spatial._kept_edges.cache_clear()
    layer = SpatialAttention(8, pattern="criss_cross").eval()
    x = torch.randn(1, 8, 5, 6)
    exported = torch.export.export(layer, (x,)).module()
    torch.testing.assert_close(exported(x), layer(x))


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        ({}, "flash"),
        ({"pattern": "window", "radius": 1}, "block_sparse"),
        ({"pattern": "criss_cross"}, "edges_numba"),
    ],
)
def test_kernels_are_on_record(options, kernel):
    layer = SpatialAttention(CHANNELS, **options)
    with attnkit.record_backends(layer) as record, torch.no_grad():
        layer(torch.randn(1, CHANNELS, 48, 48))
    assert record.counts == {"attention": {kernel: 1}}


def test_sizes_alone_are_enough_on_the_meta_device():
    with torch.device("meta"):
        assert SpatialAttention(8)(torch.randn(2, 8, 5, 3)).shape == (2, 8, 5, 3)


def context(fusion="add", **options):
    return ContextAttention(CHANNELS, reduction=4, fusion=fusion, **options)


@pytest.mark.parametrize("fusion", ["add", "scale"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_equals_timms_global_context(fusion, dtype):
    options = {"fuse_add": fusion == "add", "fuse_scale": fusion == "scale", "rd_channels": 2}
    theirs = randomised(GlobalContext(CHANNELS, **options)).to(dtype)
    mlp = theirs.mlp_add if fusion == "add" else theirs.mlp_scale
    ours = context(fusion, norm_eps=mlp.norm.eps).to(dtype)
    pairs = [(ours.query, theirs.conv_attn.weight)]
    for our, their in ((0, mlp.fc1), (1, mlp.norm), (3, mlp.fc2)):
        module = ours.transform[our]
        pairs += [(module.weight, their.weight), (module.bias, their.bias)]
    assert len(pairs) == len([*ours.parameters()]) == len([*theirs.parameters()]) - 1
    with torch.no_grad():
        for our, their in pairs:
            our.copy_(their.view_as(our))
    x = some(dtype=dtype)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}[dtype]
    expected = theirs(x)
    own, others = zip(*pairs, strict=True)
    assert_same(ours(x), expected, [x, *own], [x, *others], rtol=tolerance, atol=tolerance)
    # the bias that they add to the scores and we do not cannot be learned
    (gradient,) = torch.autograd.grad(theirs(x).sum(), theirs.conv_attn.bias)
    assert gradient.abs() < tolerance


def test_context_is_spatial_attention_whose_queries_are_one():
    """A bias alone for the queries, the identity for keys and values."""
    ours = randomised(context())
    spatial = SpatialAttention(CHANNELS, score="dot", residual=None).double()
    identity, zeros = torch.eye(CHANNELS), torch.zeros(CHANNELS)
    with torch.no_grad():
        spatial.attention.in_proj.weight.copy_(torch.cat([0 * identity, identity, identity]))
        spatial.attention.in_proj.bias.copy_(torch.cat([ours.query[0], zeros, zeros]))
        spatial.attention.out_proj.weight.copy_(identity)
    x = some()
    expected = x + ours.transform(spatial(x).movedim(1, -1)).movedim(-1, 1)
    torch.testing.assert_close(ours(x), expected)


def test_weights_of_the_context_are_a_map():
    layer, x = randomised(context()), some()
    with attnkit.capture_attention(layer) as weights, attnkit.record_backends(layer) as record:
        layer(x)
    (captured,) = weights[""]
    assert captured.shape == (BATCH, 1, 1, HEIGHT * WIDTH)
    scores = torch.einsum("c,bcyx->byx", layer.query[0], x)
    expected = scores.flatten(1).softmax(-1).unflatten(1, (HEIGHT, WIDTH))
    torch.testing.assert_close(captured.unflatten(-1, (HEIGHT, WIDTH))[:, 0, 0], expected)
    assert record.total() == {"flash": 1}
    layer.backend = "math"
    with attnkit.record_backends() as record:
        layer(x)
    assert record.total() == {"math": 1}
    with pytest.raises(IndexError, match="heads: there are 1, got 1"):
        layer.attention_weights(x, heads=1)


@pytest.mark.parametrize("fusion", ["add", "scale"])
def test_begins_with_no_context_and_pixels_may_change_places(fusion):
    x, layer = some(), context(fusion).double()
    assert torch.equal(layer(x), x if fusion == "add" else x / 2)
    order, output = torch.randperm(HEIGHT * WIDTH), randomised(layer)(x)
    shuffled = layer(x.flatten(2)[..., order].view_as(x))
    torch.testing.assert_close(shuffled, output.flatten(2)[..., order].view_as(x))
