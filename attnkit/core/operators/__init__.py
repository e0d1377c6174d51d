"""What torch has and a CPU computes faster otherwise; equal results."""
