"""Settings of methods and pieces as plain data, for ``config.json``.

A frozen dataclass becomes ``{"name": its class, field: value, ...}``. A function of the user's own is kept by its name
alone, and a tensor by a digest of its values, which is enough to compare two runs.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def to_data(value: Any) -> Any:
    """``value`` in the types that JSON has."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [to_data(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_data(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: to_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"name": type(value).__name__, **fields}
    if isinstance(value, Tensor):
        values = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        digest = hashlib.sha256(f"{value.dtype}".encode() + values.tobytes()).hexdigest()
        return {"object": "Tensor", "shape": list(value.shape), "values": digest}
    if callable(value) and hasattr(value, "__qualname__"):
        return {"function": f"{value.__module__}.{value.__qualname__}"}
    return {"object": type(value).__name__}
