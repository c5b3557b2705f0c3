"""Layer by layer: alignments for the price of one more forward, with no per-example gradient ever formed.

For a layer y = f(a; P), linear in its parameters, with δ_j the gradient of ℓ_j at y_j and G the direction for P,

    q_j = Σ over layers of ⟨δ_j, f(a_j; G)⟩.

One forward and one backward of source and target together give every a and δ. As the backward passes a layer, its
target gradient is formed, turned into the direction, compared with the source rows, and the weighted source
gradient is taken from the same δ; then δ is dropped, so memory stays that of an ordinary step.

This is exact if no example's loss depends on another example. The first time a model is seen, that is proved:
for random coefficients c, Σ c_j ∂ℓ_j/∂P from the layers must equal autograd's own gradient of Σ c_j ℓ_j.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from soseleto.engines.autograd import gradient
from soseleto.engines.contract import (
    Coefficients,
    Direction,
    Losses,
    Passes,
    PerExampleLoss,
    SourcePass,
    ToDirection,
    as_loss_vector,
    named_in,
    no_reentrant_checkpoint,
    reductions_dtype,
    trainable,
)
from soseleto.engines.tape import OTHER_ENGINES, Call, Tape
from soseleto.errors import EngineError

EVERY_ROW = slice(None)


class LayerwiseEngine:
    """The engine; it remembers which models it has proved itself exact on."""

    name = "layerwise"

    def __init__(self) -> None:
        self._proved: WeakKeyDictionary[nn.Module, set[Any]] = WeakKeyDictionary()

    def __call__(
        self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Direction
    ) -> tuple[Tensor, Tensor]:
        named_in(direction, model)
        tape, losses = self._forward(model, lambda: per_example_loss(model, batch))
        q = torch.zeros_like(losses, dtype=reductions_dtype(losses.dtype))

        def finish(calls: list[Call]) -> None:
            for call in calls:
                call.add_alignment(q, direction, EVERY_ROW)
                call.close()

        tape.backward(losses, finish)
        return losses.detach(), q

    def passes(
        self,
        model: nn.Module,
        losses: Losses,
        source: Any,
        target: Any,
        *,
        to_direction: ToDirection,
        coefficients: Coefficients,
    ) -> Passes:
        """Source and target in one forward and backward where they can share it, else the target first."""
        if not losses.can_join(source, target):
            target_losses = as_loss_vector(losses.target(model, target))
            target_gradient = gradient(target_losses.mean(), trainable(model))
            found = self.source_pass(model, losses.source, source, to_direction(target_gradient), coefficients)
            return Passes(found.losses, target_losses.detach(), found.alignment, found.gradient, target_gradient)
        tape, joint = self._forward(model, lambda: losses.joint(model, source, target))
        n_source = len(source)
        sweep = _Sweep(to_direction, coefficients)
        sweep.run(tape, joint, n_source)
        return Passes(
            source_losses=joint[:n_source].detach(),
            target_losses=joint[n_source:].detach(),
            alignment=sweep.alignment,
            source_gradient=sweep.source_gradient,
            target_gradient=sweep.target_gradient,
        )

    def source_pass(
        self,
        model: nn.Module,
        per_example_loss: PerExampleLoss,
        batch: Any,
        direction: Direction,
        coefficients: Coefficients,
    ) -> SourcePass:
        tape, losses = self._forward(model, lambda: per_example_loss(model, batch))
        sweep = _Sweep(lambda _: {}, coefficients, direction)
        sweep.run(tape, losses, len(losses))
        return SourcePass(losses.detach(), sweep.alignment, sweep.source_gradient)

    def _forward(self, model: nn.Module, run: Callable[[], Tensor]) -> tuple[Tape, Tensor]:
        tape = Tape(model)
        with torch.enable_grad(), tape:
            losses = as_loss_vector(run())
        tape.check_rows(len(losses))
        self._prove(model, tape, losses)
        return tape, losses

    def _prove(self, model: nn.Module, tape: Tape, losses: Tensor) -> None:
        """Once for each way the model runs: the layers' gradient against autograd's, for random coefficients."""
        way = (
            tuple((id(call.rule), *call.names.values()) for call in tape.calls),
            tuple(module.training for module in model.modules()),
        )
        proved = self._proved.setdefault(model, set())
        if way in proved:
            return
        seeded = torch.Generator().manual_seed(len(losses))
        c = (torch.rand(len(losses), generator=seeded, dtype=torch.float64) + 0.5).to(losses.device)
        mine: dict[str, Tensor] = {}

        def finish(calls: list[Call]) -> None:
            for call in calls:
                _add(mine, call.gradient(c, EVERY_ROW))
                call.close()

        try:
            tape.backward(losses, finish, again=True)
            right = _gradient_keeping_graph(losses, trainable(model), c)
        except RuntimeError as error:
            raise no_reentrant_checkpoint(error) or error from error
        _compare(mine, right, _tolerance(tape, losses))
        proved.add(way)


class _Sweep:
    """What is gathered while the backward passes the layers, each group of calls once."""

    def __init__(
        self, to_direction: ToDirection, coefficients: Coefficients, direction: Direction | None = None
    ) -> None:
        self.to_direction = to_direction
        self.coefficients = coefficients
        self.direction = direction  # given when the target had a pass of its own
        self.target_gradient: dict[str, Tensor] = {}
        self.source_gradient: dict[str, Tensor] = {}
        self._late: list[tuple[Call, Tensor]] = []  # when the coefficients depend on the alignment

    def run(self, tape: Tape, losses: Tensor, n_source: int) -> None:
        """Back-propagate: source losses first in ``losses``, then those of the target where it has no own pass."""
        self._split(losses, n_source)
        tape.backward(losses, self.finish, scales=self.scales)
        self._close()

    def _split(self, losses: Tensor, n_source: int) -> None:
        self._source, self._target = slice(0, n_source), slice(n_source, None)
        self.scales = torch.ones_like(losses)  # the target's part of the sum of losses is their mean
        if n_source < len(losses):
            self.scales[n_source:] = 1.0 / (len(losses) - n_source)
        self.alignment = torch.zeros(n_source, dtype=reductions_dtype(losses.dtype), device=losses.device)

    def finish(self, calls: list[Call]) -> None:
        direction = self.direction if self.direction is not None else self._direction(calls)
        for call in calls:
            call.add_alignment(self.alignment, direction, self._source)
            if isinstance(self.coefficients, Tensor):
                _add(self.source_gradient, call.gradient(self.coefficients, self._source))
                call.close()
            elif call.delta is not None:
                self._late.append((call, call.delta))

    def _direction(self, calls: list[Call]) -> Direction:
        found: dict[str, Tensor] = {}
        for call in calls:
            _add(found, call.gradient(None, self._target))
        self.target_gradient.update(found)
        return self.to_direction(found)

    def _close(self) -> None:
        if callable(self.coefficients):
            c = self.coefficients(self.alignment)
            for call, delta in self._late:
                call.hear(delta)
                _add(self.source_gradient, call.gradient(c, self._source))
                call.close()


def _gradient_keeping_graph(losses: Tensor, parameters: dict[str, nn.Parameter], c: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(
        losses,
        list(parameters.values()),
        grad_outputs=c.to(losses.dtype),
        retain_graph=True,
        allow_unused=True,
    )
    return {name: g for name, g in zip(parameters, found, strict=True) if g is not None}


def _compare(mine: dict[str, Tensor], right: dict[str, Tensor], tolerance: float) -> None:
    if not right:
        return
    norms = torch.stack([g.double().norm() for g in right.values()])
    floor = 1e-2 * norms.norm()  # a gradient that cancels to nothing has only rounding left to compare
    errors = torch.stack([_distance(mine.get(name), g) for name, g in right.items()])
    off = (errors > tolerance * (norms + floor)).nonzero().flatten().tolist()
    if off:
        name = list(right)[off[0]]
        raise EngineError(
            f"the layerwise engine is not exact for this model (first seen at parameter {name!r}): examples of a batch "
            f"act on each other, or the parameter is used out of sight; {OTHER_ENGINES}."
        )


def _distance(mine: Tensor | None, right: Tensor) -> Tensor:
    return right.double().norm() if mine is None else (mine.double() - right.double()).norm()


def _tolerance(tape: Tape, losses: Tensor) -> float:
    kinds = {call.dtype for call in tape.calls} | {losses.dtype}
    if kinds & {torch.bfloat16, torch.float16}:
        return 0.1
    if torch.float32 in kinds:
        return 2e-2 if losses.is_cuda else 1e-3  # TF32 keeps ten bits
    return 1e-7


def _add(into: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    for name, g in more.items():
        into[name] = into[name] + g if name in into else g
