"""Sweeps of many runs: trials, their record, launchers, resuming and retrying."""
