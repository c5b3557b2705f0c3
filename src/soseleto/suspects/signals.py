"""What speaks for and against the label of every source example and probe, once a training has ended.

Gathered while training: score, weight, running mean loss and running margin. Looked up at the end in one pass over the
source: the trained model's margin, and how the nearest examples in the model's last features vote, once those of the
target, which are trusted, and once those of the source, each counted by its learned weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soseleto.data import Examples, generator
from soseleto.suspects.probes import PlantedProbes

NEIGHBOURS = 20
SHARPNESS = 10.0  # an example votes with exp(SHARPNESS·cosine) times its weight
MOST_VOTERS = 10_000  # source examples, drawn at random where there are more
_CHUNK = 1000

Outputs = Callable[[Tensor], Tensor]  # from inputs as they are stored to the model's outputs (N, classes), on the CPU


@dataclass(frozen=True)
class Evidence:
    """Signals of n source examples and, behind them, m probes; all on the CPU.

    signals: by name (n + m,), each a trust: the higher, the more the label is believed
    labels: (n + m,) as given; probabilities: (n + m, classes) by the model; support: the mean of these and of the votes
    """

    probes: PlantedProbes
    labels: Tensor
    signals: Mapping[str, Tensor]
    probabilities: Tensor
    support: Tensor

    @property
    def n_source(self) -> int:
        return self.probes.n_source


def gather(
    model: nn.Module,
    outputs: Outputs,
    source: Examples,
    target: Examples,
    probes: PlantedProbes,
    recorded: Mapping[str, Tensor],
    *,
    seed: int = 0,
) -> Evidence:
    """Put what was ``recorded`` while training (trusts) beside what the trained model says.

    source: the source with its probes; target: without them.
    """
    labels = source.labels.cpu()
    weights = recorded.get("weight", torch.ones(len(labels))).cpu()
    voters = torch.randperm(probes.n_source, generator=generator(seed, "probes/voters"))[:MOST_VOTERS]
    with _last_inputs(model) as seen:
        features, of_target = _look(target.inputs, outputs, seen)
        classes = of_target.shape[1]
        trusted = Electorate.of(features, target.labels, torch.ones(len(target)), classes)
        features, _ = _look(source.inputs[voters.to(source.device)], outputs, seen)
        doubtful = Electorate.of(features, labels[voters], weights[voters], classes, places=voters)
        pieces = []
        for places in torch.arange(len(labels)).split(_CHUNK):
            features, found = _look(source.inputs[places[0] : places[-1] + 1], outputs, seen)
            pieces.append((found.float(), trusted.votes(features, places), doubtful.votes(features, places)))
    scores, agreement, neighbours = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    signals = {
        **recorded,
        "final_margin": _margin(scores, labels),
        "agreement": _of_label(agreement, labels),
        "neighbours": _of_label(neighbours, labels),
    }
    probabilities = scores.softmax(1)
    return Evidence(
        probes=probes,
        labels=labels,
        signals={name: signal.detach().float().cpu() for name, signal in signals.items()},
        probabilities=probabilities,
        support=(probabilities + agreement + neighbours) / 3,
    )


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

    def see(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        seen.append(given[0].detach().float())

    handles = [module.register_forward_pre_hook(see) for module in linear[-1:]]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Electorate:
    """Examples that vote on the class of others by their nearness: cosine around their mean feature.

    places: where they stand in the source, so that none votes on itself; None for examples of another set
    """

    features: Tensor
    ballots: Tensor  # (N, classes): the weight in the column of the label
    middle: Tensor
    places: Tensor | None = None

    @classmethod
    def of(
        cls, features: Tensor, labels: Tensor, weights: Tensor, classes: int, places: Tensor | None = None
    ) -> Electorate:
        device, middle = features.device, features.mean(0)
        ballots = F.one_hot(labels.to(device), classes) * weights.to(device)[:, None]
        return cls(F.normalize(features - middle), ballots.float(), middle, places)

    def votes(self, features: Tensor, places: Tensor) -> Tensor:
        """Shares (N, classes) of the k nearest, k being half a class but at most NEIGHBOURS; on the CPU."""
        n, classes = self.ballots.shape
        k = max(1, min(NEIGHBOURS, n // (2 * classes)))
        cosine = F.normalize(features - self.middle) @ self.features.T
        if self.places is not None:
            cosine.masked_fill_((places[:, None] == self.places).to(cosine.device), -2.0)
        near = cosine.topk(k)
        counted = ((SHARPNESS * (near.values - 1.0)).exp()[:, :, None] * self.ballots[near.indices]).sum(1)
        return (counted / counted.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)).cpu()


def _of_label(values: Tensor, labels: Tensor) -> Tensor:
    return values.gather(1, labels[:, None]).squeeze(1)


def _margin(outputs: Tensor, labels: Tensor) -> Tensor:
    """The label's output minus the largest other one."""
    others = outputs.scatter(1, labels[:, None], float("-inf")).amax(1)
    return _of_label(outputs, labels) - others
