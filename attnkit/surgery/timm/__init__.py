"""Attention of timm that keeps its own projections and forward, around our `attend`."""
