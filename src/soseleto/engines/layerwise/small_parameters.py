"""Biases and the affine parts of norms: their per-example gradients, from all layers, used at once.

Each is a few numbers per example, so the layers' own are gathered side by side in one matrix S of a row per example;
then one product gives alignments, S g, and one gives gradients, Sᵀ c, where every layer would ask for several.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from soseleto.engines.layerwise.tape import Call
from soseleto.engines.shards import whole


class SmallGradients:
    """Gathered while the backward passes the layers; ``gradient`` and ``alignment`` are asked at its end."""

    def __init__(self) -> None:
        self._columns: dict[str, Tensor] = {}  # (rows, ...) each
        self._dtypes: dict[str, torch.dtype] = {}
        self._matrix: Tensor | None = None

    def add(self, call: Call) -> None:
        for name, each in call.small_gradients().items():
            self._columns[name] = self._columns[name] + each if name in self._columns else each
        self._dtypes |= {name: call.arguments[k].dtype for k, name in call.names.items()}

    def gradient(self, coefficients: Tensor | None, rows: slice) -> dict[str, Tensor]:
        """Σ_j c_j ∂ℓ_j/∂P over the chosen rows, by parameter name; c = 1 where none are given."""
        if not self._columns:
            return {}
        chosen = self._whole()[rows]
        total = chosen.sum(0) if coefficients is None else torch.mv(chosen.T, coefficients.to(chosen.dtype))
        parts = total.split([each[0].numel() for each in self._columns.values()])
        return {
            name: part.view(each.shape[1:]).to(self._dtypes[name])
            for (name, each), part in zip(self._columns.items(), parts, strict=True)
        }

    def alignment(self, direction: Mapping[str, Tensor], rows: slice) -> Tensor | None:
        """⟨∂ℓ_j/∂P, direction⟩ of the chosen rows, over the parameters the direction names; None if it names none."""
        if not self._columns.keys() & direction.keys():
            return None
        matrix = self._whole()
        along = [
            whole(direction[name]).flatten().to(matrix.dtype)
            if name in direction
            else matrix.new_zeros(each[0].numel())
            for name, each in self._columns.items()
        ]
        return torch.mv(matrix[rows], torch.cat(along))

    def _whole(self) -> Tensor:
        if self._matrix is None:
            self._matrix = torch.cat([each.flatten(1) for each in self._columns.values()], 1)
        return self._matrix
