"""The tape of one forward pass: every call that uses a parameter, and the gradient at its output.

While it is open, the tape intercepts each torch function that the model calls. A call that takes a parameter is looked
up in the rules; its input a is kept, and an identity operation after its output records δ during the backward. A call
without a rule raises, so that no use of a parameter is missed. Nothing is attached to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from soseleto.engines.contract import is_differentiable, reductions_dtype
from soseleto.engines.held_batch_norm import HELD
from soseleto.engines.layerwise import kernels
from soseleto.engines.layerwise.any_function import as_linear, rule_for
from soseleto.engines.layerwise.attention import refuse_attention, self_attention
from soseleto.engines.layerwise.copies import (
    BROADCAST,
    LARGE_COPIES,
    OWN_ROWS,
    SMALL,
    SMALL_COPIES,
    batch_form,
    is_mask,
    over_batch,
    promotes,
    replaced,
    tensors,
    writes_to_first,
)
from soseleto.engines.layerwise.derived import Arguments as Found
from soseleto.engines.layerwise.derived import Derived
from soseleto.engines.layerwise.gram import gram_alignment, gram_pays
from soseleto.engines.layerwise.layouts import Layout
from soseleto.engines.layerwise.numbered_rows import NUMBERED, number_rows
from soseleto.engines.layerwise.per_example import each_example, each_pays
from soseleto.engines.layerwise.recurrent import CELLS, LAYERS, all_times, one_time
from soseleto.engines.layerwise.row_owners import Gathered, RowOwners
from soseleto.engines.rules import ADD, LINEAR, MULTIPLY, RULES, Arguments, Rule
from soseleto.engines.shards import sharded_modules, whole
from soseleto.errors import EngineError

_RULES = RULES | NUMBERED | HELD
OTHER_ENGINES = "use engine='forward' or engine='double_backward', or engine='auto', which picks one"


@dataclass(eq=False)
class Call:
    """One use of parameters: y = f(a; P)."""

    rule: Rule
    arguments: Arguments  # without the data
    names: dict[str, str]  # argument -> parameter name
    a: Tensor | None
    version: int
    rows: int
    dtype: torch.dtype
    delta: Tensor | None = None
    small: dict[str, Tensor] | None = None
    group: Group | None = None
    shape: tuple[int, ...] = ()  # of the output
    gathered: Gathered | None = None  # how the rows of the input were gathered
    layout: Layout | None = None  # None: the first dimension is the batch

    @property
    def large(self) -> str | None:
        """The name of the rule's large parameter, if it is trainable."""
        return None if self.rule.large is None else self.names.get(self.rule.large)

    @property
    def is_reached(self) -> bool:
        """Whether the backward has reached this call."""
        return self.delta is not None or self.small is not None

    def set_small(self, gradients: Iterable[Tensor]) -> None:
        """Per-example gradients of the small parameters, computed by the backward itself."""
        self.small = {
            name: self._fold(g.view(self.rows, *self.arguments[k].shape).to(reductions_dtype(g.dtype)), slice(None))
            for (k, name), g in zip(self.names.items(), gradients, strict=True)
        }

    def close(self) -> None:
        """Free δ and what was computed from it."""
        self.delta = self.small = None

    def small_gradients(self) -> dict[str, Tensor]:
        """Per-example gradients of the small parameters, (rows, ...), by name; computed once."""
        if self.small is None:
            self.small = {}
            wanted = [k for k in self.rule.small if k in self.names]
            if wanted and self.rule.per_example is not None:
                delta, a = self.data(slice(None))
                found = self.rule.per_example(self.arguments, a, delta)
                self.small = {self.names[k]: self._fold(found[k], slice(None)) for k in wanted}
        return self.small

    def alignment(self, direction: Mapping[str, Tensor], rows: slice) -> Tensor | None:
        """⟨δ_j, f(a_j; direction)⟩ of the chosen rows, for the large parameter; None if ``direction`` lacks it."""
        if self.large is None or self.large not in direction:
            return None
        assert self.rule.tangent is not None
        delta, a = self.data(rows)
        along = whole(direction[self.large]).to(self.dtype)
        if self.rule.adjoint is not None and a.numel() < delta.numel():
            # ⟨δ, f(a; G)⟩ = ⟨f(·; G)ᵀδ, a⟩: the same work with a smaller intermediate (δ of a vocabulary is large)
            return self._fold(row_dot(a, self.rule.adjoint(delta, along)), rows)
        return self._fold(row_dot(delta, self.rule.tangent(self.arguments, a, along)), rows)

    def alignment_with(self, target: slice, rows: slice) -> Tensor | None:
        """``alignment`` of the chosen rows with the target rows' gradient; None if the product with G is less work."""
        if self.rule is not LINEAR or (self.layout is not None and not self.layout.in_order):
            return None
        (delta, a), (target_delta, target_a) = self.data(rows), self.data(target)
        if not gram_pays(a, delta, len(target_a)):
            return None
        return self._fold(gram_alignment(delta, a, target_delta, target_a), rows)

    def both(
        self, direction: Mapping[str, Tensor], coefficients: Tensor, rows: slice
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """``alignment`` and ``gradient`` of the chosen rows if one product gives both for less work, else None."""
        if self.large is None or self.large not in direction:
            return None
        delta, a = self.data(rows)
        if not len(delta):
            return None
        along, each = whole(direction[self.large]).to(self.dtype), self._spread(coefficients, rows)
        assert each is not None
        c = each.to(self.dtype)
        if self.rule is LINEAR and each_pays(a, delta):
            alignment, found = each_example(delta, a, along, c)
        elif fused := self._fused(delta, a, along, c):
            alignment, found = fused
        else:
            return None
        q = self._fold(alignment.to(reductions_dtype(self.dtype)), rows)
        return q, {self.large: self._in_own_dtype(found)}

    def _fused(self, delta: Tensor, a: Tensor, along: Tensor, c: Tensor) -> tuple[Tensor, Tensor] | None:
        """Alignment and gradient where one kernel multiplies, sums and scales; None where it cannot be used."""
        rule = self.rule
        if not kernels.usable(delta):
            return None
        assert rule.tangent is not None
        assert rule.gradient is not None
        a_is_smaller = a.is_floating_point() and a.numel() < delta.numel()
        if a_is_smaller and rule.adjoint is not None:
            scaled = rule.adjoint(delta, along)
            if not kernels.usable(scaled, a):
                return None
            return kernels.dot_and_scale(scaled, a, c), rule.gradient(self.arguments, scaled, delta, None)
        scaled = rule.tangent(self.arguments, a, along)
        if not kernels.usable(scaled, delta):
            return None
        if a_is_smaller:
            return kernels.dot_and_scale(scaled, delta, None), rule.gradient(self.arguments, a, delta, c)
        return kernels.dot_and_scale(scaled, delta, c), rule.gradient(self.arguments, a, scaled, None)

    def _in_own_dtype(self, gradient: Tensor) -> Tensor:
        assert self.rule.large is not None
        return gradient.to(self.arguments[self.rule.large].dtype)

    def gradient(self, coefficients: Tensor | None, rows: slice) -> dict[str, Tensor]:
        """Σ_j c_j ∂ℓ_j/∂P over the chosen rows for the large parameter, by its name; c = 1 by default."""
        if self.large is None:
            return {}
        assert self.rule.large is not None
        assert self.rule.gradient is not None
        delta, a = self.data(rows)
        found = self.rule.gradient(self.arguments, a, delta, self._spread(coefficients, rows))
        return {self.large: self._in_own_dtype(found)}

    def data(self, rows: slice) -> tuple[Tensor, Tensor]:
        """δ and a of these examples."""
        assert self.delta is not None
        if self.a is None:
            delta = self._part(self.delta, rows)
            return delta, delta
        if self.a._version != self.version:
            raise EngineError(
                f"the input of {next(iter(self.names.values()))!r} was changed in place after its use, which the "
                f"layerwise engine does not support: {OTHER_ENGINES}."
            )
        a = self._part(self.a, rows)
        return self._part(self.delta, rows), a.to(self.dtype) if a.is_floating_point() else a

    def _part(self, x: Tensor, rows: slice) -> Tensor:
        return x[rows] if self.layout is None else self.layout.part(x, rows)

    def _fold(self, values: Tensor, rows: slice) -> Tensor:
        return values if self.layout is None else self.layout.fold(values, rows)

    def _spread(self, coefficients: Tensor | None, rows: slice) -> Tensor | None:
        return coefficients if self.layout is None else self.layout.spread(coefficients, rows)


def row_dot(delta: Tensor, tangent: Tensor) -> Tensor:
    """Σ over all but the first dimension of delta·tangent, in float32 or better; overwrites the tangent."""
    if tangent.shape != delta.shape:
        tangent = tangent.expand_as(delta).clone()
    return tangent.mul_(delta).sum(list(range(1, delta.ndim)), dtype=reductions_dtype(delta.dtype))


@dataclass(eq=False)
class Group:
    """Calls that share parameters: the gradient of a tied weight is complete when the backward has reached them all.

    is_mixed: whether a parameter is among the small ones of one call and the large one of another
    """

    calls: list[Call]
    roots: set[str] = field(default_factory=set)
    waiting: int = 0
    is_mixed: bool = False


Finish = Callable[[list[Call]], None]


@dataclass
class _Listener:
    """Counts the calls that the backward has reached; ``finish`` is set for the time of our own backward."""

    finish: Finish | None = None

    def reached(self, call: Call) -> None:
        assert self.finish is not None
        assert call.group is not None
        call.group.waiting -= 1
        if call.group.waiting == 0:
            self.finish(call.group.calls)


class _Tap(torch.autograd.Function):
    """The identity; its backward records δ. ``anchor`` is the input that our backward differentiates to."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, anchor: Tensor, call: Call, listener: _Listener) -> Tensor:
        ctx.call, ctx.listener = call, listener
        return y.detach()  # shares memory and version with y; in-place operations may follow

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, None, None, None]:
        call, listener = ctx.call, ctx.listener
        if listener.finish is None:  # a backward that the tape did not start
            return delta, None, None, None
        call.delta = delta
        listener.reached(call)
        return delta, None, None, None


class _Spread(torch.autograd.Function):
    """A copy of each parameter for every example, so that the layer's own backward gives per-example gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: Call, listener: _Listener, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.listener = call, listener
        return tuple(p.detach().repeat(call.rows) for p in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        call, listener = ctx.call, ctx.listener
        if listener.finish is None:  # a backward that the tape did not start
            return (None, None, None, *(g.view(call.rows, -1).sum(0) for g in gradients))
        call.set_small(gradients)
        listener.reached(call)
        return (None,) * (3 + len(gradients))


@dataclass
class Tape(TorchFunctionMode):
    """Records the calls of one forward pass of ``model``."""

    model: nn.Module
    calls: list[Call] = field(default_factory=list)
    copies: bool = True  # whether functions that broadcast may get copies of parameters over the first dimension

    def __post_init__(self) -> None:
        super().__init__()
        self.sharded = bool(sharded_modules(self.model))
        self.derived = Derived(self.model)
        for name, p in self.derived.parameters.items():
            if p.is_complex():
                raise self._no_rule(name, "it is complex")
        self.functions: list[
            Hashable
        ] = []  # all that the model called, whether under no_grad, and for which parameters
        self.dtypes: set[torch.dtype] = set()  # of all results that have a gradient
        self.owners = RowOwners()
        self.has_copies = False
        self._copies: dict[tuple[str, int, int, int], Tensor] = {}
        self._listener = _Listener()
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        self._anchor = torch.zeros((), device=device, requires_grad=True)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.functions.append(func if torch.is_grad_enabled() else (func,))
        if self.sharded:
            self._read_gathered((*args, *kwargs.values()))
        found = self.derived.sort(func, args, kwargs)
        if found.trainable and found.data and torch.is_grad_enabled():
            out = self._meet(func, args, kwargs, found.trainable)
        else:
            out = func(*args, **kwargs)
            if not found.trainable:
                self.owners.follow(func, args, kwargs, out)
            if not found.data:
                self._derive(func, args, found, out)
        if isinstance(out, Tensor) and out.requires_grad:
            self.dtypes.add(out.dtype)
        return out

    @property
    def in_backward(self) -> bool:
        """Whether a backward that the tape has started is under way."""
        return self._listener.finish is not None

    def _read_gathered(self, values: Iterable[Any]) -> None:
        """Learn the whole parameters that a sharded module has gathered since."""
        if any(v.requires_grad and v.is_leaf and id(v) not in self.derived.names for v in tensors(values)):
            self.derived.read_names(self.model)

    def _derive(self, func: Any, args: tuple[Any, ...], found: Found, out: Any) -> None:
        """Record the result of a call without data."""
        if not found.trainable:
            self.derived.add_constant(func, found, args, out)
        elif self.sharded and is_differentiable(out):
            name = self.derived.key(found.trainable[0])
            raise self._no_rule(name, f"no rule for {resolve_name(func) or func} of a sharded parameter")
        else:
            self.derived.add(func, found, args, out)

    def _meet(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], mine: list[Tensor]) -> Any:
        """A call that takes data, and parameters or tensors derived from them."""
        if writes_to_first(func) and self.derived.is_trainable(args[0]):
            raise self._no_rule(
                self.derived.key(args[0]), f"{resolve_name(func)} writes data to what is computed from it"
            )
        if func is F.multi_head_attention_forward:
            return self._attention(args, kwargs, mine)
        if (cell := LAYERS.get(func) or CELLS.get(func)) is not None:
            with self:  # the linear layers inside are recorded
                return one_time(cell, *args, **kwargs) if func in CELLS else all_times(cell, self.owners, *args)
        if (form := batch_form(func, args, kwargs)) and self._takes_copies(func, args, mine, *form):
            return self._with_copies(func, args, kwargs, mine, *form)
        if (linear := as_linear(func, args, kwargs, self.derived)) is not None:
            return self.__torch_function__(F.linear, (), linear)
        rule = _RULES.get(func)
        if rule is not None and rule.lowered:
            given, args = args, _cast_data(args)
            self.owners.keep(args[0] if args else None, self.owners.of(given[0] if given else None))
        if rule is not None and rule.spread is not None and not _has_saved_tensor_hooks():
            return self._spread(rule, rule.bind(args, kwargs))
        out = func(*args, **kwargs)
        if is_differentiable(out) or out is None:
            return self._record(func, args, kwargs, mine, out)
        return out

    def _takes_copies(self, func: Any, args: tuple[Any, ...], mine: list[Tensor], rows: int, ndim: int) -> bool:
        if func in BROADCAST and not self.copies:
            return False
        own_rows = all(value.ndim == ndim and len(value) == rows for value in mine)
        return own_rows or not (_has_saved_tensor_hooks() or any(promotes(value, tensors(args)) for value in mine))

    def _with_copies(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], mine: list[Tensor], rows: int, ndim: int
    ) -> Any:
        """Call the function with a copy of its parameters for every example."""
        self.has_copies |= func in BROADCAST
        size = max(t.numel() for t in tensors((*args, *kwargs.values()))) // max(rows, 1)
        gathered = self.owners.among((*args, *kwargs.values()), rows)
        copies = {id(value): self._copy(value, rows, ndim, size, gathered) for value in mine}
        args, kwargs = replaced((args, kwargs), lambda t: copies.get(id(t), t))
        if func is Tensor.__setitem__ and is_mask(args[1]):
            args = (*args[:2], args[2].expand(args[0].shape)[args[1]])
        out = func(*args, **kwargs)
        self.owners.keep(out, gathered)
        return out

    def _copy(self, value: Tensor, rows: int, ndim: int, size: int, gathered: Gathered | None) -> Tensor:
        """One copy for all functions that use the same parameter with the same number of dimensions."""
        value = value if (one := self.derived.one_row(value)) is None else one
        key = self.derived.key(value)
        which = key, rows, ndim, id(gathered)
        if which not in self._copies:
            self.functions.append(key)
            own = value.ndim == ndim and len(value) == rows > 1
            rule = OWN_ROWS if own else SMALL_COPIES if value.numel() * SMALL <= size else LARGE_COPIES
            numbers = torch.arange(rows, device=value.device) if own else None
            call = Call(rule, {"other": value}, {"other": key}, numbers, 0, rows, value.dtype, gathered=gathered)
            self._copies[which] = self._tap(over_batch(value, rows, ndim), call)
        return self._copies[which]

    def _tap(self, out: Tensor, call: Call) -> Tensor:
        call.shape = out.shape
        self.calls.append(call)
        tapped: Tensor = _Tap.apply(out, self._anchor, call, self._listener)  # type: ignore[no-untyped-call]
        self.owners.keep(tapped, call.gathered)
        return tapped

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], mine: list[Tensor], out: Any) -> Any:
        rule, keys = _RULES.get(func), [self.derived.key(value) for value in mine]
        self.functions.extend(keys)
        if not isinstance(out, Tensor) or any(out is value for value in args):
            raise self._no_rule(keys[0], f"no rule for {resolve_name(func) or func}")
        if rule is None:
            return self._record_any(func, args, kwargs, mine, out)
        if (rule is ADD or rule is MULTIPLY) and len(args) == 2 and self.derived.is_trainable(args[0]):
            args = (args[1], args[0])  # the parameter comes first: p + x
        arguments = rule.bind(args, kwargs)
        names = self._names(rule, arguments)
        why = rule.refuse(arguments)
        if len(names) != len(mine) or (why and (rule is ADD or rule is MULTIPLY)):
            return self._record_any(func, args, kwargs, mine, out)
        if why:
            raise self._no_rule(keys[0], why)
        gathered = self.owners.of_rows(arguments["input"], out)
        data = number_rows(arguments, out) if func in NUMBERED else arguments.pop("input")
        a = None if rule is ADD else data.detach()
        version, rows = 0 if a is None else a._version, out.shape[0] if out.ndim else 0
        return self._tap(out, Call(rule, arguments, names, a, version, rows, out.dtype, gathered=gathered))

    def _record_any(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], mine: list[Tensor], out: Tensor
    ) -> Tensor:
        """A function without a rule, or one that takes a parameter where none was expected."""
        rows = out.shape[0] if out.ndim else 0
        numbers, dtype = torch.arange(rows, device=out.device), out.dtype
        gathered = self.owners.among((*args, *kwargs.values()), rows)
        for value in {id(value): value for value in mine}.values():
            rule, name = rule_for(func, args, kwargs, value), self.derived.key(value)
            call = Call(rule, {"other": value}, {"other": name}, numbers, 0, rows, dtype, gathered=gathered)
            out = self._tap(out, call)
        return out

    def _names(self, rule: Rule, arguments: Arguments) -> dict[str, str]:
        """The keys of the parameters among the arguments that the rule is for."""
        given = {k: arguments.get(k) for k in rule.parameters}
        return {k: self.derived.key(v) for k, v in given.items() if v is not None and self.derived.is_trainable(v)}

    def _spread(self, rule: Rule, arguments: Arguments) -> Tensor:
        """Call the function with a copy of its parameters for every example."""
        assert rule.spread is not None
        data = arguments.pop("input")
        names = self._names(rule, arguments)
        self.functions.extend(names.values())
        call = Call(rule, arguments, names, None, 0, len(data), data.dtype)
        call.shape, call.gathered = data.shape, self.owners.of(data)
        self.calls.append(call)
        copies = _Spread.apply(self._anchor, call, self._listener, *(arguments[k] for k in names))  # type: ignore[no-untyped-call]
        frozen = {k: p.repeat(len(data)) for k in rule.small if (p := arguments.get(k)) is not None and k not in names}
        out = rule.spread(arguments, data, frozen | dict(zip(names, copies, strict=True)))
        self.owners.keep(out, call.gathered)
        return out

    def _attention(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], mine: list[Tensor]) -> Any:
        if why := refuse_attention(args, kwargs):
            raise self._no_rule(self.derived.key(mine[0]), why)
        with self:  # the projections inside are recorded as linear layers
            return self_attention(*args, **kwargs)

    def _no_rule(self, key: str, why: str) -> EngineError:
        parameter = min(self.derived.roots([key]))
        path = parameter.rpartition(".")[0]
        module = self.model.get_submodule(path)
        where = f"{type(module).__name__} {path!r}" if path else f"{type(module).__name__} (the model itself)"
        return EngineError(
            f"the layerwise engine cannot treat {where}, parameter {parameter!r}: {why}; {OTHER_ENGINES}."
        )

    def check_rows(self, rows: int) -> None:
        """Raise unless the first dimension of every recorded output is the batch, or the layout is known."""
        for call in self.calls:
            if call.rows != rows and call.layout is None:
                raise self._no_rule(
                    next(iter(call.names.values())),
                    f"its output has {call.rows} rows where the batch has {rows} losses (is the batch not first?)",
                )

    def backward(
        self, losses: Tensor, finish: Finish, *, scales: Tensor | None = None, retain_graph: bool = False
    ) -> None:
        """Back-propagate the losses; ``finish`` is called with each group of calls once its δ are complete.

        Source losses are not weighted here, so that an example of weight 0 still has an alignment and can recover.
        ``scales`` multiplies each example's δ; it turns the sum of the target losses into a mean.
        """
        groups = _group(self.calls, self.derived)
        self._listener.finish = finish
        torch.autograd.grad(
            losses,
            [self._anchor],
            grad_outputs=torch.ones_like(losses) if scales is None else scales,
            retain_graph=retain_graph,
            allow_unused=True,
        )
        for group in groups:  # the backward does not reach calls whose output is not used by the losses
            reached = [call for call in group.calls if call.is_reached]
            if group.waiting and reached:
                finish(reached)
        self._listener.finish = None
        for call in self.calls:
            call.close()
            call.group = None


