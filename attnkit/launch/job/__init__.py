"""One run: decided, built, carried out, its folder written."""
