"""What each layer and head of attention does, measured in one pass."""
