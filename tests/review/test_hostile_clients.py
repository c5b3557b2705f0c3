"""Clients that send nonsense do not disturb the browser."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from fabricated import fabricate_images
from review.test_review import ask, drop_first
from reviewing import serving
from soseleto.review.server import Server
from soseleto.run_folder.folder import RunFolder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return fabricate_images(tmp_path_factory.mktemp("hostile") / "run")


@pytest.fixture
def server(run: RunFolder, capfd: pytest.CaptureFixture[str]) -> Iterator[Server]:
    """Nothing is printed, whatever is sent."""
    with serving(run) as server:
        yield server
    assert capfd.readouterr() == ("", "")


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=10)


def answer(client: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    content = b""
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(65536):
            content += piece
    return content


NONSENSE = {
    "nothing": b"\r\n\r\n",
    "noise": bytes(range(256)) * 8,
    "one word": b"GET\r\n\r\n",
    "another version": b"GET / HTTP/9.9\r\n\r\n",
    "a line without an end": b"a" * 1_000_000,
    "another method": b"BREW / HTTP/1.1\r\nHost: {host}\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: {host}\r\nHost: {host}\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 100_000 + b"\r\n",
    "a long header": b"GET / HTTP/1.1\r\na: " + b"b" * 1_000_000 + b"\r\n\r\n",
    "a malformed cookie": b"GET /state HTTP/1.1\r\nHost: {host}\r\nCookie: \xff\xfe=;;;=\x01\r\n\r\n",
    "a path outside": b"GET /../../../etc/passwd HTTP/1.1\r\nHost: {host}\r\n\r\n",
    "a long body": b"POST /decide HTTP/1.1\r\nHost: {host}\r\nContent-Length: 999999999\r\n\r\n" + b"x" * 100_000,
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_is_answered_or_dropped(server: Server, kind: str) -> None:
    with connect(server) as client:
        with contextlib.suppress(ConnectionError):  # the server need not read all of it
            client.sendall(NONSENSE[kind].replace(b"{host}", server.host.encode()))
        received = answer(client)
    assert not received or received.startswith((b"HTTP/1.0 4", b"HTTP/1.0 5"))
    assert ask(server, "POST", "/decide", drop_first(server))[0] == 200  # what the browser does


def test_an_unexpected_error_is_answered(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(server.review, "state", broken)
    with connect(server) as client:
        session = f"Cookie: {server.cookie}={server.review.session}"
        client.sendall(f"GET /state HTTP/1.1\r\nHost: {server.host}\r\n{session}\r\n\r\n".encode())
        assert answer(client).startswith(b"HTTP/1.0 500")
