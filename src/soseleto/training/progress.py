"""One live line on the terminal while a training runs; the library itself never prints unless asked to."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

BAR = 16  # characters
ESTIMATE_AFTER = 3.0  # seconds of steps before a whole is estimated
_ERASE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))


class Listener(Protocol):
    """What a training tells its events to: the records of ``metrics.jsonl`` as they are made, and its steps."""

    def __call__(self, event: str, record: dict[str, Any], /) -> None: ...


def live() -> Listener:
    """The live line of ``fit(..., progress=True)``, on standard error."""
    return LiveLine()


class LiveLine:
    """A bar over the steps with losses, mean weight, effective size and the time left.

    It holds no thread and hides no cursor, so an exception cannot leave the terminal in a strange state. Without
    a terminal only the run's messages are printed, so that a log stays short.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.title, self.later = "", 0.0
        self.estimated = False
        self.said: set[str] = set()
        self._start({})

    def stage(self, title: str, *, later: float = 0.0) -> None:
        """The next training has this title; those after it will take ``later`` times as long as it."""
        self.title, self.later = title, later
        self._start({})

    def _start(self, record: Mapping[str, Any]) -> None:
        self.begin = time.monotonic()
        self.epochs, self.steps = record.get("epochs", 0), record.get("steps", 0)
        self.first_step: int | None = None  # the first that was seen: a training may go on in the middle
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
                self._say_once(str(text))
        if event in ("step", "epoch"):
            if self.first_step is None:
                self.first_step, self.begin = record.get("step", 0), time.monotonic()
            self.seen |= record
            self._estimate()
            self._show()
        if event == "end":
            self.clear()

    def clear(self) -> None:
        """Leave an empty line behind."""
        if self.console.is_terminal:
            self.console.control(_ERASE)

    def line(self) -> Text:
        """What is shown now."""
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
        """Seconds until this training ends, by the steps seen so far."""
        passed, steps = time.monotonic() - self.begin, self.seen.get("step", 0) - (self.first_step or 0)
        if passed < 1 or steps < 1:
            return None
        return passed / steps * (self.steps - self.seen["step"])

    def _estimate(self) -> None:
        """Once, after the first steps: how long all of it will take."""
        left, passed = self._left(), time.monotonic() - self.begin
        if left is None or self.estimated or passed < ESTIMATE_AFTER:
            return
        self.estimated = True
        this = passed + left
        rest = f": {_clock(this)} for this training, {_clock(self.later * this)} for the others" if self.later else ""
        self._say(f"this will take about {_clock(this * (1 + self.later))}{rest}")

    def _show(self) -> None:
        if self.console.is_terminal:
            self.clear()
            self.console.print(self.line(), end="", no_wrap=True, overflow="ellipsis", crop=True)

    def _say_once(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            self._say(text)

    def _say(self, text: str) -> None:
        self.clear()
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _clock(seconds: float) -> str:
    """``1:05``, or ``2.5 h``."""
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d}" if whole < 3600 else f"{seconds / 3600:.1f} h"


def describe(record: Mapping[str, Any]) -> str:
    """``source 0.41 · target 0.08 · weight 0.72 · effective 402``, of the numbers that are there."""
    parts = [
        ("source", record.get("source_loss"), ".3g"),
        ("target", record.get("target_loss"), ".3g"),
        ("weight", record.get("mean_weight"), ".2f"),
        ("effective", record.get("effective_source"), ",.0f"),
    ]
    return " · ".join(f"{name} {value:{form}}" for name, value, form in parts if isinstance(value, int | float))
