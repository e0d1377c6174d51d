import functools
import sys

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn

from attnkit.lightning import UserError, allowing, warmup_cosine
from attnkit.lightning.build import FUNCTIONS, KINDS, build, find

LINEAR = {"_target_": "torch.nn.Linear", "in_features": 7, "out_features": 3}


def test_builds_nested_nodes_and_leaves_the_rest():
    module = nn.Identity()
    node = {
        "model": {
            "_target_": "torch.nn.Sequential",
            "_args_": [LINEAR, {"_target_": "torch.nn.GELU"}],
        },
        "callbacks": [
            {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "val/loss"}
        ],
        "plain": {"list": [1, 2.5, None, True, "torch.nn.Linear"], "object": module},
    }
    built = build(node)
    assert isinstance(built["model"][0], nn.Linear)
    assert built["model"][0].weight.shape == (3, 7)
    assert isinstance(built["callbacks"][0], EarlyStopping)
    assert built["plain"] == node["plain"]
    assert built["plain"]["object"] is module


def test_arguments_given_go_over_those_of_the_node_and_partial_leaves_the_call():
    assert build(LINEAR, out_features=5).weight.shape == (5, 7)
    assert LINEAR["out_features"] == 3
    partial = build({"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.25})
    assert isinstance(partial, functools.partial)
    assert partial([nn.Parameter(torch.ones(3))]).param_groups[0]["lr"] == 0.25


def test_every_kind_and_function_listed_is_there():
    for name in KINDS:
        assert find(name)
    assert find("attnkit.lightning.warmup_cosine") is warmup_cosine
    for name in FUNCTIONS:
        assert callable(find(name))


@pytest.mark.parametrize(
    "target",
    ["os.system", "torch.load", "torch.os.system", "torch.nn.Module.__init_subclass__",
     "torch.Tensor", "lightning.fabric.utilities.cloud_io._load",
     "attnkit.lightning.files.replacing"],
)  # fmt: skip
@pytest.mark.parametrize("partial", [False, True])
def test_refuses_what_is_no_module_callback_and_so_on(target, partial):
    """More of them are in tests/launch/config/hostile.py."""
    with pytest.raises(UserError, match=r"^model\.deep\._target_: ") as raised:
        build({"deep": {"_target_": target, "_partial_": partial}}, at="model")
    assert target in str(raised.value)
    assert len(str(raised.value).splitlines()) <= 3


def test_imports_nothing_that_is_not_allowed(tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"stranger\.Net is outside the allowed packages"):
        build({"_target_": "stranger.Net"})
    assert "stranger" not in sys.modules


def test_a_users_own_package_is_allowed_by_name_only(tmp_path, monkeypatch):
    (tmp_path / "herpackage.py").write_text(
        "import os\nfrom torch import nn\n"
        "class Net(nn.Linear): pass\n"
        "def make(size): return Net(size, size)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    node = {"_target_": "herpackage.make", "size": 5}
    with pytest.raises(UserError, match=r"allow=\[herpackage\]"):
        build(node)
    assert type(build(node, allow=["herpackage"])).__name__ == "Net"
    with allowing("herpackage"):
        assert build(node).weight.shape == (5, 5)
        with pytest.raises(UserError, match="leads out of the allowed packages"):
            build({"_target_": "herpackage.os.getcwd"})
    with pytest.raises(UserError):
        build(node)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_target_": "torch.nn.Liner"}, r"model._target_: torch.nn.Liner .*did you mean Linear\?"),
        ({"_target_": "torch.nnn.Linear"}, r"may not be built .*; did you mean torch.nn\?"),
        ({"_target_": "torch.nn.functional.Linear"}, r"does not exist; did you mean linear\?"),
        ({"_target_": "torch.nn"}, "torch.nn is a module, expected a class"),
        ({"_target_": "torch"}, "expected a dotted name"),
        ({"_target_": 3}, "expected a dotted name such as attnkit.ViT, got 3"),
        ({"_target_": "torch..nn"}, "expected a dotted name"),
        ({**LINEAR, "_recursive_": False}, "model._recursive_: not known"),
        ({**LINEAR, "in_feature": 3}, "model: torch.nn.Linear: .*unexpected keyword.*in_feature"),
        ({"_target_": "torch.nn.Linear"}, "model: torch.nn.Linear: .*missing 2 required"),
        (
            {"_target_": "attnkit.MultiHeadAttention", "dim": 5, "num_heads": 3},
            "model: attnkit.MultiHeadAttention: num_heads: 3 does not divide dim 5",
        ),
    ],
)
def test_errors_name_the_key_path_and_chain_their_cause(node, message):
    with pytest.raises(UserError, match=message) as raised:
        build(node, at="model")
    if message.startswith("model: "):
        assert isinstance(raised.value.__cause__, TypeError | ValueError)
