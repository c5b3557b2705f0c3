"""Make the k-th write of a ``soseleto fit`` fail, for every k, and resume when there is space again."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import safetensors.torch

from data_safety.compare import differences
from data_safety.example import Said, command, fit_words, often, write_data
from soseleto.run_folder.folder import RunFolder

SENTENCE = re.compile(r"soseleto: [^\n]*[Nn]o space left on device[^\n]*\.\n?")


class Disk:
    """Counts the writes, renames and flushes below a folder; those from ``first`` to ``last`` find the disk full."""

    def __init__(self, below: Path, first: int = 0, last: int = 0) -> None:
        self.below, self.first, self.last, self.count = str(below), first, last, 0

    def use(self, path: object) -> None:
        if not str(path).startswith(self.below):
            return
        self.count += 1
        if self.first <= self.count <= self.last:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        patched: list[tuple[Any, str, Any]] = []

        def patch(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            patched.append((owner, name, getattr(owner, name)))
            setattr(owner, name, make(getattr(owner, name)))

        patch(os, "replace", self._before(1))
        patch(os, "rename", self._before(1))
        patch(os, "mkdir", self._before(0))
        patch(os, "fsync", self._flush)
        patch(safetensors.torch, "save_file", self._before(1))
        patch(pyarrow.parquet, "write_table", self._before(1))
        patch(io, "open", self._open)  # what pathlib calls
        patch(builtins, "open", self._open)
        try:
            yield
        finally:
            for owner, name, true in reversed(patched):
                setattr(owner, name, true)

    def _before(self, place: int) -> Callable[[Any], Any]:
        def make(true: Any) -> Any:
            def checked(*given: Any, **more: Any) -> Any:
                self.use(given[place])
                return true(*given, **more)

            return checked

        return make

    def _flush(self, true: Any) -> Any:
        def checked(handle: int) -> None:
            self.use(os.readlink(f"/proc/self/fd/{handle}"))
            true(handle)

        return checked

    def _open(self, true: Any) -> Any:
        def checked(file: Any, mode: str = "r", *given: Any, **more: Any) -> Any:
            made = true(file, mode, *given, **more)
            if set(mode) & set("wax+"):
                try:
                    self.use(file)  # the file is there, but empty
                except OSError:
                    made.close()
                    raise
            return made

        return checked


def fit(folder: Path, out: Path, disk: Disk) -> Said:
    words = fit_words(folder, out, "--no-baselines", *often(folder), "--epochs", 1)
    with disk.in_use():
        return command(*words)


def full_disk(folder: Path, chosen: Callable[[int], Iterable[int]], *, both: bool = True) -> dict[str, Any]:
    """For the chosen k, make only write k fail, and all from k on; every answer that was wrong.

    both: False takes the two in turn
    """
    write_data(folder)
    counting = Disk(folder / "whole")
    assert fit(folder, folder / "whole", counting).code == 0
    tried, survived, wrong = 0, 0, []
    for at, k in enumerate(chosen(counting.count)):
        for last in (k, 1 << 60) if both else ((k, 1 << 60)[at % 2],):
            out = folder / "run"
            said = fit(folder, out, Disk(out, k, last))
            problems, kept = _problems(said, out), _main(out)
            tried, survived = tried + 1, survived + (said.code == 0)
            if said.code:
                again = fit(folder, out, Disk(out))
                ended = "holds a run already" in again.err  # the last flush failed, after the last file; compared below
                problems += [] if again.code == 0 or ended else [f"resuming: {again.err[-300:]}"]
            if kept is not None and _main(out) != kept:
                problems.append("the main training was repeated")
            problems += differences(out, folder / "whole") if not problems else []
            wrong += [{"write": k, "until": "once" if last == k else "the end", "what": one} for one in problems]
            shutil.rmtree(out, ignore_errors=True)
    return {"tried": tried, "writes": counting.count, "ended anyway": survived, "wrong": wrong}


def _problems(said: Said, out: Path) -> list[str]:
    """A run that could not be finished says so in one sentence."""
    last = said.err.rstrip("\n").rpartition("\n")[2]
    if said.code and (said.code != 1 or not SENTENCE.fullmatch(last) or "Traceback" in said.err):
        return [f"exit code {said.code}: {said.err[-300:]}"]
    return []


def _main(out: Path) -> bytes | None:
    """The history of the main training, if it has ended."""
    run = RunFolder(out)
    return (out / "metrics.jsonl").read_bytes() if run.is_run() and run.has_ended() else None
