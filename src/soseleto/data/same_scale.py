"""Bytes from 0 to 255 and floats from 0 to 1 stand for the same image: inputs on the scale of the training's."""

from __future__ import annotations

import torch
from torch import Tensor

from soseleto.data.structure import Inputs
from soseleto.errors import DataError

_LARGEST = 1.5  # floats from 0 to 1 that were resized or augmented may be a little outside


def like_trained(inputs: Inputs, trained: torch.dtype | None, name: str) -> Inputs:
    """Inputs for a model of ``trained`` ones: whole numbers as bytes, if those were bytes; raises for another scale.

    trained: None where it is not known
    name: what the inputs are called in an error
    """
    if not isinstance(inputs, Tensor) or trained is None or inputs.dtype == trained or not inputs.numel():
        return inputs
    if trained == torch.uint8:
        return _as_bytes(inputs, name)
    if trained.is_floating_point and inputs.dtype == torch.uint8:
        if inputs.ndim > 2:
            raise DataError(
                f"{name} has bytes, but the model is trained on floats, whose scale may be another: give floats, such "
                "as images.float() / 255."
            )
        return inputs.to(torch.float32)
    return inputs


def _as_bytes(inputs: Tensor, name: str) -> Tensor:
    low, high = (float(value) for value in inputs.aminmax())
    if inputs.is_floating_point() and not (low < 1.0 - _LARGEST or high > _LARGEST):
        return inputs
    if low >= 0 and high <= 255 and bool((inputs == inputs.round()).all()):
        return inputs.to(torch.uint8)
    raise DataError(
        f"{name} has values from {low:.4g} to {high:.4g}, but the model is trained on bytes: give bytes (uint8), or "
        "floats from 0 to 1."
    )
