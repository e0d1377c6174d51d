"""What a `with` block of the public table sees and changes is its own thread's or task's alone."""

import asyncio
import contextvars
import inspect
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.utils import _python_dispatch
from torch.utils import _pytree as pytree

import attnkit
from attnkit import Hard, MultiHeadAttention, finetune
from attnkit.core.capture.watch import watch_attention
from attnkit.core.contexts import Opened
from attnkit.core.kernels.record import unrecorded
from attnkit.core.key_masking import hide_keys
from attnkit.core.operators.precision import EXACT
from attnkit.interop.transformers import attention as of_transformers
from attnkit.lightning import allowing
from attnkit.lightning.build import build
from attnkit.lightning.errors import UserError

TOKENS, DIM = 5, 12
EDGES = torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 2]])


class Meet(nn.Module):
    """Waits for the other thread, so that both are between two layers at once."""

    def __init__(self):
        super().__init__()
        self.wait: Callable[[], object] = lambda: None

    def forward(self, x):
        self.wait()
        return x


class Sdpa(nn.Module):
    def forward(self, x):
        return x + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]


class Mha(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 3, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x)[0]


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = pyg.GATConv(DIM, DIM)

    def forward(self, x):
        return torch.stack([self.layer(rows, EDGES) for rows in x])


def attention(number):
    """Models of as many layers as their number says, by every way that is watched."""
    layers = [MultiHeadAttention(DIM, 2 + number), Meet(), Sdpa(), Mha(), Meet(), Convolution()]
    return nn.Sequential(*layers, *[MultiHeadAttention(DIM, 2) for _ in range(number)])


def plain(number):
    return nn.Sequential(MultiHeadAttention(DIM, 2 + number), Meet(), Sdpa(), Meet(), Mha())


def drawing(number):
    layers = [MultiHeadAttention(DIM, 2, normalizer=Hard("score_function")) for _ in range(3)]
    for layer in layers:  # one key has all the probability, so that draws can be compared
        nn.init.normal_(layer.in_proj.weight, std=30.0)
    return nn.Sequential(layers[0], Meet(), *layers[1 : 2 + number])


