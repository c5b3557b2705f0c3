"""The device a training runs on."""

from __future__ import annotations

import torch

from soseleto.errors import UsageError


def choose_device(device: str | torch.device) -> torch.device:
    """The device asked for; ``"auto"`` takes a GPU where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"unknown device {device!r}: say 'auto', 'cpu' or 'cuda'.") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("device='cuda' was asked for, but PyTorch sees no GPU here: say device='cpu'.")
    return chosen
