"""Runs the configurations of an experiment, in one process or several, and saves each row as soon as its run ends.

An interrupted job resumes when it is started again with the same arguments.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import TypeVar

from experiments.results import Results, Row, key, load, save, started
from soseleto.errors import TrainingError
from soseleto.parallel.reducer import choose_device
from soseleto.run_folder.files import device_name

C = TypeVar("C")
Outcome = tuple[C, Row | Exception]


def run_all(
    configs: Sequence[C],
    out: str | Path,
    run: Callable[[C], Row],
    *,
    name: str,
    heading: Callable[[C], Row],
    device: str = "cpu",
    processes: int = 1,
    report: Callable[[str], None] = print,
) -> Results:
    """Run the configurations that ``out`` lacks; ``heading`` gives the entries of a row that are known beforehand.

    With several processes ``run`` and the configurations must be picklable. A run that fails is reported and left
    out; the others continue, and its error is raised at the end.
    """
    out = Path(out)
    results = load(out) if out.exists() else started(name, device=device)
    done = {key(row) for row in results.rows}
    waiting = [config for config in configs if key(heading(config)) not in done]
    if len(waiting) < len(configs):
        report(f"{len(configs) - len(waiting)} of {len(configs)} runs are in {out} already")
    mine = device_name(device)
    elsewhere = {} if mine == results.device else {"device": mine}  # only rows from another machine name it
    failures: list[Exception] = []
    for config, row in _outcomes(waiting, run, processes):
        what = ", ".join(f"{name} {value}" for name, value in heading(config).items() if name != "config")
        if isinstance(row, Exception):
            failures.append(row)
            report(f"{what}: failed, {row}")
            continue
        # "seconds" can only be compared between rows of as many parallel processes.
        results = results.merged([{**row, "processes": processes, **elsewhere}])
        save(out, results)
        report(f"{what}: {_numbers(row)}")
    if failures:
        raise TrainingError(f"{len(failures)} of {len(waiting)} runs failed, first: {failures[0]}") from failures[0]
    return results


def bound(name: str, heading: Callable[[C], Row], run_one: Callable[..., Row]) -> Callable[..., Results]:
    """``run_all`` of one experiment; its ``run_one`` gets the data's folder and the device as keywords."""

    def run_experiment(
        configs: Sequence[C],
        out: str | Path,
        *,
        root: str | Path | None = None,
        device: str = "auto",
        processes: int = 1,
        report: Callable[[str], None] = print,
    ) -> Results:
        """Run the configurations that ``out`` lacks; every row is saved as soon as its run ends."""
        run, place = partial(run_one, root=root, device=device), str(choose_device(device))
        return run_all(configs, out, run, name=name, heading=heading, device=place, processes=processes, report=report)

    return run_experiment


def _outcomes(configs: Sequence[C], run: Callable[[C], Row], processes: int) -> Iterator[Outcome[C]]:
    """Each configuration with its row or its exception, in the order in which the runs end."""
    if processes <= 1:
        for config in configs:
            try:
                yield config, run(config)
            except Exception as error:
                yield config, error
        return
    # CUDA cannot be used in forked processes.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _begin, (processes,)) as pool:
        futures = {pool.submit(run, config): config for config in configs}
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


def _numbers(row: Row) -> str:
    shown = {name: value for name, value in row.items() if isinstance(value, float)}
    return ", ".join(f"{name} {value:.2f}" for name, value in shown.items())
