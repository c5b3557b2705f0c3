"""What the wrappers share: a method that passes for the method it wraps, and a state around that method's state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from soseleto.task.task import Method, Task


class Transparent:
    """A wrapper that appears in messages, tables and run folders under the name and settings of ``method``."""

    method: Method

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def takes_views(self) -> bool:
        return bool(getattr(self.method, "takes_views", False))

    def __repr__(self) -> str:
        return repr(self.method)


@dataclass
class WrapperState:
    """The task and the inner method's state; attributes that the wrapper's state lacks are read from ``inner``."""

    task: Task
    inner: Any

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet, as while copying: looking it up would recurse
            raise AttributeError(name)
        return getattr(self.inner, name)
