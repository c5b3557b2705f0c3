"""All ranks of a training must have been started with the same settings, and must know of each other."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from soseleto.errors import UsageError
from soseleto.parallel.reducer import Reducer
from soseleto.training.resume import comparable

MOST_SHOWN = 60  # characters of a value


def require_reducer(reducer: Reducer | None) -> None:
    """Raise where torchrun has started several processes and each would train alone."""
    size = os.environ.get("WORLD_SIZE", "1")
    if reducer is None and size.isdecimal() and int(size) > 1:
        raise UsageError(
            f"this is one of {size} processes (WORLD_SIZE is set, as by torchrun), and without a reducer each would "
            "train alone: write `with soseleto.ranks() as reducer:` and in it fit(..., "
            "compute=Compute(reducer=reducer)), or unset WORLD_SIZE."
        )


def require_same_settings(reducer: Reducer, settings: Mapping[str, Any]) -> None:
    """Raise on every rank, with all differences, where one was started with other settings than rank 0."""
    every = reducer.every(comparable(settings))
    for rank, own in enumerate(every):
        if found := list(_differences(every[0], own, rank)):
            raise UsageError(
                f"the ranks were started with different settings, since {', '.join(found)}: give every rank the same."
            )


def optimizer_settings(param_groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Learning rate and the like, which a function that makes an optimizer does not show."""
    return {
        f"optimizer group {at}": {name: value for name, value in group.items() if name != "params"}
        for at, group in enumerate(param_groups)
    }


def _differences(first: Any, own: Any, rank: int, at: str = "") -> Iterator[str]:
    if isinstance(first, dict) and isinstance(own, dict):
        for name in {**first, **own}:
            yield from _differences(first.get(name), own.get(name), rank, f"{at}.{name}" if at else name)
    elif first != own:
        yield f"{at} is {_shown(first)} on rank 0 and {_shown(own)} on rank {rank}"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
