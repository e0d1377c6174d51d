"""Explanations as a page, a table and arrays: what `run=explain` leaves, for anyone's models."""

from attnkit.sight.report.findings import Findings
from attnkit.sight.report.report import Report

__all__ = ["Findings", "Report"]
