"""Checks of whole data sets before training; each returns the problems that it finds.

Duplicates have identical bytes, or are resized or recompressed images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from soseleto.data import structure
from soseleto.data.examples import Examples
from soseleto.data.preparation import Preparation, TablePreparation
from soseleto.data.reading import Problem, some
from soseleto.data.structure import PIECE, Inputs
from soseleto.data.text import TextPreparation
from soseleto.errors import counted, did_you_mean

CHECKED = "checked"  # target examples that have another label in the source: see labels_in_source
IN_TEST = "in test"  # source examples that are also in the test set
LEFT_OUT = (CHECKED, IN_TEST)  # their examples are left out without being asked
_EXPECTED = 0.5  # rows of a table that have the values of one by chance, above which equal ones are no copies
_FEW_TWINS, _MORE_TWINS = 3, 2.0  # rows of a table that coincide beyond the source's own share, and times that share
_BITS_APART = 6  # of 64: largest Hamming distance between the hashes of copies
_MEAN_APART = 6.0  # of 255: largest mean difference between copies, at 16 x 16
_WORST_APART = 40.0  # of 255: largest difference at any value between copies, at 16 x 16
_ROWS, _PIECE = 512, 4096


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
    labels = torch.unique(examples.labels.cpu()[rows]).tolist()
    return [examples.classes[c] if examples.classes else str(c) for c in labels]


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
    for pair in reversed(copies(target, source, preparation)):  # of several copies the first counts
        before[pair.first] = source.labels[pair.second]
        if (label := int(target.labels[pair.first])) != int(source.labels[pair.second]):
            checked[source.id_of(pair.second)] = target.classes[label] if target.classes else str(label)
    return before, checked


def copies(first: Examples, second: Examples, preparation: Preparation | None = None) -> list[Duplicate]:
    """The examples that both sets have, without those that are equal by chance."""
    return _likely(duplicates(first.inputs, second.inputs), first, second, preparation)[0]


def _copies(
    sets: dict[str, Examples], known: str, other: str, mode: str, preparation: Preparation | None
) -> list[Problem]:
    """Examples that are in two sets; the copy in the set ``known`` is the one to keep.

    Near duplicates may be different examples: they are reported and do not stop the training. Nor do target examples
    that have another label in the source, since their labels were checked, and source examples that are in the test
    set, which are left out of the source.
    """
    first, second, source = sets[known], sets[other], sets["source"]
    exact, chance = _likely(duplicates(first.inputs, second.inputs), first, second, preparation)
    few = "rows of values that are frequent, equal to"
    if isinstance(preparation, TextPreparation):
        few = "texts with the same beginning, before they are cut, as"
    near = {
        "images that may be resized or recompressed copies of": near_duplicates(first.inputs, second.inputs),
        few: chance,
    }
    if exact and known == "target" and _as_often_within(source, exact, len(first)):
        exact, near["rows with the same values as"] = [], exact
    kind, then = "duplicate", ""
    if other == "source" and known == "test":
        left = len({pair.second for pair in exact})
        kind, then = IN_TEST, f": {counted(left, 'source example is', 'source examples are')} left out"
    elif other == "source" and mode == "noisy" and (differ := _differ(sets, exact)):
        kind = CHECKED
        then = (
            f", {differ} of them under another label: these source examples are left out, and their labels taken as "
            "those from before the target was checked"
        )
    problems = [_copy_problem(sets, known, other, exact, kind, "copies of", then)] if exact else []
    return problems + [_copy_problem(sets, known, other, of, "near duplicate", what) for what, of in near.items() if of]


def _copy_problem(
    sets: dict[str, Examples],
    known: str,
    other: str,
    pairs: Sequence[Duplicate],
    kind: str,
    what: str,
    then: str = "",
) -> Problem:
    first, second = sets[known], sets[other]
    ids = tuple(dict.fromkeys(second.id_of(pair.second) for pair in pairs))
    copies = some([f"{known} {first.id_of(pair.first)} = {other} {second.id_of(pair.second)}" for pair in pairs])
    count = counted(len({pair.first for pair in pairs}), f"{known} example")
    return Problem(other, kind, f"the {other} has {what} {count} ({copies}){then}.", ids, stops=kind == "duplicate")


def _contradictions(name: str, examples: Examples, preparation: Preparation | None) -> list[Problem]:
    """Copies within one set that have different labels."""
    if examples.labels.ndim != 1 or not isinstance(examples.inputs, Tensor):
        return []
    pairs = _first_of_each(examples.inputs)
    if name == "target":
        pairs += [pair for pair in near_duplicates(examples.inputs, examples.inputs) if pair.first < pair.second]
    labels = examples.labels.tolist()
    pairs = [pair for pair in pairs if labels[pair.first] != labels[pair.second]]
    exact, _ = _likely(pairs, examples, examples, preparation)
    if not exact:
        return []

    def place(row: int) -> str:
        label = examples.classes[labels[row]] if examples.classes else labels[row]
        return f"{examples.id_of(row)} as {label}"

    shown = some([f"{place(pair.first)} and {place(pair.second)}" for pair in exact])
    text = f"{counted(len(exact), 'example is', 'examples are')} there twice, under different labels ({shown})."
    return [Problem(name, "contradiction", text, stops=False)]


def _first_of_each(rows: Tensor) -> list[Duplicate]:
    """Every row that equals an earlier one, with the first that it equals."""
    pairs = linked(codes(rows), np.arange(len(rows)))
    return [Duplicate(first, row) for row, first in pairs.tolist() if row != first]


def linked(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """(P, 2): each of these rows with the first that has its value."""
    _, first, at = np.unique(values[rows], return_index=True, return_inverse=True)
    return np.stack([rows, rows[first[at]]], axis=1)


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


def _differ(sets: dict[str, Examples], pairs: Sequence[Duplicate]) -> int:
    """How many of these target examples have another label in the source."""
    source, target = sets["source"], sets["target"]
    if not _has_classes(source) or not _has_classes(target) or source.labels.ndim != 1:
        return 0
    return len({pair.first for pair in pairs if int(source.labels[pair.second]) != int(target.labels[pair.first])})


def _as_often_within(source: Examples, pairs: Sequence[Duplicate], n_target: int) -> bool:
    """Whether equal rows of a table are about as frequent as within the source, and so no copies."""
    if source.inputs.ndim != 2:
        return False
    counts = np.unique(codes(source.inputs), return_counts=True)[1]
    share = int(counts[counts > 1].sum()) / len(source)
    return share > 0 and len({pair.first for pair in pairs}) <= _FEW_TWINS + _MORE_TWINS * share * n_target


def _likely(
    pairs: list[Duplicate], first: Examples, second: Examples, preparation: Preparation | None
) -> tuple[list[Duplicate], list[Duplicate]]:
    """The pairs that are copies, and those that are equal by chance."""
    rows = np.zeros(len(first), dtype=bool)
    rows[[pair.first for pair in pairs]] = True
    chance = by_chance([first.inputs, second.inputs], preparation, np.concatenate([rows, np.zeros(len(second), bool)]))
    parts: tuple[list[Duplicate], list[Duplicate]] = ([], [])
    for pair in pairs:
        parts[int(chance[pair.first])].append(pair)
    return parts


def by_chance(sets: Sequence[Inputs], preparation: Preparation | None, asked: np.ndarray) -> np.ndarray:
    """(N,) the rows of these sets together, among those asked, that other examples equal by chance.

    So are texts that were cut, and rows of a table whose values, were they independent, several others would have: with
    shares p of the present values, N·Π p is the expected number of equal rows.
    """
    if isinstance(preparation, TextPreparation):
        return asked & np.concatenate([preparation.cut(inputs).numpy() for inputs in sets])
    chance = asked.copy()
    if not asked.any() or not all(isinstance(inputs, Tensor) and inputs.ndim == 2 for inputs in sets):
        return np.zeros_like(asked)
    if len({(inputs.shape[1], inputs.dtype) for inputs in sets}) > 1:
        return np.zeros_like(asked)
    expected = np.full(len(asked), float(len(asked)))
    for values, gone in _values_of(torch.cat([inputs.cpu() for inputs in sets]), preparation):
        _, at, counts = np.unique(values, return_inverse=True, return_counts=True)
        expected *= np.where(gone, 1.0, counts[at] / len(asked))
        chance = asked & (expected > _EXPECTED)
        if not chance.any():
            break
    return chance


def _values_of(inputs: Tensor, preparation: Preparation | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The columns of a table: a number for each different value, and whether it is missing, (N,) each."""
    if isinstance(preparation, TablePreparation):
        for _, stored, gone in preparation.stored(inputs):
            yield stored[:, 0].numpy() if stored.shape[1] == 1 else codes(stored), gone.numpy()
        return
    for column in inputs.T:
        yield column.numpy(), ~column.isfinite().numpy()


