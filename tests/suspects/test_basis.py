"""The basis of estimates, and intervals that say nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from soseleto.suspects.calibration import Estimate
from soseleto.suspects.probes import PlantedProbes
from soseleto.suspects.signals import Evidence
from soseleto.suspects.suspects import Calibrated


def calibrated(
    *,
    apart: float,
    share: float = 0.3,
    probes: int = 400,
    checked: tuple[int, int] | None = None,
    interval: tuple[float, float] | None = None,
) -> Calibrated:
    """One signal, whose means for right and wrong labels are ``apart`` standard deviations apart."""
    draw = np.random.default_rng(0)
    wrong = np.append(draw.random(3000) < share, np.arange(probes) % 2 == 0)
    signal = draw.normal(np.where(wrong, -apart / 2, apart / 2))
    labels = torch.zeros(len(wrong), dtype=torch.int64)
    planted = PlantedProbes(3000, labels[3000:], torch.from_numpy(wrong[3000:]).long(), checked, interval)
    support = torch.tensor([[0.5, 0.2, 0.3]]).expand(len(wrong), 3)
    return Calibrated.learn(Evidence(planted, labels, {"score": torch.from_numpy(signal)}, support, support))


def test_the_basis_is_named_wherever_a_number_is() -> None:
    drawn = calibrated(apart=4).for_precision(0.9)
    known = calibrated(apart=4, checked=(1000, 300)).for_precision(0.9)
    likely = calibrated(apart=4, interval=(0.2, 0.4)).for_precision(0.9)
    words = ("assumes random mistakes", "from earlier labels", "assumes estimated mistakes")
    for found, basis in zip((drawn, known, likely), words, strict=True):
        assert found.basis == basis
        assert str(found).endswith(f"({basis})")
        kept = found.to_dict()
        assert kept["basis"] == kept["probability_basis"] == basis
        assert {kept[name]["basis"] for name in ("precision", "recall", "wrong_share")} == {basis}


def test_an_interval_that_says_nothing_is_unknown() -> None:
    useless, wide = Estimate(0.95, 0.0, 1.0), Estimate(0.6, 0.4, 0.9)
    assert str(useless) == "unknown"
    assert useless.to_dict("audited")["value"] is None
    assert str(wide) == "60.0 % (40.0 to 90.0)"
    assert wide.to_dict("audited")["value"] == 0.6


def test_estimated_mistakes_bound_the_share_and_widen_its_interval() -> None:
    plain, likely = calibrated(apart=4).wrong_share, calibrated(apart=4, interval=(0.2, 0.4)).wrong_share
    assert likely.value == pytest.approx(plain.value, abs=1e-3)  # inside the interval nothing changes
    assert likely.low <= 0.2 < plain.low
    assert likely.high >= 0.4 > plain.high
    low, high = (calibrated(apart=1, interval=(at, at + 0.01)).wrong_share.value for at in (0.1, 0.5))
    assert low < 0.2 < 0.4 < high
    narrow, wide = (calibrated(apart=2, interval=ends).at(0.8).precision for ends in ((0.29, 0.31), (0.0, 0.6)))
    assert wide.width > 1.2 * narrow.width
