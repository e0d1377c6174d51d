"""Base classes of the tasks' LightningModules, and their optimizers."""
