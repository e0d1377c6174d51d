"""Whole graphs: what a model learns of each graph of many."""
