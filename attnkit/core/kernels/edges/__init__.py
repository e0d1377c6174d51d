"""Attention over the edges of a graph, by torch's operators and by Triton."""
