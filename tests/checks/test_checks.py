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


def softmax(module, scores, mask):
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)
    return weights * mask.any(-1, keepdim=True)


class Attention(nn.Module):
    """A user's own attention, right in everything; the broken ones differ in one function.

    They are functions of the module: `weights` of scores and mask, `before` of tokens and mask, and
    `after` of the output, tokens and mask.
    """

    def __init__(self, weights=softmax, before=None, after=None):
        super().__init__()
        self.weights, self.before, self.after = weights, before, after
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, tokens, mask=None):
        given = tokens
        tokens = tokens if self.before is None else self.before(self, tokens, mask)
        q, k, v = self.qkv(tokens).unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        shown = torch.ones_like(tokens[..., 0]).bool() if mask is None else mask
        weights = self.weights(self, scores, shown[:, None, None, :])
        output = self.out((weights @ v).transpose(1, 2).flatten(2))
        return output if self.after is None else self.after(self, output, given, mask)


def causal(diagonal=0, **options):
    def weights(module, scores, mask):
        order = torch.ones(scores.shape[-2:], device=scores.device).tril(diagonal).bool()
        return softmax(module, scores, mask & order)

    return Attention(weights, **options)


def residual(weights=softmax):
    return Attention(weights, after=lambda module, output, tokens, mask: tokens + output)


def all_if_none(module, scores, mask):
    return softmax(module, scores, mask | ~mask.any(-1, keepdim=True))


def lowest(module, scores, mask):
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)


def zero_in_eval(module, output, tokens, mask):
    output = tokens + output
    return output if torch.is_grad_enabled() or mask is None else output * mask[..., None]


def lowered(by):
    return lambda module, scores, mask: torch.where(mask, scores, scores - by).softmax(-1)


def with_batch_norm():
    module = Attention(before=lambda m, tokens, _: m.norm(tokens.transpose(1, 2)).transpose(1, 2))
    module.norm = nn.BatchNorm1d(DIM)
    return module


def dropout_forgotten():
    module = Attention()
    module.dropout = nn.Dropout(0.5)
    return module


def noise():
    """Another number at each call, of a generator that no seed reaches; less than rounding is."""
    generator = torch.Generator().manual_seed(0)
    return Attention(
        after=lambda m, output, *_: output * (1 + 1e-6 * torch.rand(1, generator=generator))
    )


def noisy_gradients():
    generator = torch.Generator().manual_seed(0)

    def before(module, tokens, mask):
        if tokens.requires_grad:
            tokens.register_hook(lambda g: g * (1 + torch.rand(1, generator=generator)))
        return tokens

    return Attention(before=before)


def positions(module, tokens, mask):
    places = torch.linspace(-1, 1, tokens.shape[1], device=tokens.device)
    return tokens + places[:, None].to(tokens)


def raises_in_training(module, tokens, mask):
    if module.training:
        raise RuntimeError("no kernel for this\nand a long second line")
    return tokens


ALWAYS_NOTED = {"causality", "padding_nonfinite"}
LEAKS = {"mask", "padding", "padding_appended"}

BROKEN = {
    # a module, and the checks that fail, each with a part of what the report must say
    "another dtype": (lambda: Attention(after=lambda m, output, *_: output.double()),
                      {"output": "torch.float32 on cpu in, torch.float64 on cpu out"}),
    "writes into its input": (lambda: Attention(before=lambda m, tokens, _: tokens.mul_(0.5)),
                              {"output": "the input was written into"}),
    "a weak mask": (
        lambda: Attention(lowered(3)),
        dict.fromkeys(LEAKS, "") | {"mask": "masked tokens are seen, though the mask changes"}),
    # enough for ordinary scores, which is how it goes unseen
    "a mask of a finite number": (
        lambda: Attention(lowered(100)),
        {"padding": "large values reach real tokens: "}),
    "no mask": (lambda: Attention(lambda m, scores, mask: scores.softmax(-1)),
                dict.fromkeys(LEAKS, "") | {"mask": "ignored"}),
    "a boolean mask as a number": (
        lambda: Attention(lambda m, scores, mask: (scores + mask).softmax(-1)),
        dict.fromkeys(LEAKS, "") | {"mask": "masked tokens are seen, though"}),
    "an inverted mask": (
        lambda: Attention(lambda m, scores, mask: softmax(m, scores, ~mask)),
        dict.fromkeys(LEAKS, "")
        | {"mask": "inverted", "mixing": "no output sees another token"}),
    "sees nothing": (
        lambda: Attention(lambda m, s, mask: softmax(m, s, mask & mask.all(-1, keepdim=True))),
        {"mask": "with a mask no token is seen", "padding_appended": "change the real"}),
    "rows of NaN": (
        lambda: Attention(lambda m, s, mask: s.masked_fill(~mask, -torch.inf).softmax(-1)),
        {"dead_rows": "NaN or infinite"}),
    "gradients of NaN": (
        lambda: Attention(lambda m, scores, mask: (
            scores + torch.where(mask, 0.0, -torch.inf)).softmax(-1).nan_to_num(0)),
        {"dead_rows": "finite, but gradients are NaN"}),
    "NaN that spreads": (
        lambda: Attention(before=lambda m, tokens, mask: tokens / (
            1.0 if mask is None else mask.any(-1).prod())),
        {"dead_rows": "it spreads: other items are not finite"}),
    # padding is another item's neighbour here, and is counted in the statistics
    "softmax over the batch": (
        lambda: Attention(lambda m, scores, mask: softmax(m, scores, mask) * scores.softmax(0)),
        {"batch": "an item differs by", "batch_training": "when the", "padding": ""}),
    "batch norm": (with_batch_norm,
                   {"batch_training": "an item differs by", "padding": "in training: "}),
    # nothing in the values; in the gradients, the other items
    "gradients across items": (
        lambda: Attention(after=lambda m, output, tokens, _: output + (
            tokens - tokens.detach()).mean(0)),
        {"batch": "sees the others, by gradients", "batch_training": "sees the"}),
    "counts the batch": (lambda: Attention(after=lambda m, output, tokens, _: output * len(tokens)),
                         {"batch": "an item alone differs by 6.7e-01"}),
    "counts the tokens": (
        lambda: Attention(after=lambda m, output, tokens, _: output * tokens.shape[1]),
        {"padding_appended": "two tokens of padding more change the real ones"}),
    # other shapes draw other dropout
    "dropout in eval": (
        lambda: Attention(lambda m, scores, mask: F.dropout(softmax(m, scores, mask), 0.5)),
        {"dropout": "eval: two calls differ", "batch": "", "padding_appended": ""}),
    "dropout that was forgotten": (
        dropout_forgotten, {"dropout": "dropout of dropout does nothing in training"}),
    "noise": (noise, {"determinism": "two outputs differ", "dropout": "eval: two calls differ"}),
    "noisy gradients": (noisy_gradients, {"determinism": "eval: two gradients differ"}),
}  # fmt: skip


