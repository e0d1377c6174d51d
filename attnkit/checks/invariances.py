"""Checks without a mask: shapes, causality, order of tokens, independence of batch items."""

from __future__ import annotations

import torch
from torch import Tensor

from attnkit.checks.report import Outcome, share, within
from attnkit.checks.subject import MODES, Mode, Subject, difference, own, within_items


def output(subject: Subject) -> Outcome:
    """Check that outputs are finite, keep dtype and device, and that the input is not changed."""
    problems = []
    for mode in MODES:
        tokens = subject.tokens
        result = subject.output(tokens, mode=mode)
        if (result.dtype, result.device) != (tokens.dtype, tokens.device):
            given, got = (f"{t.dtype} on {t.device}" for t in (tokens, result))
            problems.append(f"{mode}: {given} in, {got} out")
        if not result.isfinite().all():
            problems.append(f"{mode}: not finite")
        if not torch.equal(tokens, subject.tokens):
            problems.append(f"{mode}: the input was written into")
    if problems:
        return "fail", "; ".join(problems)
    return "pass", f"{list(tokens.shape)} to {list(result.shape)}, {result.dtype}, finite"


def mixing(subject: Subject) -> Outcome:
    """Check that outputs see other tokens; otherwise the other checks would prove nothing."""
    sees = within_items(subject.sees())
    if not (sees & ~own(sees)).any():
        return "fail", "no output sees another token, so the other checks prove nothing"
    numbers = sees.sum(dim=-1)
    least, most = int(numbers.min()), int(numbers.max())
    span = f"{most}" if least == most else f"{least} to {most}"
    return "pass", f"an output sees {span} of {subject.num_tokens} tokens"


def permutation(subject: Subject) -> Outcome:
    """Check whether permuted tokens give the permuted output."""
    generator = torch.Generator().manual_seed(subject.seed)
    shuffled = torch.randperm(subject.num_tokens, generator=generator)
    # relative positions may not change under a mirror image or a shift, but do under a swap
    swapped = torch.arange(subject.num_tokens)
    swapped[:2] = torch.tensor([1, 0])
    before = subject.output(subject.tokens)
    found = max(
        difference(subject.output(subject.tokens[:, order]), before[:, order])
        for order in (shuffled.to(subject.device), swapped.to(subject.device))
    )
    if found <= subject.tolerance:
        return "pass", f"permuted tokens, permuted output {within(found)}"
    return "note", f"not equivariant: the output differs by {share(found)} (positions?)"


def causality(subject: Subject) -> Outcome:
    """Check that no output depends on later tokens, by gradients and by values."""
    leaks = torch.zeros(subject.num_tokens, subject.num_tokens, dtype=torch.bool)
    for mode in MODES:
        leaks |= within_items(subject.sees(mode=mode)).any(dim=0).cpu().triu(1)
    by_gradient = int(leaks.sum())
    # a detached dependency, or one without a gradient, shows only in values
    before = subject.output(subject.tokens)
    for first in range(1, subject.num_tokens):
        changed = subject.tokens
        changed[:, first:] = subject.others[:, first:]
        after = subject.output(changed)
        for i in range(first):
            if not leaks[i, first:].any() and not subject.is_close(after[:, i], before[:, i]):
                leaks[i, first] = True
    if not leaks.any():
        return ("pass" if subject.causal else "note"), "causal: no output sees a later token"
    how = "" if by_gradient else " (by values, not by gradients)"
    return ("fail" if subject.causal else "note"), f"not causal: {_pairs(leaks)}{how}"


def batch(subject: Subject) -> Outcome:
    """Check that in eval an item's output does not depend on other items, nor on their number."""
    verdict, seen = _neighbours(subject, "eval")
    alone = max(
        difference(subject.output(subject.tokens[item : item + 1]), together[None])
        for item, together in enumerate(subject.output(subject.tokens))
    )
    if alone > subject.tolerance:
        return "fail", f"{seen}; an item alone differs by {share(alone)}"
    return verdict, f"{seen}; alone, equal {within(alone)}"


def batch_training(subject: Subject) -> Outcome:
    """Check that in training an item's output does not depend on the other items."""
    return _neighbours(subject, "training")


def _pairs(leaks: Tensor) -> str:
    pairs = leaks.nonzero().tolist()
    if len(pairs) == len(leaks) * (len(leaks) - 1) // 2:
        return "every output sees every later token"
    named = ", ".join(f"{i} sees {j}" for i, j in pairs[:4])
    return f"{named} and {len(pairs) - 4} more" if len(pairs) > 4 else named


def _neighbours(subject: Subject, mode: Mode) -> Outcome:
    before = subject.output(subject.tokens, mode=mode)
    found = 0.0
    for item in range(len(before)):
        changed = subject.others
        changed[item] = subject.tokens[item]
        # same shape, same seed: the same dropout
        after = subject.output(changed, mode=mode)
        found = max(found, difference(after[item], before[item]))
    sees = subject.sees(mode=mode).any(dim=3).any(dim=1)
    if found > subject.tolerance:
        return "fail", f"an item differs by {share(found)} when the others do"
    if (sees & ~own(sees)).any():
        return "fail", "an item sees the others, by gradients"
    return "pass", f"other neighbours, equal {within(found)}"
