"""Linear attention: against its definition in float64, and what it must not depend on."""

import pytest
import torch
from support import Largest, with_gradients, with_third
from torch.nn import functional as F

import attnkit
from attnkit import Causal, Dense, Linear, Padding, Window, attend
from attnkit.core.kernels import linear
from attnkit.core.kernels.choose import UnsupportedError

BATCH, HEADS = 2, 6
# (queries, keys, head_dim, value_dim, key/value heads)
SIZES = [(5, 5, 7, 7, 6), (7, 23, 5, 11, 2), (23, 7, 5, 3, 3), (1, 17, 3, 5, 1), (17, 1, 3, 5, 6)]
FEATURE_MAPS = {"elu": lambda x: F.elu(x) + 1, "relu": F.relu, "sigmoid": torch.sigmoid}


def masks_for(num_keys):
    some = torch.rand(BATCH, num_keys, generator=torch.Generator().manual_seed(0)) > 0.5
    lengths = torch.tensor([num_keys - 1, 0])
    return {
        "none": None,
        "top_left": Causal("top_left"),
        "bottom_right": Causal("bottom_right"),
        "lengths": Padding(lengths),
        "padding": Padding(some),
        "two paddings": Padding(some) & Padding(lengths + 1),
        "two causals": Causal("top_left") & Causal("bottom_right"),
        "top_left and padding": Causal("top_left") & Padding(some),
        "bottom_right and lengths": Padding(lengths) & Causal("bottom_right"),
    }


def make(num_queries, num_keys, head_dim, value_dim, kv_heads, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (BATCH, num_queries, HEADS, head_dim),
        (BATCH, num_keys, kv_heads, head_dim),
        (BATCH, num_keys, kv_heads, value_dim),
    ]
    # laid out as by a projection: tokens before heads
    return [
        torch.randn(shape, generator=generator).transpose(1, 2).to(dtype).requires_grad_()
        for shape in shapes
    ]


