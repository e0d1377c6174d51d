"""What node classification leaves beside its averages: where it errs, and where it looks."""
