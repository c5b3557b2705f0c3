"""Duplicates between two data sets: identical bytes, or resized or recompressed images."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_BITS_APART = 6  # of 64: largest Hamming distance between the hashes of copies
_MEAN_APART = 6.0  # of 255: largest mean difference between copies, at 16 x 16
_WORST_APART = 40.0  # of 255: largest difference at any value between copies, at 16 x 16
_ROWS = 512


class Duplicate(NamedTuple):
    first: int  # row in the first set
    second: int  # row in the second set
    exact: bool


def duplicates(first: Tensor, second: Tensor, *, exact: bool = False) -> list[Duplicate]:
    """For each row of ``first`` the rows of ``second`` that are the same example; with ``exact`` no near duplicates.

    Exact duplicates have identical bytes. uint8 images (N, C, H, W) are near duplicates if their difference hashes
    (9 x 8 grey, 64 bits) are at most 6 bits apart and, to confirm, their 16 x 16 thumbnails differ little.
    """
    if first.shape[1:] != second.shape[1:] or first.dtype != second.dtype:
        return []
    found = _exact(first, second)
    if exact or first.ndim != 4 or first.dtype != torch.uint8:
        return found
    known = {(one.first, one.second) for one in found}
    return found + [pair for pair in _near(first, second) if pair[:2] not in known]


def twin_share(rows: Tensor) -> float:
    """The share of rows that equal another row of the same set: how often two examples coincide by chance."""
    short = np.fromiter((int.from_bytes(digest[:8]) for digest in _digests(rows)), np.uint64, len(rows))
    counts = np.unique(short, return_counts=True)[1]
    return int(counts[counts > 1].sum()) / len(rows)


def _exact(first: Tensor, second: Tensor) -> list[Duplicate]:
    places: dict[bytes, list[int]] = {}
    for row, digest in enumerate(_digests(first)):
        places.setdefault(digest, []).append(row)
    return [Duplicate(at, row, True) for row, digest in enumerate(_digests(second)) for at in places.get(digest, ())]


def _digests(rows: Tensor) -> Iterator[bytes]:
    for piece in torch.split(rows, 4096):
        content = piece.cpu().contiguous().view(len(piece), -1).view(torch.uint8).numpy()
        for row in content:
            yield hashlib.blake2b(row.tobytes(), digest_size=16).digest()


def _near(first: Tensor, second: Tensor) -> list[Duplicate]:
    hashes, others = difference_hash(first), difference_hash(second)
    small, small_others = _thumbnails(first), _thumbnails(second)
    found = []
    for start in range(0, len(hashes), _ROWS):
        # Of ±1 vectors: the product is 64 minus twice the number of differing bits.
        agree = hashes[start : start + _ROWS] @ others.T
        rows, columns = (agree >= 64 - 2 * _BITS_APART).nonzero(as_tuple=True)
        for at in torch.split(torch.arange(len(rows)), 65536):
            apart = (small[start + rows[at]].float() - small_others[columns[at]].float()).abs()
            same = (apart.mean(1) <= _MEAN_APART) & (apart.amax(1) <= _WORST_APART)
            found += [
                Duplicate(start + int(r), int(c), False) for r, c in zip(rows[at][same], columns[at][same], strict=True)
            ]
    return found


def difference_hash(images: Tensor) -> Tensor:
    """(N, 64) of ±1: whether each of 9 x 8 grey cells is brighter than its right neighbour."""
    made = []
    for piece in torch.split(images, _ROWS):
        grey = piece.cpu().float().mean(1, keepdim=True)
        cells = F.interpolate(grey, size=(8, 9), mode="bilinear", antialias=True, align_corners=False)
        made.append(torch.where(cells[..., :-1] > cells[..., 1:] + 0.5, 1.0, -1.0).flatten(1))
    return torch.cat(made)


def _thumbnails(images: Tensor) -> Tensor:
    """(N, C·256) uint8: 16 x 16 thumbnails."""
    made = []
    for piece in torch.split(images, _ROWS):
        small = F.interpolate(piece.cpu().float(), size=(16, 16), mode="bilinear", antialias=True, align_corners=False)
        made.append(small.round_().clamp_(0, 255).to(torch.uint8).flatten(1))
    return torch.cat(made)
