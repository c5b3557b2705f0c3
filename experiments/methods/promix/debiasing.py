"""Against imbalanced pseudo-labels: the classes that a network predicts too often are made harder, p̃ their shares.

pseudo-label:  softmax(z − α log p̃)
margin loss:   ℓ(y, z) = −Σ_c y_c log softmax(z + α log p̃)_c
p̃ ← m p̃ + (1 − m)·mean of the batch's p, of its labelled images and of its others apart
"""

from __future__ import annotations

from torch import Tensor

from soseleto.methods.teacher import SMALLEST


def pseudo_labels(scores: Tensor, shares: Tensor, strength: float) -> Tensor:
    """(..., C) probabilities of the debiased scores; ``shares`` (..., C) is p̃, ``strength`` α."""
    return (scores - strength * _log(shares, scores)).softmax(-1)


def margin_loss(scores: Tensor, classes: Tensor, shares: Tensor, strength: float) -> Tensor:
    """ℓ (..., R) of scores, class shares y and p̃, all (..., R, C)."""
    return -(classes * (scores + strength * _log(shares, scores)).log_softmax(-1)).sum(-1)


def learn_shares(shares: Tensor, p: Tensor, rows: Tensor, memory: float) -> None:
    """Move p̃ (C,) towards the mean of p (B, C) over the marked rows (B,); it stays where there are none."""
    marked = rows.to(shares.dtype)
    count = marked.sum()
    mean = marked @ p.to(shares.dtype) / count.clamp(min=1.0)
    shares += (1.0 - memory) * (count > 0).to(shares.dtype) * (mean - shares)


def _log(shares: Tensor, scores: Tensor) -> Tensor:
    return shares.clamp(min=SMALLEST).log().to(scores.dtype)
