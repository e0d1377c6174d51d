"""What a run would take (run=check) and how fast it is (run=bench)."""
