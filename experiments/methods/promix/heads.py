"""The two networks of ProMix, each with an auxiliary head on the features that its classifier takes."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from experiments.methods.two_networks import Networks, anew
from soseleto.data.structure import scores_of
from soseleto.errors import UsageError


class NetworksWithHeads(Networks):
    """Both networks and their auxiliary heads; to evaluate, the classifiers answer alone."""

    def __init__(self, first: nn.Module, classes: int) -> None:
        super().__init__(first)
        self._classifiers = [classifier(network, classes) for network in self.both]
        self.heads = nn.ModuleList(anew(one) for one in self._classifiers)

    def with_head(self, k: int, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of network k by its classifier and by its auxiliary head, both (B, C)."""
        with _InputOf(self._classifiers[k].weight) as features:
            scores = scores_of(self.both[k](inputs))
        if features.found is None:
            raise UsageError("ProMix adds a head beside the classifier: let a linear layer end the model.")
        return scores, self.heads[k](features.found)


def classifier(network: nn.Module, classes: int) -> nn.Linear:
    """The last linear layer of the network with one output per class."""
    found = [one for one in network.modules() if isinstance(one, nn.Linear) and one.out_features == classes]
    if not found:
        raise UsageError(
            f"ProMix adds a head beside the classifier, and the model has no linear layer of {classes} outputs: "
            "let one end the model."
        )
    return found[-1]


class _InputOf(TorchFunctionMode):
    """Records the input of the linear layer with this weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self._weight = weight
        self.found: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and args[1] is self._weight:
            self.found = args[0]
        return func(*args, **(kwargs or {}))
