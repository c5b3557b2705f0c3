"""One trunk with a head for each side, as transfer mode trains it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from soseleto.errors import UsageError


class TrunkAndHeads(nn.Module):
    """θ, φˢ and φᵗ: a representation with a classifier for each side. Called, it answers for the target."""

    def __init__(self, trunk: nn.Module, source_head: nn.Module, target_head: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.source_head = source_head
        self.target_head = target_head

    def forward(self, inputs: Tensor) -> Tensor:
        return self.target_head(self.trunk(inputs))


def feature_width(trunk: nn.Module, inputs: Tensor) -> int:
    """The number of features the trunk gives, found by one forward that leaves the trunk as it was."""
    was = {name: module.training for name, module in trunk.named_modules()}
    trunk.eval()
    try:
        with torch.no_grad():
            features = trunk(inputs[:1])
    finally:
        for name, module in trunk.named_modules():
            module.training = was[name]
    if not isinstance(features, Tensor) or features.ndim != 2:
        got = f"shape {tuple(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
        raise UsageError(f"in transfer mode the model is the trunk and must return (B, features), got {got}.")
    return features.shape[1]
