"""Proofs that an engine's alignments are those of ordinary autograd, and when a proof is due.

Alignments are linear in the direction d: for coefficients c an engine's q must satisfy

    Σ_j c_j q_j = Re⟨∂(Σ_j c_j ℓ_j)/∂θ, d⟩,

whose right side is one ordinary backward of an ordinary forward, where hooks, ``no_grad`` and the user's own functions
act as they do in training. c is random, and one-hot for a few examples j, where the equation is the definition of q_j:
times 1024, since a hook that clips gradients acts on large ones only. d has a part for every parameter, of a random
sign and of a size such that no parameter outweighs another. The random c are powers of two: they change no rounding.

A parameter whose gradient is (near) zero is not proved by this, as with all layers below a head that starts at zero. So
proofs are repeated at calls 2, 3 and 4, and for a new kind of graph; while a parameter is unproved, at each of the
first eight calls (behind a head that starts at zero there may be a gate that starts at zero) and then when the number
of calls has doubled, so that what grows steadily from zero on has grown by a small factor since it was last unseen.
What the batches so far did not show is found by a check in every 25 to 50 calls, at random: the equation with random c
on the step's own graph, for which one ordinary backward is enough.

In units of one forward pass F of the source batch a proof costs at most 15F (1 forward, 4 backward passes and a call of
an engine at 4F, plus the gradient of its losses), a later one at most 11F, a check 2F, a step about 5F.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from soseleto.engines.autograd import add_gradients, gradient
from soseleto.engines.interface import PerExampleLoss, as_loss_vector, inner, refuse_foreign, trainable
from soseleto.engines.model_state import before_call, unchanged
from soseleto.errors import EngineError, first_line

# --- what a model calls during a pass: by it a graph of another kind than those proved is recognised ---


_NUMBERS = (int, float, np.number, np.bool_)


def described(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Hashable:
    """A call without its tensors: the function, whether under ``no_grad``, and which of its numbers are zero.

    A factor of zero hides what it multiplies from a proof, such as a term of the loss that is faded in, and a shift by
    zero places that it mixes examples.
    """
    numbers = (*args, *kwargs.values()) if kwargs else args
    zeros = [at for at, v in enumerate(numbers) if type(v) is not Tensor and isinstance(v, _NUMBERS) and v == 0]
    if zeros:
        return (func, torch.is_grad_enabled(), *zeros)
    return func if torch.is_grad_enabled() else (func,)


class Recorded(TorchFunctionMode):
    """Records the calls and the dtypes of activations while it is open; changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Hashable] = []
        self.dtypes: set[torch.dtype] = set()  # of all results that have a gradient

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(described(func, args, kwargs))
        before_call(func, args)
        out = self.call(func, args, kwargs or {})
        if isinstance(out, Tensor) and out.requires_grad:
            self.dtypes.add(out.dtype)
        return out

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def tolerance(self, losses: Tensor) -> float:
        return TOLERANCE.of(self.dtypes | {losses.dtype}, is_cuda=losses.is_cuda)


# --- how far two computations of the same gradient may differ by rounding ---


class Tolerance(NamedTuple):
    """Relative errors, by the lowest precision that takes part in the computation."""

    half: float  # bfloat16 or float16
    tf32: float  # float32 on a GPU, where products may be computed with ten bits
    single: float
    double: float

    def of(self, dtypes: set[torch.dtype], *, is_cuda: bool) -> float:
        if dtypes & {torch.bfloat16, torch.float16}:
            return self.half
        if torch.float32 in dtypes:
            return self.tf32 if is_cuda else self.single
        return self.double


TOLERANCE = Tolerance(half=5e-2, tf32=1e-2, single=1e-3, double=1e-7)
FLOOR = 1e-2  # gradients below this share of the largest are compared on the scale of that share
UNPROVED = 10 * FLOOR  # times the tolerance: a share below which an error could not be seen

FIRST = 4  # calls that each hold a proof: the first steps change a model most
EARLY = 8  # calls that each hold one while a parameter is unproved
CHECKED = 25, 50  # calls from one check to the next, at random between these
LARGE = 1024.0  # times a one-hot c

# (losses with their graph, alignments) along a direction
Align = Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]]


class ProofDue(Exception):
    """A step that is being recorded as a CUDA graph needs a proof, which a recording cannot hold."""


