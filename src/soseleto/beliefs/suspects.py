"""Beliefs as the evidence of a run: a probability of a wrong label for every source example, and the suspects."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from soseleto.beliefs.cross_fit import Array, Beliefs
from soseleto.beliefs.rates import Judged, judge
from soseleto.errors import UsageError
from soseleto.suspects.calibration import FROM_TRUSTED, Estimate
from soseleto.suspects.suspects import Suspects

EVIDENCE = 5.0  # standard errors, which are too small by half for answers of cross-fitting


@dataclass(frozen=True, eq=False)
class FromBeliefs:
    """The evidence of cross-fitted beliefs.

    judged: (n,) whether the target has an example of the label's class, without which nothing is known of it
    """

    found: Beliefs
    judged: Tensor

    @property
    def predicted(self) -> Tensor:
        """(n,) the most probable label of every source example, by classifiers that have not seen it."""
        return torch.from_numpy(self.found.probabilities.argmax(1))

    def calibrated(self, seed: int) -> FromBeliefs:
        return self

    @property
    def basis(self) -> str:
        return FROM_TRUSTED

    @property
    def n_known(self) -> int:
        """The number of labels that are known to be right."""
        return len(self.found.trusted_labels)

    @cached_property
    def wrong_share(self) -> Estimate:
        """Of the judged examples."""
        return judge(self._of_judged).wrong_share

    @cached_property
    def _of_judged(self) -> Beliefs:
        """The beliefs in labels that are judged."""
        return _of(self.found, self.judged)

    def subset(self, kept: Tensor) -> FromBeliefs:
        """The same of some source examples, by a mask (n,)."""
        return FromBeliefs(_of(self.found, kept), self.judged[kept])

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

    @cached_property
    def _informative(self) -> bool:
        """Whether held-out trusted labels are more probable than those of other trusted examples, beyond chance.

        Where they are not, as with labels by coin flip, the best of many thresholds looks good by luck. The joined
        answer cannot tell, since its exponents were chosen on the same labels.
        """
        found, labels = self.found, self.found.trusted_labels
        said = np.stack(list(found.rivals.values())).mean(axis=0)
        gain = said[np.arange(len(labels)), labels] - said.mean(axis=0)[labels]
        return bool(gain.mean() > EVIDENCE * gain.std() / np.sqrt(found.trusted_count))

    @cached_property
    def _suggested(self) -> Tensor:
        """(n,) the most probable class of the target other than the label."""
        found = self.found
        support = found.probabilities.copy()
        support[:, np.setdiff1d(np.arange(support.shape[1]), found.trusted_labels)] = -2.0
        support[np.arange(len(support)), found.labels] = -3.0
        return torch.from_numpy(support.argmax(1))

    def for_precision(self, precision: float) -> Suspects:
        if not 0.0 < precision < 1.0:
            raise UsageError(f"precision must lie between 0 and 1, got {precision}: for 95 % say 0.95.")
        judged = judge(self._of_judged, precision)
        return self._suspects(judged, int(judged.suspects.sum()))

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
        ends = (judged.false, judged.high, judged.low)
        last = [float(1.0 - end[count - 1]) for end in ends] if count else [1.0, 0.0, 1.0]
        value, low, high = last
        found = [count / n * part for part in (value, low, high)]
        stated, found = [last, found] if self._informative else [[value, 0.0, 1.0], [found[0], 0.0, 1.0]]
        shares = [max(part, 1e-9) for part in (share.value, share.high, share.low)]
        recall = [min(hits / of, 1.0) for hits, of in zip(found, shares, strict=True)]
        return Suspects(
            probability=probability,
            suggested=self._suggested,
            threshold=float(self._probability[judged.order[count - 1]]) if count else 1.0,
            is_suspect=is_suspect,
            precision=Estimate(*stated),
            recall=Estimate(*recall),
            wrong_share=share,
            calibrated=self,
        )


def _of(found: Beliefs, kept: Tensor) -> Beliefs:
    """The beliefs in some of the source's labels."""
    parts = {name: getattr(found, name)[kept.numpy()] for name in ("right", "belief", "probabilities", "labels")}
    return replace(found, **parts)
