"""Export the ranking of a run as CSV, Parquet or JSON, or as a file for a labelling tool.

label-studio   a JSON list of tasks with predictions (labelstud.io/guide/predictions)
argilla        a JSON list of records with suggestions, for ``dataset.records.from_json`` (docs.argilla.io)
fiftyone       ``labels.json`` of a FiftyOneImageClassificationDataset (docs.voxel51.com), for images

Label Studio gets local images by paths below its document root, which is the folder above the images.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import numpy as np

from soseleto.errors import UsageError, did_you_mean
from soseleto.run_folder.files import as_json, readable
from soseleto.run_folder.folder import RunFolder
from soseleto.run_folder.ranking import (
    Ranking,
    about_suspects,
    about_unknown,
    best_count,
    feature_columns,
    is_suspect,
    most_suspicious_first,
    worst_rows,
)
from soseleto.run_folder.source import image_files

AGENT = "soseleto"
TEXT, IMAGE = "text", "image"


def export_ranking(
    run_path: str | os.PathLike[str],
    *,
    format: str = "csv",
    best: int | None = None,
    worst: int | None = None,
    suspects: bool = False,
) -> bytes:
    """The ranking, best first; or its ``best`` first rows, the ``worst``, or the suspects, worst first."""
    if format not in FORMATS:
        hint = did_you_mean(format, FORMATS)
        raise UsageError(f"unknown format {format!r}{hint}: choose one of {', '.join(FORMATS)}.")
    selections = {"--best": best, "--worst": worst, "--suspects": suspects or None}
    given = {option: number for option, number in selections.items() if number is not None}
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} cannot be combined: give one of them.")
    for option, number in given.items():
        if number < 1:
            raise UsageError(f"{option} must be at least 1, got {number}.")
    run = RunFolder.open(run_path)
    ranking = run.ranking()
    with readable(run.path):
        rows = np.arange(len(ranking["weight"]))[:best]
        if worst is not None:
            rows = worst_rows(ranking)[:worst]
        elif suspects:
            rows = listed_rows(run, ranking)
        if format in TOOLS:
            return _tool_file(run, ranking, rows, format)
        named = with_usual_names(ranking, transfer=run.is_transfer)
        return _WRITERS[format]({name: values[rows] for name, values in named.items()})


def listed_rows(run: RunFolder, ranking: Ranking) -> np.ndarray:
    """The suspects, or the best list there is where there are none, most suspicious first."""
    run.require_noisy()
    return most_suspicious_first(ranking)[: int(is_suspect(ranking).sum()) or best_count(run.suspects())]


def describe_list(run_path: str | os.PathLike[str]) -> str:
    """What ``rank --suspects`` lists: how many, with which precision, and on what basis; what is unknown."""
    run = RunFolder.open(run_path)
    ranking = run.ranking()
    listed_rows(run, ranking)  # refuses transfer mode
    about = about_suspects(ranking, run.suspects())
    unknown = about_unknown(ranking)
    return f"{about}. {unknown}" if unknown else about


def with_usual_names(ranking: Ranking, *, transfer: bool = False) -> dict[str, Any]:
    """The ranking with additional columns under the names that cleanlab and FiftyOne use.

    cleanlab: given_label, is_label_issue, label_quality (1 is best); FiftyOne: filepath, mistakenness (1 is worst).
    In transfer mode a low weight does not mean a wrong label, so there is no is_label_issue.
    """
    columns = {**ranking, "given_label": ranking["label"]}
    if not transfer:
        columns["is_label_issue"] = is_suspect(ranking)
    if "mislabelled_probability" in ranking:
        columns["label_quality"] = 1 - ranking["mislabelled_probability"]
        columns["mistakenness"] = ranking["mislabelled_probability"]
    if "path" in ranking:
        columns["filepath"] = ranking["path"]
    return columns


def _csv(columns: dict[str, Any]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(_rows(columns))
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


# Labelling tools


@dataclass(frozen=True)
class Shown:
    """One example: what is shown of it, its label, and the label that may be right."""

    id: str
    content: str  # a text, or the absolute path of an image
    label: str
    suggested: str | None
    wrong: float | None  # the probability that the label is wrong


def _tool_file(run: RunFolder, ranking: Ranking, rows: np.ndarray, tool: str) -> bytes:
    kind, column = _content(run, ranking, tool)
    contents = [str(content) for content in column[rows]]
    if kind == IMAGE:
        contents = image_files(run, contents)
    suggested = ranking.get("suggested_label", ranking.get("predicted_label"))
    probability = ranking.get("mislabelled_probability")
    examples = [
        Shown(
            id=str(ranking["id"][row]),
            content=content,
            label=str(ranking["label"][row]),
            suggested=None if suggested is None else str(suggested[row]),
            wrong=None if probability is None or math.isnan(probability[row]) else round(float(probability[row]), 6),
        )
        for row, content in zip(rows.tolist(), contents, strict=True)
    ]
    return (json.dumps(TOOLS[tool](examples, kind), ensure_ascii=False, indent=1) + "\n").encode()


def _content(run: RunFolder, ranking: Ranking, tool: str) -> tuple[str, np.ndarray]:
    """What a person is shown: the images, or the first column of texts."""
    if "path" in ranking:
        return IMAGE, ranking["path"]
    if tool == "fiftyone":
        raise UsageError(f"FiftyOne shows images, and {run.path} has none: use label-studio or argilla for texts.")
    names = {name: column for column, name in feature_columns(ranking, run.source()).items()}
    for text in _text_columns(run.config()):
        if text in names:
            return TEXT, ranking[names[text]]
    raise UsageError(f"{tool} shows texts and images, and {run.path} has neither: use --format csv.")


def _text_columns(config: Mapping[str, Any]) -> list[str]:
    preparation = (config.get("prepare") or {}).get("standardize") or {}
    if "text" in preparation:
        return [str(preparation["text"])]
    return [str(column["name"]) for column in preparation.get("columns", ()) if column.get("kind") == "text"]


def _label_studio(examples: Sequence[Shown], kind: str) -> Any:
    """Tasks for <Choices name="label" toName="text"> or toName="image"."""
    root = ""
    if kind == IMAGE and examples:  # Label Studio takes folders below its root as storage
        root = os.path.dirname(os.path.commonpath([os.path.dirname(example.content) for example in examples]))
    return [_task(example, kind, root) for example in examples]


def _task(example: Shown, kind: str, root: str) -> dict[str, Any]:
    content = example.content
    if kind == IMAGE:
        content = "/data/local-files/?d=" + quote(os.path.relpath(content, root).replace(os.sep, "/"))
    task: dict[str, Any] = {"data": {kind: content, "example": example.id, "given_label": example.label}}
    if example.suggested is not None:
        choice = {"type": "choices", "value": {"choices": [example.suggested]}}
        result = {"id": f"{AGENT}-{example.id}", "from_name": "label", "to_name": kind, **choice}
        score = {} if example.wrong is None else {"score": example.wrong}
        task["predictions"] = [{"model_version": AGENT, "result": [result], **score}]
    return task


def _argilla(examples: Sequence[Shown], kind: str) -> Any:
    """Records with the field ``text`` or ``image`` and the question ``label``."""
    return [
        {
            "id": example.id,
            "fields": {kind: example.content},
            "metadata": _known({"given_label": example.label, "mistakenness": example.wrong}),
            "suggestions": {}
            if example.suggested is None
            else {"label": {"value": example.suggested, "score": example.wrong, "agent": AGENT}},
            "responses": {},
            "vectors": {},
        }
        for example in examples
    ]


def _fiftyone(examples: Sequence[Shown], kind: str) -> Any:
    """Labels by the absolute path of each image."""
    labels = {}
    for example in examples:
        attributes = {"example": example.id, "suggested_label": example.suggested, "mistakenness": example.wrong}
        labels[example.content] = {"label": example.label, "attributes": _known(attributes)}
    return {"labels": labels}


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


_WRITERS: Mapping[str, Callable[[dict[str, Any]], bytes]] = {"csv": _csv, "parquet": _parquet, "json": _json}
TOOLS: Mapping[str, Callable[[Sequence[Shown], str], Any]] = {
    "label-studio": _label_studio,
    "argilla": _argilla,
    "fiftyone": _fiftyone,
}
FORMATS = (*_WRITERS, *TOOLS)
