"""Every kernel × mask × dtype × odd size against the definition in float64; and their refusals."""

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from support import TOLERANCES, assert_equal, with_gradients, with_third
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnkit
from attnkit import Causal, Dense, Padding, attend
from attnkit.core.kernels.choose import BACKENDS, PLACES, UnsupportedError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BATCH, HEADS = 2, 6

# (queries, keys, head_dim, value_dim, key/value heads)
SIZES = [(5, 5, 7, 7, 6), (7, 11, 8, 8, 2), (13, 3, 5, 11, 6), (1, 17, 16, 16, 3)]


def masks_for(num_queries, num_keys):
    generator = torch.Generator().manual_seed(0)
    some = torch.rand(BATCH, 1, num_queries, num_keys, generator=generator) > 0.4
    some[1, :, 0] = False  # a row that may look nowhere
    lengths = torch.tensor([num_keys - 1, 0])
    return {
        "none": None,
        "top_left": Causal("top_left"),
        "bottom_right": Causal("bottom_right"),
        "lengths": Padding(lengths),
        "padding": Padding(torch.rand(BATCH, num_keys, generator=generator) > 0.5),
        "dense": Dense(some),
        "dense_2d": some[0, 0],
        "and": Causal("bottom_right") & Padding(lengths) & some,
    }


def make(size, dtype, device, seed=0):
    num_queries, num_keys, head_dim, value_dim, kv_heads = size
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (BATCH, HEADS, num_queries, head_dim),
        (BATCH, kv_heads, num_keys, head_dim),
        (BATCH, kv_heads, num_keys, value_dim),
    ]
    return [
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        for shape in shapes
    ]


