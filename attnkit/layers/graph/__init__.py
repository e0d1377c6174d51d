"""Attention over the nodes of a graph."""
