"""The findings of the checks, and their table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["pass", "fail", "note", "skipped"]
"""fail: wrong for any attention. note: right or wrong depending on the purpose of the module.
skipped: could not be checked; `seen` has the reason."""

Outcome = tuple[Verdict, str]
"""The result of a check: its verdict and, in one line, what was observed."""


@dataclass(frozen=True)
class Finding:
    """The verdict of a check, and in one line what was observed."""

    check: str
    verdict: Verdict
    seen: str


@dataclass(frozen=True)
class Report:
    """The findings on one module: `report["causality"].verdict`, `print(report)`.

    It is true if no check failed. Notes and skipped checks do not fail: read the table, or state
    the expected verdicts in `attnkit.assert_attention(…, expect={check: verdict})`.
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
            # capitals are easy to find in a long log
            verdict = "FAIL" if finding.verdict == "fail" else finding.verdict
            rows.append((finding.check, verdict, finding.seen))
        width = max(len(check) for check, _, _ in rows)
        lines = [f"{check:<{width}}  {verdict:<7}  {seen}" for check, verdict, seen in rows]
        return "\n".join([self.subject, *lines])


def share(found: float) -> str:
    """Return a difference that is too large, in words."""
    return "NaN or infinity" if found == float("inf") else f"{found:.1e} of the largest value"


def within(found: float) -> str:
    """Return the precision of an equality, in words: "to the bit" or "within …"."""
    return f"within {found:.0e}" if found else "to the bit"
