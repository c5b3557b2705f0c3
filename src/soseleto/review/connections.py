"""The open connections of the review server: few at a time, each for a bounded time.

A new connection is always accepted: at the limit, the one that has waited longest is closed, and those with the session
of the review last. So clients that hold many connections open or send their requests slowly cannot exclude the browser.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

MOST = 64  # a browser opens six
TIMEOUT = 30.0  # seconds for a request and its answer


@dataclass
class _Open:
    since: float  # begin of the current request
    trusted: bool = False


class BoundedLines:
    """A binary file of which only ``left`` more bytes may be read by lines."""

    def __init__(self, file: Any, left: int) -> None:
        self._file, self.left = file, left
        self.read, self.close = file.read, file.close

    def readline(self, size: int) -> bytes:
        line: bytes = self._file.readline(min(size, self.left + 1))
        self.left -= len(line)
        if self.left < 0:
            raise http.client.LineTooLong("request")
        return line


class Connections:
    """Sockets by the time that their current request has taken; safe to use from several threads."""

    def __init__(self, *, most: int = MOST, seconds: float = TIMEOUT) -> None:
        self.most, self.seconds = most, seconds
        self._open: dict[socket.socket, _Open] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: socket.socket) -> None:
        with self._lock:
            if len(self._open) >= self.most:
                self._end(min(self._open, key=lambda one: (self._open[one].trusted, self._open[one].since)))
            self._open[connection] = _Open(time.monotonic())

    def trust(self, connection: socket.socket) -> None:
        """The connection has the session."""
        with self._lock:
            if connection in self._open:
                self._open[connection].trusted = True

    def renew(self, connection: socket.socket) -> None:
        """A request has been answered: the time of the next one begins."""
        with self._lock:
            if connection in self._open:
                self._open[connection].since = time.monotonic()

    def remove(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.pop(connection, None)

    def expire(self) -> None:
        """Close the connections whose request takes too long."""
        latest = time.monotonic() - self.seconds
        with self._lock:
            for one in [one for one, state in self._open.items() if state.since < latest]:
                self._end(one)

    def close(self) -> None:
        """Close all."""
        with self._lock:
            for one in list(self._open):
                self._end(one)

    def _end(self, connection: socket.socket) -> None:
        """Its thread, which waits for the socket, then ends and closes it."""
        del self._open[connection]
        with contextlib.suppress(OSError):  # the client has closed it
            connection.shutdown(socket.SHUT_RDWR)
