"""docs/benchmarks/pretrained.py, which is for weights that others trained, runs on random ones of
the same layout."""

import importlib

import pytest
import torch

from attnkit import GAT
from attnkit.models.weights import read_weights

NODES = 23


@pytest.fixture
def script(repository, monkeypatch):
    monkeypatch.syspath_prepend(str(repository / "docs" / "benchmarks"))
    return importlib.import_module("pretrained")


def random_state(in_channels, channels=5, heads=3, classes=7, out_heads=2):
    shapes: dict[str, tuple[int, ...]] = {}
    sizes = (in_channels, channels, heads), (channels * heads, classes, out_heads)
    for layer, (inward, outward, count) in enumerate(sizes):
        shapes[f"gat_net.{layer}.scoring_fn_target"] = 1, count, outward
        shapes[f"gat_net.{layer}.scoring_fn_source"] = 1, count, outward
        shapes[f"gat_net.{layer}.bias"] = (outward if layer else outward * count,)
        shapes[f"gat_net.{layer}.linear_proj.weight"] = outward * count, inward
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def test_all_networks_agree(script):
    """Within rounding, as a swap of source and target, which both vectors allow, does not."""
    state = random_state(11)
    x, edges = torch.randn(NODES, 11), torch.randint(NODES, (2, 97))
    ours, *others = script.logits_of(state, x, edges).values()
    assert len(others) == 2
    for theirs in others:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for layer in (0, 1):
        names = [f"gat_net.{layer}.scoring_fn_{end}" for end in ("source", "target")]
        state[names[0]], state[names[1]] = state[names[1]], state[names[0]]
    with torch.no_grad():
        assert (script.to_attnkit(state)(x, edges) - ours).abs().max() > 0.1


def test_a_tensor_more_is_refused(script):
    """As of the protein network in the same repository, whose layers have a residual."""
    state = random_state(11) | {"gat_net.0.skip_proj.weight": torch.zeros(15, 11)}
    with pytest.raises(RuntimeError, match="skip_proj"):
        script.to_attnkit(state)


def test_its_table_and_what_it_saves(script, graph_files, tmp_path, capsys):
    """On made-up files of Cora: three equal rows, and a file of attnkit's network."""
    graph_files.write_planetoid(tmp_path / "Cora" / "raw", "Cora", isolated=())
    width, classes = graph_files.WIDTH, graph_files.CLASSES
    state = random_state(width, classes=classes)
    torch.save({"state_dict": state, "test_acc": 0.822}, tmp_path / "theirs.pth")
    with pytest.warns(UserWarning, match="published"):
        script.main(tmp_path / "theirs.pth", tmp_path, tmp_path / "ours.pt")
    said = capsys.readouterr().out
    rows = [line.split("|")[2:5] for line in said.splitlines() if "GAT" in line]
    assert len(rows) == 3
    assert rows[0] == rows[1] == rows[2]
    assert "82.2 %" in said
    saved = read_weights(tmp_path / "ours.pt")
    GAT(width, 15, classes, heads=3, out_heads=2).load_state_dict(saved)
