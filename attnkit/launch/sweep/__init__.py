"""Many runs: trials, their record, where they run, resuming and retrying."""
