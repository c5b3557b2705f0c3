"""``fit`` and its loop."""
