"""Every check passes on a good module and fails on one that is broken in just that way."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import attnkit
from attnkit.checks import CHECKS

DIM = 12


def masked(module, tokens, mask):
    return module(tokens, mask)


class Attention(nn.Module):
    """A user's own attention, right in everything; the broken ones differ in one method."""

    def __init__(self, heads=3):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, tokens, mask=None):
        q, k, v = self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        mask = torch.ones_like(tokens[..., 0]).bool() if mask is None else mask
        weights = self.weights(scores, mask[:, None, None, :])
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    def weights(self, scores, mask):
        weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)
        return weights * mask.any(-1, keepdim=True)


class Causal(Attention):
    diagonal = 0

    def weights(self, scores, mask):
        order = torch.ones(scores.shape[-2:], device=scores.device).tril(self.diagonal).bool()
        return super().weights(scores, mask & order)


class SeesNext(Causal):
    diagonal = 1


class SeesAheadWithoutGradient(Causal):
    def forward(self, tokens, mask=None):
        return super().forward(tokens, mask) + tokens.amax(1, keepdim=True).detach()


class WeakMask(Attention):
    def weights(self, scores, mask):
        return torch.where(mask, scores, scores - 3).softmax(-1)


class MaskOfAFiniteNumber(Attention):
    """Enough for ordinary scores, which is how it goes unseen."""

    def weights(self, scores, mask):
        return torch.where(mask, scores, scores - 100).softmax(-1)


class NoMask(Attention):
    def weights(self, scores, mask):
        return scores.softmax(-1)


class BooleanAsNumber(Attention):
    def weights(self, scores, mask):
        return (scores + mask).softmax(-1)


class Inverted(Attention):
    def weights(self, scores, mask):
        return super().weights(scores, ~mask)


class SeesNothing(Attention):
    def weights(self, scores, mask):
        return super().weights(scores, mask & mask.all(-1, keepdim=True))


class NaNRows(Attention):
    def weights(self, scores, mask):
        return scores.masked_fill(~mask, -torch.inf).softmax(-1)


class NaNGradients(Attention):
    def weights(self, scores, mask):
        return (scores + torch.where(mask, 0.0, -torch.inf)).softmax(-1).nan_to_num(0)


class NaNSpreads(Attention):
    def forward(self, tokens, mask=None):
        tokens = tokens / (1.0 if mask is None else mask.any(-1).prod())
        return super().forward(tokens, mask)


class SoftmaxOverBatch(Attention):
    def weights(self, scores, mask):
        return super().weights(scores, mask) * scores.softmax(0)


class WithBatchNorm(Attention):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, tokens, mask=None):
        return super().forward(self.norm(tokens.transpose(1, 2)).transpose(1, 2), mask)


class GradientsAcrossItems(Attention):
    """Nothing in the values; in the gradients, the other items."""

    def forward(self, tokens, mask=None):
        return super().forward(tokens, mask) + (tokens - tokens.detach()).mean(0)


class CountsTheBatch(Attention):
    def forward(self, tokens, mask=None):
        return super().forward(tokens, mask) * len(tokens)


class CountsTheTokens(Attention):
    def forward(self, tokens, mask=None):
        return super().forward(tokens, mask) * tokens.shape[1]


class Dropout(Attention):
    def weights(self, scores, mask):
        return F.dropout(super().weights(scores, mask), 0.5, self.training)


class DropoutInEval(Attention):
    def weights(self, scores, mask):
        return F.dropout(super().weights(scores, mask), 0.5)


class DropoutForgotten(Attention):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)


