"""The networks of the paper's experiments and a few more; any other torch module can be used as well."""

from soseleto.models.architectures import (
    group_norm,
    lenet,
    linear,
    mlp,
    preact_resnet18,
    quick,
    resnet18,
    table_network,
)
from soseleto.models.trunk_and_heads import TrunkAndHeads

__all__ = [
    "TrunkAndHeads",
    "group_norm",
    "lenet",
    "linear",
    "mlp",
    "preact_resnet18",
    "quick",
    "resnet18",
    "table_network",
]
