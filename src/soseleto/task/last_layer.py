"""The last layer of a model in the passes of a step, without a backward pass through the model.

For the last linear layer z = W h + b an example's gradient is r hᵀ, with r = ∂ℓ/∂z. Both are there after the forward
pass that training does anyway: h is the layer's input, and r needs the graph between z and the losses alone. This holds
for BatchNorm in training mode, frozen trunks and adapters (LoRA) too, and the layer itself may be frozen. Nothing is
attached to the model: the call is intercepted as in the layerwise engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
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

_NAME_IT = "name the layer that ends the model, such as last_layer(layer='classifier')"


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

    def without_examples(self) -> LastLayer:
        """For a rank that has no part of a batch."""
        return self.rows(slice(0, 0))

    @classmethod
    def joined(cls, parts: Iterable[LastLayer]) -> LastLayer:
        parts = list(parts)
        if len(parts) == 1:
            return parts[0]
        columns = zip(*((p.inputs, p.outputs, p.residuals) for p in parts), strict=True)
        return cls(*(torch.cat(column) for column in columns))


class WatchedLosses:
    """The losses of a task, unchanged; ``take`` returns the last layer as the passes of the step have seen it.

    layer: the name of the last layer; None takes the last linear layer that a pass calls.
    """

    def __init__(self, plain: Losses, layer: str | None = None) -> None:
        self._plain, self._layer = plain, layer
        self._parts: dict[str, dict[int, LastLayer]] = {"source": {}, "target": {}}  # by the place of the batch's index
        self._checked = False

    @property
    def factor(self) -> Tensor | None:
        """What a GradScaler has multiplied the losses by."""
        found: Tensor | None = getattr(self._plain, "factor", None)
        return found

    def source(self, model: nn.Module, batch: Any) -> Tensor:
        losses, found = self._watch(model, lambda: self._plain.source(model, batch))
        self._keep("source", batch, found)
        return losses

    def target(self, model: nn.Module, batch: Any) -> Tensor:
        losses, found = self._watch(model, lambda: self._plain.target(model, batch))
        self._keep("target", batch, found)
        return losses

    def can_join(self, source: Any, target: Any) -> bool:
        return self._plain.can_join(source, target)

    def joint(self, model: nn.Module, source: Any, target: Any) -> Tensor:
        losses, found = self._watch(model, lambda: self._plain.joint(model, source, target))
        self._keep("source", source, found.rows(slice(0, len(source))))
        self._keep("target", target, found.rows(slice(len(source), None)))
        return losses

    def take(self) -> dict[str, LastLayer]:
        """What the passes since the last call have recorded, by side."""
        found = {side: LastLayer.joined(parts.values()) for side, parts in self._parts.items() if parts}
        for parts in self._parts.values():
            parts.clear()
        return found

    def forget(self) -> None:
        """What a step that was interrupted has recorded."""
        self.take()

    def _keep(self, side: str, batch: Batch, found: LastLayer) -> None:
        """A pass that is repeated, as for a proof, replaces the one before."""
        self._parts[side][batch.index.data_ptr()] = found

    def _watch(self, model: nn.Module, run: Callable[[], Tensor]) -> tuple[Tensor, LastLayer]:
        calls = _LinearCalls(None if self._layer is None else _weight(model, self._layer))
        with torch.enable_grad(), uncompiled(model), calls:
            losses = run()
        with torch._C.DisableTorchFunction():  # what follows is not the model's, and engines must not take it for that
            inputs, z = calls.last(self._layer)
            plain = without_tangent(losses)
            if not self._checked:
                if self._layer is None:
                    _require_last(plain, z)
                self._checked = True
            residuals = _residuals(plain, z, self.factor)
            return losses, _in_rows(inputs, z, residuals, len(plain))


def watched(losses: Losses, model: nn.Module, layers: frozenset[str | None]) -> Losses:
    """``losses``, watched at the layer that is named, if one is."""
    if not layers:
        return losses
    if sharded_modules(model):
        raise UsageError(
            "last_layer needs a whole model on every process, and fully_shard has split this one: drop it."
        )
    (layer,) = layers
    if layer is not None:
        _weight(model, layer)
    return WatchedLosses(losses, layer)


def no_last_layer(losses: Losses, model: nn.Module, batch: Batch) -> str | None:
    """Why a model has no last-layer alignments, found by one pass; None if it has."""
    if sharded_modules(model):
        return "its parameters are sharded"
    seen = WatchedLosses(losses)
    try:
        seen.source(model, batch)
    except EngineError as error:
        return str(error)
    return None if _are_scores(seen.take()["source"], batch.labels) else "its outputs are not those of the last layer"


def _are_scores(last: LastLayer, labels: Tensor) -> bool:
    """Whether the losses are cross-entropies of one row each of the layer's outputs: softmax(z) − r is the label."""
    if int(labels.max()) >= last.outputs.shape[-1]:
        return False
    found = (last.outputs.softmax(-1) - last.residuals)[last.used]
    expected = torch.eye(found.shape[-1], device=found.device)[labels[last.used.any(1)]]
    return found.shape == expected.shape and torch.allclose(found.float(), expected, atol=0.05)


