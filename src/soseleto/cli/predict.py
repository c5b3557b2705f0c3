"""``soseleto predict``: labels for new inputs, as CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path

from soseleto.data import Reading
from soseleto.data.read import read_inputs
from soseleto.data.tables import SUFFIXES
from soseleto.errors import UsageError, did_you_mean
from soseleto.prediction.load import LoadedRun, load


def predict(
    run: Path, files: Sequence[Path], *, model: str | None, format: str, device: str, encoding: str | None = None
) -> str:
    """Path, label and probability of every input, as CSV or JSON."""
    if format not in ("csv", "json"):
        raise UsageError(f"unknown format {format!r}{did_you_mean(format, ('csv', 'json'))}: choose csv or json.")
    loaded = load(run, model, device=device)
    if loaded.shape is None or loaded.task != "classification":
        raise UsageError(f"{run} is not a classifier that `soseleto fit` trained: use soseleto.load in Python.")
    inputs = read_inputs(
        files,
        shape=loaded.shape,
        preparation=loaded.preparation,
        reading=Reading(encoding=encoding, path_column=_path_column(loaded, files)),
    )
    sure, best = loaded.predict_proba(inputs.values).max(1)
    rows = [
        {"path": name, "label": loaded.class_name(index), "probability": round(probability, 4)}
        for name, index, probability in zip(inputs.names, best.tolist(), sure.tolist(), strict=True)
    ]
    if format == "json":
        return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n"
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=["path", "label", "probability"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _path_column(loaded: LoadedRun, files: Sequence[Path]) -> str | None:
    """The training's name for it; its file is read only for tables of images, so that others do not depend on it."""
    lists = loaded.preparation is None and any(file.suffix.lower() in SUFFIXES for file in files)
    return loaded.run.source().get("path_column") if lists else None
