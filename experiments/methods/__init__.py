"""The rivals in the tables, one file each, with the same two calls as SOSELETO: ``init`` and ``step``."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from experiments.methods.divide_mix import DivideMix
from experiments.methods.early_stopping import EarlyStopping
from experiments.methods.fixmatch import FixMatch
from experiments.methods.luo import Luo
from experiments.methods.matching import Attention, MatchingNetworks
from experiments.methods.meta_weight_net import MetaWeightNet
from experiments.methods.oracle import correct_only, corrected
from experiments.methods.promix import ProMix
from experiments.methods.reweight import Reweight
from experiments.methods.strong_pair import StrongPair
from experiments.methods.sukhbaatar import Sukhbaatar
from experiments.methods.xiao import Xiao
from soseleto.algorithm import Soseleto
from soseleto.methods import FineTuning, Mixed, Ordinary, TargetOnly
from soseleto.task.task import Method

__all__ = [
    "METHODS",
    "Attention",
    "DivideMix",
    "EarlyStopping",
    "FixMatch",
    "Luo",
    "MatchingNetworks",
    "MetaWeightNet",
    "ProMix",
    "Reweight",
    "StrongPair",
    "Sukhbaatar",
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
    return METHODS[name]()
