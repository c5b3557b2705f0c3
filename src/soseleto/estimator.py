"""``SoseletoClassifier``: SOSELETO as a scikit-learn estimator.

    SoseletoClassifier().fit(X, y, X_target=X_target, y_target=y_target).predict(X_new)

Needs scikit-learn 1.6 or newer.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from soseleto.data import Examples, Preprocess, TablePreparation, cells
from soseleto.data.arrays import inputs_of
from soseleto.data.columns import TEXT_LENGTH
from soseleto.data.preparation import prepared
from soseleto.data.structure import check_size
from soseleto.data.tables import frame_table, is_frame
from soseleto.errors import UsageError
from soseleto.models.architectures import default_name, make_model
from soseleto.prediction import Predictor
from soseleto.suspects.suspects import Suspects
from soseleto.training.fit import fit
from soseleto.training.options import Inputs, as_probes

try:
    from scipy.sparse import issparse
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import assert_all_finite, check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data
except ImportError as error:
    raise UsageError(
        "SoseletoClassifier needs scikit-learn 1.6 or newer: type pip install 'scikit-learn>=1.6'."
    ) from error

FAR_APART = 5.0  # standard deviations of X between the medians of X and X_target
MakeModel = Callable[..., nn.Module]


class SoseletoClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A classifier trained on a large, doubtful (X, y) for a small, trusted target.

    Parameters
    ----------
    model : a name (``"table"``, ``"linear"``, ``"mlp"``, ``"lenet"``, ``"quick"``, ``"resnet18"``,
        ``"preact-resnet18"``, ``"resnet18-groupnorm"``), a function ``f(classes=..., shape=...)`` that makes a module,
        a module (copied before it is trained), or None: ``"table"`` for data frames with words or missing values,
        ``"linear"`` for sparse matrices, else by the shape of X.
    mode : ``"noisy"`` when (X, y) and the target have the same classes, ``"transfer"`` when they need not.
    epochs, batch_size, target_batch_size, lr, optimizer, method : as in ``soseleto.fit``, except that a batch larger
        than the data is the whole data. ``method=DefaultMethod(weight_step=0.2)`` of ``soseleto.defaults`` changes the
        default method; ``method=Strong()`` of ``soseleto.methods`` is for many wrong labels, images and a GPU: X is
        then uint8 images (N, C, H, W), rows of numbers, a sparse matrix or a data frame; for images, choose a ``model``
        with BatchNorm, such as ``"preact-resnet18"``.
    probes : the share of the target that calibrates ``suspects``, ``"auto"``, a ``soseleto.Probes``, or None for none.
    standardize : centre and scale the inputs by the statistics of X; sparse matrices are only scaled, by one factor
        for all columns, and the columns of data frames with words or missing values are prepared by
        ``soseleto.data.TablePreparation``.
    device : ``"auto"``, ``"cpu"``, ``"cuda"``, ...
    random_state : an int makes two fits identical, to the last bit on a CPU.

    Attributes
    ----------
    classes_ : the labels that ``predict`` returns.
    source_weights_, source_scores_ : one of each per row of X; a low weight marks a row that hurts the target.
    model_ : the trained module.
    preparation_ : how the columns of a data frame were prepared, or None.
    history_ : one record per epoch.
    settings_ : the complete settings of the training.
    n_features_in_, feature_names_in_ : as in all scikit-learn estimators.
    """

    def __init__(
        self,
        model: str | MakeModel | nn.Module | None = None,
        *,
        mode: str = "noisy",
        epochs: int | None = None,
        batch_size: int | None = None,
        target_batch_size: int | None = None,
        lr: float | None = None,
        optimizer: Any = None,
        method: Any = None,
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
        self.optimizer = optimizer
        self.method = method
        self.probes = probes
        self.standardize = standardize
        self.device = device
        self.random_state = random_state

    def fit(self, X: Any, y: Any, *, X_target: Any = None, y_target: Any = None) -> Self:
        """Train on the source (X, y) and learn a weight for each of its rows.

        ``X_target`` and ``y_target`` are trusted rows. Without them the source is its own target: low weights then mark
        rows that disagree with the others. In a Pipeline, let the target go through the same steps:
        ``Pipeline(..., transform_input=["X_target"])``, with metadata routing enabled and
        ``SoseletoClassifier().set_fit_request(X_target=True, y_target=True)``.
        """
        if (X_target is None) != (y_target is None):
            raise UsageError("X_target and y_target belong together: give fit both.")
        if X_target is None and self.probes is not None:
            raise UsageError("probes are planted from a target: give fit X_target and y_target, or leave probes out.")
        self.preparation_, self._is_sparse = None, bool(issparse(X))
        if is_frame(X) and not _is_plain(X):
            labels = np.unique(_labels_of(y, X), return_inverse=True)[1]
            self.preparation_ = TablePreparation.fit(frame_table(X), labels)
        rows, y = self._rows(X, y, reset=True)
        check_classification_targets(y)
        rows_target, labels_target = (rows, y) if X_target is None else (self._rows(X_target)[0], _labels_of(y_target))
        if len(rows_target) != len(labels_target):
            raise UsageError(
                f"the target has {len(rows_target)} rows but {len(labels_target)} labels: give one for each."
            )
        _warn_of_scale(rows, rows_target)
        if self.mode != "transfer" and len(new := np.setdiff1d(labels_target, y)):
            raise UsageError(
                f"the target has classes that the source lacks ({', '.join(map(str, new[:5]))}): add source rows, or "
                "write mode='transfer'."
            )
        self.classes_ = np.unique(labels_target if self.mode == "transfer" else y)
        source_classes = np.unique(y) if self.mode == "transfer" else self.classes_
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        source = Examples(rows, _index(y, source_classes))
        table = self.preparation_
        model = self._module(tuple(rows.shape[1:]) if table is None else (table.width,), seed)
        result = fit(
            model,
            source,
            Examples(rows_target, _index(labels_target, self.classes_)),
            self.mode,  # type: ignore[arg-type]  # fit checks it
            epochs=self.epochs,
            batch_size=_at_most(len(rows), self.batch_size),
            target_batch_size=_at_most(len(rows_target), self.target_batch_size),
            lr=self.lr,
            optimizer=self.optimizer,
            method=self.method,
            probes=self.probes,
            inputs=Inputs(standardize=table or self._standardization(rows)),
            seed=seed,
            device=self.device,
        )
        self.model_, self._prepare, self.history_ = result.model, result.prepare, result.history
        self.settings_ = result.settings
        self.source_weights_ = result.weights.numpy()
        self.source_scores_ = result.scores.numpy()
        self._evidence, self._seed = result.evidence, seed
        return self

    def suspects(self, precision: float | None = None) -> Suspects:
        """The rows of X that are probably mislabelled, as ``soseleto.Result.suspects``; needs ``probes``.

        The suggested labels are places in ``classes_``.
        """
        check_is_fitted(self)
        if self._evidence is None:
            raise UsageError("this estimator was fitted without probes: write SoseletoClassifier(probes='auto').")
        precision = as_probes(self.probes).precision if precision is None else precision
        return self._evidence.for_precision(precision)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of every row."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def predict_proba(self, X: Any) -> np.ndarray:
        """One probability per class, in the order of ``classes_``."""
        check_is_fitted(self)
        rows, _ = self._rows(X)
        device = next(self.model_.parameters()).device
        predictor = Predictor(model=self.model_, prepare=self._prepare, device=device)
        return predictor.predict_proba(rows).double().numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _module(self, shape: tuple[int, ...], seed: int) -> nn.Module:
        if isinstance(self.model, nn.Module):
            return copy.deepcopy(self.model)
        classes = len(self.classes_)
        if callable(self.model):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return self.model(classes=classes, shape=shape)
        name = "linear" if self._is_sparse else default_name(shape)
        if self.preparation_ is not None:
            name = "linear" if self.preparation_.is_text else "table"
        return make_model(self.model or name, self.mode, classes=classes, shape=shape, seed=seed)

    def _rows(self, X: Any, y: Any = None, *, reset: bool = False) -> tuple[Tensor, Any]:
        """The inputs, and the labels where they are given; ``reset`` records names and number of features."""
        y = None if y is None else _array(y)
        if self.preparation_ is not None:
            validate_data(self, X, reset=reset, skip_check_array=True)
            level = logging.WARNING if y is None else logging.DEBUG  # of the source, missing values are as expected
            inputs, _ = prepared(frame_table(X), self.preparation_, "X", level=level)
            return inputs, None if y is None else _labels_of(y, X)
        checks = {"accept_sparse": "csr", "allow_nd": True, "dtype": "numeric"}
        if y is None:
            return _tensor(validate_data(self, _array(X), reset=reset, **checks)), None
        checked, labels = validate_data(self, _array(X), y, reset=reset, **checks)
        return _tensor(checked), labels

    def _standardization(self, rows: Tensor) -> bool | Preprocess:
        """Sparse columns keep their zeros and their proportions: one factor gives the rows a common mean length."""
        if not self.standardize or not self._is_sparse:
            return self.standardize
        scale = float(rows.square().sum(1).mean().sqrt()) / TEXT_LENGTH or 1.0
        return Preprocess((0.0,) * rows.shape[1], (scale,) * rows.shape[1])


def _labels_of(y: Any, X: Any = None) -> np.ndarray:
    """The labels (N,), checked as ``validate_data`` checks those of arrays; X: the rows that they are of."""
    labels = column_or_1d(_array(y), warn=True)
    assert_all_finite(labels, input_name="y")
    check_consistent_length(X, labels)
    check_classification_targets(labels)
    return labels


def _is_plain(frame: Any) -> bool:
    """Whether a data frame is numbers alone, with none missing: then it is the array that it stands for."""
    table = frame_table(frame)
    return all(cells.form_of(table[name]) == "number" and not table[name].null_count for name in table.column_names)


def _warn_of_scale(rows: Tensor, target: Tensor) -> None:
    """As after a Pipeline that scaled X and not the target."""
    if rows.ndim != 2 or not rows.is_floating_point() or rows.shape[1:] != target.shape[1:]:
        return
    varies = (rows != 0).any(0) & (target != 0).any(0)  # of sparse texts most columns are empty
    if not varies.any():
        return
    rows, target = rows[:, varies], target[:, varies]
    sizes = [side.double().abs().mean(0) for side in (rows, target)]
    ratio = ((sizes[1] + 1e-12) / (sizes[0] + 1e-12)).log10().median().abs()
    middle = [side.double().median(0).values for side in (rows, target)]
    apart = ((middle[1] - middle[0]).abs() > FAR_APART * (rows.double().std(0) + 1e-12)).double().mean()
    if ratio > 1.0 or apart > 0.5:
        warnings.warn(
            "the values of X_target are on another scale than those of X: let the target go through the same steps, as "
            "by Pipeline(..., transform_input=['X_target']).",
            stacklevel=3,
        )


def _at_most(n: int, size: int | None) -> int | None:
    return None if size is None else min(size, n)


def _array(values: Any) -> Any:
    """Tensors as arrays; everything else unchanged, for scikit-learn to convert."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values


def _tensor(values: Any) -> Tensor:
    """uint8 images stay uint8; everything else becomes float32; sparse ones dense."""
    if issparse(values):
        check_size(4 * values.shape[0] * values.shape[1], what="the sparse matrix")
        return torch.from_numpy(values.astype(np.float32).toarray())
    if values.dtype != np.uint8 or values.ndim < 3:
        values = values.astype(np.float32)
    return inputs_of(values, name="X")


def _index(labels: np.ndarray, classes: np.ndarray) -> Tensor:
    return torch.from_numpy(np.searchsorted(classes, labels).astype(np.int64))
