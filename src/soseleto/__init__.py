"""Source selection for target optimization (SOSELETO) for PyTorch.

Someone has a large, doubtful source data set and a small, trusted target set, and wants the best model for the
target, and to know which source examples helped, which hurt and which are mislabelled.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soseleto.algorithm import Soseleto
    from soseleto.engines import alignment, check_gradients
    from soseleto.errors import DataError, EngineError, Interrupted, SoseletoError, TrainingError, UsageError
    from soseleto.estimator import SoseletoClassifier
    from soseleto.prediction.load import load
    from soseleto.prediction.predictor import Predictor
    from soseleto.selection import Selection
    from soseleto.suspects.suspects import Suspects
    from soseleto.task.losses import cross_entropy, squared_error
    from soseleto.training.fit import fit
    from soseleto.training.pseudo_labels import Unlabelled
    from soseleto.training.result import Result
    from soseleto.weights import Weights

__version__ = "0.1.0"

__all__ = [
    "DataError",
    "EngineError",
    "Interrupted",
    "Predictor",
    "Result",
    "Selection",
    "Soseleto",
    "SoseletoClassifier",
    "SoseletoError",
    "Suspects",
    "TrainingError",
    "Unlabelled",
    "UsageError",
    "Weights",
    "alignment",
    "check_gradients",
    "cross_entropy",
    "fit",
    "load",
    "ranks",
    "squared_error",
]

# Names are looked up when first used, so that `soseleto --help` does not wait for PyTorch.
_HOMES = {
    "Soseleto": "algorithm",
    "alignment": "engines",
    "check_gradients": "engines",
    "cross_entropy": "task.losses",
    "squared_error": "task.losses",
    "DataError": "errors",
    "EngineError": "errors",
    "Interrupted": "errors",
    "SoseletoError": "errors",
    "TrainingError": "errors",
    "UsageError": "errors",
    "Predictor": "prediction.predictor",
    "Result": "training.result",
    "Selection": "selection",
    "SoseletoClassifier": "estimator",
    "Suspects": "suspects.suspects",
    "load": "prediction.load",
    "fit": "training.fit",
    "Unlabelled": "training.pseudo_labels",
    "ranks": "parallel.reducer",
    "Weights": "weights",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'soseleto' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"soseleto.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
