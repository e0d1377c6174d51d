import copy

import pytest
import torch
from torch import nn

import attnkit
from attnkit.lightning import muon, parameter_groups, scale_learning_rates, warmup_cosine


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, 5, 3))
        self.linear = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.linear.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def no_weight_decay(self):
        return {"position"}


def test_matrices_are_decayed_and_nothing_else():
    outer = nn.ModuleDict({"model": Net(), "head": nn.Linear(3, 2)})
    model = outer["model"]
    decayed, exempt = parameter_groups(outer, weight_decay=0.3)
    assert decayed["weight_decay"] == 0.3
    assert exempt["weight_decay"] == 0.0
    assert [*map(id, decayed["params"])] == [id(model.linear.weight), id(outer["head"].weight)]
    assert {*map(id, exempt["params"])} == {
        *map(id, (model.position, model.linear.bias, model.norm.weight, model.norm.bias)),
        id(outer["head"].bias),
    }
    optimizer = torch.optim.AdamW(parameter_groups(Net()), weight_decay=0.7)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.7, 0.0]


def test_compiled_and_timm_models_say_no_weight_decay_too():
    import timm

    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    for model in (nn.ModuleDict({"model": vit}), nn.ModuleDict({"model": torch.compile(vit)})):
        exempt = {*map(id, parameter_groups(model)[1]["params"])}
        assert {id(vit.pos_embed), id(vit.cls_token)} <= exempt


def test_muon_is_torchs_for_maps_and_adamw_for_the_rest():
    torch.manual_seed(0)

    def make():
        net = nn.ModuleDict({"words": nn.Embedding(9, 6), "linear": nn.Linear(6, 10)})
        net.no_weight_decay = lambda: {"words.weight"}
        return net

    ours, theirs = make(), make()
    theirs.load_state_dict(ours.state_dict())
    start = copy.deepcopy(ours.state_dict())
    options = {"lr": 0.03, "weight_decay": 0.2}
    optimizer = muon(parameter_groups(ours), nesterov=False, betas=(0.9, 0.95), **options)
    rest = [p for name, p in theirs.named_parameters() if name != "linear.weight"]
    others = [
        torch.optim.Muon(
            [theirs["linear"].weight], adjust_lr_fn="match_rms_adamw", nesterov=False, **options
        ),
        torch.optim.AdamW(rest, lr=0.03, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for _ in range(5):
        words = torch.randint(9, (7,))
        for net, steppers in ((ours, [optimizer]), (theirs, others)):
            net.zero_grad()
            net["linear"](net["words"](words)).exp().sum().backward()
            for stepper in steppers:
                stepper.step()
    for name, parameter in ours.named_parameters():
        # the iteration of Newton and Schulz is rounded to bfloat16
        torch.testing.assert_close(parameter, theirs.get_parameter(name), atol=1e-4, rtol=0)
        assert (parameter - start[name]).abs().min() > 1e-3


def test_muon_goes_on_from_its_state():
    def train(net, optimizer, steps):
        for step in range(steps):
            optimizer.zero_grad()
            net(torch.ones(2, 3) * (step + 1)).square().sum().backward()
            optimizer.step()

    torch.manual_seed(0)
    whole = nn.Linear(3, 5)
    stopped = nn.Linear(3, 5)
    optimizers = [muon(parameter_groups(net), lr=0.1) for net in (whole, stopped)]
    train(whole, optimizers[0], 3)
    stopped.load_state_dict(whole.state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for net, optimizer in zip((whole, stopped), optimizers, strict=True):
        train(net, optimizer, 3)
    assert torch.equal(whole.weight, stopped.weight)
    assert torch.equal(whole.bias, stopped.bias)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ns_coefficients": "foo"}, "ns_coefficients: expected 'original', 'quintic'"),
        ({"ns_steps": 0}, "ns_steps: expected at least 1, got 0"),
        ({"betas": [0.9]}, r"betas: expected two numbers in \[0, 1\)"),
        ({"betas": (0.9, 1.0)}, r"betas: expected two numbers in \[0, 1\)"),
        ({"momentum": 1.5}, "momentum"),
        ({"lr": -1.0}, "learning rate"),
    ],
)
def test_muon_says_what_is_wrong(options, message):
    with pytest.raises(ValueError, match=message):
        muon(parameter_groups(Net()), **options)


def rates_of(optimizer, network):
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    return {
        names[id(parameter)]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def test_layer_decay_is_timms():
    from timm.models import create_model
    from timm.optim import param_groups_layer_decay

    options = {"img_size": 32, "embed_dim": 24, "depth": 3, "num_heads": 3}
    network = create_model("vit_tiny_patch16_224", num_classes=5, **options)
    groups = param_groups_layer_decay(network, 0.05, network.no_weight_decay(), layer_decay=0.7)
    for group in groups:
        group["lr"] = 2.0 * group["lr_scale"]
    theirs = rates_of(torch.optim.SGD(groups), network)
    groups = parameter_groups(network, 0.05, layer_decay=0.7)
    ours = rates_of(scale_learning_rates(torch.optim.SGD(groups, lr=2.0)), network)
    assert ours.keys() == theirs.keys()
    assert all(ours[name] == pytest.approx(theirs[name]) for name in theirs)
    assert len({rate for rate, _ in ours.values()}) == 5


def test_what_a_network_was_fine_tuned_with_decides_the_rates():
    network = attnkit.ViT(
        image_size=8, patch_size=4, num_classes=5, dim=24, depth=3, num_heads=3, num_registers=2
    )
    attnkit.finetune.last_blocks(network, 2, layer_decay=0.5, head_lr=0.3)
    outer = nn.ModuleDict({"model": network, "other": nn.Linear(3, 2)})
    optimizer = scale_learning_rates(torch.optim.AdamW(parameter_groups(outer), lr=0.1))
    assert all("lr_scale" not in group for group in optimizer.param_groups)
    rates = rates_of(optimizer, outer)
    assert rates["model.head.weight"] == (0.3, 0.01)
    assert rates["model.head.bias"] == (0.3, 0.0)
    assert rates["model.blocks.2.mlp.fc1.weight"] == (0.05, 0.01)
    assert rates["model.norm.weight"] == (0.05, 0.0)
    assert rates["model.blocks.1.mlp.fc1.weight"] == (0.025, 0.01)
    assert rates["other.weight"] == (0.1, 0.01)
    assert "model.blocks.0.mlp.fc1.weight" not in rates
    warm = warmup_cosine(optimizer, total_steps=10, warmup_fraction=0.5)
    start = rates_of(optimizer, outer)
    assert start["model.head.bias"][0] / start["other.bias"][0] == pytest.approx(3.0)
    del warm
