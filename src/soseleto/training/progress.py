"""Progress of a training, for ``fit(..., progress=True)`` and the command line: a live line on a terminal, else lines
now and then.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, TextIO

from soseleto.errors import UsageError
from soseleto.training.history import VANISHED
from soseleto.training.options import Progress, Watcher

CLEAR = "\r\x1b[2K"  # back to the beginning of the line, and erase it
LOG_SECONDS = 60.0  # without a terminal, between two lines


def functions_of(progress: Watcher | Sequence[Watcher]) -> list[Progress]:
    """``progress`` as functions; True stands for the live line on the terminal."""
    every = progress if isinstance(progress, tuple | list) else [progress]
    functions = [LiveLine() if watcher is True else watcher for watcher in every if watcher is not False]
    if wrong := [watcher for watcher in functions if not callable(watcher)]:
        raise UsageError(
            "progress takes True, a function progress(event, record), or a list of these, got "
            f"{type(wrong[0]).__name__}."
        )
    return functions  # type: ignore[return-value]  # checked above


class LiveLine:
    """A line on standard error with losses, mean weight, effective source size and the time left.

    Without a terminal a line is printed every minute, to keep logs short.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.printed: set[str] = set()
        self.logged_at = time.monotonic()
        self.stage("")

    def stage(self, title: str) -> None:
        """Begin a training with this title."""
        self.title = title
        self.seen: dict[str, Any] = {}
        self.begin: tuple[float, int] | None = None  # time and step of the first event: a resumed run starts later

    def __enter__(self) -> LiveLine:
        return self

    def __exit__(self, *_: object) -> None:
        self._print("")

    def __call__(self, event: str, record: dict[str, Any], /) -> None:
        if event == "start":
            self.stage(self.title)
            self.seen |= {"epochs": record.get("epochs", 0), "steps": record.get("steps", 0)}
        if "text" in record:
            self._print_once(record["text"])
        if event in ("step", "epoch"):
            self.begin = self.begin or (time.monotonic(), record.get("step", 0))
            self.seen |= record
            self._show()
        if event == "end":
            self._print("")

    def line(self) -> str:
        epochs = f"epoch {self.seen.get('epoch', 0)}/{self.seen.get('epochs', 0)}"
        left = f"{timedelta(seconds=seconds)} left" if (seconds := self._left()) else ""
        return " · ".join(filter(None, (self.title, epochs, describe(self.seen), left)))

    def _left(self) -> int:
        """Seconds until this training ends, estimated from the steps seen so far; 0 where nothing is known."""
        if self.begin is None:
            return 0
        passed, done = time.monotonic() - self.begin[0], self.seen["step"] - self.begin[1]
        return round(passed / done * (self.seen["steps"] - self.seen["step"])) if passed >= 1 and done else 0

    def _show(self) -> None:
        if self.stream.isatty():
            self._print(self.line()[: shutil.get_terminal_size().columns - 1])
        elif time.monotonic() - self.logged_at >= LOG_SECONDS:
            self.logged_at = time.monotonic()
            self._print(f"{self.line()}\n")

    def _print_once(self, text: str) -> None:
        """A message of several trainings is printed for the first, also where it has other numbers."""
        key = VANISHED if text.startswith(VANISHED) else text
        if key not in self.printed:
            self.printed.add(key)
            self._print(f"{text}\n")

    def _print(self, text: str) -> None:
        """In place of the line that is shown on a terminal."""
        self.stream.write(f"{CLEAR}{text}" if self.stream.isatty() else text)
        self.stream.flush()


def describe(record: Mapping[str, Any]) -> str:
    """``source 0.41 · target 0.08 · weight 0.72 · effective 402``, of those numbers that the record has."""
    parts = [
        ("source", record.get("source_loss"), ".3g"),
        ("target", record.get("target_loss"), ".3g"),
        ("weight", record.get("mean_weight"), ".2f"),
        ("effective", record.get("effective_source"), ",.0f"),
    ]
    return " · ".join(f"{name} {value:{form}}" for name, value, form in parts if isinstance(value, int | float))
