"""Explanations of graph models by edges, and their fidelity."""
