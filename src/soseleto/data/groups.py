"""Copies of examples, and groups: examples that stay on one side of every split.

Copies have identical bytes, or are resized or recompressed images. A group is of copies, or say of one patient:
``Examples.groups`` has one number for each example; those of a source and its target can be compared. -1 is a group of
its own. Rows of a table whose values are so frequent that others would have them by chance are no copies.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from soseleto.data import structure
from soseleto.data.examples import Examples
from soseleto.data.lazy import ExampleSet
from soseleto.data.preparation import Preparation, TablePreparation
from soseleto.data.reading import Problem
from soseleto.data.structure import Inputs
from soseleto.data.text import TextPreparation
from soseleto.errors import DataError, counted

_EXPECTED = 0.5  # rows of a table that have the values of one by chance, above which equal ones are no copies
_BITS_APART = 6  # of 64: largest Hamming distance between the hashes of copies
_MEAN_APART = 6.0  # of 255: largest mean difference between copies, at 16 x 16
_WORST_APART = 40.0  # of 255: largest difference at any value between copies, at 16 x 16
_ROWS, _PIECE = 512, 4096
Pairs = np.ndarray  # (P, 2): a row of one set, and one of another
logger = logging.getLogger("soseleto")


def kept_together(source: ExampleSet, target: ExampleSet) -> tuple[ExampleSet, ExampleSet]:
    """Source and target with groups, found here unless both have them already, as after reading files."""
    if not isinstance(source, Examples) or not isinstance(target, Examples):
        return source, target
    if source.groups is not None and target.groups is not None:
        return source, target
    (source, target), problems = with_groups([source, target])
    for problem in problems:
        logger.info("%s", problem.text)
    return source, target


def unseen(test: Examples, sides: Sequence[ExampleSet]) -> Examples:
    """The test examples of which source and target have no copy; the others cannot measure an accuracy."""
    kept = np.ones(len(test), dtype=bool)
    for examples in sides:
        if isinstance(examples, Examples):
            kept[copies(test, examples)[:, 0]] = False
    if kept.all():
        return test
    left = counted(int((~kept).sum()), "test example is", "test examples are")
    if not kept.any():
        raise DataError(f"all {left} also in the source or in the target: give others.")
    logger.warning("%s also in the source or in the target: accuracy is measured on the others.", left)
    return test.subset(torch.from_numpy(kept))


def with_groups(
    sets: Sequence[Examples], preparation: Preparation | None = None
) -> tuple[list[Examples], list[Problem]]:
    """Source and target with the numbers of their groups, and how many groups there are."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    starts = np.cumsum([0, *map(len, sets)])
    named = np.concatenate([np.full(len(s), -1) if s.groups is None else s.groups.numpy() for s in sets])
    edges = [_equal(sets, preparation), linked(named, np.flatnonzero(named >= 0))]
    for examples, start in zip(sets, starts, strict=False):
        edges.append(near_duplicates(sets[1].inputs, examples.inputs) + np.array([starts[1], start]))
    edge = np.concatenate(edges).T
    graph = coo_array((np.ones(edge.shape[1], dtype=bool), tuple(edge)), shape=(len(named), len(named)))
    _, component = connected_components(graph, directed=False)
    _, first, members = np.unique(component, return_index=True, return_counts=True)
    parts = np.split(first[component].astype(np.int64), starts[1:-1])
    grouped = [replace(each, groups=torch.from_numpy(part)) for each, part in zip(sets, parts, strict=True)]
    several = members[members > 1]
    if not len(several):
        return grouped, []
    what = "examples that belong together or are copies" if (named >= 0).any() else "copies"
    size = counted(int(several.sum()), "example")
    text = f"{counted(len(several), 'group')} of {what} ({size}), kept together on one side of every split."
    return grouped, [Problem("target", "groups", text, stops=False)]


def _equal(sets: Sequence[Examples], preparation: Preparation | None) -> np.ndarray:
    """Pairs of rows with the same content."""
    content = np.concatenate([codes(examples.inputs) for examples in sets])
    _, at, counts = np.unique(content, return_inverse=True, return_counts=True)
    twins = counts[at] > 1
    chance = _by_chance([examples.inputs for examples in sets], preparation, twins)
    return linked(content, np.flatnonzero(twins & ~chance))


