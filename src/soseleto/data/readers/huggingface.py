"""Hugging Face data sets, recognised by their attributes, so that the library need not be imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from soseleto.data.arrays import require_constant
from soseleto.data.labels import labels_from, names_of
from soseleto.data.readers.raw import Raw
from soseleto.data.reading import Reading
from soseleto.data.tables import IDS, LABELS, PATHS, column_table, index_problem, is_index
from soseleto.errors import DataError, UsageError, did_you_mean


def is_huggingface(data: Any) -> bool:
    return hasattr(data, "column_names") and hasattr(data, "features") and hasattr(data, "__getitem__")


def from_huggingface(data: Any, *, name: str, reading: Reading) -> Raw:
    """Read an image column or features, and a label column; a ClassLabel keeps its class order.

    Images that change from read to read, as by a random ``set_transform``, raise.
    """
    if isinstance(data.column_names, dict):
        raise UsageError(f"the {name} is a Hugging Face DatasetDict: choose a split, as in data[{next(iter(data))!r}].")
    features: dict[str, Any] = dict(data.features)
    label = _choose(features, reading.label_column, "ClassLabel", LABELS, "label_column")
    if label is None:
        raise DataError(
            f"the {name} has no label column among {list(features)}: type reading=Reading(label_column=...)."
        )
    identity = _choose(features, reading.id_column, None, IDS, "id_column")
    image = _choose(features, reading.path_column, "Image", PATHS, "path_column")
    if image is not None and type(features[image]).__name__ != "Image":
        raise DataError(f"column {image!r} of the {name} is not an Image feature: cast it with cast_column first.")
    classes = getattr(features[label], "names", None)
    values = list(data[label])
    made = Raw(
        name,
        torch.tensor([-1 if value is None else value for value in values], dtype=torch.int64)
        if classes
        else labels_from(values, name=name, encoding=reading.encoding),
        classes=tuple(classes) if classes else None,
        ids=None if identity is None else tuple(str(value) for value in data[identity]),
        truth=names_of(data[reading.truth_column], encoding=reading.encoding) if reading.truth_column else None,
    )
    if image is not None:
        images = _Column(data, image)
        if len(images):
            require_constant(images.pixels, len(images), name=name)
        return replace(made, images=images)
    used = {label, identity, reading.truth_column}
    index = [c for at, c in enumerate(features) if is_index(c, at) and c not in used]
    columns = tuple(c for c in features if c not in used and c not in index)
    problems = index_problem(name, index)
    return replace(made, table=_features(data, columns, name), problems=problems)


class _Column(Sequence[Any]):
    """One column of images, each decoded by the data set on access."""

    def __init__(self, data: Any, column: str) -> None:
        self._data, self._column = data, column

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, at: Any) -> Any:
        return self._data[at][self._column]

    def pixels(self, at: int) -> Any:
        """None for an image that cannot be decoded, which is found later."""
        try:
            return np.asarray(self[at])
        except Exception:  # Pillow raises many kinds
            return None


def _choose(
    features: dict[str, Any], given: str | None, kind: str | None, usual: tuple[str, ...], option: str
) -> str | None:
    if given is not None:
        if given not in features:
            raise UsageError(f"there is no column {given!r} for {option}{did_you_mean(given, features)}.")
        return given
    of_kind = [c for c in features if kind is not None and type(features[c]).__name__ == kind]
    return next(iter(of_kind), None) or next((c for c in features if c.lower() in usual), None)


def _features(data: Any, columns: tuple[str, ...], name: str) -> Any:
    """The other columns as a pyarrow table."""
    if not columns:
        raise DataError(f"the {name} has a label but no features: add an image column or other columns.")
    return column_table({column: list(data[column]) for column in columns})
