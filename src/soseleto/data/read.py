"""Data sets in any accepted form: a path, a pair, a Dataset, a data frame or Examples.

Source, target and test are read together: one class list, one image shape, one list of problems.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from soseleto.data import images as image_files
from soseleto.data import structure, tables
from soseleto.data.arrays import inputs_of, labels_of, read_npz
from soseleto.data.checks import CHECKED, LEFT_OUT, check_examples, labels_in_source
from soseleto.data.examples import Examples
from soseleto.data.groups import with_groups
from soseleto.data.images import Shape, pixels_of, shape_for
from soseleto.data.lazy import ExampleSet, LazyDataset, fits_memory, read_into_memory
from soseleto.data.preparation import Preparation, prepare, prepared
from soseleto.data.reading import Problem, ProblemsError, Raw, Reading, number_labels, some
from soseleto.data.text import TextExamples
from soseleto.errors import DataError, UsageError, did_you_mean

logger = logging.getLogger("soseleto")
MODES = ("noisy", "transfer")


@dataclass(frozen=True, eq=False)
class Pair:
    """The data of a training run; ``problems`` lists what was found, ``dropped`` those whose examples were left out.

    labels_before: the target's labels from before it was checked, (N,) with -1 where unknown: of the column that
        ``Reading.before_column`` names, else, where target examples also lay in the source and some under another
        label, the labels that they had there
    checked: by id, the target's label of source examples that were left out since it is another there
    """

    source: Examples
    target: Examples
    test: Examples | None
    problems: tuple[Problem, ...] = ()
    dropped: tuple[Problem, ...] = ()
    labels_before: Tensor | None = None
    checked: Mapping[str, str] = field(default_factory=dict)
    preparation: Preparation | None = None  # of tables


def read_pair(
    source: Any, target: Any, test: Any = None, *, mode: str, reading: Reading | None = None, skip_bad: bool = False
) -> Pair:
    """Read and check source, target and test; raises ``ProblemsError`` with all problems at once.

    With ``skip_bad=True`` the affected examples are left out instead and listed in ``Pair.dropped``; source examples
    that are in the target under another label are left out in any case, see ``Pair.labels_before``. In noisy mode
    source and target share one list of classes; in transfer mode target and test have their own. File options are
    fields of ``reading``: ``read_pair("scraped", "checked", mode="noisy", reading=Reading(image_size=64))``.
    """
    reading = reading or Reading()
    sets, problems, preparation, in_column = _read(source, target, test, mode, reading)
    if not skip_bad and any(problem.stops for problem in problems):
        raise ProblemsError(problems)
    dropped = tuple(problem for problem in problems if problem.stops or problem.kind in LEFT_OUT)
    kept = {name: _without(name, examples, dropped) for name, examples in sets.items()}
    grouped, groups = with_groups([*kept.values()], preparation)
    kept = dict(zip(kept, grouped, strict=True))
    before, checked = None, dict[str, str]()
    if any(problem.kind == CHECKED for problem in problems):
        before, checked = labels_in_source(kept["target"], sets["source"], preparation)
    if in_column:
        before = torch.tensor([in_column[kept["target"].id_of(row)] for row in range(len(kept["target"]))])
    return Pair(
        kept["source"],
        kept["target"],
        kept.get("test"),
        (*problems, *groups),
        dropped,
        labels_before=before,
        checked=checked,
        preparation=preparation,
    )


def check_pair(
    source: Any, target: Any, test: Any = None, *, mode: str, reading: Reading | None = None
) -> list[Problem]:
    """All problems of the data sets in one list; bad examples do not raise."""
    return _read(source, target, test, mode, reading or Reading())[1]


def check_mode(mode: str) -> None:
    if mode not in MODES:
        raise UsageError(f"mode must be 'noisy' or 'transfer', got {mode!r}{did_you_mean(mode, MODES)}.")


def as_example_set(data: Any, *, name: str, preparation: Preparation | None = None) -> ExampleSet:
    """Data in memory, or a Dataset that is read again in every epoch (``LazyDataset``)."""
    if isinstance(data, LazyDataset):
        return data.named(name)
    if _is_dataset(data) and not fits_memory(data):
        return LazyDataset(data).named(name)
    return as_examples(data, name=name, preparation=preparation)


def as_examples(
    data: Any, *, name: str, reading: Reading | None = None, preparation: Preparation | None = None
) -> Examples:
    """Read one data set into memory, in any accepted form; ``name`` is used in error messages.

    To read a source and a target that share their classes, use ``read_pair``.

    preparation: of the training's tables, for another table; by default it is fitted on this one
    """
    if isinstance(data, Examples):
        return data
    reading = reading or Reading()
    raws = number_labels([_raw(data, name, reading)], shared=True)
    if raws[0].table is not None or reading.kinds:
        raws, _ = prepare(raws, reading, preparation)
    examples, problems = _decoded(raws[0], shape_for(raws[0], reading))
    _raise_or_log(problems)
    return examples


def _raise_or_log(problems: Sequence[Problem]) -> None:
    if any(problem.stops for problem in problems):
        raise ProblemsError(problems)
    for problem in problems:
        logger.warning("%s", problem)


# Forms of data


def _is_dataset(data: Any) -> bool:
    """Whether this is a map-style Dataset of items, and none of the other accepted forms."""
    if isinstance(data, Examples | str | os.PathLike | Tensor | dict) or _is_pair(data):
        return False
    if tables.is_huggingface(data) or tables.is_frame(data):
        return False
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _is_pair(data: Any) -> bool:
    return len(_parts(data)) == 2


def _parts(data: Any) -> Sequence[Any]:
    """What a pair consists of; a TensorDataset is one, but no subclass, which may read otherwise."""
    if type(data) is TensorDataset:
        return data.tensors
    return data if isinstance(data, tuple | list) else ()


def _raw(data: Any, name: str, reading: Reading) -> Raw:
    """Read any accepted form; labels are not yet numbered and images not yet decoded."""
    if isinstance(data, Examples):
        raw = Raw(name, data.labels, inputs=data.inputs, texts=isinstance(data, TextExamples))
        return replace(raw, ids=data.ids, classes=data.classes, truth=data.truth, paths=data.paths, groups=data.groups)
    if isinstance(data, str | os.PathLike):
        return _from_path(Path(data).expanduser(), name, reading)
    if _is_pair(data):
        inputs, labels = _parts(data)
        return _from_pair(inputs, labels, name)
    if tables.is_huggingface(data):
        return tables.from_huggingface(data, name=name, reading=reading)
    if tables.is_frame(data):
        what = f"the {name} frame"
        return tables.from_table(tables.frame_table(data), name=name, reading=reading, folder=None, what=what)
    if _is_dataset(data):
        return _from_pair(*read_into_memory(data, name=name), name)
    raise UsageError(
        f"the {name} is a {type(data).__name__}: give a path (image folder, .csv, .tsv, .parquet, .jsonl, .npz), a "
        "pair (inputs, labels), a map-style Dataset of (input, label), a data frame or Examples."
    )


def _from_pair(inputs: Any, labels: Any, name: str) -> Raw:
    raw = Raw(name, labels_of(labels, name=name), inputs=inputs_of(inputs, name=name))
    count = structure.length(raw.inputs)
    if count != len(raw):
        raise DataError(f"the {name} has {count} inputs but {len(raw)} labels: give one for each.")
    return raw


def _from_path(path: Path, name: str, reading: Reading, labelled: bool = True) -> Raw:
    """With ``labelled=False`` every label is 0."""
    suffix = path.suffix.lower()
    if path.is_dir():
        lacking = ("label", *tables.MAY_LACK.get(name, tables.ROLES))
        options = ["root", *(f"{role}_column" for role in tables.ROLES if role not in lacking)]
        if labelled and (option := next((o for o in options if getattr(reading, o) is not None), None)):
            raise UsageError(f"{option} is for tables and has no effect on the image folder {path}: leave it out.")
        return image_files.read_folder(path, name=name, reading=reading, labelled=labelled)
    if path.exists() and not path.is_file():
        raise UsageError(f"the {name} {str(path)!r} is a pipe or a device: save the data to a file first.")
    if not path.is_file():
        neighbours = os.listdir(path.parent) if path.parent.is_dir() else []
        raise UsageError(f"the {name} {str(path)!r} is not there{did_you_mean(path.name, neighbours)}: check the path.")
    if suffix not in (*tables.SUFFIXES, ".npz"):
        raise UsageError(
            f"the {name} {str(path)!r} has an unknown ending: give an image folder, or a file ending in "
            f"{', '.join(tables.SUFFIXES)} or .npz."
        )
    if suffix == ".npz":
        return read_npz(path, name=name, labelled=labelled)
    return tables.from_table(
        tables.load(path, reading), name=name, reading=reading, folder=path.parent, what=str(path), labelled=labelled
    )


# Reading together


def _read(
    source: Any, target: Any, test: Any, mode: str, reading: Reading
) -> tuple[dict[str, Examples], list[Problem], Preparation | None, dict[str, int]]:
    """The sets, their problems, the preparation of tables, and earlier labels of a column of the target, by id."""
    check_mode(mode)
    data = {"source": source, "target": target} | ({} if test is None else {"test": test})
    raws = [_raw(value, name, reading) for name, value in data.items()]
    if structured := next((raw for raw in raws if isinstance(raw.inputs, dict | list | tuple)), None):
        raise UsageError(
            f"the inputs of the {structured.name} are a {type(structured.inputs).__name__} of tensors, which cannot be "
            "checked beside files: give all data as pairs or Datasets."
        )
    raws = number_labels(raws, shared=mode == "noisy")
    raws, preparation = prepare(raws, reading)
    shape = shape_for(raws[0], reading)
    sets: dict[str, Examples] = {}
    problems: list[Problem] = []
    for raw in raws:
        sets[raw.name], its = _decoded(raw, shape)
        problems += its
    _check_shapes(sets)
    before = raws[1].before.tolist() if isinstance(raws[1].before, Tensor) else []
    return (
        sets,
        problems + check_examples(sets, mode=mode, preparation=preparation),
        preparation,
        {raws[1].id_of(row): label for row, label in enumerate(before)},
    )


def _decoded(raw: Raw, shape: Shape | None) -> tuple[Examples, list[Problem]]:
    """The usable examples, and the problems of the others."""
    inputs, problems = raw.inputs, list(raw.problems)
    if inputs is None:
        if shape is None:
            raise DataError(f"the {raw.name} has images but the source has features: give both the same kind.")
        inputs, unreadable = pixels_of(raw, shape)
        problems += unreadable
    labels = raw.labels
    assert isinstance(labels, Tensor)
    assert raw.truth is None or isinstance(raw.truth, Tensor)
    keep = _keep(raw, problems)
    if not bool(keep.any()):
        why = some([str(problem) for problem in problems]) if problems else "it is empty"
        raise DataError(f"no example of the {raw.name} can be used: {why}.".replace("..", "."))
    if labels.ndim == 1:  # Examples refuses -1, and rows that are left out may have no class: any index will do
        labels = torch.where(keep.to(labels.device), labels, 0)
    cls = TextExamples if raw.texts else Examples
    examples = cls(inputs, labels, raw.ids, raw.classes, raw.truth, raw.paths, raw.groups)
    return (examples if bool(keep.all()) else examples.subset(keep)), problems


def _without(name: str, examples: Examples, dropped: Sequence[Problem]) -> Examples:
    keep = _keep(examples, [problem for problem in dropped if problem.where == name])
    if not bool(keep.any()):
        raise DataError(f"no example of the {name} is left: all {len(keep)} have problems.")
    return examples if bool(keep.all()) else examples.subset(keep)


def _keep(data: Raw | Examples, problems: Collection[Problem]) -> Tensor:
    """(N,) mask of the examples that no problem names."""
    bad = {name for problem in problems for name in problem.ids}
    return torch.tensor([data.id_of(row) not in bad for row in range(len(data))])


def _check_shapes(sets: dict[str, Examples]) -> None:
    source = sets["source"].inputs
    for name, examples in sets.items():
        inputs = examples.inputs
        if inputs.shape[1:] != source.shape[1:]:
            raise DataError(
                f"{name} inputs are {inputs.dtype} of shape {tuple(inputs.shape[1:])} but the source's are "
                f"{source.dtype} of shape {tuple(source.shape[1:])}: bring them to one shape and type."
            )


# Inputs of predictions


class Inputs(NamedTuple):
    names: tuple[str, ...]  # FILE or FILE:ROW of each input
    values: Tensor  # (N, ...) as read for training
    usable: Tensor  # (N,) whether it has any value that can be used


def read_inputs(
    paths: Sequence[str | os.PathLike[str]],
    *,
    shape: tuple[int, ...],
    preparation: Preparation | None = None,
    reading: Reading | None = None,
    strict: bool = False,
) -> Inputs:
    """All inputs in ``paths``: images, folders of images, tables and ``.npz`` files; an unreadable one raises.

    shape: of the inputs that the model was trained on
    preparation: of the training's tables
    strict: refuse values that are missing, unreadable, unseen or outside the training's range, and files that are not
        images, instead of a warning
    """
    if not paths:
        raise UsageError("nothing to predict: name image files, folders, tables or .npz files.")
    read = [_inputs(Path(path).expanduser(), shape, preparation, reading or Reading(), strict) for path in paths]
    names, values, usable = zip(*read, strict=True)
    return Inputs(tuple(name for some in names for name in some), torch.cat(values), torch.cat(usable))


def _inputs(
    path: Path, shape: tuple[int, ...], preparation: Preparation | None, reading: Reading, strict: bool
) -> Inputs:
    if preparation is not None and path.suffix.lower() in tables.SUFFIXES and path.is_file():
        values, usable = prepared(tables.load(path, reading), preparation, str(path), strict=strict)
        return Inputs(tuple(f"{path}:{row}" for row in range(len(values))), values, usable)
    if image_files.is_image(path) and path.is_file():
        raw = Raw("input", torch.zeros(1, dtype=torch.int64), images=(str(path),), paths=(str(path),))
    else:
        raw = _from_path(path, "input", reading, labelled=False)
    if raw.table is not None or (raw.images is not None and len(shape) != 3):
        kind = "a table" if raw.table is not None else "images"
        raise UsageError(f"{path} holds {kind}, but the model takes inputs of shape {shape}: give those as .npz.")
    image_shape = (shape[0], shape[1], shape[2]) if len(shape) == 3 else None
    examples, problems = _decoded(raw, image_shape)
    _raise_or_log([replace(problem, stops=problem.stops or strict) for problem in problems])
    if tuple(examples.inputs.shape[1:]) != shape:
        raise DataError(f"{path} holds inputs of shape {tuple(examples.inputs.shape[1:])}: the model needs {shape}.")
    names = raw.paths or tuple(f"{path}:{row}" for row in range(len(examples)))
    return Inputs(names, examples.inputs, torch.ones(len(names), dtype=torch.bool))
