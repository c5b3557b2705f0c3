"""The layout of each recorded call, once the number of losses is known.

Sizes and what ``RowOwners`` has seen leave one candidate for most calls. Where several are possible, as for a
time-major tensor of as many times as examples, ``settle`` decides by the definition: under losses multiplied by c, the
δ of the rows of example j are multiplied by c_j. The proof checks the result in any case, for every layout of a call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from soseleto.engines.layerwise.call import Call
from soseleto.engines.layerwise.layouts import Blocks, Layout, Owners, flat, grouped, second, tiled
from soseleto.engines.layerwise.row_owners import RowOwners
from soseleto.engines.layerwise.tape import Tape
from soseleto.engines.rules import ADD, EMBEDDING, LAYER_NORM, LINEAR, MULTIPLY, RMS_NORM

ALL = slice(None)
Unclear = list[tuple[Call, list[Layout | None]]]  # calls with several candidates


@dataclass
class Layouts:
    """What proofs have found out about a model's layouts; a call is known by the names of its parameters."""

    _decided: dict[tuple[str, ...], str] = field(default_factory=dict)
    _proved: set[tuple[tuple[str, ...], str]] = field(default_factory=set)

    def find(self, tape: Tape, examples: int) -> Unclear:
        """Set the layout of every call; returns the calls with several candidates."""
        several: Unclear = []
        for call in tape.calls:
            decided = self._decided.get(_site(call)) if self._decided else None
            if decided is None and _is_plain(call, examples):
                continue
            found = list(_candidates(call, examples, tape.owners))
            if found:
                call.layout = next((one for one in found if _name(one) == decided), found[0])
            if len(found) > 1:
                several.append((call, found))
        return several

    def is_new(self, tape: Tape) -> bool:
        """Whether a call has a layout that was not proved for it."""
        return not self._used(tape) <= self._proved

    def proved(self, tape: Tape, examples: int) -> None:
        """Keep the layouts for calls with other sizes, which may have more candidates."""
        for call in tape.calls:
            if call.layout is not None and examples > 1:  # one example has all rows, in any layout
                self._decided.setdefault(_site(call), call.layout.name)
        self._proved |= self._used(tape)

    def _used(self, tape: Tape) -> set[tuple[tuple[str, ...], str]]:
        return {
            (_site(call), _name(call.layout))
            for call in tape.calls
            if call.layout is not None or (self._decided and _site(call) in self._decided)
        }

    def settle(self, tape: Tape, losses: Tensor, several: Unclear, tolerance: float) -> None:
        """Choose among the candidates; a call for which they cannot be told apart keeps its first."""
        if not several:
            return
        c = torch.linspace(0.5, 1.5, len(losses), dtype=losses.dtype, device=losses.device)
        calls = {id(call): call for call, _ in several}
        sizes = _row_norms(tape, losses, torch.ones_like(c), calls), _row_norms(tape, losses, c, calls)
        for call, found in several:
            if id(call) not in sizes[0]:  # not reached by the backward
                continue
            one, scaled = (norms[id(call)] for norms in sizes)
            right = [layout for layout in found if _error(layout, one, scaled, c) <= tolerance]
            if 0 < len(right) < len(found):
                call.layout = right[0]
                self._decided[_site(call)] = _name(right[0])


def _name(layout: Layout | None) -> str:
    return "first" if layout is None else layout.name


def _site(call: Call) -> tuple[str, ...]:
    return tuple(name.partition(" ")[0] for name in call.names.values())  # without the number of a derived tensor


def _is_plain(call: Call, examples: int) -> bool:
    """Whether the batch can be nowhere but in the first dimension."""
    shape = call.shape
    return call.rows == examples and call.gathered is None and (len(shape) < 3 or shape[1] != examples)


