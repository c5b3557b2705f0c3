"""DivideMix: two networks that divide the source into right and wrong labels for each other."""

from experiments.methods.divide_mix.method import DivideMix

__all__ = ["DivideMix"]
