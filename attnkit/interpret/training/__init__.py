"""Looking at a model while it trains, in tests and in predictions: callbacks."""
