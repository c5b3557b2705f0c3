"""Data: people's own files and the public sets, read into ``Examples``, checked and paired into batches."""

from soseleto.data.augment import Augment
from soseleto.data.examples import Examples
from soseleto.data.noise import Noisy, by_confusion, pair_flip, symmetric
from soseleto.data.pairing import TargetCycle, source_batches, source_order, target_batch
from soseleto.data.preprocess import Preprocess
from soseleto.data.randomness import generator, seed_for

__all__ = [
    "Augment",
    "Examples",
    "Noisy",
    "Preprocess",
    "TargetCycle",
    "by_confusion",
    "generator",
    "pair_flip",
    "seed_for",
    "source_batches",
    "source_order",
    "symmetric",
    "target_batch",
]