class Duplicate(NamedTuple):
    first: int  # row in the first set
    second: int  # row in the second set


def duplicates(first: Inputs, second: Inputs) -> list[Duplicate]:
    """For each row of ``first`` the rows of ``second`` with identical bytes."""
    if not _comparable(first, second):
        return []
    places: dict[int, list[int]] = {}
    for row, code in enumerate(codes(first).tolist()):
        places.setdefault(code, []).append(row)
    return [Duplicate(at, row) for row, code in enumerate(codes(second).tolist()) for at in places.get(code, ())]


def _comparable(first: Inputs, second: Inputs) -> bool:
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return False
    return first.shape[1:] == second.shape[1:] and first.dtype == second.dtype


def codes(inputs: Inputs) -> np.ndarray:
    """(N,) int64: a hash of the content of each example."""
    hashes: list[int] = []
    for piece in structure.split(inputs, _PIECE):
        parts = [
            rows.cpu().contiguous().view(len(rows), -1).view(torch.uint8).numpy() for rows in structure.tensors(piece)
        ]
        for rows in zip(*parts, strict=True):
            content = b"".join(row.tobytes() for row in rows)
            hashes.append(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), signed=True))
    return np.array(hashes, dtype=np.int64)


def near_duplicates(first: Inputs, second: Inputs) -> list[Duplicate]:
    """For each image of ``first`` those of ``second`` that may be resized or recompressed copies; not identical ones.

    Their difference hashes (9 x 8 grey, 64 bits) are at most 6 bits apart and, to confirm, their 16 x 16 thumbnails
    differ little. Inputs other than uint8 images (N, C, H, W) have none.
    """
    if not _comparable(first, second) or first.ndim != 4 or first.dtype != torch.uint8:
        return []
    hashes, others = _difference_hash(first), _difference_hash(second)
    small, small_others = _thumbnails(first), _thumbnails(second)
    pairs = []
    for start in range(0, len(hashes), _ROWS):
        # Of ±1 vectors: the product is 64 minus twice the number of differing bits.
        agree = hashes[start : start + _ROWS] @ others.T
        rows, columns = (agree >= 64 - 2 * _BITS_APART).nonzero(as_tuple=True)
        for at in torch.split(torch.arange(len(rows)), 65536):
            apart = (small[start + rows[at]].float() - small_others[columns[at]].float()).abs()
            near = (apart.mean(1) <= _MEAN_APART) & (apart.amax(1) <= _WORST_APART)
            matches = zip(rows[at][near].tolist(), columns[at][near].tolist(), strict=True)
            pairs += [Duplicate(start + row, column) for row, column in matches]
    return [pair for pair in pairs if not torch.equal(first[pair.first], second[pair.second])]


def _difference_hash(images: Tensor) -> Tensor:
    """(N, 64) of ±1: whether each of 9 x 8 grey cells is brighter than its right neighbour."""
    cells = torch.cat([_resized(piece.float().mean(1, keepdim=True), (8, 9)) for piece in images.cpu().split(_ROWS)])
    return torch.where(cells[..., :-1] > cells[..., 1:] + 0.5, 1.0, -1.0).flatten(1)


def _thumbnails(images: Tensor) -> Tensor:
    """(N, C·256) uint8: 16 x 16 thumbnails."""
    small = [_resized(piece.float(), (16, 16)).round_().clamp_(0, 255) for piece in images.cpu().split(_ROWS)]
    return torch.cat([piece.to(torch.uint8).flatten(1) for piece in small])


def _resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(images, size=size, mode="bilinear", antialias=True, align_corners=False)