def _cast_data(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Cast the data as autocast is about to, so that the tape keeps the same tensor that autograd saves."""
    data = args[0] if args else None
    if not isinstance(data, Tensor) or not data.is_floating_point() or data.dtype == torch.float64:
        return args
    if not torch.is_autocast_enabled(data.device.type):
        return args
    return data.to(torch.get_autocast_dtype(data.device.type)), *args[1:]


def _has_saved_tensor_hooks() -> bool:
    """Whether hooks on saved tensors are active; those of torch.utils.checkpoint compare shapes with a second run."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _group(calls: list[Call], derived: Derived) -> list[Group]:
    """Groups of calls that are connected through shared parameters."""
    owner: dict[str, Group] = {}
    for call in calls:
        merged = Group([call])
        roots = derived.roots(call.names.values())
        for group in {id(g): g for name in roots if (g := owner.get(name))}.values():
            merged.calls = group.calls + merged.calls
            merged.roots |= group.roots
        merged.roots |= roots
        owner.update(dict.fromkeys(merged.roots, merged))
    groups = list({id(g): g for g in owner.values()}.values())
    for group in groups:
        large = derived.roots(call.large for call in group.calls if call.large is not None)
        small = derived.roots(call.names[k] for call in group.calls for k in call.rule.small if k in call.names)
        group.is_mixed = not large.isdisjoint(small)
        group.waiting = len(group.calls)
        for call in group.calls:
            call.group = group
    return groups
