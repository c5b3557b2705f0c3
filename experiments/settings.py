"""Methods by their name and flat settings, as the rows of ``results/`` keep them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from experiments.controls import FrozenStrong, ShuffledStrong, ShuffledWeights
from experiments.methods import METHODS
from experiments.methods.divide_mix import DivideMix
from experiments.methods.fixmatch import FixMatch
from experiments.methods.promix import ProMix
from experiments.methods.strong_pair import StrongPair
from soseleto.algorithm import Soseleto
from soseleto.defaults import LAST_LAYER
from soseleto.methods import Strong
from soseleto.pieces import (
    beyond_noise,
    chain,
    hold_when_vanished,
    label_doubt,
    last_batch,
    mean,
    normalized,
    per_error,
    pooled_by_class,
    running_mean,
    scale_by_rms,
    target_share,
)
from soseleto.task.task import Method

BY_PIECES = {method.name: method for method in (Soseleto, ShuffledWeights)}
BY_FIELDS = (Strong, FrozenStrong, ShuffledStrong, StrongPair, FixMatch, DivideMix, ProMix)
NAMED: Mapping[str, Any] = {**METHODS, **{method.name: method for method in BY_FIELDS}, "paper": Soseleto.paper}


def make_method(base: str, settings: Mapping[str, Any]) -> Method:
    """The method of that name; ``settings`` are what differs from its defaults."""
    if base in BY_PIECES:
        return soseleto(BY_PIECES[base], **settings)
    return replace(NAMED[base](), **settings)


def soseleto(method: type[Soseleto] = Soseleto, **settings: Any) -> Soseleto:
    """SOSELETO with these settings; each name stands for a piece, and one that is left out has its default.

    Example:
        >>> soseleto(target_share=0.3, per_error=True).gradients
        chain(target_share(share=0.3))
    """
    given = dict(settings)
    average, layers = given.pop("target_average", 0.99), given.pop("aligned", None)
    alignment = [
        *([LAST_LAYER] if given.pop("by_last_layer", False) else []),
        *([per_error()] if given.pop("per_error", False) else []),
        *([scale_by_rms()] if given.pop("scale_free", True) else []),
        hold_when_vanished(given.pop("vanished", 1e-3)),
        *([beyond_noise(errors)] if (errors := given.pop("beyond_noise", 0.0)) else []),
    ]
    share = given.pop("target_share", 0.0)
    normalize, doubt = given.pop("normalize_weights", True), given.pop("doubt_labels", False)
    last = given.pop("last_layer", False)
    return method(
        direction=running_mean(average, layers=layers) if average else last_batch(layers),
        alignment=chain(*alignment),
        source_loss=label_doubt(normalize) if doubt else normalized() if normalize else mean(),
        gradients=chain(*([target_share(share)] if share else [])),
        scores=pooled_by_class() if given.pop("pool_classes", False) else LAST_LAYER if last else None,
        **given,
    )
