"""Observes any attention that runs: its input and output tensors."""
