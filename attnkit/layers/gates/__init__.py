"""Gates: feature maps multiplied by what is computed from them."""
