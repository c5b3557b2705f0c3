"""Source, target and test read together: one class list, one image shape, one list of problems."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Never

import torch
from torch import Tensor

from soseleto.data.example_set import ExampleSet
from soseleto.data.examples import Examples
from soseleto.data.image_decoding.workers import Progress, Shape
from soseleto.data.joined import Joined
from soseleto.data.live import Live, is_free
from soseleto.data.readers.checks import check_examples
from soseleto.data.readers.class_indices import number_labels
from soseleto.data.readers.images import pixels_of, shape_for
from soseleto.data.readers.open import is_dataset, raw_of
from soseleto.data.readers.problems import Problem, ProblemsError, some
from soseleto.data.readers.raw import Raw
from soseleto.data.readers.reading import Reading, refuse_keywords
from soseleto.data.stream import Stream, is_stream
from soseleto.errors import DataError, UsageError, did_you_mean

MODES = ("noisy", "transfer")


@dataclass(frozen=True, eq=False)
class Pair:
    """The data of a training run; ``problems`` lists what was found, ``dropped`` those whose examples were left out."""

    source: Examples
    target: Examples
    test: Examples | None
    problems: tuple[Problem, ...] = ()
    dropped: tuple[Problem, ...] = ()
    columns: tuple[str, ...] | None = None


def as_example_set(data: Any, *, name: str) -> ExampleSet:
    """Data in memory, a Dataset that stays where it is (``Live``), or for the source a ``Stream``."""
    if is_stream(data) and not isinstance(data, Live | Stream | Joined):
        data = Stream(data)
    if isinstance(data, Stream) and name != "source":  # only the source is read in order
        return data.in_memory()
    if isinstance(data, Live | Stream):
        return data.named(name)
    if isinstance(data, Joined):
        return data
    return Live(data).named(name) if is_dataset(data) and not is_free(data) else as_examples(data, name=name)


def as_examples(data: Any, *, name: str, reading: Reading | None = None, **unknown: Never) -> Examples:
    """Read one data set into memory, in any accepted form; ``name`` is used in error messages.

    To read a source and a target that share their classes, use ``read_pair``.
    """
    refuse_keywords(unknown, function="as_examples")
    if isinstance(data, Examples):
        return data
    reading = reading or Reading()
    raw = raw_of(data, name=name, reading=reading)
    (labelled,) = number_labels([raw], shared=True, merge=reading.merge_labels)
    made, problems = _decode(labelled, shape_for(labelled, reading), reading)
    if any(problem.stops for problem in problems):
        raise ProblemsError(problems)
    return made


def read_pair(
    source: Any,
    target: Any,
    test: Any = None,
    *,
    mode: str,
    reading: Reading | None = None,
    skip_bad: bool = False,
    progress: Progress | None = None,
    **unknown: Never,
) -> Pair:
    """Read and check source, target and test; raises ``ProblemsError`` with all problems at once.

    With ``skip_bad=True`` the affected examples are left out instead and listed in ``Pair.dropped``. In noisy mode
    source and target share one list of classes; in transfer mode target and test have their own. File options are
    fields of ``reading``: ``read_pair("scraped", "checked", mode="noisy", reading=Reading(image_size=64))``.
    """
    refuse_keywords(unknown, function="read_pair")
    sets, problems, columns = _read(source, target, test, mode, reading or Reading(), progress)
    if not skip_bad and any(problem.stops for problem in problems):
        raise ProblemsError(problems)
    dropped = tuple(problem for problem in problems if problem.stops)
    sets = {name: _without(name, examples, dropped) for name, examples in sets.items()}
    return Pair(sets["source"], sets["target"], sets.get("test"), tuple(problems), dropped, columns)


def check_pair(
    source: Any, target: Any, test: Any = None, *, mode: str, reading: Reading | None = None
) -> list[Problem]:
    """All problems of the data sets in one list; bad examples do not raise."""
    return _read(source, target, test, mode, reading or Reading(), None)[1]


def check_mode(mode: str) -> None:
    if mode not in MODES:
        raise UsageError(f"mode must be 'noisy' or 'transfer', got {mode!r}{did_you_mean(mode, MODES)}.")


def _read(
    source: Any, target: Any, test: Any, mode: str, reading: Reading, progress: Progress | None
) -> tuple[dict[str, Examples], list[Problem], tuple[str, ...] | None]:
    check_mode(mode)
    given = {"source": source, "target": target} | ({} if test is None else {"test": test})
    raws = [raw_of(data, name=name, reading=reading) for name, data in given.items()]
    _refuse_structures(raws)
    raws = number_labels(raws, shared=mode == "noisy", merge=reading.merge_labels)
    _match_columns(raws)
    shape = shape_for(raws[0], reading)
    sets: dict[str, Examples] = {}
    problems: list[Problem] = []
    for raw in raws:
        sets[raw.name], found = _decode(raw, shape, reading, progress)
        problems += found
    _check_shapes(sets)
    problems += check_examples(sets, mode=mode, columns=raws[0].columns)
    return sets, problems, raws[0].columns


def _refuse_structures(raws: list[Raw]) -> None:
    for raw in raws:
        if raw.inputs is not None and not isinstance(raw.inputs, Tensor):
            raise UsageError(
                f"the inputs of the {raw.name} are a {type(raw.inputs).__name__} of tensors, which cannot be checked "
                "beside files: give all data as pairs or Datasets."
            )


def _decode(
    raw: Raw, shape: Shape | None, reading: Reading, progress: Progress | None = None
) -> tuple[Examples, list[Problem]]:
    """The usable examples, and the problems of the others."""
    inputs, problems = raw.inputs, list(raw.problems)
    if inputs is None:
        if shape is None:
            raise DataError(f"the {raw.name} has images but the source has features: give both the same kind.")
        inputs, found = pixels_of(raw, shape, reading, progress)
        problems += found
    labels = raw.labels
    assert isinstance(labels, Tensor)
    assert raw.truth is None or isinstance(raw.truth, Tensor)
    keep = _keep(raw, problems)
    if bool(keep.all()):
        return Examples(inputs, labels, raw.ids, raw.classes, raw.truth, raw.paths), problems
    if not bool(keep.any()):
        raise DataError(f"no example of the {raw.name} can be used: {some([str(p) for p in problems])}")
    if labels.ndim == 1:  # Examples refuses -1, and rows that are left out may have no class: any index will do
        labels = torch.where(keep.to(labels.device), labels, 0)
    return Examples(inputs, labels, raw.ids, raw.classes, raw.truth, raw.paths).subset(keep), problems


def _without(name: str, examples: Examples, dropped: Sequence[Problem]) -> Examples:
    keep = _keep(examples, [problem for problem in dropped if problem.where == name])
    if bool(keep.all()):
        return examples
    if not bool(keep.any()):
        raise DataError(f"no example of the {name} is left: all {len(keep)} have problems.")
    return examples.subset(keep)


def _keep(data: Raw | Examples, problems: Collection[Problem]) -> Tensor:
    """(N,) mask of the examples that no problem names."""
    bad = {one for problem in problems for one in problem.ids}
    if not bad:
        return torch.ones(len(data), dtype=torch.bool)
    return torch.tensor([data.id_of(row) not in bad for row in range(len(data))])


def _check_shapes(sets: dict[str, Examples]) -> None:
    source = sets["source"]
    for name, examples in sets.items():
        if examples.inputs.shape[1:] != source.inputs.shape[1:]:
            raise DataError(
                f"{name} inputs have shape {tuple(examples.inputs.shape[1:])} but the source's have "
                f"{tuple(source.inputs.shape[1:])}: bring them to one shape."
            )


def _match_columns(raws: list[Raw]) -> None:
    """Put the feature columns of every table in the source's order, by name."""
    source = raws[0]
    for at, raw in enumerate(raws):
        if raw.columns is None or source.columns is None or raw.columns == source.columns:
            continue
        missing = [column for column in source.columns if column not in raw.columns]
        extra = [column for column in raw.columns if column not in source.columns]
        if missing or extra:
            difference = f"lacks {some(missing)}" if missing else f"also has {some(extra)}"
            raise DataError(f"the {raw.name} table {difference}: give it the feature columns of the source.")
        assert raw.inputs is not None
        order = torch.tensor([raw.columns.index(column) for column in source.columns])
        raws[at] = replace(raw, inputs=raw.inputs[:, order], columns=source.columns)
