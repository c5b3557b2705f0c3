"""``soseleto.compare``: a training beside its baselines."""