def definition(query, key, value, mask=None, bias=None, scale=None):
    """Attention written once more, independently of attnkit."""
    groups = query.shape[1] // key.shape[1]
    key = torch.stack([key[:, head // groups] for head in range(query.shape[1])], dim=1)
    value = torch.stack([value[:, head // groups] for head in range(query.shape[1])], dim=1)
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    weights = scores.exp() * (1 if mask is None else mask)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-4)
    return torch.einsum("bhqk,bhkd->bhqd", weights, value)


def allowed_by(mask, size):
    if isinstance(mask, torch.Tensor):
        return mask
    return None if mask is None else mask.dense(*size[:2], torch.device("cpu"))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", list(masks_for(1, 1)))
def test_reference_is_the_definition(size, name):
    tensors = make(size, torch.float64, "cpu")
    mask = masks_for(*size[:2])[name]
    expected = with_gradients(tensors, definition, mask=allowed_by(mask, size))
    actual = with_gradients(tensors, mask=mask, backend="reference")
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "name", "size"), with_third(TOLERANCES, masks_for(1, 1), SIZES), ids=str
)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_every_kernel_equals_the_reference(device, dtype, size, name, with_bias):
    mask = masks_for(*size[:2])[name]
    tensors = make(size, dtype, device)
    bias = torch.randn(1, HEADS, *size[:2], generator=torch.Generator().manual_seed(1))
    bias = bias.to(device, dtype) if with_bias else None
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = with_gradients(exact, mask=mask, bias=bias, backend="reference")
    allowed = allowed_by(mask, size)
    allowed = None if allowed is None else allowed.to(device)
    plain = with_gradients(tensors, definition, mask=allowed, bias=bias)
    explanation = attnkit.explain_backends(*tensors, mask=mask, bias=bias)
    served = 0
    for backend, reasons in explanation.reasons.items():
        options = {"mask": mask, "bias": bias, "backend": backend}
        if reasons:
            with pytest.raises(UnsupportedError) as error:
                attend(*tensors, **options)
            assert all(reason in str(error.value) for reason in reasons)
            continue
        served += 1
        for results in zip(with_gradients(tensors, **options), expected, plain, strict=True):
            assert results[0].dtype == dtype
            assert_equal(*results)
    assert served >= (3 if device == "cpu" else 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", [backend.name for backend in BACKENDS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rows_that_look_nowhere_are_zero_with_zero_gradients(device, backend, dtype):
    query, key, value = make((5, 5, 8, 8, 6), dtype, device)
    allowed = torch.ones(5, 5, dtype=torch.bool, device=device)
    allowed[2] = False
    masks = [Dense(allowed), Padding(torch.tensor([5, 0], device=device))]
    if attnkit.explain_backends(query, key, value, mask=masks[0]).reasons[backend]:
        with pytest.raises(UnsupportedError):
            attend(query, key, value, mask=masks[0], backend=backend)
        return
    for mask, dead in zip(masks, [(slice(None), slice(None), 2), (1,)], strict=True):
        output, *gradients = with_gradients([query, key, value], mask=mask, backend=backend)
        assert (output[dead] == 0).all()
        assert (gradients[0][dead] == 0).all()
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert output.abs().sum() > 0
    bias = torch.full((5, 5), -torch.inf, device=device)
    if attnkit.explain_backends(query, key, value, bias=bias).reasons[backend]:
        return  # flex reads masks, and no bias
    assert (attend(query, key, value, bias=bias, backend=backend) == 0).all()
    bias = bias.masked_fill(allowed, 0.0)
    by_bias = with_gradients([query, key, value], bias=bias, backend=backend)
    masked = with_gradients([query, key, value], mask=masks[0], backend=backend)
    torch.testing.assert_close(by_bias, masked)
    weights = attnkit.attention_weights(query, key, bias=bias)
    assert (weights[:, :, 2] == 0).all()
    tolerance = {"atol": 0.02, "rtol": 0} if dtype == torch.bfloat16 else {}
    values = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    torch.testing.assert_close(weights @ values, by_bias[0], **tolerance)


@pytest.mark.parametrize("backend", ["blockwise", "math", "reference"])
def test_dropout(backend):
    query, key, value = make((7, 1009, 8, 8, 6), torch.float32, "cpu")
    ones = torch.ones_like(value)
    kept = attend(query, key, ones, dropout_p=0.25, backend=backend)
    # each row is a sum over 1,009 weights of which three quarters stay, scaled by 4/3
    assert 0.9 < kept.mean() < 1.1
    assert kept.std() > 1e-3
    mask = Dense(torch.zeros(7, 1009, dtype=torch.bool))
    assert (attend(query, key, value, mask=mask, dropout_p=0.25, backend=backend) == 0).all()


def test_bias_gets_its_gradient():
    query, key, value = make((5, 7, 8, 8, 6), torch.float64, "cpu")
    bias = torch.randn(HEADS, 5, 7, dtype=torch.float64, requires_grad=True)
    assert attnkit.explain_backends(query, key, value, bias=bias).chosen == "blockwise"
    assert torch.autograd.gradcheck(
        lambda bias: attend(query, key, value, mask=Causal("top_left"), bias=bias), bias
    )
    with torch.no_grad():
        assert attnkit.explain_backends(query, key, value, bias=bias).chosen == "flash"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [-1.3, 0.0, 0.3])
@pytest.mark.parametrize("name", ["none", "top_left", "dense"])
def test_any_scale_on_every_kernel(device, scale, name):
    tensors = make((5, 5, 8, 8, 6), torch.float32, device)
    mask = masks_for(5, 5)[name]
    allowed = allowed_by(mask, (5, 5))
    allowed = None if allowed is None else allowed.to(device)
    expected = with_gradients(tensors, definition, mask=allowed, scale=scale)
    reasons = attnkit.explain_backends(*tensors, mask=mask, scale=scale).reasons
    for backend in (name for name, why in reasons.items() if not why):
        actual = with_gradients(tensors, mask=mask, scale=scale, backend=backend)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    assert not reasons["math"]
    assert bool(reasons["flash"]) == (scale <= 0 or device == "cuda")


@pytest.mark.parametrize("backend", ["flash", "blockwise", "math", "reference"])
def test_a_finite_bias_forbids_nothing_in_half_precision(backend):
    query, key, _ = make((5, 5, 8, 8, 6), torch.float16, "cpu")
    bias = torch.zeros(5, 5)
    bias[1] = -1e9  # more than float16 holds
    bias[2] = -torch.inf
    sums = attend(query, key, torch.ones_like(key), bias=bias, backend=backend)[..., 0]
    expected = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]).expand(BATCH, HEADS, 5)
    torch.testing.assert_close(sums.float(), expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("size", [(0, 5, 8, 8, 6), (5, 0, 8, 8, 6)], ids=str)
def test_empty_inputs(size):
    tensors = make(size, torch.float32, "cpu")
    output, *gradients = with_gradients(tensors, mask=Causal("top_left"))
    assert output.shape == (BATCH, HEADS, size[0], 8)
    assert (output == 0).all()
    assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.parametrize("kernel", ["flash", "math"])
def test_declared_limits_are_torchs(kernel):
    """Where a kernel of torch's says it can, torch agrees, and where not, torch refuses."""
    backend = next(backend for backend in BACKENDS if backend.name == kernel)
    forced = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}[kernel]
    query, key, value = make((5, 5, 8, 8, 6), torch.float32, "cpu")
    bias = torch.randn(1, 1, 5, 5)
    cases = {
        "plain": {},
        "dropout": {"dropout_p": 0.1},
        "bias": {"bias": bias},
        "learned bias": {"bias": bias.clone().requires_grad_()},
        "causal": {"mask": Causal()},
        "mask": {"mask": Padding(torch.tensor([3, 5]))},
    }
    verdicts = Counter()
    for case, options in cases.items():
        inputs = attnkit.core.inputs.check_inputs(query, key, value, **options)
        declared = backend.serves(inputs)
        term = inputs.attn_mask()
        with sdpa_kernel(forced):
            try:
                F.scaled_dot_product_attention(
                    query, key, value, term, inputs.dropout_p, inputs.is_causal and term is None
                )
                possible = True
            except RuntimeError:
                possible = False
        assert declared == possible, case
        verdicts[declared] += 1
    assert verdicts[True]


def test_auto_takes_the_first_that_can():
    query, key, value = make((5, 5, 8, 8, 6), torch.float32, "cpu")
    explain = attnkit.explain_backends
    assert explain(query, key, value).chosen == "flash"
    assert explain(query, key, value, dropout_p=0.1).chosen == "blockwise"
    assert explain(query[:, :, :0], key, value).chosen == "reference"
    table = str(explain(query, key, value, dropout_p=0.1))
    assert [line.split()[0] for line in table.splitlines()] == [b.name for b in BACKENDS]
    assert "no dropout" in table


def test_the_table_is_there_where_no_kernel_can():
    query, key, value = make((5, 5, 8, 8, 6), torch.float32, "cpu")
    edges = attnkit.Edges(torch.tensor([[0, 0], [1, 1]]), 5)
    explained = attnkit.explain_backends(query, key, value, normalizer="linear", mask=edges)
    assert explained.chosen is None
    first, *table, blocks = str(explained).splitlines()
    assert blocks.startswith("the mask in blocks of 64 × 64: ")
    assert first == "no backend can serve this attention"
    assert [line.split()[0] for line in table] == [b.name for b in BACKENDS]
    assert all(explained.reasons.values())
    with pytest.raises(UnsupportedError, match="no backend can serve"):
        attend(query, key, value, normalizer="linear", mask=edges)


def test_the_docstring_names_every_backend():
    assert all(f'"{backend.name}"' in attend.__doc__ for backend in BACKENDS)


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_torchs_causal_bias_is_the_mask_it_is(align):
    from torch.nn.attention import bias

    make_bias = {"top_left": bias.causal_upper_left, "bottom_right": bias.causal_lower_right}
    query, key, value = make((7, 11, 8, 8, 2), torch.float32, "cpu")
    given = make_bias[align](7, 11)
    lengths = Padding(torch.tensor([10, 3]))
    for mask, both in ((None, Causal(align)), (lengths, lengths & Causal(align))):
        actual = attend(query, key, value, bias=given, mask=mask)
        torch.testing.assert_close(actual, attend(query, key, value, mask=both))
    with pytest.raises(ValueError, match="CausalBias has 7 queries and 11 keys, expected 5 and 11"):
        attend(query[:, :, :5], key, value, bias=given)


def test_a_graph_of_a_gradient_that_nobody_differentiates_changes_nothing():
    query, key, value = make((5, 7, 8, 8, 6), torch.float32, "cpu")
    first, expected = (
        torch.autograd.grad(attend(query, key, value).sum(), query, create_graph=create_graph)[0]
        for create_graph in (True, False)
    )
    assert torch.equal(first, expected)


def test_one_error_gives_every_reason():
    query, key, value = make((5, 5, 8, 8, 6), torch.float32, "cpu")
    bias = torch.zeros(5, 5, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"no dropout.*; has no gradient for the bias"):
        attend(query, key, value, bias=bias, dropout_p=0.1, backend="flash")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"score": "scaleddot"},
            "score: expected one of scaled_dot, dot, cosine, gaussian, got 'scaleddot'",
        ),
        ({"score": "dot", "scale": 2.0}, "the score 'dot' has no scale"),
        (
            {"normalizer": "sparsemax"},
            "normalizer: expected one of softmax, hard, linear, got 'sparsemax'",
        ),
        ({"normalizer": "delta_rule"}, r"'delta_rule' has a tensor, give the object.*DeltaRule"),
        ({"edge_features": torch.ones(1)}, "edge_features: expected attnkit.EdgeFeatures, got T"),
        ({"query": None}, "query: expected a tensor, got NoneType"),
        ({"value": np.ones((2, 4, 5, 8))}, "value: expected a tensor, got ndarray"),
        ({"bias": [[0.0]]}, "bias: expected a tensor, got list"),
        ({"dropout_p": "0.1"}, "dropout_p: expected a number, got '0.1'"),
        ({"scale": [0.5]}, r"scale: expected a number, got \[0.5\]"),
        ({"dropout_p": 1.0}, "dropout_p: expected 0 <= dropout_p < 1, got 1.0"),
        (
            {"backend": "flahs"},
            "backend: expected .auto. or one of edges_triton, edges_numba, edges, v",
        ),
        ({"mask": torch.zeros(5, 5)}, r"expected a boolean tensor \(True = may look\).*bias="),
        ({"mask": torch.ones(5, 5, dtype=torch.int)}, r"convert with .bool\(\)"),
        ({"mask": "causal"}, "mask: expected an attnkit mask or a boolean tensor, got str"),
        ({"mask": torch.ones(3, 5, dtype=torch.bool)}, r"mask: the shape \[3, 5\] does not"),
        ({"mask": Padding(torch.tensor([5]))}, r"mask: Padding has the shape \[1\]"),
        ({"bias": torch.ones(5, dtype=torch.bool)}, "bias: expected a floating-point tensor"),
        ({"query": torch.ones(2, 6, 5, 8).to_sparse()}, "query: expected a dense tensor, got"),
        ({"value": torch.ones(2, 6, 5, 8).to_sparse()}, "value: expected a dense.*attnkit.Edges"),
        ({"bias": torch.ones(5, 5).to_sparse()}, "bias: expected a dense tensor, got the layout"),
        ({"mask": torch.eye(5).bool().to_sparse()}, "mask: expected a dense boolean tensor"),
        ({"scale": float("nan")}, "scale: expected a finite number, got nan"),
        ({"bias": torch.ones(5, 5, device="meta")}, "bias: is on meta, but query is on cpu"),
        ({"bias": torch.ones(7, 5)}, r"bias: the shape \[7, 5\] does not broadcast"),
        (
            {name: torch.ones(2, 4, 5, 8) for name in ("key", "value")},
            "its 4 heads do not divide query's 6 heads",
        ),
        ({"key": torch.ones(2, 6, 5, 7)}, "key: expected query's head_dim 8, got 7"),
        ({"key": torch.ones(1, 6, 5, 8)}, r"value: expected the batch.*\[1, 6, 5\]"),
        ({"value": torch.ones(2, 6, 4, 8)}, r"value: expected the batch.*got \[2, 6, 4\]"),
        ({"query": torch.ones(2, 5, 8)}, r"query: expected \[batch, heads, tokens, head_dim\]"),
        ({"value": torch.ones(2, 6, 5, 8).half()}, "value: is torch.float16 on cpu, but query"),
        ({"query": torch.ones(2, 6, 5, 8).int()}, "query: expected a floating-point tensor"),
        ({"query": torch.ones(2, 6, 4, 8), "mask": Causal()}, "4 queries and 5 keys is ambiguous"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_wrong_arguments_are_named(change, message):
    arguments = {name: torch.ones(2, 6, 5, 8) for name in ("query", "key", "value")} | change
    with pytest.raises((ValueError, TypeError), match=message):
        attend(arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), **arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient", "math"])
def test_each_kernel_really_runs_on_cuda(backend):
    query, key, value = make((64, 64, 64, 64, 6), torch.bfloat16, "cuda")
    with attnkit.record_backends() as record:
        attend(query, key, value, backend=backend)
    assert record.total() == {backend: 1}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_served_or_refused_in_one_line():
    items = [torch.randn(tokens, 2, 4) for tokens in (3, 5)]
    jagged = torch.nested.nested_tensor(items, layout=torch.jagged).transpose(1, 2)
    for found, item in zip(attend(jagged, jagged, jagged).unbind(), items, strict=True):
        alone = item.transpose(0, 1)
        torch.testing.assert_close(found, attend(alone, alone, alone))
    strided = torch.nested.nested_tensor([item.transpose(0, 1) for item in items])
    plain = torch.randn(2, 2, 5, 4)
    block = attnkit.MultiHeadAttention(4, 2)
    for name, call in {
        "query": lambda: attend(strided, strided, strided),
        "query ": lambda: attend(jagged, jagged, jagged, mask=attnkit.Causal()),
        "query  ": lambda: attend(jagged, jagged, jagged, backend="reference"),
        "key": lambda: attend(plain, strided, plain),
        "bias": lambda: attend(plain, plain, plain, bias=strided),
        "query   ": lambda: block(strided),
    }.items():
        with pytest.raises(TypeError, match=f"^{name.strip()}: nested tensors .*Packed") as refused:
            call()
        assert "\n" not in str(refused.value)


def test_a_kernel_is_loaded_when_it_may_serve(tmp_path):
    """The table says of each kernel, before it is loaded, what the kernel says of itself.

    For a ledger that is not there nothing is loaded or written.
    """
    for (name, place), kernel in zip(PLACES.items(), BACKENDS, strict=True):
        assert (name, place.home.rpartition(".")[2]) == (kernel.name, type(kernel).__name__)
        assert (place.normalizer,) == kernel.normalizers
        assert not kernel.needs_mask or place.mask is not None
    code = (
        "import sys, torch, attnkit\n"
        "x = torch.ones(1, 2, 3, 8)\n"
        "from attnkit import attend\n"
        "before = {*sys.modules}\n"
        "attend(x, x, x)\n"
        "print(*sorted({*sys.modules} - before))\n"
        "attend(x, x, x, bias=torch.ones(3, 3))\n"
        "print(*sorted(n.rpartition('.')[2] for n in sys.modules if '.core.kernels.' in n))\n"
        "attend(x, x, x, normalizer='linear')\n"
        "print('attnkit.core.kernels.linear' in sys.modules)"
    )
    environment = {"ATTNKIT_LEDGER": str(tmp_path / "none.json"), "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    loaded = ["attnkit.core.operators.files", "base choose ledger record sdpa", "True"]
    assert done.stdout.splitlines() == loaded
    assert [*tmp_path.iterdir()] == []