@dataclass
class Schedule:
    """When proofs are due, counted in an engine's calls; steps replayed by a CUDA graph count too."""

    calls: int = 0
    at: int = 1  # the call that holds the next proof
    check_at: int = 1  # the call that holds the next check
    since: int = 0  # the call before the first proof of the newest kind of graph
    last: int = 0  # the call of the last proof or check that was passed
    unproved: frozenset[str] = frozenset()
    recording: bool = False  # a CUDA graph

    def begin(self) -> None:
        """Before a proof or a check: raises where none can be held."""
        if self.recording:
            raise ProofDue

    @property
    def is_due(self) -> bool:
        """Whether the next call holds a proof or a check."""
        return self.calls + 1 >= min(self.at, self.check_at)

    def count(self) -> bool:
        """Count a call; whether a proof is due in it."""
        self.calls += 1
        return self.calls >= self.at

    @property
    def needs_check(self) -> bool:
        """Whether this call holds a check."""
        return self.calls >= self.check_at

    def checked(self) -> None:
        """Set the next check: the calls that hold one are the same in every run."""
        self.last, self.check_at = self.calls, self.calls + random.Random(self.calls).randint(*CHECKED)

    def proved(self, unproved: Iterable[str], *, is_new: bool) -> None:
        """Set the next proof; one of a new kind of graph, held before its time, does not postpone it."""
        self.unproved = frozenset(unproved)
        self.since = self.calls - 1 if is_new else self.since
        age, following = self.calls - self.since, sys.maxsize
        if self.unproved:
            following = self.calls + (1 if age < EARLY else age)
        elif self.calls < FIRST:
            following = self.calls + 1
        self.at = following if self.calls >= self.at else min(self.at, following)
        self.checked()


class Kinds:
    """The graphs that were proved, known by the functions that the model called.

    The first ``MOST`` graphs of a model are each proved. A model that drops layers at random has new ones at every
    step: the later ones are left to the checks at random steps.
    """

    MOST = 32

    def __init__(self) -> None:
        self._proved: set[int] = set()

    def __len__(self) -> int:
        return len(self._proved)

    def is_new(self, calls: Sequence[Hashable], *conditions: Hashable) -> bool:
        """Whether a graph is to be proved."""
        return len(self._proved) < self.MOST and hash((tuple(calls), *conditions)) not in self._proved

    def add(self, calls: Sequence[Hashable], *conditions: Hashable) -> None:
        """Record a graph that was proved."""
        self._proved.add(hash((tuple(calls), *conditions)))


def coefficients(losses: Tensor, *, examples: int, seed: int) -> list[Tensor]:
    """Random c without a common sign, under which gradients do not cancel, and one-hot c of some examples."""
    seeded = torch.Generator().manual_seed(seed)
    n, large = len(losses), 1.0 if losses.dtype == torch.float16 else LARGE
    c = 2.0 ** torch.randint(-1, 2, (n,), generator=seeded, dtype=torch.float64)
    c *= torch.randint(2, (n,), generator=seeded) * 2 - 1
    if n and not c.sum():  # gradients of equal examples would cancel
        c[0] = -c[0]
    chosen = torch.randperm(n, generator=seeded)[: examples if n > 1 else 0]
    rows = [c, *(large * torch.nn.functional.one_hot(j, n).to(torch.float64) for j in chosen)]
    return [row.to(losses.device) for row in rows]


def random_direction(
    gradients: Mapping[str, Tensor | None], like: Mapping[str, Tensor], seed: int
) -> dict[str, Tensor]:
    """Along each parameter's gradient and across it, of sizes that make the parts ⟨g_p, d_p⟩ equally large."""
    norms = {name: g.norm() for name, g in gradients.items() if g is not None}
    largest = torch.stack([n.double() for n in norms.values()]).max() if norms else torch.ones((), dtype=torch.float64)
    floor = (FLOOR * largest).clamp_min(torch.finfo(torch.float32).tiny)
    generators: dict[torch.device, torch.Generator] = {}
    found = {}
    for name, p in like.items():
        if p.device not in generators:
            generators[p.device] = torch.Generator(p.device).manual_seed(seed)
        seeded = generators[p.device]
        d = torch.randn(p.shape, dtype=p.dtype, device=p.device, generator=seeded)
        d = d / d.norm().clamp_min(1e-6)
        g, norm = gradients.get(name), norms.get(name)
        if g is not None and norm is not None:
            length = norm.double().clamp_min(1e-30)
            sign = torch.randint(2, (), device=p.device, generator=seeded) * 2 - 1
            d = (d + g / length.to(norm.dtype)) * (sign * floor / length.clamp_min(floor)).to(norm.dtype)
        found[name] = d
    return found


def prove(
    align: Align, model: nn.Module, loss: PerExampleLoss, batch: Any, names: Iterable[str], *, seed: int, first: bool
) -> frozenset[str]:
    """Raise ``Inexact`` unless ``align`` agrees with ordinary autograd; returns the parameters it does not prove."""
    parameters, names = trainable(model), list(names)
    with unchanged(model):
        with Recorded() as recorded:
            ordinary = as_loss_vector(loss(model, batch))
        refuse_foreign(ordinary, model)
        c, *one_hot = coefficients(ordinary, examples=3 if first else 1, seed=seed)
        g = gradient(ordinary, parameters, c.to(ordinary.dtype), retain_graph=True)
        direction = random_direction({name: g.get(name) for name in names}, {n: parameters[n] for n in names}, seed)
        equations = [Equation.of(c, g, direction)]
        for one in one_hot:
            of_one = gradient(ordinary, parameters, one.to(ordinary.dtype), retain_graph=True)
            equations.append(Equation.of(one, of_one, direction, one.max() * equations[0].scale / len(ordinary)))
        ordinary = ordinary.detach()
    if not all(equation.is_finite for equation in equations):  # guards report losses that are not finite
        return frozenset(names)
    tolerance = recorded.tolerance(ordinary)
    with unchanged(model):
        losses, q = align(direction)
        _require_equal_losses(losses, ordinary, tolerance)
        compare(_source_gradient(losses, parameters, c), g, tolerance)
    for equation in equations:
        equation.require(q, tolerance)
    return unproved(gradient_norms(g), names, dict.fromkeys(names, tolerance))


