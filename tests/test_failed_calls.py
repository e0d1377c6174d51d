"""A call that raises leaves caches, records, random numbers and buffers as they were."""

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import attnkit
from attnkit import Additive, Causal, Dense, Edges, Hard, MultiHeadAttention, Padding, attend
from attnkit.core.cache import KeyValueCache
from attnkit.core.decode_step import attention_step, memory_step
from attnkit.layers import GraphBlock
from attnkit.layers.transformer import DecoderBlock

BATCH, TOKENS, DIM, MEMORY, WORDS = 2, 3, 12, 5, 7
NODES = 6
EDGES = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]])


class Fails(TorchDispatchMode):
    """There is no memory for one of the operators that run, counted from 0."""

    def __init__(self, stop):
        super().__init__()
        self.stop, self.number = stop, 0  # None: at none

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.number == self.stop:
            raise torch.OutOfMemoryError("as asked")
        self.number += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Case:
    """A call, what it may write to beside its module, and calls that are wrong."""

    call: Callable[..., Any]
    wrong: dict[str, dict[str, Any]]
    module: nn.Module | None = None
    written: list[Any] = field(default_factory=list)

    def __deepcopy__(self, memo):
        return type(self)(**{name: deepcopy(part, memo) for name, part in vars(self).items()})


def tokens(*sizes, seed=1):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def block_with_cache(**options):
    block = MultiHeadAttention(DIM, 2, **options).eval()
    cache = block.new_cache(BATCH, 8)
    block(tokens(BATCH, 2, DIM), cache=cache, mask=Causal())
    x = tokens(BATCH, TOKENS, DIM, seed=2)
    wrong = {
        "ambiguous": {"mask": Causal()},
        "bias": {"bias": torch.zeros(1, 1, TOKENS, TOKENS)},
        "mask": {"mask": Dense(torch.ones(TOKENS, TOKENS, dtype=torch.bool))},
        "lengths": {"mask": Padding(torch.tensor([1, 2, 3]))},
        "full": {"query": tokens(BATCH, 7, DIM)},
        "batch": {"query": tokens(BATCH + 1, TOKENS, DIM)},
        "dim": {"query": tokens(BATCH, TOKENS, DIM + 1)},
        "dtype": {"query": x.double()},
    }
    given = {"query": x, "cache": cache, "mask": Causal("bottom_right")}
    return Case(Call(block, **given), wrong, block, [cache])


class Call:
    """A function with arguments; a deep copy is of them too."""

    def __init__(self, function, *args, **given):
        self.function, self.args, self.given = function, args, given

    def __call__(self, **others):
        return self.function(*self.args, **self.given | others)


def step():
    case = block_with_cache()
    given = {"tokens": tokens(BATCH, 1, DIM, seed=2), "cache": case.written[0]}
    wrong = {
        "bias": {"bias": torch.zeros(3, 1, 1, 4)},
        "dim": {"tokens": tokens(BATCH, 1, DIM + 1)},
    }
    return Case(Call(attention_step, case.module, **given), wrong, case.module, case.written)


def memory():
    block = MultiHeadAttention(DIM, 2).eval()
    kept = block.remember(tokens(BATCH, MEMORY, DIM))
    given = {"tokens": tokens(BATCH, 1, DIM, seed=2), "memory": kept}
    wrong = {
        "bias": {"bias": torch.zeros(3, 1, 1, 4)},
        "dim": {"tokens": tokens(BATCH, 1, DIM + 1)},
    }
    return Case(Call(memory_step, block, **given), wrong, block, [kept])


def decoder_block():
    block = DecoderBlock(DIM, 2).eval()
    cache, memory = block.attention.new_cache(BATCH, 8), tokens(BATCH, MEMORY, DIM)
    block.step(tokens(BATCH, 1, DIM), cache, kept := block.cross_attention.remember(memory))
    other = block.cross_attention.remember(memory[:, 1:])
    wrong = {
        "words": {"words": tokens(BATCH, 1, DIM + 1)},
        "memory_bias": {"memory_bias": torch.zeros(3, 1, 1, MEMORY)},
        "memory": {"memory": other, "memory_bias": torch.zeros(1, 1, 1, MEMORY)},
    }
    given = {"words": tokens(BATCH, 1, DIM, seed=2), "cache": cache, "memory": kept}
    return Case(Call(block.step, **given), wrong, block, [cache, kept])


