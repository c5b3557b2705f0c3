"""Progress of a training, for ``fit(..., progress=True)`` and the command line: a live line on a terminal, else lines
now and then.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from soseleto.errors import UsageError
from soseleto.training.history import VANISHED
from soseleto.training.options import Logger, Progress, Watcher

BAR = 16  # characters
ESTIMATE_AFTER = 3.0  # seconds of steps before a whole is estimated
LOG_SECONDS = 60.0  # without a terminal: the longest time without a line ...
LOG_SHARE, LOG_PAUSE = 0.05, 5.0  # ... and the share of the steps after which there is one, if it took this long
_ERASE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))


def as_watchers(progress: Watcher | Sequence[Watcher]) -> tuple[list[Progress], list[Logger]]:
    """The functions and the loggers of ``progress``; True stands for the live line on the terminal."""
    functions: list[Progress] = []
    loggers: list[Logger] = []
    for watcher in progress if isinstance(progress, tuple | list) else [progress]:
        if watcher is True:
            functions.append(LiveLine())
        elif hasattr(watcher, "log") and hasattr(watcher, "close"):
            loggers.append(watcher)  # type: ignore[arg-type]
        elif callable(watcher):
            functions.append(watcher)
        elif watcher:
            raise UsageError(
                "progress takes True, a function progress(event, record), a logger with log and close, or a list of "
                f"these, got {type(watcher).__name__}."
            )
    return functions, loggers


class LiveLine:
    """A progress bar on standard error with losses, mean weight, effective source size and the time left.

    It uses no thread and does not hide the cursor, so an exception cannot leave the terminal in a bad state. Without a
    terminal a line is printed every minute or every 5 % of the steps, at most one in 5 seconds, to keep logs short.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.title, self.later = "", 0.0
        self.estimated = False
        self.printed: set[str] = set()
        self.logged_at = time.monotonic()
        self._start({})

    def stage(self, title: str, *, later: float = 0.0) -> None:
        """Begin a training with this title; those after it will take ``later`` times as long as it."""
        self.title, self.later = title, later
        self._start({})

    def _start(self, record: Mapping[str, Any]) -> None:
        self.begin = time.monotonic()
        self.epochs, self.steps = record.get("epochs", 0), record.get("steps", 0)
        self.logged_step = 0
        self.first_step: int | None = None  # the first one seen: a resumed training starts in the middle
        self.seen: dict[str, Any] = {}

    def __enter__(self) -> LiveLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def __call__(self, event: str, record: dict[str, Any], /) -> None:
        if event == "start":
            self._start(record)
        if event in ("start", "message"):
            for text in [*(record.get("messages") or []), *filter(None, [record.get("text")])]:
                self._print_once(str(text))
        if event in ("step", "epoch"):
            if self.first_step is None:
                self.first_step = self.logged_step = record.get("step", 0)
                self.begin = time.monotonic()
            self.seen |= record
            self._estimate()
            self._show()
        if event == "end":
            self.clear()

    def clear(self) -> None:
        """Erase the line."""
        if self.console.is_terminal:
            self.console.control(_ERASE)

    def line(self) -> Text:
        """The current line."""
        done = self.seen.get("step", 0) / self.steps if self.steps else 0.0
        full = round(BAR * done)
        numbers = describe(self.seen)
        left = self._left()
        return Text.assemble(
            f"{self.title} · " if self.title else "",
            f"epoch {self.seen.get('epoch', 0)}/{self.epochs} ",
            ("━" * full, "green"),
            ("━" * (BAR - full), "bright_black"),
            f" {numbers}" if numbers else "",
            ("" if left is None or left < 1 else f" · {_clock(left)} left", "bright_black"),
        )

    def _left(self) -> float | None:
        """Seconds until this training ends, estimated from the steps seen so far."""
        passed, steps = time.monotonic() - self.begin, self.seen.get("step", 0) - (self.first_step or 0)
        if passed < 1 or steps < 1:
            return None
        return passed / steps * (self.steps - self.seen["step"])

    def _estimate(self) -> None:
        """Once, after the first steps: print how long all trainings will take."""
        left, passed = self._left(), time.monotonic() - self.begin
        if left is None or self.estimated or passed < ESTIMATE_AFTER:
            return
        self.estimated = True
        this = passed + left
        parts = f": {_clock(this)} for this training, {_clock(self.later * this)} for the others" if self.later else ""
        self._print(f"this will take about {_clock(this * (1 + self.later))}{parts}")

    def _show(self) -> None:
        if self.console.is_terminal:
            self.clear()
            self.console.print(self.line(), end="", no_wrap=True, overflow="ellipsis", crop=True)
        elif self._is_due():
            self.logged_at, self.logged_step = time.monotonic(), self.seen.get("step", 0)
            self._print(self.log_line())

    def _is_due(self) -> bool:
        passed = time.monotonic() - self.logged_at
        done = self.seen.get("step", 0) - self.logged_step
        return passed >= LOG_SECONDS or (passed >= LOG_PAUSE and done >= LOG_SHARE * max(1, self.steps))

    def log_line(self) -> str:
        """``ordinary training: epoch 3 of 30, 10 %, source 0.41, target 0.08, 1:05 left``."""
        numbers, left = describe(self.seen).replace(" · ", ", "), self._left()
        parts = [
            f"epoch {self.seen.get('epoch', 0)} of {self.epochs}",
            f"{100 * self.seen.get('step', 0) / self.steps:.0f} %" if self.steps else "",
            numbers,
            "" if left is None or left < 1 else f"{_clock(left)} left",
        ]
        return (f"{self.title}: " if self.title else "") + ", ".join(filter(None, parts))

    def _print_once(self, text: str) -> None:
        """A message of several trainings is printed for the first, also where it has other numbers."""
        key = VANISHED if text.startswith(VANISHED) else text
        if key not in self.printed:
            self.printed.add(key)
            self._print(text)

    def _print(self, text: str) -> None:
        self.clear()
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _clock(seconds: float) -> str:
    """``1:05``, or ``2.5 h``."""
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d}" if whole < 3600 else f"{seconds / 3600:.1f} h"


def describe(record: Mapping[str, Any]) -> str:
    """``source 0.41 · target 0.08 · weight 0.72 · effective 402``, of those numbers that the record has."""
    parts = [
        ("source", record.get("source_loss"), ".3g"),
        ("target", record.get("target_loss"), ".3g"),
        ("weight", record.get("mean_weight"), ".2f"),
        ("effective", record.get("effective_source"), ",.0f"),
    ]
    return " · ".join(f"{name} {value:{form}}" for name, value, form in parts if isinstance(value, int | float))
