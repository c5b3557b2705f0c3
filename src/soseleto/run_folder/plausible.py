"""Values that no run writes: an edited or damaged ``config.json``, ``ranking.parquet`` or model is named, not used.

These checks do not depend on checksums, which older runs do not have and which whoever edits a file can write again.
"""

from __future__ import annotations

import contextlib
import json
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from soseleto.errors import DataError, SoseletoError, first_line
from soseleto.run_folder.files import as_json

if TYPE_CHECKING:
    from torch import Tensor

MOST_CLASSES = 10**7
MOST_EXAMPLES = 10**12
MOST_INPUT = 1 << 28  # numbers in one input
MOST_SIDES = 8


def check_config(path: Path, config: Any) -> dict[str, Any]:
    """The configuration, if its sizes and names can be right."""
    if not isinstance(config, dict):
        raise DataError(f"{path} is not a JSON object: restore it from a copy, or train again.")
    for name, fits, wanted in _ENTRIES:
        value = config.get(name)
        if value is not None and not fits(value):
            raise _implausible(path, f"its {name} is {reprlib.repr(value)} instead of {wanted}")
    classes, count = config.get("classes"), config.get("n_classes")
    if classes is not None and count is not None and len(classes) != count:
        raise _implausible(path, f"it names {len(classes)} classes and its n_classes is {count}")
    return config


def _whole(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_shape(value: Any) -> bool:
    """The sizes of one input, or of each tensor of a structure by its path."""
    if isinstance(value, dict):
        return all(isinstance(sizes, list) and _is_shape(sizes) for sizes in value.values())
    sides = isinstance(value, list) and len(value) <= MOST_SIDES and all(map(_whole(1, MOST_INPUT), value))
    return sides and math.prod(value) <= MOST_INPUT


def _are_names(value: Any) -> bool:
    texts = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return texts and len(set(value)) == len(value)


_ENTRIES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("n_classes", _whole(1, MOST_CLASSES), f"a whole number up to {MOST_CLASSES:,}"),
    ("n_source", _whole(0, MOST_EXAMPLES), f"a whole number up to {MOST_EXAMPLES:,}"),
    ("input_shape", _is_shape, f"at most {MOST_SIDES} sizes with {MOST_INPUT:,} numbers in all"),
    ("input_dtype", lambda value: isinstance(value, str), "a name"),
    ("classes", _are_names, "a list of different names"),
    ("columns", _are_names, "a list of different names"),
    ("model", lambda value: isinstance(value, str), "a name"),
    ("mode", lambda value: value in ("noisy", "transfer"), "noisy or transfer"),
    ("prepare", lambda value: isinstance(value, dict), "an object"),
)


def check_ranking(path: Path, columns: Mapping[str, np.ndarray], n_source: int | None) -> None:
    rows = len(next(iter(columns.values()))) if columns else 0
    if n_source is not None and rows != n_source:
        raise _implausible(path, f"it has {rows:,} rows for {n_source:,} source examples")
    for name, low, high, nan in (
        ("weight", 0.0, 1.0, False),
        ("score", -math.inf, math.inf, True),  # NaN: never measured
        ("mislabelled_probability", 0.0, 1.0, True),
        ("visits", 0, math.inf, False),
    ):
        if name in columns and (bad := _outside(columns[name], low, high, nan)):
            raise _implausible(path, f"{bad:,} of its {rows:,} entries in {name} are missing or out of range")


def _outside(values: np.ndarray, low: float, high: float, nan: bool) -> int:
    if values.dtype.kind not in "fiu":
        return len(values)
    missing = np.isnan(values)
    within = (values >= low) & (values <= high) & np.isfinite(np.where(missing, 0, values))
    return int((~np.where(missing, nan, within)).sum())


BOUND = "soseleto.config"  # metadata entry of model.safetensors
_BOUND_ENTRIES = ("classes", "input_shape", "prepare")


def bound(config: Mapping[str, Any]) -> str:
    """The entries of ``config.json`` that give the model's inputs and outputs their meaning, to be stored with it."""
    return as_json({name: config.get(name) for name in _BOUND_ENTRIES})


def check_bound(path: Path, config: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Raise where ``config.json`` has other class names, another order of them or another preprocessing."""
    if BOUND not in metadata:  # a run of an earlier version
        return
    trained, now = json.loads(metadata[BOUND]), json.loads(bound(config))
    if changed := [name for name in _BOUND_ENTRIES if trained.get(name) != now.get(name)]:
        raise _implausible(path, f"its {' and '.join(changed)} are not those that the model was trained with")


def check_tensors(path: Path, state: Mapping[str, Tensor]) -> None:
    for name, tensor in state.items():
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise _implausible(path, f"its entry {name!r} has numbers that are NaN")


@contextlib.contextmanager
def readable(run: Path) -> Iterator[None]:
    """Turn the errors of values of another type or length than any run has into one sentence."""
    try:
        yield
    except SoseletoError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        raise DataError(
            f"the files of {run} hold values that cannot be right ({what}): restore them from a copy, or train again."
        ) from error


def _implausible(path: Path, what: str) -> DataError:
    return DataError(f"{path} cannot be right, since {what}: restore it from a copy, or train again.")
