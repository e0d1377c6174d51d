"""What each method trains, which parts stay in evaluation mode, and adapters in files."""

import copy
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from timm.models import create_model
from torch import nn

import attnkit
from attnkit.finetune import (
    bitfit,
    finetuned,
    full,
    head_only,
    last_blocks,
    load_adapter,
    lora,
    save_adapter,
)
from attnkit.finetune.layers import blocks_of, head_of, layer_numbers


def vit(**options):
    sizes = {"image_size": 8, "patch_size": 4, "dim": 24, "depth": 3, "num_heads": 3}
    return attnkit.ViT(**{**sizes, "num_classes": 5, **options})


def timms(**options):
    options = {"img_size": 32, "embed_dim": 24, "depth": 3, "num_heads": 3, **options}
    return create_model("vit_tiny_patch16_224", num_classes=5, **options)


def captioner(tie_embeddings=False):
    encoder = attnkit.ViTEncoder(8, patch_size=4, dim=24, depth=2, num_heads=2)
    sizes = {
        "vocabulary_size": 11,
        "max_words": 5,
        "memory_dim": 24,
        "dim": 24,
        "num_heads": 2,
        "depth": 1,
    }
    decoder = attnkit.TransformerDecoder(**sizes, tie_embeddings=tie_embeddings)
    return attnkit.Captioner(encoder, decoder)


def graph_transformer():
    return attnkit.GraphTransformer(
        in_channels=6, hidden_channels=8, num_classes=5, num_layers=2, heads=2
    )


def gat(**options):
    sizes = {"in_channels": 6, "hidden_channels": 8, "num_classes": 5, "num_layers": 2, "heads": 2}
    return attnkit.GAT(**{**sizes, **options})


NETWORKS = {
    "attnkit": vit,
    "timm": timms,
    "resnet": lambda: create_model("resnet18", num_classes=5),
    "ours": lambda: attnkit.models.ResNet(in_channels=3, num_classes=5, num_blocks=1),
    "captioner": captioner,
    "graph transformer": graph_transformer,
    "GAT": gat,
}


def trained(network):
    return {name for name, p in network.named_parameters() if p.requires_grad}


def below(network, *modules):
    return {
        name
        for name, _ in network.named_parameters()
        if any(name.startswith(f"{module}.") for module in modules)
    }


@pytest.mark.parametrize(
    ("name", "head", "blocks"),
    [
        ("attnkit", ["head"], ["blocks.0", "blocks.1", "blocks.2"]),
        ("timm", ["head"], ["blocks.0", "blocks.1", "blocks.2"]),
        ("resnet", ["fc"], [f"layer{i}.{j}" for i in range(1, 5) for j in range(2)]),
        ("ours", ["head"], ["stages.0", "stages.1", "stages.2"]),
        (
            "captioner",
            ["decoder.head"],
            [*(f"encoder.vit.blocks.{i}" for i in range(2)), "decoder.blocks.0"],
        ),
        ("graph transformer", ["head"], ["blocks.0", "blocks.1"]),
        ("GAT", ["layers.1"], ["layers.0", "layers.1"]),
    ],
)
def test_head_and_blocks_are_found(name, head, blocks):
    network = NETWORKS[name]()
    assert list(head_of(network)) == head
    assert blocks_of(network) == blocks
    numbers = layer_numbers(network, head)
    assert set(numbers) >= {name for name, _ in network.named_parameters()}
    highest = max(numbers.values())
    assert {key for key, number in numbers.items() if number == highest} == below(network, *head)


def test_our_vit_is_numbered_as_timms():
    ours, theirs = (layer_numbers(network(), ("head",)) for network in (vit, timms))
    assert {ours["position_table"], ours["class_token"], ours["patch_embed.weight"]} == {0}
    assert {theirs["pos_embed"], theirs["cls_token"], theirs["patch_embed.proj.weight"]} == {0}
    for numbers in (ours, theirs):
        assert [numbers[f"blocks.{i}.mlp.fc1.weight"] for i in range(3)] == [1, 2, 3]
        assert numbers["norm.weight"] == 3
        assert numbers["head.weight"] == 4


@pytest.mark.parametrize("network", [vit, timms])
def test_what_is_trained(network):
    assert trained(full(network())) == {name for name, _ in network().named_parameters()}
    assert trained(head_only(network())) == {"head.weight", "head.bias"}
    assert trained(last_blocks(network(), 2)) == below(network(), "blocks.1", "blocks.2") | {
        *("norm.weight", "norm.bias", "head.weight", "head.bias")
    }
    biases = {name for name, _ in network().named_parameters() if name.endswith("bias")}
    assert trained(bitfit(network())) == biases | {"head.weight"}


@pytest.mark.parametrize("name", NETWORKS)
def test_only_what_is_trained_changes(name):
    for method in (head_only, last_blocks, bitfit):
        network = method(NETWORKS[name](), **({"num_blocks": 1} if method is last_blocks else {}))
        before = copy.deepcopy(network.state_dict())
        network.train()
        if name in ("GAT", "graph transformer"):
            output = network(torch.randn(7, 6), torch.randint(7, (2, 20)))
        elif name == "captioner":
            output = network(torch.rand(2, 3, 8, 8), torch.randint(11, (2, 4)))
        else:
            output = network(torch.randn(2, 3, *[8 if name == "attnkit" else 32] * 2))
        output.square().sum().backward()
        torch.optim.SGD(network.parameters(), lr=0.1).step()
        changed = {k for k, v in network.state_dict().items() if not torch.equal(v, before[k])}
        assert changed
        allowed = trained(network)
        modules = {key.rpartition(".")[0] for key in allowed}
        statistics = {
            f"{module}.{buffer}"
            for module in modules
            for buffer in dict(network.get_submodule(module).named_buffers(recurse=False))
        }
        assert changed <= allowed | statistics


