"""Prediction of whole graphs, or of nodes, in data of many graphs."""
