"""Where the examples of a batch lie in the tensors of a recorded call.

Most models keep the batch in the first dimension. The others come in a few layouts: time-major tensors (L, B, D),
tokens flattened to (B·L, D) or (L·B, D), rows gathered by an index as in a mixture of experts, and packed sequences,
where an index says to which example each token belongs. A layout views a call's input a and its δ as one row per
example, or keeps the rows and sums what was computed from them over the rows of each example.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class Layout(Protocol):
    """``name`` is the same for all calls with this layout, whatever their sizes."""

    @property
    def name(self) -> str: ...

    @property
    def in_order(self) -> bool:
        """Whether ``part`` holds the rows of the chosen examples and no others."""
        ...

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
class View:
    """A view of the tensor has one row per example."""

    name: str
    view: Callable[[Tensor], Tensor]
    in_order: bool = True

    def part(self, x: Tensor, examples: slice) -> Tensor:
        return self.view(x)[examples]

    def fold(self, values: Tensor, examples: slice) -> Tensor:
        return values

    def spread(self, coefficients: Tensor | None, examples: slice) -> Tensor | None:
        return coefficients


def second() -> View:
    """(L, B, ...): the batch is the second dimension."""
    return View("second", lambda x: x.transpose(0, 1))


def grouped(examples: int) -> View:
    """(B·k, ...): the rows of an example follow each other."""
    return View("grouped", lambda x: x.unflatten(0, (examples, -1)))


def tiled(examples: int) -> View:
    """(k·B, ...): example j has the rows j, j + B, j + 2B, ..."""
    return View("tiled", lambda x: x.unflatten(0, (-1, examples)).transpose(0, 1))


def flat(dims: int) -> View:
    """(n, L, ...) with n·L losses: every position is an example of its own."""
    return View("flat", lambda x: x.flatten(0, dims - 1))


@dataclass(frozen=True)
class Blocks:
    """(B·k, ...) as ``grouped``, for functions that need the batch in one dimension, such as convolutions."""

    each: int  # k
    name: str = "blocks"
    in_order: bool = True

    def part(self, x: Tensor, examples: slice) -> Tensor:
        start, stop, _ = examples.indices(len(x) // self.each)
        return x[start * self.each : stop * self.each]

    def fold(self, values: Tensor, examples: slice) -> Tensor:
        return values.unflatten(0, (-1, self.each)).sum(1)

    def spread(self, coefficients: Tensor | None, examples: slice) -> Tensor | None:
        return None if coefficients is None else coefficients.repeat_interleave(self.each)


@dataclass(frozen=True, eq=False)
class Owners:
    """An index from rows to examples; ``view`` brings the rows into the first dimension."""

    name: str
    index: Tensor  # (rows,)
    examples: int
    view: Callable[[Tensor], Tensor] = lambda x: x
    in_order: bool = False
    _chosen: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = field(default_factory=dict)

    def part(self, x: Tensor, examples: slice) -> Tensor:
        which, _ = self._choose(examples)
        x = self.view(x)
        return x if which is None else x[which]

    def fold(self, values: Tensor, examples: slice) -> Tensor:
        _, owner = self._choose(examples)
        count = self._count(examples)
        return values.new_zeros(count + 1, *values.shape[1:]).index_add_(0, owner, values)[:count]

    def spread(self, coefficients: Tensor | None, examples: slice) -> Tensor | None:
        which, owner = self._choose(examples)
        count = self._count(examples)
        if coefficients is None:
            if which is not None or count == self.examples:
                return None
            coefficients = torch.ones(count, device=owner.device)
        return torch.cat([coefficients, coefficients.new_zeros(1)])[owner]

    def _count(self, examples: slice) -> int:
        start, stop, _ = examples.indices(self.examples)
        return stop - start

    def _choose(self, examples: slice) -> tuple[Tensor | None, Tensor]:
        """Which rows belong to these examples (None: all are kept), and to which; ``count`` for a row of another one.

        Rows can be selected only with a synchronisation. In a CUDA graph, which allows none, all are kept.
        """
        start, stop, _ = examples.indices(self.examples)
        if stop - start == self.examples:
            return None, self.index
        if (start, stop) not in self._chosen:
            inside = (self.index >= start) & (self.index < stop)
            if self.index.is_cuda and torch.cuda.is_current_stream_capturing():
                self._chosen[start, stop] = None, torch.where(inside, self.index - start, stop - start)
            else:
                which = inside.nonzero().squeeze(1)
                self._chosen[start, stop] = which, self.index[which] - start
        return self._chosen[start, stop]
