"""One backward pass from which gradients and alignments are collected, layer by layer."""

from __future__ import annotations

import torch
from torch import Tensor

from soseleto.engines.autograd import add_gradients, times
from soseleto.engines.call import Call, SmallGradients
from soseleto.engines.interface import Direction, ToDirection, reductions_dtype, refuse_sharded
from soseleto.engines.tape import Tape


class Sweep:
    """Collects gradients and alignments during one backward pass; each group of calls is finished once.

    coefficients: None: no source gradient.
    direction: None: ``to_direction`` makes it from the gradient of the target rows, which share the pass.
    gradient: to which the source gradient is added.
    """

    def __init__(
        self,
        tape: Tape,
        coefficients: Tensor | None,
        direction: Direction | None = None,
        *,
        to_direction: ToDirection = lambda found: found,
        to_return: ToDirection = lambda found: found,
        gradient: dict[str, Tensor] | None = None,
    ) -> None:
        refuse_sharded(tape.sharded and coefficients is not None, "a source gradient in the same pass")
        self.tape, self.direction = tape, direction
        self.to_direction, self.to_return = to_direction, to_return
        self.source_gradient: dict[str, Tensor] = {} if gradient is None else gradient
        self.target_gradient: dict[str, Tensor] = {}
        self._alignments: list[Tensor] = []  # of the layers, summed at the end in one operation
        self._small = SmallGradients()
        self._smalls: list[SmallGradients] = []
        self._cast: dict[torch.dtype, Tensor] = {}
        self._wants_gradient = coefficients is not None
        # One number for all, as ``expand`` makes it, multiplies at the end; its value is not read.
        is_one_for_all = coefficients is not None and len(coefficients) > 1 and coefficients.stride(0) == 0
        self._factor = coefficients[0] if is_one_for_all and coefficients is not None else None
        self._c = None if is_one_for_all else coefficients

    @torch.no_grad()
    def run(self, losses: Tensor, n_source: int, *, retain_graph: bool = False) -> None:
        """Back-propagate ``losses``: n_source source losses, then the target's if they share this pass."""
        self._source, self._target = slice(0, n_source), slice(n_source, None)
        scales = torch.ones_like(losses)  # source losses are summed, target losses averaged
        if n_source < len(losses):
            scales[n_source:] = 1.0 / (len(losses) - n_source)
        self.tape.backward(losses, self._finish, scales, retain_graph=retain_graph)
        self._align(self._small, self._direction([], self._small))
        dtype = reductions_dtype(losses.dtype)
        none = torch.zeros(n_source, dtype=dtype, device=losses.device)
        self.alignment = torch.stack(self._alignments).sum(0) if self._alignments else none
        for small in self._smalls if self._wants_gradient else ():
            self._add(small.gradient(self._c, self._source))
        if self._factor is not None:
            self.source_gradient = times(self.source_gradient, self._factor)

    def _finish(self, calls: list[Call]) -> None:
        group = calls[0].group
        small = SmallGradients() if group is not None and group.is_mixed else self._small
        for call in calls:
            small.add(call)
        mine = None if small is self._small else small
        direction = self._direction(calls, mine)
        for call in calls:
            if call.large is not None:
                if call.large in direction:
                    self._alignments.append(call.alignment(direction[call.large], self._source))
                if self._wants_gradient:
                    self._add(call.gradient(self._cast_to(call.dtype), self._source))
            call.close()
        if mine is not None:
            self._align(mine, direction)

    def _align(self, small: SmallGradients, direction: Direction) -> None:
        if (part := small.alignment(direction, self._source)) is not None:
            self._alignments.append(part)
        self._smalls.append(small)

    def _add(self, found: dict[str, Tensor]) -> None:
        add_gradients(self.source_gradient, self.tape.derived.pull(found))

    def _direction(self, calls: list[Call], small: SmallGradients | None) -> Direction:
        """The direction for the parameters of a group, and for what is derived from them."""
        derived, keys = self.tape.derived, [call.large for call in calls if call.large is not None]
        if small is not None:
            keys += small.keys
        if self.direction is not None:
            return derived.push(self.direction, keys)
        found: dict[str, Tensor] = {}
        for call in calls:
            add_gradients(found, call.gradient(None, self._target))
        if small is not None:
            add_gradients(found, small.gradient(None, self._target))
        found = derived.pull(found)
        self.target_gradient.update(self.to_return(found))
        return derived.push(self.to_direction(found), keys) if found else {}

    def _cast_to(self, dtype: torch.dtype) -> Tensor | None:
        """c in a call's precision, cast once per precision."""
        if self._c is None:
            return None
        if dtype not in self._cast:
            self._cast[dtype] = self._c.to(dtype)
        return self._cast[dtype]
