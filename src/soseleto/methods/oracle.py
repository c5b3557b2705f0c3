"""The oracle is not a method but a change of the data: whoever knows the truth trains ordinarily on better labels.

``corrected`` gives every source example its right label; ``correct_only`` keeps the examples whose label is right,
which is the best that any weighing of the source could reach by itself.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from soseleto.data import Examples
from soseleto.errors import DataError


def corrected(source: Examples) -> Examples:
    """Every example with its right label."""
    return replace(source, labels=_truth(source))


def correct_only(source: Examples) -> Examples:
    """The examples whose label is right."""
    return source.subset(source.labels == _truth(source))


def _truth(source: Examples) -> Tensor:
    if source.truth is None:
        raise DataError("an oracle needs the right labels, and this source has none: give Examples(..., truth=...).")
    return source.truth
