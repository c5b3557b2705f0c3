"""Clients that send nonsense, send slowly, or hold connections open do not disturb the browser."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from fabricated import fabricate_images
from reviewing import serving
from soseleto.review.server import MOST, Server
from soseleto.run_folder.folder import RunFolder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return fabricate_images(tmp_path_factory.mktemp("hostile") / "run")


@pytest.fixture
def server(run: RunFolder, capfd: pytest.CaptureFixture[str]) -> Iterator[Server]:
    """Requests may take half a second; nothing is printed, whatever is sent."""
    with serving(run, seconds=0.5) as server:
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


def decide(server: Server) -> None:
    """What the browser does; at most two seconds."""
    begin = time.monotonic()
    body = json.dumps({"row": server.review.queue.rows[0], "action": "drop"}).encode()
    own = {"Cookie": f"{server.cookie}={server.review.session}", "Origin": f"http://{server.host}"}
    connection = http.client.HTTPConnection(server.host, timeout=5)
    connection.request("POST", "/decide", body, {**own, "Content-Type": "application/json"})
    assert connection.getresponse().status == 200
    connection.close()
    assert time.monotonic() - begin < 2


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
    decide(server)


def test_slow_senders_are_dropped(server: Server) -> None:
    """Each byte comes in time, but not the whole request."""
    parts = (b"GET ", b"GET / HTTP/1.1\r\nHost: ", b"POST /decide HTTP/1.1\r\nContent-Length: 9\r\n\r\n", b"")
    clients = [connect(server) for _ in range(40)]
    for at, client in enumerate(clients):
        client.sendall(parts[at % len(parts)])
    dropped: set[socket.socket] = set()
    begin = time.monotonic()
    while len(dropped) < len(clients) and time.monotonic() - begin < 8:
        for client in set(clients) - dropped:
            try:
                client.send(b"a")
            except ConnectionError:
                dropped.add(client)
        decide(server)
        time.sleep(0.05)
    assert len(dropped) == len(clients)
    for client in clients:
        client.close()


def test_many_connections_are_bounded(run: RunFolder) -> None:
    with serving(run) as server:  # with its real timeout: the oldest are closed
        threads, clients = threading.active_count(), []
        for _ in range(3):
            clients += [connect(server) for _ in range(MOST)]
            decide(server)
        assert threading.active_count() - threads < MOST + 20
        for client in clients:
            client.close()
        decide(server)


def test_an_unexpected_error_is_answered(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(server.review, "state", broken)
    with connect(server) as client:
        session = f"Cookie: {server.cookie}={server.review.session}"
        client.sendall(f"GET /state HTTP/1.1\r\nHost: {server.host}\r\n{session}\r\n\r\n".encode())
        assert answer(client).startswith(b"HTTP/1.0 500")
