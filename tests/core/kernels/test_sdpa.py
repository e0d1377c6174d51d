"""The queries of few heads in parts: the same attention, whatever the number of threads."""

import pytest
import torch
from support import with_gradients
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnkit
from attnkit import Causal, attend
from attnkit.core.inputs import check_inputs
from attnkit.core.kernels import sdpa
from attnkit.core.kernels.sdpa import is_plain_flash, num_query_parts


@pytest.fixture
def threads(monkeypatch):
    """Sets how many threads torch says it has; one does the work."""

    def set_threads(number, least_queries=2):
        monkeypatch.setattr(torch, "get_num_threads", lambda: number)
        monkeypatch.setattr(sdpa, "LEAST_QUERIES", least_queries)

    return set_threads


def make(batch, heads, queries, keys=11, kv_heads=None, head_dim=5, value_dim=7, **options):
    shapes = [
        (batch, heads, queries, head_dim),
        (batch, kv_heads or heads, keys, head_dim),
        (batch, kv_heads or heads, keys, value_dim),
    ]
    options = {"dtype": torch.float64, "requires_grad": True, **options}
    return [torch.randn(shape, **options) for shape in shapes]


@pytest.mark.parametrize("score", ["scaled_dot", "gaussian"])
@pytest.mark.parametrize("queries", [6, 7, 13])
@pytest.mark.parametrize(
    "heads", [(1, 1, 1), (1, 3, 3), (2, 1, 1), (2, 3, 3), (1, 4, 2), (2, 2, 1)], ids=str
)
def test_parts_equal_the_reference(threads, heads, queries, score):
    batch, num_heads, kv_heads = heads
    tensors = make(batch, num_heads, queries, kv_heads=kv_heads)
    expected = with_gradients(tensors, backend="reference", score=score)
    for number in (1, 2, 5, 16):
        threads(number)
        parts = num_query_parts(check_inputs(*tensors))
        assert parts == max(1, min(number // (batch * num_heads), queries // 2))
        with attnkit.record_backends() as record:
            actual = with_gradients(tensors, backend="flash", score=score)
        assert record.total() == {"flash": 1}
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_parts_are_of_what_gains_from_them(threads):
    threads(8)
    tensors = make(1, 2, 16, 16)

    def parts(*tensors, **options):
        return num_query_parts(check_inputs(*tensors, **options))

    assert parts(*tensors) == 4
    assert parts(*tensors, mask=Causal()) == 1
    assert parts(*tensors, mask=attnkit.Padding(torch.tensor([3]))) == 1
    assert parts(*tensors, bias=torch.zeros(16, 16)) == 1
    assert parts(*make(3, 2, 16, 16)) == 1
    assert parts(*(tensor.detach() for tensor in tensors)) == 1
    assert parts(tensors[0].detach(), tensors[1].detach(), tensors[2]) == 4
    with torch.no_grad():
        assert parts(*tensors) == 1
    threads(8, least_queries=8)
    assert parts(*tensors) == 2
    threads(1)
    assert parts(*tensors) == 1


def test_compiled_and_exported_without_parts():
    """torch.compile cannot ask for the number of threads; nothing of it may be in the program."""

    class Attention(torch.nn.Module):
        def forward(self, query, key, value):
            return attend(query, key, value)

    torch._dynamo.reset()
    compiled = torch.compile(Attention(), fullgraph=True, backend="aot_eager")
    for queries in (521, 577):
        tensors = make(1, 1, queries)
        torch.testing.assert_close(compiled(*tensors), attend(*tensors))
        exported = torch.export.export(Attention(), tuple(tensors)).module()
        torch.testing.assert_close(exported(*tensors), attend(*tensors))


@pytest.mark.parametrize("backend", ["flash", "math", "blockwise"])
@pytest.mark.parametrize("head_dim", [1, 5])
def test_channels_need_not_lie_beside_each_other(backend, head_dim):
    """As in a feature map, whose pixels do."""
    tensors = make(2, 3, 7, 7, head_dim=7, value_dim=7)
    tensors = [t.detach().transpose(2, 3)[..., :head_dim].requires_grad_() for t in tensors]
    assert tensors[0].stride(-1) != 1
    expected = with_gradients(tensors, backend="reference")
    torch.testing.assert_close(with_gradients(tensors, backend=backend), expected)


def some(*shape, **options):
    return torch.randn(*shape, **options)


def test_what_is_left_to_torch_is_flash(threads):
    """`attend` of nothing but tensors skips the choice of a kernel where it can have one result."""
    query, key, value = some(2, 3, 5, 7), some(2, 3, 11, 7), some(2, 3, 11, 7)
    with torch.no_grad():
        assert is_plain_flash(query, key, value)
        assert attnkit.explain_backends(query, key, value).chosen == "flash"
        with attnkit.record_backends() as record:
            output = attend(query, key, value)
        torch.testing.assert_close(
            output, attend(query, key, value, backend="flash"), rtol=0, atol=0
        )
        threads(12)
        assert is_plain_flash(query, key, value)
    assert record.total() == {"flash": 1}
    assert not is_plain_flash(query, key, value)  # its backward wants parts for 12 threads
    threads(11)
    assert is_plain_flash(query, key, value)
    inputs = check_inputs(query.requires_grad_(), key, value)
    assert num_query_parts(inputs) == 1


@pytest.mark.parametrize(
    "tensors",
    {
        "grouped heads": (some(2, 4, 5, 8), some(2, 2, 5, 8), some(2, 2, 5, 8)),
        "other value_dim": (some(2, 3, 5, 7), some(2, 3, 5, 7), some(2, 3, 5, 4)),
        "other head_dim": (some(2, 3, 5, 7), some(2, 3, 5, 8), some(2, 3, 5, 8)),
        "other batch": (some(2, 3, 5, 7), some(1, 3, 5, 7), some(1, 3, 5, 7)),
        "no keys": (some(2, 3, 5, 7), some(2, 3, 0, 7), some(2, 3, 0, 7)),
        "no queries": (some(2, 3, 0, 7), some(2, 3, 5, 7), some(2, 3, 5, 7)),
        "float64": [some(2, 3, 5, 7).double()] * 3,
        "two dtypes": (some(2, 3, 5, 7), some(2, 3, 5, 7).double(), some(2, 3, 5, 7)),
        "channels apart": [some(2, 3, 7, 5).mT] * 3,
        "no batch": [some(3, 5, 7)] * 3,
        "sparse": [some(2, 3, 5, 7).to_sparse()] * 3,
        "without memory": [some(2, 3, 5, 7, device="meta")] * 3,
    }.items(),
    ids=lambda case: case[0],
)
def test_what_is_not_left_to_torch(tensors):
    with torch.no_grad():
        assert not is_plain_flash(*tensors[1])


def test_what_the_process_is_set_to_is_not_left_to_torch():
    tensors = [some(2, 3, 5, 7)] * 3
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not is_plain_flash(*tensors)
            assert attend(*tensors).dtype == torch.bfloat16
        with sdpa_kernel(SDPBackend.MATH), attnkit.record_backends() as record:
            assert not is_plain_flash(*tensors)
            attend(*tensors)
    assert record.total() == {"flash": 1}
