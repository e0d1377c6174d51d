"""Connections between nodes that are far apart, at a cost linear in the nodes."""
