"""The download code against a server that truncates, corrupts, stalls, redirects and refuses."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from experiments.public.download import Patience, Remote, Unreachable, download
from experiments.public.fetch import File, fetch, main
from soseleto.errors import DataError, UsageError

CONTENT = np.random.default_rng(0).bytes(300_000)
MD5 = hashlib.md5(CONTENT).hexdigest()
IMPATIENT = Patience(tries=4, timeout=0.3, pause=0.0, sleep=lambda seconds: None)


class Server(ThreadingHTTPServer):
    """Answers /file with a list of behaviours, one per request; the last one is repeated."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviours, self.requests, self.stop = ["whole"], [], threading.Event()

    def handle_error(self, request, client_address):
        pass  # a client that hangs up is part of the test

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/file"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args):
        pass

    def do_GET(self):
        server = self.server
        asked = self.headers.get("Range")
        server.requests.append((self.path, asked))
        if self.path == "/moved":
            return self.send_all(CONTENT)
        behaviour = server.behaviours.pop(0) if len(server.behaviours) > 1 else server.behaviours[0]
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        return getattr(self, f"answer_{behaviour}")(start)

    def send_all(self, content, start=0, total=None, claim=None):
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        self.send_header("Content-Length", str(claim if claim is not None else len(content)))
        self.end_headers()
        self.wfile.write(content)

    def answer_whole(self, start):
        if start >= len(CONTENT):
            return self.send_error(416)
        return self.send_all(CONTENT[start:], start)

    def answer_ignores_range(self, start):
        self.send_all(CONTENT)

    def answer_truncates(self, start):
        rest = CONTENT[start:]
        self.send_all(rest[: max(1, len(rest) // 2)], start, claim=len(rest))

    def answer_without_length(self, start):
        """Truncated, with no Content-Length to reveal it."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(CONTENT[:1000])

    def answer_corrupts(self, start):
        wrong = bytearray(CONTENT[start:])
        wrong[-1] ^= 1
        self.send_all(bytes(wrong), start)

    def answer_stalls(self, start):
        self.send_all(CONTENT[start : start + 100_000], start, claim=len(CONTENT) - start)
        self.server.stop.wait(5)

    def answer_redirects(self, start):
        self.send_response(302)
        self.send_header("Location", "/moved")
        self.end_headers()

    def answer_redirects_to_a_file(self, start):
        self.send_response(302)
        self.send_header("Location", "file:///etc/hostname")
        self.end_headers()

    def answer_redirects_forever(self, start):
        self.send_response(302)
        self.send_header("Location", "/file")
        self.end_headers()

    def answer_404(self, start):
        self.send_error(404)

    def answer_503(self, start):
        self.send_response(503)
        self.send_header("Retry-After", "7")
        self.end_headers()

    def answer_endless(self, start):
        self.send_response(200)
        self.end_headers()
        for _ in range(100):
            self.wfile.write(CONTENT)


@pytest.fixture
def server():
    made = Server()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.stop.set()
    made.shutdown()
    thread.join()
    made.server_close()


def attempt(server, path, *behaviours, patience=IMPATIENT, urls=None, **options):
    server.behaviours = list(behaviours)
    remote = Remote(urls or (server.url,), MD5, len(CONTENT))
    download(remote, path, patience=patience, **options)


@pytest.mark.parametrize(
    "behaviours",
    [
        ("whole",),
        ("truncates", "whole"),
        ("truncates", "truncates", "truncates", "whole"),
        ("truncates", "ignores_range"),
        ("without_length", "whole"),
        ("corrupts", "whole"),
        ("truncates", "corrupts", "whole"),
        ("stalls", "whole"),
        ("stalls", "stalls", "whole"),
        ("redirects",),
        ("503", "503", "whole"),
        ("truncates", "503", "whole"),
    ],
    ids=" ".join,
)
def test_in_the_end_the_file_is_whole(server, tmp_path, behaviours):
    attempt(server, tmp_path / "file", *behaviours)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "behaviour", ["without_length", "corrupts", "404", "503", "redirects_forever", "redirects_to_a_file", "endless"]
)
def test_a_partial_file_is_never_taken_for_a_whole_one(server, tmp_path, behaviour):
    with pytest.raises(Unreachable):
        attempt(server, tmp_path / "file", behaviour)
    assert not (tmp_path / "file").exists()


def test_what_has_arrived_is_kept_for_the_next_time(server, tmp_path):
    with pytest.raises(Unreachable, match=r"stopped after \d+ of \d+ bytes \(1 tries\)|timed out"):
        attempt(server, tmp_path / "file", "truncates", patience=Patience(1, 0.3, 0.0))
    assert (tmp_path / "file.part").stat().st_size == 150_000
    assert not (tmp_path / "file").exists()
    attempt(server, tmp_path / "file", "whole")
    assert server.requests[-1] == ("/file", "bytes=150000-")
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_stall_loses_nothing_that_had_arrived(server, tmp_path):
    attempt(server, tmp_path / "file", "stalls", "whole")
    assert server.requests[-1] == ("/file", "bytes=100000-")


def test_a_part_that_is_already_too_long_starts_over(server, tmp_path):
    (tmp_path / "file.part").write_bytes(CONTENT + b"more")
    attempt(server, tmp_path / "file", "whole")
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_wrong_part_is_thrown_away(server, tmp_path):
    (tmp_path / "file.part").write_bytes(b"x" * 1000)
    attempt(server, tmp_path / "file", "whole")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert [asked for _, asked in server.requests] == ["bytes=1000-", None]


def test_waiting_grows_and_heeds_the_server(server, tmp_path):
    waits = []
    patience = Patience(tries=4, timeout=1, pause=1.0, sleep=waits.append)
    with pytest.raises(Unreachable, match="HTTP 503"):
        attempt(server, tmp_path / "file", "503", patience=patience)
    assert waits == [7.0, 7.0, 7.0]
    waits.clear()
    attempt(server, tmp_path / "file", "corrupts", "corrupts", "corrupts", "whole", patience=patience)
    assert waits == [1.0, 2.0, 4.0]


def test_the_next_address_is_tried(server, tmp_path):
    nowhere = "http://127.0.0.1:9/file"
    attempt(server, tmp_path / "file", "404", "whole", urls=(server.url, server.url))
    assert (tmp_path / "file").exists()
    attempt(server, tmp_path / "other", "whole", urls=(nowhere, server.url), patience=Patience(1, 1, 0.0))
    assert (tmp_path / "other").exists()


def test_a_right_file_is_left_alone_and_a_wrong_one_replaced(server, tmp_path):
    attempt(server, tmp_path / "file", "whole")
    attempt(server, tmp_path / "file", "404")
    (tmp_path / "file").write_bytes(b"something else")
    attempt(server, tmp_path / "file", "whole")
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_progress_is_reported(server, tmp_path):
    seen = []
    attempt(server, tmp_path / "file", "whole", progress=lambda *three: seen.append(three))
    assert seen[-1] == ("file", len(CONTENT), len(CONTENT))
    assert all(name == "file" for name, _, _ in seen)


def test_without_a_network_the_error_says_which_file_to_save_where(tmp_path, monkeypatch):
    dead = {"svhn": (File("svhn/train_32x32.mat", Remote(("http://127.0.0.1:9/train_32x32.mat",), MD5, 1)),)}
    with pytest.raises(DataError) as caught:
        fetch("svhn", tmp_path, files=dead, patience=Patience(1, 1, 0.0))
    said = str(caught.value)
    assert "\n" not in said
    assert f"save http://127.0.0.1:9/train_32x32.mat as {tmp_path}/svhn/train_32x32.mat" in said
    assert "SOSELETO_DATA" in said
    with pytest.raises(UsageError, match="did you mean 'svhn'"):
        main("svnh", tmp_path)


def test_fetch_gets_only_what_is_lacking_and_unpacks(server, tmp_path):
    import io
    import tarfile

    packed = io.BytesIO()
    names = [f"cifar-10-batches-bin/{n}.bin" for n in ("test_batch", *(f"data_batch_{i}" for i in range(1, 6)))]
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for at, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size = 3073
            tar.addfile(info, io.BytesIO(bytes([at]) + CONTENT[at * 3072 : (at + 1) * 3072]))
    whole = packed.getvalue()
    Handler.answer_archive = lambda self, start: self.send_all(whole)
    server.behaviours = ["archive"]
    remote = Remote((server.url,), hashlib.md5(whole).hexdigest(), len(whole))
    files = {"cifar10": (File("cifar-10-binary.tar.gz", remote, tuple(names)),)}
    assert fetch("cifar10", tmp_path, files=files, patience=IMPATIENT) == tmp_path
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == sorted(names)
    assert len(server.requests) == 1
    fetch("cifar10", tmp_path, files=files, patience=IMPATIENT)
    assert len(server.requests) == 1  # nothing is missing: no request
    from experiments.public import load

    assert load("cifar10", "test", tmp_path).labels.tolist() == [0]
    assert load("cifar10", "train", tmp_path).labels.tolist() == [1, 2, 3, 4, 5]
