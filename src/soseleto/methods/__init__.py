"""The baselines of the paper's tables, one file each, with the same two calls as SOSELETO: ``init`` and ``step``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from soseleto.algorithm import Soseleto
from soseleto.errors import UsageError, did_you_mean
from soseleto.methods.divide_mix import DivideMix
from soseleto.methods.fine_tuning import FineTuning
from soseleto.methods.fixmatch import FixMatch
from soseleto.methods.luo import Luo
from soseleto.methods.matching import Attention, MatchingNetworks
from soseleto.methods.meta_weight_net import MetaWeightNet
from soseleto.methods.mixed import Mixed
from soseleto.methods.oracle import correct_only, corrected
from soseleto.methods.ordinary import Ordinary
from soseleto.methods.promix import ProMix
from soseleto.methods.reweight import Reweight
from soseleto.methods.strong import Strong, StrongPair, StrongTransfer
from soseleto.methods.sukhbaatar import Sukhbaatar
from soseleto.methods.target_only import TargetOnly
from soseleto.methods.wrappers.early_stopping import EarlyStopping
from soseleto.methods.wrappers.record_signals import Recording, Signals
from soseleto.methods.xiao import Xiao
from soseleto.task.task import Method

__all__ = [
    "METHODS",
    "Attention",
    "DivideMix",
    "EarlyStopping",
    "FineTuning",
    "FixMatch",
    "Luo",
    "MatchingNetworks",
    "MetaWeightNet",
    "Mixed",
    "Ordinary",
    "ProMix",
    "Recording",
    "Reweight",
    "Signals",
    "Strong",
    "StrongPair",
    "StrongTransfer",
    "Sukhbaatar",
    "TargetOnly",
    "Xiao",
    "by_name",
    "correct_only",
    "corrected",
]

# Each entry makes the method with its default settings.
METHODS: Mapping[str, Callable[[], Method]] = MappingProxyType(
    {
        "soseleto": Soseleto,
        "ordinary": Ordinary,
        "target_only": TargetOnly,
        "fine_tuning": FineTuning,
        "mixed": Mixed,
        "sukhbaatar": Sukhbaatar,
        "xiao": Xiao,
        "reweight": Reweight,
        "meta_weight_net": MetaWeightNet,
        "matching_networks": MatchingNetworks,
        "luo": Luo,
    }
)


def by_name(name: str) -> Method:
    """The method of that name with its default settings; ``dataclasses.replace`` changes them."""
    if name not in METHODS:
        known = ", ".join(METHODS)
        raise UsageError(f"unknown method {name!r}{did_you_mean(name, METHODS)}: choose one of {known}.")
    return METHODS[name]()
