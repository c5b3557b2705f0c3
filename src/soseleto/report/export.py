"""Export the ranking of a run as CSV, Parquet or JSON."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from soseleto.errors import UsageError, did_you_mean
from soseleto.run_folder.files import as_json, readable
from soseleto.run_folder.folder import RunFolder
from soseleto.run_folder.ranking import about_suspects, about_unknown, suspect_rows, with_names, worst_rows

LABELS = ("label", "predicted_label", "suggested_label", "true_label")  # numbers of a regression stay as they are


def export_ranking(
    run_path: str | os.PathLike[str],
    *,
    format: str = "csv",
    best: int | None = None,
    worst: int | None = None,
    suspects: bool = False,
) -> bytes:
    """The ranking, best first; or its ``best`` first rows, the ``worst``, or the suspects, worst first."""
    if format not in WRITERS:
        hint = did_you_mean(format, WRITERS)
        raise UsageError(f"unknown format {format!r}{hint}: choose one of {', '.join(WRITERS)}.")
    selections = {"--best": best, "--worst": worst, "--suspects": suspects or None}
    chosen = {option: number for option, number in selections.items() if number is not None}
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)} cannot be combined: give one of them.")
    for option, number in chosen.items():
        if number < 1:
            raise UsageError(f"{option} must be at least 1, got {number}.")
    run = RunFolder.open(run_path)
    ranking = run.ranking()
    with readable(run.path):
        rows = np.arange(len(ranking["weight"]))[:best]
        if worst is not None:
            rows = worst_rows(ranking)[:worst]
        elif suspects:
            run.require_noisy()
            rows = suspect_rows(ranking)
        columns = {name: values[rows] for name, values in with_names(ranking, run.source()).items()}
        if format != "parquet":
            columns = {
                name: values if name in LABELS else np.array([*map(_short, values.tolist())], dtype=object)
                for name, values in columns.items()
            }
        return WRITERS[format](columns)


def _no_formula(value: Any) -> Any:
    """Text that a spreadsheet would run as a formula gets a quote in front."""
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value  # a number as text


def describe_list(run_path: str | os.PathLike[str]) -> str:
    """What ``rank --suspects`` lists: how many, with which precision, and on what basis; what is unknown."""
    run = RunFolder.open(run_path)
    ranking = run.ranking()
    about, unknown = about_suspects(ranking, run.suspects()), about_unknown(ranking)
    return f"{about}. {unknown}" if unknown else about


def _short(value: Any) -> Any:
    """A number with three significant digits, and all of those before the point."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    short = round(value, max(0, 2 - math.floor(math.log10(abs(value or 1.0)))))
    return int(short) if short.is_integer() else short


def _csv(columns: dict[str, Any]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(map(_no_formula, row) for row in _rows(columns))
    return text.getvalue().encode()


def _json(columns: dict[str, Any]) -> bytes:
    """A list of objects, one per line; NaN (a score that was never measured) is null."""
    lines = (as_json(dict(zip(columns, row, strict=True))) for row in _rows(columns))
    return ("[\n" + ",\n".join(lines) + "\n]\n").encode()


def _parquet(columns: dict[str, Any]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink, compression="zstd")
    return bytes(sink.getvalue())


def _rows(columns: dict[str, Any]) -> Any:
    """Rows of Python values; float32 with the fewest digits that round-trip (0.1, not 0.10000000149011612)."""
    values = (
        [float(str(value)) for value in column] if column.dtype == np.float32 else column.tolist()
        for column in columns.values()
    )
    return zip(*values, strict=True)


WRITERS: Mapping[str, Callable[[dict[str, Any]], bytes]] = {"csv": _csv, "parquet": _parquet, "json": _json}
