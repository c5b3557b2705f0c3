"""One backward pass from which gradients and alignments are collected, layer by layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from soseleto.engines.autograd import add_gradients, times
from soseleto.engines.call import Call, SmallGradients
from soseleto.engines.interface import Coefficients, Direction, ToDirection, reductions_dtype, refuse_sharded
from soseleto.engines.tape import Tape

ALL_ROWS = slice(None)


def alignments(
    tape: Tape,
    losses: Tensor,
    direction: Direction,
    see: Callable[[Call | SmallGradients], None] = lambda _: None,
    *,
    retain_graph: bool = False,
) -> Tensor:
    """The alignments of all rows, by one backward pass; ``see`` gets all that has a gradient while it has its δ."""
    small, parts = SmallGradients(), Parts(losses)

    def finish(calls: list[Call]) -> None:
        for call in calls:
            see(call)
            parts.add(call.alignment(tape.derived.push(direction, call.names.values()), ALL_ROWS))
            small.add(call)
            call.close()

    tape.backward(losses, finish, retain_graph=retain_graph)
    see(small)
    parts.add(small.alignment(tape.derived.push(direction, small.keys), ALL_ROWS))
    return parts.total()


class Sweep:
    """Collects gradients and alignments during one backward pass; each group of calls is finished once."""

    def __init__(
        self,
        to_direction: ToDirection,
        coefficients: Coefficients,
        direction: Direction | None = None,
        to_return: ToDirection = lambda found: found,
    ) -> None:
        self.to_direction = to_direction
        self.direction = direction  # None: computed from the target rows of the same pass
        self.to_return = to_return
        self.target_gradient: dict[str, Tensor] = {}
        self.source_gradient: dict[str, Tensor] = {}
        self._small = SmallGradients()
        self._smalls: list[SmallGradients] = []
        self._cast: dict[torch.dtype, Tensor] = {}
        self._late: list[tuple[Call, Tensor]] = []  # calls and their δ, where coefficients depend on the alignment
        self._make_coefficients = coefficients if callable(coefficients) else None
        if isinstance(coefficients, Tensor):
            self._use(coefficients)

    def _use(self, coefficients: Tensor) -> None:
        """One number for all, as ``expand`` makes it, multiplies at the end; its value is not read."""
        is_one_for_all = len(coefficients) > 1 and coefficients.stride(0) == 0
        self._factor = coefficients[0] if is_one_for_all else None
        self._c = None if is_one_for_all else coefficients

    def run(self, tape: Tape, losses: Tensor, n_source: int) -> None:
        """Back-propagate ``losses``: n_source source losses, then the target's if they share this pass."""
        refuse_sharded(tape.sharded, "a source gradient in the same pass")
        self._source, self._target = slice(0, n_source), slice(n_source, None)
        scales = torch.ones_like(losses)  # source losses are summed, target losses averaged
        if n_source < len(losses):
            scales[n_source:] = 1.0 / (len(losses) - n_source)
        self._parts, self._derived = Parts(losses[:n_source]), tape.derived
        tape.backward(losses, self._finish, scales=scales)
        with torch.no_grad():
            self._align(self._small, self._direction([], self._small))
        self.alignment = self._parts.total()
        if self._make_coefficients is not None:
            self._use(self._make_coefficients(self.alignment))
        for call, delta in self._late:
            call.delta = delta
            self._add(call.gradient(self._coefficients(call.dtype), self._source))
            call.close()
        for small in self._smalls:
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
            self._parts.add(call.alignment(direction, self._source))
            if self._make_coefficients is None:
                self._add(call.gradient(self._coefficients(call.dtype), self._source))
            elif call.large is not None and call.delta is not None:
                self._late.append((call, call.delta))
            call.close()
        if mine is not None:
            self._align(mine, direction)

    def _align(self, small: SmallGradients, direction: Direction) -> None:
        self._parts.add(small.alignment(direction, self._source))
        self._smalls.append(small)

    def _add(self, found: dict[str, Tensor]) -> None:
        add_gradients(self.source_gradient, self._derived.pull(found))

    def _direction(self, calls: list[Call], small: SmallGradients | None) -> Direction:
        """The direction for the parameters of a group, and for what is derived from them."""
        keys = [call.large for call in calls if call.large is not None]
        if small is not None:
            keys += small.keys
        if self.direction is not None:
            return self._derived.push(self.direction, keys)
        found: dict[str, Tensor] = {}
        for call in calls:
            add_gradients(found, call.gradient(None, self._target))
        if small is not None:
            add_gradients(found, small.gradient(None, self._target))
        found = self._derived.pull(found)
        self.target_gradient.update(self.to_return(found))
        return self._derived.push(self.to_direction(found), keys) if found else {}

    def _coefficients(self, dtype: torch.dtype) -> Tensor | None:
        """c in a call's precision, cast once per precision."""
        if self._c is None:
            return None
        if dtype not in self._cast:
            self._cast[dtype] = self._c.to(dtype)
        return self._cast[dtype]


class Parts:
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