class Gates(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.gates = nn.Sequential(
            attnkit.SqueezeExcitation(4), Meet(), attnkit.CBAM(4, reduction=2)
        )
        self.number = number

    def forward(self, x):
        return self.gates(x.reshape(-1, 4, TOKENS, DIM // 4) * (1 + self.number))


class OfTransformers(nn.Module):
    """Attends as models of transformers do by attn_implementation="attnkit"."""

    def forward(self, x):
        output, _ = of_transformers(self, x[:, None], x[:, None], x[:, None], None, is_causal=True)
        return output[:, :, 0]


def low_rank(number):
    model = nn.Sequential(nn.Linear(DIM, DIM), Meet(), nn.Linear(DIM, DIM))
    finetune.lora(model, rank=2, targets="0", train_head=False)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model.eval()


def classifier(number):
    vit = attnkit.ViT(
        image_size=8, patch_size=4, dim=DIM, depth=1, num_heads=2 + number, num_classes=3
    )
    vit.norm = nn.Sequential(vit.norm, Meet())
    return vit.eval()


def graph_model(number):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                [attnkit.GraphAttention(DIM, DIM, 2 + number), pyg.GATConv((2 + number) * DIM, DIM)]
            )
            self.meet = Meet()

        def forward(self, x, edge_index):
            for layer in self.layers:
                x = self.meet(layer(x, edge_index))
            return x

    return Model().eval()


def allowed(model):
    found = []
    for target in ("fractions.Fraction", "decimal.Decimal"):
        with suppress(UserError):
            found.append(build({"_target_": target, "_args_": [1]}))
    return found


def hiding(model):
    hidden = torch.zeros(1, TOKENS, dtype=torch.bool)
    hidden[0, model[0].num_heads] = True
    return hide_keys(hidden)


@dataclass
class Case:
    """A block around a model that runs, and what there was in it; or a function that runs it."""

    block: Callable[[nn.Module], Any] = nullcontext
    model: Callable[[int], nn.Module] = attention
    read: Callable[[Any, Any], Any] = lambda found, output: found
    run: Callable[[nn.Module, torch.Tensor], Any] = lambda model, x: model(x)
    shape: tuple[int, ...] = (1, TOKENS, DIM)


CASES = {
    "capture_attention": Case(attnkit.capture_attention, read=lambda found, _: dict(found)),
    "capture_gates": Case(attnkit.capture_gates, Gates, lambda maps, _: dict(maps)),
    "record_backends": Case(attnkit.record_backends, read=lambda record, _: record.counts),
    "record_logits": Case(attnkit.record_logits, read=lambda found, _: dict(found)),
    "exact": Case(
        lambda model: attnkit.exact() if len(model) % 2 else nullcontext(),
        read=lambda _, output: output,
        run=lambda model, x: (model(x), bool(EXACT.get())),
    ),
    "record_draws": Case(
        lambda _: attnkit.record_draws(), drawing, lambda draws, _: [vars(draw) for draw in draws]
    ),
    "interop.record_masks": Case(
        attnkit.interop.record_masks,
        lambda number: nn.Sequential(
            OfTransformers(), Meet(), *[OfTransformers() for _ in range(1 + number)]
        ),
        lambda record, _: record.counts,
    ),
    "finetune.merged": Case(finetune.merged, low_rank, lambda _, output: output),
    "lightning.allowing": Case(
        lambda model: allowing("fractions" if len(model) == 2 else "decimal"),
        lambda number: nn.Sequential(Meet(), *[nn.Identity() for _ in range(1 + number)]),
        lambda _, output: output,
        lambda model, x: [model(x), allowed(model)],
    ),
}
MORE = {  # what these and explanations are made of
    "hide_keys": Case(hiding, plain, lambda found, output: (found.masked, output)),
    "watch_attention": Case(
        watch_attention,
        read=lambda calls, _: [(call.layer, vars(call).get("weights")) for call in calls],
    ),
    "unrecorded": Case(
        lambda model: attnkit.record_backends() if len(model) == 6 else unrecorded(),
        read=lambda record, _: getattr(record, "counts", None),
    ),
    "count_multiply_adds": Case(run=attnkit.count_multiply_adds, read=lambda _, count: count),
    "explain by occlusion": Case(
        model=classifier,
        run=lambda model, x: attnkit.explain(model, x, method="occlusion").map,
        read=lambda _, found: found,
        shape=(1, 3, 8, 8),
    ),
    "explain by relevance": Case(
        model=classifier,
        run=lambda model, x: attnkit.explain(model, x, method="relevance").map,
        read=lambda _, found: found,
        shape=(1, 3, 8, 8),
    ),
    "diagnose_attention": Case(
        model=graph_model,
        run=lambda model, x: str(
            attnkit.diagnose_attention(model, (x[0], EDGES), labels=torch.arange(TOKENS))
        ),
        read=lambda _, found: found,
    ),
}


def test_every_context_of_the_public_table_is_tried():
    found, seen = set(), set()

    def is_context(value):
        whole = inspect.unwrap(value)
        is_generator = whole is not value and inspect.isgeneratorfunction(whole)
        return is_generator or (inspect.isclass(value) and hasattr(value, "__enter__"))

    def walk(table, prefix):
        seen.add(table)
        for name in table.__all__:
            value = getattr(table, name)
            if inspect.ismodule(value) and hasattr(value, "__all__") and value not in seen:
                walk(value, f"{prefix}{name}.")
            elif callable(value) and value.__module__.startswith("attnkit"):
                if is_context(value):
                    found.add(f"{prefix}{name}")
                members = vars(value).items() if inspect.isclass(value) else ()
                own = [n for n, member in members if callable(member) and is_context(member)]
                found.update(f"{prefix}{name}.{n}" for n in own)

    walk(attnkit, "")
    assert found == set(CASES)


class Failure(Exception):
    pass


class Two:
    """Two models that run at once, block by block: the first begins first, and ends first."""

    def __init__(self, case, fails=False):
        self.case, self.fails = case, fails
        self.barrier = threading.Barrier(2, timeout=20)
        self.begun, self.ended = threading.Event(), threading.Event()

    def made(self, number):
        torch.manual_seed(number)
        return self.case.model(number), torch.randn(self.case.shape)

    def alone(self, number):
        model, x = self.made(number)
        with self.case.block(model) as found:
            return self.case.read(found, self.case.run(model, x))

    def in_thread(self, number, model, x):
        meets = [module for module in model.modules() if isinstance(module, Meet)]
        for meet in meets:
            meet.wait = self.wait
        if self.fails and number == 0:
            meets[-1].wait = self.wait_and_fail
        if number == 1:
            assert self.begun.wait(20)
        try:
            with self.case.block(model) as found:
                self.begun.set()
                self.wait()
                result = self.case.read(found, self.case.run(model, x))
                if number == 1:
                    assert self.ended.wait(20)
            return result
        finally:
            if number == 0:
                self.ended.set()
                self.barrier.abort()

    def wait(self):
        with suppress(threading.BrokenBarrierError):  # the first has ended
            self.barrier.wait()

    def wait_and_fail(self):
        self.wait()
        raise Failure

    async def in_task(self, number, model, x, events):
        if number == 1:
            await events[0].wait()
        try:
            with self.case.block(model) as found:
                events[number].set()
                await events[1].wait()
                output = self.case.run(model, x)
                await asyncio.sleep(0)
                if self.fails and number == 0:
                    raise Failure
                result = self.case.read(found, output)
                if number == 1:
                    await events[2].wait()
            return result
        finally:
            if number == 0:
                events[2].set()


def same(found, expected):
    found, expected = (pytree.tree_flatten(each) for each in (found, expected))
    assert found[1] == expected[1]
    for one, other in zip(found[0], expected[0], strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def state(models):
    """Whatever a block may leave behind."""
    ours = [module for name, module in sys.modules.items() if name.startswith("attnkit.core")]
    opened = [each for module in ours for each in vars(module).values() if isinstance(each, Opened)]
    assert len(opened) > 5
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called")
    return {
        "opened": [each.get() for each in opened],
        "hooks": [len(getattr(torch_module, f"_global{name}")) for name in hooks],
        "modes": [torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()],
        "dispatch": {k: v for k, v in vars(_python_dispatch).items() if k.startswith("_is_in")},
        "stance": torch._dynamo.eval_frame._stance,
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "softmax": [getattr(m, "softmax", None) for n, m in sys.modules.items() if ".conv." in n],
        "warnings": list(warnings.filters),
        "gradients": torch.is_grad_enabled(),
        "models": [
            (module.training, [*vars(module)], len(module._forward_hooks))
            for model in models
            for module in model.modules()
        ],
    }


EACH = [(name, bool(number % 2)) for number, name in enumerate([*CASES, *MORE])]


@pytest.mark.parametrize(("name", "fails"), EACH)
def test_two_threads_on_two_models(name, fails):
    two = Two((CASES | MORE)[name], fails)
    expected = [two.alone(number) for number in (0, 1)]
    made = [two.made(number) for number in (0, 1)]
    before = state([model for model, _ in made])
    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(two.in_thread, number, *made[number]) for number in (0, 1)]
    if fails:
        assert isinstance(results[0].exception(), Failure)
    else:
        same(results[0].result(), expected[0])
    same(results[1].result(), expected[1])
    assert state([model for model, _ in made]) == before


@pytest.mark.parametrize(("name", "fails"), [(name, not fails) for name, fails in EACH])
def test_two_tasks_on_two_models(name, fails):
    two = Two((CASES | MORE)[name], fails)
    expected = [two.alone(number) for number in (0, 1)]
    made = [two.made(number) for number in (0, 1)]
    before = state([model for model, _ in made])

    async def both():
        events = [asyncio.Event() for _ in range(3)]
        tasks = [two.in_task(number, *made[number], events) for number in (0, 1)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(both())
    if fails:
        assert isinstance(results[0], Failure)
    else:
        same(results[0], expected[0])
    same(results[1], expected[1])
    assert state([model for model, _ in made]) == before


@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_a_thread_that_was_given_the_context(name):
    """As `asyncio.to_thread` gives it."""
    two = Two((CASES | MORE)[name])
    expected, (model, x) = two.alone(0), two.made(0)
    before = state([model])

    async def run():
        with two.case.block(model) as found:
            output = await asyncio.to_thread(two.case.run, model, x)
            left = await asyncio.to_thread(torch._C._len_torch_function_stack)
            return two.case.read(found, output), left

    found, left = asyncio.run(run())
    same(found, expected)
    assert left == 0
    assert state([model]) == before


class Silent(nn.Module):
    """Returns nothing, as a module does that is called for what it keeps."""

    def __init__(self):
        super().__init__()
        self.attention = MultiHeadAttention(DIM, 2)

    def forward(self, x):
        self.attention(x)


def test_what_runs_while_an_error_is_handled_is_kept():
    model, x = Silent(), torch.randn(1, TOKENS, DIM)
    with attnkit.capture_attention(model) as captured:
        try:
            model(x[..., 1:])
        except RuntimeError:
            assert not captured
            model(x)
            assert len(captured["attention"]) == 1
            with pytest.raises(RuntimeError):
                model(x[..., 1:])
    assert len(captured["attention"]) == 1


@pytest.mark.parametrize("outer", ["record_backends", "hide_keys"])
@pytest.mark.parametrize("inner", ["record_backends", "hide_keys", "capture_attention"])
def test_blocks_of_a_thread_that_was_given_the_context(outer, inner):
    outer, inner = CASES.get(outer) or MORE[outer], CASES.get(inner) or MORE[inner]
    model, x = Two(MORE["hide_keys"]).made(0)

    def run():
        with inner.block(model) as found:
            return inner.read(found, model(x))

    with outer.block(model) as found:
        expected = run(), outer.read(found, None)

    async def in_thread():
        with outer.block(model) as found:
            return await asyncio.to_thread(run), outer.read(found, None)

    same(asyncio.run(in_thread()), expected)


def test_a_block_that_ends_in_another_thread():
    """Torch refuses it; what follows is right."""

    def held():
        with attnkit.record_backends():
            yield

    def count():
        with attnkit.record_backends() as record:
            Sdpa()(torch.randn(1, TOKENS, DIM))
        return record.counts

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        generator = held()
        one.submit(next, generator).result()
        with suppress(RuntimeError, ValueError):
            other.submit(generator.close).result()
        for pool in (one, other):
            assert sum(pool.submit(count).result()[""].values()) == 1
            with attnkit.record_backends() as record:
                context = contextvars.copy_context()
                x = torch.randn(1, TOKENS, DIM)
                pool.submit(context.run, Sdpa(), x).result()
            assert sum(record.counts[""].values()) == 1