class Noise(Attention):
    """Another number at each call, of a generator that no seed reaches; less than rounding is."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, tokens, mask=None):
        output = super().forward(tokens, mask)
        return output * (1 + 1e-6 * torch.rand(1, generator=self.generator))


class NoisyGradients(Noise):
    def forward(self, tokens, mask=None):
        if tokens.requires_grad:
            tokens.register_hook(lambda g: g * (1 + torch.rand(1, generator=self.generator)))
        return Attention.forward(self, tokens, mask)


class OtherDtype(Attention):
    def forward(self, tokens, mask=None):
        return super().forward(tokens, mask).double()


class WritesIntoInput(Attention):
    def forward(self, tokens, mask=None):
        return super().forward(tokens.mul_(0.5), mask)


class Overflows(Attention):
    def forward(self, tokens, mask=None):
        return super().forward(tokens, mask) / 0


class Positions(Attention):
    def forward(self, tokens, mask=None):
        places = torch.linspace(-1, 1, tokens.shape[1], device=tokens.device)
        return super().forward(tokens + places[:, None].to(tokens), mask)


class RaisesInTraining(Attention):
    def forward(self, tokens, mask=None):
        if self.training:
            raise RuntimeError("no kernel for this\nand a long second line")
        return super().forward(tokens, mask)


def silent(module):
    nn.init.zeros_(module.out.weight)
    return module


ALWAYS_NOTED = {"causality", "padding_nonfinite"}
LEAKS = {"mask", "padding", "padding_appended"}

BROKEN = {
    # the checks that fail, each with a part of what the report must say
    OtherDtype: {"output": "torch.float32 on cpu in, torch.float64 on cpu out"},
    WritesIntoInput: {"output": "the input was written into"},
    WeakMask: dict.fromkeys(LEAKS, "")
    | {"mask": "masked tokens are seen, though the mask changes"},
    MaskOfAFiniteNumber: {"padding": "large values reach real tokens: "},
    NoMask: dict.fromkeys(LEAKS, "") | {"mask": "ignored"},
    BooleanAsNumber: dict.fromkeys(LEAKS, "") | {"mask": "masked tokens are seen, though"},
    Inverted: dict.fromkeys(LEAKS, "")
    | {"mask": "inverted", "mixing": "no output sees another token"},
    SeesNothing: {"mask": "with a mask no token is seen", "padding_appended": "change the real"},
    NaNRows: {"dead_rows": "NaN or infinite"},
    NaNGradients: {"dead_rows": "finite, but gradients are NaN"},
    NaNSpreads: {"dead_rows": "it spreads: other items are not finite"},
    # padding is another item's neighbour here, and is counted in the statistics
    SoftmaxOverBatch: {"batch": "an item differs by", "batch_training": "when the", "padding": ""},
    WithBatchNorm: {"batch_training": "an item differs by", "padding": "in training: "},
    GradientsAcrossItems: {"batch": "sees the others, by gradients", "batch_training": "sees the"},
    CountsTheBatch: {"batch": "an item alone differs by 6.7e-01"},
    CountsTheTokens: {"padding_appended": "two tokens of padding more change the real ones"},
    # other shapes draw other dropout
    DropoutInEval: {"dropout": "eval: two calls differ", "batch": "", "padding_appended": ""},
    DropoutForgotten: {"dropout": "dropout of dropout does nothing in training"},
    Noise: {"determinism": "two outputs differ", "dropout": "eval: two calls differ"},
    NoisyGradients: {"determinism": "eval: two gradients differ"},
}


def test_a_good_module_passes_every_check():
    report = attnkit.check_attention(Attention(), DIM, call=masked)
    assert [finding.check for finding in report] == list(CHECKS)
    verdicts = {finding.check: finding.verdict for finding in report}
    assert verdicts == {c: "note" if c in ALWAYS_NOTED else "pass" for c in CHECKS}, str(report)
    assert report
    assert report.failures == []


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_module_fails_the_checks_it_must_and_no_other(broken):
    report = attnkit.check_attention(broken(), DIM, call=masked, num_tokens=5)
    expected = BROKEN[broken]
    assert {finding.check for finding in report.failures} == set(expected), str(report)
    for check, word in expected.items():
        assert word in report[check].seen, str(report)
    if broken is MaskOfAFiniteNumber:
        assert "other values" not in report["padding"].seen
    assert not report


@pytest.mark.parametrize(
    ("module", "verdict", "seen"),
    [
        (Causal, "pass", "causal: no output sees a later token"),
        (SeesNext, "fail", "not causal: 0 sees 1, 1 sees 2, 2 sees 3, 3 sees 4 and 2 more"),
        (SeesAheadWithoutGradient, "fail", "(by values, not by gradients)"),
        (Attention, "fail", "not causal: every output sees every later token"),
    ],
)
def test_causality_is_judged_if_asked_and_reported_else(module, verdict, seen):
    module = module()
    judged = attnkit.check_attention(module, DIM, causal=True, checks=["causality"])
    assert judged["causality"].verdict == verdict
    assert judged["causality"].seen.endswith(seen)
    told = attnkit.check_attention(module, DIM, checks=["causality"])["causality"]
    assert (told.verdict, told.seen) == ("note", judged["causality"].seen)


def test_permutation_is_reported_and_judged_if_asked():
    report = attnkit.check_attention(Positions(), DIM, checks=["permutation"])
    assert report["permutation"].verdict == "note"
    assert "not equivariant" in report["permutation"].seen
    asked = {"checks": ["permutation"], "expect": {"permutation": "pass"}}
    attnkit.assert_attention(Attention(), DIM, **asked)
    with pytest.raises(AssertionError, match="permutation is note, expected pass"):
        attnkit.assert_attention(Positions(), DIM, **asked)


def test_dropout_is_random_in_training_only():
    report = attnkit.check_attention(Dropout(), DIM, call=masked)
    assert report, str(report)
    assert report["dropout"].seen == "eval repeats to the bit, training is random"
    seen = attnkit.check_attention(Attention(), DIM, checks=["dropout"])["dropout"].seen
    assert seen == "nothing is random; training equals eval to the bit"
    batch_norm = attnkit.check_attention(WithBatchNorm(), DIM, checks=["dropout"])["dropout"]
    assert batch_norm.verdict == "note"
    assert "training differs from eval by" in batch_norm.seen


def test_mixing_finds_that_there_is_nothing_to_check():
    report = attnkit.check_attention(silent(Attention()), DIM, call=masked, checks=["mixing"])
    assert (
        report["mixing"].seen == "no output sees another token, so the other checks prove nothing"
    )
    assert not report
    report = attnkit.check_attention(Causal(), DIM, checks=["mixing"])
    assert report["mixing"].seen == "an output sees 1 to 7 of 7 tokens"


def test_output_that_is_not_finite():
    seen = attnkit.check_attention(Overflows(), DIM, checks=["output"])["output"].seen
    assert seen == "eval: not finite; training: not finite"


class Lowest(Attention):
    def weights(self, scores, mask):
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)


class AllIfNone(Attention):
    def weights(self, scores, mask):
        return super().weights(scores, mask | ~mask.any(-1, keepdim=True))


class Residual(Attention):
    def forward(self, tokens, mask=None):
        return tokens + super().forward(tokens, mask)


class LowestResidual(Lowest, Residual):
    pass


class ZeroInEval(Residual):
    def forward(self, tokens, mask=None):
        output = super().forward(tokens, mask)
        return output if torch.is_grad_enabled() or mask is None else output * mask[..., None]


@pytest.mark.parametrize(
    ("module", "verdict", "seen"),
    [
        (Attention, "pass", "a constant (an output bias)"),
        (Residual, "pass", "its own token alone (a residual or a self-loop)"),
        (Lowest, "note", "a mean of the tokens that are masked"),
        (LowestResidual, "note", "sees the tokens that are masked"),
        (AllIfNone, "note", "as if nothing were masked"),
        (
            ZeroInEval,
            "note",
            "eval, training: its own token alone (a residual or a self-loop); "
            "eval without gradients: exactly 0",
        ),
    ],
)
def test_what_a_dead_item_is(module, verdict, seen):
    report = attnkit.check_attention(module(), DIM, call=masked, checks=["dead_rows"])
    assert (report["dead_rows"].verdict, report["dead_rows"].seen) == (verdict, seen)


def test_a_dead_item_without_output_bias_is_exactly_0():
    module = Attention()
    module.out = nn.Linear(DIM, DIM, bias=False)
    report = attnkit.check_attention(module, DIM, call=masked, checks=["dead_rows"])
    assert report["dead_rows"].seen == "exactly 0"


def test_nan_in_padding_is_a_note_unless_it_is_kept_away():
    def clean(module, tokens, mask):
        return module(torch.where(mask[..., None], tokens, 0), mask)

    only = {"checks": ["padding_nonfinite"]}
    (finding,) = attnkit.check_attention(Attention(), DIM, call=masked, **only)
    assert finding.verdict == "note"
    assert "NaN values reach real tokens: NaN or infinity" in finding.seen
    (finding,) = attnkit.check_attention(Attention(), DIM, call=clean, **only)
    assert finding.verdict == "pass"


def test_without_a_mask_its_checks_are_skipped_with_the_reason():
    report = attnkit.check_attention(Attention(), DIM, call=lambda module, tokens: module(tokens))
    skipped = {finding.check for finding in report if finding.verdict == "skipped"}
    assert skipped == LEAKS | {"padding_nonfinite", "dead_rows"}
    assert report["mask"].seen == "the call takes no mask"
    with pytest.raises(AssertionError, match="padding is skipped, expected pass"):
        attnkit.assert_attention(Attention(), DIM, expect={"padding": "pass"})


def test_a_check_that_raises_has_failed_and_the_others_go_on():
    report = attnkit.check_attention(RaisesInTraining(), DIM, call=masked)
    assert report["output"].seen == "RuntimeError: no kernel for this"
    assert {finding.check for finding in report if finding.verdict == "pass"} == {
        "mixing", "permutation", "batch", "mask", "padding_appended",
    }  # fmt: skip
