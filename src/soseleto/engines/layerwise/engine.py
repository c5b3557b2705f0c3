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
    refuse_compiled,
    refuse_sharded,
    trainable,
)
from soseleto.engines.layerwise.small_parameters import SmallGradients
from soseleto.engines.layerwise.tape import OTHER_ENGINES, Call, Tape
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
        small, parts = SmallGradients(), _Parts(losses)

        def finish(calls: list[Call]) -> None:
            for call in calls:
                parts.add(call.alignment(direction, EVERY_ROW))
                small.add(call)
                call.close()

        tape.backward(losses, finish)
        parts.add(small.alignment(direction, EVERY_ROW))
        return losses.detach(), parts.total()

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
        refuse_compiled(model)
        tape = Tape(model)
        with torch.enable_grad(), tape:
            losses = as_loss_vector(run())
        tape.check_rows(len(losses))
        self._prove(model, tape, losses)
        return tape, losses

    def _prove(self, model: nn.Module, tape: Tape, losses: Tensor) -> None:
        """Once for each way the model runs: the layers' gradient against autograd's, for random coefficients."""
        if tape.sharded:  # where no rank could hold a whole gradient; ``sharded`` has a proof of its own
            return
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
        small = SmallGradients()

        def finish(calls: list[Call]) -> None:
            for call in calls:
                _add(mine, call.gradient(c, EVERY_ROW))
                small.add(call)
                call.close()

        try:
            tape.backward(losses, finish, again=True)
            right = _gradient_keeping_graph(losses, trainable(model), c)
        except RuntimeError as error:
            raise no_reentrant_checkpoint(error) or error from error
        _compare(
            mine | small.gradient(c, EVERY_ROW),
            right,
            tolerance({call.dtype for call in tape.calls} | {losses.dtype}, losses.is_cuda),
        )
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
        self._small = SmallGradients()
        self._cast: dict[torch.dtype, Tensor] = {}
        self._late: list[tuple[Call, Tensor]] = []  # when the coefficients depend on the alignment

    def run(self, tape: Tape, losses: Tensor, n_source: int) -> None:
        """Back-propagate: source losses first in ``losses``, then those of the target where it has no own pass."""
        refuse_sharded(tape.sharded, "a source gradient in the same pass")
        self._split(losses, n_source)
        tape.backward(losses, self.finish, scales=self.scales)
        self._close()

    def _split(self, losses: Tensor, n_source: int) -> None:
        self._source, self._target = slice(0, n_source), slice(n_source, None)
        self.scales = torch.ones_like(losses)  # the target's part of the sum of losses is their mean
        if n_source < len(losses):
            self.scales[n_source:] = 1.0 / (len(losses) - n_source)
        self._parts = _Parts(losses[:n_source])

    def finish(self, calls: list[Call]) -> None:
        for call in calls:
            self._small.add(call)
        direction = self.direction if self.direction is not None else self._direction(calls)
        for call in calls:
            if isinstance(self.coefficients, Tensor):
                self._now(call, direction, self._coefficients(self.coefficients, call), alone=len(calls) == 1)
            else:
                self._parts.add(self._alignment(call, direction, alone=len(calls) == 1))
                if call.large is not None and call.delta is not None:
                    self._late.append((call, call.delta))
            call.close()

    def _now(self, call: Call, direction: Direction, coefficients: Tensor, *, alone: bool) -> None:
        """Alignment and weighted gradient of a call whose coefficients are known."""
        both = call.both(direction, coefficients, self._source)
        if both is None:
            self._parts.add(self._alignment(call, direction, alone=alone))
            _add(self.source_gradient, call.gradient(coefficients, self._source))
        else:
            self._parts.add(both[0])
            _add(self.source_gradient, both[1])

    def _direction(self, calls: list[Call]) -> Direction:
        found: dict[str, Tensor] = {}
        for call in calls:
            _add(found, call.gradient(None, self._target))
        self.target_gradient.update(found)
        return self.to_direction(found) if found else {}

    def _alignment(self, call: Call, direction: Direction, *, alone: bool) -> Tensor | None:
        """A direction that is this one call's own target gradient, unchanged, need not be multiplied with."""
        name, found = call.large, None
        if alone and name is not None and name in direction and direction[name] is self.target_gradient.get(name):
            found = call.alignment_with(self._target, self._source)
        return call.alignment(direction, self._source) if found is None else found

    def _close(self) -> None:
        """The small parameters' part, and what waited for the alignment."""
        direction = self.direction
        if direction is None:
            found = self._small.gradient(None, self._target)
            self.target_gradient.update(found)
            direction = self.to_direction(found)
        self._parts.add(self._small.alignment(direction, self._source))
        self.alignment = self._parts.total()
        c = self.coefficients(self.alignment) if callable(self.coefficients) else self.coefficients
        for call, delta in self._late:
            call.hear(delta)
            _add(self.source_gradient, call.gradient(self._coefficients(c, call), self._source))
            call.close()
        self.source_gradient.update(self._small.gradient(c, self._source))

    def _coefficients(self, c: Tensor, call: Call) -> Tensor:
        """c in the precision of a call, cast once for all calls."""
        if call.dtype not in self._cast:
            self._cast[call.dtype] = c.to(call.dtype)
        return self._cast[call.dtype]


class _Parts:
    """What each layer adds to the alignments, summed at the end by one call."""

    def __init__(self, losses: Tensor) -> None:
        self._losses = losses
        self._found: list[Tensor] = []

    def add(self, part: Tensor | None) -> None:
        if part is not None:
            self._found.append(part)

    def total(self) -> Tensor:
        if not self._found:
            return torch.zeros_like(self._losses, dtype=reductions_dtype(self._losses.dtype)).detach()
        return torch.stack(self._found).sum(0)


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


def tolerance(kinds: set[torch.dtype], is_cuda: bool) -> float:
    """How far two ways to the same gradient may differ by rounding, as a share of it."""
    if kinds & {torch.bfloat16, torch.float16}:
        return 0.1
    if torch.float32 in kinds:
        return 2e-2 if is_cuda else 1e-3  # TF32 keeps ten bits
    return 1e-7


def _add(into: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    for name, g in more.items():
        into[name] = into[name] + g if name in into else g
