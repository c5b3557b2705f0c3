"""Shared by every test: two threads at most in all, and where the large data lies."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from browser import Browser

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts us in the background ignores it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that no core waits for it at the end."""
    items.sort(key=lambda item: "test_walk" not in item.nodeid)


@pytest.fixture(scope="session")
def data_root() -> Path:
    root = os.environ.get("SOSELETO_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("SOSELETO_DATA does not name a folder with the public data sets")
    return Path(root)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One Chromium for all tests; marked ``needs_browser`` they skip without one."""
    from browser import Browser

    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
