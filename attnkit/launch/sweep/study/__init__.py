"""Sweeps whose trials Optuna chooses."""
