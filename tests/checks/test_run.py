"""How checks are run, judged and reported, on which modules, and what they leave unchanged."""

import pytest
import torch
from torch import nn

import attnkit
from attnkit.checks import on_complete_graph

DIM = 12


def attention(**options):
    return attnkit.MultiHeadAttention(DIM, 3, **options)


def weak_mask(module, tokens, mask):
    return module(tokens, bias=-3.0 * (~mask)[:, None, None].to(tokens.dtype))


def sees_next(module, tokens):
    num_tokens = tokens.shape[1]
    return module(tokens, mask=torch.ones(num_tokens, num_tokens).tril(1).bool())


def nan_rows(module, tokens, mask):
    """A module's output, NaN for items that are all padding."""
    return module(tokens, mask=attnkit.Padding(mask)) / mask.any(-1)[:, None, None]


def test_a_known_failure_is_allowed_for_and_then_must_be_there():
    only = {"call": nan_rows, "checks": ["dead_rows", "mask"]}
    with pytest.raises(AssertionError, match="dead_rows is fail, expected no failure") as caught:
        attnkit.assert_attention(attention(), DIM, **only)
    assert "dead_rows  FAIL     NaN or infinite" in str(caught.value)
    report = attnkit.assert_attention(attention(), DIM, expect={"dead_rows": "fail"}, **only)
    assert [finding.check for finding in report] == ["dead_rows", "mask"]
    with pytest.raises(AssertionError, match="dead_rows is pass, expected fail"):
        attnkit.assert_attention(attention(), DIM, expect={"dead_rows": "fail"})


