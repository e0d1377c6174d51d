"""Image captioning: encoders of images, decoders of words, search."""
