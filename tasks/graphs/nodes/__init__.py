"""Nodes: what a model learns of each node, of one graph or of many."""