def test_the_module_stays_as_it_was():
    class Caches(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(DIM)
            self.attention = attention(dropout_p=0.5)
            self.register_buffer("cache", None)

        def forward(self, tokens):
            self.cache = self.norm(tokens.transpose(1, 2)).transpose(1, 2)
            return self.attention(self.cache)

    module = Caches()
    module.attention.in_proj.eval()
    weight = module.attention.out_proj.weight
    weight.grad = torch.ones_like(weight)
    module.attention.in_proj.weight.requires_grad_(False)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    modes = [child.training for child in module.modules()]
    buffers = {name: id(buffer) for name, buffer in module.named_buffers()}
    random = torch.get_rng_state()
    attnkit.check_attention(module, DIM)
    assert module.cache is None
    assert {name: id(buffer) for name, buffer in module.named_buffers()} == buffers
    assert state.keys() == module.state_dict().keys()
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert modes == [child.training for child in module.modules()]
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert all(p.grad is None for p in module.parameters() if p is not weight)
    assert torch.equal(torch.get_rng_state(), random)


def test_buffers_of_inference_mode_and_sparse_ones_are_left_alone():
    module = attention()
    with torch.inference_mode():
        module.register_buffer("table", torch.arange(5.0))
    module.register_buffer("graph", torch.eye(3).to_sparse())
    buffers = dict(module.named_buffers())
    assert attnkit.check_attention(module, DIM)
    assert all(buffer is buffers[name] for name, buffer in module.named_buffers())
    assert torch.equal(module.table, torch.arange(5.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_pass_and_fail_alike(dtype):
    report = attnkit.check_attention(attention().to(dtype), DIM)
    assert report, str(report)
    assert report["output"].seen == f"[3, 7, 12] to [3, 7, 12], {dtype}, finite"
    leak = attnkit.check_attention(attention().to(dtype), DIM, call=weak_mask, num_tokens=5)
    assert {finding.check for finding in leak.failures} == {
        "mask", "padding", "padding_appended",
    }  # fmt: skip
    causal = attnkit.check_attention(
        attention().to(dtype), DIM, call=sees_next, causal=True, num_tokens=5
    )
    assert {finding.check for finding in causal.failures} == {"causality"}


@pytest.mark.gpu
def test_on_a_gpu():
    random = torch.cuda.get_rng_state()
    report = attnkit.check_attention(attention(dropout_p=0.5).cuda(), DIM)
    assert report, str(report)
    assert "on cuda:0" in str(report)
    assert torch.equal(torch.cuda.get_rng_state(), random)


def test_where_the_caller_wants_no_gradients():
    module = attention()
    expected = str(attnkit.check_attention(module, DIM, num_tokens=5))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert str(attnkit.check_attention(module, DIM, num_tokens=5)) == expected


def test_a_module_without_parameters_and_more_tokens():
    class Plain(nn.Module):
        def forward(self, tokens):
            return (tokens @ tokens.transpose(1, 2) / DIM).softmax(-1) @ tokens

    report = attnkit.assert_attention(Plain(), DIM, num_tokens=11, seed=3)
    assert report["mixing"].seen == "an output sees 11 of 11 tokens"


def test_tolerance_decides_what_is_equal():
    def slightly(module, tokens):
        return module(tokens) * (1 + 1e-4 * len(tokens))

    options = {"call": slightly, "checks": ["batch"]}
    for tolerance, verdict in ((None, "fail"), (1e-3, "pass")):
        report = attnkit.check_attention(attention(), DIM, tolerance=tolerance, **options)
        assert report["batch"].verdict == verdict


def test_another_seed_draws_other_tokens():
    module = attention()
    first, again, other = (
        str(attnkit.check_attention(module, DIM, call=weak_mask, seed=seed, checks=["padding"]))
        for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


def test_complete_graph_has_the_edges_of_the_mask():
    class Edges(nn.Module):
        def forward(self, x, edge_index):
            self.edges = set(map(tuple, edge_index.T.tolist()))
            return x

    module = Edges()
    tokens = torch.randn(2, 3, 5)
    mask = torch.tensor([[True, True, False], [False, True, False]])
    assert torch.equal(on_complete_graph(module, tokens, mask), tokens)
    assert module.edges == {(j, i) for j in (0, 1) for i in range(3)} | {(4, i) for i in (3, 4, 5)}


def test_the_report_is_a_table():
    report = attnkit.check_attention(attention(), DIM, call=nan_rows, checks=["mask", "dead_rows"])
    title, header, *rows = str(report).splitlines()
    assert title == "MultiHeadAttention, torch.float32 on cpu, 7 tokens"
    assert header.split() == ["check", "verdict", "seen"]
    assert [row.split()[:2] for row in rows] == [["mask", "pass"], ["dead_rows", "FAIL"]]
    with pytest.raises(KeyError, match="'batch' was not checked; there are mask, dead_rows"):
        _ = report["batch"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"module": len}, TypeError, "module: expected a torch.nn.Module, got builtin_function"),
        ({"dim": 0}, ValueError, "dim: expected at least 1, got 0"),
        ({"num_tokens": 3}, ValueError, "num_tokens: expected at least 4, got 3"),
        ({"tolerance": -1.0}, ValueError, "tolerance: expected at least 0, got -1.0"),
        ({"checks": ["masks"]}, ValueError, "checks: 'masks' is none of output, mixing"),
        ({"checks": "mask"}, TypeError, "checks: expected a list of names, got the string 'mask'"),
        ({"call": 3}, TypeError, "call: expected a function, got int"),
        (
            {"call": lambda tokens: tokens},
            TypeError,
            r"call: expected to be called as \(module, tokens\) or \(module, tokens, mask\), "
            r"got a function of \(tokens\)",
        ),
        (
            {"call": lambda module, tokens: module(tokens)[:, 0]},
            ValueError,
            r"call: expected to return \[3, 7, channels\] for tokens \[3, 7, 12\], got \[3, 12\]",
        ),
        (
            {"call": lambda module, tokens: (module(tokens), None)},
            ValueError,
            "call: expected to return a tensor, got tuple; say how to call your module with call=",
        ),
        ({"expect": {"masks": "pass"}}, ValueError, "expect: 'masks' is none of output, mixing"),
        ({"expect": {"mask": "FAIL"}}, ValueError, r"expect: mask: expected one of \('pass', "),
        (
            {"expect": {"mask": "pass"}, "checks": ["batch"]},
            ValueError,
            "expect: 'mask' is none of batch",
        ),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        attnkit.assert_attention(**{"module": attention(), "dim": DIM, **arguments})
