"""Checks of whole data sets before training; each returns the problems that it finds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from soseleto.data.examples import Examples
from soseleto.data.groups import Pairs, codes, copies, duplicates, likely, linked, near_duplicates
from soseleto.data.preparation import Preparation
from soseleto.data.reading import Problem, some
from soseleto.data.structure import PIECE
from soseleto.data.text import TextPreparation
from soseleto.errors import counted, did_you_mean

CHECKED = "checked"  # target examples that have another label in the source: see labels_in_source
IN_TEST = "in test"  # source examples that are also in the test set
LEFT_OUT = (CHECKED, IN_TEST)  # their examples are left out without being asked
_FEW_TWINS, _MORE_TWINS = 3, 2.0  # rows of a table that coincide beyond the source's own share, and times that share


def check_examples(sets: dict[str, Examples], *, mode: str, preparation: Preparation | None = None) -> list[Problem]:
    """The problems within source, target and other data sets and between them."""
    source, target = sets["source"], sets["target"]
    columns = None if preparation is None else preparation.names
    problems: list[Problem] = []
    for name, examples in sets.items():
        problems += _non_finite(name, examples, columns)
        problems += _missing_targets(name, examples)
    if _has_classes(source) and _has_classes(target):
        problems += _classes_of_source(source)
        if mode == "noisy":
            absurd = any(problem.kind == "absurd classes" for problem in problems)
            problems += _classes_of_one_set(source, target, with_source=not absurd)
        for name in ("target", "source"):
            problems += _contradictions(name, sets[name], preparation)
    problems += _copies(sets, "target", "source", mode, preparation)
    if "test" in sets:
        problems += _copies(sets, "target", "test", mode, preparation)
        problems += _copies(sets, "test", "source", mode, preparation)
        problems += _groups_of_test(sets)
    return problems


def _has_classes(examples: Examples) -> bool:
    return not examples.labels.dtype.is_floating_point


def _ids(examples: Examples, rows: Tensor) -> tuple[str, ...]:
    return tuple(examples.id_of(row) for row in rows.tolist())


def _non_finite(name: str, examples: Examples, columns: Sequence[str] | None) -> list[Problem]:
    inputs = examples.inputs
    if not inputs.dtype.is_floating_point:
        return []
    pieces = [~piece.isfinite() for piece in inputs.reshape(len(inputs), -1).split(PIECE)]
    rows = torch.cat([bad.any(1) for bad in pieces]).nonzero().flatten()
    if not len(rows):
        return []
    positions = torch.stack([bad.any(0) for bad in pieces]).any(0).nonzero().flatten().tolist()
    ids, names = _ids(examples, rows), [f"column {columns[at]!r}" if columns else f"value {at}" for at in positions]
    text = (
        f"{counted(len(ids), 'example has', 'examples have')} NaN or infinite values in {some(names)} (id {some(ids)})."
    )
    return [Problem(name, "nan", text, ids)]


def _missing_targets(name: str, examples: Examples) -> list[Problem]:
    """Regression targets that are no numbers."""
    if _has_classes(examples):
        return []
    bad = ~examples.labels.reshape(len(examples), -1).isfinite().all(1)
    ids = _ids(examples, bad.nonzero().flatten())
    text = f"{counted(len(ids), 'example has', 'examples have')} a NaN or infinite label (id {some(ids)})."
    return [Problem(name, "no label", text, ids)] if ids else []


def _classes_of_source(source: Examples) -> list[Problem]:
    labels, problems = source.labels.cpu(), []
    used = len(torch.unique(labels))
    if len(labels) >= 100 and used > len(labels) // 2:
        text = (
            f"{used:,} classes for {len(labels):,} examples: name another label column, or for numbers to predict set "
            "numeric_labels = true in [reading] of --config."
        )
        problems.append(Problem("source", "absurd classes", text))
    if source.classes is not None and labels.ndim == 1:
        counts = torch.bincount(labels, minlength=len(source.classes))
        if empty := [source.classes[c] for c in (counts == 0).nonzero().flatten().tolist()]:
            problems.append(Problem("source", "empty class", f"no examples of {_classes(empty)}.", stops=False))
    return problems


def _classes_of_one_set(source: Examples, target: Examples, *, with_source: bool) -> list[Problem]:
    """Classes that only one of the sets has, which share one head in noisy mode.

    One that only the target has cannot be learned from the source. The examples of one that only the source has keep
    their weights, which follow the target.
    """
    problems = []
    if len(rows := _others(target, source)):
        lacking = _names(target, rows)
        hint = "" if lacking[0].isdecimal() else did_you_mean(lacking[0], {*(source.classes or ())} - {*lacking})
        text = f"the source has no example of {_classes(lacking)}{hint}: add source examples, or use mode='transfer'."
        problems.append(Problem("target", "class not in source", text, _ids(target, rows)))
    if with_source and len(rows := _others(source, target)):
        count, names = counted(len(rows), "example"), _classes(_names(source, rows))
        text = f"the source has {count} of {names}, and the target none to judge them by: add target examples."
        problems.append(Problem("target", "class not in target", text, stops=False))
    return problems


def _others(examples: Examples, known: Examples) -> Tensor:
    """The rows whose classes the known examples do not have."""
    return (~torch.isin(examples.labels.cpu(), torch.unique(known.labels.cpu()))).nonzero().flatten()


def _names(examples: Examples, rows: Tensor) -> list[str]:
    return [_name(examples, c) for c in torch.unique(examples.labels.cpu()[rows]).tolist()]


def _name(examples: Examples, label: int) -> str:
    return examples.classes[label] if examples.classes else str(label)


def _classes(names: Sequence[str]) -> str:
    return f"{'class' if len(names) == 1 else 'classes'} {some(names)}"


# Copies


def labels_in_source(
    target: Examples, source: Examples, preparation: Preparation | None = None
) -> tuple[Tensor, dict[str, str]]:
    """(N,) the label that each target example has in the source, -1 for one that is not in it, compared by content; and
    the ids of source examples that are in the target under another label, with the label there.

    A target that was made by checking a part of the source has its labels from before the check there.
    """
    before, checked = torch.full((len(target),), -1, dtype=torch.int64), {}
    for row, of_source in reversed(copies(target, source, preparation).tolist()):  # of several copies the first counts
        before[row] = source.labels[of_source]
        if (label := int(target.labels[row])) != int(source.labels[of_source]):
            checked[source.id_of(of_source)] = _name(target, label)
    return before, checked


def _copies(
    sets: dict[str, Examples], known: str, other: str, mode: str, preparation: Preparation | None
) -> list[Problem]:
    """Examples that are in two sets; the copy in the set ``known`` is the one to keep.

    Near duplicates may be different examples: they are reported and do not stop the training. Nor do target examples
    that have another label in the source, since their labels were checked, and source examples that are in the test
    set, which are left out of the source.
    """
    first, second, source = sets[known], sets[other], sets["source"]
    exact, chance = likely(duplicates(first.inputs, second.inputs), first, second, preparation)
    few = "rows of values that are frequent, equal to"
    if isinstance(preparation, TextPreparation):
        few = "texts with the same beginning, before they are cut, as"
    near = {
        "images that may be resized or recompressed copies of": near_duplicates(first.inputs, second.inputs),
        few: chance,
    }
    if len(exact) and known == "target" and _as_often_within(source, exact, len(first)):
        exact, near["rows with the same values as"] = exact[:0], exact
    kind, then = "duplicate", ""
    if other == "source" and known == "test":
        left = len(np.unique(exact[:, 1]))
        kind, then = IN_TEST, f": {counted(left, 'source example is', 'source examples are')} left out"
    elif other == "source" and mode == "noisy" and (differ := _differ(sets, exact)):
        kind = CHECKED
        then = (
            f", {differ} of them under another label: these source examples are left out, and their labels taken as "
            "those from before the target was checked"
        )

    def problem(pairs: Pairs, kind: str, what: str, then: str = "") -> Problem:
        ids = tuple(dict.fromkeys(second.id_of(row) for row in pairs[:, 1].tolist()))
        shown = some([f"{known} {first.id_of(a)} = {other} {second.id_of(b)}" for a, b in pairs.tolist()])
        count = counted(len(np.unique(pairs[:, 0])), f"{known} example")
        return Problem(other, kind, f"the {other} has {what} {count} ({shown}){then}.", ids, stops=kind == "duplicate")

    problems = [problem(exact, kind, "copies of", then)] if len(exact) else []
    return problems + [problem(pairs, "near duplicate", what) for what, pairs in near.items() if len(pairs)]


def _contradictions(name: str, examples: Examples, preparation: Preparation | None) -> list[Problem]:
    """Copies within one set that have different labels."""
    if examples.labels.ndim != 1 or not isinstance(examples.inputs, Tensor):
        return []
    pairs = linked(codes(examples.inputs), np.arange(len(examples)))[:, ::-1]
    if name == "target":
        pairs = np.concatenate([pairs, near_duplicates(examples.inputs, examples.inputs)])
    labels = examples.labels.cpu().numpy()
    pairs = pairs[(pairs[:, 0] < pairs[:, 1]) & (labels[pairs[:, 0]] != labels[pairs[:, 1]])]
    exact, _ = likely(pairs, examples, examples, preparation)
    if not len(exact):
        return []

    def place(row: int) -> str:
        return f"{examples.id_of(row)} as {_name(examples, labels[row])}"

    shown = some([f"{place(row)} and {place(other)}" for row, other in exact.tolist()])
    text = f"{counted(len(exact), 'example is', 'examples are')} there twice, under different labels ({shown})."
    return [Problem(name, "contradiction", text, stops=False)]


def _groups_of_test(sets: dict[str, Examples]) -> list[Problem]:
    """Test examples of a group, such as a patient, that the target has too, and source examples of a test group."""
    test, problems = sets["test"], []
    for known, other, stops in (("target", "test", True), ("test", "source", False)):
        first, second = sets[known].groups, sets[other].groups
        if test.groups is None or first is None or second is None:
            continue
        shared = (torch.isin(second, first) & (second >= 0)).nonzero().flatten()
        if len(shared):
            ids = _ids(sets[other], shared)
            fix = "" if stops else ": they are left out of the source"
            what = counted(len(ids), f"{other} example is", f"{other} examples are")
            text = f"{what} of groups that the {known} has too ({some(ids)}){fix}."
            problems.append(Problem(other, "shared group" if stops else IN_TEST, text, ids, stops=stops))
    return problems


def _differ(sets: dict[str, Examples], pairs: Pairs) -> int:
    """How many of these target examples have another label in the source."""
    source, target = sets["source"], sets["target"]
    if not _has_classes(source) or not _has_classes(target) or source.labels.ndim != 1:
        return 0
    differ = target.labels[pairs[:, 0]] != source.labels[pairs[:, 1]]
    return len(np.unique(pairs[differ.cpu().numpy(), 0]))


def _as_often_within(source: Examples, pairs: Pairs, n_target: int) -> bool:
    """Whether equal rows of a table are about as frequent as within the source, and so no copies."""
    if source.inputs.ndim != 2:
        return False
    counts = np.unique(codes(source.inputs), return_counts=True)[1]
    share = int(counts[counts > 1].sum()) / len(source)
    return share > 0 and len(np.unique(pairs[:, 0])) <= _FEW_TWINS + _MORE_TWINS * share * n_target
