"""Suspects: source examples that are probably mislabelled, with an estimated error rate.

    found = soseleto.scan(source, target).suspects(precision=0.9)

Every source example gets a probability of being mislabelled, and each threshold on it an estimate of precision and
recall, from how right labels look (rates.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from soseleto.errors import UsageError
from soseleto.suspects.cross_fit import Array, Beliefs, Judgement
from soseleto.suspects.rates import EARLIER_LABELS, FROM_TRUSTED, Estimate, Judged, judge

CHANCE = 5.0  # standard errors, which are too small by half for answers of cross-fitting


@dataclass(frozen=True, repr=False)
class Suspects:
    """Every source example's probability of being mislabelled, and those at or above ``threshold``.

    probability: (n,) float32, NaN where it is unknown, since the example is labelled as a class without target examples
        or looks like one; suggested: (n,) int64, the most probable class of those of the target that are not the given
        label; is_suspect: (n,) bool
    precision, recall: of the suspects, estimated; wrong_share: share of wrong labels in the whole source. All three are
        about the examples that have a probability.
    """

    probability: Tensor
    suggested: Tensor
    threshold: float
    is_suspect: Tensor
    precision: Estimate
    recall: Estimate
    wrong_share: Estimate
    evidence: Evidence

    def at(self, threshold: float) -> Suspects:
        """The suspects and estimates at another threshold."""
        return self.evidence.at(threshold)

    @property
    def basis(self) -> str:
        """What the estimates rest on, one of the constants in rates.py."""
        return self.evidence.basis

    def __len__(self) -> int:
        """The number of suspects."""
        return int(self.is_suspect.sum())

    @property
    def unknown(self) -> int:
        """The number of examples without a probability."""
        return int(self.probability.isnan().sum())

    def __str__(self) -> str:
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
            "threshold": self.threshold,
            "count": len(self),
            "unknown": self.unknown,
            "precision": self.precision.to_dict(self.basis),
            "recall": self.recall.to_dict(self.basis),
            "wrong_share": self.wrong_share.to_dict(self.basis),
        }


@dataclass(frozen=True, eq=False)
class Evidence:
    """What a run knows about the labels of its source.

    judged: (n,) whether the target has an example of the label's class and of the class that the example looks like,
        without which nothing is known of it
    predicted: (n,) the most probable label; suggested: (n,) the most probable of the target other than the given one
    """

    judgement: Judgement
    judged: Tensor
    predicted: Tensor
    suggested: Tensor

    @classmethod
    def of(cls, judgement: Judgement, missing: tuple[int, ...]) -> Evidence:
        """Of classes; missing: the source's classes without target examples."""
        assert judgement.probabilities is not None
        predicted, support = judgement.probabilities.argmax(1), judgement.probabilities.copy()
        unknown = np.isin(judgement.labels, missing) | np.isin(predicted, missing)
        support[:, np.setdiff1d(np.arange(support.shape[1]), judgement.trusted_labels)] = -2.0
        support[np.arange(len(support)), judgement.labels] = -3.0
        return cls(judgement, *map(torch.from_numpy, (~unknown, predicted, support.argmax(1))))

    @classmethod
    def of_values(cls, judgement: Judgement, predicted: Array) -> Evidence:
        """Of labels that are numbers."""
        values = torch.from_numpy(predicted.astype(np.float32))
        return cls(judgement, torch.ones(len(values), dtype=torch.bool), values, values)

    @property
    def basis(self) -> str:
        return FROM_TRUSTED if self.judgement.before is None else EARLIER_LABELS

    @cached_property
    def wrong_share(self) -> Estimate:
        """Of the judged examples."""
        return judge(self._of_judged).wrong_share

    @cached_property
    def _of_judged(self) -> Judgement:
        return _of(self.judgement, self.judged)

    def subset(self, kept: Tensor) -> Evidence:
        """The same of some source examples, by a mask (n,)."""
        return Evidence(_of(self.judgement, kept), self.judged[kept], self.predicted[kept], self.suggested[kept])

    @cached_property
    def _informative(self) -> bool:
        """Whether held-out trusted labels are more probable than those of other trusted examples, beyond chance.

        Where they are not, as with labels by coin flip, the best of many thresholds looks good by luck. The joined
        answer cannot tell, since its exponents were chosen on the same labels.
        """
        judgement, labels = self.judgement, self.judgement.trusted_labels
        if not isinstance(judgement, Beliefs):
            return True
        said = np.stack(list(judgement.rivals.values())).mean(axis=0)
        gain = said[np.arange(len(labels)), labels] - said.mean(axis=0)[labels]
        return bool(gain.mean() > CHANCE * gain.std() / np.sqrt(judgement.trusted_count or len(labels)))

    @cached_property
    def _probability(self) -> Array:
        """Of judged examples: by how much the expected number of false alarms grows with each, made monotone."""
        from sklearn.isotonic import IsotonicRegression

        judged = judge(self._of_judged)
        counts = np.arange(1, len(judged.order) + 1)
        right = np.diff(np.maximum.accumulate(judged.false * counts), prepend=0.0)
        smooth = IsotonicRegression(y_min=0.0, y_max=1.0).fit_transform(counts, right)
        probability = np.empty(len(counts))
        probability[judged.order] = 1.0 - smooth - 1e-9 * counts  # so that no two are equal
        return np.clip(probability, 0.0, 1.0)

    def expected_hits(self, precision: float) -> float:
        """How many wrong labels the suspects of this precision are expected to have."""
        suspects = self.for_precision(precision)
        return len(suspects) * suspects.precision.value

    def for_precision(self, precision: float) -> Suspects:
        if not 0.0 < precision < 1.0:
            raise UsageError(f"precision must lie between 0 and 1, got {precision}: for 95 % say 0.95.")
        judged = judge(self._of_judged, precision)
        return self._suspects(judged, judged.count)

    def at(self, threshold: float) -> Suspects:
        if not 0.0 <= threshold <= 1.0:
            raise UsageError(f"the threshold is a probability between 0 and 1, got {threshold}.")
        return self._suspects(judge(self._of_judged), int((self._probability >= threshold).sum()))

    def _suspects(self, judged: Judged, count: int) -> Suspects:
        """The first ``count`` examples in the order of suspicion."""
        n, share = len(judged.order), judged.wrong_share
        probability = torch.full((len(self.judged),), torch.nan)
        probability[self.judged] = torch.from_numpy(self._probability.astype(np.float32))
        is_suspect = self.judged.clone()
        is_suspect[self.judged] = torch.from_numpy(np.isin(np.arange(n), judged.order[:count]))
        precision = judged.precision(count)
        if not self._informative:
            precision = Estimate(precision.value, 0.0, 1.0)
        hits = [count / n * part for part in (precision.value, precision.low, precision.high)]
        shares = [max(part, 1e-9) for part in (share.value, share.high, share.low)]
        recall = [min(of / all_wrong, 1.0) for of, all_wrong in zip(hits, shares, strict=True)]
        return Suspects(
            probability=probability,
            suggested=self.suggested,
            threshold=float(self._probability[judged.order[count - 1]]) if count else 1.0,
            is_suspect=is_suspect,
            precision=precision,
            recall=Estimate(*recall),
            wrong_share=share,
            evidence=self,
        )


def _of(judgement: Judgement, kept: Tensor) -> Judgement:
    """The judgement of some of the source's labels."""
    parts = {name: getattr(judgement, name) for name in ("right", "probabilities", "labels", "belief")}
    some: dict[str, Any] = {name: part if part is None else part[kept.numpy()] for name, part in parts.items()}
    return replace(judgement, **some)
