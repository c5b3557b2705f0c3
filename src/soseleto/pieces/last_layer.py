"""The cheap form of the alignment: over the last layer's weight, in coordinates of choice, without a backward pass.

    G ← decay·G + (1 − decay)·mean over the target batch of r_t h_tᵀ        q_j = r_jᵀ G h_j / (1 − decayᵐ)

For the last linear layer z = W h + b an example's gradient is r hᵀ, with r = ∂ℓ/∂z, p − onehot(label) for
cross-entropy. Both are there after the forward pass that training does anyway: h is the layer's input, and r needs the
graph between z and the losses alone. This holds for BatchNorm in training mode, frozen trunks and adapters (LoRA) too,
and the layer itself may be frozen. As it stands this is the exact alignment over the layer's weight, which the engines
compute for ``running_mean(decay, layers=...)``. Each form changes r or h before the product: the layer is linear, so
its inputs may be read in other coordinates, A(h − m), without a change of the model: z = W A⁻¹·A(h − m) + (b + W m).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from soseleto.data.batches import Batch
from soseleto.engines.forward import without_tangent
from soseleto.engines.interface import Losses, leaves, reductions_dtype
from soseleto.engines.model_state import sharded_modules, uncompiled
from soseleto.errors import EngineError, UsageError
from soseleto.pieces.piece import Alignment, Piece, State, Step, chain
from soseleto.task.task import Task

DECAY = 0.99  # of the running means over steps
_SMALLEST_ERROR = 1e-4
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

    @property
    def labels(self) -> Tensor:
        """softmax(z) − r of the rows that are used, (·, K): one label each, where the losses are cross-entropies."""
        return (self.outputs.softmax(-1) - self.residuals)[self.used]

    def rows(self, part: slice) -> LastLayer:
        return LastLayer(self.inputs[part], self.outputs[part], self.residuals[part])

    @classmethod
    def joined(cls, parts: Iterable[LastLayer]) -> LastLayer:
        parts = list(parts)
        if len(parts) == 1:
            return parts[0]
        columns = zip(*((p.inputs, p.outputs, p.residuals) for p in parts), strict=True)
        return cls(*(torch.cat(column) for column in columns))


Sides = Mapping[str, LastLayer]  # "source" and "target"


class Form(Piece):
    """A change of coordinates: ``update`` gets and returns both sides of the layer; the first batch makes the state."""

    slot: ClassVar[str] = "last_layer"


@dataclass(frozen=True, init=False)
class last_layer(Piece):
    """Alignments of the last layer in place of the engine's: in ``alignment`` for the weights, in ``scores`` for those.

    forms: changes of coordinates, in order; none is the exact alignment over the layer's weight.

    Example:
        >>> from soseleto import Soseleto
        >>> from soseleto.pieces import at_temperature, centred, last_layer, unit_length, without_own_error
        >>> ranking = last_layer(centred(), unit_length(), at_temperature(4.0), without_own_error())
        >>> method = Soseleto(alignment=last_layer(), scores=ranking)
    """

    forms: tuple[Form, ...]

    slot: ClassVar[str] = "alignment"
    reads_layer: ClassVar[bool] = True

    def __init__(self, *forms: Form) -> None:
        object.__setattr__(self, "forms", forms)
        for form in forms:
            if not isinstance(form, Form):
                raise UsageError(f"last_layer takes forms such as centred() or at_temperature(4.0), got {form!r}.")

    def __repr__(self) -> str:
        return f"last_layer({', '.join(map(repr, self.forms))})"

    def init(self, task: Task) -> State:
        if task.target_head:
            raise UsageError("last_layer needs one head for source and target, and mode='transfer' has two: drop it.")
        return {"forms": chain(*self.forms).init(task), "target": {}}

    def update(self, value: Alignment, state: State, step: Step) -> Alignment:
        sides = chain(*self.forms).update(_both_sides(step, state), state["forms"], step)
        source, target = sides["source"], sides["target"]
        product = torch.matmul(target.residuals.flatten(0, 1).T, target.inputs.flatten(0, 1))
        gradient = _running(state["target"], "gradient", step.task.sharing.sum(product) / step.target.total)
        q = (torch.matmul(source.inputs, gradient.T) * source.residuals).sum((1, 2))
        return replace(value, q=q, unit=1.0, evidence=None)

    def refresh(self, state: State) -> None:
        chain(*self.forms).refresh(state["forms"])


def _both_sides(step: Step, state: State) -> Sides:
    """Both sides of the step; a rank whose part of a batch is empty has run no pass for it."""
    recorded = step.last_layer
    if len(recorded) == 2:
        return recorded
    if recorded:
        (present,) = recorded.values()
        empty = present.rows(slice(0, 0))
    else:
        gradient = state["target"]["gradient"]["sum"]
        z, h = (gradient.new_zeros(0, 1, size) for size in gradient.shape)
        empty = LastLayer(h, z, z)
    return {side: recorded.get(side, empty) for side in ("source", "target")}


@dataclass(frozen=True)
class centred(Form):
    """Inputs minus their running mean over source examples, h − m.

    Inputs that follow a ReLU have a large common part, which makes every alignment large and equal in sign to the
    agreement of the labels alone; what distinguishes examples is in the remainder.
    """

    def update(self, sides: Sides, state: State, step: Step) -> Sides:
        m = _running(state, "mean", _mean(sides["source"], step))
        return {side: replace(layer, inputs=layer.inputs - m) for side, layer in sides.items()}


@dataclass(frozen=True)
class whitened(Form):
    """Centred inputs times L⁻¹, where L Lᵀ is their running covariance, shrunk: C + shrink·(tr C/d)·I.

    shrink: the share of the mean variance that is added to every direction's; a large one leaves inputs centred alone.

    L⁻¹ is computed between steps, every ``REFRESH`` of them.
    """

    shrink: float = 0.1

    def __post_init__(self) -> None:
        if not self.shrink > 0:
            raise UsageError(f"shrink of whitened must be above 0, got {self.shrink}: 0.1 is a good first value.")

    def update(self, sides: Sides, state: State, step: Step) -> Sides:
        source = sides["source"]
        m = _running(state, "mean", _mean(source, step))
        _running(state, "covariance", _covariance(source, m, step))
        if "factor" not in state:
            state["factor"] = torch.zeros_like(state["covariance"]["sum"])
            self.refresh(state)
        return {side: replace(layer, inputs=(layer.inputs - m) @ state["factor"].T) for side, layer in sides.items()}

    def refresh(self, state: State) -> None:
        if "factor" not in state:
            return
        c = _corrected(state["covariance"])
        ridge = self.shrink * c.diagonal().mean() + torch.finfo(c.dtype).tiny
        eye = torch.eye(len(c), dtype=c.dtype, device=c.device)
        lower, _ = torch.linalg.cholesky_ex(c + ridge * eye)  # without a check, which would synchronise
        state["factor"].copy_(torch.linalg.solve_triangular(lower, eye, upper=False))


@dataclass(frozen=True)
class unit_length(Form):
    """Inputs of both sides at unit length, h/‖h‖: alignments do not grow with the size of an example's features."""

    def update(self, sides: Sides, state: State, step: Step) -> Sides:
        normalize = torch.nn.functional.normalize
        return {side: replace(layer, inputs=normalize(layer.inputs, dim=-1)) for side, layer in sides.items()}


