"""Per-example gradients of biases and of the affine parameters of norms, for all layers together.

Each layer has few of these, so they are concatenated into one matrix S with a row per example. One product then gives
the alignments, S g, and one the gradients, Sᵀ c, instead of several operations per layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from soseleto.engines.layerwise.call import Call
from soseleto.engines.shards import whole


class SmallGradients:
    """``add`` is called during the backward, ``gradient`` and ``alignment`` at its end."""

    def __init__(self) -> None:
        self._columns: dict[str, Tensor] = {}  # (rows, ...) each
        self._dtypes: dict[str, torch.dtype] = {}
        self._matrix: Tensor | None = None

    @property
    def keys(self) -> list[str]:
        """The names of the parameters, and the keys of what is derived from parameters."""
        return list(self._columns)

    def add(self, call: Call) -> None:
        for name, each in call.small_gradients().items():
            self._columns[name] = self._columns[name] + each if name in self._columns else each
        self._dtypes |= {name: call.arguments[k].dtype for k, name in call.names.items()}

    def gradient(self, coefficients: Tensor | None, rows: slice) -> dict[str, Tensor]:
        """Σ_j c_j ∂ℓ_j/∂P over the chosen rows, by parameter name; c = 1 by default."""
        if not self._columns:
            return {}
        chosen = self._all()[rows]
        total = chosen.sum(0) if coefficients is None else torch.mv(chosen.T, coefficients.to(chosen.dtype))
        parts = total.split([each[0].numel() for each in self._columns.values()])
        return {
            name: part.view(each.shape[1:]).to(self._dtypes[name])
            for (name, each), part in zip(self._columns.items(), parts, strict=True)
        }

    def alignment(self, direction: Mapping[str, Tensor], rows: slice) -> Tensor | None:
        """⟨∂ℓ_j/∂P, direction⟩ of the chosen rows, over the parameters in ``direction``; None if it has none."""
        named = [name for name in self._columns if name in direction]
        if not named:
            return None
        matrix = self._all() if len(named) == len(self._columns) else self._of(named)
        along = [whole(direction[name]).flatten().to(matrix.dtype) for name in named]
        return torch.mv(matrix[rows], torch.cat(along))

    def _all(self) -> Tensor:
        """S, built at the first use."""
        if self._matrix is None:
            self._matrix = self._of(self._columns)
        return self._matrix

    def _of(self, names: Iterable[str]) -> Tensor:
        """The columns of S for these parameters."""
        columns = (self._columns[name] for name in names)
        return torch.cat([each.reshape(len(each), each[0].numel()) for each in columns], 1)
