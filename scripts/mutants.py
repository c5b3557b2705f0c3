"""Mutation tests: change the meaning of one line of the package at a time, and see whether a test fails.

    python scripts/mutants.py [--only PATTERN] [--jobs N] [--list] [--again]

The mutants and the tests that must catch them are in scripts/mutants.toml. The tree is copied to a temporary folder;
the working tree is never edited. Results are added to results/mutants.json after every mutant, so that an interrupted
run continues: a mutant that was killed is repeated only when its entry in the table or its file has changed. The exit
code is 1 if more than MOST mutants survive, or if a mutant or the unchanged tree gives an error.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import hashlib
import json
import multiprocessing
import os
import platform
import queue
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE, RESULTS = "scripts/mutants.toml", "results/mutants.json"
PACKAGE = "src/soseleto"
MOST = 3  # survivors
SECONDS = 300  # time limit of one mutant
LEFT_OUT = (".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "runs", "site")
KILLED, SURVIVED, TIMEOUT, ERROR = "killed", "survived", "timeout", "error"
PASSED, FAILED = 10, 11  # exit codes that nothing else gives
# Tests run in forks of one process that has imported these: it saves most of the time of a short test.
WARM = multiprocessing.get_context("forkserver")
WARM.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.tensor", "numpy", "pyarrow", "pytest"])


class MutantError(Exception):
    """The table does not fit the source."""


@dataclass(frozen=True)
class Mutant:
    """One change; ``survives`` is the reason why no test needs to fail."""

    name: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]
    survives: str = ""

    def place(self, root: Path) -> Path:
        return root / PACKAGE / self.file

    def unfit(self, root: Path) -> str:
        """What is wrong with the entry, or nothing."""
        if not self.place(root).exists():
            return f"{self.name}: there is no file {self.file}."
        count = self.place(root).read_text("utf-8").count(self.old)
        return "" if count == 1 else f"{self.name}: {self.old!r} occurs {count} times in {self.file}, not once."

    def digest(self, root: Path) -> str:
        """Of the entry and its file."""
        return hashlib.sha256(json.dumps(asdict(self)).encode() + self.place(root).read_bytes()).hexdigest()[:16]


def read_table(root: Path) -> list[Mutant]:
    """The mutants of the table, in order; raises, naming all, where some do not fit the source."""
    table = tomllib.loads((root / TABLE).read_text("utf-8"))
    found = [Mutant(name, **{**entry, "tests": tuple(entry["tests"])}) for name, entry in table.items()]
    if unfit := [text for mutant in found if (text := mutant.unfit(root))]:
        raise MutantError("\n".join(unfit))
    return found


class Copy:
    """A copy of the tree in which one mutant at a time is tested."""

    def __init__(self, root: Path, into: Path) -> None:
        self.path = into
        shutil.copytree(root, into, ignore=shutil.ignore_patterns(*LEFT_OUT), dirs_exist_ok=True)
        self._written = int(time.time())
        self._running: multiprocessing.context.ForkServerProcess | None = None

    def test(self, mutant: Mutant, seconds: float) -> str:
        """killed, survived, timeout or error."""
        place = mutant.place(self.path)
        text = place.read_text("utf-8")
        self._write(place, text.replace(mutant.old, mutant.new))
        try:
            return self.run(mutant.tests, seconds)
        finally:
            self._write(place, text)

    def _write(self, path: Path, text: str) -> None:
        """With a time of its own: Python compiles a file anew if its size or its time in seconds has changed."""
        path.write_text(text, "utf-8")
        self._written += 1
        os.utime(path, (self._written, self._written))

    def run(self, tests: Sequence[str], seconds: float) -> str:
        """The result of these tests in this copy."""
        self._running = WARM.Process(target=_pytest, args=(self.path, tests))
        self._running.start()
        self._running.join(seconds)
        code = self._running.exitcode
        self.end()
        return TIMEOUT if code is None else {PASSED: SURVIVED, FAILED: KILLED}.get(code, ERROR)

    def end(self) -> None:
        """End the tests and the processes that they have left behind."""
        if self._running is not None and self._running.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._running.pid, signal.SIGKILL)
            self._running.join()


def _pytest(tree: Path, tests: Sequence[str]) -> None:
    """Run the tests in a process of their own that has imported torch but nothing of the package."""
    os.setsid()
    os.chdir(tree)
    for output in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    os.environ |= {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    sys.path[:0] = [str(tree / "src"), str(tree)]  # ranks that a test starts import the tests from the tree
    import pytest

    code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
    sys.exit({0: PASSED, 1: FAILED}.get(code, 1))  # 1: no tests, a broken import, or an exception in pytest itself


@contextlib.contextmanager
def copies_of(root: Path, number: int) -> Iterator[list[Copy]]:
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        yield [Copy(root, Path(folder) / str(one)) for one in range(number)]


@dataclass
class Results:
    """The results file: one row a mutant."""

    path: Path
    rows: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Results:
        kept = json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []
        return cls(path, {row["name"]: row for row in kept})

    def has(self, mutant: Mutant, root: Path) -> bool:
        row = self.rows.get(mutant.name)
        return row is not None and row["result"] == KILLED and row["digest"] == mutant.digest(root)

    def add(self, mutant: Mutant, digest: str, result: str, seconds: float) -> None:
        row = {"name": mutant.name, "file": mutant.file, "result": result, "seconds": round(seconds, 1)}
        self.rows[mutant.name] = {**row, "digest": digest}

    def write(self, table: Sequence[Mutant]) -> None:
        """Counts and survivors first; rows of mutants that are no longer in the table are dropped."""
        by_name = {mutant.name: mutant for mutant in table}
        rows = [self.rows[name] for name in by_name if name in self.rows]
        counts = {kind: sum(row["result"] == kind for row in rows) for kind in (KILLED, SURVIVED, TIMEOUT, ERROR)}
        survivors = [by_name[row["name"]] for row in rows if row["result"] == SURVIVED]
        content = {
            "name": "mutants",
            "processor": platform.processor() or platform.machine(),
            "versions": _versions(),
            "mutants": len(table),
            **counts,
            "survivors": [{"name": m.name, "why": m.why, "reason": m.survives or "no test yet"} for m in survivors],
            "rows": rows,
        }
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
        part.replace(self.path)


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "numpy", "pytest")} | {"python": platform.python_version()}


def run(table: Sequence[Mutant], chosen: Sequence[Mutant], root: Path, results: Results, jobs: int) -> None:
    """Test the chosen mutants in ``jobs`` copies of the tree, and write each result at once."""
    with copies_of(root, jobs) as copies, ThreadPoolExecutor(jobs) as pool:
        free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for copy in copies:
            free.put(copy)
        digests = [mutant.digest(copies[0].path) for mutant in chosen]  # the working tree may change meanwhile

        def test(mutant: Mutant) -> tuple[str, float]:
            copy, start = free.get(), time.perf_counter()
            try:
                return copy.test(mutant, SECONDS), time.perf_counter() - start
            finally:
                free.put(copy)

        try:
            for mutant, digest, (result, seconds) in zip(chosen, digests, pool.map(test, chosen), strict=True):
                results.add(mutant, digest, result, seconds)
                results.write(table)
                print(f"{result:<9} {seconds:6.1f} s  {mutant.name}", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for copy in copies:
                copy.end()
            raise


def failing(chosen: Sequence[Mutant], root: Path) -> list[str]:
    """The named tests that fail or do not exist in the unchanged tree: they would catch any mutant."""
    with copies_of(root, 1) as (copy,):
        names = sorted({test for mutant in chosen for test in mutant.tests})
        if copy.run(names, SECONDS * 10) == SURVIVED:
            return []
        return [name for name in names if copy.run([name], SECONDS) != SURVIVED]


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    options = _options(arguments)
    table = read_table(root)
    chosen = [mutant for mutant in table if fnmatch.fnmatch(mutant.name, f"*{options.only}*")]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name}: {mutant.file}: {mutant.why}")
        return 0
    results = Results.read(root / RESULTS)
    todo = [mutant for mutant in chosen if options.again or not results.has(mutant, root)]
    if todo and (broken := failing(todo, root)):
        print(f"these tests fail without any mutant: {', '.join(broken)}", file=sys.stderr)
        return 1
    run(table, todo, root, results, options.jobs)
    return _summary(chosen, results)


def _summary(chosen: Sequence[Mutant], results: Results) -> int:
    found = {mutant.name: results.rows[mutant.name]["result"] for mutant in chosen}
    of_kind = {kind: [m for m in chosen if found[m.name] == kind] for kind in (KILLED, SURVIVED, TIMEOUT, ERROR)}
    for kind in (SURVIVED, TIMEOUT, ERROR):
        for mutant in of_kind[kind]:
            print(f"{kind}: {mutant.name} ({mutant.file}): {mutant.why}{mutant.survives and f'; {mutant.survives}'}")
    print(f"{len(chosen)} mutants: " + ", ".join(f"{len(each)} {kind}" for kind, each in of_kind.items()))
    return int(len(of_kind[SURVIVED]) > MOST or bool(of_kind[ERROR]))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PATTERN", default="", help="mutants whose names contain this; * is allowed")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="mutants at a time")
    parser.add_argument("--list", action="store_true", help="print the mutants and exit")
    parser.add_argument("--again", action="store_true", help="repeat mutants that have a result")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):  # which a shell ignores for jobs in the background
        signal.signal(number, signal.default_int_handler)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    try:
        sys.exit(main())
    except MutantError as error:
        sys.exit(str(error))
