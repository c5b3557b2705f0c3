"""The strong recipe and what SOSELETO is compared with, with the same two calls: ``init`` and ``step``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from soseleto.algorithm import Soseleto
from soseleto.errors import UsageError, did_you_mean
from soseleto.methods.baselines import FineTuning, Mixed, Ordinary, TargetOnly
from soseleto.methods.strong import Strong
from soseleto.methods.wrappers import Recording, Signals
from soseleto.task.task import Method

__all__ = ["METHODS", "FineTuning", "Mixed", "Ordinary", "Recording", "Signals", "Strong", "TargetOnly", "by_name"]

# Each entry makes the method with its default settings.
METHODS: Mapping[str, Callable[[], Method]] = MappingProxyType(
    {"soseleto": Soseleto, "ordinary": Ordinary, "target_only": TargetOnly, "fine_tuning": FineTuning, "mixed": Mixed}
)


def by_name(name: str) -> Method:
    """The method of that name with its default settings; ``dataclasses.replace`` changes them."""
    if name not in METHODS:
        known = ", ".join(METHODS)
        raise UsageError(f"unknown method {name!r}{did_you_mean(name, METHODS)}: choose one of {known}.")
    return METHODS[name]()
