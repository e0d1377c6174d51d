"""The findings of the checks and of the doctor, and their tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

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


WHAT = (
    "output", "gradients", "causal", "padding", "batch", "repeats", "dead rows", "dropout",
    "memory", "new shape",
)  # fmt: skip
"""The columns of the table."""


@dataclass(frozen=True)
class Fault:
    """A fault ("fail"), or something worth knowing ("note").

    Args:
        attention: name of the attention, with its dtype and device.
        what: column of the table.
        seen: what was observed, as a sentence.
        program: a program that shows it; "" if there is none.
    """

    attention: str
    what: str
    verdict: str
    seen: str
    program: str = ""


@dataclass(frozen=True)
class Row:
    """One attention in one dtype on one device.

    num_cases: number of cases that it ran.
    cells: result by column: the worst difference relative to the largest value, or a word.
    """

    attention: str
    device: str
    dtype: str
    num_cases: int
    cells: Mapping[str, str]


@dataclass(frozen=True)
class DoctorReport:
    """The findings on all attentions of a machine: `print(report)`, `report.markdown()`.

    It is true if nothing is wrong; notes do not count.
    """

    machine: Mapping[str, str]
    rows: tuple[Row, ...]
    faults: tuple[Fault, ...]
    refused: Mapping[str, str]
    """Attentions that cannot run here, with their messages."""
    ledger: str
    """The file to which the findings are written, or why they are not."""
    seconds: float

    @property
    def failures(self) -> list[Fault]:
        return [fault for fault in self.faults if fault.verdict == "fail"]

    @property
    def passed(self) -> bool:
        return not self.failures

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        table = self._table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        return "\n".join([self._title(), "", *lines, "", *self._told("  ")])

    def markdown(self) -> str:
        """Return the report as Markdown, with programs, for an issue."""
        head, *body = self._table()
        rows = [head, ["---"] * len(head), *body]
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        return "\n".join([f"# {self._title()}", "", *lines, "", *self._told("", fence="```")])

    def as_dict(self) -> dict[str, Any]:
        """Return the report as numbers, lists and texts, for JSON."""
        return asdict(self) | {"passed": self.passed}

    def _title(self) -> str:
        said = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        return f"attnkit doctor: {said}"

    def _table(self) -> list[list[str]]:
        used = [what for what in WHAT if any(what in row.cells for row in self.rows)]
        table = [["attention", "device", "dtype", "cases", *used]]
        for row in self.rows:
            cells = [row.cells.get(what, "–") for what in used]
            table.append([row.attention, row.device, row.dtype, str(row.num_cases), *cells])
        return table

    def _told(self, indent: str, fence: str = "") -> Iterator[str]:
        for verdict, name in (("fail", "WRONG"), ("note", "note")):
            for fault in self.faults:
                if fault.verdict == verdict:
                    yield f"{name}: {fault.attention}: {fault.what}: {fault.seen}"
                    if fault.program and (verdict == "fail" or fence):
                        yield from _block(fault.program, indent, fence)
        number = len(self.failures)
        found = f"{number} wrong" if number else "nothing is wrong"
        asked = sum(row.num_cases for row in self.rows)
        if self.refused:
            yield f"cannot run here: {', '.join(self.refused)}"
        yield f"{found}: {len(self.rows)} attentions, {asked} cases, {self.seconds:.0f} s"
        yield self.ledger


def _block(program: str, indent: str, fence: str) -> Sequence[str]:
    lines = [indent + line for line in program.rstrip().splitlines()]
    return ["", *([fence + "python"] if fence else []), *lines, *([fence] if fence else []), ""]
