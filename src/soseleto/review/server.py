"""The review server: listens on localhost only, for one browser session opened by a one-time link.

Refused, in this order: a ``Host`` header other than our own address (DNS rebinding), cross-site requests (CSRF), an
invalid or used link, requests without the session cookie, bodies that are not small JSON. Images are requested by
their row in the ranking, so that no request contains a path. Connections, the size of a request and its duration are
bounded (connections.py).
"""

from __future__ import annotations

import contextlib
import http
import http.client
import http.cookies
import http.server
import json
import logging
import os
import secrets
import socket
import threading
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from soseleto.errors import DiskError, SoseletoError, UsageError
from soseleto.review.audit import Audit, prepare
from soseleto.review.connections import TIMEOUT, BoundedLines, Connections
from soseleto.review.decisions import Decision, Decisions
from soseleto.review.html import render
from soseleto.review.queue import Queue
from soseleto.run_folder import thumbnails
from soseleto.run_folder.folder import AUDIT, SUSPECTS, RunFolder
from soseleto.run_folder.ranking import with_audit

logger = logging.getLogger("soseleto")

ADDRESS = "127.0.0.1"
TEXT = "text/plain; charset=utf-8"
LARGEST_BODY = 4096
LARGEST_HEAD = 1 << 14  # bytes of the request line and all headers
OWN = (None, "none", "same-origin")  # Sec-Fetch-Site: not a browser, an address typed in, the page itself
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Refused(Exception):
    """A request is refused with a status and one sentence."""

    def __init__(self, status: http.HTTPStatus, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True)
class AuditOptions:
    """What ``soseleto audit`` was asked for."""

    checks: int | None = None
    width: float | None = None
    seed: int | None = None


class Review:
    """One session of a review or, with ``asked``, of an audit: the queue, the decisions, and the credentials."""

    def __init__(self, run_path: str | os.PathLike[str], asked: AuditOptions | None = None) -> None:
        self.run = RunFolder.open(run_path)
        self.is_audit = asked is not None
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self.decisions = Decisions(self.run)
        try:
            self._prepare(asked)
        except BaseException:
            self.decisions.close()
            raise
        self.page, self.policy = render(self.run.path.resolve().name, str(run_path), audit=self.is_audit)
        self.session = secrets.token_urlsafe(32)
        self._token: str | None = secrets.token_urlsafe(32)
        self._rows = frozenset(self.queue.rows.tolist())

    def _prepare(self, asked: AuditOptions | None) -> None:
        if asked is None:
            self.queue, self.audit = Queue.of(self.run), Audit.load(self.run)
            return
        made = self.decisions.latest()
        audit = prepare(self.run, made, **vars(asked))
        self.queue, self.audit = Queue.of_sample(self.run, audit.ids()), audit
        self._audited()

    def _audited(self) -> dict[str, Any] | None:
        """Write the figures of an audit, which a review changes too; return them for the page of an audit."""
        if self.audit is None:
            return None
        with self._writing, contextlib.suppress(DiskError):  # the decision is saved; the next one writes this again
            progress = self.audit.progress(self.decisions.latest())
            audit = progress.to_dict()
            self.run.write_json(AUDIT, audit)
            self.run.write_json(SUSPECTS, with_audit(self.run.suspects() or {}, audit))
        return progress.on_page() if self.is_audit else None

    @property
    def command(self) -> str:
        return "soseleto audit" if self.is_audit else "soseleto review"

    @property
    def token(self) -> str:
        """The one-time part of the link."""
        return self._token or ""

    def admit(self, token: str) -> bool:
        """Whether the token is valid; it works once."""
        with self._lock:
            good = self._token is not None and secrets.compare_digest(token.encode(), self._token.encode())
            if good:
                self._token = None
            return good

    def state(self) -> dict[str, Any]:
        made = {one.id: {"action": one.action, "label": one.label} for one in self.decisions.latest().values()}
        return {**self.queue.to_json(), "decisions": made, "audit": self._audited()}

    def decide(self, request: dict[str, Any]) -> dict[str, Any]:
        row, label = request.get("row"), request.get("label")
        if type(row) is not int or row not in self._rows:
            raise UsageError(f"row {row!r} is not in the queue.")
        if label is not None and label not in self.queue.classes:
            raise UsageError(f"{label!r} is not a class of this run.")
        self.decisions.decide(Decision(self.queue.id_of(row), str(request.get("action")), label))
        return {"row": row, "audit": self._audited()}

    def undo(self) -> dict[str, Any]:
        """The id whose decision was reverted, and the earlier decision that applies again."""
        undone = self.decisions.undo()
        if undone is None:
            return {"id": None}
        before = self.decisions.latest().get(undone.id)
        earlier = before and {"action": before.action, "label": before.label}
        return {"id": undone.id, "before": earlier, "audit": self._audited()}


