"""LoRA: what is trained, equal outputs merged and not, the formula, and the adapter's file."""

import copy

import pytest
import timm
import torch
from timm.models import create_model
from torch import nn
from torch.nn import functional as F

import attnkit
from attnkit.finetune import LoRALinear, lora, merge, merged, unmerge


def vit(**options):
    sizes = {"image_size": 8, "patch_size": 4, "dim": 24, "depth": 3, "num_heads": 3}
    return attnkit.ViT(**{**sizes, "num_classes": 5, **options})


def timms(name="vit_tiny_patch16_224", **options):
    options = {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 3, **options}
    return create_model(name, num_classes=5, **options)


def gat():
    return attnkit.GAT(in_channels=6, hidden_channels=8, num_classes=5, num_layers=2, heads=2)


def moved(network):
    """A network whose B are no longer zero, in evaluation."""
    for layer in network.modules():
        if isinstance(layer, LoRALinear):
            nn.init.normal_(layer.lora_B, std=0.1)
    return network.eval()


def inputs_of(network):
    if isinstance(network, attnkit.GAT):
        return torch.randn(7, 6), torch.randint(7, (2, 20))
    size = 8 if isinstance(network, attnkit.ViT) else 32
    return (torch.randn(5, 3, size, size),)


NETWORKS = {
    "attnkit": vit,
    "attention pooling": lambda: vit(pooling="attention"),
    "timm": timms,
    "swin": lambda: create_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=12, depths=(1, 2),
        num_heads=(2, 2), num_classes=5,
    ),
    "GAT": gat,
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("targets", ["attention", "all"])
def test_merged_equals_unmerged_and_both_equal_the_formula(name, targets):
    network = NETWORKS[name]()
    before = copy.deepcopy(network).eval()
    inputs = inputs_of(network)
    assert lora(network, rank=3, alpha=6, targets=targets) is network
    torch.testing.assert_close(network.eval()(*inputs), before(*inputs))  # B is 0
    output = moved(network)(*inputs)
    assert (output - before(*inputs)).abs().max() > 1e-3
    state = {key: value.clone() for key, value in network.state_dict().items()}
    assert set(before.state_dict()) <= set(state)

    merge(network)
    torch.testing.assert_close(network(*inputs), output, rtol=1e-5, atol=1e-5)
    assert not any(isinstance(layer, LoRALinear) for layer in network.modules())
    for key, weight in before.state_dict().items():  # the base, with a change of rank 3 in it
        changed = network.state_dict()[key] - weight
        if f"{key.removesuffix('weight')}lora_A" in state:
            down, up = (state[key.removesuffix("weight") + f"lora_{x}"] for x in "AB")
            torch.testing.assert_close(changed, 2.0 * up @ down)
        else:
            assert not changed.any()
    before.load_state_dict(network.state_dict())
    torch.testing.assert_close(before(*inputs), output, rtol=1e-5, atol=1e-5)

    unmerge(network)
    assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())
    assert torch.equal(network(*inputs), output)


@pytest.mark.slow  # the import
def test_outputs_and_gradients_are_those_of_peft():
    peft = pytest.importorskip("peft")
    ours, base = timms(), timms()
    base.load_state_dict(ours.state_dict())
    lora(ours, rank=3, alpha=6)
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=["qkv", "attn.proj"], modules_to_save=["head"]
    )
    theirs = peft.get_peft_model(base, config)
    moved(ours)
    for name, layer in ours.named_modules():
        if isinstance(layer, LoRALinear):
            other = theirs.base_model.model.get_submodule(name)
            other.lora_A["default"].weight.data.copy_(layer.lora_A)
            other.lora_B["default"].weight.data.copy_(layer.lora_B)
    images = torch.randn(4, 3, 32, 32)
    outputs = [ours(images), theirs.eval()(images)]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    for output in outputs:
        output.square().sum().backward()
    assert sum(p.numel() for p in ours.parameters() if p.requires_grad) == sum(
        p.numel() for p in theirs.parameters() if p.requires_grad
    )
    for name, layer in ours.named_modules():
        if isinstance(layer, LoRALinear):
            other = theirs.base_model.model.get_submodule(name)
            for letter in "AB":
                mine = getattr(layer, f"lora_{letter}").grad
                their = getattr(other, f"lora_{letter}")["default"].weight.grad
                torch.testing.assert_close(mine, their, rtol=1e-3, atol=1e-4)


