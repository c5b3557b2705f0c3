"""Source, target and test read together: one label rule, one image shape, one list of problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soseleto.data.examples import Examples
from soseleto.data.readers.checks import check_examples
from soseleto.data.readers.class_indices import number_labels
from soseleto.data.readers.images import Shape, check_options, pixels_of, shape_for
from soseleto.data.readers.open import raw_of
from soseleto.data.readers.problems import Problem, ProblemsError, some
from soseleto.data.readers.raw import Raw, Reading
from soseleto.errors import DataError, UsageError, did_you_mean

MODES = ("noisy", "transfer")
Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Pair:
    """What a training needs; ``problems`` is what was found on the way, ``dropped`` what was left out."""

    source: Examples
    target: Examples
    test: Examples | None
    problems: tuple[Problem, ...] = ()
    dropped: tuple[Problem, ...] = ()
    columns: tuple[str, ...] | None = None


def as_examples(
    data: Any,
    *,
    name: str,
    image_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    path_column: str | None = None,
    label_column: str | None = None,
    id_column: str | None = None,
    truth_column: str | None = None,
    root: str | Path | None = None,
    allow_outside: bool = False,
    cache: str | Path | None = None,
    workers: int | None = None,
) -> Examples:
    """One data set by itself, in any accepted form; ``name`` is used in error sentences.

    To read a source and a target that share their classes, use ``read_pair``.
    """
    if isinstance(data, Examples):
        return data
    reading = Reading(
        image_size, channels, path_column, label_column, id_column, truth_column,
        root, allow_outside, cache, workers,
    )  # fmt: skip
    check_options(reading)
    raw = raw_of(data, name=name, reading=reading)
    (labelled,) = number_labels([raw], shared=True)
    made, problems = _decode(labelled, shape_for(labelled, reading), reading)
    if problems:
        raise ProblemsError(problems)
    return made


def read_pair(
    source: Any,
    target: Any,
    test: Any = None,
    *,
    mode: str,
    image_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    path_column: str | None = None,
    label_column: str | None = None,
    id_column: str | None = None,
    truth_column: str | None = None,
    root: str | Path | None = None,
    allow_outside: bool = False,
    cache: str | Path | None = None,
    workers: int | None = None,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> Pair:
    """Read and check everything; problems that stop raise ``ProblemsError`` with all of them at once.

    With ``skip_bad=True`` the examples concerned are left out instead, and listed in ``Pair.dropped``. In noisy
    mode source and target share one list of classes; in transfer mode the target and the test have their own.
    """
    reading = Reading(
        image_size, channels, path_column, label_column, id_column, truth_column,
        root, allow_outside, cache, workers,
    )  # fmt: skip
    sets, problems, columns = _read(source, target, test, mode, reading, progress)
    if not skip_bad and any(problem.stops for problem in problems):
        raise ProblemsError(problems)
    dropped = tuple(problem for problem in problems if problem.stops)
    sets = {name: _without(name, examples, dropped) for name, examples in sets.items()}
    return Pair(sets["source"], sets["target"], sets.get("test"), tuple(problems), dropped, columns)


def check_pair(
    source: Any, target: Any, test: Any = None, *, mode: str, reading: Reading | None = None
) -> list[Problem]:
    """Every problem of the three sets in one list, in any accepted form; nothing is raised for bad examples."""
    return _read(source, target, test, mode, reading or Reading(), None)[1]


def _read(
    source: Any, target: Any, test: Any, mode: str, reading: Reading, progress: Progress | None
) -> tuple[dict[str, Examples], list[Problem], tuple[str, ...] | None]:
    if mode not in MODES:
        raise UsageError(f"mode must be 'noisy' or 'transfer', got {mode!r}{did_you_mean(mode, MODES)}.")
    check_options(reading)
    given = {"source": source, "target": target} | ({} if test is None else {"test": test})
    raws = [raw_of(data, name=name, reading=reading) for name, data in given.items()]
    raws = number_labels(raws, shared=mode == "noisy")
    _same_columns(raws)
    shape = shape_for(raws[0], reading)
    sets: dict[str, Examples] = {}
    problems: list[Problem] = []
    for raw in raws:
        sets[raw.name], found = _decode(raw, shape, reading, progress)
        problems += found
    _same_shape(sets)
    problems += check_examples(sets, mode=mode, columns=raws[0].columns)
    return sets, problems, raws[0].columns


def _decode(
    raw: Raw, shape: Shape | None, reading: Reading, progress: Progress | None = None
) -> tuple[Examples, list[Problem]]:
    """The examples that can be used, and the problems of the others."""
    inputs, problems = raw.inputs, list(raw.problems)
    if inputs is None:
        if shape is None:
            raise DataError(f"the {raw.name} has images but the source has features: give both the same kind.")
        inputs, found = pixels_of(raw, shape, reading, progress)
        problems += found
    labels = raw.labels
    assert isinstance(labels, Tensor)
    assert raw.truth is None or isinstance(raw.truth, Tensor)
    bad = {one for problem in problems for one in problem.ids}
    if not bad:
        return Examples(inputs, labels, raw.ids, raw.classes, raw.truth, raw.paths), problems
    keep = torch.tensor([raw.id_of(row) not in bad for row in range(len(raw))])
    if not bool(keep.any()):
        raise DataError(f"nothing can be used of the {raw.name}: {some([str(p) for p in problems])}")
    if labels.ndim == 1:  # rows that are left out may have no class: any will do
        labels = torch.where(keep.to(labels.device), labels, 0)
    return Examples(inputs, labels, raw.ids, raw.classes, raw.truth, raw.paths).subset(keep), problems


def _without(name: str, examples: Examples, dropped: Sequence[Problem]) -> Examples:
    bad = {one for problem in dropped if problem.where == name for one in problem.ids}
    if not bad:
        return examples
    keep = torch.tensor([examples.id_of(row) not in bad for row in range(len(examples))])
    if bool(keep.all()):
        return examples
    if not bool(keep.any()):
        raise DataError(f"nothing is left of the {name} once its {len(bad)} bad examples are left out.")
    return examples.subset(keep)


def _same_shape(sets: dict[str, Examples]) -> None:
    source = sets["source"]
    for name, examples in sets.items():
        if examples.inputs.shape[1:] != source.inputs.shape[1:]:
            raise DataError(
                f"{name} inputs have shape {tuple(examples.inputs.shape[1:])} but the source's have "
                f"{tuple(source.inputs.shape[1:])}: bring them to one shape."
            )


def _same_columns(raws: list[Raw]) -> None:
    """Feature columns are matched by name, in the source's order."""
    source = raws[0]
    for at, raw in enumerate(raws):
        if raw.columns is None or source.columns is None or raw.columns == source.columns:
            continue
        lacking = [column for column in source.columns if column not in raw.columns]
        extra = [column for column in raw.columns if column not in source.columns]
        if lacking or extra:
            words = f"lacks {some(lacking)}" if lacking else f"has {some(extra)} besides"
            raise DataError(f"the {raw.name} table {words}: give it the feature columns of the source.")
        assert raw.inputs is not None
        order = torch.tensor([raw.columns.index(column) for column in source.columns])
        raws[at] = replace(raw, inputs=raw.inputs[:, order], columns=source.columns)
