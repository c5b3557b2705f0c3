"""The ranking of a run as CSV, Parquet or JSON."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from typing import Any

from soseleto.errors import UsageError, did_you_mean
from soseleto.run import RunFolder

FORMATS = ("csv", "parquet", "json")


def export_ranking(
    run_path: str | os.PathLike[str], *, format: str = "csv", best: int | None = None, worst: int | None = None
) -> bytes:
    """The whole ranking, best first; or its ``best`` first rows, or its ``worst`` last, worst first."""
    if format not in FORMATS:
        hint = did_you_mean(format, FORMATS)
        raise UsageError(f"unknown format {format!r}{hint}: choose one of {', '.join(FORMATS)}.")
    columns = _part(RunFolder.open(run_path).ranking(), best, worst)
    return {"csv": _csv, "parquet": _parquet, "json": _json}[format](columns)


def _part(columns: dict[str, Any], best: int | None, worst: int | None) -> dict[str, Any]:
    if best is not None and worst is not None:
        raise UsageError("--best and --worst exclude each other: give one of them.")
    for option, number in (("--best", best), ("--worst", worst)):
        if number is not None and number < 1:
            raise UsageError(f"{option} must be at least 1, got {number}.")
    if best is not None:
        return {name: values[:best] for name, values in columns.items()}
    if worst is not None:
        return {name: values[::-1][:worst] for name, values in columns.items()}
    return columns


def _csv(columns: dict[str, Any]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*(_shortest(values) for values in columns.values()), strict=True))
    return text.getvalue().encode()


def _json(columns: dict[str, Any]) -> bytes:
    """One list of objects, one object a line; a score that was never measured is null."""
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
    """Plain values; a float32 in the fewest digits that give it back (0.1, not 0.10000000149011612)."""
    if values.dtype.kind != "f" or values.dtype.itemsize > 4:
        return values.tolist()
    return [float(str(value)) for value in values]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
