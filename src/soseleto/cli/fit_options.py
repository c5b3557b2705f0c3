"""The options of ``soseleto fit``, and what they say about the data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from soseleto.cli.choices import folds_for
from soseleto.cli.texts import with_tokenizer
from soseleto.data import Pair, Reading, check_mode, column_of, read_labels_before
from soseleto.errors import UsageError, counted, did_you_mean
from soseleto.training.data import found_before

RECIPES = ("plain", "strong")
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """The options of ``soseleto fit``; None stands for the default by the data."""

    source: Path
    target: Path
    out: Path
    test: Path | None
    unlabelled: Path | None
    mode: str
    recipe: str
    model: str | None
    weights: str | None
    train: str | None
    lora: int | None
    batch_norm: str | None
    epochs: int | None
    batch_size: int | None
    target_batch_size: int | None
    lr: float | None
    weight_decay: float | None
    weight_step: float | None
    target_share: float | None
    engine: str
    augment: str | None
    probes: float | None
    suspect_precision: float
    guarantee: bool
    labels_before: str | None
    doubt_labels: bool | None
    alignments: str | None
    dtype: str | None
    folds: int | None
    baselines: bool
    keep: str
    final: str | None
    checkpoint_every: float
    micro_batch_size: int | None
    non_finite: str
    seed: int
    device: str
    skip_bad: bool
    max_tokens: int | None
    reading: Reading


def check_values(options: FitOptions) -> None:
    """Raise for numbers that no data could make right, before any are read."""
    rates = {"--lr": options.lr, "--weight-decay": options.weight_decay, "--weight-step": options.weight_step}
    for name, value in rates.items():
        least = "0 or more" if name == "--weight-decay" else "above 0"
        if value is not None and not (math.isfinite(value) and (value > 0 or (value == 0 and least == "0 or more"))):
            raise UsageError(f"{name} must be {least}, got {value}: leave it out for the default.")
    for name, value in {"--target-share": options.target_share, "--probes": options.probes}.items():
        if value is not None and not (0.0 < value < 1.0 or (name == "--probes" and value == 0.0)):
            none = ", or be 0 for none" if name == "--probes" else ""
            raise UsageError(
                f"{name} must be a share between 0 and 1{none}, got {value}: leave it out for the default."
            )
    sizes = {
        "--epochs": options.epochs,
        "--batch-size": options.batch_size,
        "--target-batch-size": options.target_batch_size,
        "--micro-batch-size": options.micro_batch_size,
    }
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise UsageError(f"{name} must be at least 1, got {size}: leave it out for the default.")
    dtype_of(options.dtype)
    if options.recipe not in RECIPES:
        raise UsageError(
            f"unknown recipe {options.recipe!r}{did_you_mean(options.recipe, RECIPES)}: choose plain or strong."
        )
    if options.unlabelled is not None:
        _check_unlabelled(options.recipe, options.mode)


def _check_unlabelled(recipe: str, mode: str) -> None:
    check_mode(mode)
    if recipe != "strong":
        raise UsageError(
            f"--unlabelled has no effect with --recipe {recipe}, which learns from labels: write --recipe strong, or "
            "leave it out."
        )
    if mode == "transfer":
        raise UsageError(
            "--unlabelled has no effect with --mode transfer, which learns from labelled examples: leave it out."
        )


def reading_of(options: FitOptions) -> Reading:
    """With the tokenizer of a pretrained text model, and the column of earlier labels, which is not a feature."""
    reading = with_tokenizer(options.reading, options.source, options.model, options.max_tokens)
    if options.unlabelled is not None and reading.tokenizer is not None:
        raise UsageError(
            f"--unlabelled is for images and tables, and the model {options.model} reads texts: leave it out."
        )
    if options.labels_before is None:
        return reading
    if options.mode == "transfer":
        raise UsageError("--labels-before has no effect in transfer mode, which has no suspects: leave it out.")
    column = column_of(options.labels_before, options.target.expanduser(), options.reading)
    return replace(reading, before_column=column)


def labels_before_of(options: FitOptions, pair: Pair) -> Tensor | None:
    if options.labels_before is None:
        return found_before(pair.labels_before, pair.target)
    return read_labels_before(options.labels_before, pair.target, options.target.expanduser(), reading_of(options))


def dtype_of(name: str | None) -> torch.dtype | None:
    """For autocast; float32 is how the model runs without it."""
    if name is not None and name not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}{did_you_mean(name, DTYPES)}: choose from {', '.join(DTYPES)}.")
    return None if name in (None, "float32") else getattr(torch, name)


def folds_of(options: FitOptions, n_target: int) -> int:
    if options.folds is None:
        return 0 if options.test is not None or not options.baselines else folds_for(n_target)
    if options.folds < 0 or options.folds == 1:
        raise UsageError(f"--folds must be 0 or at least 2, got {options.folds}.")
    if options.folds > n_target // 2:
        raise UsageError(
            f"--folds is {options.folds}, but the target has only {counted(n_target, 'example')}: take fewer folds."
        )
    return options.folds
