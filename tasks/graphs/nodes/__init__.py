"""Prediction of nodes, in one graph or in many."""
