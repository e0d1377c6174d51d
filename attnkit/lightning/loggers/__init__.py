"""Loggers for any Trainer."""
