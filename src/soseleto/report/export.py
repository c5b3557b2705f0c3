"""Export the ranking of a run as CSV, Parquet or JSON, or as a file for a labelling tool."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable
from typing import Any

from soseleto.errors import UsageError, did_you_mean
from soseleto.report.labelling_tools import TOOLS, tool_file
from soseleto.run_folder.files import readable
from soseleto.run_folder.folder import RunFolder
from soseleto.run_folder.ranking import (
    Ranking,
    about_unknown,
    best_count,
    expected,
    guaranteed_count,
    in_words,
    is_suspect,
    most_suspicious_first,
    worst_rows,
)

FORMATS = ("csv", "parquet", "json", *TOOLS)


def export_ranking(
    run_path: str | os.PathLike[str],
    *,
    format: str = "csv",
    best: int | None = None,
    worst: int | None = None,
    suspects: bool = False,
    guarantee: bool = False,
) -> bytes:
    """The ranking, best first; or its ``best`` first rows, the ``worst``, or the suspects, worst first."""
    if format not in FORMATS:
        hint = did_you_mean(format, FORMATS)
        raise UsageError(f"unknown format {format!r}{hint}: choose one of {', '.join(FORMATS)}.")
    rows = _rows({"--best": best, "--worst": worst, "--suspects": suspects or None})
    run = RunFolder.open(run_path)
    ranking = run.ranking()
    with readable(run.path):
        chosen = listed_rows(run, ranking, guarantee=guarantee) if suspects else rows(ranking)
        if format in TOOLS:
            return tool_file(run, ranking, chosen, format)
        named = with_usual_names(ranking, transfer=is_transfer(run))
        return {"csv": _csv, "parquet": _parquet, "json": _json}[format](
            {name: values[chosen] for name, values in named.items()}
        )


def listed_rows(run: RunFolder, ranking: Ranking, *, guarantee: bool = False) -> Any:
    """The suspects, or the best list there is where there are none, most suspicious first.

    guarantee: only as many as the lower end of the interval of their precision allows
    """
    if is_transfer(run):
        raise UsageError(
            f"{run.path} was trained in transfer mode, where weights are about the target and not about wrong labels: "
            "list the lowest weights with --worst N."
        )
    if guarantee:
        count = guaranteed_count(run.suspects(), _asked(run))
    else:
        count = int(is_suspect(ranking).sum()) or best_count(run.suspects())
    return most_suspicious_first(ranking)[:count]


def guaranteed_rows(run_path: str | os.PathLike[str]) -> Any:
    """The rows of ``rank --suspects --guarantee``."""
    run = RunFolder.open(run_path)
    return listed_rows(run, run.ranking(), guarantee=True)


def describe_list(run_path: str | os.PathLike[str], *, guarantee: bool = False) -> str:
    """What ``rank --suspects`` lists: how many, with which precision, and on what basis; what is unknown."""
    run = RunFolder.open(run_path)
    about, unknown = _about_list(run, guarantee=guarantee), about_unknown(run.ranking())
    return f"{about}. {unknown}" if unknown else about


def _about_list(run: RunFolder, *, guarantee: bool) -> str:
    ranking, found = run.ranking(), run.suspects() or {}
    count, asked = len(listed_rows(run, ranking, guarantee=guarantee)), f"{100 * _asked(run):.0f} %"
    if guarantee:
        return f"{count:,} suspects whose precision is at least {asked} by the lower end of its 95 % interval" + (
            f" ({found['basis']})" if count else f": the precision of the list is {in_words(found.get('precision'))}"
        )
    if not is_suspect(ranking).any():
        best = expected((found.get("best") or {}).get("precision"))
        return f"no suspects at a precision of {asked}: the {count:,} most probable, {best}"
    return f"{count:,} suspects: precision {in_words(found.get('precision'))}, recall {in_words(found.get('recall'))}"


def is_transfer(run: RunFolder) -> bool:
    return run.config().get("mode") == "transfer"


def _asked(run: RunFolder) -> float:
    return float(run.config().get("suspect_precision") or 0.95)


def with_usual_names(ranking: Ranking, *, transfer: bool = False) -> dict[str, Any]:
    """The ranking with additional columns under the names that cleanlab and FiftyOne use.

    cleanlab: given_label, is_label_issue, label_quality (1 is best); FiftyOne: filepath, mistakenness (1 is worst).
    In transfer mode a low weight does not mean a wrong label, so there is no is_label_issue.
    """
    columns = dict(ranking)
    columns["given_label"] = ranking["label"]
    if not transfer:
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
        return lambda ranking: worst_rows(ranking)[: given["--worst"]]
    return lambda ranking: slice(None)


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
