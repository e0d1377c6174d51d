"""Trials of a study: what they report, and when they are pruned."""
