"""Reports on tests of graphs: where a model errs, and where it looks."""
