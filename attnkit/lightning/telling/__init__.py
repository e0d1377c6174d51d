"""What a run says while it runs: its data, its steps, its epochs."""
