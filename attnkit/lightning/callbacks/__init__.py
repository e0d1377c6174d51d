"""Callbacks for any Trainer."""
