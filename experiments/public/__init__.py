"""The public data sets in their official file formats."""

from experiments.public.sets import NAMES, data_root, load

__all__ = ["NAMES", "data_root", "load"]
