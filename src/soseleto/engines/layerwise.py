"""Layer by layer: alignments at the cost of one more forward pass, without forming per-example gradients.

For a layer y = f(a; P), linear in its parameters, with δ_j the gradient of ℓ_j at y_j and G the direction for P,

    q_j = Σ over layers of ⟨δ_j, f(a_j; G)⟩.

One forward and one backward pass of source and target together give every a and δ. When the backward reaches a layer,
its target gradient is computed and mapped to the direction; the source rows' alignments and the weighted source
gradient follow from the same δ. Then δ is freed, so that peak memory is that of an ordinary step.

This is exact if no example's loss depends on another example and every use of a parameter is seen. It is proved on the
graph of the step itself (see ``proof``), for every kind of graph that the model builds and again at random steps: for
random and for one-hot coefficients c, Σ c_j ∂ℓ_j/∂P from the layers must equal autograd's gradient of Σ c_j ℓ_j. And
the gradient must not lead from the losses of one part of the batch to the activations of the other. That is decided by
structure, with NaN in place of numbers, since 0·NaN is NaN: a term that acts between examples counts even while its
factor is zero. What acts between equal examples only, as a loss of pairs, is looked for in a batch whose first half
is there twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from soseleto.engines.autograd import gradient, target_first
from soseleto.engines.call import OTHER_ENGINES, Call, Packed
from soseleto.engines.interface import (
    Direction,
    Passes,
    PerExampleLoss,
    SourcePass,
    SourceStep,
    Step,
    as_loss_vector,
    named_in,
    refuse_foreign,
    trainable,
)
from soseleto.engines.model_state import Restore, random_states, sharded_modules, unchanged, uncompiled
from soseleto.engines.proof import (
    TOLERANCE,
    Equation,
    Inexact,
    Kinds,
    Schedule,
    coefficients,
    compare,
    gradient_norms,
    inexact,
    random_direction,
    require_zero,
    unproved,
)
from soseleto.engines.sweep import Sweep
from soseleto.engines.tape import Tape
from soseleto.errors import EngineError

# --- whether source and target may share one pass: the source's losses and gradients must be those it has alone ---


SAME_LOSSES = 1e-2  # of two passes through the same layers, also in half precision


@dataclass(frozen=True)
class Alone:
    """Losses, and the gradient of their sum with random coefficients; the graph is freed."""

    losses: Tensor
    gradient: dict[str, Tensor]

    @classmethod
    def of(cls, losses: Tensor, model: nn.Module) -> Alone:
        c = coefficients(losses, examples=0, seed=len(losses))[0].to(losses.dtype)
        return cls(losses.detach(), gradient(losses, trainable(model), c))


def joins(step: Step, joint: Alone, tolerance: float) -> bool:
    """Whether the source's losses and gradients of a joint pass are those of the source alone.

    A model that draws at random draws other numbers for other sizes: there they must be those of a joint pass with
    other inputs on the target's side.
    """
    if not all(bool(x.isfinite().all()) for x in (joint.losses, *joint.gradient.values())):  # guards report them
        return True
    with unchanged(step.model), torch.enable_grad():
        before = random_states(step.model)
        losses = step.losses.source(step.model, step.source)
        draws = not all(map(torch.equal, random_states(step.model), before))
    if draws:
        other = _with_inputs_of(step.source, step.target)
        if other is None or not step.losses.can_join(step.source, other):
            return False
        with unchanged(step.model), torch.enable_grad():
            losses = step.losses.joint(step.model, step.source, other)[: len(step.source)]
    alone = Alone.of(losses, step.model)
    apart = (alone.losses - joint.losses).abs().max()
    try:
        compare(joint.gradient, alone.gradient, tolerance)
    except Inexact:
        return False
    return bool(apart <= min(tolerance, SAME_LOSSES) * alone.losses.abs().max())


def _with_inputs_of(source: Any, target: Any) -> Any:
    """The target batch with inputs of source examples; None if the structure of a batch is not known."""
    if not hasattr(source, "inputs") or not hasattr(target, "inputs"):
        return None
    return replace(target, inputs=_taken(source.inputs, torch.arange(len(target)) % len(source), len(source)))


def _taken(batch: Any, places: Tensor, n: int) -> Any:
    """The examples at these places of a batch of n."""

    def rows(x: Any) -> Any:
        return x[places.to(x.device)] if isinstance(x, Tensor) and len(x.shape) and len(x) == n else x

    if hasattr(batch, "inputs") and hasattr(batch, "labels"):  # one of ours
        return replace(batch, inputs=tree_map(rows, batch.inputs), labels=tree_map(rows, batch.labels))
    return tree_map(rows, batch)


logger = logging.getLogger("soseleto")

ADVICE = f"examples act on each other, or a parameter is used where the engine cannot see it; {OTHER_ENGINES}"


class LayerwiseEngine:
    """The engine; it records the graphs for which it was proved to be exact."""

    name = "layerwise"

    def __init__(self) -> None:
        self.schedule = Schedule()
        self._doubled: WeakSet[nn.Module] = WeakSet()  # models that were proved on a batch with equal examples
        self.proofs = 0  # so far
        self._kinds: WeakKeyDictionary[nn.Module, Kinds] = WeakKeyDictionary()
        self._apart: WeakSet[nn.Module] = WeakSet()  # models whose source and target must not share a pass

    def __call__(
        self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Direction
    ) -> tuple[Tensor, Tensor]:
        named_in(direction, model)
        self._try_doubled(model, per_example_loss, batch)
        tape, losses = self._forward(model, lambda: per_example_loss(model, batch))
        sweep = Sweep(tape, None, direction)
        sweep.run(losses, len(losses))
        return losses.detach(), sweep.alignment

    def passes(self, step: Step) -> Passes:
        """Source and target in one forward and backward where the batches can be joined, else the target first."""
        self._try_doubled(step.model, step.losses.source, step.source)
        if step.model in self._apart or not step.losses.can_join(step.source, step.target):
            return target_first(step, self.source_pass)
        tape, joint = self._joint(step)
        if tape is None:
            self._apart.add(step.model)
            logger.info("source and target take separate passes, since losses depend on statistics of the batch")
            return target_first(step, self.source_pass)
        n = len(step.source)
        sweep = Sweep(tape, step.coefficients, to_direction=step.to_direction, to_return=step.to_return)
        sweep.run(joint, n)
        return Passes(
            joint[:n].detach(), joint[n:].detach(), sweep.alignment, sweep.source_gradient, sweep.target_gradient
        )

    def _joint(self, step: Step) -> tuple[Tape | None, Tensor]:
        """The pass of source and target; no tape if they must not share one, which every proof and check finds out.

        The graph of the joint pass is freed before the source takes a pass of its own, and made again after it.
        """

        def forward() -> tuple[Tape, Tensor]:
            return self._forward(step.model, lambda: step.losses.joint(step.model, step.source, step.target))

        restore, n = Restore(step.model), len(step.source)
        tape, joint = forward()
        if self.schedule.last < self.schedule.calls:
            return tape, joint
        tolerance, of_joint = tape.tolerance(joint), Alone.of(joint[:n], step.model)
        del tape, joint
        restore()
        if not joins(step, of_joint, tolerance):
            return None, torch.empty(0)
        self.schedule.calls -= 1  # the same call once more
        return forward()

    def source_pass(self, step: SourceStep) -> SourcePass:
        self._try_doubled(step.model, step.loss, step.batch)
        tape, losses = self._forward(step.model, lambda: step.loss(step.model, step.batch))
        sweep = Sweep(tape, step.coefficients, step.direction)
        sweep.run(losses, len(losses))
        return SourcePass(losses.detach(), sweep.alignment, sweep.source_gradient)

    def _forward(self, model: nn.Module, run: Callable[[], Tensor]) -> tuple[Tape, Tensor]:
        """One forward pass on a tape, checked where that is due."""
        tape = Tape(model)
        with torch.enable_grad(), uncompiled(model), tape:
            losses = as_loss_vector(run())
        tape.check_rows(len(losses))
        if not tape.sharded:  # no rank can hold a whole gradient; ``parallel.fsdp`` has its own proof
            self._check(model, tape, losses)
        return tape, losses

    def _try_doubled(self, model: nn.Module, loss: PerExampleLoss, batch: Any) -> None:
        """The first proof is held on a batch with equal examples, where the structure of the batch is known."""
        if model in self._doubled or sharded_modules(model) or self.schedule.recording:
            return
        self._doubled.add(model)
        with unchanged(model), torch.enable_grad():
            n, tape = len(as_loss_vector(loss(model, batch))), Tape(model)
            doubled = _taken(batch, torch.arange(n) % -(-n // 2), n)
            try:
                with tape:
                    losses = as_loss_vector(loss(model, doubled))
            except EngineError:
                raise
            except Exception:  # the loss does not take such a batch
                return
            if losses.isfinite().all():
                tape.check_rows(len(losses))
                with inexact(self.name, ADVICE):
                    _prove(tape, trainable(model), losses, seed=0)

    def _check(self, model: nn.Module, tape: Tape, losses: Tensor) -> None:
        """A proof, if one is due or the model has built another kind of graph than those proved; or a check."""
        kinds = self._kinds.setdefault(model, Kinds())
        is_due = self.schedule.count()
        flags = tuple(module.training for module in model.modules())
        several = len(losses) > 1  # a single example cannot show that examples depend on each other
        layouts = tuple(type(call.layout) for call in tape.calls)
        kind = tape.functions, flags, several, layouts
        is_new = kinds.is_new(*kind)
        is_proof = is_due or is_new
        if not is_proof and not self.schedule.needs_check:
            return
        self.schedule.begin()
        refuse_foreign(losses, model)
        with inexact(self.name, ADVICE):
            unproved = _prove(tape, trainable(model), losses, seed=self.schedule.calls, thorough=is_proof)
        if not is_proof:
            self.schedule.checked()
            return
        self.proofs += 1
        kinds.add(*kind)
        self.schedule.proved(unproved, is_new=is_new)


def _prove(
    tape: Tape, parameters: dict[str, nn.Parameter], losses: Tensor, *, seed: int, thorough: bool = True
) -> frozenset[str]:
    """Raise ``Inexact`` unless the layers give autograd's gradients and alignments; returns what it does not prove.

    The graph of the step is kept meanwhile, so little else is: one gradient, from which the layers subtract theirs, and
    one direction.

    thorough: with coefficients of single examples, and by structure
    """
    c, *one_hot = coefficients(losses, examples=2 if thorough else 0, seed=seed)
    left = gradient(losses, parameters, c.to(losses.dtype), retain_graph=True)
    if unseen := left.keys() - tape.derived.roots(key for call in tape.calls for key in call.names.values()):
        raise Inexact(f"parameter {min(unseen)!r} is used outside of torch functions")
    norms, tolerances = gradient_norms(left), _tolerances(tape, losses, left)
    along = random_direction(left, {name: parameters[name] for name in left}, seed)
    equations = [Equation.of(c, left, along)]
    for one in one_hot:
        equations.append(Equation.of(one, gradient(losses, parameters, one.to(losses.dtype), retain_graph=True), along))
    if not all(equation.is_finite for equation in equations):  # guards report losses that are not finite
        return frozenset(parameters)
    if thorough and len(losses) > 1 and _is_mixed(tape, losses, 1 + seed % (len(losses) - 1)):
        raise Inexact("a gradient leads from one example's loss to another example")

    sweep = Sweep(tape, -c, along, gradient=left)
    sweep.run(losses, len(losses), retain_graph=True)
    require_zero(left, norms, tolerances)
    for equation in equations:
        equation.require(sweep.alignment, tape.tolerance(losses))
    return unproved(norms, norms, tolerances)


def _is_mixed(tape: Tape, losses: Tensor, n: int) -> bool:
    """Whether the first n losses depend on activations of the other examples, even by a factor of 0.

    Not decided where hooks could keep what they are given, and for packed rows, whose attention is masked by zeros.
    """
    if tape.has_hooks or any(isinstance(call.layout, Packed) for call in tape.calls):
        return False
    seeds, found = torch.zeros_like(losses), list[Tensor]()
    seeds[:n] = torch.nan

    def see(calls: list[Call]) -> None:
        found.extend(call.is_nan(slice(n, None)) for call in calls)
        for call in calls:
            call.close()

    try:
        tape.backward(losses, see, seeds, retain_graph=True)
    except RuntimeError:  # as by torch.autograd.set_detect_anomaly
        return False
    return bool(found) and bool(torch.stack(found).any())


def _tolerances(tape: Tape, losses: Tensor, names: Iterable[str]) -> dict[str, float]:
    """By the precision of a parameter's own uses: powers of two as c change no rounding elsewhere."""
    dtypes: dict[str, set[torch.dtype]] = {name: {losses.dtype} for name in names}
    for call in tape.calls:
        for name in tape.derived.roots(call.names.values()) & dtypes.keys():
            dtypes[name] |= {call.dtype, tape.derived.parameters[name].dtype}
    return {name: TOLERANCE.of(its, is_cuda=losses.is_cuda) for name, its in dtypes.items()}
