"""Calls of one linear layer at many times, as in a recurrent network, as one call.

Their inputs and δ are stacked, so that a layer that is called once for each element of a sequence costs one product
over the whole sequence.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from soseleto.engines.layerwise.call import Call
from soseleto.engines.layerwise.layouts import Owners
from soseleto.engines.rules import LINEAR

FEWEST = 4  # calls that are worth a copy of their inputs
ALL = slice(None)


def together(calls: list[Call]) -> list[Call]:
    """The calls, with those of equal shapes of a linear layer replaced by one; the replaced ones are closed."""
    if len(calls) < FEWEST:
        return calls
    kinds: dict[object, list[Call]] = {}
    for call in calls:
        kinds.setdefault(_kind(call), []).append(call)
    return [one for alike in kinds.values() for one in (_stack(alike) if len(alike) >= FEWEST else alike)]


def _kind(call: Call) -> object:
    if call.rule is not LINEAR or call.delta is None or call.a is None:
        return id(call)
    rows = None if isinstance(call.layout, Owners) else call.rows
    parts = call.a.shape[1:], call.delta.shape[1:], call.dtype
    layout = None if call.layout is None else call.layout.name
    return tuple(call.names.items()), rows, parts, layout


def _stack(calls: list[Call]) -> list[Call]:
    first = calls[0]
    deltas, inputs = zip(*(call.data(ALL) for call in calls), strict=True)
    for call in calls:
        call.close()
    if isinstance(first.layout, Owners):
        index = torch.cat([call.layout.index for call in calls if isinstance(call.layout, Owners)])
        a, delta = torch.cat(inputs), torch.cat(deltas)
        layout = Owners(first.layout.name, index, first.layout.examples)
    else:
        a, delta, layout = torch.stack(inputs, 1), torch.stack(deltas, 1), None
    return [replace(first, a=a, delta=delta, layout=layout, version=a._version, rows=len(delta), group=None)]