class Server(http.server.ThreadingHTTPServer):
    """Listens on the loopback address only; one thread for each of a bounded number of connections."""

    daemon_threads = True
    allow_reuse_address = os.name == "posix"
    request_queue_size = 128

    def __init__(self, review: Review, port: int = 0, *, seconds: float = TIMEOUT) -> None:
        self.review = review
        self.connections = Connections(seconds=seconds)
        try:
            super().__init__((ADDRESS, port), Handler)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise UsageError(f"port {port} cannot be used ({why}): give another --port, or none.") from error
        except OverflowError as error:
            raise UsageError(f"--port must be between 0 and 65535, got {port}.") from error
        self.host = f"{ADDRESS}:{self.server_address[1]}"
        self.cookie = f"soseleto-review-{self.server_address[1]}"  # cookies ignore the port

    @property
    def link(self) -> str:
        return f"http://{self.host}/?token={self.review.token}"

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.remove(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called regularly while the server runs."""
        self.connections.expire()

    def server_close(self) -> None:
        self.connections.close()
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that breaks off is no error, and any other has been answered: print nothing."""


def serve(
    run_path: str | os.PathLike[str],
    ready: Callable[[str], None],
    *,
    port: int = 0,
    asked: AuditOptions | None = None,
) -> None:
    """Serve until interrupted; ``ready`` is called with the link once the server is listening."""
    review = Review(run_path, asked)
    try:
        with Server(review, port) as server:
            ready(server.link)
            server.serve_forever(poll_interval=0.2)
    finally:
        review.decisions.close()


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    connection: socket.socket
    protocol_version = "HTTP/1.1"
    timeout = TIMEOUT
    requestline, request_version, command = "", "HTTP/1.1", ""  # of a request that cannot be read

    def setup(self) -> None:
        super().setup()
        self.rfile: Any = BoundedLines(self.rfile, LARGEST_HEAD)

    def handle_one_request(self) -> None:
        self.rfile.left = LARGEST_HEAD
        try:
            super().handle_one_request()
        except http.client.HTTPException:  # the request line is too long
            self.send_error(http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        self.server.connections.renew(self.connection)

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def version_string(self) -> str:
        return "soseleto"

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer malformed HTTP with our own headers, without a message from the standard library."""
        status = http.HTTPStatus(code)
        self.close_connection = True
        self._send(status, f"{status.phrase}.\n".encode(), TEXT)

    def _answer(self, work: Callable[[urllib.parse.SplitResult], None]) -> None:
        try:
            if self.headers.get_all("Host") != [self.server.host]:
                raise Refused(http.HTTPStatus.MISDIRECTED_REQUEST, f"Wrong Host header: this is {self.server.host}.")
            work(_split(self.path))
        except Refused as refusal:
            self.close_connection = True  # the refused body has not been read
            self._send(refusal.status, f"{refusal}\n".encode(), TEXT)
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception as error:
            logger.exception("the review server failed")
            self.close_connection = True
            self._send(http.HTTPStatus.INTERNAL_SERVER_ERROR, f"Unexpected {type(error).__name__}.\n".encode(), TEXT)

    def _get(self, url: urllib.parse.SplitResult) -> None:
        if url.path == "/":
            return self._page(urllib.parse.parse_qs(url.query).get("token", []))
        self._check_session()
        if url.path == "/state":
            return self._json(self.server.review.state())
        return self._picture(url.path)

    def _page(self, tokens: list[str]) -> None:
        review = self.server.review
        fresh = len(tokens) == 1 and not self._has_session() and review.admit(tokens[0])
        if not fresh and not self._has_session():
            raise Refused(
                http.HTTPStatus.FORBIDDEN, f"This link is invalid or was already used: start `{review.command}` again."
            )
        cookie = f"{self.server.cookie}={review.session}; HttpOnly; SameSite=Strict; Path=/"
        headers = {"Content-Security-Policy": review.policy} | ({"Set-Cookie": cookie} if fresh else {})
        self._send(http.HTTPStatus.OK, review.page, "text/html; charset=utf-8", headers)

    def _picture(self, path: str) -> None:
        start, _, row = path.rpartition("/")
        queue = self.server.review.queue
        known = start == "/picture" and _is_count(row) and int(row) < len(queue.ranking["weight"])
        picture = queue.picture(int(row)) if known else None
        if picture is None:
            raise Refused(http.HTTPStatus.NOT_FOUND, "Not found.")
        self._send(
            http.HTTPStatus.OK, picture, thumbnails.media_type(picture), {"Cache-Control": "private, max-age=3600"}
        )

    def _post(self, url: urllib.parse.SplitResult) -> None:
        if self.headers.get("Origin") != f"http://{self.server.host}":
            raise Refused(http.HTTPStatus.FORBIDDEN, "Decisions are accepted only from the review page.")
        self._check_session()
        if self.headers.get("Content-Type") != "application/json":
            raise Refused(http.HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "Content-Type must be application/json.")
        body, review = self._body(), self.server.review
        try:
            if url.path == "/decide":
                return self._json(review.decide(body))
            if url.path == "/undo":
                return self._json(review.undo())
        except DiskError as error:
            raise Refused(http.HTTPStatus.INSUFFICIENT_STORAGE, str(error)) from error
        except SoseletoError as error:
            raise Refused(http.HTTPStatus.BAD_REQUEST, str(error)) from error
        raise Refused(http.HTTPStatus.NOT_FOUND, "Not found.")

    def _check_session(self) -> None:
        if self.headers.get("Sec-Fetch-Site") not in OWN:
            raise Refused(http.HTTPStatus.FORBIDDEN, "Cross-site requests are refused.")
        if not self._has_session():
            raise Refused(
                http.HTTPStatus.FORBIDDEN, f"No session: open the link that `{self.server.review.command}` printed."
            )

    def _has_session(self) -> bool:
        try:
            cookie = http.cookies.SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except http.cookies.CookieError:
            return False
        own = self.server.review.session.encode()
        if cookie is None or not secrets.compare_digest(cookie.value.encode(), own):
            return False
        self.server.connections.trust(self.connection)
        return True

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not _is_count(length) or "Transfer-Encoding" in self.headers:
            raise Refused(http.HTTPStatus.LENGTH_REQUIRED, "Content-Length is required.")
        if int(length) > LARGEST_BODY:
            raise Refused(http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The body may have at most {LARGEST_BODY} bytes.")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise Refused(http.HTTPStatus.BAD_REQUEST, "The body is not valid JSON.") from error
        if not isinstance(body, dict):
            raise Refused(http.HTTPStatus.BAD_REQUEST, "The body must be a JSON object.")
        return body

    def _json(self, value: dict[str, Any]) -> None:
        self._send(http.HTTPStatus.OK, json.dumps(value, allow_nan=False).encode(), "application/json")

    def _send(self, status: http.HTTPStatus, content: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.request_version = self.protocol_version  # HTTP/0.9 has no headers, and is assumed for what cannot be read
        self.send_response(status)
        policy = {"Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; sandbox"}
        for name, value in {**HEADERS, **policy, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _split(path: str) -> urllib.parse.SplitResult:
    try:
        return urllib.parse.urlsplit(path)
    except ValueError as error:  # such as http://[
        raise Refused(http.HTTPStatus.BAD_REQUEST, "The address is not valid.") from error


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10