@dataclass(frozen=True)
class at_temperature(Form):
    """The target's residuals at a temperature: r_t = softmax(z_t/τ) − y_t in place of softmax(z_t) − y_t.

    Once a network is sure of the trusted examples their residuals vanish, and with them every alignment; those that
    remain are of the few examples it gets wrong, and a mean of these can turn over. A temperature above 1 keeps the
    residuals of all trusted examples alive, and the direction of their labels in it. For cross-entropy: y is read from
    the residuals themselves, as softmax(z) − r, so soft and smoothed labels are served too.
    """

    temperature: float = 4.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise UsageError(f"temperature must be above 0, got {self.temperature}: 4 is a good first value.")

    def update(self, sides: Sides, state: State, step: Step) -> Sides:
        target = sides["target"]
        if not state:  # once: it synchronises with the device
            _require_cross_entropy(target)
            state["checked"] = torch.ones((), dtype=torch.float32, device=target.outputs.device)
        z, used = target.outputs, target.used.unsqueeze(-1)
        change = ((z / self.temperature).softmax(-1) - z.softmax(-1)) * used
        return {**sides, "target": replace(target, residuals=target.residuals + change)}


def _require_cross_entropy(target: LastLayer) -> None:
    """Raise unless softmax(z) − r is a label: entries from 0 to 1 with a sum of 1, one of them at least a half."""
    label = target.labels
    largest, sums = label.amax(-1), label.sum(-1)
    fine = (label.amin(-1) > -0.05) & (largest > 0.45) & (largest < 1.05) & ((sums - 1.0).abs() < 0.05)
    if not bool(fine.all()):
        raise UsageError(
            "at_temperature needs a cross-entropy of the last layer's outputs, one label per example, and this loss "
            "has other gradients: leave it out."
        )


