"""Groups: examples that stay on one side of every split, since they are copies of each other or, say, of one patient.

``Examples.groups`` has one number for each example; those of a source and its target can be compared. -1 is a group of
its own. Copies are those of ``checks.duplicates`` and ``near_duplicates``; rows of a table whose values are so frequent
that others would have them by chance are none.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from soseleto.data.checks import by_chance, codes, copies, linked, near_duplicates
from soseleto.data.examples import Examples
from soseleto.data.lazy import ExampleSet
from soseleto.data.preparation import Preparation
from soseleto.data.reading import Problem
from soseleto.errors import DataError, counted

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
            kept[[pair.first for pair in copies(test, examples)]] = False
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

    first = np.cumsum([0, *map(len, sets)]).tolist()
    n = first[-1]
    edges = [_equal(sets, preparation), _of_one_group(sets)]
    for examples, start in zip(sets, first, strict=False):
        near = np.array(near_duplicates(sets[1].inputs, examples.inputs), dtype=np.int64).reshape(-1, 2)
        edges.append(near + np.array([first[1], start]))
    rows, columns = np.concatenate(edges).T
    graph = coo_array((np.ones(len(rows), dtype=bool), (rows, columns)), shape=(n, n))
    count, component = connected_components(graph, directed=False)
    _, places = np.unique(component, return_index=True)
    numbers = places[component].astype(np.int64)
    members = np.bincount(component, minlength=count)
    parts = np.split(numbers, first[1:-1])
    groups = [replace(each, groups=torch.from_numpy(part)) for each, part in zip(sets, parts, strict=True)]
    problems = []
    if together := int((members > 1).sum()):
        given = any(examples.groups is not None for examples in sets)
        what = "examples that belong together or are copies" if given else "copies"
        size = counted(int(members[members > 1].sum()), "example")
        text = f"{counted(together, 'group')} of {what} ({size}), kept together on one side of every split."
        problems.append(Problem("target", "groups", text, stops=False))
    return groups, problems


def _of_one_group(sets: Sequence[Examples]) -> np.ndarray:
    """Pairs of rows whose groups were given."""
    given = [np.full(len(s), -1) if s.groups is None else s.groups.numpy() for s in sets]
    numbers = np.concatenate(given)
    return linked(numbers, np.flatnonzero(numbers >= 0))


def _equal(sets: Sequence[Examples], preparation: Preparation | None) -> np.ndarray:
    """Pairs of rows with the same content."""
    content = np.concatenate([codes(examples.inputs) for examples in sets])
    _, at, counts = np.unique(content, return_inverse=True, return_counts=True)
    twins = counts[at] > 1
    chance = by_chance([examples.inputs for examples in sets], preparation, twins)
    return linked(content, np.flatnonzero(twins & ~chance))
