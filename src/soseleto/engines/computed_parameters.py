"""Tensors that are functions of parameters and constants only, never of the batch: D = φ(P).

Examples are ``weight.float()``, a table of biases that is indexed, a token expanded over the batch, a weight under
weight or spectral norm. Where D meets the data it takes the place of a parameter: a rule gives Σ_j c_j ∂ℓ_j/∂D and the
alignments along a change dD. φ itself is differentiated by PyTorch, on the graph that the forward pass has built:

    gradient of P     the vector-Jacobian product of φ with the gradient of D
    dD along G        the Jacobian-vector product of φ, as the derivative of v ↦ ⟨vjp(v), G⟩, which is linear in v

φ may depend on any tensor that has no gradient. Only constants are accepted in it, so that data do not become a part of
it: buffers, frozen parameters, tensors made without another tensor (torch.arange) and functions of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soseleto.engines.autograd import add_gradients
from soseleto.engines.model_state import modules_of, parameters_of, whole
from soseleto.errors import EngineError, first_line

# Functions of their first argument that take the shape or the dtype of another one.
OF_FIRST = {Tensor.expand_as, Tensor.view_as, Tensor.reshape_as, Tensor.type_as, Tensor.to}
# Functions whose derivative does not read the parameter, which a sharded module may have freed by then.
KEEPS_VALUES = {
    F.embedding, torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__getitem__, Tensor.to, Tensor.float,
    Tensor.type_as, Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.expand, Tensor.expand_as, Tensor.unsqueeze,
    Tensor.squeeze, Tensor.transpose, Tensor.permute, Tensor.contiguous, torch.unsqueeze, torch.transpose,
}  # fmt: skip


class Found(NamedTuple):
    """The tensors among the arguments of a call."""

    trainable: list[Tensor]  # parameters and what is derived from them
    data: list[Tensor]  # all others but constants


@dataclass(frozen=True)
class _Known:
    tensor: ref[Tensor]
    version: int  # a tensor that was written to since is not known any more
    roots: frozenset[str]  # the parameters it is derived from; none for a constant

    def is_for(self, value: Tensor) -> bool:
        return self.tensor() is value and self.version == value._version


class Derived:
    """The parameters of a model, the constants, and what a forward pass derives from them."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters: dict[str, Tensor] = {}
        self.names: dict[int, str] = {}
        self.used: dict[str, Tensor] = {}  # what has met the data, by key
        self._fixed = {id(b) for module in modules_of(model) for b in module._buffers.values()}
        self._known: dict[int, _Known] = {}
        self._keys: dict[int, str] = {}
        self._roots: dict[str, frozenset[str]] = {}
        self.read_names(model)

    def read_names(self, model: nn.Module) -> None:
        for name, p in parameters_of(model).items():
            if p.requires_grad:
                self.parameters[name], self.names[id(p)] = p, name
            else:
                self._fixed.add(id(p))

    # --- which tensors are known ---

    def sort(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Found:
        found = Found([], [])
        self._sort(args[:1] if func in OF_FIRST else args, found)
        if kwargs and func not in OF_FIRST:
            self._sort(kwargs.values(), found)
        return found

    def _sort(self, values: Iterable[Any], found: Found) -> None:
        for value in values:
            if isinstance(value, Tensor):
                if id(value) in self.names:
                    found.trainable.append(value)
                elif (known := self._lookup(value)) is not None:
                    if known.roots:
                        found.trainable.append(value)
                # a number is a constant too, such as that of an expert
                elif value.requires_grad or (value.ndim > 0 and id(value) not in self._fixed):
                    found.data.append(value)
            elif isinstance(value, (list, tuple)):
                self._sort(value, found)

    def _lookup(self, value: Tensor) -> _Known | None:
        known = self._known.get(id(value))
        return known if known is not None and known.is_for(value) else None

    def add(self, func: Any, found: Found, args: tuple[Any, ...], out: Any) -> None:
        """Record the result of a call without data; the call may have written to its arguments."""
        roots = frozenset().union(*(self.roots_of(value) or self._known[id(value)].roots for value in found.trainable))
        self._add(args[0] if func is Tensor.__setitem__ else out, roots)

    def _add(self, out: Any, roots: frozenset[str]) -> None:
        if isinstance(out, Tensor):
            if not out.is_inference():
                known = _Known(ref(out), out._version, roots if out.requires_grad else frozenset())
                self._known[id(out)] = known
        elif isinstance(out, (list, tuple)):
            for value in out:
                self._add(value, roots)

    def derive(self, found: Tensor, source: Tensor) -> Tensor:
        """``found``, known as derived from what ``source`` is derived from."""
        self._add(found, self.roots_of(source))
        return found

    # --- keys: a parameter's name, or one of our own for a derived tensor that has met the data ---

    def is_trainable(self, value: object) -> bool:
        return isinstance(value, Tensor) and (id(value) in self.names or bool(self.roots_of(value)))

    def roots_of(self, value: Tensor) -> frozenset[str]:
        if (name := self.names.get(id(value))) is not None:
            return frozenset((name,))
        known = self._lookup(value)
        return frozenset() if known is None else known.roots

    def key(self, value: Tensor) -> str:
        if (name := self.names.get(id(value))) is not None:
            return name
        if id(value) not in self._keys:
            roots = self.roots_of(value)
            key = f"{min(roots)} ({len(self.used) + 1})"  # no parameter has a name with a space
            self._keys[id(value)], self.used[key], self._roots[key] = key, value, roots
        return self._keys[id(value)]

    def roots(self, keys: Iterable[str]) -> set[str]:
        """The names of the parameters behind these keys."""
        return {name for key in keys for name in self._roots.get(key, (key,))} if self._roots else set(keys)

    # --- derivatives of φ ---

    def pull(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients by key to gradients by parameter."""
        if self.used.keys().isdisjoint(found):
            return found
        total = {key: g for key, g in found.items() if key not in self.used}
        if derived := {key: g for key, g in found.items() if key in self.used}:
            tensors = [self.used[key] for key in derived]
            gradients = [g.to(t.dtype) for g, t in zip(derived.values(), tensors, strict=True)]
            names = sorted(self.roots(derived))
            add_gradients(total, dict(_without_none(names, self._vjp(tensors, names, gradients))))
        return total

    def push(self, direction: Mapping[str, Tensor], keys: Iterable[str]) -> Mapping[str, Tensor]:
        """``direction`` with the changes of these derived tensors along it."""
        derived = [key for key in keys if key in self.used] if self.used else []
        if not derived or not (names := sorted(self.roots(derived) & direction.keys())):
            return direction
        tensors = [self.used[key] for key in derived]
        with torch.enable_grad():
            vs = [torch.zeros_like(t, requires_grad=True) for t in tensors]
            linear = dict(_without_none(names, self._vjp(tensors, names, vs, create_graph=True)))
        try:
            along = [whole(direction[name]).to(g.dtype) for name, g in linear.items()]
            found = torch.autograd.grad(list(linear.values()), vs, along, allow_unused=True)
        except RuntimeError as error:
            raise _not_differentiable(names[0], error) from error
        return {**direction, **dict(_without_none(derived, found))}

    def _vjp(
        self, tensors: list[Tensor], names: list[str], gradients: list[Tensor], *, create_graph: bool = False
    ) -> tuple[Tensor | None, ...]:
        try:
            return torch.autograd.grad(
                tensors,
                [self.parameters[name] for name in names],
                gradients,
                retain_graph=True,
                create_graph=create_graph,
                allow_unused=True,
            )
        except RuntimeError as error:
            raise _not_differentiable(names[0], error) from error


def _without_none(names: Iterable[str], values: Iterable[Tensor | None]) -> Iterable[tuple[str, Tensor]]:
    return ((name, value) for name, value in zip(names, values, strict=True) if value is not None)


def _not_differentiable(name: str, error: RuntimeError) -> EngineError:
    return EngineError(
        f"the layerwise engine cannot differentiate what is computed from parameter {name!r} ({first_line(error)}): "
        "use engine='forward' or engine='double_backward', or engine='auto', which picks one."
    )
