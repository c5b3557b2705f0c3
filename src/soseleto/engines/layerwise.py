"""Layer by layer: alignments at the cost of one more forward pass, without forming per-example gradients.

For a layer y = f(a; P), linear in its parameters, with δ_j the gradient of ℓ_j at y_j and G the direction for P,

    q_j = Σ over layers of ⟨δ_j, f(a_j; G)⟩.

One forward and one backward pass of source and target together give every a and δ. When the backward reaches a layer,
its target gradient is computed and mapped to the direction; the source rows' alignments and the weighted source
gradient follow from the same δ. Then δ is freed, so that peak memory is that of an ordinary step.

This is exact if no example's loss depends on another example and every use of a parameter is seen. It is proved on a
few examples (see ``proof``), for every kind of graph that the model builds: for random and for one-hot coefficients c,
Σ c_j ∂ℓ_j/∂P from the layers must equal autograd's gradient of Σ c_j ℓ_j. Then, and again at random steps, one such
equation must hold on the graph of the step itself. Where the few give another kind of graph, all is proved on that. And
the gradient must not lead from the losses of one part of the batch to the activations of the other. That is decided by
structure, with NaN in place of numbers, since 0·NaN is NaN: a term that acts between examples counts even while its
factor is zero. What acts between equal examples only, as a loss of pairs, is seen since two of the few are there twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from soseleto.engines.autograd import BaseEngine, gradient
from soseleto.engines.call import OTHER_ENGINES, Call, Packed
from soseleto.engines.interface import Passes, SourcePass, SourceStep, Step, as_loss_vector, refuse_foreign, trainable
from soseleto.engines.model_state import Restore, modules_of, random_states, unchanged, uncompiled
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

SAME_LOSSES = 1e-2  # of two passes through the same layers, also in half precision
FEW = 8  # examples of a proof, two of them twice: what acts between equal examples only must show as well


def few_of(batch: Any, n: int) -> Any:
    """A few of the n examples of a batch, or of both batches of a step; where the structure is not known, all."""
    if isinstance(batch, Step):
        target = _taken(batch.target, torch.arange(min(2, len(batch.target))), len(batch.target))
        few = replace(batch, source=few_of(batch.source, len(batch.source)), target=target)
        few.losses.can_join(few.source, few.target)  # a loop's batches are joined by this, and not on the tape
        return few
    count = min(n, FEW)
    return _taken(batch, torch.arange(count) % max(1, count - max(1, count // 4)), n)


def _taken(batch: Any, places: Tensor, n: int) -> Any:
    """The examples at these places of a batch of n."""

    def rows(x: Any) -> Any:
        return x[places.to(x.device)] if isinstance(x, Tensor) and len(x.shape) and len(x) == n else x

    if hasattr(batch, "inputs") and hasattr(batch, "index"):  # one of ours
        fields = {name: getattr(batch, name) for name in ("index", "inputs", "labels") if hasattr(batch, name)}
        return replace(batch, **{name: tree_map(rows, value) for name, value in fields.items()})
    return tree_map(rows, batch)


def joins(step: Step, tolerance: float) -> bool:
    """Whether the source's losses and gradients do not depend on the target that shares their pass.

    Gradients are compared with those of a joint pass with other inputs on the target's side: for batches of another
    size a GPU takes other kernels, whose rounding in TF32 can pass for a dependence. Losses are those of the source
    alone, but where the model draws at random, and draws other numbers for other sizes.
    """
    losses, right = _of_source(step, step.target)
    if not all(bool(x.isfinite().all()) for x in (losses, *right.values())):  # guards report them
        return True
    before = random_states(step.model)
    with unchanged(step.model), torch.enable_grad():
        alone = step.losses.source(step.model, step.source).detach()
        draws = not all(map(torch.equal, random_states(step.model).values(), before.values()))
    other = None
    if hasattr(step.source, "inputs") and hasattr(step.target, "inputs"):
        places = torch.arange(len(step.target)) % len(step.source)
        other = replace(step.target, inputs=_taken(step.source.inputs, places, len(step.source)))
        if not step.losses.can_join(step.source, other):
            other = None
    if draws and other is None:
        return False
    again, found = _of_source(step, other)
    try:
        compare(found, right, tolerance)
    except Inexact:
        return False
    expected = again if draws else alone
    return bool((expected - losses).abs().max() <= min(tolerance, SAME_LOSSES) * expected.abs().max())


def _of_source(step: Step, target: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The source's losses in a pass together with a target batch, and the gradient of their sum with random c."""
    with unchanged(step.model), torch.enable_grad():
        if target is None:
            losses = step.losses.source(step.model, step.source)
        else:
            losses = step.losses.joint(step.model, step.source, target)[: len(step.source)]
        c = coefficients(losses, examples=0, seed=len(losses))[0].to(losses.dtype)
        return losses.detach(), gradient(losses, trainable(step.model), c)


logger = logging.getLogger("soseleto")

ADVICE = f"examples act on each other, or a parameter is used where the engine cannot see it; {OTHER_ENGINES}"


