"""Blocks over tokens: Transformer blocks, patches, pooling, Nadaraya–Watson."""
