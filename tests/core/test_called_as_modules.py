"""Layers are only ever called as modules: what is attached to a projection, or put in its place,
sees all of its work and changes the output, in every way that a block computes.

Each kind of attachment comes with the block of plain layers that it must equal.
"""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import attnkit
from attnkit import MultiHeadAttention
from attnkit.core.decode_step import attention_step, memory_step
from attnkit.finetune import LoRALinear

BATCH, QUERIES, KEYS, DIM, HEADS, RANK = 2, 5, 7, 24, 4, 3


class Wrapper(nn.Module):
    """As peft's: not a linear layer, and with no weight of its own."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer
        self.up = nn.Parameter(some(layer.out_features, layer.in_features))

    def forward(self, x):
        return self.base_layer(x) + x @ self.up.T


def some(*shape):
    return torch.randn(shape, dtype=torch.float64) / 3


def projections(module):
    return {name: m for name, m in module.named_modules() if type(m) is nn.Linear}


def replace(module, name, layer):
    parent, _, last = name.rpartition(".")
    setattr(module.get_submodule(parent), last, layer)


def forward_hook(module, name, layer):
    layer.register_forward_hook(lambda _, inputs, output: 2 * output)
    return lambda plain: plain.mul_(2), True


def patched_forward(module, name, layer):
    old = layer.forward
    layer.forward = lambda *inputs, **options: 2 * old(*inputs, **options)  # as accelerate does
    return lambda plain: plain.mul_(2), True


def wrapper(module, name, layer):
    replace(module, name, new := Wrapper(layer))
    return lambda plain: plain.add_(new.up), False


def our_lora(module, name, layer):
    new = LoRALinear.adapt(layer, RANK, 0.7)
    new.lora_B.data = some(*new.lora_B.shape)
    return lambda plain: plain.add_(0.7 * new.lora_B @ new.lora_A), False


ATTACHED = [forward_hook, patched_forward, wrapper, our_lora]


def attached(module, kind):
    """The module with one of each layer, and a plain one whose weights say the same."""
    plain = copy.deepcopy(module)
    with torch.no_grad():
        for name, layer in projections(module).items():
            change, with_bias = kind(module, name, layer)
            same = plain.get_submodule(name)
            change(same.weight)
            if with_bias and same.bias is not None:
                change(same.bias)
    return module, plain


@torch.no_grad()
def cached(block, x):
    cache = block.new_cache(BATCH, QUERIES)
    return torch.cat([block(token, cache=cache) for token in x.split(1, dim=1)], dim=1)


@torch.no_grad()
def steps(block, x):
    cache = block.new_cache(BATCH, QUERIES)
    return torch.cat([attention_step(block, token, cache) for token in x.split(1, dim=1)], dim=1)


@torch.no_grad()
def step_to_memory(block, x, y):
    return memory_step(block, x, block.remember(y))


CALLS = {
    "self": lambda block, x, y, z: block(x),
    "cross": lambda block, x, y, z: block(x, y),
    "three": lambda block, x, y, z: block(x, y, z),
    "remember": lambda block, x, y, z: block(x, block.remember(y)),
    "remember two": lambda block, x, y, z: block(x, block.remember(y, z)),
    "cache": lambda block, x, y, z: cached(block, x),
    "step": lambda block, x, y, z: steps(block, x),
    "step to memory": lambda block, x, y, z: step_to_memory(block, x, y),
    "weights": lambda block, x, y, z: block.attention_weights(x, y),
}
BLOCKS = {"one layer for all": {}, "a layer each": {"key_dim": DIM}, "gate": {"gate": "head"}}


def tokens():
    return some(BATCH, QUERIES, DIM), some(BATCH, KEYS, DIM), some(BATCH, KEYS, DIM)


@pytest.mark.parametrize("kind", ATTACHED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("form", BLOCKS)
def test_what_is_attached_to_a_projection_computes(kind, form):
    torch.manual_seed(0)
    untouched = MultiHeadAttention(DIM, HEADS, **BLOCKS[form]).double().eval()
    given = tokens()
    block, plain = attached(copy.deepcopy(untouched), kind)
    for name, call in CALLS.items():
        output = call(block, *given)
        torch.testing.assert_close(output, call(plain, *given), msg=name)
        assert (output - call(untouched, *given)).abs().max() > 1e-3, name


@pytest.mark.parametrize("form", BLOCKS)
def test_hooks_of_all_modules_see_each_layer_in_every_call(form):
    block = MultiHeadAttention(DIM, HEADS, **BLOCKS[form]).double().eval()
    given = tokens()
    layers = {*projections(block).values()}
    for name, call in CALLS.items():
        seen = []
        with register_module_forward_hook(lambda module, *_, seen=seen: seen.append(module)):
            call(block, *given)
        unused = {block.out_proj, block.gate_proj} if name == "weights" else set()
        assert layers - unused <= {*seen}, name
        assert block in seen or name == "weights", name


def test_layers_quantized_by_torch_run_in_every_call():
    block = MultiHeadAttention(DIM, HEADS, gate="head").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is to be replaced
        small = torch.ao.quantization.quantize_dynamic(block, {nn.Linear}, dtype=torch.qint8)
    assert projections(small) == {}
    given = [t.float() for t in tokens()]
    for name, call in CALLS.items():
        expected = call(block, *given)
        error = (call(small, *given) - expected).abs().max()
        assert 0 < error < 0.05 * expected.abs().max(), name


def test_a_block_with_another_forward_goes_through_it_in_a_step():
    block = MultiHeadAttention(DIM, HEADS).double().eval()
    x, y, _ = tokens()
    expected = 2 * step_to_memory(block, x, y), 2 * steps(block, x)
    old = block.forward
    block.forward = lambda *inputs, **options: 2 * old(*inputs, **options)
    torch.testing.assert_close((step_to_memory(block, x, y), steps(block, x)), expected)


GRAPHS = ["scaled_dot", "gat", "gatv2", "general"]
FORMS = {
    "self": {},
    "pair": {"in_channels": (DIM, DIM)},
    "sparse": {},
    "first rows": {},
    "shared": {"share_weights": True},
    "separate": {"separate_self": True},
}


def graph_call(layer, form, x, other, edges, features):
    if form == "pair":
        return layer((x, other[:4]), edges, features, size=(7, 4))
    if form == "first rows":
        return layer(x, attnkit.Edges(edges, 4, 7), features)
    return layer(x.to_sparse_csr() if form == "sparse" else x, edges, features)


@pytest.mark.parametrize("kind", ATTACHED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("score", GRAPHS)
def test_what_is_attached_to_a_graph_layer_computes(kind, score):
    torch.manual_seed(0)
    x, other = some(KEYS, DIM), some(KEYS, DIM)
    edges = torch.stack([torch.randint(7, (23,)), torch.randint(4, (23,))])
    features = some(23, 3)
    place = ATTACHED.index(kind) + GRAPHS.index(score)
    for form, options in list(FORMS.items())[place % 2 :: 2]:
        if form == "shared" and score != "gatv2":
            continue
        options = {"in_channels": DIM, "residual": True, "edge_dim": 3, **options}
        untouched = attnkit.GraphAttention(out_channels=5, heads=3, score=score, **options).double()
        layer, plain = attached(copy.deepcopy(untouched), kind)
        outputs = [
            graph_call(module, form, x, other, edges, features)
            for module in (layer, plain, untouched)
        ]
        torch.testing.assert_close(outputs[0], outputs[1], msg=form)
        assert (outputs[0] - outputs[2]).abs().max() > 1e-3, form


TYPES = (["a", "b"], [("a", "to", "b"), ("b", "of", "a")])
TYPED = {
    "han": lambda: attnkit.HANAttention(DIM, 12, TYPES, 3),
    "hgt": lambda: attnkit.HGTAttention(DIM, 12, TYPES, 3),
    "rgat": lambda: attnkit.RGATAttention(DIM, 12, 2, heads=3, edge_dim=3),
}


@pytest.mark.parametrize("kind", ATTACHED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", TYPED)
def test_what_is_attached_to_a_layer_of_typed_edges_computes(kind, name):
    torch.manual_seed(0)
    if name == "rgat":
        edges, types = torch.randint(7, (2, 23)), torch.randint(2, (23,))
        given = some(7, DIM), edges, types, some(23, 3)
    else:
        given = (
            {"a": some(7, DIM), "b": some(5, DIM).to_sparse_csr()},
            {TYPES[1][0]: torch.randint(5, (2, 23)), TYPES[1][1]: torch.randint(5, (2, 11))},
        )
    untouched = TYPED[name]().double()
    layer, plain = attached(copy.deepcopy(untouched), kind)
    outputs = [module(*given) for module in (layer, plain, untouched)]
    if name != "rgat":
        outputs = [torch.cat([output["a"], output["b"]]) for output in outputs]
    torch.testing.assert_close(outputs[0], outputs[1])
    assert (outputs[0] - outputs[2]).abs().max() > 1e-3
