"""Clients that send nonsense, send slowly, or open thousands of connections do not disturb the browser."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from fabricated import fabricate_images
from reviewing import serving
from soseleto.review.connections import MOST, Connections
from soseleto.review.decisions import read_decisions
from soseleto.review.server import LARGEST_HEAD, Server
from soseleto.run_folder.folder import RunFolder

LONG = "SOSELETO_LONG_CAMPAIGN" in os.environ


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return fabricate_images(tmp_path_factory.mktemp("hostile") / "run")


@pytest.fixture
def server(run: RunFolder, capfd: pytest.CaptureFixture[str]) -> Iterator[Server]:
    """Requests may take half a second; nothing is printed, whatever is sent."""
    (run.path / "review.jsonl").unlink(missing_ok=True)
    with serving(run, seconds=0.5) as server:
        yield server
    assert capfd.readouterr() == ("", "")


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=10)


def head(server: Server, line: str = "GET / HTTP/1.1", *headers: str) -> bytes:
    return "\r\n".join([line, f"Host: {server.host}", *headers, "", ""]).encode("latin-1")


def rest(client: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    content = b""
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(65536):
            content += piece
    return content


def decide(server: Server) -> None:
    """What the browser does, each time over a new connection; at most two seconds in all."""
    begin = time.monotonic()
    body = json.dumps({"row": int(server.review.queue.rows[0]), "action": "drop"}).encode()
    own = {"Cookie": f"{server.cookie}={server.review.session}", "Origin": f"http://{server.host}"}
    connection = http.client.HTTPConnection(server.host, timeout=5)
    connection.request("POST", "/decide", body, {**own, "Content-Type": "application/json"})
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["row"]) == (200, int(server.review.queue.rows[0]))
    connection.request("GET", "/state", headers=own)  # over the same connection
    assert connection.getresponse().status == 200
    connection.close()
    assert time.monotonic() - begin < 2


NONSENSE = {
    "nothing": b"\r\n\r\n",
    "noise": bytes(range(256)) * 8,
    "zeros": bytes(1000),
    "a TLS greeting": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "one word": b"GET\r\n\r\n",
    "two words": b"GET /\r\n\r\n",
    "four words": b"GET / HTTP/1.1 more\r\n\r\n",
    "another version": b"GET / HTTP/9.9\r\n\r\n",
    "no version": b"GET / HTTP/a.b\r\n\r\n",
    "a long line": b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    "a line without an end": b"a" * 1_000_000,
    "another method": b"BREW / HTTP/1.1\r\nHost: {host}\r\n\r\n",
    "an odd method": b"__init__ / HTTP/1.1\r\nHost: {host}\r\n\r\n",
    "an address that is none": b"GET http://[ HTTP/1.1\r\nHost: {host}\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: {host}\r\nHost: {host}\r\n\r\n",
    "a header without a colon": b"GET / HTTP/1.1\r\nHost {host}\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 100_000 + b"\r\n",
    "a long header": b"GET / HTTP/1.1\r\na: " + b"b" * 1_000_000 + b"\r\n\r\n",
    "a cookie that is none": b"GET /state HTTP/1.1\r\nHost: {host}\r\nCookie: \xff\xfe=;;;=\x01\r\n\r\n",
    "a path outside": b"GET /../../../etc/passwd HTTP/1.1\r\nHost: {host}\r\n\r\n",
    "a zero in the path": b"GET /picture/\x000 HTTP/1.1\r\nHost: {host}\r\n\r\n",
    "a body that is not announced": b"POST /decide HTTP/1.1\r\nHost: {host}\r\n\r\n" + b"x" * 100_000,
    "a long body": b"POST /decide HTTP/1.1\r\nHost: {host}\r\nContent-Length: 999999999\r\n\r\n" + b"x" * 100_000,
}  # fmt: skip


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_is_answered_or_dropped(server: Server, kind: str) -> None:
    client = connect(server)
    with contextlib.suppress(ConnectionError):  # the server need not read all of it
        client.sendall(NONSENSE[kind].replace(b"{host}", server.host.encode()))
    answer = rest(client)
    client.close()
    assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5"))
    assert b"root:" not in answer
    decide(server)


def test_headers_are_bounded_in_all(server: Server) -> None:
    inside = [f"a{at}: {'b' * 100}" for at in range(90)]
    with connect(server) as client:
        client.sendall(head(server, "GET / HTTP/1.1", *inside, "Connection: close"))
        assert rest(client).startswith(b"HTTP/1.1 403")
    outside = [f"a{at}: {'b' * (LARGEST_HEAD // 50)}" for at in range(60)]
    with connect(server) as client:
        client.sendall(head(server, "GET / HTTP/1.1", *outside))
        assert rest(client).startswith(b"HTTP/1.1 431")
    own = f"Cookie: {server.cookie}={server.review.session}"
    with connect(server) as client:  # the bound is one of each request
        for _ in range(5):
            client.sendall(head(server, "GET /state HTTP/1.1", own, f"a: {'b' * 5000}"))
            answer = http.client.HTTPResponse(client)
            answer.begin()
            assert answer.status == 200
            answer.read()
    decide(server)


def test_slow_senders_are_dropped(server: Server) -> None:
    """Each byte comes in time, but not the whole request."""
    parts = (b"GET ", b"GET / HTTP/1.1\r\nHost: ", b"POST /decide HTTP/1.1\r\nContent-Length: 9\r\n\r\n", b"")
    clients = [connect(server) for _ in range(40)]
    begin = time.monotonic()
    for at, client in enumerate(clients):
        client.sendall(parts[at % len(parts)])
    dropped: set[socket.socket] = set()
    while len(dropped) < len(clients) and time.monotonic() - begin < 8:
        for client in set(clients) - dropped:
            try:
                client.send(b"a")
            except ConnectionError:
                dropped.add(client)
        decide(server)
        time.sleep(0.05)
    assert len(dropped) == len(clients)
    assert len(server.connections) <= 1  # the browser's own
    for client in clients:
        client.close()


def test_clients_that_do_not_read_are_dropped(server: Server) -> None:
    own = f"Cookie: {server.cookie}={server.review.session}"
    clients = [connect(server) for _ in range(20)]
    for client in clients:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        with contextlib.suppress(ConnectionError):
            client.sendall(head(server, "GET /state HTTP/1.1", own) * 40)
    begin = time.monotonic()
    while len(server.connections) and time.monotonic() - begin < 8:
        decide(server)
        time.sleep(0.05)
    assert time.monotonic() - begin < 8
    for client in clients:
        client.close()


def test_thousands_of_connections_are_bounded(run: RunFolder) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(2000 if LONG else 300, (hard if hard > 0 else 1 << 20) - 200)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard if hard > 0 else 1 << 20, 2 * count + 500), hard))
    try:
        with serving(run) as server:  # with its real timeout: the oldest are closed
            threads, clients = threading.active_count(), []
            for at in range(count):
                clients.append(connect(server))
                if at % 100 == 99:
                    decide(server)
                    assert len(server.connections) <= MOST
            assert threading.active_count() - threads < MOST + 20
            for client in clients:
                client.close()
            decide(server)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [one.action for one in read_decisions(run).values()] == ["drop"]


def test_the_browser_keeps_its_connection_while_others_are_closed(server: Server) -> None:
    own = f"Cookie: {server.cookie}={server.review.session}"
    with connect(server) as browser:
        browser.sendall(head(server, "GET /nowhere HTTP/1.1", own))
        assert browser.recv(65536).startswith(b"HTTP/1.1 404")
    browser = connect(server)
    browser.sendall(head(server, "GET /state HTTP/1.1", own))
    answer = http.client.HTTPResponse(browser)
    answer.begin()
    assert answer.read()
    others = [connect(server) for _ in range(2 * MOST)]
    browser.sendall(head(server, "GET /state HTTP/1.1", own))
    answer = http.client.HTTPResponse(browser)
    answer.begin()
    assert answer.status == 200
    for client in (browser, *others):
        client.close()


def test_half_closed_and_reset_connections(server: Server) -> None:
    own = f"Cookie: {server.cookie}={server.review.session}"
    with connect(server) as client:  # it still receives its answer
        client.sendall(head(server, "GET /state HTTP/1.1", own))
        client.shutdown(socket.SHUT_WR)
        assert rest(client).startswith(b"HTTP/1.1 200")
    origin = f"Origin: http://{server.host}"
    for cut in (3, 40, 200):
        with connect(server) as client:
            posted = head(
                server, "POST /decide HTTP/1.1", own, origin, "Content-Type: application/json", "Content-Length: 30"
            )
            client.sendall((posted + b'{"row":')[: cut if cut < 200 else None])
            client.shutdown(socket.SHUT_WR)
            assert b"HTTP/1.1 200" not in rest(client)
    for part in (b"", b"GET / HT", head(server, "GET /state HTTP/1.1", own)):
        client = connect(server)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.sendall(part)
        client.close()  # resets the connection
    time.sleep(0.05)
    assert read_decisions(RunFolder(server.review.decisions.path.parent)) == {}
    decide(server)


def test_the_longest_waiting_stranger_is_closed_first() -> None:
    pairs = [socket.socketpair() for _ in range(4)]
    ours = [one for one, _ in pairs]
    connections = Connections(most=2)
    connections.add(ours[0])
    connections.trust(ours[0])
    connections.add(ours[1])
    connections.add(ours[2])
    connections.add(ours[3])
    theirs = [other for _, other in pairs]
    for other in theirs:
        other.setblocking(False)
    closed = []
    for other in theirs:
        try:
            closed.append(other.recv(1) == b"")
        except BlockingIOError:
            closed.append(False)
    assert closed == [False, True, True, False]
    assert len(connections) == 2
    connections.close()
    assert len(connections) == 0
    for one in (*ours, *theirs):
        one.close()


def test_an_unexpected_error_is_answered(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(server.review, "state", broken)
    own = f"Cookie: {server.cookie}={server.review.session}"
    with connect(server) as client:
        client.sendall(head(server, "GET /state HTTP/1.1", own))
        assert rest(client).startswith(b"HTTP/1.1 500")
