"""Passes through a model that have no side effects."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

_is_capturing = torch.cuda.is_current_stream_capturing  # torch's own: ``as_if_recording`` replaces the name in torch


def is_recording() -> bool:
    """Whether a CUDA graph is being recorded, not only said to be."""
    return torch.cuda.is_available() and _is_capturing()


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers and the random states of torch, numpy and Python at the end of the block.

    Buffers that the block makes or enlarges stay: a table of positions, for instance, that grows with the inputs.
    """
    restore = Restore(model)
    try:
        yield
    finally:
        restore()


@contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """``unchanged`` for a block that fails; a block that succeeds keeps what it did."""
    restore = Restore(model)
    try:
        yield
    except BaseException:
        restore()
        raise


class Restore:
    """A copy of buffers and random states; a call writes them back. Does nothing while a CUDA graph is recorded."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._is_recording = is_recording()
        if self._is_recording:
            return
        self._buffers = {name: b.clone() for name, b in model.named_buffers()}
        devices = {p.device for p in model.parameters() if p.is_cuda}
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in devices}
        self._cpu, self._python = torch.get_rng_state(), random.getstate()
        self._numpy = np.random.get_state()  # noqa: NPY002  # what the user's code draws from

    def __call__(self) -> None:
        if self._is_recording:
            return
        torch.set_rng_state(self._cpu)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        for name, b in self._model.named_buffers():
            kept = self._buffers.get(name)
            if kept is not None and kept.shape == b.shape:
                b.data.copy_(kept)  # without a new version, which would invalidate graphs that hold it
