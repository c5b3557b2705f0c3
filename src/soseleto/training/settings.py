"""A method with all its settings as plain data, as ``config.json`` keeps it, and back."""

from __future__ import annotations

from typing import Any

from soseleto import pieces
from soseleto.methods import METHODS, Strong, StrongTransfer
from soseleto.pieces import chain, last_layer
from soseleto.task.settings import from_data, to_data
from soseleto.task.task import Method


def settings_of(method: Method) -> Any:
    """The method's settings as plain data.

    Example:
        >>> from soseleto import Soseleto
        >>> settings_of(Soseleto.paper())["source_loss"]
        {'name': 'mean'}
    """
    return to_data(method)


def method_of(settings: Any) -> Method:
    """The method that ``settings_of`` described, such as ``config.json``'s entry ``settings``."""
    others = (Strong, StrongTransfer)
    classes: dict[str, Any] = {one.__name__: one for one in others}
    for make in METHODS.values():
        classes[getattr(make, "__name__", "")] = make
    by_name = {name: getattr(pieces, name) for name in pieces.__all__ if name != "Piece"}
    with_lists: dict[str, Any] = {
        "chain": lambda pieces: chain(*pieces),
        "last_layer": lambda forms, **others: last_layer(*forms, **others),
    }
    method: Method = from_data(settings, {**classes, **by_name, **with_lists})
    return method
