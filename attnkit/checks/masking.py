"""Checks of the mask: which tokens are seen, values of padding, and fully masked items."""

from __future__ import annotations

import torch
from torch import Tensor

from attnkit.checks.report import Outcome, Verdict, share, within
from attnkit.checks.subject import MODES, Mode, Subject, difference, own, within_items

DEAD = 1  # the fully masked item is between two others, which would show a spread to either side
NOT_FINITE: Outcome = ("fail", "NaN or infinite")


def mask(subject: Subject) -> Outcome:
    """Check by gradients that the tokens seen are those where the mask is True."""
    lengths = subject.lengths()
    # without the first item, which has no padding: an inverted mask would hide all its tokens
    sees, real = within_items(subject.sees(lengths))[1:], lengths[1:]
    sees = sees & ~own(sees)
    sees_kept = (sees & real[:, None, :]).any()
    sees_masked = sees & ~real[:, None, :]
    if not (sees_masked & real[:, :, None]).any() and sees_kept:
        return "pass", "True = may look: real tokens see real ones, and none that is masked"
    if sees_masked.any() and not sees_kept:
        return "fail", "inverted: masked tokens are seen, real ones are not (True = may not look)"
    if not sees_masked.any():
        return "fail", "with a mask no token is seen"
    masked, plain = subject.output(subject.tokens, lengths), subject.output(subject.tokens)
    if torch.equal(masked, plain):
        return "fail", "ignored: with it and without it the output is the same to the bit"
    return "fail", "masked tokens are seen, though the mask changes the output"


def padding(subject: Subject) -> Outcome:
    """Check that other values at masked tokens, and large ones, do not change the real tokens."""
    large = subject.others * min(1e4, torch.finfo(subject.dtype).max ** 0.25)
    return _padded_with(subject, {"other": subject.others, "large": large}, "fail")


def padding_nonfinite(subject: Subject) -> Outcome:
    """Check whether NaN and infinity at masked tokens change the real tokens.

    It is a note if they do, since 0 · NaN is NaN in every product of weights and values.
    """
    empty = torch.empty_like(subject.tokens)
    values = {"NaN": empty.fill_(torch.nan), "infinite": torch.full_like(empty, torch.inf)}
    return _padded_with(subject, values, "note")


def padding_appended(subject: Subject) -> Outcome:
    """Check that appended padding changes nothing; in eval, since dropout would differ."""
    short = subject.tokens[:, :-2]
    whole = subject.tokens
    real = subject.everything()
    real[:, -2:] = False
    found = difference(subject.output(whole, real)[:, :-2], subject.output(short))
    if found > subject.tolerance:
        return "fail", f"two tokens of padding more change the real ones by {share(found)}"
    return "pass", f"two tokens of padding more, equal {within(found)}"


def dead_rows(subject: Subject) -> Outcome:
    """Check that a fully masked item has finite outputs and gradients, as have the other items.

    It is a note if the item sees masked tokens, or differs between training and evaluation.
    """
    nowhere = subject.everything()
    nowhere[DEAD] = False
    outputs: dict[str, Tensor] = {}
    found: dict[str, Outcome] = {}
    for mode in MODES:
        outputs[mode], gradients = subject.gradients(nowhere, mode)
        if all(gradient.isfinite().all() for gradient in gradients):
            found[mode] = _what_it_is(subject, outputs[mode], nowhere, mode)
        elif outputs[mode].isfinite().all():
            found[mode] = "fail", "finite, but gradients are NaN or infinite"
        else:
            found[mode] = NOT_FINITE
    used = subject.output(subject.tokens, nowhere)
    if not subject.is_close(used, outputs["eval"]) and _value(used) != found["eval"]:
        # another code path ran without gradients
        outputs["eval without gradients"] = used
        found["eval without gradients"] = _value(used)
    where: dict[str, list[str]] = {}
    for name, (_, word) in found.items():
        where.setdefault(word, []).append(name)
    differ = len(where) > 1
    seen = "; ".join(f"{', '.join(where[word])}: {word}" if differ else word for word in where)
    verdicts = [verdict for verdict, _ in found.values()]
    if not all(output[[0, 2]].isfinite().all() for output in outputs.values()):
        return "fail", f"{seen}; it spreads: other items are not finite"
    if "fail" in verdicts:
        return "fail", seen
    return ("note" if differ or "note" in verdicts else "pass"), seen


def _padded_with(subject: Subject, values: dict[str, Tensor], verdict: Verdict) -> Outcome:
    lengths = subject.lengths()
    worst = 0.0
    problems = []
    for name, value in values.items():
        found = {}
        for mode in MODES:
            padded = torch.where(lengths[..., None], subject.tokens, value)
            after = subject.output(padded, lengths, mode)[lengths]
            found[mode] = difference(after, subject.output(subject.tokens, lengths, mode)[lengths])
        worst = max(worst, *found.values())
        wrong = [mode for mode in MODES if found[mode] > subject.tolerance]
        if wrong:
            where = "" if len(wrong) == len(MODES) else f" in {wrong[0]}"
            problems.append(f"{name} values reach real tokens{where}: {share(max(found.values()))}")
    if problems:
        return verdict, "; ".join(problems)
    return "pass", f"{' and '.join(values)} values at masked tokens, equal {within(worst)}"


def _what_it_is(subject: Subject, output: Tensor, nowhere: Tensor, mode: Mode) -> Outcome:
    row = output[DEAD]
    if not row.isfinite().all() or not row.any():
        return _value(output)
    sees = within_items(subject.sees(nowhere, mode))[DEAD]
    if not sees.any():
        return "pass", "a constant (an output bias)"
    if not (sees & ~own(sees)).any():
        return "pass", "its own token alone (a residual or a self-loop)"
    if subject.is_close(row, subject.output(subject.tokens, mode=mode)[DEAD]):
        return "note", "as if nothing were masked"
    if subject.is_close(row, row[:1].expand_as(row)):
        return "note", "a mean of the tokens that are masked"
    return "note", "sees the tokens that are masked"


def _value(output: Tensor) -> Outcome:
    row = output[DEAD]
    if not row.isfinite().all():
        return NOT_FINITE
    return "pass", "another value" if row.any() else "exactly 0"