class LayerwiseEngine(BaseEngine):
    """The engine; it records the graphs for which it was proved to be exact."""

    name = "layerwise"

    def __init__(self) -> None:
        self.schedule = Schedule()
        self.proofs = 0  # so far
        self._kinds: WeakKeyDictionary[nn.Module, Kinds] = WeakKeyDictionary()
        self._apart: WeakSet[nn.Module] = WeakSet()  # models whose source and target must not share a pass

    def passes(self, step: Step) -> Passes:
        """Source and target in one forward and backward where the batches can be joined, else the target first.

        Whether they can is tried with every proof and check.
        """
        if step.model in self._apart or not step.losses.can_join(step.source, step.target):
            return super().passes(step)
        n, restore = len(step.source), step.restore or Restore(step.model)
        tape, joint, is_checked = self._forward(
            step.model, lambda part: step.losses.joint(step.model, part.source, part.target), step
        )
        if is_checked and not joins(few_of(step, n), tape.tolerance(joint)):
            restore()
            self._apart.add(step.model)
            logger.info("source and target take separate passes, since losses depend on statistics of the batch")
            return super().passes(step)
        sweep = Sweep(tape, step.coefficients, to_direction=step.to_direction, to_return=step.to_return)
        sweep.run(joint, n)
        return Passes(
            joint[:n].detach(), joint[n:].detach(), sweep.alignment, sweep.source_gradient, sweep.target_gradient
        )

    def source_pass(self, step: SourceStep) -> SourcePass:
        tape, losses, _ = self._forward(step.model, lambda part: step.loss(step.model, part), step.batch)
        sweep = Sweep(tape, step.coefficients, step.direction)
        sweep.run(losses, len(losses))
        return SourcePass(losses.detach(), sweep.alignment, sweep.source_gradient)

    def _forward(self, model: nn.Module, run: Callable[[Any], Tensor], batch: Any) -> tuple[Tape, Tensor, bool]:
        """One forward pass of a batch on a tape, and whether a proof or a check was due and held."""
        tape, losses = _taped(model, lambda: run(batch))
        # no rank of a sharded model can hold a whole gradient; ``parallel.fsdp`` has its own proof
        return tape, losses, not tape.sharded and self._check(model, tape, losses, run, batch)

    def _check(self, model: nn.Module, tape: Tape, losses: Tensor, run: Callable[[Any], Tensor], batch: Any) -> bool:
        """A proof, if one is due or the model has built another kind of graph than those proved; or a check.

        Returns whether one was held. A proof is held on a few examples, which is cheap, where these give a graph of the
        same kind. Then one equation for the whole batch is enough, and in later proofs of that kind none.
        """
        kinds, is_due, kind = self._kinds.setdefault(model, Kinds()), self.schedule.count(), _kind(model, tape, losses)
        is_new = kinds.is_new(*kind)
        if not is_due and not is_new and not self.schedule.needs_check:
            return False
        self.schedule.begin()
        refuse_foreign(losses, model)

        def held(seed: int) -> frozenset[str] | None:
            if not (is_due or is_new):
                _prove(tape, trainable(model), losses, seed=seed, thorough=False)
                return None
            few, unproved = few_of(batch, len(losses)), None  # not on the tape
            if len(losses) > 1:
                unproved = self._prove_few(model, lambda: run(few), kind, seed, thorough=is_new)
            thorough = unproved is None or len(losses) <= FEW
            if thorough or is_new:
                unproved = _prove(tape, trainable(model), losses, seed=seed, thorough=thorough)
            return unproved

        with inexact(self.name, ADVICE):
            try:
                unproved = held(self.schedule.calls)
            except Inexact:
                if tape.tolerance(losses) < TOLERANCE.half:
                    raise
                unproved = held(-self.schedule.calls)  # rounding in half precision seldom fails twice
        if unproved is None:
            self.schedule.checked()
            return True
        self.proofs += 1
        kinds.add(*kind)
        self.schedule.proved(unproved, is_new=is_new)
        return True

    def _prove_few(
        self, model: nn.Module, run: Callable[[], Tensor], kind: tuple[Any, ...], seed: int, *, thorough: bool
    ) -> frozenset[str] | None:
        """What a proof on a few examples does not prove; None if their graph is of another kind than the batch's."""
        with unchanged(model):
            try:
                tape, losses = _taped(model, run)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # the loss or a layout does not take such a batch
                return None
            if not losses.isfinite().all():
                return None
            unproved = _prove(tape, trainable(model), losses, seed=seed, thorough=thorough)
            return unproved if _kind(model, tape, losses) == kind else None


def _taped(model: nn.Module, run: Callable[[], Tensor]) -> tuple[Tape, Tensor]:
    tape = Tape(model)
    with torch.enable_grad(), uncompiled(model), tape:
        losses = as_loss_vector(run())
    tape.check_rows(len(losses))
    return tape, losses


def _kind(model: nn.Module, tape: Tape, losses: Tensor) -> tuple[Any, ...]:
    """By which graphs are told apart."""
    flags = tuple(module.training for module in modules_of(model))
    several = len(losses) > 1  # a single example cannot show that examples depend on each other
    return tape.functions, flags, several, tuple(type(call.layout) for call in tape.calls)


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
