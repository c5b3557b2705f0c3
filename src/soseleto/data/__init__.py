"""Data: user files read into ``Examples``, checked, and fed in batches."""

from soseleto.data.augment import Augment, Noisy, StrongAugment, TokenViews, Views, pair_flip, symmetric
from soseleto.data.batches import Batch, TargetCycle, generator, seed_for, source_batches
from soseleto.data.examples import Examples
from soseleto.data.feeding import Preprocess, feed
from soseleto.data.lazy import ExampleSet, LazyDataset
from soseleto.data.preparation import TablePreparation
from soseleto.data.read import MODES, Pair, as_example_set, as_examples, check_mode, check_pair, read_pair
from soseleto.data.reading import Problem, ProblemsError, Reading

__all__ = [
    "MODES",
    "Augment",
    "Batch",
    "ExampleSet",
    "Examples",
    "LazyDataset",
    "Noisy",
    "Pair",
    "Preprocess",
    "Problem",
    "ProblemsError",
    "Reading",
    "StrongAugment",
    "TablePreparation",
    "TargetCycle",
    "TokenViews",
    "Views",
    "as_example_set",
    "as_examples",
    "check_mode",
    "check_pair",
    "feed",
    "generator",
    "pair_flip",
    "read_pair",
    "seed_for",
    "source_batches",
    "symmetric",
]