def by_formula(layer, tokens):
    up = layer._full_b()
    weight = layer.frozen_weight + layer.lora_scale * up @ layer.lora_A
    return F.linear(tokens, weight, layer.bias)


def adapted(rows=None, dtype=torch.float32, **options):
    layer = nn.Linear(11, 18, dtype=dtype)
    LoRALinear.adapt(layer, 3, 0.5, rows=rows, **options)
    nn.init.normal_(layer.lora_B)
    return layer


@pytest.mark.parametrize("num", [1, 2, 700])  # three products, or one
@pytest.mark.parametrize("rows", [None, [(0, 6), (12, 18)]])
def test_a_layer_and_its_gradients(num, rows):
    layer = adapted(rows, torch.float64)
    tokens = torch.randn(num, 11, dtype=torch.float64, requires_grad=True)
    wanted = [tokens, layer.lora_A, layer.lora_B]
    pairs = []
    for function in (
        lambda: layer(tokens),
        lambda: by_formula(layer, tokens),
        lambda: F.linear(tokens, layer.weight, layer.bias),  # as others read it
    ):
        output = function()
        gradients = torch.autograd.grad(output.sin().sum(), wanted, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in gradients), wanted)
        pairs.append((output, *gradients, *second))
    torch.testing.assert_close(pairs[0], pairs[1])
    torch.testing.assert_close(pairs[2], pairs[1])
    with torch.no_grad():
        torch.testing.assert_close(layer(tokens), pairs[1][0])


def test_no_gradient_of_a_frozen_weight_is_formed_and_nothing_more_is_kept():
    layer = adapted()
    tokens = torch.randn(700, 11)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output = layer(tokens)
    sizes = sorted(t.numel() for t in kept if t is not layer.frozen_weight)
    assert sizes[-1] == tokens.numel()
    assert sizes.count(tokens.numel()) == 1
    output.sum().backward()
    assert layer.frozen_weight.grad is None
    assert tokens.grad is None
    assert layer.lora_B.grad is not None


def test_under_autocast_a_small_change_is_not_rounded_away():
    """Of weights of 1 it would be, as bfloat16 has nothing between 1 and 1.0078."""
    layer = adapted(dtype=torch.float32)
    nn.init.constant_(layer.lora_B, 1e-3)
    nn.init.ones_(layer.frozen_weight)
    nn.init.zeros_(layer.bias)
    half = torch.randn(700, 5)
    tokens = torch.cat([half, -half, torch.zeros(700, 1)], dim=1)  # on which they do nothing
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(tokens)
    assert output.dtype == torch.bfloat16
    change = layer.lora_scale * tokens @ layer.lora_A.T @ layer.lora_B.T
    assert (output.float() - change).norm() < 0.02 * change.norm()


def test_dropout_is_of_the_change_alone_and_only_in_training():
    layer, tokens = adapted(dropout=0.5), torch.randn(700, 11)
    base = F.linear(tokens, layer.frozen_weight, layer.bias)
    whole = by_formula(layer, tokens) - base
    layer.train()
    dropped = torch.stack([layer(tokens) - base for _ in range(200)])
    assert dropped.var(dim=0).min() > 0
    torch.testing.assert_close(dropped.mean(dim=0), whole, atol=0.8, rtol=0.1)
    torch.testing.assert_close(layer.eval()(tokens) - base, whole, rtol=1e-4, atol=1e-5)


def test_transforms_compile_and_forward_derivatives():
    layer, tokens = adapted(), torch.randn(700, 11)
    expected = by_formula(layer, tokens)
    torch.testing.assert_close(torch.func.vmap(layer)(tokens), expected)
    tangent = torch.randn_like(tokens)
    _, found = torch.func.jvp(layer, (tokens,), (tangent,))
    torch.testing.assert_close(found, by_formula(layer, tangent) - layer.bias)
    program = torch.export.export(layer.eval(), (tokens,))
    torch.testing.assert_close(program.module()(tokens), expected)


