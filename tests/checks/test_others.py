"""What the attention of torch, timm and torch_geometric is found to do, as docs/checks.md says."""

from importlib.metadata import version

import pytest
import torch
from timm.layers import AttentionPoolLatent
from timm.layers import attention as timm_attention
from torch import nn
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv
from torch_geometric.nn.attention import (
    PerformerAttention,
    PolynormerAttention,
    SGFormerAttention,
)

import attnkit
from attnkit.checks import on_complete_graph
from attnkit.layers import TransformerBlock

DIM = 20
TORCH, TIMM, PYG = version("torch").partition("+")[0], version("timm"), version("torch-geometric")

BIAS = "a constant (an output bias)"
OWN = "its own token alone (a residual or a self-loop)"
NAN = "NaN or infinite"
UNMASKED_NORMALIZER = ["mask", "padding", "padding_appended"]


def torch_with_weights(module, x, mask):
    return module(x, x, x, key_padding_mask=~mask)[0]


def attnkit_block(module, x, mask):
    return module(x, mask=attnkit.Padding(mask))


def timm_masked(module, x, mask):
    return module(x, attn_mask=mask[:, None, None, :].expand(-1, -1, x.shape[1], -1))


def timm_pool(module, x, mask):
    # one output an item: the same for each of its tokens
    pooled = module(x, attn_mask=mask[:, None, None, :])
    return pooled[:, None].expand(-1, x.shape[1], -1)


def pyg_dense(module, x, mask):
    return module(x, mask)


def layer(**options):
    return nn.TransformerEncoderLayer(DIM, 4, 30, batch_first=True, **options)


# name: module, call, failures, what an item all masked is, whether NaN in padding stays there
FOUND = {
    "attnkit MultiHeadAttention": (
        lambda: attnkit.MultiHeadAttention(DIM, 4), None, [], BIAS, False),
    "attnkit TransformerBlock": (
        lambda: TransformerBlock(DIM, 4), attnkit_block, [], OWN, False),
    "torch MultiheadAttention, need_weights=False": (
        lambda: nn.MultiheadAttention(DIM, 4, batch_first=True), None,
        ["dead_rows"], f"eval, training: {BIAS}; eval without gradients: {NAN}", False),
    "torch MultiheadAttention, need_weights=False, batch_first=False": (
        lambda: nn.MultiheadAttention(DIM, 4), None, [], BIAS, False),
    "torch MultiheadAttention, need_weights=True": (
        lambda: nn.MultiheadAttention(DIM, 4, batch_first=True), torch_with_weights,
        ["dead_rows"], NAN, False),
    "torch TransformerEncoderLayer": (
        layer, None,
        ["dead_rows"], f"eval, training: {OWN}; eval without gradients: {NAN}", False),
    "torch TransformerEncoderLayer, norm_first=True": (
        lambda: layer(norm_first=True), None,
        ["dead_rows"], f"eval, training: {OWN}; eval without gradients: {NAN}", False),
    "torch TransformerEncoder": (
        lambda: nn.TransformerEncoder(layer(), 2), None,
        [], f"eval, training: {OWN}; eval without gradients: exactly 0", False),
    "timm Attention": (
        lambda: timm_attention.Attention(DIM, 4), timm_masked, [], BIAS, False),
    "timm AttentionPoolLatent": (
        lambda: AttentionPoolLatent(DIM, num_heads=4), timm_pool, [], BIAS, False),
    "PyG TransformerConv": (
        lambda: TransformerConv(DIM, 5, heads=4), on_complete_graph, [], OWN, True),
    "PyG GATConv": (
        lambda: GATConv(DIM, 5, heads=4, dropout=0.5), on_complete_graph, [], OWN, True),
    "PyG GATConv, add_self_loops=False": (
        lambda: GATConv(DIM, 5, heads=4, add_self_loops=False), on_complete_graph, [], BIAS, True),
    "PyG GATv2Conv": (
        lambda: GATv2Conv(DIM, 5, heads=4), on_complete_graph, [], OWN, True),
    "PyG PerformerAttention": (
        lambda: PerformerAttention(DIM, 4), pyg_dense, UNMASKED_NORMALIZER, BIAS, False),
    "PyG SGFormerAttention": (
        lambda: SGFormerAttention(DIM, 4), pyg_dense, UNMASKED_NORMALIZER, "exactly 0", False),
    "PyG PolynormerAttention": (
        lambda: PolynormerAttention(DIM, 4), pyg_dense, UNMASKED_NORMALIZER, OWN, False),
}  # fmt: skip


def randomised(module):
    """No norm, bias or scale at its start value, where it could not be felt."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", FOUND)
def test_what_the_others_do(name, repository):
    build, call, failures, dead, keeps_nan = FOUND[name]
    report = attnkit.check_attention(randomised(build()), DIM, call=call, num_tokens=5)
    assert [finding.check for finding in report.failures] == failures, str(report)
    assert report["dead_rows"].seen == dead
    assert (report["padding_nonfinite"].verdict == "pass") == keeps_nan, str(report)
    noted = {finding.check for finding in report if finding.verdict == "note"}
    assert noted <= {"causality", "padding_nonfinite", "dead_rows"}, str(report)
    cells = [name, ", ".join(failures) or "nothing", dead, "stays" if keeps_nan else "spreads"]
    row = f"| {' | '.join(cells)} |\n"
    assert row in (repository / "docs" / "checks.md").read_text(), row


def test_the_versions_are_those_of_the_table(repository):
    if (TORCH, TIMM, PYG) != ("2.15.0", "1.0.31", "2.8.1"):
        pytest.skip("the table was measured with other versions")
    found = f"torch {TORCH}, timm {TIMM}, torch_geometric {PYG}"
    assert found in (repository / "docs" / "checks.md").read_text()


def test_a_module_without_a_mask_says_so():
    report = attnkit.check_attention(timm_attention.Attention(DIM, 4), DIM)
    assert report
    assert report["mask"].verdict == "skipped"


def test_torchs_convention_given_as_ours_is_found():
    """True = ignore in `key_padding_mask`: who forgets the ~ is told."""
    report = attnkit.check_attention(
        nn.MultiheadAttention(DIM, 4, batch_first=True),
        DIM,
        call=lambda module, x, mask: module(x, x, x, key_padding_mask=mask, need_weights=False)[0],
    )
    assert "inverted: masked tokens are seen" in report["mask"].seen
    assert report["mask"].verdict == "fail"


def test_causal_ones():
    def causal_timm(module, x):
        return module(x, is_causal=True)

    def causal_attnkit(module, x, mask):
        return module(x, mask=attnkit.Causal() & attnkit.Padding(mask))

    def causal_torch(module, x, mask):
        later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        return module(x, x, x, attn_mask=later, key_padding_mask=~mask)[0]

    torchs = nn.MultiheadAttention(DIM, 4, batch_first=True)
    for module, call, expect in (
        (timm_attention.Attention(DIM, 4), causal_timm, {}),
        (attnkit.MultiHeadAttention(DIM, 4), causal_attnkit, {"mask": "pass"}),
        (torchs, causal_torch, {"mask": "pass", "dead_rows": "fail"}),
    ):
        expect = {"causality": "pass", "permutation": "note", **expect}
        attnkit.assert_attention(module, DIM, call=call, causal=True, expect=expect)
