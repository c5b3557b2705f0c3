"""Source selection for target optimization (SOSELETO) for PyTorch.

Train on a large, doubtful source data set for a small, trusted target set: get the best model for the target, and
learn which source examples helped, which hurt and which are mislabelled.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soseleto import data, defaults, errors, methods, models, pieces, schedules
    from soseleto.algorithm import Soseleto
    from soseleto.comparison.compare import compare
    from soseleto.comparison.scan import scan
    from soseleto.comparison.trainings import Comparison
    from soseleto.data import Augment, Examples
    from soseleto.defaults import Balanced
    from soseleto.engines import alignment, check_gradients
    from soseleto.errors import SoseletoError, UsageError
    from soseleto.estimator import SoseletoClassifier
    from soseleto.parallel.reducer import ranks
    from soseleto.prediction import Predictor, load
    from soseleto.scoring import Scores, score
    from soseleto.selection import Selection
    from soseleto.suspects.suspects import Suspects
    from soseleto.task.losses import cross_entropy, squared_error
    from soseleto.training.fit import fit
    from soseleto.training.options import Checkpoints, Compute, Heads, Inputs, Probes
    from soseleto.training.result import Result
    from soseleto.weights import Weights

__version__ = "0.1.0"

# Names are imported when first used, so that `soseleto --help` does not wait for PyTorch.
_MODULES = {
    "algorithm": ("Soseleto",),
    "comparison.compare": ("compare",),
    "comparison.scan": ("scan",),
    "comparison.trainings": ("Comparison",),
    "data": ("Augment", "Examples"),
    "defaults": ("Balanced",),
    "engines": ("alignment", "check_gradients"),
    "errors": ("SoseletoError", "UsageError"),
    "estimator": ("SoseletoClassifier",),
    "parallel.reducer": ("ranks",),
    "prediction": ("Predictor", "load"),
    "scoring": ("Scores", "score"),
    "selection": ("Selection",),
    "suspects.suspects": ("Suspects",),
    "task.losses": ("cross_entropy", "squared_error"),
    "training.fit": ("fit",),
    "training.options": ("Checkpoints", "Compute", "Heads", "Inputs", "Probes"),
    "training.result": ("Result",),
    "weights": ("Weights",),
}
_NAMESPACES = ("data", "defaults", "errors", "methods", "models", "pieces", "schedules")
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Augment",
    "Balanced",
    "Checkpoints",
    "Comparison",
    "Compute",
    "Examples",
    "Heads",
    "Inputs",
    "Predictor",
    "Probes",
    "Result",
    "Scores",
    "Selection",
    "Soseleto",
    "SoseletoClassifier",
    "SoseletoError",
    "Suspects",
    "UsageError",
    "Weights",
    "alignment",
    "check_gradients",
    "compare",
    "cross_entropy",
    "data",
    "defaults",
    "errors",
    "fit",
    "load",
    "methods",
    "models",
    "pieces",
    "ranks",
    "scan",
    "schedules",
    "score",
    "squared_error",
]


def __getattr__(name: str) -> Any:
    if name in _NAMESPACES:
        return importlib.import_module(f"soseleto.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'soseleto' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"soseleto.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
