"""An estimate with its interval, and what it rests on. No PyTorch here: the audit page starts without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

AUDITED, EARLIER_LABELS = "audited", "from earlier labels"
ESTIMATED_MISTAKES, RANDOM_MISTAKES = "assumes estimated mistakes", "assumes random mistakes"
WIDEST = 0.75  # an interval wider than this says nothing: the number is unknown


@dataclass(frozen=True)
class Estimate:
    """A number in [0, 1] with its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, *resampled: np.ndarray) -> Estimate:
        """The smallest interval that contains the middle 95 % of each of the resampled sets."""
        ends = [float(end) for one in resampled for end in np.quantile(one, [0.025, 0.975])]
        return cls(value, min(*ends, value), max(*ends, value))

    @property
    def width(self) -> float:
        return self.high - self.low

    @property
    def known(self) -> bool:
        """Whether the interval is narrow enough to be shown; otherwise the number is unknown."""
        return self.width <= WIDEST

    def to_dict(self, basis: str) -> dict[str, Any]:
        """The entry of ``suspects.json``: an unknown number has no value."""
        return {"value": self.value if self.known else None, "low": self.low, "high": self.high, "basis": basis}

    def __str__(self) -> str:
        if not self.known:
            return "unknown"
        return f"{100 * self.value:.1f} % ({100 * self.low:.1f} to {100 * self.high:.1f})"
