"""Readers: the user's files, folders, tables and arrays, checked and converted to ``Examples``."""
