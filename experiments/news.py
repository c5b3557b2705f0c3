"""The texts, from ``ROOT/text``, and which of them are trusted, held out, or part of the source.

NoisyAG-News has 10,000 news texts labelled by people, about a fifth wrongly, with the right label of each, and 7,600
test texts. The Hausa news titles were labelled by rules; 2,045 of them were checked, and 3,170 were not.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from experiments.data import data_root
from experiments.measures import UNKNOWN
from soseleto.data import generator
from soseleto.errors import DataError, UsageError

NAME = "noisy-text"
AG_NEWS = ("World", "Sports", "Business", "Sci/Tech")
HAUSA = ("Africa", "Health", "Nigeria", "Politics", "World")


@dataclass(frozen=True, eq=False)
class News:
    """Training texts with the labels they were given and the right ones, and test texts with the right ones.

    truth: ``UNKNOWN`` where a label was never checked
    """

    texts: tuple[str, ...]
    labels: Tensor
    truth: Tensor
    test_texts: tuple[str, ...]
    test_labels: Tensor
    classes: tuple[str, ...]


@lru_cache(maxsize=2)
def read(noise: str, root: str | Path | None = None) -> News:
    """The news of one kind of noise, one of ``READERS``."""
    return READERS[noise](data_root(root) / "text")


def read_ag_news(folder: Path) -> News:
    train, test = (_rows(folder / f"noisy_ag_news_{split}.csv", ",", "text") for split in ("train", "test"))
    names = tuple(str(index) for index in range(len(AG_NEWS)))
    return News(
        tuple(row["text"] for row in train),
        _indices([row["label"] for row in train], names),
        _indices([row["gt"] for row in train], names),
        tuple(row["text"] for row in test),
        _indices([row["gt"] for row in test], names),
        AG_NEWS,
    )


def read_hausa(folder: Path) -> News:
    """Checked titles with the label that the rules gave them, followed by those that were not checked."""
    names = ("train_clean", "train_clean_noisy_labels", "train_noisy", "test")
    checked, before, unchecked, test = (_rows(folder / f"hausa_{name}.tsv", "\t", "news_title") for name in names)
    truth = torch.full((len(checked) + len(unchecked),), UNKNOWN)
    truth[: len(checked)] = _indices([row["label"] for row in checked], HAUSA)
    return News(
        tuple(row["news_title"] for row in (*checked, *unchecked)),
        _indices([row["label"] for row in (*before, *unchecked)], HAUSA),
        truth,
        tuple(row["news_title"] for row in test),
        _indices([row["label"] for row in test], HAUSA),
        HAUSA,
    )


READERS: Mapping[str, Callable[[Path], News]] = {"ag_news": read_ag_news, "hausa": read_hausa}


def _rows(path: Path, delimiter: str, column: str) -> list[dict[str, str]]:
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file, delimiter=delimiter))
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing: put the news there, or name another folder with --data-root.") from error
    if not rows or column not in rows[0]:
        raise DataError(f"{path} has no column {column!r}: fetch it again.")
    return rows


def _indices(labels: Sequence[str], classes: Sequence[str]) -> Tensor:
    return torch.tensor([classes.index(label) for label in labels])


def split(
    truth: Tensor, *, n_trusted: int, n_heldout: int, n_source: int | None, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Indices drawn by the seed: trusted and held-out texts among the checked ones, and the others as the source.

    The first 100 of 500 trusted texts are the 100 trusted texts of the same seed.
    """
    order = torch.randperm(len(truth), generator=generator(seed, f"{NAME}/split"))
    checked = order[truth[order] != UNKNOWN]
    if n_trusted + n_heldout >= len(checked):
        wanted = f"{n_trusted} trusted and {n_heldout} held-out texts"
        raise UsageError(f"{wanted} are too many for {len(checked)} checked ones: take fewer.")
    trusted, heldout = checked[:n_trusted], checked[n_trusted : n_trusted + n_heldout]
    free = torch.ones(len(truth), dtype=torch.bool)
    free[torch.cat([trusted, heldout])] = False
    return trusted, heldout, order[free[order]][:n_source]
