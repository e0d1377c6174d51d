"""The doctor: every attention that a machine can run, held to the definition."""
