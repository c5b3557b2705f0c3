"""Alignments of source examples with the target gradient: several exact engines with one interface."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from soseleto.engines.auto import FASTEST_FIRST, AutoEngine, make_engine
from soseleto.engines.check_gradients import EngineReport, check_gradients
from soseleto.engines.interface import Direction, Engine, Losses, Passes, PerExampleLoss, trainable

__all__ = [
    "FASTEST_FIRST",
    "Direction",
    "Engine",
    "EngineReport",
    "Losses",
    "Passes",
    "PerExampleLoss",
    "alignment",
    "check_gradients",
    "make_engine",
    "trainable",
]

_ENGINES: dict[str, AutoEngine] = {}  # by name; each keeps its choices and proofs while the models exist


def alignment(
    model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Direction, engine: str | Engine = "auto"
) -> tuple[Tensor, Tensor]:
    """The inner product of each example's gradient with ``direction``.

    q_j = Σ_p ⟨∂ℓ_j/∂p, direction[p]⟩ over the parameters named in ``direction``.

    Args:
        model: any module; it is neither wrapped nor changed.
        per_example_loss: ``per_example_loss(model, batch) -> (B,)``, one loss per example.
        batch: passed to ``per_example_loss`` as it is.
        direction: parameter name -> tensor of that parameter's shape, such as a gradient of the target loss.
        engine: ``"auto"``, ``"layerwise"``, ``"forward"``, ``"double_backward"``, ``"loop"``, or an engine object;
            ``"auto"`` tries the engines on the first call, and again when the loss function, the modules' training
            flags or the set of trainable parameters changes.

    Returns:
        losses and alignments, both of shape (B,) and detached.

    Example:
        >>> import torch, torch.nn.functional as F
        >>> model = torch.nn.Linear(3, 2)
        >>> batch = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
        >>> direction = {name: torch.ones_like(p) for name, p in model.named_parameters()}
        >>> loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        >>> losses, q = alignment(model, loss, batch, direction)
        >>> q.shape
        torch.Size([4])
    """
    if not isinstance(engine, str):
        return engine(model, per_example_loss, batch, direction)
    if engine not in _ENGINES:
        _ENGINES[engine] = AutoEngine() if engine == "auto" else AutoEngine((make_engine(engine).name,))
    return _ENGINES[engine](model, per_example_loss, batch, direction)
