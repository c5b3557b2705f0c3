"""Models that ``fully_shard`` (FSDP2) has split over ranks.

Between passes every parameter is a DTensor, of which each rank holds a part. For its forward and again for its backward
a sharded module has whole, plain parameters under the same names.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that fully_shard was called on."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: fully_shard cannot have been called
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def is_shard(value: object) -> bool:
    return hasattr(value, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor; for a shard this is a collective that every rank must call."""
    found: Tensor = tensor.full_tensor() if is_shard(tensor) else tensor  # type: ignore[attr-defined]
    return found


def reshard(model: nn.Module) -> None:
    """Free whole parameters that FSDP keeps for a backward that does not follow."""
    for module in sharded_modules(model):
        module.reshard()
