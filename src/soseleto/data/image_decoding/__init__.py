"""Image files to pixels: the decoding rules, the worker processes that run them, and a cache of their output."""
