"""Estimates the time and memory of a run (run=check), and benchmarks it (run=bench)."""
