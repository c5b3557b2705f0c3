"""One file from the network: resumed, retried, checked; under its own name it is whole or not there at all.

What has arrived so far lies beside it as NAME.part. It gets its name only after its checksum has been compared.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soseleto.errors import DataError

Progress = Callable[[str, int, int | None], None]  # name, bytes so far, bytes in all
_CHUNK = 1 << 18
_PASSING = {408, 425, 429, 500, 502, 503, 504}  # answers worth another try


@dataclass(frozen=True)
class Remote:
    """A file to fetch: its addresses (the first is tried first), checksum and size."""

    urls: tuple[str, ...]
    md5: str
    size: int


@dataclass(frozen=True)
class Patience:
    """How long to try."""

    tries: int = 5  # for each address
    timeout: float = 30.0  # seconds without a byte
    pause: float = 1.0  # before the second try; doubled each time, at most 60
    sleep: Callable[[float], None] = time.sleep


class Unreachable(DataError):
    """No address gave the file."""


def download(remote: Remote, path: Path, *, progress: Progress | None = None, patience: Patience | None = None) -> None:
    """Fetch the file to ``path``; one that is there already and right is left alone."""
    if path.is_file() and md5_of(path) == remote.md5:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    troubles = []
    for url in remote.urls:
        try:
            _from(url, remote, path, progress, patience or Patience())
            return
        except _GaveUp as trouble:
            troubles.append(f"{url}: {trouble}")
    raise Unreachable("; ".join(troubles))


class _GaveUp(Exception):
    """This address is of no use."""


class _Again(Exception):
    """Worth another try, after at least ``wait`` seconds."""

    def __init__(self, why: str, wait: float = 0.0) -> None:
        super().__init__(why)
        self.wait = wait


def _from(url: str, remote: Remote, path: Path, progress: Progress | None, patience: Patience) -> None:
    part = path.with_name(path.name + ".part")
    trouble = ""
    for attempt in range(patience.tries):
        try:
            _receive(url, remote, part, progress, patience.timeout)
            _accept(remote, part, path)
            return
        except _Again as error:
            trouble = str(error)
            if attempt + 1 < patience.tries:
                patience.sleep(min(60.0, max(patience.pause * 2**attempt, error.wait)))
    raise _GaveUp(f"{trouble} ({patience.tries} tries)")


def _accept(remote: Remote, part: Path, path: Path) -> None:
    if md5_of(part) != remote.md5:
        part.unlink()  # nothing of it can be trusted
        raise _Again("what arrived has another checksum than the official file")
    os.replace(part, path)


def _receive(url: str, remote: Remote, part: Path, progress: Progress | None, timeout: float) -> None:
    """Append to the part what is still lacking."""
    have = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "soseleto", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        with _opener().open(request, timeout=timeout) as answer:
            if have and not _continues(answer, have):
                have = 0  # the server sends everything again
            _save(answer, part, have, remote, progress)
    except urllib.error.HTTPError as error:
        _http_trouble(error, part)
    except (OSError, http.client.HTTPException) as error:  # URLError, timeouts and resets are OSErrors
        reason = getattr(error, "reason", None) or error
        raise _Again(f"{reason}" or type(error).__name__) from error


def _save(answer: Any, part: Path, have: int, remote: Remote, progress: Progress | None) -> None:
    length = answer.headers.get("Content-Length")
    total = have + int(length) if length and length.isdigit() else None
    with open(part, "ab" if have else "wb") as file:
        while chunk := answer.read1(_CHUNK):  # what has arrived, so a stall loses nothing
            file.write(chunk)
            have += len(chunk)
            if have > 2 * remote.size:
                file.truncate(0)
                raise _GaveUp(f"it sends more than twice the {remote.size} bytes of the official file")
            if progress:
                progress(part.name.removesuffix(".part"), have, total)
    if total is not None and have < total:
        raise _Again(f"it stopped after {have} of {total} bytes")


def _continues(answer: Any, have: int) -> bool:
    return answer.status == 206 and str(answer.headers.get("Content-Range", "")).startswith(f"bytes {have}-")


def _http_trouble(error: urllib.error.HTTPError, part: Path) -> None:
    error.close()
    if error.code == 416:  # the part is as long as the file or longer: start afresh
        part.unlink(missing_ok=True)
        raise _Again("it has nothing beyond what is here") from error
    if error.code in _PASSING:
        wait = error.headers.get("Retry-After", "")
        raise _Again(f"HTTP {error.code}", float(wait) if wait.isdigit() else 0.0) from error
    raise _GaveUp(f"HTTP {error.code}") from error


def _opener() -> urllib.request.OpenerDirector:
    """HTTP and HTTPS only: a redirect to a file or another scheme is refused."""
    opener = urllib.request.OpenerDirector()
    handlers: Sequence[Any] = (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.UnknownHandler(),
    )
    for handler in handlers:
        opener.add_handler(handler)
    return opener


def md5_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()
