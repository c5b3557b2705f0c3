"""Passes through a model that have no side effects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers and the random states at the end of the block."""
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    devices = sorted({p.device for p in model.parameters() if p.is_cuda}, key=str)
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for name, b in model.named_buffers():
                b.copy_(buffers[name])
