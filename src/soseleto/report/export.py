"""Export the ranking of a run as CSV, Parquet or JSON."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable
from typing import Any

from soseleto.errors import UsageError, did_you_mean
from soseleto.run_folder.folder import RunFolder
from soseleto.run_folder.plausible import readable
from soseleto.run_folder.ranking import Ranking, is_suspect, suspect_rows

FORMATS = ("csv", "parquet", "json")


def export_ranking(
    run_path: str | os.PathLike[str],
    *,
    format: str = "csv",
    best: int | None = None,
    worst: int | None = None,
    suspects: bool = False,
) -> bytes:
    """The ranking, best first; or its ``best`` first rows, its ``worst`` last rows, or the suspects, worst first."""
    if format not in FORMATS:
        hint = did_you_mean(format, FORMATS)
        raise UsageError(f"unknown format {format!r}{hint}: choose one of {', '.join(FORMATS)}.")
    rows = _rows({"--best": best, "--worst": worst, "--suspects": suspects or None})
    run = RunFolder.open(run_path)
    ranking = run.ranking()
    with readable(run.path):
        chosen = rows(ranking)
        columns = {name: values[chosen] for name, values in with_usual_names(ranking).items()}
        return {"csv": _csv, "parquet": _parquet, "json": _json}[format](columns)


def with_usual_names(ranking: Ranking) -> dict[str, Any]:
    """The ranking with additional columns under the names that cleanlab and FiftyOne use.

    cleanlab: given_label, is_label_issue, label_quality (1 is best); FiftyOne: filepath, mistakenness (1 is worst).
    """
    columns = dict(ranking)
    columns["given_label"] = ranking["label"]
    columns["is_label_issue"] = is_suspect(ranking)
    if "mislabelled_probability" in ranking:
        columns["label_quality"] = 1 - ranking["mislabelled_probability"]
        columns["mistakenness"] = ranking["mislabelled_probability"]
    if "path" in ranking:
        columns["filepath"] = ranking["path"]
    return columns


def _rows(requested: dict[str, int | None]) -> Callable[[Ranking], Any]:
    """A selector of the requested rows."""
    given = {option: number for option, number in requested.items() if number is not None}
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} cannot be combined: give one of them.")
    for option, number in given.items():
        if number < 1:
            raise UsageError(f"{option} must be at least 1, got {number}.")
    if "--best" in given:
        return lambda ranking: slice(given["--best"])
    if "--worst" in given:
        return lambda ranking: slice(None, -given["--worst"] - 1, -1)
    return suspect_rows if "--suspects" in given else lambda ranking: slice(None)


def _csv(columns: dict[str, Any]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*(_shortest(values) for values in columns.values()), strict=True))
    return text.getvalue().encode()


def _json(columns: dict[str, Any]) -> bytes:
    """A list of objects, one per line; NaN (a score that was never measured) is null."""
    rows = zip(*(_shortest(values) for values in columns.values()), strict=True)
    lines = (json.dumps(dict(zip(columns, map(_finite, row), strict=True)), ensure_ascii=False) for row in rows)
    return ("[\n" + ",\n".join(lines) + "\n]\n").encode()


def _parquet(columns: dict[str, Any]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink, compression="zstd")
    return bytes(sink.getvalue())


def _shortest(values: Any) -> list[Any]:
    """Python values; float32 with the fewest digits that round-trip (0.1, not 0.10000000149011612)."""
    if values.dtype.kind != "f" or values.dtype.itemsize > 4:
        return values.tolist()
    return [float(str(value)) for value in values]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
