"""Download of one file: resumed, retried and verified.

The partial download is NAME.part; it is renamed to NAME only after its checksum has been verified.
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

ByteProgress = Callable[[str, int, int | None], None]  # file name, bytes so far, bytes in total
_CHUNK = 1 << 18
_TEMPORARY = {408, 425, 429, 500, 502, 503, 504}  # HTTP statuses worth another try


@dataclass(frozen=True)
class Remote:
    """A file to download: addresses in order of preference, checksum and size."""

    urls: tuple[str, ...]
    md5: str
    size: int


@dataclass(frozen=True)
class Patience:
    """Retries and timeouts."""

    tries: int = 5  # per address
    timeout: float = 30.0  # seconds without a byte
    pause: float = 1.0  # seconds before the second try; doubled each time, at most 60
    sleep: Callable[[float], None] = time.sleep


class Unreachable(DataError):
    """No address delivered the file."""


def download(
    remote: Remote, path: Path, *, progress: ByteProgress | None = None, patience: Patience | None = None
) -> None:
    """Download the file to ``path``, unless it is there already with the right checksum."""
    if path.is_file() and md5_of(path) == remote.md5:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    failures = []
    for url in remote.urls:
        try:
            _from(url, remote, path, progress, patience or Patience())
            return
        except _GaveUp as error:
            failures.append(f"{url}: {error}")
    raise Unreachable("; ".join(failures))


class _GaveUp(Exception):
    """No further attempt at this address."""


class _Again(Exception):
    """Try again after at least ``wait`` seconds."""

    def __init__(self, why: str, wait: float = 0.0) -> None:
        super().__init__(why)
        self.wait = wait


def _from(url: str, remote: Remote, path: Path, progress: ByteProgress | None, patience: Patience) -> None:
    part = path.with_name(path.name + ".part")
    failure = ""
    for attempt in range(patience.tries):
        try:
            _receive(url, remote, part, progress, patience.timeout)
            _accept(remote, part, path)
            return
        except _Again as error:
            failure = str(error)
            if attempt + 1 < patience.tries:
                patience.sleep(min(60.0, max(patience.pause * 2**attempt, error.wait)))
    raise _GaveUp(f"{failure} ({patience.tries} tries)")


def _accept(remote: Remote, part: Path, path: Path) -> None:
    if md5_of(part) != remote.md5:
        part.unlink()  # which bytes are wrong is unknown
        raise _Again("the checksum is not that of the official file")
    os.replace(part, path)


def _receive(url: str, remote: Remote, part: Path, progress: ByteProgress | None, timeout: float) -> None:
    """Append the missing bytes to the partial file."""
    have = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "soseleto", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        with _opener().open(request, timeout=timeout) as response:
            if have and not _continues(response, have):
                have = 0  # the server ignored the range and sends the whole file
            _save(response, part, have, remote, progress)
    except urllib.error.HTTPError as error:
        _raise_http(error, part)
    except (OSError, http.client.HTTPException) as error:  # URLError, timeouts and resets are OSErrors
        reason = getattr(error, "reason", None) or error
        raise _Again(f"{reason}" or type(error).__name__) from error


def _save(response: Any, part: Path, have: int, remote: Remote, progress: ByteProgress | None) -> None:
    length = response.headers.get("Content-Length")
    total = have + int(length) if length and length.isdigit() else None
    with open(part, "ab" if have else "wb") as file:
        while chunk := response.read1(_CHUNK):  # returns what has arrived, so a stall loses nothing
            file.write(chunk)
            have += len(chunk)
            if have > 2 * remote.size:
                file.truncate(0)
                raise _GaveUp(f"it sends more than twice the {remote.size} bytes of the official file")
            if progress:
                progress(part.name.removesuffix(".part"), have, total)
    if total is not None and have < total:
        raise _Again(f"it stopped after {have} of {total} bytes")


def _continues(response: Any, have: int) -> bool:
    return response.status == 206 and str(response.headers.get("Content-Range", "")).startswith(f"bytes {have}-")


def _raise_http(error: urllib.error.HTTPError, part: Path) -> None:
    error.close()
    if error.code == 416:  # the partial file is as long as the file or longer: start over
        part.unlink(missing_ok=True)
        raise _Again("the partial file is not shorter than the file on the server") from error
    if error.code in _TEMPORARY:
        wait = error.headers.get("Retry-After", "")
        raise _Again(f"HTTP {error.code}", float(wait) if wait.isdigit() else 0.0) from error
    raise _GaveUp(f"HTTP {error.code}") from error


def _opener() -> urllib.request.OpenerDirector:
    """An opener for HTTP and HTTPS only: a redirect to file: or another scheme fails."""
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
