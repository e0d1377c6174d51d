"""Turns a command line into one plain, checked configuration, with Hydra and without torch."""
