"""The device that a training runs on."""

from __future__ import annotations

import torch

from soseleto.errors import UsageError


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
