"""Which edges of a graph a model's answer depends on, and how far to trust that."""
