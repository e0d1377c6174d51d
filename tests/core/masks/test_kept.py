"""The tensor of a mask is made once for all layers of a forward, and never kept too long."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from attnkit import Causal, MultiHeadAttention, Padding, attend
from attnkit.core.masks.base import Mask
from attnkit.core.masks.kept import kept_mask
from attnkit.layers import TransformerBlock

BATCH, TOKENS, DIM = 3, 7, 16
CPU = torch.device("cpu")


class Counted(Padding):
    """Padding that counts how often its tensor is made."""

    made = 0

    def allows(self, *where):
        type(self).made += 1
        return super().allows(*where)


pytree.register_dataclass(Counted)


@pytest.fixture
def mask(monkeypatch):
    monkeypatch.setattr(Counted, "made", 0)
    return Causal() & Counted(torch.tensor([7, 3, 1]))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(TransformerBlock(DIM, 2) for _ in range(5))

    def forward(self, tokens, mask):
        for block in self.blocks:
            tokens = block(tokens, mask=mask)
        return tokens


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_layers_share_one_tensor(mode, mask):
    model, tokens = Layers(), torch.randn(BATCH, TOKENS, DIM)
    with mode():
        output = model(tokens, mask)
        assert Counted.made == 1
        again = model(tokens, mask.dense(TOKENS, TOKENS, CPU))
    torch.testing.assert_close(output, again)


def test_what_was_made_in_inference_mode_serves_training(mask):
    model, tokens = Layers(), torch.randn(BATCH, TOKENS, DIM)
    with torch.inference_mode():
        model(tokens, mask)
    model(tokens, mask).sum().backward()
    assert Counted.made == 1


@pytest.mark.parametrize("write", ["add", "index"])
def test_lengths_that_were_written_to_make_another(write, mask):
    lengths = mask.masks[1].lengths
    model, tokens = Layers(), torch.randn(BATCH, TOKENS, DIM)
    model(tokens, mask)
    if write == "add":
        lengths.add_(1).clamp_(max=TOKENS)
    else:
        lengths[2] = 5
    fresh = Causal() & Padding(lengths.clone())
    assert torch.equal(model(tokens, mask), model(tokens, fresh))


def test_lengths_of_inference_mode_which_count_no_writes():
    with torch.inference_mode():
        lengths = torch.tensor([7, 3, 1])
        mask = Padding(lengths)
        first = kept_mask(mask, TOKENS, TOKENS, CPU, torch.bool).clone()
        lengths.fill_(2)
        second = kept_mask(mask, TOKENS, TOKENS, CPU, torch.bool)
    assert not torch.equal(first, second)


def test_only_the_last_is_kept_and_goes_with_the_mask():
    mask = Causal() & Padding(torch.tensor([7, 3, 1]))
    tensors = []
    for tokens in (5, 7, 5, 11):
        for dtype in (torch.bool, torch.float32, torch.float64):
            made = kept_mask(mask, tokens, tokens, CPU, dtype)
            assert made.shape == (BATCH, 1, tokens, tokens)
            assert made.dtype == dtype
            assert kept_mask(mask, tokens, tokens, CPU, dtype) is made
            tensors.append(weakref.ref(made))
    del made
    assert [tensor() is None for tensor in tensors] == [True] * 11 + [False]
    del mask
    assert tensors[-1]() is None


class Own(Mask):
    """A mask of the user's, that no pytree knows, and whose rule changes."""

    reach = 1

    def allows(self, batch, head, query, key, num_queries, num_keys):
        return (query - key).abs() <= self.reach


@pytest.mark.parametrize("whole", [lambda own: own, lambda own: own & Causal()])
def test_a_mask_of_ones_own_is_asked_every_time(whole):
    own = Own()
    mask = whole(own)
    first = kept_mask(mask, TOKENS, TOKENS, CPU, torch.bool)
    own.reach = 3
    assert not torch.equal(first, kept_mask(mask, TOKENS, TOKENS, CPU, torch.bool))


def test_nothing_of_a_transform_is_kept():
    """What torch.func, torch.compile and fake tensors compute with is not what runs later."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    query, key, value = torch.randn(3, BATCH, 2, TOKENS, 8).unbind()
    mask = Causal() & Padding(torch.arange(BATCH) + 1)
    future = ~Causal("top_left")

    def attention(query):
        return attend(query, key, value, mask=mask)

    torch.func.grad(lambda query: attention(query).sum())(query)
    torch.vmap(attention)(torch.stack([query, query]))
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")(query)
    with FakeTensorMode() as fake:
        fakes = [fake.from_tensor(tensor) for tensor in (query, key, value)]
        attend(*fakes, mask=future)
    assert "_dense" not in vars(mask)
    assert "_dense" not in vars(future)
    expected = attend(query, key, value, mask=mask.dense(TOKENS, TOKENS, CPU))
    torch.testing.assert_close(attention(query), expected)
    torch.testing.assert_close(compiled, expected)
    assert "_dense" in vars(mask)


def test_an_exported_program_reads_its_own_lengths():
    block = MultiHeadAttention(DIM, 2)
    tokens = torch.randn(BATCH, TOKENS, DIM)
    lengths = torch.tensor([7, 3, 1])
    mask = Causal() & Padding(lengths)
    block(tokens, mask=mask)  # its tensor is kept now
    program = torch.export.export(block, (tokens,), {"mask": mask}).module()
    for others in (lengths, torch.tensor([2, 5, 6])):
        mask = Causal() & Padding(others)
        torch.testing.assert_close(program(tokens, mask=mask), block(tokens, mask=mask))
