"""Keys that stand for the content of tensors which are mapped from a cache, so that it need not be read to be compared.

A key is lost with the first operation that makes another tensor, and no longer valid once the tensor is written to.
"""

from __future__ import annotations

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_keys = WeakTensorKeyDictionary()


def stand_for(tensor: Tensor, key: str) -> None:
    """From now on ``key`` stands for the content of this tensor."""
    _keys[tensor] = (key, tensor._version)


def key_of(tensor: Tensor) -> str | None:
    """The key, if there is one and the tensor has not been written to since."""
    key, version = _keys.get(tensor, (None, None))
    return key if version == tensor._version else None
