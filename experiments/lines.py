"""Lines of a results table: from a line's name to the fields of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soseleto.errors import UsageError, did_you_mean

# By name: the title, and what differs from the common configuration.
Lines = Mapping[str, tuple[str, Mapping[str, Any]]]
_PAIRS = ("settings", "rounds")  # fields that are tuples of (name, value)


def fields_of(lines: Lines, method: str, common: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration's fields: those of the line, overridden by ``common`` and then by ``changes``.

    Changed settings are merged into the line's own, and then the method's name states them:

    >>> fields_of({"a": ("A", {"settings": (("x", 1),)})}, "a", {"lr": 0.1}, {"settings": (("y", 2),)})
    {'settings': (('x', 1), ('y', 2)), 'lr': 0.1, 'method': 'a[y=2]'}
    """
    if method not in lines:
        known = ", ".join(lines)
        raise UsageError(f"unknown method {method!r}{did_you_mean(method, lines)}: choose from {known}.")
    own = lines[method][1]
    fields = {**own, **common, **changes, "method": method}
    for name in _PAIRS:
        if changes.get(name):
            fields[name] = tuple({**dict(own.get(name, ())), **dict(changes[name])}.items())
            fields["method"] += "[" + ",".join(f"{key}={value}" for key, value in changes[name]) + "]"
    return fields
