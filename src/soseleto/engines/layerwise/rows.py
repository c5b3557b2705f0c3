"""Which rows of a recorded call belong to which example, where the first dimension is not the batch.

Two layouts have a rule here, and both are checked by the proof; models with others take the forward engine.

    grouped     (B·k, ...): the k rows of an example follow each other, as with tokens flattened to (B·L, D), windows
                of an image, and frames of a video
    packed      (N, ...) or (1, N, ...): all sequences in one row, with token losses that an index sums to examples
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

Index = Callable[[], Tensor]


class Layout(Protocol):
    @property
    def name(self) -> str: ...

    def part(self, x: Tensor, examples: slice) -> Tensor:
        """The rows of x that belong to the chosen examples."""
        ...

    def fold(self, values: Tensor, examples: slice) -> Tensor:
        """Sums over the rows of each chosen example; ``values`` has one entry for each row of ``part``."""
        ...

    def spread(self, coefficients: Tensor | None, examples: slice) -> Tensor | None:
        """An example's coefficient for each row of ``part``; None stands for ones."""
        ...


@dataclass(frozen=True)
class Grouped:
    each: int  # k
    name: str = "grouped"

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
    name: str = "packed"

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


@dataclass
class Sums:
    """The indices by which a forward pass adds rows up, by the numbers of rows before and after."""

    indices: dict[tuple[int, int], Index] = field(default_factory=dict)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note a call that is made."""
        if (handler := HANDLERS.get(func)) is not None:
            handler(self.indices, args, kwargs)

    def layout(self, shape: tuple[int, ...], leading: int, examples: int) -> Layout | None:
        """The layout of an output of this shape, whose first ``leading`` dimensions may hold rows."""
        for dims in range(1, min(leading, 2) + 1):
            n = math.prod(shape[:dims])
            for missing in (0, 1):  # a language model has one loss less than it has tokens
                if (n - missing, examples) in self.indices:
                    index = self.indices[n - missing, examples]()
                    return Packed(torch.cat([index, index[-1:]]) if missing else index, examples, dims)
        if shape and examples and shape[0] > examples and shape[0] % examples == 0:
            return Grouped(shape[0] // examples)
        return None


def _get(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def _add_up(indices: dict[tuple[int, int], Index], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """index_add and its relatives."""
    x, dim, index = args[0], _get(args, kwargs, 1, "dim"), _get(args, kwargs, 2, "index")
    if dim == 0 and x.ndim and index.numel() == max(index.shape, default=0):
        index = index.detach().flatten()
        indices[len(index), len(x)] = lambda: index


def _split(indices: dict[tuple[int, int], Index], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    x, sizes = args[0], _get(args, kwargs, 1, "split_size_or_sections")
    if isinstance(sizes, (tuple, list)) and not _get(args, kwargs, 2, "dim"):
        indices[len(x), len(sizes)] = lambda: _segments(torch.tensor(sizes), x.device)


def _segment_reduce(indices: dict[tuple[int, int], Index], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    x, lengths = args[0], kwargs.get("lengths")
    if lengths is not None and lengths.ndim == 1:
        indices[len(x), len(lengths)] = lambda: _segments(lengths, x.device)


def _segments(lengths: Tensor, device: torch.device) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(lengths.cpu()).to(device)


_ADDING = ("index_add", "scatter_add", "scatter_reduce")
HANDLERS: dict[Any, Callable[[dict[tuple[int, int], Index], tuple[Any, ...], Mapping[str, Any]], None]] = {
    **{
        getattr(owner, name + suffix): _add_up
        for name in _ADDING
        for owner, suffix in ((torch, ""), (Tensor, ""), (Tensor, "_"))
    },
    **dict.fromkeys((torch.split, Tensor.split, torch.split_with_sizes, Tensor.split_with_sizes), _split),
    torch.segment_reduce: _segment_reduce,
}
