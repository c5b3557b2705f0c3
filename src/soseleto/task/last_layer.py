"""The last layer of a model in the passes of a step, without a backward pass through the model.

For the last linear layer z = W h + b an example's gradient is r hᵀ, with r = ∂ℓ/∂z. Both are there after the forward
pass that training does anyway: h is the layer's input, and r needs the graph between z and the losses alone. This holds
for BatchNorm in training mode, frozen trunks and adapters (LoRA) too, and the layer itself may be frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from soseleto.data.batches import Batch
from soseleto.engines.contract import Losses, reductions_dtype, uncompiled
from soseleto.engines.shards import sharded_modules
from soseleto.engines.tangents import without_tangent
from soseleto.errors import EngineError, UsageError

_INSTEAD = "leave last_layer out, or name layers with direction=running_mean(layers=...)"


@dataclass(frozen=True)
class LastLayer:
    """The last layer on one side of a step, for n examples of L rows each (L = 1 unless the model has sequences)."""

    inputs: Tensor  # h, (n, L, d)
    outputs: Tensor  # z, (n, L, K)
    residuals: Tensor  # r = ∂ℓ/∂z, (n, L, K)

    @property
    def used(self) -> Tensor:
        """(n, L): which rows the losses depend on; padding and unused positions have no residual."""
        return self.residuals.ne(0).any(-1)

    def rows(self, part: slice) -> LastLayer:
        return LastLayer(self.inputs[part], self.outputs[part], self.residuals[part])

    @classmethod
    def joined(cls, parts: Iterable[LastLayer]) -> LastLayer:
        parts = list(parts)
        if len(parts) == 1:
            return parts[0]
        columns = zip(*((p.inputs, p.outputs, p.residuals) for p in parts), strict=True)
        return cls(*(torch.cat(column) for column in columns))


class WatchedLosses:
    """The losses of a task, unchanged; ``take`` returns the last linear layer that the passes of the step have called.

    Nothing is attached to the model: the call is intercepted as in the layerwise engine.
    """

    def __init__(self, plain: Losses) -> None:
        self._plain = plain
        self._parts: dict[str, dict[int, LastLayer]] = {"source": {}, "target": {}}  # by the place of the batch's index
        self._checked = False

    @property
    def factor(self) -> Tensor | None:
        """What a GradScaler has multiplied the losses by."""
        factor: Tensor | None = getattr(self._plain, "factor", None)
        return factor

    def source(self, model: nn.Module, batch: Any) -> Tensor:
        losses, layer = self._watch(model, lambda: self._plain.source(model, batch))
        self._keep("source", batch, layer)
        return losses

    def target(self, model: nn.Module, batch: Any) -> Tensor:
        losses, layer = self._watch(model, lambda: self._plain.target(model, batch))
        self._keep("target", batch, layer)
        return losses

    def can_join(self, source: Any, target: Any) -> bool:
        return self._plain.can_join(source, target)

    def joint(self, model: nn.Module, source: Any, target: Any) -> Tensor:
        losses, layer = self._watch(model, lambda: self._plain.joint(model, source, target))
        self._keep("source", source, layer.rows(slice(0, len(source))))
        self._keep("target", target, layer.rows(slice(len(source), None)))
        return losses

    def take(self) -> dict[str, LastLayer]:
        """What the passes since the last call have recorded, by side."""
        sides = {side: LastLayer.joined(parts.values()) for side, parts in self._parts.items() if parts}
        for parts in self._parts.values():
            parts.clear()
        return sides

    def _keep(self, side: str, batch: Batch, layer: LastLayer) -> None:
        """A pass that is repeated, as for a proof, replaces the one before."""
        self._parts[side][batch.index.data_ptr()] = layer

    def _watch(self, model: nn.Module, run: Callable[[], Tensor]) -> tuple[Tensor, LastLayer]:
        calls = _LinearCalls()
        with torch.enable_grad(), uncompiled(model), calls:
            losses = run()
        with torch._C.DisableTorchFunction():  # what follows is not the model's, and engines must not take it for that
            inputs, z = calls.last()
            plain = without_tangent(losses)
            if not self._checked:
                _require_last(plain, z)
                self._checked = True
            residuals = _residuals(plain, z, self.factor)
            return losses, _in_rows(inputs, z, residuals, len(plain))


def with_last_layer(losses: Losses, model: nn.Module) -> WatchedLosses:
    """``losses`` with the model's last layer recorded in every pass."""
    if sharded_modules(model):
        raise UsageError(
            "last_layer needs a whole model on every process, and fully_shard has split this one: drop it."
        )
    return WatchedLosses(losses)


