"""Words that the experiments' scripts share."""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from soseleto.errors import SoseletoError, UsageError


def setting(word: str) -> tuple[str, Any]:
    """A setting of a method as somebody typed it: NAME=VALUE."""
    name, equals, value = word.partition("=")
    if not equals:
        raise UsageError(f"--set takes NAME=VALUE, got {word!r}: as in --set weight_step=0.2.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def parser(
    module: str,
    description: str | None,
    *,
    lines: Iterable[str],
    seeds: int,
    numbers: Mapping[str, Callable[[str], Any]],
) -> argparse.ArgumentParser:
    """What every experiment takes; ``numbers`` are entries of its configuration that may be changed from outside."""
    words = argparse.ArgumentParser(prog=f"python -m soseleto.experiments.{module}", description=description)
    words.add_argument("--methods", nargs="+", default=list(lines), help=f"of {', '.join(lines)}; all by default")
    words.add_argument("--seeds", nargs="+", type=int, default=list(range(seeds)))
    words.add_argument("--out", type=Path, required=True, help="results file; runs that are in it are not repeated")
    words.add_argument("--data-root", type=Path)
    words.add_argument("--device", default="auto")
    words.add_argument("--processes", type=int, default=1)
    words.add_argument("--small", action="store_true", help="sized for a CPU")
    words.add_argument("--select", action="store_true", default=None, help="measure on held-out images, not the test")
    words.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the method")
    for name, kind in numbers.items():
        words.add_argument(f"--{name.replace('_', '-')}", type=kind)
    return words


def run_words(
    words: argparse.ArgumentParser,
    configs: Callable[[argparse.Namespace], list[Any]],
    run_all: Callable[..., Any],
    argv: Sequence[str] | None,
) -> None:
    """Run, printing one line a finished run; exit code 2 for words that are off, 1 for runs that fail."""
    given = words.parse_args(argv)
    try:
        run_all(configs(given), given.out, root=given.data_root, device=given.device, processes=given.processes,
                report=lambda line: print(line, flush=True))  # fmt: skip
    except SoseletoError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from error
