"""Settings that ``Soseleto`` had before it was composed of pieces, and what to write instead."""

from __future__ import annotations

from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from soseleto.errors import UsageError, did_you_mean

C = TypeVar("C", bound=type[Any])
OLD_NAMES = {
    "scale_free": "alignment=chain(scale_by_rms(), hold_when_vanished()), or without scale_by_rms()",
    "normalize_weights": "source_loss=normalized(), or source_loss=mean() for False",
    "target_average": "direction=running_mean({}), or direction=last_batch() for 0",
    "aligned": "direction=running_mean(layers={})",
    "pool_classes": "scores=pooled_by_class()",
    "per_error": "alignment=chain(per_error(), scale_by_rms(), hold_when_vanished())",
    "doubt_labels": "source_loss=label_doubt()",
    "target_share": "gradients=target_share({})",
    "domain_loss": "gradients=domain_loss({})",
    "max_norm": "gradients=clip_norm({})",
    "vanished": "alignment=chain(scale_by_rms(), hold_when_vanished({}))",
    "reuse_target": "direction=running_mean(every={})",
}


def explains_old_names(method: C) -> C:
    """Give an unknown argument of the class one sentence with what to write instead."""
    init: Any = method.__init__
    known = list(signature(method).parameters)

    @wraps(init)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        for name, value in given.items():
            if name in OLD_NAMES:
                new = OLD_NAMES[name].format(repr(value))
                raise UsageError(f"{method.__name__} has no argument {name!r}: write {new} (soseleto.pieces).")
            if name not in known:
                raise UsageError(f"{method.__name__} has no argument {name!r}{did_you_mean(name, known)}.")
        init(self, *args, **given)

    method.__init__ = checked
    return method
