"""Explanations of any model as a page, a table and arrays, which `run=explain` writes."""

from attnkit.interpret.report.findings import Findings
from attnkit.interpret.report.report import Report

__all__ = ["Findings", "Report"]
