"""Campaigns against the files of a run: flipped bytes, a full disk at every write, kills at any moment of ``fit``."""