@pytest.fixture(params=[False, True], ids=["one segment", "segments"])
def in_small_segments(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(linear, "CHUNK", 3)
        monkeypatch.setitem(linear.SEGMENT_ELEMENTS, "cpu", 1)


@pytest.mark.parametrize(
    ("size", "name", "feature_map"), with_third(SIZES, masks_for(1), FEATURE_MAPS), ids=str
)
def test_it_is_the_definition(size, name, feature_map, in_small_segments):
    options = {"mask": masks_for(size[1])[name], "normalizer": Linear(feature_map)}
    tensors = make(*size)
    actual = with_gradients(tensors, backend="linear", **options)
    expected = with_gradients(tensors, backend="reference", **options)
    assert all(result.isfinite().all() for result in actual)
    torch.testing.assert_close(actual, expected)
    query, key, value = tensors
    weights = attnkit.attention_weights(query, key, **options)
    torch.testing.assert_close(actual[0], weights @ value.repeat_interleave(HEADS // size[4], 1))


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_it_is_that_of_others(feature_map, in_small_segments):
    """The function in PyG's Performer, on features of torch: everywhere, and row by row causal."""
    from torch_geometric.nn.attention.performer import linear_attention

    # enough dimensions that no row of ReLUs is all 0, which PyG divides by
    query, key, value = make(11, 11, 29, 5, HEADS)
    features = FEATURE_MAPS[feature_map]
    options = {"normalizer": Linear(feature_map), "backend": "linear"}
    expected = linear_attention(features(query), features(key), value)
    torch.testing.assert_close(attend(query, key, value, **options), expected)
    rows = [
        linear_attention(
            features(query[:, :, i : i + 1]), features(key[:, :, : i + 1]), value[:, :, : i + 1]
        )
        for i in range(11)
    ]
    causal = attend(query, key, value, mask=Causal(), **options)
    torch.testing.assert_close(causal, torch.cat(rows, dim=2))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_sequences_keep_their_precision(causal, dtype):
    """16,384 tokens: one rounding of the output's, so sums in half precision are seen."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 2, 16_384, 16, generator=generator).to(dtype) for _ in range(3)]
    mask = Causal() if causal else None
    tensors[2] += 3  # a mean that no cancellation hides
    output = attend(*tensors, mask=mask, normalizer="linear", backend="linear")
    rows = [0, 1, 63, 64, 4099, 8192, 16_383]
    query, key, value = (tensor.double() for tensor in tensors)
    weights = attnkit.attention_weights(query, key, mask=mask, normalizer="linear", rows=rows)
    rtol = 2e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(output[:, :, rows].double(), weights @ value, atol=1e-6, rtol=rtol)


@pytest.mark.parametrize("mask", [None, Causal()])
def test_rows_whose_weights_are_all_zero(mask, in_small_segments):
    query, key, value = make(11, 11, 5, 3, 6)
    with torch.no_grad():
        query[:, :, 3] = -query[:, :, 3].abs()  # no feature
        query[:, :, 7], key[..., :2] = torch.tensor([1.0, 1, -1, -1, -1]), -1.0  # none in common
    output, *gradients = with_gradients(
        [query, key, value], mask=mask, normalizer=Linear("relu"), backend="linear"
    )
    for row in (3, 7):
        assert (output[:, :, row] == 0).all()
        assert (gradients[0][:, :, row] == 0).all()
    assert (output[:, :, 5] != 0).any()
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_features_far_below_zero_are_small_and_not_zero():
    query, key, value = (tensor.detach().float() for tensor in make(5, 7, 3, 3, 6))
    query, key = query - 20, key - 18  # where elu(x) + 1 rounds to 0 in float32
    exact = (tensor.double() for tensor in (query, key, value))
    expected = attend(*exact, normalizer="linear", backend="reference")
    for backend in ("linear", "reference"):
        output = attend(query, key, value, normalizer="linear", backend=backend)
        torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-4)
    zero = torch.zeros(3, requires_grad=True)
    (slope,) = torch.autograd.grad(Linear().features(zero).sum(), zero)
    assert (slope == 1).all()


def test_derivatives_of_every_order(in_small_segments):
    query, key, value = make(5, 7, 3, 2, 3)

    def function(*tensors):
        return attend(*tensors, mask=Causal("bottom_right"), normalizer="linear", backend="linear")

    assert torch.autograd.gradcheck(function, (query, key, value), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (query, key, value), fast_mode=True)


@pytest.mark.parametrize("mask", [None, Causal(), Causal() & Padding(torch.tensor([2000, 3]))])
def test_nothing_is_larger_than_the_inputs(mask, monkeypatch):
    monkeypatch.setitem(linear.SEGMENT_ELEMENTS, "cpu", 2**14)
    tensors = make(2053, 2053, 8, 8, 2)
    with Largest() as largest:
        with_gradients(tensors, mask=mask, normalizer="linear", backend="linear")
    assert largest.numel == tensors[0].numel()


def test_compiled_equals_eager(monkeypatch):
    monkeypatch.setattr(linear, "CHUNK", 3)
    monkeypatch.setitem(linear.SEGMENT_ELEMENTS, "cpu", BATCH * HEADS * 5 * 6)
    torch._dynamo.reset()
    tensors = make(11, 11, 5, 3, 2, torch.float32)

    def function(query, key, value, lengths):
        mask = Causal() & Padding(lengths)
        causal = attend(query, key, value, mask=mask, normalizer="linear")
        return causal + attend(query, key, value, normalizer="linear")

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    lengths = torch.tensor([11, 5])
    expected = with_gradients(tensors, function, lengths=lengths)
    torch.testing.assert_close(with_gradients(tensors, compiled, lengths=lengths), expected)


def test_autocast():
    tensors = make(11, 11, 5, 3, 2, torch.float32)
    expected = attend(*tensors, mask=Causal(), normalizer="linear", backend="linear")
    with torch.autocast("cpu", torch.bfloat16):
        output = attend(*tensors, mask=Causal(), normalizer="linear", backend="linear")
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, atol=3e-2, rtol=3e-2)


def test_what_it_refuses():
    tensors = make(5, 5, 7, 7, 6)
    explain = attnkit.explain_backends
    assert explain(*tensors, normalizer="linear", mask=Causal()).chosen == "linear"
    masks = "needs no mask but Causal, Padding and one Packed, got "
    for options, reason in (
        ({"mask": Window(1, 1) & Causal()}, masks + "W"),
        ({"mask": Dense(torch.eye(5) > 0)}, masks + "D"),
        ({"dropout_p": 0.5}, "has no dropout, got dropout_p=0.5"),
    ):
        assert explain(*tensors, normalizer="linear", **options).chosen == "reference"
        with pytest.raises(UnsupportedError, match=reason):
            attend(*tensors, normalizer="linear", backend="linear", **options)
    with pytest.raises(UnsupportedError, match="needs the normalizer Linear, got Softmax"):
        attend(*tensors, backend="linear")
