"""The kernels, a file for each name of `backend=`, and how one is chosen and recorded."""
