"""The run folder: the files a training writes, and reading them."""
