"""What speaks for and against the label of every source example and probe, once a training has ended.

Gathered while training: score, weight, running mean loss and running margin. Looked up at the end in one pass: the
trained model's outputs, and the votes of the nearest trusted examples in the model's last features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soseleto.data import Examples
from soseleto.probes import Probes

NEIGHBOURS = 20
SHARPNESS = 10.0  # a trusted example votes with the softmax of SHARPNESS·cosine
_CHUNK = 1000

Outputs = Callable[[Tensor], Tensor]  # from inputs as they are stored to the model's outputs (N, classes), on the CPU


@dataclass(frozen=True)
class Evidence:
    """Signals of n source examples and, behind them, m probes; all on the CPU.

    signals: by name (n + m,), each a trust: the higher, the more the label is believed
    labels: (n + m,) as given; probabilities, votes: (n + m, classes), of the model and of the nearest trusted examples
    """

    probes: Probes
    labels: Tensor
    signals: Mapping[str, Tensor]
    probabilities: Tensor
    votes: Tensor

    @property
    def n_source(self) -> int:
        return self.probes.n_source


def gather(
    model: nn.Module,
    outputs: Outputs,
    source: Examples,
    target: Examples,
    probes: Probes,
    recorded: Mapping[str, Tensor],
) -> Evidence:
    """Put what was ``recorded`` while training (trusts) beside what the trained model says.

    source: the source with its probes; target: without them.
    """
    labels = source.labels.cpu()
    with _last_inputs(model) as seen:
        features, scores = _look(target.inputs, outputs, seen)
        trusted = _Trusted.of(features, target.labels.to(features.device), scores.shape[1])
        pieces = [_look(piece, outputs, seen) for piece in source.inputs.split(_CHUNK)]
        votes = torch.cat([trusted.votes(features).cpu() for features, _ in pieces])
    scores = torch.cat([scores for _, scores in pieces]).float()
    at_end = {"final_margin": _margin(scores, labels), "agreement": votes.gather(1, labels[:, None]).squeeze(1)}
    signals = {name: signal.detach().float().cpu() for name, signal in {**recorded, **at_end}.items()}
    return Evidence(probes, labels, signals, scores.softmax(1), votes)


def _look(inputs: Tensor, outputs: Outputs, seen: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Last features and outputs; the outputs stand for features where no linear layer saw these rows."""
    seen.clear()
    found = outputs(inputs)
    features = torch.cat(seen).flatten(1) if seen else found
    return (features if len(features) == len(found) else found), found


@contextmanager
def _last_inputs(model: nn.Module) -> Iterator[list[Tensor]]:
    """Gathers what the model's last linear layer is given; the hook is gone at the end."""
    seen: list[Tensor] = []
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    handles = [
        m.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach().float())) for m in linear[-1:]
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class _Trusted:
    """The target's last features, of length 1 around their mean, and its labels as one-hot rows."""

    features: Tensor
    one_hot: Tensor
    middle: Tensor

    @classmethod
    def of(cls, features: Tensor, labels: Tensor, classes: int) -> _Trusted:
        middle = features.mean(0)
        return cls(F.normalize(features - middle), F.one_hot(labels, classes).float(), middle)

    def votes(self, features: Tensor) -> Tensor:
        """The shares (N, classes) of the k nearest by cosine, k being half a class but at most NEIGHBOURS."""
        n, classes = self.one_hot.shape
        k = max(1, min(NEIGHBOURS, n // (2 * classes)))
        near = (F.normalize(features - self.middle) @ self.features.T).topk(k)
        return ((SHARPNESS * near.values).softmax(1)[:, :, None] * self.one_hot[near.indices]).sum(1)


def _margin(outputs: Tensor, labels: Tensor) -> Tensor:
    """The label's output minus the largest other one."""
    others = outputs.scatter(1, labels[:, None], float("-inf")).amax(1)
    return outputs.gather(1, labels[:, None]).squeeze(1) - others
