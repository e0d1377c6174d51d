"""Sliding windows, along a line and on a grid."""