class Inexact(EngineError):
    """An engine's alignments differ from those of ordinary autograd."""


@contextmanager
def inexact(engine: str, advice: str) -> Iterator[None]:
    """Inside, ``Inexact`` becomes an error with the engine's name and advice."""
    try:
        yield
    except Inexact as error:
        raise EngineError(f"the {engine} engine is not exact for this model ({error}): {advice}.") from error


def gradient_norms(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The norm of each parameter's gradient, in float64."""
    return {name: g.norm().double() for name, g in gradients.items()}


def unproved(norms: Mapping[str, Tensor], names: Iterable[str], tolerance: Mapping[str, float]) -> frozenset[str]:
    """The parameters with gradients so small that an error in them could not be seen; those unused have none."""
    if not norms:
        return frozenset()
    sizes = torch.stack(list(norms.values()))
    shares = dict(zip(norms, (sizes / sizes.max().clamp_min(1e-300)).tolist(), strict=True))
    return frozenset(name for name in names if name in shares and not shares[name] > UNPROVED * tolerance[name])


def _require_equal_losses(losses: Tensor, ordinary: Tensor, tolerance: float) -> None:
    apart = (losses.detach() - ordinary).abs().max()
    if not bool(apart <= tolerance * (ordinary.abs().max() + 1e-30)):
        raise Inexact(f"its losses differ by {float(apart):.1e} from those of an ordinary forward pass")


def _source_gradient(losses: Tensor, parameters: dict[str, nn.Parameter], c: Tensor) -> dict[str, Tensor]:
    """The losses leave the engine with a graph, from which the source gradient is computed."""
    try:
        return gradient(losses, parameters, c.to(losses.dtype))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # a checkpoint's second forward is not followed
        raise Inexact(f"its losses cannot be differentiated: {first_line(error)}") from error


def compare(mine: Mapping[str, Tensor], right: Mapping[str, Tensor], tolerance: float) -> None:
    """Raise ``Inexact`` unless two gradients agree in each parameter."""
    left = dict(right)
    add_gradients(left, {name: -g for name, g in mine.items()})
    require_zero(left, gradient_norms(right), dict.fromkeys(left, tolerance))


def require_zero(left: Mapping[str, Tensor], norms: Mapping[str, Tensor], tolerance: Mapping[str, float]) -> None:
    """Raise ``Inexact`` unless nothing is left of gradients that had these norms, up to each one's tolerance."""
    if not norms:
        return
    sizes = torch.stack([norms.get(name, g.new_zeros((), dtype=torch.float64)) for name, g in left.items()])
    floor = FLOOR * sizes.norm()  # a gradient that cancels to zero consists of rounding errors only
    errors = torch.stack(list(gradient_norms(left).values()))
    tolerances = sizes.new_tensor([tolerance[name] for name in left])
    off = (~(errors <= tolerances * (sizes + floor))).nonzero().flatten().tolist()
    if off:
        raise Inexact(f"the gradient of parameter {list(left)[off[0]]!r} is not that of an ordinary backward pass")


@dataclass(frozen=True)
class Equation:
    """Σ c_j q_j = ⟨g, direction⟩, for g the gradient of Σ c_j ℓ_j.

    scale: the root of Σ_p ‖g_p‖²‖d_p‖², where a small gradient counts as FLOOR; errors are relative to it
    """

    c: Tensor
    value: Tensor
    scale: Tensor

    @classmethod
    def of(
        cls, c: Tensor, gradients: Mapping[str, Tensor], direction: Mapping[str, Tensor], more: Tensor | float = 0.0
    ) -> Equation:
        """``more`` is added to the scale: rounding errors of the batch are seen by each example."""
        norms = gradient_norms(gradients)
        floor = FLOOR * torch.stack(list(norms.values())).max() if norms else torch.zeros((), dtype=torch.float64)
        value = inner({name: gradients[name] for name in direction if name in gradients}, direction).double()
        sizes = [norms.get(name, floor).clamp_min(floor) * d.norm().double() for name, d in direction.items()]
        return cls(c, value, torch.stack(sizes).norm() + more)

    @property
    def is_finite(self) -> bool:
        return bool(self.value.isfinite())

    def require(self, q: Tensor, tolerance: float) -> None:
        """Raise ``Inexact`` unless these alignments satisfy it; errors below the smallest float32 are none."""
        smallest = torch.finfo(torch.float32).tiny / tolerance
        off = (torch.dot(q.double(), self.c) - self.value).abs() / self.scale.clamp_min(smallest)
        if not bool(off <= tolerance):
            raise Inexact(f"its alignments differ from one backward per example by {float(off):.1e}")
