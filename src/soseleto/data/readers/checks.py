"""Checks of whole data sets before training; each is a function that returns the problems found."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from soseleto.data import storage
from soseleto.data.examples import Examples
from soseleto.data.readers.duplicates import Duplicate, duplicates, twin_share
from soseleto.data.readers.prepare_tables import Preparation
from soseleto.data.readers.problems import Problem, some
from soseleto.data.text import TextPreparation
from soseleto.errors import counted

_FEW_COLUMNS = 4  # rows with fewer numbers coincide by chance
CHECKED = "checked"  # target examples that have another label in the source: see labels_in_source
_FEW_TWINS, _MORE_TWINS = 3, 2.0  # rows of a table that coincide beyond the source's own share, and times that share


def check_examples(sets: dict[str, Examples], *, mode: str, preparation: Preparation | None = None) -> list[Problem]:
    """The problems within the data sets and between them."""
    columns = None if preparation is None else preparation.names
    found: list[Problem] = []
    for name, examples in sets.items():
        found += _non_finite(name, examples, columns)
        found += _labels(name, examples)
    source = sets.get("source")
    if source is not None:
        found += _constant_columns(source, columns)
        found += _empty_classes(source)
    if source is not None and "target" in sets and mode == "noisy":
        found += _missing_in_source(source, sets["target"])
        if not any(problem.kind == "absurd classes" for problem in found):
            found += _missing_in_target(source, sets["target"])
    if "target" in sets:
        found += [p for other in ("source", "test") if other in sets for p in _copies(sets, other, mode, preparation)]
    return found


def labels_in_source(target: Examples, source: Examples, preparation: Preparation | None = None) -> Tensor:
    """(N,) the label that each target example has in the source, -1 for one that is not in it, compared by content.

    A target that was made by checking a part of the source has its labels from before the check there.
    """
    before, labels = torch.full((len(target),), -1, dtype=torch.int64), source.labels.cpu()
    for pair in reversed(_copied(target, source, preparation)):  # of several copies the first counts
        before[pair.first] = labels[pair.second]
    return before


def labels_in_target(target: Examples, source: Examples, preparation: Preparation | None = None) -> dict[str, str]:
    """The ids of source examples that are in the target under another label -> the label there."""
    names = target.classes or ()
    return {
        source.id_of(pair.second): str(names[label]) if names else str(label)
        for pair in reversed(_copied(target, source, preparation))
        if (label := int(target.labels[pair.first])) != int(source.labels[pair.second])
    }


def _copied(target: Examples, source: Examples, preparation: Preparation | None) -> list[Duplicate]:
    chance = _by_chance(target.inputs, preparation)
    return [pair for pair in duplicates(target.inputs, source.inputs, exact=True) if pair.first not in chance]


def _ids(examples: Examples, rows: Tensor) -> tuple[str, ...]:
    return tuple(examples.id_of(row) for row in rows.tolist())


def _non_finite(name: str, examples: Examples, columns: Sequence[str] | None) -> list[Problem]:
    """NaN and infinite inputs."""
    inputs = examples.inputs
    if not inputs.dtype.is_floating_point:
        return []
    flat = inputs.reshape(len(inputs), -1)
    columns_bad = torch.zeros(flat.shape[1], dtype=torch.bool, device=flat.device)
    rows_bad = torch.zeros(len(flat), dtype=torch.bool, device=flat.device)
    for piece, rows_of_piece in zip(flat.split(storage.PIECE), rows_bad.split(storage.PIECE), strict=True):
        bad = ~piece.isfinite()
        columns_bad |= bad.any(0)
        rows_of_piece.copy_(bad.any(1))
    if not bool(rows_bad.any()):
        return []
    rows = rows_bad.nonzero().flatten()
    positions = columns_bad.nonzero().flatten().tolist()
    names = some([_column(position, columns) for position in positions])
    ids = _ids(examples, rows)
    text = f"{counted(len(ids), 'example has', 'examples have')} NaN or infinite values in {names} (id {some(ids)})."
    return [Problem(name, "nan", text, ids)]


def _labels(name: str, examples: Examples) -> list[Problem]:
    labels = examples.labels
    if labels.dtype.is_floating_point:
        bad = ~labels.reshape(len(labels), -1).isfinite().all(1)
        ids = _ids(examples, bad.nonzero().flatten())
        text = f"{counted(len(ids), 'example has', 'examples have')} a NaN or infinite label (id {some(ids)})."
        return [Problem(name, "no label", text, ids)] if ids else []
    classes = len(torch.unique(labels))
    if name == "source" and len(labels) >= 100 and classes > len(labels) // 2:
        text = f"{classes:,} classes for {len(labels):,} examples: probably not the label column, so name another."
        return [Problem(name, "absurd classes", text)]
    return []


def _constant_columns(source: Examples, columns: Sequence[str] | None) -> list[Problem]:
    """Constant columns of a table, which are 0 after standardisation."""
    inputs = source.inputs
    if inputs.ndim != 2 or not inputs.dtype.is_floating_point or len(inputs) < 2:
        return []
    pieces = inputs.split(storage.PIECE)
    low = torch.stack([torch.where(piece.isfinite(), piece, torch.inf).amin(0) for piece in pieces]).amin(0)
    high = torch.stack([torch.where(piece.isfinite(), piece, -torch.inf).amax(0) for piece in pieces]).amax(0)
    names = [_column(position, columns) for position in (low >= high).nonzero().flatten().tolist()]
    if not names:
        return []
    text = f"no information in {counted(len(names), 'constant column')}: leave out {some(names)}."
    return [Problem("source", "constant", text, stops=False)]


def _empty_classes(source: Examples) -> list[Problem]:
    if source.classes is None or source.labels.dtype.is_floating_point:
        return []
    counts = torch.bincount(source.labels.cpu(), minlength=len(source.classes))
    empty = [source.classes[c] for c in (counts == 0).nonzero().flatten().tolist()]
    if not empty:
        return []
    text = f"{_the_classes(len(empty))} {some(empty)} {'has' if len(empty) == 1 else 'have'} no examples."
    return [Problem("source", "empty class", text, stops=False)]


def _missing_in_source(source: Examples, target: Examples) -> list[Problem]:
    """In noisy mode both share one head: a class that only the target has cannot be learned from the source."""
    if source.labels.dtype.is_floating_point or target.labels.dtype.is_floating_point:
        return []
    known = torch.unique(source.labels.cpu())
    rows = (~torch.isin(target.labels.cpu(), known)).nonzero().flatten()
    if not len(rows):
        return []
    missing = torch.unique(target.labels.cpu()[rows]).tolist()
    names = some([target.classes[c] if target.classes else str(c) for c in missing])
    are = "is" if len(missing) == 1 else "are"
    text = f"{_the_classes(len(missing))} {names} {are} not in the source: add source examples, or use mode='transfer'."
    return [Problem("target", "class not in source", text, _ids(target, rows))]


def _missing_in_target(source: Examples, target: Examples) -> list[Problem]:
    """In noisy mode weights follow the target: nothing trusted speaks for the examples of such a class."""
    if source.labels.dtype.is_floating_point or target.labels.dtype.is_floating_point:
        return []
    rows = ~torch.isin(source.labels.cpu(), torch.unique(target.labels.cpu()))
    missing = torch.unique(source.labels.cpu()[rows]).tolist()
    if not missing:
        return []
    names = some([source.classes[c] if source.classes else str(c) for c in missing])
    have = "has" if len(missing) == 1 else "have"
    text = (
        f"{_the_classes(len(missing))} {names} {have} no example in the target, and "
        f"{counted(int(rows.sum()), 'example')} in the source, for which nothing trusted speaks: add target examples."
    )
    return [Problem("target", "class not in target", text, stops=False)]


def _copies(sets: dict[str, Examples], other: str, mode: str, preparation: Preparation | None) -> list[Problem]:
    """Target examples that are also in another set; the target's copy is the one to keep.

    Near duplicates may be different examples: they are reported and do not stop the training. Nor do target examples
    that have another label in the source: their labels were checked.
    """
    target, second = sets["target"], sets[other]
    if target.inputs.ndim == 2 and target.inputs.shape[1] < _FEW_COLUMNS:
        return []
    found = duplicates(target.inputs, second.inputs)
    chance = _by_chance(target.inputs, preparation)
    exact = [pair for pair in found if pair.exact and pair.first not in chance]
    near = [pair for pair in found if not pair.exact]
    missing = [pair for pair in found if pair.exact and pair.first in chance]
    twins: list[Duplicate] = []
    if exact and "source" in sets and _as_often_within(sets["source"], exact, len(target)):
        exact, twins = [], exact
    like = "may be the same image, resized or recompressed, as one in"
    equal = "the same values as a row of"
    few = f"fewer than {_FEW_COLUMNS} values, the same as in"
    if isinstance(preparation, TextPreparation):
        few = "the beginning, before it is cut, of a text in"
    made = [
        _checked(sets, exact)
        if other == "source" and mode == "noisy" and _differ(sets, exact)
        else _copy_problem(sets, other, exact, "duplicate", "is also in", "are also in"),
        _copy_problem(sets, other, near, "near duplicate", like, like),
        _copy_problem(sets, other, missing, "near duplicate", f"has {few}", f"have {few}"),
        _copy_problem(sets, other, twins, "near duplicate", f"has {equal}", f"have {equal}"),
    ]
    return [problem for problem in made if problem is not None]


def _differ(sets: dict[str, Examples], pairs: Sequence[Duplicate]) -> int:
    """How many of these target examples have another label in the source."""
    source, target = sets["source"].labels, sets["target"].labels
    if source.dtype.is_floating_point or target.dtype.is_floating_point or source.ndim != 1:
        return 0
    return len({pair.first for pair in pairs if int(source[pair.second]) != int(target[pair.first])})


def _checked(sets: dict[str, Examples], pairs: Sequence[Duplicate]) -> Problem:
    ids = tuple(dict.fromkeys(sets["source"].id_of(pair.second) for pair in pairs))
    are = counted(len({pair.first for pair in pairs}), "target example is also", "target examples are also")
    text = (
        f"{are} in the source, {_differ(sets, pairs)} of them under another label: these source examples are left out, "
        "and their labels taken as those from before the target was checked."
    )
    return Problem("source", CHECKED, text, ids, stops=False)


def _as_often_within(source: Examples, pairs: Sequence[Duplicate], n_target: int) -> bool:
    """Whether equal rows of a table are about as frequent as within the source, and so no copies."""
    if source.inputs.ndim != 2:
        return False
    share = twin_share(source.inputs)
    return share > 0 and len({pair.first for pair in pairs}) <= _FEW_TWINS + _MORE_TWINS * share * n_target


def _by_chance(inputs: Tensor, preparation: Preparation | None) -> set[int]:
    """Rows of a table with too few values present, and texts that were cut: they equal others by chance."""
    if isinstance(preparation, TextPreparation):
        return set(preparation.cut(inputs).nonzero().flatten().tolist())
    if inputs.ndim != 2 or not inputs.dtype.is_floating_point:
        return set()
    present = inputs.isfinite().sum(1) if preparation is None else preparation.present(inputs)
    return set((present < _FEW_COLUMNS).nonzero().flatten().tolist())


def _copy_problem(
    sets: dict[str, Examples], other: str, pairs: Sequence[Duplicate], kind: str, one: str, more: str
) -> Problem | None:
    if not pairs:
        return None
    target, second = sets["target"], sets[other]
    ids = tuple(dict.fromkeys(second.id_of(pair.second) for pair in pairs))
    copies = some([f"target {target.id_of(p.first)} = {other} {second.id_of(p.second)}" for p in pairs])
    are = counted(len({p.first for p in pairs}), f"target example {one}", f"target examples {more}")
    text = f"{are} the {other} ({copies})."
    return Problem(other, kind, text, ids, stops=kind == "duplicate")


def _the_classes(count: int) -> str:
    return "the class" if count == 1 else "the classes"


def _column(position: int, columns: Sequence[str] | None) -> str:
    return f"column {columns[position]!r}" if columns else f"value {position}"
