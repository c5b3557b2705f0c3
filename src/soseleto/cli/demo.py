"""``soseleto demo``, Figure 1 of the paper: points in [-1, 1]², classes split by the y-axis, a fifth flipped.

500 source points of which exactly 100 have a wrong label, 50 clean target points, 100 epochs. The paper shows that
clean points keep their weight, that flipped points lose it, and that the flipped points which are missed lie near the
separator, where a wrong label does little harm.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from soseleto.data import Examples, generator, seed_for, symmetric
from soseleto.models.architectures import mlp
from soseleto.run_folder.ranking import LOW_WEIGHT

if TYPE_CHECKING:
    from soseleto.training.options import Progress
    from soseleto.training.result import Result

N_SOURCE, N_FLIPPED, N_TARGET, N_TEST = 500, 100, 50, 2000
CLASSES = ("left", "right")
EPOCHS, BATCH_SIZE, LR = 100, 16, 0.2
WEIGHT_STEP = 0.2  # 0.1 and 0.2 were compared on seeds that are not reported


def make_data(seed: int = 0) -> tuple[Examples, Examples, Examples]:
    """Source, target and test; the source has the true labels besides its noisy ones.

    >>> source, target, test = make_data(seed=0)
    >>> len(source), int((source.labels != source.truth).sum()), len(target), len(test)
    (500, 100, 50, 2000)
    """
    clean = _points(N_SOURCE, seed, "source")
    noisy = symmetric(clean.labels, N_FLIPPED / N_SOURCE, classes=2, seed=seed)
    source = Examples(clean.inputs, noisy.labels, classes=CLASSES, truth=clean.labels)
    return source, _points(N_TARGET, seed, "target"), _points(N_TEST, seed, "test")


def _points(count: int, seed: int, purpose: str) -> Examples:
    """Uniform in the square, labelled by the side of the y-axis."""
    draw = torch.rand(count, 2, generator=generator(seed, f"synthetic/{purpose}"))
    inputs = 2 * draw - 1
    return Examples(inputs, (inputs[:, 0] > 0).long(), classes=CLASSES)


def make_model(seed: int = 0) -> nn.Module:
    """A small fully connected network; the global random state is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(seed, "synthetic/model"))
        return mlp(2, 2, hidden=32, layers=2)


def run(
    out: str | os.PathLike[str] | None = None,
    *,
    seed: int = 0,
    epochs: int | None = None,
    progress: Progress | None = None,
) -> Result:
    """Train on the data of ``make_data(seed)`` by our defaults; with ``out`` a run folder is written."""
    from soseleto.algorithm import Soseleto
    from soseleto.training.fit import fit

    source, target, _ = make_data(seed)
    return fit(
        make_model(seed),
        source,
        target,
        mode="noisy",
        epochs=EPOCHS if epochs is None else epochs,
        batch_size=BATCH_SIZE,
        target_batch_size=N_TARGET,
        lr=LR,
        method=Soseleto(weight_step=WEIGHT_STEP),
        seed=seed,
        device="cpu",  # faster than any accelerator for points in the plane
        out=None if out is None else Path(out),
        progress=progress or False,
    )


def summary(result: Result, seed: int) -> dict[str, float]:
    """The shares of clean and flipped points on the right side of the weight threshold, and the test accuracy.

    ``missed_distance`` is the median |x| of the flipped points that were missed (0 if none was).
    """
    source, _, test = make_data(seed)
    weight, wrong = result.weights, source.labels != source.truth
    low = weight < float(LOW_WEIGHT)
    missed = source.inputs[wrong & ~low, 0].abs().tolist()
    return {
        "clean_above": float((~low[~wrong]).float().mean()),
        "flipped_below": float(low[wrong].float().mean()),
        "missed_distance": statistics.median(missed) if missed else 0.0,
        "accuracy": result.evaluate(test)["accuracy"],
    }


def describe(shares: dict[str, float]) -> list[str]:
    return [
        f"clean points with a weight of {LOW_WEIGHT:g} or more   {shares['clean_above']:7.1%}",
        f"flipped points with a weight below {LOW_WEIGHT:g}      {shares['flipped_below']:7.1%}",
        f"distance of the missed from the separator  {shares['missed_distance']:7.3f}",
        f"test accuracy                              {shares['accuracy']:6.1f}%",
    ]
