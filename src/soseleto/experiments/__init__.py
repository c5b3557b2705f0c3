"""Experiments by name, as ``soseleto reproduce`` runs them. An experiment's module is imported on use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from soseleto.errors import UsageError, did_you_mean
from soseleto.experiments.results import save, started

Report = Callable[[str], None]


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper; ``module`` has ``reproduce(out, *, seeds, report) -> rows``.

    An experiment that takes hours ``saves`` its results file itself, row by row.
    """

    name: str
    what: str
    module: str
    saves: bool = False


REGISTRY = {
    "synthetic": Experiment(
        "synthetic",
        "Figure 1: 500 points in the plane, 100 of them with a flipped label",
        "soseleto.experiments.synthetic",
    ),
    "cifar10-noise": Experiment(
        "cifar10-noise",
        "Table 1 and its figure: CIFAR-10 with noisy labels, every method (hours without a GPU)",
        "soseleto.experiments.cifar10_noise.experiment",
        saves=True,
    ),
    "cifar10-deep": Experiment(
        "cifar10-deep",
        "CIFAR-10 with wrong labels, PreAct ResNet-18: the strong recipe and its parts (hours on a GPU)",
        "soseleto.experiments.cifar10_deep.experiment",
        saves=True,
    ),
    "noisy-text": Experiment(
        "noisy-text",
        "news with wrong labels, MiniLM fine-tuned and frozen: every method (hours without a GPU)",
        "soseleto.experiments.noisy_text.experiment",
        saves=True,
    ),
    "pretrained-images": Experiment(
        "pretrained-images",
        "CIFAR-10N with EfficientNet-lite0 from ImageNet, fine-tuned: every method (hours on a GPU)",
        "soseleto.experiments.pretrained_images.experiment",
        saves=True,
    ),
    "svhn-mnist": Experiment(
        "svhn-mnist",
        "Table 2 and its figures: SVHN digits to 20 or 25 MNIST digits 5-9, every method (hours without a GPU)",
        "soseleto.experiments.svhn_mnist.experiment",
        saves=True,
    ),
}


def by_name(name: str) -> Experiment:
    """The experiment of that name."""
    if name not in REGISTRY:
        known = ", ".join(REGISTRY)
        raise UsageError(f"unknown experiment {name!r}{did_you_mean(name, REGISTRY)}: choose one of {known}.")
    return REGISTRY[name]


def reproduce(name: str, out: Path, *, seeds: int, report: Report) -> Path:
    """Run an experiment over ``seeds`` seeds; ``NAME.json`` and the experiment's other files are written to ``out``."""
    experiment = by_name(name)
    if seeds < 1:
        raise UsageError(f"seeds must be at least 1, got {seeds}.")
    out.mkdir(parents=True, exist_ok=True)
    rows = importlib.import_module(experiment.module).reproduce(out, seeds=seeds, report=report)
    path = out / f"{name}.json"
    return path if experiment.saves else save(path, started(name).merged(rows))
