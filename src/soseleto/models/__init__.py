"""The networks of the paper's experiments and a few more; any other torch module can be used as well."""

from soseleto.models.architectures import (
    group_norm,
    lenet,
    lenet_trunk,
    linear,
    mlp,
    preact_resnet18,
    quick,
    quick_trunk,
    resnet18,
    resnet18_trunk,
    table_network,
)
from soseleto.models.trunk_and_heads import TrunkAndHeads

__all__ = [
    "TrunkAndHeads",
    "group_norm",
    "lenet",
    "lenet_trunk",
    "linear",
    "mlp",
    "preact_resnet18",
    "quick",
    "quick_trunk",
    "resnet18",
    "resnet18_trunk",
    "table_network",
]
