"""Checks of whole data sets before training; every one is a function that returns what it found."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from soseleto.data.examples import Examples
from soseleto.data.readers.duplicates import duplicates
from soseleto.data.readers.problems import Problem, some

_FEW_COLUMNS = 4  # rows of fewer numbers coincide by chance


def check_examples(sets: dict[str, Examples], *, mode: str, columns: Sequence[str] | None = None) -> list[Problem]:
    """Everything that can be seen in the data sets themselves, and between them."""
    found: list[Problem] = []
    for name, examples in sets.items():
        found += _numbers(name, examples, columns)
        found += _labels(name, examples)
    source = sets.get("source")
    if source is not None:
        found += _constant(source, columns)
        found += _empty_classes(source)
    if source is not None and "target" in sets and mode == "noisy":
        found += _unknown_to_source(source, sets["target"])
    if "target" in sets:
        found += [p for other in ("source", "test") if other in sets for p in _copies(sets, other)]
    return found


def _ids(examples: Examples, rows: Tensor) -> tuple[str, ...]:
    return tuple(examples.id_of(row) for row in rows.tolist())


def _numbers(name: str, examples: Examples, columns: Sequence[str] | None) -> list[Problem]:
    """NaN and infinite inputs: a column of nothing else, or single rows."""
    inputs = examples.inputs
    if not inputs.dtype.is_floating_point:
        return []
    odd = ~inputs.reshape(len(inputs), -1).isfinite()
    if not bool(odd.any()):
        return []
    rows = odd.any(1).nonzero().flatten()
    places = odd.any(0).nonzero().flatten().tolist()
    words = some([_column(place, columns) for place in places])
    ids = _ids(examples, rows)
    text = f"{len(ids)} examples have NaN or infinite values in {words} (ids {some(ids)})."
    return [Problem(name, "nan", text, ids)]


def _labels(name: str, examples: Examples) -> list[Problem]:
    labels = examples.labels
    if labels.dtype.is_floating_point:
        odd = ~labels.reshape(len(labels), -1).isfinite().all(1)
        ids = _ids(examples, odd.nonzero().flatten())
        text = f"{len(ids)} examples have a NaN or infinite label (ids {some(ids)})."
        return [Problem(name, "no label", text, ids)] if ids else []
    classes = len(torch.unique(labels))
    if name == "source" and len(labels) >= 100 and classes > len(labels) // 2:
        text = f"{classes} classes for {len(labels)} examples: this is hardly the label column."
        return [Problem(name, "absurd classes", text)]
    return []


def _constant(source: Examples, columns: Sequence[str] | None) -> list[Problem]:
    """Columns of a table that never change; standardised they are 0, so they only waste room."""
    inputs = source.inputs
    if inputs.ndim != 2 or not inputs.dtype.is_floating_point or len(inputs) < 2:
        return []
    low = torch.where(inputs.isfinite(), inputs, torch.inf).amin(0)
    high = torch.where(inputs.isfinite(), inputs, -torch.inf).amax(0)
    names = [_column(place, columns) for place in (low >= high).nonzero().flatten().tolist()]
    if not names:
        return []
    text = f"{len(names)} columns are constant ({some(names)}): they carry nothing; leave them out."
    return [Problem("source", "constant", text, stops=False)]


def _empty_classes(source: Examples) -> list[Problem]:
    if source.classes is None or source.labels.dtype.is_floating_point:
        return []
    counts = torch.bincount(source.labels.cpu(), minlength=len(source.classes))
    empty = [source.classes[c] for c in (counts == 0).nonzero().flatten().tolist()]
    if not empty:
        return []
    text = f"no examples of the classes {some(empty)}."
    return [Problem("source", "empty class", text, stops=False)]


def _unknown_to_source(source: Examples, target: Examples) -> list[Problem]:
    """Noisy mode has one head for both: a class that only the target has cannot be learned from the source."""
    if source.labels.dtype.is_floating_point or target.labels.dtype.is_floating_point:
        return []
    there = torch.unique(source.labels.cpu())
    rows = (~torch.isin(target.labels.cpu(), there)).nonzero().flatten()
    if not len(rows):
        return []
    lacking = torch.unique(target.labels.cpu()[rows]).tolist()
    names = some([target.classes[c] if target.classes else str(c) for c in lacking])
    text = f"the classes {names} are not in the source: add source examples of them, or use mode='transfer'."
    return [Problem("target", "class not in source", text, _ids(target, rows))]


def _copies(sets: dict[str, Examples], other: str) -> list[Problem]:
    """Target examples that stand in another set too; the target's own copy is the one to keep."""
    target, theirs = sets["target"], sets[other]
    if target.inputs.ndim == 2 and target.inputs.shape[1] < _FEW_COLUMNS:
        return []
    made = []
    found = duplicates(target.inputs, theirs.inputs)
    for kind, exact in (("duplicate", True), ("near duplicate", False)):
        pairs = [pair for pair in found if pair.exact == exact]
        if pairs:
            ids = tuple(dict.fromkeys(theirs.id_of(pair.second) for pair in pairs))
            seen = some([f"{target.id_of(p.first)} = {theirs.id_of(p.second)}" for p in pairs])
            how = "also stand" if exact else "stand resized or recompressed"
            text = f"{len({p.first for p in pairs})} target examples {how} in the {other} ({seen})."
            made.append(Problem(other, kind, text, ids))
    return made


def _column(place: int, columns: Sequence[str] | None) -> str:
    return f"column {columns[place]!r}" if columns else f"value {place}"
