"""Results files: one row per run, merged as runs finish, and the Markdown tables generated from them.

``{"name", "commit", "device", "versions", "rows": [{"method", "setting", "seed", "accuracy", "seconds", ...}]}``
"""

from __future__ import annotations

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
        raise DataError(f"{path} is not a results file ({error}): give one that `soseleto reproduce` wrote.") from error
    return found


def save(path: str | Path, results: Results) -> Path:
    """Write the file atomically: after a kill at any moment either the old or the new file is there, complete."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n  ".join(json.dumps(row, allow_nan=False) for row in results.rows)
    head = json.dumps({name: value for name, value in asdict(results).items() if name != "rows"}, indent=1)
    write_text(path, f'{head.removesuffix("}").rstrip()},\n "rows": [\n  {rows}\n ]\n}}\n')
    return path


def merge_files(paths: Sequence[str | Path], out: str | Path) -> Results:
    """Merge files of one experiment into one; they must be from the same kind of machine and the same versions."""
    found = [load(path) for path in paths]
    for other in found[1:]:
        for name in ("name", "device", "versions"):
            if getattr(other, name) != getattr(found[0], name):
                raise DataError(
                    f"the files differ in {name} ({getattr(found[0], name)!r} and {getattr(other, name)!r}): "
                    "merge only runs of one experiment and one kind of machine."
                )
    whole = replace(found[-1], rows=())
    for one in found:
        whole = whole.merged(one.rows)
    save(out, whole)
    return whole


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


def spreads(rows: Sequence[Row], value: Callable[[Row], float | None]) -> dict[tuple[str, str], Spread]:
    """By (method, setting as JSON). Runs without the value are left out; runs of different configurations raise."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["method"], json.dumps(row["setting"], sort_keys=True)), []).append(row)
    for (method, setting), group in groups.items():
        configs = {json.dumps({**(row.get("config") or {}), "seed": None}, sort_keys=True) for row in group}
        if len(configs) > 1:
            raise DataError(f"{method} at {setting} was run with {len(configs)} configurations: keep the rows of one.")
    found = {place: [v for row in group if (v := value(row)) is not None] for place, group in groups.items()}
    return {place: Spread.of(values) for place, values in found.items() if values}


def table(
    rows: Sequence[Row],
    value: Callable[[Row], float | None],
    *,
    methods: Mapping[str, str],
    settings: Mapping[str, Mapping[str, Any]],
    more: Sequence[Sequence[str]] = (),
    show: Callable[[Spread], str] = str,
) -> str:
    """A Markdown table of means and spreads: lines are methods (name -> title), columns settings (title -> setting).

    Methods and settings without a run are left out; ``more`` are lines put on top, such as the paper's numbers.
    """
    found = spreads(rows, value)
    columns = {t: json.dumps(s, sort_keys=True) for t, s in settings.items()}
    columns = {t: s for t, s in columns.items() if any((m, s) in found for m in methods)}
    lines = [["", *columns], ["---", *["---:"] * len(columns)], *more]
    for method, title in methods.items():
        cells = [show(found[method, s]) if (method, s) in found else "" for s in columns.values()]
        if any(cells):
            lines.append([title, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def put_between(text: str, mark: str, new: str) -> str:
    """``text`` with everything between <!-- mark --> and <!-- /mark --> replaced by ``new``."""
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise DataError(f"the page must have {begin} and {end} once each: put them where the table belongs.")
    before, after = text.split(begin)
    return f"{before}{begin}\n{new}\n{end}{after.split(end)[1]}"


def fill_page(text: str, results: str | Path, tables: Mapping[str, Callable[[Sequence[Row]], str]]) -> str:
    """A page of the docs with its tables, by their marks, regenerated from a results file; without one they say so."""
    rows = load(results).rows if Path(results).exists() else None
    for mark, make in tables.items():
        text = put_between(text, mark, "Not run yet." if rows is None else make(rows))
    return text
