"""Weights of examples that no step has seen yet, from the alignments that their features let one expect.

    u = q / rms of the batch's q, cut at ±3
    m(x) = b + ⟨w, x⟩                          ridge regression of u on the features x, over all visits so far
    α_b ← CLIP[0,1](m/s),  s = Σm₊²/Σm₊        before the batch's passes

A weight that moves by its example's own alignment acts from the next visit on. In one or two epochs over a large pool
that is too late or hardly in time; texts that are alike, though, have alignments that are alike. Of all weightings with
the same Σα², α ∝ E[u] gives the batch's gradient the largest expected alignment, hence m itself and no threshold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from soseleto.data.batches import Batch, generator
from soseleto.errors import UsageError
from soseleto.pieces.piece import Alignment, Piece, State, Step
from soseleto.task.task import Task

CUT = 3.0  # alignments are heavy-tailed
RIDGE = 4.0  # penalty for each feature of variance 1: that of a prior by which all together explain a fifth of u
OWN = 0.2  # of a score: texts of use have alignments of both signs, so that a single one says little
ITERATIONS = 10  # from the last step's solution: on embeddings of texts within 2 % of the exact one
LARGEST = 1024  # features; more are projected onto as many random directions
_TINY = 1e-12


@dataclass(frozen=True)
class from_features(Piece):
    """Weights are those that an example's features let one expect; scores are that and a part of its own alignments.

    The features are ``Selection(features=...)``; ``SoseletoTrainer`` takes the mean embedding of a text's tokens. The
    weight of an example is the one that it was last trained with; until the first alignments are known it is 1.

    Example:
        >>> from soseleto import Soseleto
        >>> from soseleto.pieces import preconditioned
        >>> method = Soseleto(direction=preconditioned(), alignment=from_features())
    """

    slot: ClassVar[str] = "alignment"

    def init(self, task: Task) -> State:
        if task.features is None:
            raise UsageError(
                "from_features needs features of the source examples: write Selection(..., features=...), a matrix "
                "with one row per example, or a function of a batch."
            )
        sums = torch.zeros(2, dtype=torch.float64, device=task.device)  # Σm₊² and Σm₊
        return {"moments": {}, "sums": sums}

    def before(self, rows: Tensor, state: State, source: Batch, task: Task) -> None:
        if not state["moments"]:
            return
        expected = _expected(_features(task, source), state["moments"]).clamp_min(0.0)
        sums = torch.stack([expected.square().sum(), expected.sum()])
        state["sums"].add_(task.sharing.sum(sums))
        of_squares, total = state["sums"].unbind()
        rows[0].copy_((expected * total / of_squares.clamp_min(_TINY)).clamp_max(1.0))

    def update(self, value: Alignment, state: State, step: Step) -> Alignment:
        task, x, moments = step.task, _features(step.task, step.source), state["moments"]
        q = value.scaled.double()
        size = (task.sharing.sum(torch.dot(q, q)) / step.source.total).sqrt()
        u = (q / size.clamp_min(torch.finfo(torch.float32).tiny)).clamp(-CUT, CUT)
        z = torch.cat([torch.ones_like(u)[:, None], x, u[:, None]], dim=1)
        if not moments:
            moments |= {"all": z.new_zeros(z.shape[1], z.shape[1]), "w": z.new_zeros(x.shape[1])}
        expected = _expected(x, moments)
        moments["all"].add_(task.sharing.sum(z.T @ z))
        moments["w"].copy_(_coefficients(moments["all"], moments["w"]))
        return Alignment(q=torch.lerp(expected, u, OWN).to(value.q.dtype), gate=0.0)


def _expected(x: Tensor, moments: Mapping[str, Tensor]) -> Tensor:
    """m(x), from the moments Σzzᵀ of z = (1, x, u)."""
    mean = moments["all"][0, 1:] / moments["all"][0, 0].clamp_min(1.0)
    return mean[-1] + (x - mean[:-1]) @ moments["w"]


def _coefficients(moments: Tensor, w: Tensor) -> Tensor:
    """The ridge regression's, by conjugate gradients from w: cheaper than to factorise in every step."""
    n = moments[0, 0]
    mean = moments[0, 1:] / n
    spread = moments[1:, 1:] / n - torch.outer(mean, mean)  # of x and u
    size = spread.diagonal()[:-1].clamp_min(_TINY).sqrt()
    a = spread[:-1, :-1] / torch.outer(size, size)
    a.diagonal().add_(RIDGE * len(w) / n)
    w = w * size
    left = spread[:-1, -1] / size - a @ w
    p, squared = left, left.dot(left)
    for _ in range(ITERATIONS):
        ap = a @ p
        by = squared / p.dot(ap).clamp_min(torch.finfo(torch.float64).tiny)
        w, left = w + by * p, left - by * ap
        before, squared = squared, left.dot(left)
        p = left + squared / before.clamp_min(torch.finfo(torch.float64).tiny) * p
    return w / size


def _features(task: Task, source: Batch) -> Tensor:
    """(B, d) in float64, d at most ``LARGEST``."""
    assert task.features is not None
    x = task.features(source).detach().double()
    if x.ndim != 2 or len(x) != len(source):
        raise UsageError(
            f"features have shape {tuple(x.shape)} for {len(source)} examples: give one row of numbers per example."
        )
    if x.shape[1] > LARGEST:
        x = x @ _directions(x.shape[1], x.device)
    return x


@lru_cache(maxsize=2)
def _directions(width: int, device: torch.device) -> Tensor:
    """Random ones, kept, since they are used in every step, and a CUDA graph cannot copy them to the GPU."""
    drawn = torch.randn(width, LARGEST, generator=generator(0, "features", width))
    return drawn.to(device, torch.float64) / math.sqrt(LARGEST)
