"""Moments of the inputs of named layers, in the source passes of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from soseleto.engines.contract import Losses, reductions_dtype
from soseleto.engines.tangents import Dual
from soseleto.errors import EngineError

_LAYERS = {F.linear: -1, F.conv1d: 1, F.conv2d: 1, F.conv3d: 1}  # the dimension of the inputs' channels


@dataclass(frozen=True)
class Moments:
    """Sums over the rows of a layer's inputs: tokens of a linear layer, pixels of a convolution."""

    count: Tensor
    sums: Tensor  # Σa, (d,)
    squares: Tensor  # Σaaᵀ, (d, d)

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.sums + other.sums, self.squares + other.squares)


class InputsWatched:
    """``plain`` losses, unchanged; ``take_inputs`` returns the moments of the layers' inputs, by their names."""

    def __init__(self, plain: Losses, layers: Sequence[str], model: nn.Module) -> None:
        self._plain, self._layers = plain, layers
        self._none = {layer: _no_rows(model.get_submodule(layer).weight) for layer in layers}
        self._parts: dict[int, dict[str, Moments]] = {}  # by the place of the batch's index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def source(self, model: nn.Module, batch: Any) -> Tensor:
        calls = _Inputs({id(model.get_submodule(layer).weight): layer for layer in self._layers})
        with calls:
            losses = self._plain.source(model, batch)
        if missing := [layer for layer in self._layers if layer not in calls.found]:
            raise EngineError(f"the model does not call the layers {', '.join(missing)}: name layers that it calls.")
        self._parts[batch.index.data_ptr()] = calls.found  # a pass that is repeated replaces the one before
        return losses

    def target(self, model: nn.Module, batch: Any) -> Tensor:
        return self._plain.target(model, batch)

    def can_join(self, source: Any, target: Any) -> bool:
        return False  # the whole target gradient must be known before the source is aligned with it

    def joint(self, model: nn.Module, source: Any, target: Any) -> Tensor:
        raise AssertionError("source and target take separate passes")

    def forget(self) -> None:
        """What a step that was interrupted has recorded."""
        self._parts.clear()
        if hasattr(self._plain, "forget"):
            self._plain.forget()

    def take_inputs(self, total: Callable[[Tensor], Tensor]) -> Mapping[str, Moments]:
        """The moments of all passes since the last call; ``total`` sums over ranks."""
        parts, self._parts = list(self._parts.values()), {}
        found = {}
        for layer in self._layers:
            moments = sum((part[layer] for part in parts), self._none[layer])
            found[layer] = Moments(total(moments.count), total(moments.sums), total(moments.squares))
        return found


class _Inputs(TorchFunctionMode):
    """Collects the moments of the inputs of linear layers and convolutions with these weights, by the weight's id."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self.found: dict[str, Moments] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in _LAYERS:
            given = {**dict(zip(("input", "weight"), args, strict=False)), **kwargs}
            name = self._names.get(id(given["weight"]))
            if name is not None:
                with torch._C.DisableTorchFunction():  # not the model's: engines must not see it
                    moments = _moments(given["input"], _LAYERS[func])
                    self.found[name] = self.found[name] + moments if name in self.found else moments
        return out


def _no_rows(weight: Any) -> Moments:
    """The moments of a rank that has no part of a batch."""
    wide, width = reductions_dtype(weight.dtype), weight.shape[1]
    count, sums, squares = (weight.new_zeros(shape, dtype=wide) for shape in ((), (width,), (width, width)))
    return Moments(count.detach(), sums.detach(), squares.detach())


@torch.no_grad()
def _moments(inputs: Tensor, channels: int) -> Moments:
    a = inputs.primal if isinstance(inputs, Dual) else forward_ad.unpack_dual(inputs).primal
    rows = a.detach().movedim(channels, -1).flatten(0, -2).to(reductions_dtype(a.dtype))
    return Moments(rows.new_full((), len(rows)), rows.sum(0), rows.T @ rows)