@pytest.mark.parametrize("network", [vit, timms])
def test_some_of_queries_keys_and_values(network):
    net = lora(network(), rank=2, qkv="qv")
    layer = next(layer for name, layer in net.named_modules() if name.endswith(("in_proj", "qkv")))
    assert layer.lora_B.shape == (48, 2)
    before, after = layer.frozen_weight, moved(net) and layer.weight
    same = [torch.equal(b, a) for b, a in zip(before.split(24), after.split(24), strict=True)]
    assert same == [False, True, False]
    images = inputs_of(net)
    output = net(*images)
    with merged(net):
        torch.testing.assert_close(net(*images), output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("qkv", ["qkv", "qv", "k"])
def test_a_state_dict_is_merged_as_the_network_is(qkv):
    net = moved(lora(vit(), rank=2, alpha=3, qkv=qkv, targets="all"))
    state = attnkit.finetune.merge_state_dict(net.state_dict(), rank=2, alpha=3, qkv=qkv)
    assert list(state) == list(merge(net).state_dict())
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(state[name], tensor)
    again = attnkit.finetune.merge_state_dict(state)
    assert all(torch.equal(again[name], state[name]) for name in state)
    with pytest.raises(ValueError, match="lora_A: its change is"):
        attnkit.finetune.merge_state_dict(unmerge(net).state_dict(), rank=3)


def test_separate_layers_and_globs():
    block = nn.Sequential(attnkit.MultiHeadAttention(12, 3, key_dim=8), nn.Linear(12, 2))
    names = {name for name, layer in lora(block, 2, qkv="qv").named_modules() if is_lora(layer)}
    assert names == {"0.query_proj", "0.value_proj", "0.out_proj"}
    net = lora(vit(), 2, targets=["blocks.1.*", "*.fc1"])
    names = {name for name, layer in net.named_modules() if is_lora(layer)}
    assert names == {
        *("blocks.1.attention.in_proj", "blocks.1.attention.out_proj", "blocks.1.mlp.fc2"),
        *(f"blocks.{i}.mlp.fc1" for i in range(3)),
    }


def is_lora(layer):
    return isinstance(layer, LoRALinear)


def test_a_tied_weight_is_left_alone():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.inner, self.out = nn.Embedding(5, 4), nn.Linear(4, 4), None
            self.out = nn.Linear(4, 5, bias=False)
            self.out.weight = self.embedding.weight

    names = {n for n, layer in lora(Words(), 2, targets="all").named_modules() if is_lora(layer)}
    assert names == {"inner"}


def test_what_is_trained_of_vit_tiny_is_at_most_two_percent():
    network = lora(attnkit.ViT.from_size("tiny", num_classes=10), rank=8)
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    assert trained == 12 * 8 * (192 + 576 + 192 + 192) + 192 * 10 + 10
    assert trained / sum(p.numel() for p in network.parameters()) <= 0.02


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank: expected at least 1, got 0"),
        ({"rank": 2.5}, "rank: expected an integer, got 2.5"),
        ({"rank": 99}, "rank: 99 is more than blocks.0.attention.in_proj has"),
        ({"alpha": "big"}, "alpha: expected a number, got 'big'"),
        ({"alpha": 0}, "alpha: expected a positive number, got 0"),
        ({"dropout": 1.0}, "dropout: expected 0 <= dropout < 1, got 1.0"),
        ({"targets": "*.nothing"}, r"targets: '\*.nothing' matches no linear layer of ViT; it has"),
        ({"targets": []}, "targets: expected a name or glob, got none"),
        ({"qkv": "x"}, "qkv: expected some of the letters q, k and v, got 'x'"),
        ({"layer_decay": 0.0}, "layer_decay: expected above 0 and at most 1, got 0.0"),
        ({"head_lr": -1.0}, "head_lr: expected a positive number, got -1.0"),
        ({"head": "top"}, "head: 'top' matches no module with parameters; its last: "),
    ],
)
def test_bad_arguments(options, message):
    network = vit()
    with pytest.raises(ValueError, match=f"^{message}") as error:
        lora(network, **options)
    assert "\n" not in str(error.value)
    assert all(p.requires_grad for p in network.parameters())  # as it was


def test_networks_that_lora_does_not_fit():
    with pytest.raises(ValueError, match=r"^targets: ResNet has no linear layer that LoRA can"):
        lora(timm.create_model("resnet18", num_classes=3))
    with pytest.raises(ValueError, match=r"^model: it is already fine-tuned, by lora$"):
        lora(lora(vit(), 2))
    with pytest.raises(TypeError, match=r"^model: expected an nn.Module, got dict$"):
        lora({})
    for function in (merge, unmerge):
        with pytest.raises(ValueError, match=rf"^{function.__name__}: "):
            function(vit())
