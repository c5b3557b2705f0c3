"""Per-example label-quality signals of source examples and probes.

Recorded during training: score, weight, running mean loss and running margin. Computed at the end in one pass over the
source: the trained model's margin, and the votes of the nearest examples in the model's last features, once of the
trusted target and once of the source, where a vote counts by the example's learned weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soseleto.data import ExampleSet, generator
from soseleto.data.examples import in_pieces
from soseleto.data.structure import Inputs, label_margin
from soseleto.models.learned import last_inputs
from soseleto.suspects.probes import PlantedProbes

NEIGHBOURS = 20
SHARPNESS = 10.0  # an example votes with exp(SHARPNESS·cosine) times its weight
MOST_VOTERS = 10_000  # source examples, drawn at random where there are more
_CHUNK = 1000

Outputs = Callable[[Inputs], Tensor]  # from inputs as stored to the model's outputs (N, classes), on the CPU


@dataclass(frozen=True)
class Evidence:
    """Signals of n source examples followed by m probes; all on the CPU.

    signals: by name (n + m,), each a trust: the higher, the more probably the label is right
    labels: (n + m,) as given; probabilities: (n + m, classes) by the model; support: the mean of these and of the votes
    missing: classes without a target example
    """

    probes: PlantedProbes
    labels: Tensor
    signals: Mapping[str, Tensor]
    probabilities: Tensor
    support: Tensor
    missing: tuple[int, ...] = ()

    @property
    def n_source(self) -> int:
        return self.probes.n_source

    @property
    def judged(self) -> Tensor:
        """(n + m,) whether the probes say anything about an example: neither its label nor the class that it looks
        like is a missing one."""
        missing = torch.tensor(self.missing, dtype=torch.int64)
        return ~(torch.isin(self.labels, missing) | torch.isin(self.support.argmax(1), missing))

    @property
    def can_calibrate(self) -> bool:
        """Whether there are right and wrong probes, and examples to judge by them."""
        judged = self.judged
        wrong = self.probes.wrong.cpu()[judged[self.n_source :]]
        return bool(judged[: self.n_source].any() and wrong.any() and not wrong.all())


def gather(
    model: nn.Module,
    outputs: Outputs,
    source: ExampleSet,
    target: ExampleSet,
    probes: PlantedProbes,
    recorded: Mapping[str, Tensor],
    *,
    missing: tuple[int, ...] = (),
    seed: int = 0,
) -> Evidence:
    """Combine the signals ``recorded`` during training (trusts) with those computed from the trained model.

    source: with its probes; target: without them; missing: classes without a target example
    """
    labels = source.labels.cpu()
    weights = recorded.get("weight", torch.ones(len(labels))).cpu()
    voters = torch.randperm(probes.n_source, generator=generator(seed, "probes/voters"))[:MOST_VOTERS]
    with last_inputs(model) as seen:
        features, of_target = _features(target, in_pieces(len(target)), outputs, seen)
        classes = of_target.shape[1]
        trusted = Electorate.of(features, target.labels, torch.ones(len(target)), classes)
        features, _ = _features(source, voters.split(_CHUNK), outputs, seen)
        doubtful = Electorate.of(features, labels[voters], weights[voters], classes, places=voters)
        pieces = []
        everything = in_pieces(len(labels), _CHUNK)
        for places, (inputs, _) in zip(everything, source.read(everything), strict=True):
            features, found = features_of(inputs, outputs, seen)
            pieces.append((found.float(), trusted.votes(features, places), doubtful.votes(features, places)))
    scores, agreement, neighbours = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    signals = {
        **recorded,
        "final_margin": label_margin(scores, labels),
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
        missing=missing,
    )


def _features(
    examples: ExampleSet, pieces: Sequence[Tensor], outputs: Outputs, seen: list[Tensor]
) -> tuple[Tensor, Tensor]:
    found = [features_of(inputs, outputs, seen) for inputs, _ in examples.read(pieces)]
    features, scores = (torch.cat(parts) for parts in zip(*found, strict=True))
    return features, scores


def features_of(inputs: Inputs, outputs: Outputs, seen: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Last features and outputs; without a linear layer that takes one row per input the outputs serve as features."""
    seen.clear()
    found = outputs(inputs)
    features = torch.cat(seen) if seen else found
    return (features if len(features) == len(found) else found), found


@dataclass(frozen=True)
class Electorate:
    """Examples that vote on the class of others by similarity: the cosine of features centred at the voters' mean.

    places: the voters' indices in the source, so that none votes on itself; None for voters of another set
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
        """Vote shares (N, classes) of the k nearest, k half a class's mean size but at most NEIGHBOURS; on the CPU."""
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