def linked(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """(P, 2): each of these rows with the first that has its value."""
    _, first, at = np.unique(values[rows], return_index=True, return_inverse=True)
    return np.stack([rows, rows[first[at]]], axis=1)


# Copies


def copies(first: Examples, second: Examples, preparation: Preparation | None = None) -> Pairs:
    """The examples that both sets have, without those that are equal by chance."""
    return likely(duplicates(first.inputs, second.inputs), first, second, preparation)[0]


def likely(pairs: Pairs, first: Examples, second: Examples, preparation: Preparation | None) -> tuple[Pairs, Pairs]:
    """The pairs that are copies, and those that are equal by chance."""
    equal = np.zeros(len(first) + len(second), dtype=bool)
    equal[pairs[:, 0]] = True
    chance = _by_chance([first.inputs, second.inputs], preparation, equal)[pairs[:, 0]]
    return pairs[~chance], pairs[chance]


def _by_chance(sets: Sequence[Inputs], preparation: Preparation | None, equal: np.ndarray) -> np.ndarray:
    """(N,) the rows of these sets together, among those that equal others, that do so by chance.

    So are texts that were cut, and rows of a table whose values, were they independent, several others would have: with
    shares p of the present values, N·Π p is the expected number of equal rows.
    """
    if isinstance(preparation, TextPreparation):
        return equal & np.concatenate([preparation.cut(inputs).numpy() for inputs in sets])
    chance = equal.copy()
    if not equal.any() or not all(isinstance(inputs, Tensor) and inputs.ndim == 2 for inputs in sets):
        return np.zeros_like(equal)
    if len({(inputs.shape[1], inputs.dtype) for inputs in sets}) > 1:
        return np.zeros_like(equal)
    expected = np.full(len(equal), float(len(equal)))
    for values, gone in _values_of(torch.cat([inputs.cpu() for inputs in sets]), preparation):
        _, at, counts = np.unique(values, return_inverse=True, return_counts=True)
        expected *= np.where(gone, 1.0, counts[at] / len(equal))
        chance = equal & (expected > _EXPECTED)
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


def duplicates(first: Inputs, second: Inputs) -> Pairs:
    """The rows of ``first`` and those of ``second`` with identical bytes."""
    if not _comparable(first, second):
        return _pairs([])
    rows_of: dict[int, list[int]] = {}
    for row, code in enumerate(codes(first).tolist()):
        rows_of.setdefault(code, []).append(row)
    return _pairs([(at, row) for row, code in enumerate(codes(second).tolist()) for at in rows_of.get(code, ())])


def _pairs(rows: Sequence[tuple[int, int]]) -> Pairs:
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


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


def near_duplicates(first: Inputs, second: Inputs) -> Pairs:
    """The images of ``first`` and those of ``second`` that may be resized or recompressed copies; not identical ones.

    Their difference hashes (9 x 8 grey, 64 bits) are at most 6 bits apart and, to confirm, their 16 x 16 thumbnails
    differ little. Inputs other than uint8 images (N, C, H, W) have none.
    """
    if not _comparable(first, second) or first.ndim != 4 or first.dtype != torch.uint8:
        return _pairs([])
    hashes, others = _difference_hash(first), _difference_hash(second)
    small, small_others = _thumbnails(first), _thumbnails(second)
    pairs: list[tuple[int, int]] = []
    for start in range(0, len(hashes), _ROWS):
        # Of ±1 vectors: the product is 64 minus twice the number of differing bits.
        agree = hashes[start : start + _ROWS] @ others.T
        rows, columns = (agree >= 64 - 2 * _BITS_APART).nonzero(as_tuple=True)
        for at in torch.split(torch.arange(len(rows)), 65536):
            apart = (small[start + rows[at]].float() - small_others[columns[at]].float()).abs()
            near = (apart.mean(1) <= _MEAN_APART) & (apart.amax(1) <= _WORST_APART)
            pairs += zip((start + rows[at][near]).tolist(), columns[at][near].tolist(), strict=True)
    return _pairs([(row, other) for row, other in pairs if not torch.equal(first[row], second[other])])


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
