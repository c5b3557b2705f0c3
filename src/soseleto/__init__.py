"""Source selection for target optimization (SOSELETO) for PyTorch.

Train on a large, doubtful source data set for a small, trusted target set: get the best model for the target, and
learn which source examples helped, which hurt and which are mislabelled.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soseleto import data, errors, methods, models, pieces
    from soseleto.algorithm import Soseleto
    from soseleto.data import Augment, Examples, Preprocess, Reading, pair_flip, read_pair, symmetric
    from soseleto.engines import alignment, check_gradients
    from soseleto.errors import (
        CannotSave,
        DataError,
        DiskError,
        EngineError,
        Interrupted,
        OutOfMemory,
        RankLost,
        RankStopped,
        SoseletoError,
        TrainingError,
        UsageError,
    )
    from soseleto.estimator import SoseletoClassifier
    from soseleto.parallel.reducer import ranks
    from soseleto.prediction.load import load
    from soseleto.prediction.predictor import Predictor
    from soseleto.selection import Selection
    from soseleto.suspects.suspects import Suspects
    from soseleto.task.losses import cross_entropy, squared_error
    from soseleto.training.fit import fit
    from soseleto.training.loggers import MLflow, TensorBoard, WeightsAndBiases
    from soseleto.training.optimizers import adamw, cosine, linear, sgd, warmup_cosine
    from soseleto.training.options import Balanced, Checkpoints, Compute, Heads, Probes
    from soseleto.training.result import Result
    from soseleto.training.settings import method_of, settings_of
    from soseleto.weights import Weights

__version__ = "0.1.0"

# Names are imported when first used, so that `soseleto --help` does not wait for PyTorch.
_MODULES = {
    "algorithm": ("Soseleto",),
    "data": ("Augment", "Examples", "Preprocess", "Reading", "pair_flip", "read_pair", "symmetric"),
    "engines": ("alignment", "check_gradients"),
    "errors": (
        "CannotSave",
        "DataError",
        "DiskError",
        "EngineError",
        "Interrupted",
        "OutOfMemory",
        "RankLost",
        "RankStopped",
        "SoseletoError",
        "TrainingError",
        "UsageError",
    ),
    "estimator": ("SoseletoClassifier",),
    "parallel.reducer": ("ranks",),
    "prediction.load": ("load",),
    "prediction.predictor": ("Predictor",),
    "selection": ("Selection",),
    "suspects.suspects": ("Suspects",),
    "task.losses": ("cross_entropy", "squared_error"),
    "training.fit": ("fit",),
    "training.loggers": ("MLflow", "TensorBoard", "WeightsAndBiases"),
    "training.optimizers": ("adamw", "cosine", "linear", "sgd", "warmup_cosine"),
    "training.options": ("Balanced", "Checkpoints", "Compute", "Heads", "Probes"),
    "training.result": ("Result",),
    "training.settings": ("method_of", "settings_of"),
    "weights": ("Weights",),
}
_NAMESPACES = ("data", "errors", "pieces", "methods", "models")
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Augment",
    "Balanced",
    "CannotSave",
    "Checkpoints",
    "Compute",
    "DataError",
    "DiskError",
    "EngineError",
    "Examples",
    "Heads",
    "Interrupted",
    "MLflow",
    "OutOfMemory",
    "Predictor",
    "Preprocess",
    "Probes",
    "RankLost",
    "RankStopped",
    "Reading",
    "Result",
    "Selection",
    "Soseleto",
    "SoseletoClassifier",
    "SoseletoError",
    "Suspects",
    "TensorBoard",
    "TrainingError",
    "UsageError",
    "Weights",
    "WeightsAndBiases",
    "adamw",
    "alignment",
    "check_gradients",
    "cosine",
    "cross_entropy",
    "data",
    "errors",
    "fit",
    "linear",
    "load",
    "method_of",
    "methods",
    "models",
    "pair_flip",
    "pieces",
    "ranks",
    "read_pair",
    "settings_of",
    "sgd",
    "squared_error",
    "symmetric",
    "warmup_cosine",
]


def __getattr__(name: str) -> Any:
    if name in _NAMESPACES:
        return importlib.import_module(f"soseleto.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'soseleto' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"soseleto.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
