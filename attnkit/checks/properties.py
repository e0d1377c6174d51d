"""The checks of any attention: invariances, randomness and the mask."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from attnkit.checks.report import Outcome, Verdict, share, within
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


SEEDS = 16  # number of equal calls in training after which nothing counts as random
RUNS = 3


def dropout(subject: Subject) -> Outcome:
    """Check that eval repeats, and that training is random with dropout, else equal to eval."""
    first = subject.output(subject.tokens)
    found = difference(subject.output(subject.tokens, seed=1), first)
    if found:
        return "fail", f"eval: two calls differ by {share(found)}"
    trained = subject.output(subject.tokens, mode="training")
    for seed in range(1, SEEDS):
        if difference(subject.output(subject.tokens, mode="training", seed=seed), trained):
            return "pass", "eval repeats to the bit, training is random"
    if layers := _layers_with_dropout(subject.module):
        return "fail", f"dropout of {', '.join(layers)} does nothing in training"
    found = difference(trained, first)
    if found <= subject.tolerance:
        return "pass", f"nothing is random; training equals eval {within(found)}"
    return "note", f"nothing is random, but training differs from eval by {share(found)}"


def determinism(subject: Subject) -> Outcome:
    """Check that the same seed and input give bit-identical output and gradients."""
    used = subject.output(subject.tokens)
    first = {mode: subject.gradients(None, mode) for mode in MODES}
    for _ in range(RUNS - 1):
        if found := difference(subject.output(subject.tokens), used):
            return "fail", f"eval: two outputs differ by {share(found)}"
        for mode, (output, gradients) in first.items():
            again, gradients_again = subject.gradients(None, mode)
            if found := difference(again, output):
                return "fail", f"{mode}: two outputs differ by {share(found)}"
            if found := max(map(difference, gradients_again, gradients)):
                return "fail", f"{mode}: two gradients differ by {share(found)}"
    return "pass", f"{RUNS} runs of one seed: outputs and gradients equal to the bit"


def _layers_with_dropout(module: nn.Module) -> list[str]:
    found = []
    for name, child in module.named_modules():
        names = ["p"] if isinstance(child, _DropoutNd) else ["dropout", "dropout_p"]
        values = (getattr(child, attribute, 0) for attribute in names)
        if any(isinstance(value, float) and value > 0 for value in values):
            found.append(name or "the module")
    return found


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
