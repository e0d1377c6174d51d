"""Checkpoints that are whole, signals, and going on exactly where a run stopped."""
