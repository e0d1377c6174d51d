"""The mathematics of attention; needs torch alone."""
