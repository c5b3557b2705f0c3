"""Models that ``fully_shard`` (FSDP2) has split over ranks, as far as anybody here must know them.

At rest every parameter is a DTensor, of which each rank holds a part. For its forward, and again for its backward, a
sharded module is given whole, plain parameters under the same names.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that fully_shard was called on."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nobody has called it before it was imported
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def is_shard(value: object) -> bool:
    return hasattr(value, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which this rank may hold a part; then every rank must ask for it."""
    found: Tensor = tensor.full_tensor() if is_shard(tensor) else tensor  # type: ignore[attr-defined]
    return found


def rest(model: nn.Module) -> None:
    """Let go of whole parameters that were kept for a backward which never came."""
    for module in sharded_modules(model):
        module.reshard()
