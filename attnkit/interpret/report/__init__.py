"""Explanations as a page, a table and arrays: what `run=explain` leaves, for anyone's models."""

from attnkit.interpret.report.findings import Findings
from attnkit.interpret.report.report import Report

__all__ = ["Findings", "Report"]
