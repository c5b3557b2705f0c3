"""Layer by layer: alignments at the cost of one more forward pass, without forming per-example gradients.

For a layer y = f(a; P), linear in its parameters, with δ_j the gradient of ℓ_j at y_j and G the direction for P,

    q_j = Σ over layers of ⟨δ_j, f(a_j; G)⟩.

One forward and one backward pass of source and target together give every a and δ. When the backward reaches a layer,
its target gradient is computed and mapped to the direction; the source rows' alignments and the weighted source
gradient follow from the same δ. Then δ is freed, so that peak memory is that of an ordinary step.

This is exact if no example's loss depends on another example, which is checked on the first batch of each model: for
random coefficients c, Σ c_j ∂ℓ_j/∂P from the layers must equal autograd's gradient of Σ c_j ℓ_j.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from soseleto.engines.autograd import add_gradients, gradient, target_first
from soseleto.engines.contract import (
    Coefficients,
    Direction,
    Passes,
    PerExampleLoss,
    SourcePass,
    SourceStep,
    Step,
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
from soseleto.engines.tolerance import Tolerance
from soseleto.errors import EngineError

ALL_ROWS = slice(None)
TOLERANCE = Tolerance(half=0.1, tf32=2e-2, single=1e-3, double=1e-7)


class LayerwiseEngine:
    """The engine; it records the models on which it was checked to be exact."""

    name = "layerwise"

    def __init__(self) -> None:
        self._checked: WeakKeyDictionary[nn.Module, set[Any]] = WeakKeyDictionary()

    def __call__(
        self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Direction
    ) -> tuple[Tensor, Tensor]:
        named_in(direction, model)
        tape, losses = self._forward(model, lambda: per_example_loss(model, batch))
        small, parts = SmallGradients(), _Parts(losses)

        def finish(calls: list[Call]) -> None:
            for call in calls:
                parts.add(call.alignment(direction, ALL_ROWS))
                small.add(call)
                call.close()

        tape.backward(losses, finish)
        parts.add(small.alignment(direction, ALL_ROWS))
        return losses.detach(), parts.total()

    def passes(self, step: Step) -> Passes:
        """Source and target in one forward and backward where the batches can be joined, else the target first."""
        if not step.losses.can_join(step.source, step.target):
            return target_first(step, self.source_pass)
        tape, joint = self._forward(step.model, lambda: step.losses.joint(step.model, step.source, step.target))
        n_source = len(step.source)
        sweep = _Sweep(step.to_direction, step.coefficients)
        sweep.run(tape, joint, n_source)
        return Passes(
            source_losses=joint[:n_source].detach(),
            target_losses=joint[n_source:].detach(),
            alignment=sweep.alignment,
            source_gradient=sweep.source_gradient,
            target_gradient=sweep.target_gradient,
        )

    def source_pass(self, step: SourceStep) -> SourcePass:
        tape, losses = self._forward(step.model, lambda: step.loss(step.model, step.batch))
        sweep = _Sweep(lambda _: {}, step.coefficients, step.direction)
        sweep.run(tape, losses, len(losses))
        return SourcePass(losses.detach(), sweep.alignment, sweep.source_gradient)

    def _forward(self, model: nn.Module, run: Callable[[], Tensor]) -> tuple[Tape, Tensor]:
        refuse_compiled(model)
        tape = Tape(model)
        with torch.enable_grad(), tape:
            losses = as_loss_vector(run())
        tape.check_rows(len(losses))
        self._check(model, tape, losses)
        return tape, losses

    def _check(self, model: nn.Module, tape: Tape, losses: Tensor) -> None:
        """Compare the layers' gradient with autograd's, for random coefficients; once for each path of calls."""
        if tape.sharded:  # no rank can hold a whole gradient; ``parallel.fsdp`` has its own check
            return
        path = (
            tuple((id(call.rule), *call.names.values()) for call in tape.calls),
            tuple(module.training for module in model.modules()),
            len(losses) > 1,  # a single example cannot show that examples depend on each other
        )
        checked = self._checked.setdefault(model, set())
        if path in checked:
            return
        seeded = torch.Generator().manual_seed(len(losses))
        c = (torch.rand(len(losses), generator=seeded, dtype=torch.float64) + 0.5).to(losses.device)
        mine: dict[str, Tensor] = {}
        small = SmallGradients()

        def finish(calls: list[Call]) -> None:
            for call in calls:
                add_gradients(mine, call.gradient(c, ALL_ROWS))
                small.add(call)
                call.close()

        try:
            tape.backward(losses, finish, retain_graph=True)
            right = gradient(losses, trainable(model), c.to(losses.dtype), retain_graph=True)
        except RuntimeError as error:
            raise no_reentrant_checkpoint(error) or error from error
        dtypes = {call.dtype for call in tape.calls} | {losses.dtype}
        _compare(mine | small.gradient(c, ALL_ROWS), right, TOLERANCE.of(dtypes, is_cuda=losses.is_cuda))
        checked.add(path)


class _Sweep:
    """Collects gradients and alignments during one backward pass; each group of calls is finished once."""

    def __init__(
        self, to_direction: ToDirection, coefficients: Coefficients, direction: Direction | None = None
    ) -> None:
        self.to_direction = to_direction
        self.coefficients = coefficients
        self.direction = direction  # None: computed from the target rows of the same pass
        self.target_gradient: dict[str, Tensor] = {}
        self.source_gradient: dict[str, Tensor] = {}
        self._small = SmallGradients()
        self._cast: dict[torch.dtype, Tensor] = {}
        self._late: list[tuple[Call, Tensor]] = []  # calls whose coefficients depend on the alignment

    def run(self, tape: Tape, losses: Tensor, n_source: int) -> None:
        """Back-propagate ``losses``: n_source source losses, then the target's if they share this pass."""
        refuse_sharded(tape.sharded, "a source gradient in the same pass")
        self._split(losses, n_source)
        tape.backward(losses, self.finish, scales=self.scales)
        self._close()

    def _split(self, losses: Tensor, n_source: int) -> None:
        self._source, self._target = slice(0, n_source), slice(n_source, None)
        self.scales = torch.ones_like(losses)  # source losses are summed, target losses averaged
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
        """Alignment and weighted gradient of a call, for coefficients that are known."""
        both = call.both(direction, coefficients, self._source)
        if both is None:
            self._parts.add(self._alignment(call, direction, alone=alone))
            add_gradients(self.source_gradient, call.gradient(coefficients, self._source))
        else:
            self._parts.add(both[0])
            add_gradients(self.source_gradient, both[1])

    def _direction(self, calls: list[Call]) -> Direction:
        found: dict[str, Tensor] = {}
        for call in calls:
            add_gradients(found, call.gradient(None, self._target))
        self.target_gradient.update(found)
        return self.to_direction(found) if found else {}

    def _alignment(self, call: Call, direction: Direction, *, alone: bool) -> Tensor | None:
        """The call's alignments; by Gram matrices if the direction is the call's own target gradient, unchanged."""
        name, found = call.large, None
        if alone and name is not None and name in direction and direction[name] is self.target_gradient.get(name):
            found = call.alignment_with(self._target, self._source)
        return call.alignment(direction, self._source) if found is None else found

    def _close(self) -> None:
        """The small parameters, and the gradients whose coefficients depend on the alignment."""
        direction = self.direction
        if direction is None:
            found = self._small.gradient(None, self._target)
            self.target_gradient.update(found)
            direction = self.to_direction(found)
        self._parts.add(self._small.alignment(direction, self._source))
        self.alignment = self._parts.total()
        c = self.coefficients(self.alignment) if callable(self.coefficients) else self.coefficients
        for call, delta in self._late:
            call.delta = delta
            add_gradients(self.source_gradient, call.gradient(self._coefficients(c, call), self._source))
            call.close()
        self.source_gradient.update(self._small.gradient(c, self._source))

    def _coefficients(self, c: Tensor, call: Call) -> Tensor:
        """c in the call's precision; cast once per precision."""
        if call.dtype not in self._cast:
            self._cast[call.dtype] = c.to(call.dtype)
        return self._cast[call.dtype]


class _Parts:
    """The layers' parts of the alignments, summed at the end in one operation."""

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


def _compare(mine: dict[str, Tensor], right: dict[str, Tensor], tolerance: float) -> None:
    if not right:
        return
    norms = torch.stack([g.double().norm() for g in right.values()])
    floor = 1e-2 * norms.norm()  # a gradient that cancels to zero consists of rounding errors only
    errors = torch.stack([_distance(mine.get(name), g) for name, g in right.items()])
    off = (errors > tolerance * (norms + floor)).nonzero().flatten().tolist()
    if off:
        name = list(right)[off[0]]
        raise EngineError(
            f"the layerwise engine is not exact for this model (first found at parameter {name!r}): examples of a "
            f"batch act on each other, or the parameter is used where the engine cannot see it; {OTHER_ENGINES}."
        )


def _distance(mine: Tensor | None, right: Tensor) -> Tensor:
    return right.double().norm() if mine is None else (mine.double() - right.double()).norm()
