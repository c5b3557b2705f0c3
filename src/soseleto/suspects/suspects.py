"""Suspects: source examples that are probably mislabelled, with an estimated error rate.

    result = soseleto.fit(model, source, target, probes="auto")
    found = result.suspects(precision=0.95)

A regression on the probes' signals gives each source example a calibrated probability of being mislabelled, and each
threshold on it an estimate of precision and recall.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from soseleto.data import seed_for
from soseleto.errors import UsageError
from soseleto.suspects import calibration
from soseleto.suspects.calibration import EARLIER_LABELS, ESTIMATED_MISTAKES, RANDOM_MISTAKES, Estimate, Rectifier
from soseleto.suspects.probes import PlantedProbes
from soseleto.suspects.signals import Evidence

RESAMPLES = 100
MOST_RESAMPLED = 20_000  # source examples on which shares and intervals are computed
Array = np.ndarray


class Calibration(Protocol):
    """What makes suspects of any precision; ``n_known`` labels are known to be right or wrong."""

    @property
    def basis(self) -> str: ...
    @property
    def n_known(self) -> int: ...
    def at(self, threshold: float) -> Suspects: ...
    def for_precision(self, precision: float) -> Suspects: ...


@dataclass(frozen=True, repr=False)
class Suspects:
    """Every source example's probability of being mislabelled, and those at or above ``threshold``.

    probability: (n,) float32, NaN where it is unknown, since the example is labelled as a class without target examples
        or looks like one; suggested: (n,) int64, the class with the most support among those of the target that are
        not the given label; is_suspect: (n,) bool
    precision, recall: of the suspects, estimated by the probes; wrong_share: share of wrong labels in the whole source.
        All three are about the examples that have a probability.
    """

    probability: Tensor
    suggested: Tensor
    threshold: float
    is_suspect: Tensor
    precision: Estimate
    recall: Estimate
    wrong_share: Estimate
    calibrated: Calibration

    def at(self, threshold: float) -> Suspects:
        """The suspects and estimates at another threshold."""
        return self.calibrated.at(threshold)

    @property
    def basis(self) -> str:
        """What the estimates rest on, one of the constants in calibration.py."""
        return self.calibrated.basis

    def __len__(self) -> int:
        """The number of suspects."""
        return int(self.is_suspect.sum())

    @property
    def highest(self) -> float:
        """The highest probability of any example, an upper bound on precision."""
        return float(self.probability[~self.probability.isnan()].max())

    @property
    def unknown(self) -> int:
        """The number of examples without a probability."""
        return int(self.probability.isnan().sum())

    def __str__(self) -> str:
        if len(self) == 0:
            return (
                f"no suspects of {len(self.probability):,} (the highest probability is {self.highest:.2f}), "
                f"wrong labels in all {self.wrong_share} ({self.basis})"
            )
        return (
            f"{len(self):,} suspects of {len(self.probability):,} (probability {self.threshold:.2f} or more): "
            f"precision {self.precision}, recall {self.recall}, wrong labels in all {self.wrong_share} ({self.basis})"
        )

    def __repr__(self) -> str:
        return f"<Suspects: {self}>"

    def to_dict(self) -> dict[str, Any]:
        """The summary that a run folder stores."""
        return {
            "basis": self.basis,
            "probability_basis": self.basis,
            "threshold": self.threshold,
            "count": len(self),
            "n_source": len(self.probability),
            "unknown": self.unknown,
            "n_known": self.calibrated.n_known,
            "precision": self.precision.to_dict(self.basis),
            "recall": self.recall.to_dict(self.basis),
            "wrong_share": self.wrong_share.to_dict(self.basis),
        }


@dataclass(frozen=True, eq=False)
class FromProbes:
    """What a run with probes knows about the labels of its source."""

    gathered: Evidence

    @property
    def predicted(self) -> Tensor:
        """(n,) the model's label of every source example."""
        return self.gathered.probabilities[: self.gathered.n_source].argmax(1)

    def calibrated(self, seed: int) -> Calibrated:
        return Calibrated.learn(self.gathered, seed)


