"""Models around a network: trunk and heads of transfer mode, labels in their own unit; and evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from soseleto.errors import UsageError


class TrunkAndHeads(nn.Module):
    """θ, φˢ and φᵗ: a representation and two classifiers. ``forward`` uses the target head."""

    def __init__(self, trunk: nn.Module, source_head: nn.Module, target_head: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.source_head = source_head
        self.target_head = target_head

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        return self.target_head(self.trunk(*inputs, **named))


class InUnits(nn.Module):
    """A network of one output, which is about 0 ± 1, in the unit of labels that are numbers."""

    def __init__(self, network: nn.Module, labels: Tensor | None = None) -> None:
        super().__init__()
        labels = torch.tensor([-1.0, 1.0]) if labels is None else labels.float()
        self.network = network
        self.register_buffer("label_mean", labels.mean())
        self.register_buffer("label_deviation", labels.std(correction=0).clamp_min(1e-12))

    label_mean: Tensor
    label_deviation: Tensor

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        outputs = self.network(*inputs, **named)
        return getattr(outputs, "logits", outputs) * self.label_deviation + self.label_mean


def feature_width(trunk: nn.Module, forward: Callable[[nn.Module], Any]) -> int:
    """The number of features that the trunk returns, found by one forward pass in evaluation mode."""
    with evaluation_mode(trunk), torch.no_grad():
        features = forward(trunk)
    if not isinstance(features, Tensor) or features.ndim != 2:
        got = f"shape {tuple(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
        raise UsageError(f"in transfer mode the model is the trunk and must return (B, features), got {got}.")
    return features.shape[1]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode, and give every module its own training flag back afterwards.

    ``model.train()`` would not do: a user may keep some modules, such as a frozen BatchNorm, in evaluation mode.
    """
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training
