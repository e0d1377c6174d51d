"""Measures of what each attention layer and head does, taken in one pass."""