def remember():
    block = MultiHeadAttention(DIM, 2).eval()
    wrong = {"dim": {"key": tokens(BATCH, TOKENS, DIM + 1)}}
    given = {"key": tokens(BATCH, TOKENS, DIM)}
    return Case(Call(lambda key: block.remember(key).key, **given), wrong)


def decoder(kind, **options):
    model = kind(11, WORDS, dim=DIM, memory_dim=DIM, **options).eval()
    state = model.start(tokens(BATCH, MEMORY, DIM), num_beams=2)
    state.expand(2)
    model.step(torch.ones(2 * BATCH, dtype=torch.long), state)
    words = torch.tensor([4, 5, 6, 7])
    wrong = {"words": {"words": words[:3]}, "vocabulary": {"words": words + 7}}
    return Case(Call(model.step, words=words, state=state), wrong, model, [state])


def attention(**options):
    query, key, value = tokens(3, BATCH, 2, NODES, 8).unbind()
    wrong = {
        "bias": {"bias": torch.zeros(1, 1, 2, 2)},
        "backend": {"backend": "varlen"},
        "mask": {"mask": Dense(torch.ones(2, 2, dtype=torch.bool))},
        "dropout_p": {"dropout_p": 2.0},
        "key": {"key": key[..., :3]},
    }
    given = {"query": query, "key": key, "value": value, "dropout_p": 0.5}
    return Case(Call(attend, **given | options), wrong)


CASES = {
    "block": block_with_cache,
    "block with gate and groups": partial(block_with_cache, num_kv_heads=1, gate="head"),
    "block of linear attention": partial(block_with_cache, normalizer="linear"),
    "step": step,
    "memory": memory,
    "decoder block": decoder_block,
    "remember": remember,
    "transformer decoder": partial(
        decoder, attnkit.TransformerDecoder, depth=2, num_heads=2, positions="relative"
    ),
    "recurrent decoder": partial(decoder, attnkit.RecurrentDecoder),
    "attend": attention,
    "attend by blocks": partial(attention, backend="blockwise"),
    "additive": partial(attention, score=Additive(torch.ones(2, 8))),
    "edges": partial(attention, mask=Edges(EDGES, NODES), backend="edges"),
    "hard": partial(attention, normalizer=Hard("score_function")),
}


def state(case, records):
    def written(each):
        if isinstance(each, KeyValueCache):
            return [each.num_tokens, each.key, each.value]
        if isinstance(each, list):
            return [written(part) for part in each]
        if type(each).__module__.startswith("attnkit"):
            return [written(v) for k, v in vars(each).items() if k not in ("_bias", "_own")]
        return each

    tensors = {} if case.module is None else case.module.state_dict()
    return deepcopy([written(case.written), tensors, records, torch.get_rng_state()])


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return same(vars(one), vars(other)) if is_dataclass(one) else one == other


@contextmanager
def recording(case):
    """Records of all kinds."""
    opened = [attnkit.record_backends(case.module), attnkit.record_draws()]
    if case.module is not None:
        opened.append(attnkit.capture_attention(case.module))
    with ExitStack() as stack:
        found = [stack.enter_context(each) for each in opened]
        yield [getattr(each, "counts", each) for each in found]


@pytest.fixture(params=CASES)
def case(request):
    torch.manual_seed(0)
    with torch.no_grad():
        yield CASES[request.param]()


