"""Runs the configurations of an experiment, in one process or several, and saves each row as soon as its run ends.

An interrupted job resumes when it is started again with the same arguments.
"""

from __future__ import annotations

import ast
import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

from experiments.experiment import Cell, Experiment, Root
from experiments.results import Results, Row, commit, key, load, save, started
from soseleto.errors import TrainingError, UsageError
from soseleto.parallel.reducer import choose_device
from soseleto.run_folder.files import device_name


def configurations(
    experiment: Experiment,
    *,
    lines: Sequence[str] = (),
    seeds: Sequence[int] = (),
    changes: Sequence[str] = (),
    small: bool = False,
) -> list[Any]:
    """The runs of a table, ordered by seed, so that the first rows already cover all methods.

    lines, seeds: those to run, by default all of the table
    changes: NAME=VALUE,VALUE of a column, of a field of the configuration, or of a setting of the method
    """
    values = dict(map(parsed, changes))
    runs: dict[str, Any] = {}
    if unknown := [line for line in lines if line not in experiment.lines]:
        experiment.configuration(unknown[0])  # raises with a sentence
    for seed in seeds or range(experiment.seeds):
        cells = experiment.cells(0 if lines or values else seed)
        cells = [cell for cell in cells if not lines or cell[0] in lines]
        of_columns = [name for name in values if any(name in column for _, column in cells)]
        for name in of_columns:
            cells = placed(cells, name, values[name])
        others = {name: options for name, options in values.items() if name not in of_columns}
        for chosen in itertools.product(*others.values()):
            for line, column in cells:
                make = partial(experiment.configuration, line, seed=seed, small=small, **column)
                run = make(**_fields(vars(make()), dict(zip(others, chosen, strict=True))))
                runs[key(run.heading())] = run
    return list(runs.values())


def parsed(change: str) -> tuple[str, list[Any]]:
    """NAME=VALUE,VALUE as the name and the values; a value that is no Python literal is text."""
    name, equals, text = change.partition("=")
    if not equals:
        raise UsageError(f"--set takes NAME=VALUE, got {change!r}: as in --set noise=0.4 weight_step=0.2.")
    return name, [_literal(value) for value in text.split(",")]


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def placed(cells: Sequence[Cell], name: str, values: Sequence[Any]) -> list[Cell]:
    """The cells where ``name`` has one of these values; a value that no cell has is put in place of all others."""
    chosen = [cell for cell in cells if cell[1].get(name) in values]
    new = [value for value in values if value not in [column.get(name) for _, column in cells]]
    return chosen + [(line, {**column, name: value}) for value in new for line, column in cells]


def _fields(known: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes of known fields; what is none is a setting of the method."""
    settings = {name: value for name, value in changes.items() if name not in known}
    fields = {name: value for name, value in changes.items() if name in known}
    return {**fields, "settings": settings} if settings else fields


def run_all(
    experiment: Experiment,
    runs: Sequence[Any],
    out: str | Path,
    *,
    root: Root = None,
    device: str = "auto",
    processes: int = 1,
    report: Callable[[str], None] = print,
) -> Results:
    """Run what ``out`` lacks. A run that fails is reported and left out, and its error is raised at the end."""
    out = Path(out)
    results = load(out) if out.exists() else started(experiment.name, device=str(choose_device(device)))
    done = {key(row) for row in results.rows}
    waiting = [run for run in runs if key(run.heading()) not in done]
    if len(waiting) < len(runs):
        report(f"{len(runs) - len(waiting)} of {len(runs)} runs are in {out} already")
    machine = device_name(str(choose_device(device)))
    common = {"processes": processes, "commit": commit()}
    if machine != results.device:  # only rows from another machine name it
        common["device"] = machine
    once = partial(run_one, experiment.data, experiment.measure, root=root, device=device)
    failures: list[Exception] = []
    for run, row in _outcomes(waiting, once, processes):
        what = ", ".join(f"{name} {value}" for name, value in run.heading().items() if name != "config")
        if isinstance(row, Exception):
            failures.append(row)
            report(f"{what}: failed, {row}")
            continue
        # "seconds" can only be compared between rows of as many parallel processes.
        results = results.merged([{**row, **common}])
        save(out, results)
        numbers = [f"{name} {value:.2f}" for name, value in row.items() if isinstance(value, float)]
        report(f"{what}: {', '.join(numbers)}")
    if failures:
        raise TrainingError(f"{len(failures)} of {len(waiting)} runs failed, first: {failures[0]}") from failures[0]
    return results


def run_one(
    data: Callable[..., Any], measure: Callable[..., Row], run: Any, *, root: Root = None, device: str = "auto"
) -> Row:
    """The row of one run; its seconds are those of training and measuring."""
    drawn = data(run, root, device)
    begin = time.perf_counter()
    measured = measure(run, drawn, root, device)
    return {**run.heading(), "seconds": time.perf_counter() - begin, **measured}


def _outcomes(runs: Sequence[Any], once: Callable[[Any], Row], processes: int) -> Iterator[tuple[Any, Row | Exception]]:
    """Each run with its row or its exception, in the order in which the runs end."""
    if processes <= 1:
        for run in runs:
            try:
                yield run, once(run)
            except Exception as error:
                yield run, error
        return
    # CUDA cannot be used in forked processes.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _begin, (processes,)) as pool:
        futures = {pool.submit(once, run): run for run in runs}
        for future in as_completed(futures):
            failure = future.exception()
            if failure is None:
                yield futures[future], future.result()
            elif isinstance(failure, Exception):
                yield futures[future], failure
            else:
                raise failure


def _begin(processes: int) -> None:
    """Initialise a worker: it gets its share of the cores, and exits when its parent process does."""
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
