"""The device that a training runs on, and what it only emulates."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from soseleto.errors import UsageError

EMULATED = "this CPU has no bfloat16 instructions: PyTorch emulates them, which is far slower than float32"


def choose_device(device: str | torch.device) -> torch.device:
    """The device by its name; ``"auto"`` is a GPU if there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"unknown device {device!r}: use 'auto', 'cpu' or 'cuda'.") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("device='cuda' needs a GPU, but PyTorch sees none here: use device='cpu'.")
    return chosen


def emulates(dtype: torch.dtype | None, device: torch.device) -> bool:
    """Whether the device is a CPU that computes in ``dtype`` without instructions for it, as far as PyTorch knows."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return False
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)  # a build without oneDNN has none
    return supported is not None and not supported()


@contextmanager
def announcing_emulation(
    dtype: torch.dtype | None, device: torch.device, message: Callable[[str], None]
) -> Iterator[None]:
    """Where ``dtype`` is emulated, say so once, instead of PyTorch's warning at every kind of matrix product."""
    if not emulates(dtype, device):
        yield
        return
    message(EMULATED)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed", UserWarning)
        yield
