"""Methods that give each token, or each place of an image, a number; one family per file."""
