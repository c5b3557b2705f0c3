"""An ``.npz`` source: a table by which its rows are recognised, and a corrected copy that keeps all its arrays."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from soseleto.data.readers.labels import names_of, text_of
from soseleto.data.readers.npz import load_arrays
from soseleto.errors import need

_need = partial(need, to="recording the rows of an .npz file")


def row_table(path: Path, encoding: str | None) -> Any:
    """A pyarrow table with the ids as text and a digest of every row of the other arrays that were read."""
    return _need("pyarrow").table(
        {
            name: [text_of(value, where=f"an id in {path}", encoding=encoding) for value in array.tolist()]
            if name == "id"
            else [hashlib.blake2b(row.tobytes(), digest_size=16).hexdigest() for row in array]
            for name, array in load_arrays(path).items()
        }
    )


def corrected(
    path: Path,
    ids: Sequence[str | None],
    *,
    drop: Collection[str],
    relabel: Mapping[str, str],
    encoding: str | None = None,
) -> tuple[bytes, int]:
    """The file without the ids in ``drop`` and with the labels in ``relabel``, and its number of rows.

    Arrays with one entry per example lose the same entries; other arrays are copied.

    ids: in the run, of every row; None for a row that the run does not have
    """
    arrays = load_arrays(path, every=True)
    if relabel:
        arrays["y"] = _relabelled(arrays["y"], ids, relabel, encoding)
    keep = np.array([name is None or name not in drop for name in ids])
    kept = {name: array[keep] if array.shape[:1] == keep.shape else array for name, array in arrays.items()}
    return _saved(kept), int(keep.sum())


def _relabelled(labels: Any, ids: Sequence[str | None], relabel: Mapping[str, str], encoding: str | None) -> Any:
    """Numbers stay numbers where the new labels are numbers; all labels become text otherwise."""
    names = names_of(labels.reshape(-1).tolist(), encoding=encoding).names
    new = [relabel.get(name, old) if name is not None else old for name, old in zip(ids, names, strict=True)]
    if labels.dtype.kind in "iuf":
        try:
            return np.array([float("nan") if name is None else _number(name) for name in new])
        except ValueError:  # a class of the target whose name is not a number
            pass
    return np.array(["" if name is None else name for name in new])


def _number(name: str) -> float:
    """Only where reading the number gives the same name again."""
    number = int(name)
    if str(number) != name:
        raise ValueError(name)
    return number


def _saved(arrays: Mapping[str, Any]) -> bytes:
    """As ``np.savez`` writes it, with any names."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
    return content.getvalue()