def test_a_good_module_passes_every_check():
    report = attnkit.check_attention(Attention(), DIM, call=masked)
    assert [finding.check for finding in report] == list(CHECKS)
    verdicts = {finding.check: finding.verdict for finding in report}
    assert verdicts == {c: "note" if c in ALWAYS_NOTED else "pass" for c in CHECKS}, str(report)
    assert report
    assert report.failures == []


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_module_fails_the_checks_it_must_and_no_other(broken):
    make, expected = BROKEN[broken]
    report = attnkit.check_attention(make(), DIM, call=masked, num_tokens=5)
    assert {finding.check for finding in report.failures} == set(expected), str(report)
    for check, word in expected.items():
        assert word in report[check].seen, str(report)
    if broken == "a mask of a finite number":
        assert "other values" not in report["padding"].seen
    assert not report


@pytest.mark.parametrize(
    ("module", "verdict", "seen"),
    [
        (causal, "pass", "causal: no output sees a later token"),
        (
            lambda: causal(1),
            "fail",
            "not causal: 0 sees 1, 1 sees 2, 2 sees 3, 3 sees 4 and 2 more",
        ),
        (
            lambda: causal(
                after=lambda m, output, tokens, _: output + tokens.amax(1, keepdim=True).detach()
            ),
            "fail",
            "(by values, not by gradients)",
        ),
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
    report = attnkit.check_attention(Attention(before=positions), DIM, checks=["permutation"])
    assert report["permutation"].verdict == "note"
    assert "not equivariant" in report["permutation"].seen
    asked = {"checks": ["permutation"], "expect": {"permutation": "pass"}}
    attnkit.assert_attention(Attention(), DIM, **asked)
    with pytest.raises(AssertionError, match="permutation is note, expected pass"):
        attnkit.assert_attention(Attention(before=positions), DIM, **asked)


def test_dropout_is_random_in_training_only():
    dropped = Attention(lambda m, s, mask: F.dropout(softmax(m, s, mask), 0.5, m.training))
    report = attnkit.check_attention(dropped, DIM, call=masked)
    assert report, str(report)
    assert report["dropout"].seen == "eval repeats to the bit, training is random"
    seen = attnkit.check_attention(Attention(), DIM, checks=["dropout"])["dropout"].seen
    assert seen == "nothing is random; training equals eval to the bit"
    batch_norm = attnkit.check_attention(with_batch_norm(), DIM, checks=["dropout"])["dropout"]
    assert batch_norm.verdict == "note"
    assert "training differs from eval by" in batch_norm.seen


def test_mixing_finds_that_there_is_nothing_to_check():
    silent = Attention()
    nn.init.zeros_(silent.out.weight)
    report = attnkit.check_attention(silent, DIM, call=masked, checks=["mixing"])
    assert (
        report["mixing"].seen == "no output sees another token, so the other checks prove nothing"
    )
    assert not report
    report = attnkit.check_attention(causal(), DIM, checks=["mixing"])
    assert report["mixing"].seen == "an output sees 1 to 7 of 7 tokens"


def test_output_that_is_not_finite():
    overflows = Attention(after=lambda m, output, *_: output / 0)
    seen = attnkit.check_attention(overflows, DIM, checks=["output"])["output"].seen
    assert seen == "eval: not finite; training: not finite"


@pytest.mark.parametrize(
    ("module", "verdict", "seen"),
    [
        (Attention, "pass", "a constant (an output bias)"),
        (residual, "pass", "its own token alone (a residual or a self-loop)"),
        (lambda: Attention(lowest), "note", "a mean of the tokens that are masked"),
        (lambda: residual(lowest), "note", "sees the tokens that are masked"),
        (lambda: Attention(all_if_none), "note", "as if nothing were masked"),
        (
            lambda: Attention(after=zero_in_eval),
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
    report = attnkit.check_attention(Attention(before=raises_in_training), DIM, call=masked)
    assert report["output"].seen == "RuntimeError: no kernel for this"
    assert {finding.check for finding in report if finding.verdict == "pass"} == {
        "mixing", "permutation", "batch", "mask", "padding_appended",
    }  # fmt: skip