def test_no_memory_at_any_operator(case):
    twin = deepcopy(case)
    with recording(twin), Fails(None) as whole:
        twin.call()
    with right_at_last(case) as records:
        before = state(case, records)
        for stop in count(step=1 + whole.number // 25):
            try:
                with Fails(stop):
                    output = case.call()
                break
            except torch.OutOfMemoryError:
                assert same(state(case, records), before), stop
        assert stop > whole.number // 2
        records.append(output)


def test_wrong_arguments(case):
    with right_at_last(case) as records:
        before = state(case, records)
        for name, arguments in case.wrong.items():
            with pytest.raises((ValueError, TypeError, RuntimeError, IndexError)):
                case.call(**arguments)
            assert same(state(case, records), before), name
        records.append(case.call())


@contextmanager
def right_at_last(case):
    """Records of all kinds; the last thing put into them is what the call gave at last, which is
    what it gives by itself."""
    twin = deepcopy(case)
    torch.manual_seed(3)
    with recording(twin) as once:
        expected, random = twin.call(), torch.get_rng_state()
        recorded = deepcopy(once)
    torch.manual_seed(3)
    with recording(case) as records:
        yield records
        assert torch.equal(records.pop(), expected)
        assert same(records, recorded)
    assert torch.equal(torch.get_rng_state(), random)


GRAPHS = {
    "GAT": lambda: attnkit.GAT(8, 8, 3, num_layers=2, heads=2, dropout_p=0.5, edge_dim=2),
    "GAT with blocks": lambda: attnkit.GAT(
        8, 8, 3, num_layers=2, heads=2, dropout_p=0.5, norm="batch", mlp_ratio=1.0, edge_dim=2
    ),
    "GAT with linear layers": lambda: attnkit.GAT(
        *(8, 8, 3), heads=2, norm="batch", edge_dim=2, first_linear=True, last_linear=True
    ),
    "GraphBlock": lambda: GraphBlock(
        8, attnkit.GraphAttention(8, 4, 2, edge_dim=2), nn.BatchNorm1d(8), dropout_p=0.5
    ),
    "GraphTransformer": lambda: attnkit.GraphTransformer(
        8, 8, 3, num_layers=2, heads=2, dropout_p=0.5, edge_dim=2
    ),
    "GraphTransformer with far edges": lambda: attnkit.GraphTransformer(
        8, 8, 3, num_layers=2, heads=2, dropout_p=0.5, edge_dim=2, expander_degree=2
    ),
    "Polynormer": lambda: attnkit.Polynormer(8, 8, 3, heads=2, dropout_p=0.5),
    "SGFormer": lambda: attnkit.SGFormer(8, 8, 3, dropout_p=0.5),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_wrong_graphs_in_training(name):
    torch.manual_seed(0)
    model = GRAPHS[name]().train()
    x, edges, features = tokens(NODES, 8), Edges(EDGES, NODES), tokens(NODES, 2)
    given = (x, edges, features) if name[0] == "G" else (x, edges)
    wrong = [
        (tokens(NODES, 7), *given[1:]),
        (tokens(NODES + 1, 8), *given[1:]),
        (x, Edges(EDGES, NODES + 1), *given[2:]),
        (x, EDGES.float(), *given[2:]),
        (x, EDGES.mT, *given[2:]),
    ]
    if len(given) > 2:
        wrong += [(x, edges, part) for part in (None, features[1:], features[:, :1].expand(-1, 3))]
    tensors, random = deepcopy(model.state_dict()), torch.get_rng_state()
    for arguments in wrong:
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            model(*arguments)
        assert same(dict(model.state_dict()), dict(tensors))
        assert torch.equal(torch.get_rng_state(), random)
    model(*given)
    assert not torch.equal(torch.get_rng_state(), random)


def test_gates_of_a_call_that_raises_are_not_captured():
    model = nn.Sequential(attnkit.CBAM(4, reduction=2), nn.Conv2d(3, 4, 1))
    with attnkit.capture_gates(model) as maps:
        with pytest.raises(RuntimeError):
            model(tokens(2, 4, 3, 3))
        assert maps == {}
        model[0](tokens(2, 4, 3, 3))
    assert {name: len(found) for name, found in maps.items()} == {"0.channel": 1, "0.spatial": 1}
