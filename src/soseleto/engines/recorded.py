"""What a model calls during a pass: by it a graph of another kind than those proved is recognised."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def described(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Hashable:
    """A call without its tensors: the function, whether under ``no_grad``, and which of its numbers are zero.

    A factor of zero hides what it multiplies from a proof, such as a term of the loss that is faded in.
    """
    numbers = (*args, *kwargs.values()) if kwargs else args
    zeros = [at for at, value in enumerate(numbers) if value.__class__ is float and value == 0.0]
    if zeros:
        return (func, torch.is_grad_enabled(), *zeros)
    return func if torch.is_grad_enabled() else (func,)


class Recorded(TorchFunctionMode):
    """Records the calls while it is open; changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Hashable] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(described(func, args, kwargs))
        return func(*args, **(kwargs or {}))
