"""Image files to pixels: the rules, the worker processes that apply them, and a cache of what they gave."""
