"""Command line of ``python -m experiments.noisy_text``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from experiments import arguments
from experiments.noisy_text.configuration import ENCODERS, LINES, TRUSTED, Config, configuration, lines_of
from experiments.noisy_text.experiment import run_all
from soseleto.errors import UsageError

# Configuration fields that have a command-line option.
NUMBERS = {
    "epochs": int,
    "batch_size": int,
    "target_batch_size": int,
    "lr": float,
    "weight_decay": float,
    "schedule": str,
    "max_tokens": int,
    "n_heldout": int,
    "precision": str,
    "folds": int,
}


def parser() -> argparse.ArgumentParser:
    made = arguments.parser("noisy_text", __doc__, lines=LINES, seeds=5, numbers=NUMBERS)
    made.add_argument("--noise", nargs="+", default=list(TRUSTED), help=f"of {', '.join(TRUSTED)}; all by default")
    made.add_argument("--trusted", nargs="+", type=int, help="numbers of trusted texts, instead of the table's")
    made.add_argument("--encoder", nargs="+", default=list(ENCODERS), help="trained, frozen, or both, as by default")
    made.add_argument("--model", metavar="FOLDER", help="the pretrained model, by default DATA-ROOT/pretrained/minilm")
    return made


def configs(given: argparse.Namespace) -> list[Config]:
    """Every combination, ordered by seed; logistic regression is on frozen embeddings alone."""
    changes = arguments.changes(given, (*NUMBERS, "model"), n_heldout=0)
    found = [
        configuration(line, noise=noise, n_trusted=n, encoder=encoder, seed=seed, small=given.small, **changes)
        for seed in given.seeds
        for encoder in given.encoder
        for noise in given.noise
        for n in given.trusted or TRUSTED.get(noise, (200,))
        for line in given.methods
        if line not in LINES or line in lines_of(encoder)
    ]
    if not found:
        raise UsageError("these methods need frozen embeddings: add --encoder frozen.")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    arguments.run(parser(), configs, run_all, argv)
