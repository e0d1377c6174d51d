"""What gives each token, or each place of an image, a number: one family a file."""
