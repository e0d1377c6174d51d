"""Attention over feature maps [batch, channels, height, width]."""
