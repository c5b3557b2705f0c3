"""The paper's experiments by name: what ``soseleto reproduce`` can run. Each is one file, imported when asked for."""

from __future__ import annotations

import importlib
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soseleto.errors import UsageError, did_you_mean
from soseleto.run_folder.files import device_name, versions, write_text

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
    """Run an experiment over ``seeds`` seeds and write ``NAME.json`` and whatever else it leaves into ``out``."""
    experiment = by_name(name)
    if seeds < 1:
        raise UsageError(f"seeds must be at least 1, got {seeds}.")
    out.mkdir(parents=True, exist_ok=True)
    rows = importlib.import_module(experiment.module).reproduce(out, seeds=seeds, report=report)
    path = out / f"{name}.json"
    return path if experiment.saves else write_results(path, name, rows)


def write_results(path: Path, name: str, rows: Sequence[Mapping[str, Any]], *, device: str = "cpu") -> Path:
    """One row a run, with the commit, device and versions they were made on."""
    results = {"name": name, "commit": commit(), "device": device_name(device), "versions": versions(), "rows": rows}
    write_text(path, json.dumps(results, indent=1) + "\n")
    return path


def commit() -> str | None:
    """The commit of the source tree this package is imported from, or None where it is no git tree."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
