"""``SoseletoClassifier``: SOSELETO as a scikit-learn estimator.

    SoseletoClassifier().fit(X, y, target=(X_target, y_target)).predict(X_new)

Needs scikit-learn: ``pip install 'soseleto[sklearn]'``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from soseleto.algorithm import Soseleto
from soseleto.data import Examples
from soseleto.errors import UsageError
from soseleto.models.by_name import default_name, make_model
from soseleto.prediction.predictor import Predictor
from soseleto.suspects.suspects import Calibrated, Suspects
from soseleto.training.defaults import EPOCHS, LR, WEIGHT_STEP
from soseleto.training.fit import fit
from soseleto.training.optimizers import sgd
from soseleto.training.options import as_probes

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_array, check_is_fitted, validate_data
except ImportError as error:
    raise UsageError(
        "SoseletoClassifier needs scikit-learn 1.6 or newer: type pip install 'soseleto[sklearn]'."
    ) from error

MakeModel = Callable[..., nn.Module]


class SoseletoClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A classifier trained on a large, doubtful (X, y) for a small, trusted ``target``.

    Parameters
    ----------
    model : a name (``"mlp"``, ``"lenet"``, ``"quick"``, ``"resnet18"``, ``"resnet18-groupnorm"``), a function
        ``f(classes=..., shape=...)`` that makes a module, a module (copied before it is trained), or None to choose by
        the shape of X.
    mode : ``"noisy"`` when (X, y) and the target have the same classes, ``"transfer"`` when they need not.
    epochs, batch_size, target_batch_size, lr : as in ``soseleto.fit``, except that a batch larger than the data is
        the whole data.
    weight_decay : of the model's parameters, as in ``soseleto.sgd``.
    weight_step : how far a source weight moves per visit, as in ``soseleto.Soseleto``.
    probes : the share of the target that calibrates ``suspects``, ``"auto"``, a ``soseleto.Probes``, or None for none.
    standardize : centre and scale the inputs by the statistics of X.
    device : ``"auto"``, ``"cpu"``, ``"cuda"``, ...
    random_state : an int makes two fits identical, to the last bit on a CPU.

    Attributes
    ----------
    classes_ : the labels that ``predict`` returns.
    source_weights_, source_scores_ : one of each per row of X; a low weight marks a row that hurts the target.
    model_ : the trained module.
    history_ : one record per epoch.
    n_features_in_, feature_names_in_ : as in all scikit-learn estimators.
    """

    def __init__(
        self,
        model: str | MakeModel | nn.Module | None = None,
        *,
        mode: str = "noisy",
        epochs: int = EPOCHS,
        batch_size: int | None = None,
        target_batch_size: int | None = None,
        lr: float = LR,
        weight_decay: float = 0.0,
        weight_step: float = WEIGHT_STEP,
        probes: Any = None,
        standardize: bool = True,
        device: str = "auto",
        random_state: Any = None,
    ) -> None:
        self.model = model
        self.mode = mode
        self.epochs = epochs
        self.batch_size = batch_size
        self.target_batch_size = target_batch_size
        self.lr = lr
        self.weight_decay = weight_decay
        self.weight_step = weight_step
        self.probes = probes
        self.standardize = standardize
        self.device = device
        self.random_state = random_state

    def fit(self, X: Any, y: Any, target: tuple[Any, Any] | None = None) -> Self:
        """Train on the source (X, y) and learn a weight for each of its rows.

        ``target`` is a pair (X, y) of trusted rows. Without one the source is its own target: low weights then mark
        rows that disagree with the others.
        """
        X, y = validate_data(self, _array(X), _labels(y), allow_nd=True, dtype="numeric")
        check_classification_targets(y)
        X_target, y_target = (X, y) if target is None else self._target(target)
        classes = y_target if self.mode == "transfer" else np.concatenate([y, y_target])
        self.classes_ = np.unique(classes)
        source_classes = np.unique(y) if self.mode == "transfer" else self.classes_
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        result = fit(
            self._module(tuple(X.shape[1:]), seed),
            Examples(_tensor(X), _index(y, source_classes)),
            Examples(_tensor(X_target), _index(y_target, self.classes_)),
            self.mode,  # type: ignore[arg-type]  # fit checks it
            epochs=self.epochs,
            batch_size=_at_most(len(X), self.batch_size),
            target_batch_size=_at_most(len(X_target), self.target_batch_size),
            optimizer=sgd(self.lr, self.weight_decay),
            method=Soseleto(weight_step=self.weight_step),
            probes=self._checked_probes(target),
            standardize=self.standardize,
            seed=seed,
            device=self.device,
        )
        self.model_, self._prepare, self.history_ = result.model, result.prepare, result.history
        self.source_weights_ = result.weights.numpy()
        self.source_scores_ = result.scores.numpy()
        self._evidence, self._seed = result.evidence, seed
        return self

    def suspects(self, precision: float | None = None, *, guarantee: bool | None = None) -> Suspects:
        """The rows of X that are probably mislabelled, as ``soseleto.Result.suspects``; needs ``probes``.

        The suggested labels are places in ``classes_``.
        """
        check_is_fitted(self)
        if self._evidence is None:
            raise UsageError("this estimator was fitted without probes: write SoseletoClassifier(probes='auto').")
        options = as_probes(self.probes)
        return Calibrated.learn(self._evidence, self._seed).for_precision(
            options.precision if precision is None else precision,
            guarantee=options.guarantee if guarantee is None else guarantee,
        )

    def _checked_probes(self, target: Any) -> Any:
        if target is None and self.probes is not None:
            raise UsageError("probes are planted from a target: give fit a target=(X, y), or leave probes out.")
        return self.probes

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of every row."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def predict_proba(self, X: Any) -> np.ndarray:
        """One probability per class, in the order of ``classes_``."""
        check_is_fitted(self)
        X = validate_data(self, _array(X), reset=False, allow_nd=True, dtype="numeric")
        device = next(self.model_.parameters()).device
        made = Predictor(model=self.model_, prepare=self._prepare, device=device)
        return made.predict_proba(_tensor(X)).double().numpy()

    def _target(self, target: tuple[Any, Any]) -> tuple[np.ndarray, np.ndarray]:
        if not isinstance(target, tuple | list) or len(target) != 2:
            raise UsageError(f"target must be a pair (X, y) of trusted rows, got {type(target).__name__}.")
        X = validate_data(self, _array(target[0]), reset=False, allow_nd=True, dtype="numeric")
        y = check_array(_labels(target[1]), ensure_2d=False, dtype=None)
        if len(X) != len(y):
            raise UsageError(f"the target has {len(X)} rows but {len(y)} labels: give one for each.")
        return X, y

    def _module(self, shape: tuple[int, ...], seed: int) -> nn.Module:
        if isinstance(self.model, nn.Module):
            return copy.deepcopy(self.model)
        classes = len(self.classes_)
        if callable(self.model):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return self.model(classes=classes, shape=shape)
        return make_model(self.model or default_name(shape), self.mode, classes=classes, shape=shape, seed=seed)


def _at_most(n: int, size: int | None) -> int | None:
    return None if size is None else min(size, n)


def _array(values: Any) -> Any:
    """Tensors as arrays; everything else unchanged, for scikit-learn to convert."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values


def _labels(values: Any) -> Any:
    return _array(values)


def _tensor(values: np.ndarray) -> Tensor:
    """uint8 images stay uint8; everything else becomes float32."""
    keep = values.dtype == np.uint8 and values.ndim > 2
    return torch.tensor(values if keep else values.astype(np.float32))


def _index(labels: np.ndarray, classes: np.ndarray) -> Tensor:
    return torch.from_numpy(np.searchsorted(classes, labels).astype(np.int64))
