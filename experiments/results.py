"""Results files: one row per run, merged as runs finish, and the Markdown tables generated from them.

``{"name", "commit", "device", "versions", "rows": [{"method", "setting", "seed", "accuracy", "seconds", ...}]}``
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from soseleto.errors import DataError
from soseleto.run_folder.files import device_name, versions, write_text

Row = dict[str, Any]


@dataclass(frozen=True)
class Results:
    """A results file in memory."""

    name: str
    commit: str | None
    device: str
    versions: dict[str, str]
    rows: tuple[Row, ...] = ()

    def merged(self, rows: Sequence[Row]) -> Results:
        """With these rows added; a row replaces one of the same method, setting, seed and configuration."""
        by_key = {key(row): row for row in self.rows} | {key(row): row for row in rows}
        return replace(self, rows=tuple(by_key.values()))

    def select(self, **wanted: Any) -> list[Row]:
        """The rows that have these entries, such as method="soseleto"."""
        return [row for row in self.rows if all(row.get(name) == value for name, value in wanted.items())]


def key(row: Mapping[str, Any]) -> str:
    """Identifies a run: rows with equal keys are of the same run."""
    return json.dumps([row["method"], row["setting"], row["seed"], row.get("config")], sort_keys=True)


def started(name: str, *, device: str = "cpu") -> Results:
    """An empty file for runs on this machine and this version of the code."""
    return Results(name=name, commit=commit(), device=device_name(device), versions=versions())


def commit() -> str | None:
    """The commit of the source tree this package is imported from, or None outside a git tree."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def load(path: str | Path) -> Results:
    """Read a results file."""
    path = Path(path)
    try:
        given = json.loads(path.read_text("utf-8"))
        found = Results(**{**given, "rows": tuple(given["rows"])})
        for row in found.rows:
            key(row)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a results file ({error}): give another file.") from error
    return found


def save(path: str | Path, results: Results) -> Path:
    """Write the file atomically: after a kill at any moment either the old or the new file is there, complete."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n  ".join(json.dumps(row, allow_nan=False) for row in results.rows)
    head = json.dumps({name: value for name, value in asdict(results).items() if name != "rows"}, indent=1)
    write_text(path, f'{head.removesuffix("}").rstrip()},\n "rows": [\n  {rows}\n ]\n}}\n')
    return path


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over runs."""

    mean: float
    sd: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))

    def __str__(self) -> str:
        return f"{self.mean:.1f} ± {self.sd:.1f}" if self.n > 1 else f"{self.mean:.1f}"

    def with_error(self) -> str:
        """Mean and standard error of the mean, instead of the standard deviation."""
        return str(replace(self, sd=self.sd / self.n**0.5))


def with_count(usual: int) -> Callable[[Spread], str]:
    """Shows a cell; one with another number of runs than the usual states it in brackets."""
    return lambda cell: str(cell) if cell.n == usual else f"{cell} ({cell.n})"


def spreads(rows: Sequence[Row]) -> dict[tuple[str, str], Spread]:
    """By (method, setting as JSON), of the entry "value", or else the accuracy.

    Runs without it are left out; runs of different configurations raise.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["method"], json.dumps(row["setting"], sort_keys=True)), []).append(row)
    for (method, setting), group in groups.items():
        configs = {json.dumps({**(row.get("config") or {}), "seed": None}, sort_keys=True) for row in group}
        if len(configs) > 1:
            raise DataError(f"{method} at {setting} was run with {len(configs)} configurations: keep the rows of one.")
    values = {
        place: [value for row in group if (value := row.get("value", row.get("accuracy"))) is not None]
        for place, group in groups.items()
    }
    return {place: Spread.of(numbers) for place, numbers in values.items() if numbers}


def signal_rows(rows: Sequence[Row]) -> list[Row]:
    """A row for each signal of a run, named after it in place of the method; its value is 100·AUROC."""
    return [
        {**row, "method": signal, "value": 100.0 * numbers["auroc"]}
        for row in rows
        for signal, numbers in row.get("detection", {}).items()
    ]


def table(
    rows: Sequence[Row],
    *,
    methods: Mapping[str, str],
    settings: Mapping[str, Mapping[str, Any]],
    more: Sequence[Sequence[str]] = (),
    show: Callable[[Spread], str] = str,
) -> str:
    """A Markdown table of means and spreads: lines are methods (name -> title), columns settings (title -> setting).

    Methods and settings without a run are left out; ``more`` are lines put on top, such as the paper's numbers, whose
    first number is that of the first setting.
    """
    cells = spreads(rows)
    columns = {title: json.dumps(setting, sort_keys=True) for title, setting in settings.items()}
    shown = [any((method, column) in cells for method in methods) for column in columns.values()]
    columns = dict(itertools.compress(columns.items(), shown))
    if not columns:
        return "Not run yet."
    on_top = [[title, *(numbers[i] if i < len(numbers) else "" for i, is_shown in enumerate(shown) if is_shown)]
              for title, *numbers in more]  # fmt: skip
    lines = [["", *columns], ["---", *["---:"] * len(columns)], *on_top]
    for method, title in methods.items():
        numbers = [show(cells[method, column]) if (method, column) in cells else "" for column in columns.values()]
        if any(numbers):
            lines.append([title, *numbers])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def put_between(text: str, mark: str, new: str) -> str:
    """``text`` with everything between <!-- mark --> and <!-- /mark --> replaced by ``new``."""
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise DataError(f"the page must have {begin} and {end} once each: put them where the table belongs.")
    before, after = text.split(begin)
    return f"{before}{begin}\n{new}\n{end}{after.split(end)[1]}"


def fill_page(text: str, results: str | Path, tables: Mapping[str, Callable[[Sequence[Row]], str]]) -> str:
    """A page of the docs with its tables, by their marks, regenerated from a results file."""
    rows = load(results).rows
    for mark, make in tables.items():
        text = put_between(text, mark, make(rows))
    return text
