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

from soseleto.data import storage
from soseleto.data.examples import Examples
from soseleto.data.preparation import Preparation
from soseleto.data.reading import Problem, some
from soseleto.data.text import TextPreparation
from soseleto.errors import counted

CHECKED = "checked"  # target examples that have another label in the source: see labels_in_source
_FEW_COLUMNS = 4  # rows with fewer numbers coincide by chance
_FEW_TWINS, _MORE_TWINS = 3, 2.0  # rows of a table that coincide beyond the source's own share, and times that share
_BITS_APART = 6  # of 64: largest Hamming distance between the hashes of copies
_MEAN_APART = 6.0  # of 255: largest mean difference between copies, at 16 x 16
_WORST_APART = 40.0  # of 255: largest difference at any value between copies, at 16 x 16
_ROWS = 512


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
    for other in ("source", "test"):
        if other in sets:
            problems += _copies(sets, other, mode, preparation)
    return problems


def _has_classes(examples: Examples) -> bool:
    return not examples.labels.dtype.is_floating_point


def _ids(examples: Examples, rows: Tensor) -> tuple[str, ...]:
    return tuple(examples.id_of(row) for row in rows.tolist())


def _non_finite(name: str, examples: Examples, columns: Sequence[str] | None) -> list[Problem]:
    inputs = examples.inputs
    if not inputs.dtype.is_floating_point:
        return []
    pieces = [~piece.isfinite() for piece in inputs.reshape(len(inputs), -1).split(storage.PIECE)]
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
        text = f"{used:,} classes for {len(labels):,} examples: probably not the label column, so name another."
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
        names = _classes(_names(target, rows))
        text = f"the source has no example of {names}: add source examples, or use mode='transfer'."
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
    chance = _by_chance(target.inputs, preparation)
    for pair in reversed(duplicates(target.inputs, source.inputs, exact=True)):  # of several copies the first counts
        if pair.first in chance:
            continue
        before[pair.first] = source.labels[pair.second]
        if (label := int(target.labels[pair.first])) != int(source.labels[pair.second]):
            checked[source.id_of(pair.second)] = target.classes[label] if target.classes else str(label)
    return before, checked


def _copies(sets: dict[str, Examples], other: str, mode: str, preparation: Preparation | None) -> list[Problem]:
    """Target examples that are also in another set; the target's copy is the one to keep.

    Near duplicates may be different examples: they are reported and do not stop the training. Nor do target examples
    that have another label in the source: their labels were checked.
    """
    target, second, source = sets["target"], sets[other], sets["source"]
    if target.inputs.ndim == 2 and target.inputs.shape[1] < _FEW_COLUMNS:
        return []
    pairs = duplicates(target.inputs, second.inputs)
    chance = _by_chance(target.inputs, preparation)
    exact = [pair for pair in pairs if pair.exact and pair.first not in chance]
    few = f"rows of fewer than {_FEW_COLUMNS} values, equal to"
    if isinstance(preparation, TextPreparation):
        few = "texts with the same beginning, before they are cut, as"
    near = {
        "images that may be resized or recompressed copies of": [pair for pair in pairs if not pair.exact],
        few: [pair for pair in pairs if pair.exact and pair.first in chance],
    }
    if exact and _as_often_within(source, exact, len(target)):
        exact, near["rows with the same values as"] = [], exact
    if other == "source" and mode == "noisy" and _differ(sets, exact):
        problems = [_checked(sets, exact)]
    else:
        problems = [_copy_problem(sets, other, exact, "duplicate", "copies of")] if exact else []
    return problems + [_copy_problem(sets, other, of, "near duplicate", what) for what, of in near.items() if of]


def _copy_problem(sets: dict[str, Examples], other: str, pairs: Sequence[Duplicate], kind: str, what: str) -> Problem:
    target, second = sets["target"], sets[other]
    ids = tuple(dict.fromkeys(second.id_of(pair.second) for pair in pairs))
    copies = some([f"target {target.id_of(pair.first)} = {other} {second.id_of(pair.second)}" for pair in pairs])
    count = counted(len({pair.first for pair in pairs}), "target example")
    return Problem(other, kind, f"the {other} has {what} {count} ({copies}).", ids, stops=kind == "duplicate")


def _checked(sets: dict[str, Examples], pairs: Sequence[Duplicate]) -> Problem:
    ids = tuple(dict.fromkeys(sets["source"].id_of(pair.second) for pair in pairs))
    count = counted(len({pair.first for pair in pairs}), "target example")
    text = (
        f"the source has copies of {count}, {_differ(sets, pairs)} of them under another label: these source examples "
        "are left out, and their labels taken as those from before the target was checked."
    )
    return Problem("source", CHECKED, text, ids, stops=False)


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
    digests = [int.from_bytes(digest[:8]) for digest in _digests(source.inputs)]
    counts = np.unique(np.array(digests, np.uint64), return_counts=True)[1]
    share = int(counts[counts > 1].sum()) / len(digests)
    return share > 0 and len({pair.first for pair in pairs}) <= _FEW_TWINS + _MORE_TWINS * share * n_target


def _by_chance(inputs: Tensor, preparation: Preparation | None) -> set[int]:
    """Rows of a table with too few values present, and texts that were cut: they equal others by chance."""
    if isinstance(preparation, TextPreparation):
        return set(preparation.cut(inputs).nonzero().flatten().tolist())
    if inputs.ndim != 2 or not inputs.dtype.is_floating_point:
        return set()
    present = inputs.isfinite().sum(1) if preparation is None else preparation.present(inputs)
    return set((present < _FEW_COLUMNS).nonzero().flatten().tolist())


class Duplicate(NamedTuple):
    first: int  # row in the first set
    second: int  # row in the second set
    exact: bool


def duplicates(first: Tensor, second: Tensor, *, exact: bool = False) -> list[Duplicate]:
    """For each row of ``first`` the rows of ``second`` that are the same example; with ``exact`` no near duplicates.

    Exact duplicates have identical bytes. uint8 images (N, C, H, W) are near duplicates if their difference hashes
    (9 x 8 grey, 64 bits) are at most 6 bits apart and, to confirm, their 16 x 16 thumbnails differ little.
    """
    if first.shape[1:] != second.shape[1:] or first.dtype != second.dtype:
        return []
    places: dict[bytes, list[int]] = {}
    for row, digest in enumerate(_digests(first)):
        places.setdefault(digest, []).append(row)
    equal = [Duplicate(at, row, True) for row, digest in enumerate(_digests(second)) for at in places.get(digest, ())]
    if exact or first.ndim != 4 or first.dtype != torch.uint8:
        return equal
    known = {(pair.first, pair.second) for pair in equal}
    return equal + [pair for pair in _near(first, second) if pair[:2] not in known]


def _digests(rows: Tensor) -> Iterator[bytes]:
    for piece in torch.split(rows, 4096):
        content = piece.cpu().contiguous().view(len(piece), -1).view(torch.uint8).numpy()
        for row in content:
            yield hashlib.blake2b(row.tobytes(), digest_size=16).digest()


def _near(first: Tensor, second: Tensor) -> list[Duplicate]:
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
            pairs += [Duplicate(start + row, column, False) for row, column in matches]
    return pairs


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
