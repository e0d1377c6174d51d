"""Every score × kernel × mask × dtype against plain formulas in float64; and their refusals."""

from functools import partial

import pytest
import support
import torch
from support import FUDGE, TOLERANCES
from torch.nn import functional as F

import attnkit
from attnkit import Additive, Causal, Cosine, Gaussian, General, Padding, ScaledDot, attend
from attnkit.core.kernels import recompute
from attnkit.core.kernels.choose import BACKENDS, UnsupportedError
from attnkit.core.scores import additive
from attnkit.core.scores.kinds import Score

# A gradient in half precision goes through a rounded product more where the score has one; torch
# allows its kernels up to 150.
GRADIENT_FUDGE = {torch.bfloat16: 8, torch.float16: 8}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BATCH, HEADS = 2, 6

# (queries, keys, query's head_dim, value_dim, key/value heads)
SIZES = [(5, 11, 7, 3, 2), (13, 3, 5, 11, 6)]
KEY_DIM = 17  # the key's head_dim under the general score


def with_gradients(function, tensors):
    return support.with_gradients(tensors, function)


def pairs(query, key):
    return torch.broadcast_tensors(query[:, :, :, None], key[:, :, None])


def by_head(parameter):
    return parameter[:, None, None] if parameter.ndim else parameter


def luong(query, key, weight):
    weight = weight.expand(HEADS, *weight.shape[-2:])
    return torch.einsum("bhqd,hde,bhke->bhqk", query, weight, key)


def cosine(query, key, temperature):
    return F.cosine_similarity(*pairs(query, key), dim=-1) / by_head(temperature)


def gaussian(query, key, bandwidth):
    left, right = pairs(query, key)
    return -(left - right).square().sum(-1) / (2 * by_head(bandwidth) ** 2)


def bahdanau(query, key, vector):
    left, right = pairs(query, key)
    vector = vector.expand(HEADS, vector.shape[-1])
    return torch.einsum("bhqkd,hd->bhqk", torch.tanh(left + right), vector)


def gatv2(query, key, vector):
    left, right = pairs(query, key)
    vector = vector.expand(HEADS, vector.shape[-1])
    return torch.einsum("bhqkd,hd->bhqk", F.leaky_relu(left + right, 0.3), vector)


def scaled_dot(query, key):
    return torch.einsum("bhqd,bhkd->bhqk", query, key) / query.shape[-1] ** 0.5


def positive(shape):
    return lambda size: torch.rand(shape, generator=torch.Generator().manual_seed(2)) + 0.5


def normal(*lead, key_dim=False):
    def make(size):
        shape = (*lead, size[2], KEY_DIM) if key_dim else (*lead, size[2])
        return torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.5

    return make


# name: (plain formula, score of its parameters, the parameters for a size)
SCORES = {
    "scaled_dot": (scaled_dot, ScaledDot, []),
    "general": (luong, General, [normal(HEADS, key_dim=True)]),
    "general, one weight": (luong, General, [normal(key_dim=True)]),
    "cosine": (cosine, Cosine, [positive(HEADS)]),
    "cosine, one temperature": (cosine, Cosine, [positive(())]),
    "gaussian": (gaussian, Gaussian, [positive(HEADS)]),
    "gaussian, one bandwidth": (gaussian, Gaussian, [positive(())]),
    "additive": (bahdanau, Additive, [normal(HEADS)]),
    "additive, one vector": (bahdanau, Additive, [normal()]),
    "leaky_relu": (gatv2, lambda v, **o: Additive(v, "leaky_relu", 0.3, **o), [normal(HEADS)]),
}
DOT_SCORES = [name for name in SCORES if not name.startswith(("additive", "leaky"))]


def make(name, size, dtype=torch.float64, device="cpu"):
    """query, key, value and the score's parameters, all with gradients."""
    num_queries, num_keys, dim, value_dim, kv_heads = size
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (BATCH, HEADS, num_queries, dim),
        (BATCH, kv_heads, num_keys, KEY_DIM if name.startswith("general") else dim),
        (BATCH, kv_heads, num_keys, value_dim),
    ]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors += [parameter(size) for parameter in SCORES[name][2]]
    return [tensor.to(device, dtype).requires_grad_() for tensor in tensors]


def ours(name, softcap=None, **options):
    def function(query, key, value, *parameters):
        score = SCORES[name][1](*parameters, softcap=softcap)
        return attend(query, key, value, score=score, **options)

    return function


def plainly(name, softcap=None, mask=None, bias=None):
    def function(query, key, value, *parameters):
        groups = HEADS // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        scores = SCORES[name][0](query, key, *parameters)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias
        weights = scores.exp()
        if mask is not None:
            weights = weights * mask.dense(*scores.shape[2:], scores.device)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
        return weights @ value

    return function


