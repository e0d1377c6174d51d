"""What was found: one finding a check, and the table of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["pass", "fail", "note", "skipped"]
"""fail: wrong for any attention. note: found, and right or wrong by what the module is for.
skipped: could not be checked, `seen` says why."""

Outcome = tuple[Verdict, str]
"""What a check returns: its verdict and, in one line, what was seen."""


@dataclass(frozen=True)
class Finding:
    """One check's verdict, and in one line what was seen."""

    check: str
    verdict: Verdict
    seen: str


@dataclass(frozen=True)
class Report:
    """The findings on one module: `report["causality"].verdict`, `print(report)`.

    True where no check failed. Notes and skipped checks do not fail: read the table, or say in
    `attnkit.assert_attention(…, expect={check: verdict})` which verdict is yours.
    """

    subject: str
    findings: tuple[Finding, ...]

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == "fail"]

    @property
    def passed(self) -> bool:
        return not self.failures

    def __bool__(self) -> bool:
        return self.passed

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __getitem__(self, check: str) -> Finding:
        for finding in self.findings:
            if finding.check == check:
                return finding
        known = ", ".join(finding.check for finding in self.findings)
        raise KeyError(f"{check!r} was not checked; there are {known}")

    def __str__(self) -> str:
        rows = [("check", "verdict", "seen")]
        for finding in self.findings:
            # in capitals, so that it is found in a long log
            verdict = "FAIL" if finding.verdict == "fail" else finding.verdict
            rows.append((finding.check, verdict, finding.seen))
        width = max(len(check) for check, _, _ in rows)
        lines = [f"{check:<{width}}  {verdict:<7}  {seen}" for check, verdict, seen in rows]
        return "\n".join([self.subject, *lines])


def share(found: float) -> str:
    """A difference that is too large, in words."""
    return "NaN or infinity" if found == float("inf") else f"{found:.1e} of the largest value"


def within(found: float) -> str:
    """How equal: "to the bit", or within what."""
    return f"within {found:.0e}" if found else "to the bit"
