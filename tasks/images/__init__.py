"""Reading images: files, folders, decoding, data sets and prediction, shared by the image tasks."""
