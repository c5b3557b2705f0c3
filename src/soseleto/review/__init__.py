"""Manual review of a run's suspects: a page served on localhost, an append-only decision log, a corrected manifest.

Nothing is imported here, so that the page starts without torch: only ``manifest`` needs it.
"""
