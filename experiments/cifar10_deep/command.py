"""Command line of ``python -m experiments.cifar10_deep``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from experiments import arguments
from experiments.cifar10_deep.experiment import HELD_OUT, LINES, NOISE, Config, configuration, run_all

# Configuration fields that have a command-line option.
NUMBERS = {
    "epochs": int,
    "batch_size": int,
    "target_batch_size": int,
    "lr": float,
    "weight_decay": float,
    "schedule": str,
    "n_trusted": int,
    "n_source": int,
    "n_heldout": int,
    "views": int,
    "changes": int,
    "strength": float,
    "cutout": float,
    "precision": str,
}


def parser() -> argparse.ArgumentParser:
    made = arguments.parser("cifar10_deep", __doc__, lines=LINES, seeds=1, numbers=NUMBERS)
    made.add_argument("--noise", nargs="+", default=[str(n) for n in NOISE])
    made.add_argument("--no-cuda-graph", dest="cuda_graph", action="store_false", default=None)
    return made


def configs(given: argparse.Namespace) -> list[Config]:
    """Every combination, ordered by seed."""
    changes = arguments.changes(given, (*NUMBERS, "cuda_graph"), n_heldout=HELD_OUT)
    return [
        configuration(method, noise=arguments.number_or_name(noise), seed=seed, small=given.small, **changes)
        for seed in given.seeds
        for noise in given.noise
        for method in given.methods
    ]


def main(argv: Sequence[str] | None = None) -> None:
    arguments.run(parser(), configs, run_all, argv)
