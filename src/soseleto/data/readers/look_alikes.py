"""Class names that differ only in case, surrounding blanks or Unicode form, such as "Cat", "cat " and "cat"."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import replace

from soseleto.data.readers.labels import Names
from soseleto.data.readers.problems import Problem, some
from soseleto.data.readers.raw import Raw


def plain(name: str) -> str:
    """Without surrounding blanks, casefolded, and in Unicode's composed form (NFC)."""
    folded = unicodedata.normalize("NFC", name).strip().casefold()
    return unicodedata.normalize("NFC", folded)


def merged(raw: Raw) -> Raw:
    """The same data set with every class under its plain name."""
    truth = _plain(raw.truth) if isinstance(raw.truth, Names) else raw.truth
    classes = None if raw.classes is None else tuple(dict.fromkeys(map(plain, raw.classes)))
    labels = _plain(raw.labels) if isinstance(raw.labels, Names) else raw.labels
    return replace(raw, labels=labels, truth=truth, classes=classes)


def _plain(names: Names) -> Names:
    return Names(tuple(None if name is None else plain(name) or None for name in names.names))


def look_alikes(names: Mapping[str, Iterable[str]]) -> list[Problem]:
    """The look-alikes among the class names of data sets that share their classes, by the name of the set.

    They stop the training if a set has a spelling that the first does not have.
    """
    sets = {where: set(found) for where, found in names.items()}
    groups: dict[str, set[str]] = {}
    for name in set().union(*sets.values()):
        groups.setdefault(plain(name), set()).add(name)
    alike = [sorted(group) for _, group in sorted(groups.items()) if len(group) > 1]
    if not alike:
        return []
    first, *others = sets
    differ = [where for where in others if any(sets[where].intersection(group) - sets[first] for group in alike)]
    shown = some([" and ".join(map(ascii, group)) for group in alike])
    between = f", and the {differ[0]} has spellings that the {first} lacks" if differ else ""
    text = (
        f"the classes {shown} look alike but are different classes{between}: type reading=Reading(merge_labels=True), "
        "or --merge-labels, to make them one."
    )
    return [Problem(differ[0] if differ else first, "look-alike classes", text, stops=bool(differ))]
