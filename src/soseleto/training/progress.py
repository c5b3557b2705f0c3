"""Progress of a training, for ``fit(..., progress=True)`` and the command line: a live line on a terminal, else lines
now and then.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from soseleto.errors import UsageError
from soseleto.training.history import VANISHED
from soseleto.training.options import Logger, Progress, Watcher

if TYPE_CHECKING:  # rich is imported when a line is made: trainings without one do not need it
    from rich.console import Console
    from rich.text import Text

BAR = 16  # characters
LOG_SECONDS = 60.0  # without a terminal, between two lines


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
    terminal a line is printed every minute, to keep logs short.
    """

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console

        self.console = console or Console(stderr=True)
        self.title = ""
        self.printed: set[str] = set()
        self.logged_at = time.monotonic()
        self._start({})

    def stage(self, title: str) -> None:
        """Begin a training with this title."""
        self.title = title
        self._start({})

    def _start(self, record: Mapping[str, Any]) -> None:
        self.begin = time.monotonic()
        self.epochs, self.steps = record.get("epochs", 0), record.get("steps", 0)
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
                self.first_step = record.get("step", 0)
                self.begin = time.monotonic()
            self.seen |= record
            self._show()
        if event == "end":
            self.clear()

    def clear(self) -> None:
        """Erase the line."""
        from rich.control import Control
        from rich.segment import ControlType

        if self.console.is_terminal:
            self.console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))

    def line(self) -> Text:
        """The current line."""
        from rich.text import Text

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

    def _show(self) -> None:
        if self.console.is_terminal:
            self.clear()
            self.console.print(self.line(), end="", no_wrap=True, overflow="ellipsis", crop=True)
        elif time.monotonic() - self.logged_at >= LOG_SECONDS:
            self.logged_at = time.monotonic()
            self._print(self.line().plain.replace("━", ""))

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
