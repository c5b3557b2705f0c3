"""How probably each source label is right, judged on features by classifiers that have not seen it."""