@dataclass(frozen=True)
class without_own_error(Form):
    """The source's residuals at unit length, r_j/‖r_j‖: an example's own error is taken out of its alignment.

    A gradient is an error times a direction. Examples that the network has fitted, right or memorised, have small
    residuals and alignments near zero; at unit length they still show whether their label agrees with the target's.
    """

    def update(self, sides: Sides, state: State, step: Step) -> Sides:
        source = sides["source"]
        length = source.residuals.square().sum((1, 2), keepdim=True).sqrt()  # of an example's whole residual
        residuals = source.residuals / length.clamp_min(_SMALLEST_ERROR)
        return {**sides, "source": replace(source, residuals=residuals)}


def _mean(layer: LastLayer, step: Step) -> Tensor:
    """The mean input over the whole batch's rows that are used, (d,)."""
    used = layer.used.to(layer.inputs.dtype)
    total = step.task.sharing.sum(torch.cat([(layer.inputs * used.unsqueeze(-1)).sum((0, 1)), used.sum().view(1)]))
    return total[:-1] / total[-1].clamp_min(1.0)


def _covariance(layer: LastLayer, mean: Tensor, step: Step) -> Tensor:
    used = layer.used.to(layer.inputs.dtype)
    rows = ((layer.inputs - mean) * used.unsqueeze(-1)).flatten(0, 1)
    total = step.task.sharing.sum(rows.T @ rows)
    return total / step.task.sharing.sum(used.sum()).clamp_min(1.0)


def _running(state: State, name: str, new: Tensor) -> Tensor:
    """The exponential moving average after this batch, corrected for its start."""
    if name not in state:
        state[name] = {"sum": torch.zeros_like(new), "weight": torch.zeros((), dtype=new.dtype, device=new.device)}
    state[name]["sum"].lerp_(new, 1.0 - DECAY)
    state[name]["weight"].mul_(DECAY).add_(1.0 - DECAY)
    return _corrected(state[name])


def _corrected(average: Mapping[str, Any]) -> Tensor:
    corrected: Tensor = average["sum"] / average["weight"]
    return corrected


class WatchedLosses:
    """The losses of a task, unchanged; ``take`` returns the last linear layer that the passes of the step have called.

    Nothing is attached to the model: the call is intercepted as in the layerwise engine.
    """

    def __init__(self, plain: Losses) -> None:
        self._plain = plain
        self._parts: dict[str, dict[int, LastLayer]] = {"source": {}, "target": {}}  # by the place of the batch's index
        self._checked = False

    @property
    def factor(self) -> Any:
        """What a GradScaler has multiplied the losses by."""
        return getattr(self._plain, "factor", None)

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

    def take(self, **batches: Batch) -> dict[str, LastLayer]:
        """What the passes of these batches, or of parts of them, have recorded since the last call, by side.

        A proof passes a few examples beside them.
        """
        sides = {}
        for side, batch in batches.items():
            start = batch.index.data_ptr()
            places = range(start, start + batch.index.nbytes)
            if own := [layer for place, layer in self._parts[side].items() if place in places]:
                sides[side] = LastLayer.joined(own)
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


def has_last_layer(losses: Losses, model: nn.Module, batch: Batch) -> bool:
    """Whether the losses are cross-entropies of one row each of a last linear layer's outputs, found by one pass."""
    if sharded_modules(model):
        return False
    watched = WatchedLosses(losses)
    try:
        watched.source(model, batch)
    except EngineError:
        return False
    last = watched.take(source=batch)["source"]
    read = last.labels.float()
    labels = torch.eye(read.shape[-1], dtype=read.dtype, device=read.device)[read.argmax(-1)]
    return len(read) == int(last.used.any(1).sum()) and torch.allclose(read, labels, atol=0.05)


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
    if any(True for _ in leaves(losses, outputs.grad_fn)):
        raise EngineError(
            f"a parameter reaches the losses without passing through the model's last linear layer: {_INSTEAD}."
        )


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