def test_a_head_that_shares_its_weight_is_trained_with_what_shares_it():
    network = head_only(captioner(tie_embeddings=True))
    assert trained(network) == {"decoder.embedding.weight"}


@pytest.mark.parametrize("network", [vit(dropout_p=0.1), timms(drop_rate=0.1, pos_drop_rate=0.1)])
def test_frozen_parts_stay_in_evaluation(network):
    images = torch.randn(2, 3, *[8 if isinstance(network, attnkit.ViT) else 32] * 2)
    first, second = (copy.deepcopy(network) for _ in range(2))
    for tuned in (head_only(first), pickle.loads(pickle.dumps(head_only(second)))):
        tuned.train()
        assert torch.equal(tuned(images), tuned(images))
        assert not any(p.requires_grad for p in tuned.blocks.parameters())
    tuned = last_blocks(network, 1).train()
    tuned(images)
    assert tuned.training
    assert [block.training for block in tuned.blocks] == [False, False, True]
    assert not torch.equal(tuned(images), tuned(images))


def test_frozen_batch_norms_keep_their_statistics():
    for method in (head_only, last_blocks, bitfit):
        network = method(create_model("resnet18", num_classes=5)).train()
        before = copy.deepcopy(dict(network.named_buffers()))
        network(torch.randn(4, 3, 32, 32))
        changed = {n for n, b in network.named_buffers() if not torch.equal(b, before[n])}
        layers = {name.partition(".")[0] for name in changed}
        # the biases of all norms are trained in BitFit
        assert layers == {head_only: set(), last_blocks: {"layer4"}}.get(method, layers)
    assert "bn1" in layers


METHODS = {
    "head": head_only,
    "last_blocks": lambda network: last_blocks(network, 1),
    "lora": lambda network: lora(network, 2, targets=["*.in_proj", "*.fc1"], qkv="qv"),
    "bitfit": bitfit,
}


@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_goes_alone_onto_the_base(method, tmp_path):
    base = vit()
    network = METHODS[method](copy.deepcopy(base))
    for parameter in network.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    holder = nn.ModuleDict({"model": network})
    path = save_adapter(holder, tmp_path / "adapter.safetensors")
    assert set(load_file(path)) == trained(network)
    again = load_adapter(copy.deepcopy(base), path)
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(again.eval()(images), network.eval()(images))
    assert trained(again) == trained(network)
    assert finetuned(again)[2] == finetuned(holder)[2]
    assert torch.equal(load_adapter(again, path)(images), network(images))


def test_bad_adapters(tmp_path):
    path = save_adapter(lora(vit(), 2), tmp_path / "adapter.safetensors")
    save_file({"x": torch.zeros(2)}, plain := tmp_path / "plain.safetensors")
    (text := tmp_path / "text.safetensors").write_text("no")
    cases = [
        (vit(dim=48), path, r"made for another network, ViT: blocks.0.attention.in_proj.lora_A is"),
        (vit(depth=2), path, r"made for another network, ViT: blocks.2.attention.in_proj.lora_A"),
        (gat(), path, r"made for another network, ViT: "),
        (bitfit(vit()), path, r"made by lora, but the network is set for bitfit"),
        (vit(), plain, r"no adapter: save_adapter did not write it"),
        (vit(), text, r"no adapter: no safetensors file"),
        (vit(), tmp_path / "none", r"no adapter: no such file"),
    ]
    for network, file, message in cases:
        before = [(name, p, p.requires_grad) for name, p in network.named_parameters()]
        with pytest.raises(ValueError, match=f": {message}") as error:
            load_adapter(network, file)
        after = [(name, p, p.requires_grad) for name, p in network.named_parameters()]
        assert [(n, id(p), g) for n, p, g in after] == [(n, id(p), g) for n, p, g in before]
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"^save_adapter: ViT is not fine-tuned"):
        save_adapter(vit(), path)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: last_blocks(vit(), 4), "num_blocks: expected at most 3, its blocks, got 4"),
        (lambda: last_blocks(vit(), 0), "num_blocks: expected at least 1, got 0"),
        (
            lambda: last_blocks(nn.Linear(2, 2)),
            "num_blocks: Linear has no blocks that attnkit recognizes",
        ),
        (
            lambda: head_only(nn.Linear(2, 2)),
            "head: Linear has no head that can be found by its name",
        ),
        (lambda: head_only(vit(), head="*.x"), r"head: '\*.x' matches no module with parameters"),
        (lambda: bitfit(nn.Linear(2, 2, bias=False)), "bitfit: Linear has no bias outside of"),
        (lambda: full(vit(), layer_decay=1.5), "layer_decay: expected above 0 and at most 1"),
        (lambda: full(head_only(vit())), "model: it is already fine-tuned, by head"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()