def _candidates(call: Call, examples: int, seen: RowOwners) -> Iterator[Layout | None]:
    shape, lead = call.shape, _leading(call)
    n = call.rows
    from_index = list(_from_index(call, examples, seen, lead))
    index_first = call.gathered is not None and call.gathered.has_gradient and call.gathered.dim == 0
    if index_first:
        yield from from_index
    if n == examples:
        yield None
    if not index_first:
        yield from from_index
    if lead > 1 and shape[1] == examples:
        yield second()
    if n > examples and (examples == 1 or seen.is_grouped(n, examples)):
        yield grouped(examples) if _is_per_position(call) else Blocks(n // examples)
    if n > examples and seen.is_tiled(n, examples) and _is_per_position(call):
        yield tiled(examples)
    if n < examples and lead > 1 and n * shape[1] == examples and _may_lose_a_dimension(call):
        yield flat(2)
    yield from _from_sums(call, examples, seen, lead)


def _from_index(call: Call, examples: int, seen: RowOwners, lead: int) -> Iterator[Owners]:
    """Layouts of rows that were gathered from a tensor whose own rows are known."""
    gathered = call.gathered
    if gathered is None or gathered.dim >= lead:
        return
    base, index = gathered.base, gathered.index
    view = _identity if gathered.dim == 0 else _swap
    if base == examples:
        yield Owners("gathered", index, examples, view)
    if base > examples and seen.is_grouped(base, examples):
        yield Owners("gathered from groups", index // (base // examples), examples, view)
    if base > examples and seen.is_tiled(base, examples):
        yield Owners("gathered from tiles", index % examples, examples, view)
    if (base, examples) in seen.sums:
        yield Owners("gathered from sums", seen.sums[base, examples]()[index], examples, view)


def _from_sums(call: Call, examples: int, seen: RowOwners, lead: int) -> Iterator[Owners]:
    """Layouts of rows that an index adds up to examples; a language model has one loss less than it has tokens."""
    if not seen.sums:
        return
    for dims in range(1, min(lead, 2) + 1):
        n = math.prod(call.shape[:dims])
        for missing in (0, 1):
            if (n - missing, examples) in seen.sums:
                index = seen.sums[n - missing, examples]()
                index = torch.cat([index, index[-1:]]) if missing else index
                yield Owners(f"sum {dims} {missing}", index, examples, _identity if dims == 1 else _merge)


def _identity(x: Tensor) -> Tensor:
    return x


def _swap(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


def _merge(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


def _is_per_position(call: Call) -> bool:
    """Whether the function treats all leading positions separately, so that they may be split into dimensions."""
    return call.rule in (LINEAR, EMBEDDING, LAYER_NORM, RMS_NORM, ADD, MULTIPLY)


def _leading(call: Call) -> int:
    """The number of leading dimensions of the output over which the parameters are the same."""
    shape, lead = call.shape, 1
    if call.rule is LINEAR or call.rule is EMBEDDING:
        lead = len(shape) - 1
    elif call.rule is LAYER_NORM or call.rule is RMS_NORM:
        lead = len(shape) - len(call.arguments["normalized_shape"])
    elif call.rule is ADD or call.rule is MULTIPLY:
        own = list(call.arguments["other"].shape)
        while own and own[0] == 1:
            own.pop(0)
        lead = len(shape) - len(own)
    if call.a is not None and call.a.shape[:lead] != shape[:lead]:
        return 1
    return max(lead, 1)


def _may_lose_a_dimension(call: Call) -> bool:
    """A parameter with as many dimensions as the data cannot be combined with fewer."""
    return call.rule not in (ADD, MULTIPLY) or call.arguments["other"].ndim < len(call.shape)


def _row_norms(tape: Tape, losses: Tensor, scales: Tensor, wanted: dict[int, Call]) -> dict[int, Tensor]:
    """The norms of δ over what is not a leading dimension, for some calls."""
    found: dict[int, Tensor] = {}

    def finish(calls: list[Call]) -> None:
        for call in calls:
            if id(call) in wanted and call.delta is not None:
                delta = call.delta.to(torch.promote_types(call.delta.dtype, torch.float32))
                found[id(call)] = delta.reshape(*call.shape[: _leading(call)], -1).norm(dim=-1)
            call.close()

    tape.backward(losses, finish, scales=scales, retain_graph=True)
    return found


def _error(layout: Layout | None, one: Tensor, scaled: Tensor, c: Tensor) -> float:
    """How far the rows' δ are from being multiplied by c, in units of δ."""
    expected = c
    if layout is not None:
        one, scaled = layout.part(one, ALL), layout.part(scaled, ALL)
        spread = layout.spread(c, ALL)
        assert spread is not None
        expected = spread
    expected = expected.to(one.dtype).view(-1, *[1] * (one.ndim - 1))
    return float((scaled - expected * one).norm() / one.norm().clamp_min(torch.finfo(one.dtype).tiny))
