"""Attention that runs, seen whoever computes it: the tensors that go in and come out."""
