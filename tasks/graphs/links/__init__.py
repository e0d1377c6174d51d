"""Link prediction: which pairs of nodes of a graph are joined by an edge."""
