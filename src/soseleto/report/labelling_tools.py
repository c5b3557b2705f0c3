"""Examples of a ranking as files that labelling tools import, each with its label and the suggested one.

label-studio   a JSON list of tasks with predictions (labelstud.io/guide/predictions)
argilla        a JSON list of records with suggestions, for ``dataset.records.from_json`` (docs.argilla.io)
fiftyone       ``labels.json`` of a FiftyOneImageClassificationDataset (docs.voxel51.com), for images

Label Studio gets local images by paths below its document root, which is the folder above the images.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import numpy as np

from soseleto.errors import UsageError
from soseleto.run_folder.folder import RunFolder
from soseleto.run_folder.ranking import Ranking, feature_columns
from soseleto.run_folder.source import image_files

AGENT = "soseleto"
TEXT, IMAGE = "text", "image"


@dataclass(frozen=True)
class Shown:
    """One example: what is shown of it, its label, and the label that may be right."""

    id: str
    content: str  # a text, or the absolute path of an image
    label: str
    suggested: str | None
    wrong: float | None  # the probability that the label is wrong


def tool_file(run: RunFolder, ranking: Ranking, rows: Any, tool: str) -> bytes:
    """The rows of the ranking in the format of a tool of ``TOOLS``."""
    kind, content = _content(run, ranking, tool)
    suggested = ranking.get("suggested_label", ranking.get("predicted_label"))
    probability = ranking.get("mislabelled_probability")
    places = np.arange(len(ranking["id"]))[rows].tolist()
    shown = [str(content[row]) for row in places]
    if kind == IMAGE:
        shown = image_files(run, shown)
    examples = [
        Shown(
            id=str(ranking["id"][row]),
            content=one,
            label=str(ranking["label"][row]),
            suggested=None if suggested is None else str(suggested[row]),
            wrong=None if probability is None or math.isnan(probability[row]) else round(float(probability[row]), 6),
        )
        for row, one in zip(places, shown, strict=True)
    ]
    return (json.dumps(TOOLS[tool](examples, kind), ensure_ascii=False, indent=1) + "\n").encode()


def _content(run: RunFolder, ranking: Ranking, tool: str) -> tuple[str, Any]:
    """What a person is shown: the images, or the first column of texts."""
    if "path" in ranking:
        return IMAGE, ranking["path"]
    if tool == "fiftyone":
        raise UsageError(f"FiftyOne shows images, and {run.path} has none: use label-studio or argilla for texts.")
    names = feature_columns(ranking, run.source())
    for text in _text_columns(run.config()):
        for column, name in names.items():
            if name == text:
                return TEXT, ranking[column]
    raise UsageError(f"{tool} shows texts and images, and {run.path} has neither: use --format csv.")


def _text_columns(config: Mapping[str, Any]) -> list[str]:
    preparation = (config.get("prepare") or {}).get("standardize") or {}
    if "text" in preparation:
        return [str(preparation["text"])]
    return [str(one["name"]) for one in preparation.get("columns", ()) if one.get("kind") == "text"]


def _label_studio(examples: Sequence[Shown], kind: str) -> Any:
    """Tasks for <Choices name="label" toName="text"> or toName="image"."""
    root = _document_root([one.content for one in examples]) if kind == IMAGE else ""
    return [_task(one, kind, root) for one in examples]


def _task(one: Shown, kind: str, root: str) -> dict[str, Any]:
    shown = one.content if kind == TEXT else _local_file(one.content, root)
    task: dict[str, Any] = {"data": {kind: shown, "example": one.id, "given_label": one.label}}
    if one.suggested is not None:
        choice = {"type": "choices", "value": {"choices": [one.suggested]}}
        result = {"id": f"{AGENT}-{one.id}", "from_name": "label", "to_name": kind, **choice}
        prediction: dict[str, Any] = {"model_version": AGENT, "result": [result]}
        if one.wrong is not None:
            prediction["score"] = one.wrong
        task["predictions"] = [prediction]
    return task


def _document_root(paths: Sequence[str]) -> str:
    """The folder above the one that has all images: Label Studio takes folders below its root as storage."""
    return os.path.dirname(os.path.commonpath([os.path.dirname(path) for path in paths])) if paths else ""


def _local_file(path: str, root: str) -> str:
    return "/data/local-files/?d=" + quote(os.path.relpath(path, root).replace(os.sep, "/"))


def _argilla(examples: Sequence[Shown], kind: str) -> Any:
    """Records with the field ``text`` or ``image`` and the question ``label``."""
    return [
        {
            "id": one.id,
            "fields": {kind: one.content},
            "metadata": {"given_label": one.label} | ({} if one.wrong is None else {"mistakenness": one.wrong}),
            "suggestions": {}
            if one.suggested is None
            else {"label": {"value": one.suggested, "score": one.wrong, "agent": AGENT}},
            "responses": {},
            "vectors": {},
        }
        for one in examples
    ]


def _fiftyone(examples: Sequence[Shown], kind: str) -> Any:
    """Labels by the absolute path of each image."""
    return {"labels": {one.content: {"label": one.label, "attributes": _attributes(one)} for one in examples}}


def _attributes(one: Shown) -> dict[str, Any]:
    values = {"example": one.id, "suggested_label": one.suggested, "mistakenness": one.wrong}
    return {name: value for name, value in values.items() if value is not None}


TOOLS: Mapping[str, Callable[[Sequence[Shown], str], Any]] = {
    "label-studio": _label_studio,
    "argilla": _argilla,
    "fiftyone": _fiftyone,
}
