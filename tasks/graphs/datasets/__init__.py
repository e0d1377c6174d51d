"""Data modules of graphs: data sets of others, synthetic ones, and the user's own files."""
