"""Command line of ``python -m experiments.pretrained_images``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from experiments import arguments
from experiments.pretrained_images.experiment import HELD_OUT, LINES, Config, configuration, run_all

# Configuration fields that have a command-line option.
NUMBERS = {
    "noise": str,
    "size": int,
    "crop": int,
    "batch_norm": str,
    "epochs": int,
    "batch_size": int,
    "target_batch_size": int,
    "lr": float,
    "weight_decay": float,
    "schedule": str,
    "n_source": int,
    "n_trusted": int,
    "n_heldout": int,
    "precision": str,
    "folds": int,
}


def parser() -> argparse.ArgumentParser:
    made = arguments.parser("pretrained_images", __doc__, lines=LINES, seeds=5, numbers=NUMBERS)
    made.add_argument("--model", metavar="FOLDER", help="by default DATA-ROOT/pretrained/efficientnet-lite0")
    made.add_argument("--no-cuda-graph", dest="cuda_graph", action="store_false", default=None)
    return made


def configs(given: argparse.Namespace) -> list[Config]:
    """Every combination, ordered by seed."""
    changes = arguments.changes(given, (*NUMBERS, "model", "cuda_graph"), n_heldout=HELD_OUT)
    return [
        configuration(method, seed=seed, small=given.small, **changes)
        for seed in given.seeds
        for method in given.methods
    ]


def main(argv: Sequence[str] | None = None) -> None:
    arguments.run(parser(), configs, run_all, argv)