@dataclass(frozen=True, eq=False)
class Calibrated:
    """Probabilities learned on the probes.

    Regressions on bootstrap samples of the probes give RESAMPLES probabilities per example; their mean is the
    probability and their spread its uncertainty. Errors of the regression's form are counted on the probes.

    probability: (j,) of the j source examples that are judged; resampled: (RESAMPLES, k), at the indices ``places``
        (k,) of these
    counted: rates counted on the probes, each judged by the regressions made without it
    """

    evidence: Evidence
    probability: Array
    resampled: Array
    places: Array
    counted: Rectifier

    @classmethod
    def learn(cls, evidence: Evidence, seed: int = 0) -> Calibrated:
        probes, judged = evidence.probes, evidence.judged.numpy()
        of_source, of_probes = np.split(judged, [evidence.n_source])
        n = int(of_source.sum())
        signals = np.stack([signal.double().numpy() for signal in evidence.signals.values()], axis=1)
        features = calibration.standardized(signals[judged], n)
        known, wrong, source = features[n:], probes.wrong.cpu().numpy()[of_probes], calibration.with_one(features[:n])
        draw = np.random.default_rng(seed_for(seed, "probes/resample"))
        places = np.sort(draw.choice(n, min(n, MOST_RESAMPLED), replace=False))
        redrawn = [_redraw(wrong, draw) for _ in range(RESAMPLES)]
        betas = np.stack([calibration.log_ratio(known[at], wrong[at]) for at in redrawn], axis=1)
        unseen = np.stack([~np.isin(np.arange(len(wrong)), at) for at in redrawn], axis=1)
        betas = calibration.tempered(betas, known, wrong, unseen)
        ratios = source[places] @ betas
        shares = _shares(ratios, probes, draw)
        pieces = np.array_split(source, 1 + n // 10_000)
        mean = [calibration.posterior(piece @ betas, shares).mean(axis=1) for piece in pieces]
        probability = np.concatenate(mean)
        at_probes = calibration.posterior(calibration.with_one(known) @ betas, shares)
        without = np.average(at_probes, axis=1, weights=unseen + 1e-12)  # a probe in every sample: the mean of all
        counted = Rectifier.draw(probability, without, wrong, RESAMPLES, draw, probes.checked, probes.share)
        return cls(evidence, probability, calibration.posterior(ratios, shares).T, places, counted)

    @property
    def n_known(self) -> int:
        return len(self.evidence.probes)

    @property
    def basis(self) -> str:
        """Whether wrong probes carry real mistakes, those that the data suggest, or random ones."""
        probes = self.evidence.probes
        if probes.checked is not None:
            return EARLIER_LABELS
        return RANDOM_MISTAKES if probes.share is None else ESTIMATED_MISTAKES

    @cached_property
    def wrong_share(self) -> Estimate:
        """As counted on the target if its earlier labels are known, else the mean probability."""
        resampled = [self.resampled.mean(axis=1), self.counted.wrong_shares(self.probability)]
        if (interval := self.evidence.probes.share) is not None:
            resampled.append(np.repeat(interval, 50))
        checked = self.evidence.probes.checked
        value = self.probability.mean() if checked is None else checked[1] / checked[0]
        return Estimate.of(float(value), *resampled)

    @cached_property
    def suggestion(self) -> Tensor:
        """(n,) the class of the target, other than the label, with the most support by model and neighbours."""
        n = self.evidence.n_source
        support = self.evidence.support[:n].clone()
        support[:, list(self.evidence.missing)] -= 2.0
        return support.scatter(1, self.evidence.labels[:n, None], -3.0).argmax(1)

    def at(self, threshold: float) -> Suspects:
        if not 0.0 <= threshold <= 1.0:
            raise UsageError(f"the threshold is a probability between 0 and 1, got {threshold}.")
        chosen = self.probability >= threshold
        judged = self.evidence.judged[: self.evidence.n_source]
        probability = torch.full((len(judged),), torch.nan)
        probability[judged] = torch.from_numpy(self.probability.astype(np.float32))
        is_suspect = judged.clone()
        is_suspect[judged] = torch.from_numpy(chosen)
        precision, recall = _rates(self.probability[None], chosen)
        resampled = [_rates(self.resampled, chosen[self.places])]
        if chosen.any():
            resampled.append(self.counted.rates(self.probability, threshold))
        else:
            resampled.append((np.repeat([0.0, 1.0], 50), np.zeros(1)))  # without suspects, precision is undetermined
        return Suspects(
            probability=probability,
            suggested=self.suggestion,
            threshold=threshold,
            is_suspect=is_suspect,
            precision=Estimate.of(float(precision[0]), *(precisions for precisions, _ in resampled)),
            recall=Estimate.of(float(recall[0]), *(recalls for _, recalls in resampled)),
            wrong_share=self.wrong_share,
            calibrated=self,
        )

    def for_precision(self, precision: float) -> Suspects:
        """As many suspects as possible: the lowest threshold at which the estimated precision is the requested one."""
        if not 0.0 < precision < 1.0:
            raise UsageError(f"precision must lie between 0 and 1, got {precision}: for 95 % say 0.95.")
        ordered = np.sort(self.probability)[::-1]
        # The mean of the highest probabilities falls with their number, so the entries that reach it come first.
        reached = np.cumsum(ordered) / np.arange(1, len(ordered) + 1) >= precision
        last_of_equals = np.append(ordered[1:] < ordered[:-1], True)  # a threshold takes equal probabilities together
        ends = np.flatnonzero(reached & last_of_equals)
        if len(ends):
            return self.at(float(ordered[ends[-1]]))
        expected = round(self.wrong_share.value * len(ordered))  # none reaches it: as many as are expected to be wrong
        return self.at(float(ordered[expected - 1]) if expected else 1.0)


def _shares(ratios: Array, probes: PlantedProbes, draw: np.random.Generator) -> Array:
    """The share of wrong labels in the source, (RESAMPLES,).

    If it was counted on the target, the count is resampled; otherwise it is the maximum-likelihood share of the source
    as a mixture of right and wrong probes, within the interval of the estimated mistakes if there is one.
    """
    if probes.checked is not None:
        of, wrong = probes.checked
        return draw.binomial(of, wrong / of, RESAMPLES) / of
    shares = np.array([calibration.share_of(ratio) for ratio in ratios.T])
    return shares if probes.share is None else np.clip(shares, *probes.share)


def _rates(probability: Array, chosen: Array) -> tuple[Array, Array]:
    """Expected precision and recall of the chosen ones, for each row of probabilities; 1 and 0 where none is chosen."""
    found = probability[:, chosen].sum(axis=1)
    precision = found / chosen.sum() if chosen.any() else np.ones(len(probability))
    return precision, found / np.maximum(probability.sum(axis=1), 1e-12)


def _redraw(wrong: Array, draw: np.random.Generator) -> Array:
    """A bootstrap sample of the probes: right and wrong ones are each drawn with replacement."""
    kinds = (np.flatnonzero(wrong), np.flatnonzero(~wrong))
    return np.concatenate([draw.choice(kind, len(kind)) for kind in kinds])
