"""`check_attention` and `assert_attention` run all checks on one module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

from torch import nn

from attnkit.checks import properties
from attnkit.checks.report import Finding, Outcome, Report, Verdict
from attnkit.checks.subject import Call, Subject, default_call

Check = Callable[[Subject], Outcome]

_NEED_NO_MASK: tuple[Check, ...] = (
    properties.output,
    properties.mixing,
    properties.permutation,
    properties.causality,
    properties.batch,
    properties.batch_training,
    properties.dropout,
    properties.determinism,
)
_NEED_A_MASK: tuple[Check, ...] = (
    properties.mask,
    properties.padding,
    properties.padding_nonfinite,
    properties.padding_appended,
    properties.dead_rows,
)
_CHECKS = {check.__name__: check for check in (*_NEED_NO_MASK, *_NEED_A_MASK)}

CHECKS = tuple(_CHECKS)
"""The names of the checks, in the order of the report."""


def check_attention(
    module: nn.Module,
    dim: int,
    *,
    call: Call | None = None,
    causal: bool = False,
    checks: Sequence[str] | None = None,
    num_tokens: int = 7,
    tolerance: float | None = None,
    seed: int = 0,
) -> Report:
    """Check any attention module for what every attention should do, and report the findings.

        report = attnkit.check_attention(
            nn.MultiheadAttention(64, 4, batch_first=True), dim=64,
            call=lambda module, x, mask: module(x, x, x, key_padding_mask=~mask)[0],
        )
        print(report)

    The module runs on three items of random tokens, in its own dtype and on its own device, in
    training and in evaluation mode. "a sees b" means that the gradient of output a at token b is
    not zero.

    | check              | what is checked                                                      |
    |--------------------|----------------------------------------------------------------------|
    | output             | finite, dtype and device kept, the input not written into            |
    | mixing             | outputs see other tokens, else the other checks prove nothing        |
    | permutation        | note: whether permuted tokens permute the output                     |
    | causality          | `causal=True`: no output sees a later token; else a note             |
    | batch              | eval: other items, and how many they are, change nothing             |
    | batch_training     | training: other items change nothing                                 |
    | dropout            | eval repeats; dropout that a layer declares is felt in training      |
    | determinism        | one seed: one output, one gradient, to the bit                       |
    | mask               | True = may look, and a masked token is not seen                      |
    | padding            | other and large values at masked tokens change nothing               |
    | padding_nonfinite  | note: whether NaN and infinity there reach the real tokens           |
    | padding_appended   | two tokens of padding more change nothing                            |
    | dead_rows          | an item all masked: finite output and gradients; says what it is     |

    If the module raises, that check fails with the exception, and the others still run. Modes,
    buffers, `.grad` and torch's random state are restored afterwards; other state, such as a plain
    attribute, is not.

    Args:
        module: the module, on the device and in the dtype to check. Random weights are best: an
            output projection or a layer scale that starts at 0 hides all dependencies.
        dim: channels of a token.
        call: function of `(module, tokens)`, or for the checks of the mask of
            `(module, tokens, mask)`, that returns an output [batch, tokens, channels]. tokens
            [batch, tokens, dim]; mask boolean [batch, tokens], True = a real token. None: attnkit's
            MultiHeadAttention, torch's MultiheadAttention, TransformerEncoderLayer and
            TransformerEncoder are called with the mask, any other module as `module(tokens)`. For
            graph modules there is `attnkit.checks.on_complete_graph`.
        causal: whether outputs may not see later tokens.
        checks: the names of some checks; None: all, `attnkit.checks.CHECKS`.
        num_tokens: number of tokens, at least 4.
        tolerance: allowed difference if sums may be taken in another order, relative to the
            largest value; None: eps^¾ of the dtype, 6e-6 in float32.
        seed: seed of the tokens and of the dropout.

    Raises:
        TypeError, ValueError: an argument is wrong, or `call` does not return such an output.
    """
    _check_arguments(module, dim, num_tokens, tolerance)
    chosen = _chosen(checks)
    subject = Subject(
        module,
        dim,
        default_call(module) if call is None else call,
        causal=causal,
        num_tokens=num_tokens,
        tolerance=tolerance,
        seed=seed,
    )
    title = f"{type(module).__name__}, {subject.dtype} on {subject.device}, {num_tokens} tokens"
    with subject.borrowed():
        subject.check_call()
        findings = tuple(Finding(name, *_outcome(_CHECKS[name], subject)) for name in chosen)
    return Report(title, findings)


def assert_attention(
    module: nn.Module, dim: int, *, expect: Mapping[str, Verdict] | None = None, **options: Any
) -> Report:
    """Run `check_attention` in a test; raise an AssertionError unless the module passes.

        attnkit.assert_attention(MyAttention(64), dim=64, expect={"permutation": "pass"})

    Args:
        module, dim: as in `check_attention`.
        expect: the verdict that a check must have, "pass", "fail", "note" or "skipped". A check
            that is not named must not fail.
        options: the further arguments of `check_attention`.

    Raises:
        AssertionError: a check does not have the expected verdict, or fails.
        TypeError, ValueError: as `check_attention`.
    """
    expected = dict(expect or {})
    _check_names("expect", expected, _chosen(options.get("checks")))
    for check, verdict in expected.items():
        if verdict not in get_args(Verdict):
            raise ValueError(
                f"expect: {check}: expected one of {get_args(Verdict)}, got {verdict!r}"
            )
    report = check_attention(module, dim, **options)
    wrong = []
    for finding in report:
        wanted = expected.get(finding.check)
        if finding.verdict != wanted if wanted else finding.verdict == "fail":
            wrong.append(f"{finding.check} is {finding.verdict}, expected {wanted or 'no failure'}")
    if wrong:
        raise AssertionError("\n".join([*wrong, "", str(report)]))
    return report


def _outcome(check: Check, subject: Subject) -> Outcome:
    if check in _NEED_A_MASK and not subject.takes_mask:
        return "skipped", "the call takes no mask"
    try:
        return check(subject)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        return "fail", f"{type(error).__name__}: {first}"


def _chosen(checks: Sequence[str] | None) -> tuple[str, ...]:
    if checks is None:
        return CHECKS
    if isinstance(checks, str):
        raise TypeError(f"checks: expected a list of names, got the string {checks!r}")
    _check_names("checks", checks, CHECKS)
    return tuple(checks)


def _check_names(argument: str, given: Iterable[str], known: Sequence[str]) -> None:
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{argument}: {unknown[0]!r} is none of {', '.join(known)}")


def _check_arguments(module: nn.Module, dim: int, num_tokens: int, tolerance: float | None) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    if dim < 1:
        raise ValueError(f"dim: expected at least 1, got {dim}")
    if num_tokens < 4:
        raise ValueError(f"num_tokens: expected at least 4, got {num_tokens}")
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"tolerance: expected at least 0, got {tolerance}")
