"""Command-line arguments that the experiments share."""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from soseleto.errors import SoseletoError, UsageError
from soseleto.schedules import SCHEDULES


def setting(text: str) -> tuple[str, Any]:
    """Parse a method's setting, NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set takes NAME=VALUE, got {text!r}: as in --set weight_step=0.2.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def number_or_name(text: str) -> float | str:
    """0.4 from "0.4", and any other text as it is: a label set's name, or "auto"."""
    try:
        return float(text)
    except ValueError:
        return text


def parser(
    module: str,
    description: str | None,
    *,
    lines: Iterable[str],
    seeds: int,
    numbers: Mapping[str, Callable[[str], Any]],
) -> argparse.ArgumentParser:
    """The options of every experiment; ``numbers`` are the configuration fields that have an option of their own."""
    made = argparse.ArgumentParser(prog=f"python -m experiments.{module}", description=description)
    made.add_argument("--methods", nargs="+", default=list(lines), help=f"of {', '.join(lines)}; all by default")
    made.add_argument("--seeds", nargs="+", type=int, default=list(range(seeds)))
    made.add_argument("--out", type=Path, required=True, help="results file; runs that are in it are not repeated")
    made.add_argument("--data-root", type=Path)
    made.add_argument("--device", default="auto")
    made.add_argument("--processes", type=int, default=1)
    made.add_argument("--small", action="store_true", help="sized for a CPU")
    made.add_argument(
        "--select",
        "--held-out",
        action="store_true",
        default=None,
        help="evaluate on held-out examples, not on the test set",
    )
    made.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the method")
    for name, kind in numbers.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=kind)
    return made


def changes(given: argparse.Namespace, names: Iterable[str], *, n_heldout: int) -> dict[str, Any]:
    """The configuration fields that were given on the command line; ``--select`` holds out ``n_heldout`` examples."""
    found = {name: value for name in names if (value := getattr(given, name)) is not None}
    if found.get("schedule", "linear") not in SCHEDULES:
        raise UsageError(f"schedule must be one of {', '.join(SCHEDULES)}, got {found['schedule']!r}.")
    if given.select:
        found = {"n_heldout": n_heldout, **found, "select": True}
    if given.set:
        found["settings"] = tuple(setting(text) for text in given.set)
    return found


def run(
    options: argparse.ArgumentParser,
    configs: Callable[[argparse.Namespace], list[Any]],
    run_all: Callable[..., Any],
    argv: Sequence[str] | None,
) -> None:
    """Parse, run and print one line per finished run; exit code 2 for a usage error, 1 for runs that failed."""
    given = options.parse_args(argv)
    try:
        run_all(configs(given), given.out, root=given.data_root, device=given.device, processes=given.processes,
                report=lambda line: print(line, flush=True))  # fmt: skip
    except SoseletoError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from error
