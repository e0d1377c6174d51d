"""Objects from configuration, and which of them a file may name."""
