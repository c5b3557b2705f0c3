"""Class indices across data sets: shared by source and target in noisy mode, separate in transfer mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from soseleto.data.readers.labels import Names, class_order
from soseleto.data.readers.look_alikes import look_alikes, merged
from soseleto.data.readers.problems import Problem, some
from soseleto.data.readers.raw import Raw
from soseleto.errors import DataError, counted


def number_labels(raws: Sequence[Raw], *, shared: bool, merge: bool = False) -> list[Raw]:
    """The same data sets with class indices as labels; rows without a usable label become problems.

    ``raws`` are source, target and test, or the first of these. The test uses the classes of the target. With
    ``merge``, class names that look alike are one class; else they are a problem.
    """
    raws = [_named(raw) for raw in raws]
    raws = [merged(raw) for raw in raws] if merge else _with_look_alikes(raws, shared=shared)
    first = raws[:2] if shared else raws[:1]
    classes = _classes(first)
    made = [_number(raw, classes) for raw in first]
    for raw in raws[len(made) :]:
        if not shared and raw.name == "target":
            classes = _classes([raw])
        made.append(_number(raw, classes))
    return made


def _with_look_alikes(raws: Sequence[Raw], *, shared: bool) -> list[Raw]:
    """The data sets, those with class names that look alike with a problem more."""
    together = [raws] if shared else [raws[:1], raws[1:]]
    found = [p for sets in together if sets for p in look_alikes({raw.name: _names(raw) for raw in sets})]
    return [replace(raw, problems=(*raw.problems, *(p for p in found if p.where == raw.name))) for raw in raws]


def _named(raw: Raw) -> Raw:
    """Replace class indices by their names, if known, so that they can be matched with those of other sets."""
    if isinstance(raw.labels, Names) or raw.classes is None or raw.labels.dtype.is_floating_point:
        return raw
    names: list[str | None] = [None if c < 0 else raw.classes[c] for c in raw.labels.tolist()]
    truth = raw.truth
    if isinstance(truth, Tensor) and not truth.dtype.is_floating_point:
        truth = Names(tuple(None if c < 0 else raw.classes[c] for c in truth.tolist()))
    return replace(raw, labels=Names(tuple(names)), truth=truth)


def _classes(raws: Sequence[Raw]) -> tuple[str, ...] | None:
    """The joint class list of these sets; None if their labels are class indices or regression targets."""
    kinds = {_kind(raw) for raw in raws}
    if len(kinds) > 1:
        differences = " but ".join(f"the {raw.name} has {_kind(raw)}" for raw in raws)
        raise DataError(f"{differences} as labels: give both the same kind.")
    if kinds != {"class names"}:
        return None
    names = {name for raw in raws for name in _names(raw)}
    fixed = raws[0].classes
    if fixed is None:
        return class_order(names)
    return fixed + class_order(names.difference(fixed))


def _kind(raw: Raw) -> str:
    if isinstance(raw.labels, Names):
        return "class names"
    return "regression targets" if raw.labels.dtype.is_floating_point else "class indices"


def _names(raw: Raw) -> set[str]:
    found: set[str | None] = set(raw.labels.names) if isinstance(raw.labels, Names) else set()
    if isinstance(raw.truth, Names):
        found.update(raw.truth.names)
    return {name for name in found if name is not None}


def _number(raw: Raw, classes: tuple[str, ...] | None) -> Raw:
    truth = raw.truth
    if isinstance(truth, Names):
        truth = truth.index(classes or truth.classes)
    if not isinstance(raw.labels, Names):
        if classes is not None:
            raise DataError(f"the {raw.name} has {_kind(raw)} as labels where class names are needed: give names.")
        return replace(raw, truth=truth)
    if classes is None:
        raise DataError(f"the {raw.name} has class names as labels where numbers are needed: give numbers.")
    labels = raw.labels.index(classes)
    missing = [row for row, name in enumerate(raw.labels.names) if name is None]
    unknown = [row for row in (labels < 0).nonzero().flatten().tolist() if raw.labels.names[row] is not None]
    problems = list(raw.problems)
    if missing:
        ids = tuple(raw.id_of(row) for row in missing)
        problems.append(
            Problem(
                raw.name,
                "no label",
                f"{counted(len(ids), 'example has', 'examples have')} no label ({some(ids)}).",
                ids,
            )
        )
    if unknown:
        names = sorted({str(raw.labels.names[row]) for row in unknown})
        which = f"the class {names[0]} is" if len(names) == 1 else f"the classes {some(names)} are"
        text = f"{which} not among the target's: leave those examples out, or add target examples."
        ids = tuple(raw.id_of(row) for row in unknown)
        problems.append(Problem(raw.name, "unknown class", text, ids))
    return replace(raw, labels=labels, classes=classes, truth=truth, problems=tuple(problems))


def class_counts(labels: Tensor, classes: Sequence[str]) -> dict[str, int]:
    """Number of examples of each class."""
    counts = torch.bincount(labels.cpu(), minlength=len(classes)).tolist()
    return dict(zip(classes, counts, strict=True))
