"""Looking at modules while they run: weights, multiply-adds; nothing is changed."""
