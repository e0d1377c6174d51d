"""Layers over tokens: Transformer blocks, patch embedding, pooling, Nadaraya–Watson."""
