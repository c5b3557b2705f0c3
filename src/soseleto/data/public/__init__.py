"""The public data sets in their official file formats."""

from soseleto.data.public.sets import NAMES, data_root, load

__all__ = ["NAMES", "data_root", "load"]
