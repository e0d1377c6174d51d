"""Complete checkpoints, signals, and exact resuming."""
