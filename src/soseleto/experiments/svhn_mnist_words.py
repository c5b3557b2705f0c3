"""The words of ``python -m soseleto.experiments.svhn_mnist``, and the tables made from what it wrote."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from soseleto.errors import SoseletoError, UsageError
from soseleto.experiments.svhn_mnist import LINES, Config, configuration, run_all
from soseleto.experiments.svhn_mnist_data import SOURCES
from soseleto.experiments.words import setting

# Entries of the configuration that may be changed from outside.
NUMBERS = {
    "epochs": int,
    "n_source": int,
    "batch_size": int,
    "target_batch_size": int,
    "lr": float,
    "momentum": float,
    "weight_decay": float,
    "schedule": str,
    "classifier": str,
    "rotate": float,
    "scale": float,
    "shift": float,
    "n_heldout": int,
}


def parser() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser(prog="python -m soseleto.experiments.svhn_mnist", description=__doc__)
    words.add_argument("--methods", nargs="+", default=list(LINES), help=f"of {', '.join(LINES)}; all by default")
    words.add_argument("--n-target", nargs="+", type=int, default=[20, 25])
    words.add_argument("--source", nargs="+", default=["0-4"], help=f"of {', '.join(SOURCES)}")
    words.add_argument("--plain", action="store_true", help="no augmentation, standardised by the source's statistics")
    words.add_argument("--seeds", nargs="+", type=int, default=list(range(20)))
    words.add_argument("--out", type=Path, required=True, help="results file; runs that are in it are not repeated")
    words.add_argument("--data-root", type=Path)
    words.add_argument("--device", default="auto")
    words.add_argument("--processes", type=int, default=1)
    words.add_argument("--small", action="store_true", help="sized for a CPU")
    for name, kind in NUMBERS.items():
        words.add_argument(f"--{name.replace('_', '-')}", type=kind)
    words.add_argument("--select", action="store_true", default=None, help="measure on held-out digits, not the test")
    words.add_argument("--rounds", nargs="+", default=[], metavar="NAME=VALUE", help="settings of Unlabelled")
    words.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the method")
    return words


def configs(given: argparse.Namespace) -> list[Config]:
    """Every combination, those of a seed together, so that early rows already cover all methods."""
    changes: dict[str, Any] = {name: value for name in NUMBERS if (value := getattr(given, name)) is not None}
    if given.select:
        changes |= {"select": True, "n_heldout": given.n_heldout or 5000}
    if given.rounds:
        changes["rounds"] = tuple(setting(word) for word in given.rounds)
    if given.set:
        changes["settings"] = tuple(setting(word) for word in given.set)
    return [
        configuration(method, n_target=n, source=source, plain=given.plain, seed=seed, small=given.small, **changes)
        for seed in given.seeds
        for n in given.n_target
        for source in given.source
        for method in given.methods
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Run, printing one line a finished run; exit code 2 for words that are off, 1 for runs that fail."""
    given = parser().parse_args(argv)
    try:
        run_all(configs(given), given.out, root=given.data_root, device=given.device, processes=given.processes,
                report=lambda line: print(line, flush=True))  # fmt: skip
    except SoseletoError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from error
