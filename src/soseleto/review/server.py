"""The review server: listens on localhost only, for one browser session opened by a one-time link.

Refused, in this order: a ``Host`` header other than our own address (DNS rebinding), cross-site requests (CSRF), an
invalid or used link, requests without the session cookie, bodies that are not small JSON. Images are requested by
their row in the ranking, so that no request contains a path. Every request has a connection of its own (HTTP/1.0).
"""

from __future__ import annotations

import contextlib
import http.cookies
import http.server
import logging
import os
import secrets
import threading
import urllib.parse
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from markupsafe import Markup

from soseleto.errors import DiskError, SoseletoError, UsageError
from soseleto.report.html import asset, digest, template
from soseleto.review.queue import Audit, Decision, Decisions, Queue, prepare
from soseleto.run_folder.files import as_json, json_object
from soseleto.run_folder.folder import AUDIT, RunFolder

logger = logging.getLogger("soseleto")

PAGE = Path(__file__).parent / "page"
ADDRESS = "127.0.0.1"
TEXT = "text/plain; charset=utf-8"
LARGEST_BODY = 4096
TIMEOUT = 30.0  # seconds without a byte, after which a connection is closed
OWN = (None, "none", "same-origin")  # Sec-Fetch-Site: not a browser, an address typed in, the page itself
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; sandbox",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Refused(Exception):
    """A request is refused with a status and one sentence."""

    def __init__(self, status: HTTPStatus, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Review:
    """One session of a review or an audit: the queue, the decisions, and the credentials."""

    def __init__(self, run_path: str | os.PathLike[str], *, audit: bool = False, checks: int | None = None) -> None:
        self.run, self.is_audit = RunFolder.open(run_path), audit
        self._turn = threading.Lock()  # of requests that read or change decisions
        if audit:
            self.audit: Audit | None = prepare(self.run, checks)
            self.queue = Queue(self.run, self.audit.ids())
        else:
            self.audit, self.queue = Audit.load(self.run), Queue(self.run)
        self.decisions = Decisions(self.run)
        self._audited()
        self.page, self.policy = render(self.run.path.resolve().name, str(run_path), audit=audit)
        self.session, self.token = secrets.token_urlsafe(32), secrets.token_urlsafe(32)

    def _audited(self) -> dict[str, Any] | None:
        """Write the figures of an audit, which a review changes too; return them for the page of an audit."""
        if self.audit is None:
            return None
        progress = self.audit.progress(self.decisions.latest())
        with contextlib.suppress(DiskError):  # the decision is saved; the next one writes this again
            self.run.write_json(AUDIT, progress.to_dict())
        return progress.on_page() if self.is_audit else None

    def admit(self, token: str) -> bool:
        """Whether the token of the link is valid; it works once."""
        valid = secrets.compare_digest(token.encode(), self.token.encode())
        if valid:
            self.token = secrets.token_urlsafe(32)
        return valid

    def state(self) -> dict[str, Any]:
        with self._turn:
            return {**self.queue.to_json(), **self._progress()}

    def _progress(self) -> dict[str, Any]:
        """The decisions that apply, by id, and the figures of an audit."""
        decisions = {key: _shown(decision) for key, decision in self.decisions.latest().items()}
        return {"decisions": decisions, "audit": self._audited()}

    def decide(self, request: dict[str, Any]) -> dict[str, Any]:
        row, label = request.get("row"), request.get("label")
        if type(row) is not int or row not in self.queue.rows:
            raise UsageError(f"row {row!r} is not in the queue.")
        if label is not None and label not in self.queue.classes:
            raise UsageError(f"{label!r} is not a class of this run.")
        decision = Decision(self.queue.ids[row], str(request.get("action")), label)
        with self._turn:
            now = self.decisions.latest().get(decision.id)
            if "before" in request and request["before"] != (now and _shown(now)):
                what = "undone" if now is None else f"{now.action}{f' as {now.label}' if now.label else ''}"
                raise Refused(HTTPStatus.CONFLICT, f"Another page has decided this example meanwhile: {what}.")
            self.decisions.decide(decision)
            return self._progress()

    def undo(self) -> dict[str, Any]:
        """The id whose decision was reverted, and the decisions that apply now."""
        with self._turn:
            undone = self.decisions.undo()
            return {"id": undone and undone.id, **self._progress()}


def _shown(decision: Decision) -> dict[str, str | None]:
    return {"action": decision.action, "label": decision.label}


def render(name: str, run_path: str, *, audit: bool = False) -> tuple[bytes, str]:
    """The page for a review or an audit of the run ``name``, and its content security policy."""
    style, script = asset("style.css"), asset("review.js", PAGE)
    page = template("review.html.j2", PAGE).render(
        name=name,
        run_path=run_path,
        audit=audit,
        style=Markup(style),  # files of this package: the only text that is not escaped
        script=Markup(script),
    )
    policy = (
        f"default-src 'none'; style-src '{digest(style)}'; script-src '{digest(script)}'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page.encode(), policy


class Server(http.server.ThreadingHTTPServer):
    """Listens on the loopback address only."""

    daemon_threads = True
    allow_reuse_address = os.name == "posix"
    request_queue_size = 128

    def __init__(self, review: Review, port: int = 0) -> None:
        self.review = review
        try:
            super().__init__((ADDRESS, port), Handler)
        except (OSError, OverflowError) as error:
            raise UsageError(f"port {port} cannot be used ({error}): give another --port, or none.") from error
        self.host = f"{ADDRESS}:{self.server_address[1]}"
        self.cookie = f"soseleto-review-{self.server_address[1]}"  # cookies ignore the port

    @property
    def link(self) -> str:
        return f"http://{self.host}/?token={self.review.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that breaks off is no error, and any other has been answered: print nothing."""


def serve(
    run_path: str | os.PathLike[str],
    ready: Callable[[str], None],
    *,
    port: int = 0,
    audit: bool = False,
    checks: int | None = None,
) -> None:
    """Serve until interrupted; ``ready`` is called with the link once the server is listening."""
    review = Review(run_path, audit=audit, checks=checks)
    try:
        with Server(review, port) as server:
            ready(server.link)
            server.serve_forever(poll_interval=0.2)
    finally:
        review.decisions.close()


class Handler(http.server.BaseHTTPRequestHandler):
    """One request."""

    server: Server
    timeout = TIMEOUT
    requestline, request_version, command = "", "HTTP/1.0", ""  # of a request that cannot be read

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
        self._send(HTTPStatus(code), f"{HTTPStatus(code).phrase}.\n".encode(), TEXT)

    def _answer(self, work: Callable[[str], None]) -> None:
        review = self.server.review
        try:
            if self.headers.get_all("Host") != [self.server.host]:
                raise Refused(HTTPStatus.MISDIRECTED_REQUEST, f"Wrong Host header: this is {self.server.host}.")
            work(self.path)
        except Refused as refusal:
            self._send(refusal.status, f"{refusal}\n".encode(), TEXT)
        except DiskError as error:
            self._send(HTTPStatus.INSUFFICIENT_STORAGE, f"{error}\n".encode(), TEXT)
        except SoseletoError as error:
            self._send(HTTPStatus.BAD_REQUEST, f"{error}\n".encode(), TEXT)
        except (ConnectionError, TimeoutError):
            pass
        except Exception as error:
            logger.exception("the server of %s failed", review.run.path)
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, f"Unexpected {type(error).__name__}.\n".encode(), TEXT)

    def _get(self, path: str) -> None:
        review = self.server.review
        start, _, query = path.partition("?")
        if start == "/":
            self._page(urllib.parse.parse_qs(query).get("token", []))
            return
        self._require_session()
        if path == "/state":
            self._json(review.state())
            return
        row = path.removeprefix("/picture/")
        exists = path.startswith("/picture/") and _is_count(row) and int(row) < len(review.queue.ids)
        picture = review.queue.picture(int(row)) if exists else None
        if picture is None:
            raise Refused(HTTPStatus.NOT_FOUND, "Not found.")
        self._send(HTTPStatus.OK, picture, "image/jpeg", {"Cache-Control": "private, max-age=3600"})

    def _page(self, tokens: list[str]) -> None:
        review, headers = self.server.review, {"Content-Security-Policy": self.server.review.policy}
        if not self._has_session():
            if len(tokens) != 1 or not review.admit(tokens[0]):
                command = "soseleto audit" if review.is_audit else "soseleto review"
                raise Refused(
                    HTTPStatus.FORBIDDEN, f"This link is invalid or was already used: start `{command}` again."
                )
            headers["Set-Cookie"] = f"{self.server.cookie}={review.session}; HttpOnly; SameSite=Strict; Path=/"
        self._send(HTTPStatus.OK, review.page, "text/html; charset=utf-8", headers)

    def _post(self, path: str) -> None:
        if self.headers.get("Origin") != f"http://{self.server.host}":
            raise Refused(HTTPStatus.FORBIDDEN, "Decisions are accepted only from the review page.")
        self._require_session()
        body, review = self._body(), self.server.review
        if path == "/decide":
            self._json(review.decide(body))
        elif path == "/undo":
            self._json(review.undo())
        else:
            raise Refused(HTTPStatus.NOT_FOUND, "Not found.")

    def _require_session(self) -> None:
        if self.headers.get("Sec-Fetch-Site") not in OWN:
            raise Refused(HTTPStatus.FORBIDDEN, "Cross-site requests are refused.")
        if not self._has_session():
            raise Refused(HTTPStatus.FORBIDDEN, "No session: open the link that the command printed.")

    def _has_session(self) -> bool:
        with contextlib.suppress(http.cookies.CookieError):
            cookie = http.cookies.SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
            session = self.server.review.session
            return cookie is not None and secrets.compare_digest(cookie.value.encode(), session.encode())
        return False

    def _body(self) -> dict[str, Any]:
        if self.headers.get("Content-Type") != "application/json":
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "Content-Type must be application/json.")
        length = self.headers.get("Content-Length", "")
        if not _is_count(length) or int(length) > LARGEST_BODY:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The body may have at most {LARGEST_BODY} bytes.")
        try:
            return json_object(self.rfile.read(int(length)))
        except (ValueError, TypeError, RecursionError) as error:
            raise Refused(HTTPStatus.BAD_REQUEST, "The body must be a JSON object.") from error

    def _json(self, value: dict[str, Any]) -> None:
        self._send(HTTPStatus.OK, as_json(value).encode(), "application/json")

    def _send(self, status: HTTPStatus, content: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.request_version = "HTTP/1.0"  # HTTP/0.9 has no headers, and is assumed for what cannot be read
        self.send_response(status)
        size = {"Content-Type": kind, "Content-Length": str(len(content))}
        for name, value in {**HEADERS, **size, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10
