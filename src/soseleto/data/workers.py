"""Image files decoded by parallel worker processes straight into one array on disk."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from soseleto.data import optional
from soseleto.errors import DataError

_CHUNK = 64  # files handed to a worker at a time
_FEW = 256  # up to so many files, starting workers costs more than it saves

Bad = list[tuple[int, str]]


def decode_files(
    files: Sequence[str],
    array: Path,
    shape: tuple[int, int, int],
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Bad:
    """Fill the uint8 array file (N, C, H, W) at ``array``; return (row, reason) for what could not be read."""
    count = worker_count(workers, len(files))
    with open(array, "wb") as file:
        file.truncate(len(files) * int(np.prod(shape)))
    jobs: queue.SimpleQueue[list[tuple[int, str]]] = queue.SimpleQueue()
    for start in range(0, len(files), _CHUNK):
        jobs.put([(row, files[row]) for row in range(start, min(start + _CHUNK, len(files)))])
    tally = _Tally(len(files), progress)
    if count == 0:
        _here(jobs, tally, np.memmap(array, dtype=np.uint8, mode="r+", shape=(len(files), *shape)))
    else:
        header = {"array": str(array), "shape": [len(files), *shape]}
        _everywhere(jobs, tally, header, count)
    return sorted(tally.bad)


def worker_count(workers: int | None, files: int) -> int:
    """How many processes to start; 0 means to decode in this one."""
    if workers is not None:
        return min(workers, -(-files // _CHUNK))
    if files <= _FEW:
        return 0
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 64)


class _Tally:
    """What the workers have reported so far."""

    def __init__(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        self.bad: Bad = []
        self.death: tuple[int, list[tuple[int, str]]] | None = None
        self._done, self._total, self._progress = 0, total, progress
        self._lock = threading.Lock()

    def add(self, count: int, bad: Bad) -> None:
        with self._lock:
            self.bad += bad
            self._done += count
            if self._progress:
                self._progress(self._done, self._total)

    def fail(self, code: int, job: list[tuple[int, str]]) -> None:
        with self._lock:
            self.death = self.death or (code, job)


def _here(jobs: queue.SimpleQueue[Any], tally: _Tally, rows: Any) -> None:
    decoding = optional.decoding()
    while not jobs.empty():
        job = jobs.get()
        tally.add(len(job), decoding.fill(rows, job, rows.shape[1:]))
    rows.flush()


def _everywhere(jobs: queue.SimpleQueue[Any], tally: _Tally, header: dict[str, Any], count: int) -> None:
    # -P keeps this folder off the worker's import path; the user's main script is never imported there.
    command = [sys.executable, "-P", str(Path(__file__).with_name("decoding.py"))]
    with tempfile.TemporaryFile("w+") as words:  # a file: a full pipe of warnings would block a worker
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": words}
        processes = [subprocess.Popen(command, text=True, **pipes) for _ in range(count)]  # type: ignore[call-overload]
        threads = [threading.Thread(target=_feed, args=(p, jobs, tally, header)) for p in processes]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for process in processes:
                _end(process)
        if tally.death is not None:
            words.seek(0)
            raise _death(*tally.death, words.read().strip().splitlines())


def _feed(process: Any, jobs: queue.SimpleQueue[Any], tally: _Tally, header: dict[str, Any]) -> None:
    """Give one worker a job at a time until none is left, or any worker has failed."""
    job: list[tuple[int, str]] = []
    try:
        process.stdin.write(json.dumps(header) + "\n")
        while tally.death is None:
            try:
                job = jobs.get_nowait()
            except queue.Empty:
                return
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            if not answer:
                raise BrokenPipeError
            tally.add(len(job), [(row, why) for row, why in json.loads(answer)])
    except (OSError, ValueError):
        process.kill()
        tally.fail(process.wait(), job)


def _death(code: int, job: list[tuple[int, str]], words: list[str]) -> DataError:
    between = f" between {job[0][1]} and {job[-1][1]}" if job else ""
    said = f" saying {words[-1]!r}" if words else ""
    return DataError(
        f"an image worker died (exit code {code}){said}{between}: "
        "nothing was kept; give it more memory, or use workers=0 to find the file."
    )


def _end(process: Any) -> None:
    for pipe in (process.stdin, process.stdout):
        try:
            pipe.close()
        except OSError:
            continue
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
