"""One use of parameters by the model, and groups of such uses that share parameters.

The first dimension of a call's output is the batch, or one of two layouts, which the proof checks like all else:

    grouped     (B·k, ...): the k rows of an example follow each other, as with tokens flattened to (B·L, D), windows
                of an image, and frames of a video
    packed      (N, ...) or (1, N, ...): all sequences in one row, with token losses that an index sums to examples

Models with other layouts take the forward engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from soseleto.engines.computed_parameters import Derived
from soseleto.engines.interface import as_dtype, reductions_dtype
from soseleto.engines.model_state import whole
from soseleto.engines.rules import Arguments, Rule
from soseleto.errors import EngineError


@dataclass(frozen=True)
class Grouped:
    """As every layout: which rows of a tensor belong to chosen examples (``part``), sums over the rows of each chosen
    example (``fold``), and an example's coefficient for each of its rows (``spread``; None stands for ones).
    """

    each: int  # k

    def part(self, x: Tensor, examples: slice) -> Tensor:
        start, stop, _ = examples.indices(len(x) // self.each)
        return x[start * self.each : stop * self.each]

    def fold(self, values: Tensor, examples: slice) -> Tensor:
        return values.unflatten(0, (-1, self.each)).sum(1)

    def spread(self, coefficients: Tensor | None, examples: slice) -> Tensor | None:
        return None if coefficients is None else coefficients.repeat_interleave(self.each)


@dataclass(frozen=True, eq=False)
class Packed:
    """All rows are kept, and those of other examples multiplied by zero: choosing rows would wait for the device."""

    index: Tensor  # (N,), the example of each row
    examples: int
    dims: int  # leading dimensions that hold the rows

    def part(self, x: Tensor, examples: slice) -> Tensor:
        return x.flatten(0, self.dims - 1)

    def fold(self, values: Tensor, examples: slice) -> Tensor:
        total = values.new_zeros(self.examples, *values.shape[1:])
        return total.index_add_(0, self.index, values)[examples]

    def spread(self, coefficients: Tensor | None, examples: slice) -> Tensor | None:
        if coefficients is None and len(range(*examples.indices(self.examples))) == self.examples:
            return None
        like = torch.ones((), device=self.index.device) if coefficients is None else coefficients
        each = like.new_zeros(self.examples)
        each[examples] = like
        return each[self.index]


Layout = Grouped | Packed

_SUMS = {
    getattr(owner, name + suffix)
    for name in ("index_add", "scatter_add", "scatter_reduce")
    for owner, suffix in ((torch, ""), (Tensor, ""), (Tensor, "_"))
}


@dataclass
class Sums:
    """The indices by which a forward pass adds rows up, by the numbers of rows before and after."""

    indices: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note a call that is made."""
        if func not in _SUMS:
            return
        dim: Any = args[1] if len(args) > 1 else kwargs.get("dim")
        index: Any = args[2] if len(args) > 2 else kwargs.get("index")
        if dim == 0 and args[0].ndim and index.numel() == max(index.shape, default=0):
            self.indices[index.numel(), len(args[0])] = index.detach().flatten()

    def layout(self, shape: tuple[int, ...], examples: int) -> Layout | None:
        """The layout of an output of this shape, whose first or first two dimensions hold rows."""
        for dims in range(1, min(len(shape), 2) + 1):
            n = math.prod(shape[:dims])
            for missing in (0, 1):  # a language model has one loss less than it has tokens
                if (index := self.indices.get((n - missing, examples))) is not None:
                    return Packed(torch.cat([index, index[-1:]]) if missing else index, examples, dims)
        if shape and examples and shape[0] > examples and shape[0] % examples == 0:
            return Grouped(shape[0] // examples)
        return None


# Per-example gradients of biases and of the affine parameters of norms, for all layers together.
#
# Each layer has few of these, so they are concatenated into one matrix S with a row per example. One product then gives
# the alignments, S g, and one the gradients, Sᵀ c, instead of several operations per layer.


class SmallGradients:
    """``add`` is called during the backward, ``gradient`` and ``alignment`` at its end."""

    def __init__(self) -> None:
        self._columns: dict[str, Tensor] = {}  # (rows, ...) each
        self._dtypes: dict[str, torch.dtype] = {}
        self._matrix: Tensor | None = None

    @property
    def keys(self) -> list[str]:
        """The names of the parameters, and the keys of what is derived from parameters."""
        return list(self._columns)

    def add(self, call: Call) -> None:
        for name, each in call.small_gradients().items():
            self._columns[name] = self._columns[name] + each if name in self._columns else each
        self._dtypes |= {name: call.arguments[k].dtype for k, name in call.names.items()}

    def gradient(self, coefficients: Tensor | None, rows: slice) -> dict[str, Tensor]:
        """Σ_j c_j ∂ℓ_j/∂P over the chosen rows, by parameter name; c = 1 by default."""
        if not self._columns:
            return {}
        chosen = self._all()[rows]
        total = chosen.sum(0) if coefficients is None else torch.mv(chosen.T, coefficients.to(chosen.dtype))
        parts = total.split([each.shape[1:].numel() for each in self._columns.values()])
        return {
            name: as_dtype(part if each.ndim == 2 else part.view(each.shape[1:]), self._dtypes[name])
            for (name, each), part in zip(self._columns.items(), parts, strict=True)
        }

    def alignment(self, direction: Mapping[str, Tensor], rows: slice) -> Tensor | None:
        """⟨∂ℓ_j/∂P, direction⟩ of the chosen rows, over the parameters in ``direction``; None if it has none."""
        if self._columns.keys().isdisjoint(direction):
            return None
        matrix, along = self._all(), []
        for name, each in self._columns.items():
            d = whole(direction[name]) if name in direction else matrix.new_zeros(each.shape[1:])
            along.append(as_dtype(d if d.ndim == 1 else d.reshape(-1), matrix.dtype))
        return torch.mv(matrix[rows], torch.cat(along))

    def _all(self) -> Tensor:
        """S, built at the first use."""
        if self._matrix is None:
            rows = [each.view(len(each), each.shape[1:].numel()) for each in self._columns.values()]
            self._matrix = torch.cat(rows, 1)
        return self._matrix


OTHER_ENGINES = "use engine='forward' or engine='double_backward', or engine='auto', which picks one"


@dataclass(eq=False, slots=True)
class Call:
    """One use of parameters: y = f(a; P)."""

    rule: Rule
    arguments: Arguments  # without the data
    names: dict[str, str]  # argument -> parameter name
    large: str | None  # the name of the rule's large parameter, if it is trainable
    a: Tensor | None
    version: int
    rows: int
    dtype: torch.dtype
    delta: Tensor | None = None
    small: dict[str, Tensor] | None = None
    group: Group | None = None
    shape: tuple[int, ...] = ()  # of the output
    layout: Layout | None = None  # None: the first dimension is the batch
    parts: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)  # what ``data`` has returned

    @property
    def is_reached(self) -> bool:
        """Whether the backward has reached this call."""
        return self.delta is not None or self.small is not None

    def set(self, gradient: Tensor, argument: str | None) -> bool:
        """Set δ, or the per-example gradients of one argument as the backward has them; whether all are set."""
        if argument is None:
            self.delta = gradient if gradient.shape == self.shape else gradient.reshape(self.shape)
            return True
        each = gradient.view(self.rows, *self.arguments[argument].shape).to(reductions_dtype(gradient.dtype))
        self.small = {**(self.small or {}), self.names[argument]: self._fold(each, slice(None))}
        return len(self.small) == len(self.names)

    def close(self) -> None:
        """Free δ and what was computed from it."""
        self.delta = self.small = None
        self.parts.clear()

    def small_gradients(self) -> dict[str, Tensor]:
        """Per-example gradients of the small parameters, (rows, ...), by name; computed once."""
        if self.small is None:
            self.small = {}
            if wanted := [k for k in self.rule.small if k in self.names]:
                delta, a = self.data(slice(None))
                found = self.rule.per_example(wanted, self.arguments, a, delta)
                self.small = {self.names[k]: self._fold(g, slice(None)) for k, g in found.items()}
        return self.small

    def alignment(self, direction: Tensor, rows: slice) -> Tensor:
        """⟨δ_j, f(a_j; direction)⟩ of the chosen rows, for the large parameter."""
        assert self.rule.tangent is not None
        delta, a = self.data(rows)
        along = as_dtype(whole(direction), self.dtype)
        if self.rule.adjoint is not None and a.numel() < delta.numel():
            # ⟨δ, f(a; G)⟩ = ⟨f(·; G)ᵀδ, a⟩: the same work with a smaller intermediate (δ of a vocabulary is large)
            return self._fold(row_dot(a, self.rule.adjoint(delta, along)), rows)
        return self._fold(row_dot(delta, self.rule.tangent(self.arguments, a, along)), rows)

    def gradient(self, coefficients: Tensor | None, rows: slice) -> dict[str, Tensor]:
        """Σ_j c_j ∂ℓ_j/∂P over the chosen rows for the large parameter, by its name; c = 1 by default."""
        if self.large is None or self.rule.large is None:
            return {}
        assert self.rule.gradient is not None
        delta, a = self.data(rows)
        found = self.rule.gradient(self.arguments, a, delta, self._spread(coefficients, rows))
        return {self.large: as_dtype(found, self.arguments[self.rule.large].dtype)}

    def data(self, rows: slice) -> tuple[Tensor, Tensor]:
        """δ and a of these examples."""
        chosen = rows.start, rows.stop  # both: without source examples the target begins at 0 too
        if chosen in self.parts:
            return self.parts[chosen]
        assert self.delta is not None
        delta = a = self._part(self.delta, rows)
        if self.a is not None and self.a._version != self.version:
            raise EngineError(
                f"the input of {next(iter(self.names.values()))!r} was changed in place after its use, which the "
                f"layerwise engine does not support: {OTHER_ENGINES}."
            )
        if self.a is not None:
            a = self._part(self.a, rows)
            a = as_dtype(a, self.dtype) if a.is_floating_point() else a
        self.parts[chosen] = delta, a
        return delta, a

    def is_nan(self, rows: slice) -> Tensor:
        """Whether the gradient at the output is NaN for one of these examples."""
        if self.small is not None:
            return torch.stack([g[rows].isnan().any() for g in self.small.values()]).any()
        assert self.delta is not None
        delta = self._part(self.delta, rows)
        return self._fold(delta.reshape(len(delta), -1).isnan().any(1).float(), rows).any()

    def _part(self, x: Tensor, rows: slice) -> Tensor:
        if self.layout is not None:
            return self.layout.part(x, rows)
        return x if rows.start is None else x[rows]

    def _fold(self, values: Tensor, rows: slice) -> Tensor:
        return values if self.layout is None else self.layout.fold(values, rows)

    def _spread(self, coefficients: Tensor | None, rows: slice) -> Tensor | None:
        return coefficients if self.layout is None else self.layout.spread(coefficients, rows)