def no_last_layer(losses: Losses, model: nn.Module, batch: Batch) -> str | None:
    """Why a model has no last-layer alignments, found by one pass; None if it has."""
    if sharded_modules(model):
        return "its parameters are sharded"
    watched = WatchedLosses(losses)
    try:
        watched.source(model, batch)
    except EngineError as error:
        return str(error)
    is_last = _are_scores(watched.take()["source"], batch.labels)
    return None if is_last else "its outputs are not those of the last layer"


def _are_scores(last: LastLayer, labels: Tensor) -> bool:
    """Whether the losses are cross-entropies of one row each of the layer's outputs: softmax(z) − r is the label."""
    if int(labels.max()) >= last.outputs.shape[-1]:
        return False
    read = (last.outputs.softmax(-1) - last.residuals)[last.used]
    expected = torch.eye(read.shape[-1], device=read.device)[labels[last.used.any(1)]]
    return read.shape == expected.shape and torch.allclose(read.float(), expected, atol=0.05)


class _LinearCalls(TorchFunctionMode):
    """The input and the output of the last linear layer that is called while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[int, int] = {}  # of each weight
        self._last: tuple[Tensor, Tensor, Tensor, int] | None = None  # weight, input, output, its version

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is F.linear:
            arguments = {**dict(zip(("input", "weight"), args, strict=False)), **kwargs}
            weight = arguments["weight"]
            self._calls[id(weight)] = self._calls.get(id(weight), 0) + 1
            inputs, z = without_tangent(arguments["input"]), without_tangent(out)
            self._last = weight, inputs, z, z._version
        return out

    def last(self) -> tuple[Tensor, Tensor]:
        if self._last is None:
            raise EngineError(f"the model calls no linear layer, so it has no last-layer alignments: {_INSTEAD}.")
        weight, inputs, outputs, version = self._last
        if self._calls[id(weight)] > 1:
            raise EngineError(
                f"the last layer is called {self._calls[id(weight)]} times in one pass, and last-layer alignments need "
                f"one call: {_INSTEAD}."
            )
        if outputs._version != version:
            raise EngineError(
                "the outputs of the last layer are changed in place, which hides their gradient: "
                "write the operation after it without the underscore."
            )
        return inputs, outputs


def _residuals(losses: Tensor, outputs: Tensor, factor: Tensor | None) -> Tensor:
    """∂ℓ/∂z; for losses that a GradScaler has multiplied by ``factor``, of what they are without it."""
    if not outputs.requires_grad:
        raise EngineError(f"no trainable parameter acts on the last layer's outputs: {_INSTEAD}.")
    (residuals,) = torch.autograd.grad(losses.sum(), outputs, retain_graph=True, allow_unused=True)
    if residuals is None:
        raise EngineError(f"the losses do not depend on the last linear layer that the model calls: {_INSTEAD}.")
    if factor is None:
        return residuals
    residuals = residuals / factor.to(residuals.dtype)
    return torch.where(residuals.isfinite(), residuals, torch.zeros_like(residuals))


def _require_last(losses: Tensor, outputs: Tensor) -> None:
    """Raise if a parameter reaches the losses on a way that does not pass through the layer's outputs."""
    waiting = [losses.grad_fn]
    seen = {outputs.grad_fn}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            raise EngineError(
                f"a parameter reaches the losses without passing through the model's last linear layer: {_INSTEAD}."
            )
        waiting += [following for following, _ in node.next_functions]


def _in_rows(inputs: Tensor, outputs: Tensor, residuals: Tensor, n: int) -> LastLayer:
    """Detached, (n, L, ·), in the precision of reductions."""
    if outputs.ndim < 2 or outputs.shape[0] != n:
        raise EngineError(
            f"the last layer returned {tuple(outputs.shape)} for {n} losses, and last-layer alignments need one entry "
            f"per example in the first dimension: {_INSTEAD}."
        )
    values = [forward_ad.unpack_dual(v).primal.detach() for v in (inputs, outputs, residuals)]
    values = [v.reshape(n, -1, v.shape[-1]).to(reductions_dtype(v.dtype)) for v in values]
    return LastLayer(*values)
