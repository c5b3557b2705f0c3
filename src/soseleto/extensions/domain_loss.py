"""Losses that draw the trunk's features of source and target together: the next step that the paper proposes.

One is passed as a value, ``Soseleto(domain_loss=Coral(strength=1.0))``; any function from source features (B, d) and
target features (T, d) to a number will do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

# domain_loss(source features, target features) -> a number
DomainLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Coral:
    """Correlation alignment (Sun and Saenko 2016): strength · ‖C_s − C_t‖²_F / (4 d²), of covariances C."""

    strength: float = 1.0

    def __call__(self, source: Tensor, target: Tensor) -> Tensor:
        width = source.shape[1]
        return self.strength * (covariance(source) - covariance(target)).square().sum() / (4 * width * width)


def covariance(features: Tensor) -> Tensor:
    """(d, d) of features (B, d), with the divisor B − 1."""
    centred = features - features.mean(0)
    return centred.T @ centred / max(len(features) - 1, 1)