def row_dot(delta: Tensor, tangent: Tensor) -> Tensor:
    """Σ over all but the first dimension of delta·tangent, in float32 or better; overwrites the tangent."""
    if tangent.shape != delta.shape:
        tangent = tangent.expand_as(delta).clone()
    return tangent.mul_(delta).reshape(len(delta), -1).sum(1, dtype=reductions_dtype(delta.dtype))


@dataclass(eq=False)
class Group:
    """Calls that share parameters: the gradient of a tied weight is complete when the backward has reached them all.

    is_mixed: whether a parameter is among the small ones of one call and the large one of another
    """

    calls: list[Call]
    roots: set[str] = field(default_factory=set)
    waiting: int = 0
    is_mixed: bool = False


def grouped_calls(calls: list[Call], derived: Derived) -> list[Group]:
    """Groups of calls that are connected through shared parameters."""
    owner: dict[str, Group] = {}
    for call in calls:
        merged = Group([call], derived.roots(call.names.values()))
        if not owner.keys().isdisjoint(merged.roots):
            for group in {id(g): g for name in merged.roots if (g := owner.get(name))}.values():
                merged.calls = group.calls + merged.calls
                merged.roots |= group.roots
        owner.update(dict.fromkeys(merged.roots, merged))
    groups = list({id(g): g for g in owner.values()}.values())
    for group in groups:
        if len(group.calls) > 1 or derived.used:  # the parameters of one call are different ones
            large = derived.roots(call.large for call in group.calls if call.large is not None)
            small = derived.roots(call.names[k] for call in group.calls for k in call.rule.small if k in call.names)
            group.is_mixed = not large.isdisjoint(small)
        group.waiting = len(group.calls)
        for call in group.calls:
            call.group = group
    return groups
