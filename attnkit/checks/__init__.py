"""Checks of any attention module, their report, and a helper for pytest."""

from attnkit.checks.report import DoctorReport, Fault, Finding, Report, Row, Verdict
from attnkit.checks.run import CHECKS, assert_attention, check_attention
from attnkit.checks.subject import Call, on_complete_graph

__all__ = [
    "CHECKS",
    "Call",
    "DoctorReport",
    "Fault",
    "Finding",
    "Report",
    "Row",
    "Verdict",
    "assert_attention",
    "check_attention",
    "on_complete_graph",
]
