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
        self.begin = time.monotonic()
        self.epochs = self.steps = 0
        self.seen: dict[str, Any] = {}

    def __enter__(self) -> LiveLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def __call__(self, event: str, record: dict[str, Any], /) -> None:
        if event == "start":
            self.begin = time.monotonic()
            self.epochs, self.steps = record.get("epochs", 0), record.get("steps", 0)
        if event in ("start", "message"):
            for text in [*(record.get("messages") or []), *filter(None, [record.get("text")])]:
                self._say(str(text))
        if event in ("step", "epoch"):
            self.seen |= record
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
        return Text.assemble(
            f"epoch {self.seen.get('epoch', 0)}/{self.epochs} ",
            ("━" * full, "green"),
            ("━" * (BAR - full), "bright_black"),
            f" {numbers}" if numbers else "",
            (self._left(done), "bright_black"),
        )

    def _left(self, done: float) -> str:
        passed = time.monotonic() - self.begin
        if passed < 1 or not 0 < done < 1:
            return ""
        left = round(passed / done * (1 - done))
        return f" · {left // 60}:{left % 60:02d} left" if left < 3600 else f" · {left / 3600:.1f} h left"

    def _show(self) -> None:
        if self.console.is_terminal:
            self.clear()
            self.console.print(self.line(), end="", no_wrap=True, overflow="ellipsis", crop=True)

    def _say(self, text: str) -> None:
        self.clear()
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def describe(record: Mapping[str, Any]) -> str:
    """``source 0.41 · target 0.08 · weight 0.72 · effective 402``, of the numbers that are there."""
    parts = [
        ("source", record.get("source_loss"), ".3g"),
        ("target", record.get("target_loss"), ".3g"),
        ("weight", record.get("mean_weight"), ".2f"),
        ("effective", record.get("effective_source"), ",.0f"),
    ]
    return " · ".join(f"{name} {value:{form}}" for name, value, form in parts if isinstance(value, int | float))
