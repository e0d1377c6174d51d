"""The edges of a graph that a model's prediction depends on, and how far to trust them."""