class _LinearCalls(TorchFunctionMode):
    """The input and the output of the last linear layer that is called while it is open."""

    def __init__(self, weight: Tensor | None) -> None:
        super().__init__()
        self._weight = weight
        self._calls: dict[int, int] = {}  # of each weight
        self._last: tuple[Tensor, Tensor, Tensor, int] | None = None  # weight, input, output, its version

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is F.linear:
            given = {**dict(zip(("input", "weight"), args, strict=False)), **kwargs}
            weight = given["weight"]
            if self._weight is None or weight is self._weight:
                self._calls[id(weight)] = self._calls.get(id(weight), 0) + 1
                a, z = without_tangent(given["input"]), without_tangent(out)
                self._last = weight, a, z, z._version
        return out

    def last(self, name: str | None) -> tuple[Tensor, Tensor]:
        if self._last is None:
            what = "the model calls no linear layer" if name is None else f"the model does not call the layer {name!r}"
            raise EngineError(f"{what}, so that it has no last-layer alignments: {_NAME_IT}.")
        weight, inputs, outputs, version = self._last
        if self._calls[id(weight)] > 1:
            raise EngineError(
                f"the last layer is called {self._calls[id(weight)]} times in one pass, and last-layer alignments need "
                f"one call: {_NAME_IT}."
            )
        if outputs._version != version:
            raise EngineError(
                "the outputs of the last layer are changed in place, which hides their gradient: "
                "write the operation after it without the underscore."
            )
        return inputs, outputs


def _weight(model: nn.Module, layer: str) -> Tensor:
    try:
        weight = model.get_submodule(layer).weight
    except AttributeError as error:
        names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        raise UsageError(f"last_layer(layer={layer!r}) is no layer of the model: {', '.join(names)}.") from error
    assert isinstance(weight, Tensor)
    return weight


def _residuals(losses: Tensor, outputs: Tensor, factor: Tensor | None) -> Tensor:
    """∂ℓ/∂z; for losses that a GradScaler has multiplied by ``factor``, of what they are without it."""
    if not outputs.requires_grad:
        raise EngineError(f"no trainable parameter acts on the last layer's outputs: {_NAME_IT}.")
    (found,) = torch.autograd.grad(losses.sum(), outputs, retain_graph=True, allow_unused=True)
    if found is None:
        raise EngineError(f"the losses do not depend on the last linear layer that the model calls: {_NAME_IT}.")
    if factor is None:
        return found
    found = found / factor.to(found.dtype)
    return torch.where(found.isfinite(), found, torch.zeros_like(found))


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
                f"a parameter reaches the losses without passing through the model's last linear layer: {_NAME_IT}."
            )
        waiting += [following for following, _ in node.next_functions]


def _in_rows(inputs: Tensor, outputs: Tensor, residuals: Tensor, n: int) -> LastLayer:
    """Detached, (n, L, ·), in the precision of reductions."""
    if outputs.ndim < 2 or outputs.shape[0] != n:
        raise EngineError(
            f"the last layer returned {tuple(outputs.shape)} for {n} losses, and last-layer alignments need one entry "
            f"per example in the first dimension: {_NAME_IT}."
        )
    values = [forward_ad.unpack_dual(v).primal.detach() for v in (inputs, outputs, residuals)]
    values = [v.reshape(n, -1, v.shape[-1]).to(reductions_dtype(v.dtype)) for v in values]
    return LastLayer(*values)


def replace_side(seen: Mapping[str, LastLayer], side: str, **changes: Tensor) -> dict[str, LastLayer]:
    """``seen`` with other tensors on one side, where that side is there."""
    if side not in seen:
        return dict(seen)
    return {**seen, side: replace(seen[side], **changes)}
