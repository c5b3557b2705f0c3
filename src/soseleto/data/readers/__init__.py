"""Readers: files, folders, tables and arrays of the user's own, checked and turned into ``Examples``."""
