"""Gates, which scale a feature map by a map that is computed from it."""
