"""Graphs in files: a user's own, and OGB's folders as published."""
