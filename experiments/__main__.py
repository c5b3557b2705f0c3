"""``python -m experiments NAME --out FILE``: a table or figure of the paper, or ``data NAME`` for a public data set."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments import data, runner
from experiments.experiment import Experiment
from soseleto.errors import SoseletoError, UsageError

TABLES = {
    "figure1": "500 points in the plane, 100 of them with a flipped label",
    "table1": "CIFAR-10 with noisy labels, every method",
    "table2": "SVHN digits to 20 or 25 MNIST digits 5-9, every method",
    "cifar10_deep": "CIFAR-10 with wrong labels, PreAct ResNet-18: the strong recipe",
    "noisy_text": "news with wrong labels, MiniLM fine-tuned and frozen",
    "language": "SmolLM2-135M fine-tuned for sums in words on pools of instructions of mixed use",
    "pretrained_images": "CIFAR-10N with EfficientNet-lite0, fine-tuned",
}


def parser() -> argparse.ArgumentParser:
    described = "\n".join(f"  {name:18} {what}" for name, what in TABLES.items())
    root = argparse.ArgumentParser(
        prog="python -m experiments", formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"Run a table of the paper or of the docs:\n{described}\nRuns that FILE has are not repeated.",
    )  # fmt: skip
    commands = root.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, what in TABLES.items():
        table = commands.add_parser(name, help=what)
        table.add_argument("--out", type=Path, required=True, metavar="FILE", help="results file")
        table.add_argument("--methods", nargs="+", default=[], help="lines of the table; all by default")
        table.add_argument("--seeds", nargs="+", type=int, default=[], help="those of the table by default")
        table.add_argument(
            "--set", nargs="+", default=[], metavar="NAME=VALUE,VALUE", dest="changes",
            help="of a column, a field of the configuration, or a setting of the method; select=True n_heldout=1000 "
            "evaluates on held-out examples instead of the test set",
        )  # fmt: skip
        table.add_argument("--small", action="store_true", help="sized for a CPU")
        table.add_argument("--data-root", type=Path, help="by default SOSELETO_DATA")
        table.add_argument("--device", default="auto")
        table.add_argument("--processes", type=int, default=1)
    fetched = commands.add_parser("data", help="fetch and verify a public data set")
    fetched.add_argument("names", nargs="+", choices=data.NAMES)
    fetched.add_argument("--data-root", type=Path)
    return root


def table(name: str) -> Experiment:
    """The experiment of that name."""
    experiment: Experiment = importlib.import_module(f"experiments.{name}").EXPERIMENT
    return experiment


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line per finished run; exit code 2 for a usage error, 1 for runs that failed."""
    given = parser().parse_args(argv)
    try:
        if given.name == "data":
            for name in given.names:
                data.fetch(name, given.data_root)
            return
        experiment = table(given.name)
        runs = runner.configurations(
            experiment, lines=given.methods, seeds=given.seeds, changes=given.changes, small=given.small
        )
        if not runs:
            raise UsageError("the table has no such cells: leave out some of --methods, --seeds and --set.")
        where = {"root": given.data_root, "device": given.device, "processes": given.processes}
        runner.run_all(experiment, runs, given.out, **where, report=lambda line: print(line, flush=True))
    except SoseletoError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from error


if __name__ == "__main__":
    main()
