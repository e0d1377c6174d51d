"""Watching the attention of any model while it runs; nothing is changed."""
