"""The review: decisions persist, foreign requests are refused, and the exported manifest can be trained on."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import accessibility
from browser import Browser, needs_browser
from fabricated import fabricate_images
from reviewing import open_review, press, serving
from soseleto.errors import UsageError
from soseleto.review.queue import Decision, Decisions, read_decisions
from soseleto.review.server import LARGEST_BODY, Server
from soseleto.run_folder.folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """60 images of which 12 are suspects; the image files exist."""
    return fabricate_images(tmp_path / "run", files=tmp_path / "images")


def decide(run: RunFolder, *decisions: Decision | None) -> None:
    """Decide in a session of its own; None is an undo."""
    log = Decisions(run)
    for one in decisions:
        log.undo() if one is None else log.decide(one)
    log.close()


# Decisions


def test_the_last_decision_counts_and_undo_reverts_one_by_one(run: RunFolder) -> None:
    drop, keep, relabel = Decision("a", "drop"), Decision("a", "keep"), Decision("b", "relabel", "class 1")
    decide(run, drop, relabel, keep)
    assert read_decisions(run) == {"a": keep, "b": relabel}
    decide(run, None)
    assert read_decisions(run) == {"a": drop, "b": relabel}
    decide(run, None, None, None)
    assert read_decisions(run) == {}


def test_a_second_review_at_the_same_time_is_refused(run: RunFolder) -> None:
    first = Decisions(run)
    with pytest.raises(UsageError, match="another review is writing to"):
        Decisions(run)
    first.close()
    Decisions(run).close()


# The server


def ask(
    server: Server, method: str, path: str, body: bytes | None = None, **headers: str | None
) -> tuple[int, bytes, http.client.HTTPMessage]:
    """A request as the page would send it, with some headers changed, or left out with None."""
    own: dict[str, str | None] = {"Host": server.host, "Cookie": f"{server.cookie}={server.review.session}"}
    if method == "POST":
        own |= {"Origin": f"http://{server.host}", "Content-Type": "application/json", "Sec-Fetch-Site": "same-origin"}
        own |= {"Content-Length": str(len(body or b""))}
    own |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection(server.host, timeout=20)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in own.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(body)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content, answer.headers


def drop_first(server: Server) -> bytes:
    return json.dumps({"row": server.review.queue.rows[0], "action": "drop"}).encode()


def test_it_listens_on_localhost_and_serves_its_page(run: RunFolder) -> None:
    with serving(run) as server:
        assert server.server_address[0] == "127.0.0.1"
        status, content, headers = ask(server, "GET", f"/?token={server.review.token}", Cookie=None)
        assert status == 200
        assert b"<h1>run</h1>" in content
        cookie = headers["Set-Cookie"]
        assert cookie == f"{server.cookie}={server.review.session}; HttpOnly; SameSite=Strict; Path=/"
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; style-src 'sha256-")
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert ask(server, "GET", "/")[0] == 200  # reload
        assert ask(server, "POST", "/decide", drop_first(server))[0] == 200
    assert [one.action for one in read_decisions(run).values()] == ["drop"]


def test_the_link_works_once_and_nothing_works_without_it(run: RunFolder) -> None:
    with serving(run) as server:
        link = f"/?token={server.review.token}"
        for path in ("/", "/?token=", "/?token=wrong", f"{link}x", f"{link}&token=b", "/state", "/picture/0"):
            assert ask(server, "GET", path, Cookie=None)[0] == 403
        assert ask(server, "GET", link, Cookie=None)[0] == 200
        assert ask(server, "GET", link, Cookie=None)[0] == 403
        assert ask(server, "GET", "/state", Cookie=f"{server.cookie}=wrong")[0] == 403
        assert ask(server, "POST", "/decide", drop_first(server), Cookie=None)[0] == 403
    assert read_decisions(run) == {}


def test_other_hosts_are_refused(run: RunFolder) -> None:
    with serving(run) as server:
        for host in ("evil.example", f"localhost:{server.server_address[1]}", None):
            for path in ("/", f"/?token={server.review.token}", "/state", "/picture/0"):
                assert ask(server, "GET", path, Host=host)[0] == 421
            assert ask(server, "POST", "/decide", drop_first(server), Host=host)[0] == 421
    assert read_decisions(run) == {}


FOREIGN: list[dict[str, str | None]] = [
    {"Origin": None},
    {"Origin": "null"},
    {"Origin": "https://evil.example"},
    {"Origin": "http://127.0.0.1:1"},
    {"Sec_Fetch_Site": "cross-site"},
    {"Sec_Fetch_Site": "same-site"},
]


def test_posts_from_other_sites_are_refused(run: RunFolder) -> None:
    with serving(run) as server:
        for headers in FOREIGN:
            assert ask(server, "POST", "/decide", drop_first(server), **headers)[0] == 403, headers
            assert ask(server, "POST", "/undo", b"{}", **headers)[0] == 403, headers
    assert read_decisions(run) == {}


PATHS = (
    "/picture/../config.json",
    "/picture/..%2f..%2fetc%2fpasswd",
    "/config.json",
    "/review.jsonl",
    "/picture/",
    "/picture/-1",
    "/picture/%C2%B2",
    "/picture/60",
    "/picture/" + "9" * 5000,
    "http://evil.example/picture/../0",
    "/decide",
)


def test_there_are_no_paths_to_files(run: RunFolder) -> None:
    with serving(run) as server:
        assert {path: ask(server, "GET", path)[0] for path in PATHS} == dict.fromkeys(PATHS, 404)


BODIES: list[tuple[bytes, dict[str, str | None], int]] = [
    (b"x" * (LARGEST_BODY + 1), {}, 413),
    (b"", {"Content_Length": "99999999999999999999"}, 413),
    (b"", {"Content_Length": "-1"}, 413),
    (b"", {"Content_Length": None}, 413),
    (b"{}", {"Content_Type": "text/plain"}, 415),
    (b"not json", {}, 400),
    (b"[" * LARGEST_BODY, {}, 400),
    (b"[]", {}, 400),
    (b"{}", {}, 400),
    (b'{"row": true, "action": "drop"}', {}, 400),
    (b'{"row": 0, "action": "drop"}', {}, 400),  # the best example is not a suspect
    (b'{"row": 59, "action": "burn"}', {}, 400),
    (b'{"row": 59, "action": "drop", "label": "class 1"}', {}, 400),
    (b'{"row": 59, "action": "relabel", "label": "no such class"}', {}, 400),
    (b'{"row": 59, "action": "relabel", "label": ["class 1"]}', {}, 400),
]


def test_bodies_that_are_not_a_decision_are_refused(run: RunFolder) -> None:
    with serving(run) as server:
        for body, headers, status in BODIES:
            assert ask(server, "POST", "/decide", body, **headers)[0] == status, (body[:40], headers)
    assert read_decisions(run) == {}


def test_every_response_has_the_security_headers(run: RunFolder) -> None:
    with serving(run) as server:
        for method, path in (("GET", "/"), ("GET", "/nowhere"), ("GET", "/picture/0"), ("PUT", "/decide")):
            headers = ask(server, method, path)[2]
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Content-Security-Policy"].startswith("default-src 'none'")
            assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
            assert headers["Server"] == "soseleto"


def test_only_images_are_served_and_the_thumbnail_where_the_file_is_not_one(run: RunFolder) -> None:
    ranking = run.ranking()
    Path(ranking["path"][59]).write_text("<script>alert(1)</script>")
    with serving(run) as server:
        status, small, headers = ask(server, "GET", "/picture/59")
        assert (status, headers["Content-Type"]) == (200, "image/jpeg")
        assert small == server.review.queue.pictures[str(ranking["id"][59])]
        Path(ranking["path"][58]).unlink()
        os.mkfifo(ranking["path"][58])
        assert ask(server, "GET", "/picture/58")[0] == 200


# In a real browser


@needs_browser
def test_the_keyboard_keeps_drops_relabels_and_undoes(run: RunFolder, browser: Browser) -> None:
    with serving(run) as server:
        names = [server.review.queue.ids[row] for row in server.review.queue.rows]
        open_review(browser, server)
        assert "token" not in browser.js("location.href")
        assert browser.text("#which") == "Suspect 1 of 12"
        browser.wait("document.getElementById('picture').naturalWidth === 12")
        suggested = browser.text("#suggested")
        press(browser, "s")
        press(browser, "d")
        press(browser, "k")
        assert browser.text("#which") == "Suspect 4 of 12"
        assert browser.text("#counts") == "3 of 12"
        press(browser, "u")
        assert browser.text("#which") == "Suspect 3 of 12"
        browser.press("ArrowLeft")
        assert browser.text("#decision") == "dropped"
        assert browser.errors() == []
        assert {url.split("/")[2] for url in browser.requests() if not url.startswith("data:")} == {server.host}
    expected = {names[0]: Decision(names[0], "relabel", suggested), names[1]: Decision(names[1], "drop")}
    assert read_decisions(run) == expected


def test_a_second_page_is_told_what_the_first_has_decided(run: RunFolder) -> None:
    with serving(run) as server:
        row = server.review.queue.rows[0]

        def decide(action: str, before: dict[str, str | None] | None) -> tuple[int, str]:
            body = json.dumps({"row": row, "action": action, "before": before}).encode()
            status, content, _ = ask(server, "POST", "/decide", body)
            return status, content.decode()

        assert decide("drop", None)[0] == 200
        assert decide("keep", None) == (409, "Another page has decided this example meanwhile: drop.\n")
        assert decide("keep", {"action": "drop", "label": None})[0] == 200
        assert server.review.decisions.latest()[server.review.queue.ids[row]].action == "keep"


@needs_browser
def test_ids_that_every_object_of_javascript_has_are_ids(run: RunFolder, browser: Browser) -> None:
    columns = run.ranking()
    columns["id"][-3:] = ["toString", "constructor", "__proto__"]
    run.write_ranking(columns)
    with serving(run) as server:
        open_review(browser, server)
        assert browser.text("#counts").startswith("0 of 12")
        for _ in range(12):
            press(browser, "k")
        assert browser.text("#counts").startswith("12 of 12")
    assert {"toString", "constructor", "__proto__"} < set(read_decisions(run))


@needs_browser
def test_the_last_page_shows_the_export_command(run: RunFolder, browser: Browser) -> None:
    with serving(run) as server:
        open_review(browser, server)
        for _ in range(12):
            press(browser, "k")
        assert f"soseleto review {run.path} --export corrected.csv" in browser.text("#done")
        assert accessibility.problems(browser) == []
        press(browser, "u")
        assert browser.text("#which") == "Suspect 12 of 12"


@needs_browser
def test_another_site_can_neither_decide_nor_read(run: RunFolder, browser: Browser, tmp_path: Path) -> None:
    with serving(run) as server:
        open_review(browser, server)  # the browser has the cookie now
        foreign = tmp_path / "foreign.html"
        foreign.write_text("<!doctype html><title>foreign</title>")
        browser.open(foreign)
        send = (
            f"fetch('http://{server.host}/decide', {{method: 'POST', mode: 'no-cors', credentials: 'include', "
            f"body: {json.dumps(drop_first(server).decode())}}}).then(() => 'sent', () => 'refused')"
        )
        browser.js(send)
        read = f"fetch('http://{server.host}/state', {{credentials: 'include'}}).then(() => 'read', () => 'refused')"
        assert browser.js(read) == "refused"
    assert read_decisions(run) == {}


@needs_browser
@pytest.mark.parametrize("theme", ["light", "dark", "phone"])
def test_the_page_is_accessible(run: RunFolder, browser: Browser, theme: str) -> None:
    with serving(run) as server:
        browser.phone() if theme == "phone" else browser.dark() if theme == "dark" else browser.plain()
        open_review(browser, server)
        assert accessibility.problems(browser) == []
        assert browser.js("document.documentElement.scrollWidth <= innerWidth")
        assert browser.errors() == []
        browser.plain()


@needs_browser
def test_a_killed_server_loses_no_decision(run: RunFolder, browser: Browser) -> None:
    command = [sys.executable, "-m", "soseleto", "review", str(run.path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert line.startswith("review: http://127.0.0.1:"), line
    browser.open(line.removeprefix("review: ").strip())
    browser.wait("!document.getElementById('example').hidden")
    for key in "dkd":
        press(browser, key)
    process.kill()
    process.communicate(timeout=60)
    browser.press("d")
    browser.wait("document.getElementById('trouble').innerText.includes('all earlier decisions are kept')")
    assert browser.text("#counts").startswith("3 of 12")  # an unsaved decision is not shown as decided
    with (run.path / "review.jsonl").open("ab") as file:
        file.write(b'{"id": "torn')
    with serving(run) as server:
        open_review(browser, server)
        assert browser.text("#which") == "Suspect 4 of 12"
        assert browser.text("#counts") == "3 of 12"
        press(browser, "d")
    assert [one.action for one in read_decisions(run).values()] == ["drop", "keep", "drop", "drop"]
