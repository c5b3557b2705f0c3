"""Follows, during a forward pass, what a model does with the rows of its tensors.

Nothing is followed but what later tells to which example a row belongs: which sizes are products of others (a reshape
that merges the batch with the tokens), which index rows were gathered with, and which index adds tokens up to examples.
The number of examples is known at the end only, so that all of this is kept in terms of sizes and indices. A model that
gathers no rows pays for a look into a table per function.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Gathered:
    """Dimension ``dim`` of a tensor holds the rows ``index`` of a tensor with ``base`` rows."""

    base: int
    index: Tensor
    dim: int = 0
    has_gradient: bool = True  # whether the gathered tensor had one; without, it may be a table of constants

    def at(self, index: Tensor, dim: int) -> Gathered:
        return Gathered(self.base, self.index[index], dim, self.has_gradient)

    def narrow(self, start: int, length: int, dim: int = 0) -> Gathered:
        return Gathered(self.base, self.index[start : start + length], dim, self.has_gradient)


class RowOwners:
    """What is known about the rows of the tensors of one forward pass."""

    def __init__(self) -> None:
        self.groups: dict[int, set[int]] = defaultdict(set)  # N -> p: N rows in p groups of successive rows
        self.tiles: dict[int, set[int]] = defaultdict(set)  # N -> p: N rows that repeat with period p
        self.sums: dict[tuple[int, int], Callable[[], Tensor]] = {}  # (n, size) -> index of n rows into size rows
        self._gathered: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def of(self, x: object) -> Gathered | None:
        """How the rows of x were gathered, if they were."""
        return self._gathered.get(x) if self._gathered and isinstance(x, Tensor) else None

    def of_rows(self, x: object, out: Tensor) -> Gathered | None:
        """How the rows of x were gathered, if ``out`` has the same rows."""
        gathered = self.of(x)
        if gathered is None or out.ndim <= gathered.dim or out.shape[gathered.dim] != len(gathered.index):
            return None
        return gathered

    def among(self, values: Sequence[Any], rows: int) -> Gathered | None:
        """How the rows of the first of these arguments that has ``rows`` gathered ones were gathered."""
        if not self._gathered:
            return None
        return next((one for one in self._among(values) if one.dim == 0 and len(one.index) == rows), None)

    def keep(self, x: object, gathered: Gathered | None) -> None:
        if gathered is None or not isinstance(x, Tensor) or x.ndim <= gathered.dim:
            return
        if x.shape[gathered.dim] == len(gathered.index):
            self._gathered[x] = gathered

    def follow(self, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
        """Note a call that was made."""
        handler = HANDLERS.get(func)
        if handler is not None:
            handler(self, args, kwargs, out)
        elif self._gathered:
            self.pass_on(args, kwargs, out)

    def pass_on(self, args: Args, kwargs: Kwargs, out: Any) -> None:
        """Results with as many rows as an argument have the rows of that argument."""
        for gathered in self._among((*args, *kwargs.values())):
            for one in out if isinstance(out, (tuple, list)) else (out,):
                self.keep(one, gathered)
            return

    def _among(self, values: Sequence[Any]) -> Iterator[Gathered]:
        for value in values:
            for one in value if isinstance(value, (tuple, list)) else (value,):
                if (gathered := self.of(one)) is not None:
                    yield gathered

    def gather(self, x: Tensor, index: Tensor, dim: int, out: Any) -> None:
        """``out`` holds the rows ``index`` of x, in dimension ``dim`` of both."""
        index, gathered = index.detach(), self.of(x)
        if gathered is not None and gathered.dim == dim:
            self.keep(out, gathered.at(index, dim))
        elif gathered is None:
            self.keep(out, Gathered(x.shape[dim], index, dim, x.requires_grad))

    def is_grouped(self, n: int, examples: int) -> bool:
        """Whether n rows were made by merging the examples, in the first place, with something else."""
        return any(p == examples or (1 < p < n and self.is_grouped(p, examples)) for p in self.groups.get(n, ()))

    def is_tiled(self, n: int, examples: int) -> bool:
        return examples in self.tiles.get(n, ())


def _get(args: Args, kwargs: Kwargs, position: int, name: str, default: Any = None) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


# --- sizes ----------------------------------------------------------------------------------------------------


def _reshape(self: RowOwners, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    x = _get(args, kwargs, 0, "input")
    if x.ndim == 0 or out.ndim == 0 or x.shape[0] == out.shape[0]:
        if self._gathered:
            self.pass_on(args, kwargs, out)
        return
    many, few = (x, out) if x.shape[0] > out.shape[0] else (out, x)
    n, p = many.shape[0], few.shape[0]
    if p and n % p == 0:
        self.groups[n].add(p)
    if few.ndim > 1 and p * few.shape[1] == n:
        self.tiles[n].add(few.shape[1])
    if (gathered := self.of(x)) is not None and gathered.dim == 0 and many is out and p and n % p == 0:
        index = gathered.index.repeat_interleave(n // p)
        self.keep(out, Gathered(gathered.base, index, 0, gathered.has_gradient))


def _repeat(self: RowOwners, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    x = args[0]
    if x.ndim == out.ndim and 0 < x.shape[0] < out.shape[0]:
        self.tiles[out.shape[0]].add(x.shape[0])


def _repeat_interleave(self: RowOwners, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    x, repeats, dim = args[0], _get(args, kwargs, 1, "repeats"), _get(args, kwargs, 2, "dim")
    if dim != 0 or repeats is None or not isinstance(x, Tensor):
        return
    if isinstance(repeats, int):
        self.groups[out.shape[0]].add(x.shape[0])
        if self.of(x) is None:
            return
    index = torch.arange(x.shape[0], device=x.device).repeat_interleave(repeats, output_size=out.shape[0])
    self.gather(x, index, 0, out)


def _concatenate(self: RowOwners, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    parts, dim = _get(args, kwargs, 0, "tensors"), _get(args, kwargs, 1, "dim", 0)
    if dim == 0 and len(parts) > 1 and out.ndim:
        if len({part.shape[0] for part in parts if part.ndim}) == 1:
            self.tiles[out.shape[0]].add(parts[0].shape[0])
        found = [self.of(part) for part in parts] if self._gathered else []
        together = [one for one in found if one is not None and one.dim == 0]
        if together and len(together) == len(parts) and len({one.base for one in together}) == 1:
            index = torch.cat([one.index for one in together])
            self.keep(out, Gathered(together[0].base, index, 0, together[0].has_gradient))
    elif self._gathered:
        self.pass_on(args, kwargs, out)


def _transpose(self: RowOwners, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    if not self._gathered or (gathered := self.of(args[0])) is None:
        return
    dims = sorted(d % args[0].ndim for d in (_get(args, kwargs, 1, "dim0"), _get(args, kwargs, 2, "dim1")))
    if dims == [0, 1]:
        gathered = Gathered(gathered.base, gathered.index, 1 - gathered.dim, gathered.has_gradient)
    elif gathered.dim in dims:
        return
    self.keep(out, gathered)


def _permute(self: RowOwners, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    if not self._gathered or (gathered := self.of(args[0])) is None:
        return
    dims = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:] or kwargs["dims"]
    place = [d % args[0].ndim for d in dims].index(gathered.dim)
    if place < 2:
        self.keep(out, Gathered(gathered.base, gathered.index, place, gathered.has_gradient))


# --- rows taken by an index -------------------------------------------------------------------------------------


def _getitem(self: RowOwners, args: Args, kwargs: Kwargs, out: Any) -> None:
    x, key = args
    key = key if isinstance(key, tuple) else (key,)
    if not key or not isinstance(out, Tensor):
        return
    first = torch.as_tensor(key[0]) if isinstance(key[0], list) else key[0]
    if isinstance(first, Tensor) and first.dtype == torch.bool and first.ndim:
        if self.of(x) is None or self.of(x).dim == 0:  # type: ignore[union-attr]
            self.gather(x, first.nonzero()[:, 0], 0, out)
    elif isinstance(first, Tensor) and first.ndim == 1:
        self.gather(x, first.to(x.device), 0, out)
    elif self._gathered and (gathered := self.of(x)) is not None:
        self.keep(out, _sliced(gathered, x, key))


def _sliced(gathered: Gathered, x: Tensor, key: Args) -> Gathered | None:
    """The rows that are left of gathered ones by a key without a tensor at the first place."""
    if key[0] is ...:
        return gathered if x.ndim - len(key) + 1 > gathered.dim and not any(k is None for k in key) else None
    if gathered.dim == 0:
        return _cut(gathered, key[0], 0) if isinstance(key[0], slice) else None
    if isinstance(key[0], int):
        return _cut(gathered, key[1] if len(key) > 1 else slice(None), 0)
    if isinstance(key[0], slice) and (len(key) == 1 or isinstance(key[1], slice)):
        return _cut(gathered, key[1] if len(key) > 1 else slice(None), 1)
    return None


def _cut(gathered: Gathered, rows: Any, dim: int) -> Gathered | None:
    if not isinstance(rows, slice):
        return None
    return Gathered(gathered.base, gathered.index[rows], dim, gathered.has_gradient)


def _index_select(self: RowOwners, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    x, dim, index = args[0], _get(args, kwargs, 1, "dim"), _get(args, kwargs, 2, "index")
    if dim in (0, 1) and index.ndim == 1:
        self.gather(x, index, dim, out)


def _gather(self: RowOwners, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    x, dim, index = args[0], _get(args, kwargs, 1, "dim"), _get(args, kwargs, 2, "index")
    if dim == 0 and index.ndim:
        self.gather(x, index.reshape(index.shape[0], -1)[:, 0], 0, out)
    elif self._gathered:
        self.pass_on(args, kwargs, out)


def _sort(self: RowOwners, args: Args, kwargs: Kwargs, out: Any) -> None:
    """sort and topk of numbers, such as those of the experts of all tokens."""
    if args[0].ndim == 1:
        self.gather(args[0], out[1], 0, out[0])


def _split(self: RowOwners, args: Args, kwargs: Kwargs, out: Any) -> None:
    x, dim = args[0], _get(args, kwargs, 2, "dim", 0) % max(args[0].ndim, 1)
    sizes = _get(args, kwargs, 1, "split_size_or_sections", _get(args, kwargs, 1, "split_size"))
    if isinstance(sizes, (tuple, list)) and dim < 2 and x.shape[dim] > len(sizes):
        device, lengths = x.device, torch.tensor(sizes)
        self.sums[x.shape[dim], len(sizes)] = lambda: _segments(lengths, device)
    if not self._gathered or (gathered := self.of(x)) is None:
        return
    start = 0
    for part in out:
        if dim == 0 and gathered.dim == 0:
            self.keep(part, gathered.narrow(start, part.shape[0]))
            start += part.shape[0]
        else:
            self.keep(part, gathered)


def _segments(lengths: Tensor, device: torch.device) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(lengths.cpu()).to(device)


def _pack(self: RowOwners, args: Args, kwargs: Kwargs, out: Any) -> None:
    """pack_padded_sequence: the rows of all sequences at time 0, then at time 1, and so on."""
    (x, _, batch_first), (data, sizes) = args, out
    dim = 0 if batch_first else 1
    rows = packed_rows(sizes).to(x.device)
    gathered = self.of(x)
    if gathered is None:
        self.keep(data, Gathered(x.shape[dim], rows))
    elif gathered.dim == dim:
        self.keep(data, gathered.at(rows, 0))


def _pad(self: RowOwners, args: Args, kwargs: Kwargs, out: Any) -> None:
    data, sizes, batch_first = args[:3]
    if (gathered := self.of(data)) is not None:
        self.keep(out[0], gathered.narrow(0, int(sizes[0]), 0 if batch_first else 1))


def packed_rows(batch_sizes: Tensor) -> Tensor:
    """The place of each row of a PackedSequence among its sequences."""
    return torch.cat([torch.arange(n) for n in batch_sizes.tolist()])


# --- rows added up by an index ----------------------------------------------------------------------------------


def _add_up(self: RowOwners, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """index_add and its relatives: the result has the rows of the first argument."""
    x, dim, index = args[0], _get(args, kwargs, 1, "dim"), _get(args, kwargs, 2, "index")
    if dim is not None and x.ndim and index.numel() == max(index.shape, default=0):
        index, size = index.detach().flatten(), x.shape[dim]
        self.sums[len(index), size] = lambda: index
    self.keep(out, self.of(x))


def _segment_reduce(self: RowOwners, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    x, lengths, offsets = args[0], kwargs.get("lengths"), kwargs.get("offsets")
    lengths = lengths if lengths is not None else None if offsets is None else offsets.diff()
    if lengths is not None and lengths.ndim == 1:
        device = x.device
        self.sums[x.shape[0], len(lengths)] = lambda: _segments(lengths, device)


HANDLERS: dict[Any, Callable[[RowOwners, Args, Kwargs, Any], None]] = {
    getattr(owner, name): handler
    for handler, names in {
        _reshape: ("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"),
        _repeat: ("repeat", "tile"),
        _repeat_interleave: ("repeat_interleave",),
        _concatenate: ("cat", "concat", "concatenate"),
        _transpose: ("transpose", "swapaxes", "swapdims"),
        _permute: ("permute",),
        _getitem: ("__getitem__",),
        _index_select: ("index_select",),
        _gather: ("gather",),
        _sort: ("sort", "topk"),
        _split: ("split", "split_with_sizes"),
        _pack: ("_pack_padded_sequence",),
        _pad: ("_pad_packed_sequence",),
        _add_up: tuple(
            name + suffix
            for name in ("index_add", "index_reduce", "index_copy", "scatter", "scatter_add", "scatter_reduce")
            for suffix in ("", "_")
        ),
        _segment_reduce: ("segment_reduce",),
    }.items()
    for name in names
    for owner in (torch, Tensor)
    if hasattr(owner, name)
}
