"""The doctor, which compares every attention that a machine can run with the definition."""
