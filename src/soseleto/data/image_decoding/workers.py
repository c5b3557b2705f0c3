"""Worker processes that hash image files and decode them into one array on disk."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from soseleto.data import optional
from soseleto.errors import DataError

_CHUNK = 64  # files per job
_FEW = 256  # up to this many files, starting workers costs more than it saves

Bad = list[tuple[int, str]]  # (row, reason) of every image that cannot be decoded
Shape = tuple[int, int, int]  # channels, height, width
Progress = Callable[[int, int], None]  # files done, files in total


class Output(NamedTuple):
    digests: list[str]  # of the files' content, in order
    bad: Bad  # those rows are zero


def worker_count(workers: int | None, files: int) -> int:
    """Number of processes to start; 0 decodes in this process."""
    if workers is None:
        workers = 0 if files <= _FEW else cores()
    return min(workers, -(-files // _CHUNK))


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """Worker processes for the length of one ``with`` block; with ``count=0`` the jobs run in this process."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._processes: list[Any] = []

    def __enter__(self) -> Workers:
        # stderr goes to a file: a full pipe of warnings would block a worker.
        self._stderr = tempfile.TemporaryFile("w+")
        # -S and -P: only Pillow is imported, from where this process would import it, and the user's main script does
        # not run again in the worker.
        command = [sys.executable, "-S", "-P", str(Path(__file__).with_name("rules.py"))]
        search_path = os.pathsep.join(entry for entry in sys.path if entry)
        for _ in range(self._count):
            process = subprocess.Popen(
                command, env={**os.environ, "PYTHONPATH": search_path}, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr,
            )  # fmt: skip
            self._processes.append(process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:  # all pipes first, so that the workers exit in parallel
            _close(process.stdin)
        for process in self._processes:
            _end(process)
        self._stderr.close()

    def digests(self, files: Sequence[str]) -> list[str]:
        return self._run(files, None, (0, 0, 0), None).digests

    def decode(self, files: Sequence[str], array: Path, shape: Shape, progress: Progress | None = None) -> Output:
        """Fill the uint8 array file (N, C, H, W) at ``array``."""
        with open(array, "wb") as file:
            file.truncate(len(files) * shape[0] * shape[1] * shape[2])
        return self._run(files, array, shape, progress)

    def _run(self, files: Sequence[str], array: Path | None, shape: Shape, progress: Progress | None) -> Output:
        jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        for first in range(0, len(files), _CHUNK):
            paths = list(files[first : first + _CHUNK])
            place = None if array is None else str(array)
            jobs.put({"array": place, "first": first, "paths": paths, "shape": shape})
        tally = _Tally(len(files), progress)
        if not self._processes:
            while not jobs.empty():
                job = jobs.get()
                tally.add(job, optional.decoding().run_job(job))
            return tally.output()
        threads = [threading.Thread(target=_feed, args=(p, jobs, tally)) for p in self._processes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if tally.death is not None:
            self._stderr.seek(0)
            raise _death(*tally.death, self._stderr.read().strip().splitlines())
        return tally.output()


class _Tally:
    """Results so far, collected from all workers."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.death: tuple[int, list[str]] | None = None
        self._digests: dict[int, list[str]] = {}
        self._bad: Bad = []
        self._done, self._total, self._progress = 0, total, progress
        self._lock = threading.Lock()

    def add(self, job: dict[str, Any], result: Any) -> None:
        with self._lock:
            self._digests[job["first"]] = result[0]
            self._bad += [(row, why) for row, why in result[1]]
            self._done += len(job["paths"])
            if self._progress:
                self._progress(self._done, self._total)

    def fail(self, code: int, paths: list[str]) -> None:
        with self._lock:
            self.death = self.death or (code, paths)

    def output(self) -> Output:
        return Output([one for first in sorted(self._digests) for one in self._digests[first]], sorted(self._bad))


def _feed(process: Any, jobs: queue.SimpleQueue[dict[str, Any]], tally: _Tally) -> None:
    """Send one worker a job at a time until none is left or any worker has failed."""
    job: dict[str, Any] = {"paths": []}
    try:
        while tally.death is None:
            try:
                job = jobs.get_nowait()
            except queue.Empty:
                return
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            result = process.stdout.readline()
            if not result:
                raise BrokenPipeError
            tally.add(job, json.loads(result))
    except (OSError, ValueError):
        process.kill()
        tally.fail(process.wait(), job["paths"])


def _death(code: int, paths: list[str], stderr: list[str]) -> DataError:
    between = f" between {paths[0]} and {paths[-1]}" if paths else ""
    last = f" with {stderr[-1]!r} on stderr" if stderr else ""
    return DataError(
        f"an image worker died (exit code {code}){last}{between}: "
        "free some memory, or type reading=Reading(workers=0) to find the file; nothing was cached."
    )


def _close(pipe: Any) -> None:
    with contextlib.suppress(OSError):  # the pipe of a dead worker cannot be flushed
        pipe.close()


def _end(process: Any) -> None:
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _close(process.stdout)
