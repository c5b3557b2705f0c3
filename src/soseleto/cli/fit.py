"""``soseleto fit``: read, train, compare with the rivals, write the report, and print a summary.

RUN is the folder of the main training; the trainings of the comparison are in RUN/parts until all of them have ended.
The same command continues an interrupted one: trainings that have ended are not repeated.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

from soseleto.cli.fit_options import FitOptions, check_values, reading_of
from soseleto.cli.job import Job
from soseleto.cli.summary import summary
from soseleto.data import Pair, read_pair
from soseleto.errors import UsageError
from soseleto.parallel.reducer import Reducer, first_reads, ranks
from soseleto.report import write_report
from soseleto.run_folder.folder import PARTS, REPORT, RunFolder
from soseleto.run_folder.source import digest
from soseleto.task.settings import to_data
from soseleto.training.progress import LiveLine
from soseleto.training.resume import require_same_settings


def fit(options: FitOptions, echo: Callable[[str], None]) -> None:
    """Run the command on every rank; only the first prints and writes."""
    with ranks(options.device) as reducer:
        _fit(options, echo if reducer.rank == 0 else lambda text: None, reducer)


def _fit(options: FitOptions, echo: Callable[[str], None], reducer: Reducer) -> None:
    require_same_settings(reducer, _settings(options))
    check_values(options)
    out = options.out
    reducer.first(RunFolder(out).require_place)
    if not reducer.first(lambda: _only_report_missing(RunFolder(out))):
        _train_all(options, echo, reducer)
    if reducer.rank != 0:
        return
    page, folder = write_report(out), RunFolder.open(out)
    shutil.rmtree(out / PARTS, ignore_errors=True)
    folder.tidy()
    for line in [*summary(folder), f"report: {page}"]:
        echo(line)


def _settings(options: FitOptions) -> dict[str, Any]:
    """The options, which must be the same on every rank; the same data may have another path on another machine."""
    settings: dict[str, Any] = to_data(options)
    paths = ("source", "target", "test", "unlabelled", "out")
    return {name: value for name, value in settings.items() if name not in paths}


def _only_report_missing(folder: RunFolder) -> bool:
    """Whether a command was interrupted after its comparison; UsageError where nothing is left to do."""
    if folder.comparison() is None:
        return False
    if folder.has(REPORT) and not (folder.path / PARTS).exists():
        raise UsageError(f"{folder.path} holds a run already: give --out another folder, or delete that one.")
    return True


def _train_all(options: FitOptions, echo: Callable[[str], None], reducer: Reducer) -> None:
    def read() -> tuple[Pair, str | None]:
        sets = options.source, options.target, options.test
        pair = read_pair(
            *sets,
            mode=options.mode,
            unlabelled=options.unlabelled,
            reading=reading_of(options),
            skip_bad=options.skip_bad,
        )
        return pair, digest(options.source) if reducer.rank == 0 else None

    pair, source_sha256 = first_reads(reducer, read)
    for problem in pair.problems:
        echo(str(problem))
    job = Job.of(options, pair, reducer, source_sha256)
    for line in job.plan():
        echo(line)
    with LiveLine() as progress:
        job.run(progress)
