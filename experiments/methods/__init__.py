"""The rivals in the tables, one file each, with the same two calls as SOSELETO: ``init`` and ``step``."""

from collections.abc import Callable, Mapping

from experiments.methods.luo import Luo
from experiments.methods.matching import MatchingNetworks
from experiments.methods.meta_weight_net import MetaWeightNet
from experiments.methods.reweight import Reweight
from experiments.methods.sukhbaatar import Sukhbaatar
from experiments.methods.xiao import Xiao
from soseleto import methods
from soseleto.task.task import Method

# Each entry makes the method with its default settings; those of CIFAR-10 with deep networks are in settings.py.
METHODS: Mapping[str, Callable[[], Method]] = {
    **methods.METHODS,
    "sukhbaatar": Sukhbaatar,
    "xiao": Xiao,
    "reweight": Reweight,
    "meta_weight_net": MetaWeightNet,
    "matching_networks": MatchingNetworks,
    "luo": Luo,
}
