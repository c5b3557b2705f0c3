"""Two sets in one where not both are in memory: the second's examples follow the first's, with labels of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import tee
from typing import NoReturn

import torch
from torch import Tensor

from soseleto.data import structure
from soseleto.data.batches import source_batches
from soseleto.data.examples import ExampleSet
from soseleto.data.randomness import generator
from soseleto.data.stream import Stream
from soseleto.data.structure import Inputs
from soseleto.errors import UsageError


@dataclass(frozen=True, eq=False)
class Joined:
    """The examples of ``first``, then those of ``second`` with ``second_labels`` in place of their own."""

    first: ExampleSet
    second: ExampleSet
    second_labels: Tensor

    reads_ahead = True
    truth = None
    ids = None
    paths = None

    @property
    def classes(self) -> tuple[str, ...] | None:
        return self.first.classes

    @property
    def labels(self) -> Tensor:
        return torch.cat([self.first.labels.cpu(), self.second_labels])

    @property
    def device(self) -> torch.device:
        return self.first.device

    @property
    def nbytes(self) -> int:
        return self.first.nbytes + self.second.nbytes

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def id_of(self, index: int) -> str:
        at = range(len(self))[index]
        n = len(self.first)
        return self.first.id_of(at) if at < n else f"probe {self.second.id_of(at - n)}"

    def take(self, index: Tensor) -> tuple[Inputs, Tensor]:
        return next(self.read([index]))

    def read(
        self, batches: Iterable[Tensor], *, seed: int = 0, purpose: str = "read"
    ) -> Iterator[tuple[Inputs, Tensor]]:
        n = len(self.first)
        own, ahead, behind = tee(batches, 3)
        # A part without examples is not asked for: a stream would have to go back to its first one.
        firsts = (part for batch in ahead if len(part := batch[batch < n]))
        seconds = (part for batch in behind if len(part := batch[batch >= n] - n))
        of_first = self.first.read(firsts, seed=seed, purpose=purpose)
        of_second = self.second.read(seconds, seed=seed, purpose=f"{purpose}/joined")
        for batch in own:
            index = batch.cpu()
            if not len(index):
                yield self.first.take(index)
                continue
            parts = [next(of_first)] if bool((index < n).any()) else []
            if bool((index >= n).any()):
                other, _ = next(of_second)
                planted = self.second_labels[index[index >= n] - n].to(self.device)
                parts.append((structure.to_device(other, self.device), planted))
            back = (index >= n).long().argsort(stable=True).argsort()  # undoes the order: first's rows, then second's
            yield _rows(parts, back)

    def batches(self, size: int, *, seed: int, epoch: int, device: torch.device | str = "cpu") -> Sequence[Tensor]:
        if isinstance(self.first, Stream):
            return self._along_stream(self.first, size, seed, epoch)
        return source_batches(len(self), size, seed=seed, epoch=epoch)

    def _along_stream(self, stream: Stream, size: int, seed: int, epoch: int) -> list[Tensor]:
        """The stream's batches in their order, with the examples of the second set spread evenly over them.

        As many as a set in any order has; where the stream has fewer, its last ones are divided.
        """
        n, m = len(stream), len(self.second)
        count = -(-(n + m) // size)
        batches = list(stream.batches(-(-n // count), seed=seed, epoch=epoch))
        missing = count - len(batches)
        if missing:
            halves = [half for batch in batches[-missing:] for half in batch.tensor_split(2)]
            batches = [*batches[:-missing], *halves]
            batches += [torch.empty(0, dtype=torch.int64)] * (count - len(batches))  # of the second set alone
        others = n + torch.randperm(m, generator=generator(seed, "stream/joined", epoch))
        return [torch.cat(both) for both in zip(batches, others.tensor_split(count), strict=True)]

    def sample(self) -> Inputs:
        return self.first.sample()

    def sample_labels(self) -> Tensor:
        return torch.cat([self.first.sample_labels().cpu(), self.second_labels])

    def subset(self, index: Tensor | Sequence[int]) -> NoReturn:
        raise AssertionError("a set with probes is not divided")

    def to(self, device: torch.device | str) -> Joined:
        return replace(self, first=self.first.to(device), second=self.second.to(device))

    def fingerprint(self) -> str:
        return f"{self.first.fingerprint()} {self.second.fingerprint()}"


def _rows(parts: list[tuple[Inputs, Tensor]], back: Tensor) -> tuple[Inputs, Tensor]:
    """The rows of both parts, in the order ``back``."""
    if len(parts) < 2:
        return parts[0]
    one, other = (structure.shape_of(inputs) for inputs, _ in parts)
    if one != other:
        raise UsageError(
            f"probes join a source batch of examples of shape {one} with target examples of shape {other}: pad all to "
            "one length in collate_fn, or write probes=None."
        )
    inputs, labels = structure.change(lambda tensor: tensor[back.to(tensor.device)], structure.concatenate(parts))
    return inputs, labels
