"""The tape of one forward pass: every call that uses a parameter, and the gradient at its output.

While it is open, the tape intercepts each torch function that the model calls. A call that takes data and a parameter,
or a tensor derived from parameters, is looked up in the rules; its input a is kept, and a hook on its output records δ
during the backward. Functions without a rule are differentiated as they are; what does not allow that raises. So no use
of a parameter is missed. Nothing is attached to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import resolve_name

from soseleto.engines.call import OTHER_ENGINES, Call, Sums, grouped_calls
from soseleto.engines.computed_parameters import KEEPS_VALUES, Derived, Found
from soseleto.engines.functions import as_linear, out_of_place, refuse_attention, rule_for, self_attention, tensors
from soseleto.engines.interface import is_differentiable
from soseleto.engines.model_state import sharded_modules, writes_to_first
from soseleto.engines.proof import Recorded
from soseleto.engines.rules import ADD, MULTIPLY, RULES, Arguments, Rule
from soseleto.errors import EngineError

Finish = Callable[[list[Call]], None]


@dataclass
class Listener:
    """Records δ of the calls that the backward reaches; ``finish`` is set for the time of our own backward."""

    finish: Finish | None = None

    def see(self, call: Call, place: int, gradients: tuple[Tensor | None, ...]) -> None:
        """The hook of the node that has made a call's output; hooks of the user's on the output come before it."""
        self.reach(call, gradients[place])

    def reach(self, call: Call, delta: Tensor | None, argument: str | None = None) -> None:
        """Record δ, or the gradient of the copies of one argument."""
        if self.finish is None or call.group is None or delta is None or not call.set(delta, argument):
            return
        call.group.waiting -= 1
        if call.group.waiting == 0:
            self.finish(call.group.calls)


class Tape(Recorded):
    """Records the calls of one forward pass of ``model``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.calls: list[Call] = []
        self.sharded = bool(sharded_modules(self.model))
        self.derived = Derived(self.model)
        for name, p in self.derived.parameters.items():
            if p.is_complex():
                raise self._no_rule(name, "it is complex")
        self.sums = Sums()
        self._listener = Listener()
        # Where our backward ends, so that it reaches every call and computes no gradient of a parameter.
        self._ends: list[tuple[GradientEdge, Call | None, str | None]] = []
        self._first = torch._C._autograd._get_sequence_nr()  # of the nodes that are made from now on

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.sharded:
            self._read_gathered((*args, *kwargs.values()))
        found = self.derived.sort(func, args, kwargs)
        self._ends += [(get_gradient_edge(v), None, None) for v in found.data if v.requires_grad and self._is_older(v)]
        if found.trainable and found.data and torch.is_grad_enabled():
            out = self._meet(func, args, kwargs, found)
        else:
            out = func(*args, **kwargs)
            if not found.trainable:
                self.sums.follow(func, args, kwargs)
            if not found.data:  # the result is derived from parameters, or a constant
                if self.sharded and found.trainable and is_differentiable(out) and func not in KEEPS_VALUES:
                    name = self.derived.key(found.trainable[0])
                    raise self._no_rule(name, f"no rule for {resolve_name(func) or func} of a sharded parameter")
                self.derived.add(func, found, args, out)
        return out

    def _is_older(self, value: Tensor) -> bool:
        # a tensor with a gradient that was made before the pass, such as inputs that require one
        return value.grad_fn is None or value.grad_fn._sequence_nr() < self._first

    def _read_gathered(self, values: Iterable[Any]) -> None:
        """Learn the whole parameters that a sharded module has gathered since."""
        if any(v.requires_grad and v.is_leaf and id(v) not in self.derived.names for v in tensors(values)):
            self.derived.read_names(self.model)

    def _meet(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], found: Found) -> Any:
        """A call that takes data, and parameters or tensors derived from them."""
        mine, rule = found.trainable, RULES.get(func)
        if rule is None and (instead := self._instead(func, args, kwargs, mine)):
            return instead()
        if rule is not None and rule.lowered:
            args = _cast_data(args)
        # Hooks on saved tensors, those of torch.utils.checkpoint, compare shapes with a second run.
        saved_hooks = torch._C._autograd._top_saved_tensors_default_hooks
        if rule is not None and rule.spread is not None and saved_hooks(True) is None:
            return self._spread(rule, rule.bind(args, kwargs))
        out = func(*args, **kwargs)
        if is_differentiable(out) or out is None:
            return self._record(func, args, kwargs, found, out)
        return out

    def _instead(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], mine: list[Tensor]
    ) -> Callable[[], Any] | None:
        """Another computation of the same result, whose functions have rules or need none."""
        if writes_to_first(func) and self.derived.is_trainable(args[0]):
            why = f"{resolve_name(func)} writes data into a tensor that is computed from it"
            raise self._no_rule(self.derived.key(args[0]), why)
        if func is F.multi_head_attention_forward:
            return lambda: self._attention(args, kwargs, mine)
        if writes_to_first(func) and RULES.get(plain := out_of_place(func)) is ADD:  # others need the data as they were
            return lambda: args[0].copy_(self.__torch_function__(plain, (), args, kwargs))
        if (linear := as_linear(func, args, kwargs, self.derived)) is not None:
            return lambda: self.__torch_function__(F.linear, (), linear)
        return None

    def _tap(self, out: Tensor, call: Call, data: list[Tensor]) -> Tensor:
        # An in-place operation on a view takes its node out of the graph, but not that of its base.
        base = out if out._base is None else out._base
        if base is not out and not (out.is_contiguous() and base.is_contiguous() and base.numel() == out.numel()):
            base = out = out.clone()
        call.shape = out.shape
        self.calls.append(call)
        self.functions.extend(call.names.values())
        if any(value.requires_grad for value in data) and base.grad_fn is not None:
            base.grad_fn.register_prehook(partial(self._listener.see, call, base.output_nr))
        else:
            self._ends.append((get_gradient_edge(base), call, None))
        return out

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], found: Found, out: Any) -> Any:
        mine, rule = found.trainable, RULES.get(func)
        if not isinstance(out, Tensor) or any(out is value for value in args):
            raise self._no_rule(self.derived.key(mine[0]), f"no rule for {resolve_name(func) or func}")
        if rule is None:
            return self._record_any(func, args, kwargs, found, out)
        if (rule is ADD or rule is MULTIPLY) and len(args) == 2 and self.derived.is_trainable(args[0]):
            args = (args[1], args[0])  # the parameter comes first: p + x
        arguments = rule.bind(args, kwargs)
        names = self._names(rule, arguments)
        if why := rule.refuse(arguments):
            raise self._no_rule(self.derived.key(mine[0]), why)
        if len(names) != len(mine) or not rule.fits(arguments):
            return self._record_any(func, args, kwargs, found, out)
        data = arguments.pop("input").detach()
        a, version = (data, data._version) if rule.keeps_input else (None, 0)
        large = None if rule.large is None else names.get(rule.large)
        call = Call(rule, arguments, names, large, a, version, len(out) if out.ndim else 0, out.dtype)
        return self._tap(out, call, found.data)

    def _record_any(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], found: Found, out: Tensor
    ) -> Tensor:
        """A function without a rule, or one that takes a parameter where none was expected."""
        out, rows = out.clone() if out._is_view() else out, out.shape[0] if out.ndim else 0
        numbers, dtype = torch.arange(rows, device=out.device), out.dtype
        for value in {id(value): value for value in found.trainable}.values():
            rule, name = rule_for(func, args, kwargs, value, out.ndim), self.derived.key(value)
            call = Call(rule, {"other": value}, {"other": name}, name, numbers, 0, rows, dtype)
            out = self._tap(out, call, found.data)
        return out

    def _names(self, rule: Rule, arguments: Arguments) -> dict[str, str]:
        """The keys of the parameters among the arguments that the rule is for."""
        taken = {k: arguments[k] for k in rule.parameters if k in arguments}
        return {k: self.derived.key(v) for k, v in taken.items() if self.derived.is_trainable(v)}

    def _spread(self, rule: Rule, arguments: Arguments) -> Tensor:
        """Call the function with a copy of its parameters for every example, whose gradients are per-example ones."""
        assert rule.spread is not None
        data, names = arguments.pop("input"), self._names(rule, arguments)
        call = Call(rule, arguments, names, None, None, 0, len(data), data.dtype, shape=data.shape)
        self.calls.append(call)
        self.functions.extend(names.values())
        copies = {k: p.repeat(len(data)) for k in rule.small if (p := arguments.get(k)) is not None}
        self._ends += [(get_gradient_edge(copies[k]), call, k) for k in names]
        return rule.spread(arguments, data, copies)

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

    @property
    def has_hooks(self) -> bool:
        """Whether the user's code may get the gradients of this pass."""
        of_modules = (m._backward_hooks or m._backward_pre_hooks for m in self.model.modules())
        of_parameters = (p._backward_hooks for p in self.derived.parameters.values())
        return Tensor.register_hook in self.functions or any(of_modules) or any(of_parameters)

    def check_rows(self, rows: int) -> None:
        """Find the layout of calls whose first dimension is not the batch; raises where it is not known."""
        for call in self.calls:
            if call.rows == rows:
                continue
            call.layout = self.sums.layout(call.shape, rows)
            if call.layout is None:
                raise self._no_rule(
                    next(iter(call.names.values())),
                    f"its output has {call.rows} rows where the batch has {rows} losses (is the batch not first?)",
                )

    def backward(self, losses: Tensor, finish: Finish, scales: Tensor, *, retain_graph: bool = False) -> None:
        """Back-propagate the losses; ``finish`` is called with each group of calls once its δ are complete.

        Source losses are not weighted here, so that an example of weight 0 still has an alignment and can recover.
        ``scales`` multiplies each example's δ; it turns the sum of the target losses into a mean.
        """
        groups = grouped_calls(self.calls, self.derived)
        self._listener.finish = finish
        try:
            edges = [edge for edge, _, _ in self._ends]
            found = torch.autograd.grad(losses, edges, scales, retain_graph, allow_unused=True) if edges else ()
            for (_, call, argument), gradient in zip(self._ends, found, strict=True):
                if call is not None:
                    self._listener.reach(call, gradient, argument)
            for group in groups:  # the backward does not reach calls whose output is not used by the losses
                reached = [call for call in group.calls if call.is_reached]
                if group.waiting and reached:
                    finish(reached)
        finally:
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
