"""Checks of any attention module, their report, and a helper for pytest."""

from attnkit.checks.calls import Call, on_complete_graph
from attnkit.checks.doctor.report import DoctorReport, Fault, Row
from attnkit.checks.report import Finding, Report, Verdict
from attnkit.checks.run import CHECKS, assert_attention, check_attention

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
