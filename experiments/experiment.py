"""What a table is made of: its lines, its cells, the configuration of one run and its data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from experiments.results import Row
from soseleto.data import Examples
from soseleto.errors import UsageError, did_you_mean
from soseleto.schedules import SCHEDULES

# By name: the title, and what differs from the common configuration.
Lines = Mapping[str, tuple[str, Mapping[str, Any]]]
Cell = tuple[str, Mapping[str, Any]]  # a line's name, and the fields of its column
Root = str | Path | None
MERGED = ("settings", "rounds")  # fields whose changes are merged into those of the line


@dataclass(frozen=True, kw_only=True)
class Run:
    """The configuration of one run, complete; every experiment adds its own fields.

    method: the row's name; base, settings: which method that is, and what differs from its defaults
    select: evaluate on n_heldout examples that are put aside, not on the test set, for choosing settings
    n_source, n_test: maximum number of examples
    """

    COLUMN: ClassVar[tuple[str, ...]]  # fields that tell the column of the table
    FIXED: ClassVar[Mapping[str, Any]] = {}  # of the configurations in rows, what is no field any more
    NEWER: ClassVar[tuple[str, ...]] = ()  # fields that rows have only where they are used, since older rows lack them

    method: str
    base: str
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    select: bool = False
    n_heldout: int = 0
    n_source: int | None = None
    n_test: int | None = None
    epochs: int
    batch_size: int
    target_batch_size: int
    lr: float
    weight_decay: float = 0.0
    schedule: str

    def __post_init__(self) -> None:
        if self.select and not self.n_heldout:
            raise UsageError("select evaluates on held-out examples, but n_heldout is 0: say n_heldout=1000.")
        if self.schedule not in SCHEDULES:
            raise UsageError(f"schedule must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}.")

    def column(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.COLUMN}

    def heading(self) -> Row:
        """The entries of a row that are known before the run; of a model's folder, its name."""
        config = dict(self.FIXED) | {k: v for k, v in dataclasses.asdict(self).items() if v or k not in self.NEWER}
        if "model" in config:
            config["model"] = Path(config["model"]).name
        return {"method": self.method, "setting": self.column(), "seed": self.seed, "config": config}


@dataclass(frozen=True)
class Experiment:
    """A table of the paper or of the docs.

    name: of the results file; lines: of the table; seeds: how many runs a cell has
    configuration: makes the ``Run`` of a line from its name, ``seed=``, ``small=`` and changed fields
    cells: those of one seed; with seed 0 those of the whole table
    data: draws the data of a run, from (run, root, device); the same for every line
    measure: trains on the data and measures, from (run, data, root, device)
    """

    name: str
    lines: Lines
    seeds: int
    configuration: Callable[..., Any]
    cells: Callable[[int], list[Cell]]
    data: Callable[[Any, Root, str], Any]
    measure: Callable[[Any, Any, Root, str], Row]


@dataclass(frozen=True, kw_only=True)
class Sides:
    """The data of one run.

    truth: (n,) the source's right labels, ``UNKNOWN`` where nobody checked, for measuring alone
    heldout: examples that are put aside; test: those that are evaluated otherwise
    before: the labels that the target had before it was checked; probes get these, so that their mistakes are like the
        source's
    """

    source: Examples
    target: Examples
    test: Examples
    heldout: Examples | None = None
    truth: Tensor | None = None
    before: Tensor | None = None


def line(title: str, base: str, settings: Mapping[str, Any] | None = None, **fields: Any) -> tuple[str, dict[str, Any]]:
    """A line of a table: its title, its method with what differs from that one's defaults, and other fields."""
    return title, {"base": base, **({"settings": settings} if settings else {}), **fields}


def fields_of(lines: Lines, line: str, common: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The run's fields: those of the line, overridden by ``common`` and then by ``changes``.

    Changed settings are merged into the line's own, and then the method's name states them:

    >>> fields_of({"a": ("A", {"settings": {"x": 1}})}, "a", {"lr": 0.1}, {"settings": {"y": 2}})
    {'settings': {'x': 1, 'y': 2}, 'lr': 0.1, 'method': 'a[y=2]'}
    """
    if line not in lines:
        raise UsageError(f"unknown method {line!r}{did_you_mean(line, lines)}: choose from {', '.join(lines)}.")
    own = lines[line][1]
    fields = {**own, **common, **changes, "method": line}
    for name in MERGED:
        if changes.get(name):
            fields[name] = {**own.get(name, {}), **changes[name]}
            fields["method"] += "[" + ",".join(f"{key}={value}" for key, value in changes[name].items()) + "]"
    return fields


def check_noise(noise: Any, known: Sequence[Any]) -> None:
    if noise not in known and not (isinstance(noise, float) and 0.0 < noise < 1.0):
        names = " or ".join(name for name in known if isinstance(name, str))
        raise UsageError(f"noise must be a share between 0 and 1, {names}, got {noise!r}.")
