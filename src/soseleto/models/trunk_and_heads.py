"""Models around a network: trunk and heads, labels in their own unit, a learner on its features; and evaluation mode.

A learner is a scikit-learn classifier or regressor. A run folder keeps it as ``learner.skops``, which holds arrays and
names of classes and no code: unlike a pickle it cannot run anything when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from soseleto.errors import DataError, UsageError, first_line, need

TINY = 1e-12  # the probability of a class that the learner has not seen


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


# A learner on the features of a network


@contextmanager
def last_inputs(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collects the inputs of the model's last linear layer; the hook is removed at the end.

    Inputs (B, L, D) are averaged over the positions, so that the width is D at any padded length.
    """
    seen: list[Tensor] = []

    def keep(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        inputs = arguments[0].detach().float()
        seen.append(inputs.flatten(1, -2).mean(1) if inputs.ndim > 2 else inputs)

    layer = last_linear(model)
    handle = None if layer is None else layer.register_forward_pre_hook(keep)
    try:
        yield seen
    finally:
        if handle is not None:
            handle.remove()


def last_linear(model: nn.Module) -> nn.Linear | None:
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return linear[-1] if linear else None


def probabilities_of(learner: Any, features: np.ndarray, classes: int) -> np.ndarray:
    """(n, classes); a class that the learner was not trained on gets none."""
    probabilities = np.zeros((len(features), classes))
    probabilities[:, learner.classes_] = learner.predict_proba(features)
    return probabilities


class Learned(nn.Module):
    """``network`` up to its last linear layer, and there ``learner``: returns log probabilities (B, classes), or of a
    regressor values (B, 1)."""

    def __init__(self, network: nn.Module, learner: Any, classes: int) -> None:
        super().__init__()
        self.network, self.learner, self.classes = network, learner, classes

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        with last_inputs(self.network) as seen:
            outputs = self.network(*inputs, **named)
        place = outputs if isinstance(outputs, Tensor) else seen[0]
        features = torch.cat(seen).cpu().numpy()
        if not hasattr(self.learner, "predict_proba"):
            return torch.from_numpy(self.learner.predict(features)).float()[:, None].to(place.device)
        probabilities = torch.from_numpy(probabilities_of(self.learner, features, self.classes))
        return probabilities.clamp_min(TINY).log().float().to(place.device)


def to_bytes(learner: Any) -> bytes:
    skops = need("skops.io", to="storing a scikit-learn classifier")
    try:
        content: bytes = skops.dumps(learner)
    except Exception as error:  # what a class of the user's may raise is not known
        raise DataError(
            f"the learner {type(learner).__name__} cannot be stored ({first_line(error)}): give one of scikit-learn's "
            "own classes, or leave out=... away."
        ) from error
    return content


def from_bytes(content: bytes, name: str) -> Any:
    """Only classes of scikit-learn are built; a file that names any other is refused."""
    skops = need("skops.io", to="reading a scikit-learn classifier")
    unknown = skops.get_untrusted_types(data=content)
    if foreign := [kind for kind in unknown if not kind.startswith("sklearn.")]:
        raise DataError(f"{name} names {foreign[0]}, which is not of scikit-learn: it is not read.")
    return skops.loads(content, trusted=unknown)
