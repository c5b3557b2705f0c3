"""Going through a run's suspects by hand: a page on this machine only, decisions that survive, a corrected manifest.

The page starts without torch: only ``manifest`` needs it, so nothing is imported here.
"""