def masks_for(num_keys):
    return {
        "none": None,
        "and": Causal("bottom_right") & Padding(torch.tensor([num_keys, num_keys - 2])),
    }


@pytest.fixture(params=["one block", "small blocks"])
def block_sizes(request, monkeypatch):
    if request.param == "small blocks":
        # rows of one item at a time, and tiles of a few queries or keys
        monkeypatch.setattr(recompute, "BLOCK_SCORES", {"cpu": HEADS * 11 * 2, "other": HEADS * 11})
        monkeypatch.setattr(additive, "TILE_ELEMENTS", {"cpu": 7 * 11 * 2, "other": 47})


@pytest.mark.parametrize("softcap", [None, 1.3])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_reference_is_the_formula(name, size, softcap):
    mask = masks_for(size[1])["and"]
    tensors = make(name, size)
    expected = with_gradients(plainly(name, softcap, mask), tensors)
    actual = with_gradients(ours(name, softcap, mask=mask, backend="reference"), tensors)
    torch.testing.assert_close(actual, expected)


# of dtypes, softcaps, masks and sizes every pair
VARIANTS = [
    (dtype, softcap, list(masks_for(1))[(i + j) % 2], SIZES[(i // 2 + j) % 2])
    for i, dtype in enumerate(TOLERANCES)
    for j, softcap in enumerate([None, 1.3])
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "softcap", "mask", "size"), VARIANTS, ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_every_kernel_equals_the_reference(name, size, mask, softcap, dtype, device, monkeypatch):
    monkeypatch.setattr(recompute, "BLOCK_SCORES", {"cpu": HEADS * 11 * 2, "other": HEADS * 11 * 2})
    mask = masks_for(size[1])[mask]
    tensors = make(name, size, dtype, device)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = with_gradients(ours(name, softcap, mask=mask, backend="reference"), exact)
    plain = with_gradients(plainly(name, softcap, mask), tensors)
    score = SCORES[name][1](*tensors[3:], softcap=softcap)
    served = set()
    for backend, reasons in attnkit.explain_backends(
        *tensors[:3], score=score, mask=mask
    ).reasons.items():
        function = ours(name, softcap, mask=mask, backend=backend)
        if reasons:
            with pytest.raises(UnsupportedError) as error:
                function(*tensors)
            assert all(reason in str(error.value) for reason in reasons)
            continue
        served.add(backend)
        results = zip(with_gradients(function, tensors), expected, plain, strict=True)
        for index, (one, right, plainly_right) in enumerate(results):
            fudge = GRADIENT_FUDGE.get(dtype, FUDGE) if index else FUDGE
            assert one.dtype == dtype
            assert one.isfinite().all()
            atol, rtol = TOLERANCES[dtype]
            atol = max(atol, (plainly_right.double() - right).abs().max().item())
            torch.testing.assert_close(one.double(), right, atol=fudge * atol, rtol=fudge * rtol)
    assert served >= {"blockwise", "reference"}
    if name in DOT_SCORES and softcap is None and device == "cpu":
        assert served >= {"flash", "math"}


def test_learned_bias_in_blocks(block_sizes):
    *tensors, vector = make("additive", SIZES[0])
    for shape in ((HEADS, 5, 11), (BATCH, 1, 1, 11), (BATCH, 1, 5, 1)):
        bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        results = [
            torch.autograd.grad(
                attend(*tensors, score=Additive(vector), bias=bias, backend=backend).square().sum(),
                [*tensors, vector, bias],
            )
            for backend in ("blockwise", "reference")
        ]
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", SCORES)
def test_rows_that_look_nowhere_are_zero_with_zero_gradients(name, block_sizes):
    tensors = make(name, SIZES[0], torch.float32)
    allowed = torch.ones(BATCH, 1, 5, 11, dtype=torch.bool)
    allowed[1, :, 2] = False
    for softcap, backend in ((None, "auto"), (1.3, "auto"), (None, "blockwise")):
        results = with_gradients(ours(name, softcap, mask=allowed, backend=backend), tensors)
        output, of_query, *_ = results
        assert (output[1, :, 2] == 0).all()
        assert (of_query[1, :, 2] == 0).all()
        assert (output[0] != 0).all()
        assert all(result.isfinite().all() for result in results)
    bias = torch.zeros(5, 11)
    bias[3] = -torch.inf
    results = with_gradients(ours(name, bias=bias, backend="blockwise"), tensors)
    assert (results[0][:, :, 3] == 0).all()
    assert all(result.isfinite().all() for result in results)


@pytest.mark.parametrize("name", SCORES)
def test_the_kernel_that_ran_is_on_record(name):
    tensors = make(name, SIZES[0], torch.float32)
    with attnkit.record_backends() as record:
        ours(name)(*tensors)
        ours(name, softcap=3.0)(*tensors)
    expected = {"flash": 1, "blockwise": 1} if name in DOT_SCORES else {"blockwise": 2}
    assert record.total() == expected


@pytest.mark.parametrize("shape", [(), (1,), (6,)], ids=str)
def test_a_scale_that_is_learned_has_a_gradient(shape):
    tensors = make("scaled_dot", SIZES[0])
    scale = torch.linspace(-0.5, 0.9, max(1, *shape, 1)).reshape(shape).double().requires_grad_()

    def attention(query, key, value, scale, backend="auto"):
        return attend(query, key, value, scale=scale, mask=Causal("top_left"), backend=backend)

    def plain(query, key, value, scale):
        key, value = (t.repeat_interleave(3, dim=1) for t in (key, value))
        scores = scale.expand(6)[:, None, None] * (query @ key.transpose(-2, -1))
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value

    tensors = [*tensors, scale]
    expected = with_gradients(plain, tensors)
    for backend in ("auto", "flash", "blockwise", "math", "reference"):
        actual = with_gradients(partial(attention, backend=backend), tensors)
        torch.testing.assert_close(actual, expected)
    weights = attnkit.attention_weights(*tensors[:2], scale=scale, heads=[4, 1])
    whole = attnkit.attention_weights(*tensors[:2], scale=scale)
    torch.testing.assert_close(weights, whole[:, [4, 1]])


def test_names():
    query, key, value = make("scaled_dot", SIZES[0])
    for name, score in (("cosine", Cosine()), ("gaussian", Gaussian(1.0)), ("dot", ScaledDot(1.0))):
        torch.testing.assert_close(
            attend(query, key, value, score=name), attend(query, key, value, score=score)
        )


class OwnScore(Score):
    """What a user may write: minus the city-block distance."""

    def uncapped(self, query, key):
        return -torch.cdist(query, key, p=1)


def test_a_score_of_ones_own_runs_in_blocks(block_sizes):
    tensors = make("scaled_dot", SIZES[0])
    left, right = pairs(tensors[0], tensors[1].repeat_interleave(3, dim=1))
    weights = (-(left - right).abs().sum(-1)).softmax(-1)
    with attnkit.record_backends() as record:
        output = attend(*tensors, score=OwnScore())
    assert record.total() == {"blockwise": 1}
    torch.testing.assert_close(output, weights @ tensors[2].repeat_interleave(3, dim=1))


class Largest(support.Largest):
    """Those inside of our operators included."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inside = {
            torch.ops.attnkit.additive_scores.default: additive.additive_scores,
            torch.ops.attnkit.additive_scores_backward.default: additive._backward,
        }
        if func in inside:
            with self:
                return inside[func]._init_fn(*args)
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("name", ["additive", "gaussian"])
def test_no_large_tensor_is_held(name, monkeypatch):
    """Neither queries × keys × dim nor queries × keys, forward and backward."""
    tokens, dim = 211, 13
    monkeypatch.setattr(recompute, "BLOCK_SCORES", {"cpu": 2**15, "other": 2**15})
    monkeypatch.setattr(additive, "TILE_ELEMENTS", {"cpu": 2**15, "other": 2**15})
    tensors = make(name, (tokens, tokens, dim, dim, HEADS), torch.float32)
    with Largest() as plain:
        with_gradients(ours(name, 3.0, mask=Causal(), backend="reference"), tensors)
    assert plain.numel >= HEADS * tokens**2
    with Largest() as largest:
        with_gradients(ours(name, 3.0, mask=Causal(), backend="blockwise"), tensors)
        attnkit.attention_weights(*tensors[:2], score=SCORES[name][1](*tensors[3:]), rows=[7, 3])
    # the inputs, of 2 × 6 × 211 × 15, are larger than a block
    assert largest.numel <= BATCH * HEADS * tokens * (dim + 4)
    assert largest.numel < tokens**2


@pytest.mark.parametrize("rows", [None, [4, 1]], ids=str)
@pytest.mark.parametrize("heads", [None, [5, 0]], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_weights_of_rows_and_heads(name, rows, heads):
    tensors = make(name, SIZES[0])
    query, key, _, *parameters = tensors
    score = SCORES[name][1](*parameters, softcap=1.3)
    mask = masks_for(11)["and"]
    actual = attnkit.attention_weights(query, key, score=score, mask=mask, rows=rows, heads=heads)
    identity = torch.eye(11, dtype=torch.float64).expand(BATCH, key.shape[1], 11, 11)
    expected = plainly(name, 1.3, mask)(query, key, identity, *parameters)
    expected = expected if heads is None else expected[:, heads]
    torch.testing.assert_close(actual, expected if rows is None else expected[:, :, rows])


def test_dropout_is_the_same_in_forward_and_backward(block_sizes):
    query, key, value, vector = make("additive", (7, 11, 5, 3, 6), torch.float32)
    output = attend(query, key, value, score=Additive(vector), dropout_p=0.3, backend="blockwise")
    (gradient,) = torch.autograd.grad(output, value, torch.ones_like(output), retain_graph=True)
    # the output is linear in the values, by the same weights
    torch.testing.assert_close((gradient * value).sum(), output.sum())
    ones = attend(query, key, torch.ones_like(value), score=Additive(vector), dropout_p=0.3)
    assert ones.std() > 0.05
    assert 0.8 < ones.mean() < 1.2


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_vector_of_zeros_has_a_finite_cosine(dtype):
    tensors = make("cosine", SIZES[0], dtype)
    with torch.no_grad():
        tensors[0][:, :, 1] = 0
        tensors[1][:, :, 2] = 0
    for backend in ("flash", "blockwise", "math", "reference"):
        output, of_query, of_key, *_ = results = with_gradients(
            ours("cosine", backend=backend), tensors
        )
        assert all(result.isfinite().all() for result in results)
        assert (of_query[:, :, 1] == 0).all()
        assert (of_key[:, :, 2] == 0).all()
        mean = tensors[2].repeat_interleave(3, dim=1).mean(dim=2)
        tolerance = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(output[:, :, 1], mean, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gaussian_is_exact_far_from_the_origin(dtype):
    """Lowered to a dot product without care, distances would drown in the points' norms."""
    generator = torch.Generator().manual_seed(0)
    offset = {torch.float32: 1e4, torch.bfloat16: 64.0, torch.float16: 512.0}[dtype]
    points = torch.randint(-8, 9, (3, 1, 2, 37, 5), generator=generator) / 4
    query, key, value = (
        points + offset * torch.tensor([[[[[1.0]]]], [[[[1.0]]]], [[[[0.0]]]]])
    ).to(dtype)
    exact = [tensor.double() for tensor in (query, key, value)]
    expected = attend(*exact, score=Gaussian(0.7), backend="reference")
    score = Gaussian(torch.tensor([0.7, 0.7], dtype=dtype))
    bound = {torch.float32: 4e-6, torch.bfloat16: 0.06, torch.float16: 8e-3}[dtype]
    for candidate in (Gaussian(0.7), score):
        actual = attend(query, key, value, score=candidate, backend="flash").double()
        assert (actual - expected).abs().max() < bound


def test_gaussian_norms_beyond_float16():
    key = torch.linspace(-400, 400, 41).view(1, 1, 41, 1).half()  # squares to 160,000
    value = torch.arange(41.0).view(1, 1, 41, 1).half()
    output = attend(key, key, value, score=Gaussian(0.5), backend="flash")
    torch.testing.assert_close(output, value)


def test_the_operator_keeps_its_promises():
    tensors = [torch.randn(2, 5, 3).mT, torch.randn(2, 7, 5), torch.randn(2, 5)]
    arguments = [tensor.requires_grad_() for tensor in tensors]
    for slope in (None, 0.3):
        torch.library.opcheck(torch.ops.attnkit.additive_scores.default, (*arguments, slope))


def test_tanh_saturates_exactly():
    """Arguments whose exponentials overflow, on one side or on both."""
    query, key, value, vector = make("additive", SIZES[0], torch.float32)
    for factors in ((100, 1), (1000, 1000), (1e20, 1)):
        tensors = [
            (f * t).detach().requires_grad_() for f, t in zip(factors, (query, key), strict=True)
        ]
        tensors = [*tensors, value, vector]
        actual = with_gradients(ours("additive", backend="blockwise"), tensors)
        expected = with_gradients(plainly("additive"), tensors)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda: "general", r"'general' has a tensor, give the object: score=attnkit.General"),
        (lambda: "additive", r"'additive' has a tensor.*score=attnkit.Additive\(vector\)"),
        (lambda: General(torch.ones(7, 6)), r"weight: expected the shape \[7, 7\] or, with heads"),
        (lambda: General(torch.ones(3, 7, 7)), r"\[6, 7, 7\], got \[3, 7, 7\]"),
        (lambda: General(2.0), "weight: expected a floating-point tensor, got float"),
        (lambda: Cosine(torch.ones(5)), r"temperature: expected the shape \[\] or.*, got \[5\]"),
        (lambda: Cosine(0.0), "temperature: expected a positive number, got 0.0"),
        (lambda: Cosine("hot"), "temperature: expected a floating-point tensor, got str"),
        (lambda: Gaussian(-1.0), "bandwidth: expected a positive number, got -1.0"),
        (lambda: Gaussian(torch.ones((), device="meta")), "bandwidth: is on meta, but query is on"),
        (lambda: Additive(torch.ones(5)), r"vector: expected the shape \[7\] or.*got \[5\]"),
        (lambda: Additive(torch.ones(7), "relu"), "activation: expected 'tanh' or 'leaky_relu'"),
        (lambda: Additive(torch.ones(7), "leaky_relu", -1), "negative_slope: expected at least 0"),
        (lambda: Additive(torch.ones(7), negative_slope=0.5), "only the activation 'leaky_relu'"),
        (lambda: ScaledDot(float("nan")), "scale: expected a finite number, got nan"),
        (lambda: ScaledDot(-float("inf")), "scale: expected a finite number, got -inf"),
        (lambda: ScaledDot(torch.ones(3)), r"scale: expected a number or a tensor .*, got \[3\]"),
        (lambda: ScaledDot(softcap="2"), "softcap: expected a number, got '2'"),
        (lambda: ScaledDot(softcap=0.0), "softcap: expected a positive number, got 0.0"),
        (lambda: Score(), r"Score defines no uncapped\(\)"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(score, message):
    query, key = torch.ones(2, 6, 5, 7), torch.ones(2, 3, 11, 7)
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        attend(query, key, key, score=score())


def test_head_dims_may_differ_under_the_general_score_only():
    query, key, value = torch.ones(2, 6, 5, 7), torch.ones(2, 3, 11, 5), torch.ones(2, 3, 11, 3)
    assert attend(query, key, value, score=General(torch.ones(7, 5))).shape == (2, 6, 5, 3)
    for score in ("dot", Cosine(), Gaussian(), Additive(torch.ones(7))):
        with pytest.raises(ValueError, match="key: expected query's head_dim 7, got 5"):
            attend(query, key, value, score=score)


def test_refusals_say_what_is_missing():
    tensors = make("additive", SIZES[0], torch.float32)
    score = Additive(tensors.pop(), softcap=3.0)
    reasons = attnkit.explain_backends(*tensors, score=score).reasons
    for name in ("flash", "math"):
        assert reasons[name] == [
            "needs a scaled dot-product score, got Additive",
        ]
    reasons = attnkit.explain_backends(
        *tensors, score=ScaledDot(softcap=3.0), dropout_p=0.1
    ).reasons
    assert reasons["flash"][0] == "cannot compute a softcap, got 3.0"
    assert "no dropout" in reasons["flash"][1]
    assert reasons["math"] == ["cannot compute a softcap, got 3.0"]
    assert [b.name for b in BACKENDS if not reasons[b.name]] == ["blockwise", "reference"]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("backend", ["auto", "blockwise", "math", "flash"])
@pytest.mark.parametrize("name", ["cosine", "gaussian"])
def test_padding_that_lies_far_off_costs_no_digits(name, backend, side):
    """The Gaussian's centre is that of the keys that are not padding, whose digits matter."""
    score = {"cosine": Cosine(0.3), "gaussian": Gaussian(torch.tensor([1.0, 0.7, 2.0]))}[name]
    query, key, value = torch.randn(3, BATCH, 3, 7, 5)
    key = key[:, :1] + 300  # one head for three
    alone = attend(query + 300, key, value[:, :1], score=score, backend=backend)
    garbage = 1e4 * torch.randn(BATCH, 1, 11, 5)
    order = 1 if side == "right" else -1
    padded = [torch.cat([t, garbage][::order], dim=2) for t in (key, value[:, :1])]
    real = torch.cat([torch.ones(BATCH, 7), torch.zeros(BATCH, 11)][::order], dim=1).bool()
    output = attend(query + 300, *padded, score=score, mask=Padding(real), backend=backend)
    torch.testing.assert_close(output, alone, rtol=0, atol=3e-5)
    none = Padding(torch.zeros(BATCH, 18, dtype=torch.bool))
    padded[0].requires_grad_()
    nothing = attend(query, *padded, score=score, mask=none, backend=backend)
    assert (nothing == 0).all()
    (gradient,) = torch.autograd.grad(nothing.sum(), padded[0])
    assert (gradient == 0).all()
