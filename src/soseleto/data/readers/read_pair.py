"""Source, target and test read together: one class list, one image shape, one list of problems."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Never

import torch
from torch import Tensor

from soseleto.data.examples import Examples, ExampleSet
from soseleto.data.images import Progress, Shape, pixels_of, shape_for
from soseleto.data.lazy import LazyDataset, fits_memory, refuse_iterable
from soseleto.data.readers.checks import CHECKED, check_examples, labels_in_source, labels_in_target
from soseleto.data.readers.class_indices import number_labels
from soseleto.data.readers.open import UNLABELLED, is_dataset, raw_of, raw_without_labels
from soseleto.data.readers.prepare_tables import Preparation, prepare_tables
from soseleto.data.readers.problems import Problem, ProblemsError, some
from soseleto.data.readers.raw import Raw
from soseleto.data.readers.reading import Reading, given_kinds, refuse_keywords
from soseleto.data.text import TextExamples
from soseleto.errors import DataError, UsageError, did_you_mean

MODES = ("noisy", "transfer")


@dataclass(frozen=True, eq=False)
class Pair:
    """The data of a training run; ``problems`` lists what was found, ``dropped`` those whose examples were left out.

    labels_before: where target examples also lay in the source, some under another label: the labels that they had
        there, (N,) with -1 for the others
    copies: the ids of these source examples, which are left out; checked: the target's label, where it is another
    """

    source: Examples
    target: Examples
    test: Examples | None
    problems: tuple[Problem, ...] = ()
    dropped: tuple[Problem, ...] = ()
    columns: tuple[str, ...] | None = None
    labels_before: Tensor | None = None
    copies: tuple[str, ...] = ()
    checked: Mapping[str, str] = field(default_factory=dict)
    preparation: Preparation | None = None  # of tables
    unlabelled: Tensor | None = None  # further inputs like the source's, (M, ...)


def as_example_set(data: Any, *, name: str, preparation: Preparation | None = None) -> ExampleSet:
    """Data in memory, or a Dataset that is read in every epoch (``LazyDataset``)."""
    refuse_iterable(data, name=name)
    if isinstance(data, LazyDataset):
        return data.named(name)
    if is_dataset(data) and not fits_memory(data, name=name):
        return LazyDataset(data).named(name)
    return as_examples(data, name=name, preparation=preparation)


def as_examples(
    data: Any,
    *,
    name: str,
    reading: Reading | None = None,
    preparation: Preparation | None = None,
    **unknown: Never,
) -> Examples:
    """Read one data set into memory, in any accepted form; ``name`` is used in error messages.

    To read a source and a target that share their classes, use ``read_pair``.

    preparation: of the training's tables, for another table; by default it is fitted on this one
    """
    refuse_keywords(unknown, function="as_examples")
    if isinstance(data, Examples):
        return data
    reading = reading or Reading()
    raw = raw_of(data, name=name, reading=reading)
    labelled = number_labels([raw], shared=True, merge=reading.merge_labels)
    if labelled[0].table is not None or given_kinds(reading):
        labelled, _ = prepare_tables(labelled, reading, preparation)
    (labelled_one,) = labelled
    made, problems = _decode(labelled_one, shape_for(labelled_one, reading), reading)
    if any(problem.stops for problem in problems):
        raise ProblemsError(problems)
    return made


def read_pair(
    source: Any,
    target: Any,
    test: Any = None,
    *,
    mode: str,
    unlabelled: str | os.PathLike[str] | None = None,
    reading: Reading | None = None,
    skip_bad: bool = False,
    progress: Progress | None = None,
    **unknown: Never,
) -> Pair:
    """Read and check source, target and test; raises ``ProblemsError`` with all problems at once.

    With ``skip_bad=True`` the affected examples are left out instead and listed in ``Pair.dropped``; source examples
    that are in the target under another label are left out in any case, see ``Pair.labels_before``. In noisy mode
    source and target share one list of classes; in transfer mode target and test have their own. File options are
    fields of ``reading``: ``read_pair("scraped", "checked", mode="noisy", reading=Reading(image_size=64))``.

    unlabelled: path of further inputs, which are read and checked like the source's; labels in it are ignored
    """
    refuse_keywords(unknown, function="read_pair")
    sets, problems, preparation = _read(source, target, test, mode, reading or Reading(), progress, unlabelled)
    if not skip_bad and any(problem.stops for problem in problems):
        raise ProblemsError(problems)
    dropped = tuple(problem for problem in problems if problem.stops or problem.kind == CHECKED)
    kept = {name: _without(name, examples, dropped) for name, examples in sets.items()}
    before, checked = None, {}
    copies = tuple(one for problem in problems if problem.kind == CHECKED for one in problem.ids)
    if copies:
        before = labels_in_source(kept["target"], sets["source"], preparation)
        checked = labels_in_target(kept["target"], sets["source"], preparation)
    return Pair(
        kept["source"],
        kept["target"],
        kept.get("test"),
        tuple(problems),
        dropped,
        columns=None if preparation is None else preparation.names,
        labels_before=before,
        copies=copies,
        checked=checked,
        preparation=preparation,
        unlabelled=kept[UNLABELLED].inputs if UNLABELLED in kept else None,
    )


def check_pair(
    source: Any, target: Any, test: Any = None, *, mode: str, reading: Reading | None = None
) -> list[Problem]:
    """All problems of the data sets in one list; bad examples do not raise."""
    return _read(source, target, test, mode, reading or Reading(), None)[1]


def check_mode(mode: str) -> None:
    if mode not in MODES:
        raise UsageError(f"mode must be 'noisy' or 'transfer', got {mode!r}{did_you_mean(mode, MODES)}.")


def _read(
    source: Any,
    target: Any,
    test: Any,
    mode: str,
    reading: Reading,
    progress: Progress | None,
    unlabelled: str | os.PathLike[str] | None = None,
) -> tuple[dict[str, Examples], list[Problem], Preparation | None]:
    check_mode(mode)
    given = {"source": source, "target": target} | ({} if test is None else {"test": test})
    raws = [raw_of(data, name=name, reading=reading) for name, data in given.items()]
    _refuse_structures(raws)
    raws = number_labels(raws, shared=mode == "noisy", merge=reading.merge_labels)
    if unlabelled is not None:
        raws.append(raw_without_labels(Path(unlabelled).expanduser(), source=raws[0], reading=reading))
    raws, preparation = prepare_tables(raws, reading)
    shape = shape_for(raws[0], reading)
    sets: dict[str, Examples] = {}
    problems: list[Problem] = []
    for raw in raws:
        sets[raw.name], found = _decode(raw, shape, reading, progress)
        problems += found
    _check_shapes(sets)
    problems += check_examples(sets, mode=mode, preparation=preparation)
    return sets, problems, preparation


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
    made = TextExamples if raw.texts else Examples
    if bool(keep.all()):
        return made(inputs, labels, raw.ids, raw.classes, raw.truth, raw.paths), problems
    if not bool(keep.any()):
        raise DataError(f"no example of the {raw.name} can be used: {some([str(p) for p in problems])}")
    if labels.ndim == 1:  # Examples refuses -1, and rows that are left out may have no class: any index will do
        labels = torch.where(keep.to(labels.device), labels, 0)
    return made(inputs, labels, raw.ids, raw.classes, raw.truth, raw.paths).subset(keep), problems


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
        if name == UNLABELLED and examples.inputs.dtype != source.inputs.dtype:
            kinds = examples.inputs.dtype, source.inputs.dtype
            raise DataError(f"{name} inputs are {kinds[0]} but the source's are {kinds[1]}: save them as such.")
