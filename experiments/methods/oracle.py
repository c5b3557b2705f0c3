"""Oracles: ordinary training on a source whose labels are repaired by the truth. They change the data, not the method.

``corrected`` gives every source example its true label; ``correct_only`` keeps the examples whose label is right, the
upper bound for weighting the source.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from soseleto.data import Examples
from soseleto.data.examples import truth_known
from soseleto.errors import DataError


def corrected(source: Examples) -> Examples:
    """Every example with its true label, and with its own where that is not known."""
    truth = _truth(source)
    return replace(source, labels=torch.where(truth_known(truth), truth, source.labels))


def correct_only(source: Examples) -> Examples:
    """The examples whose label is right."""
    return source.subset(source.labels == _truth(source))


def _truth(source: Examples) -> Tensor:
    if source.truth is None:
        raise DataError("an oracle needs the true labels, and this source has none: give Examples(..., truth=...).")
    return source.truth
