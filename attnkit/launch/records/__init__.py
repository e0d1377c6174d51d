"""Records of results: what conf/experiment says of published figures, and running it again."""
