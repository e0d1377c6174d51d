"""Reading images: files, folders, decoding, data sets, prediction; shared by the tasks that do."""
