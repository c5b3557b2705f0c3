"""Serve a review from a thread, and press keys on its page."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

from browser import Browser
from soseleto.review.server import Review, Server
from soseleto.run_folder.folder import RunFolder


@contextlib.contextmanager
def serving(run: RunFolder, **options: Any) -> Iterator[Server]:
    review = Review(run.path, **options)
    with Server(review) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
            review.decisions.close()


def open_review(browser: Browser, server: Server) -> None:
    browser.open(server.link)
    browser.wait("!document.getElementById('example').hidden")


def press(browser: Browser, key: str) -> None:
    """Press a key and wait until the counts change."""
    before = browser.text("#counts")
    browser.press(key)
    browser.wait(f"document.getElementById('counts').innerText !== {json.dumps(before)}")
