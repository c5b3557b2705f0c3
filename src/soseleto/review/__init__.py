"""Manual review of a run's suspects: a page served on localhost, an append-only decision log, a corrected source."""
