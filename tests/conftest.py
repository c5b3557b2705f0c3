"""Shared by all tests: at most two threads in all, the order of the files, the public data sets, the browser."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

THREADS = "1" if "PYTEST_XDIST_WORKER" in os.environ else "2"
os.environ["OMP_NUM_THREADS"] = THREADS  # read when a library loads; threads that wait for a core in use cost minutes

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

if TYPE_CHECKING:
    from browser import Browser

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(int(THREADS))
# The short form draws the same examples in every run, so that a change is what makes a test fail; the long ones search.
LONG_RUN = any(os.environ.get(name) for name in ("SOSELETO_LONG", "SOSELETO_LONG_CAMPAIGN"))
hypothesis.settings.register_profile("short", derandomize=True)
hypothesis.settings.load_profile("default" if LONG_RUN else "short")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts pytest in the background ignores it
# The files that take longest, by their times on two cores. Workers take whole files in this order: one of these begun
# last would keep one worker busy while the others are idle.
LONGEST = (
    "test_docs",
    "test_ranks",
    "test_fit_command",
    "test_fsdp",
    "test_data_safety",
    "test_checkpoint",
    "test_selection",
    "test_tables",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, the others keep their order; long tests only when they are asked for."""
    if os.environ.get("SOSELETO_LONG") != "1":
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="long: set SOSELETO_LONG=1"))
    place = {name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Features are kept between tests of one process, not beyond."""
    os.environ["SOSELETO_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def data_root() -> Path:
    root = os.environ.get("SOSELETO_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("SOSELETO_DATA does not name a folder with the public data sets")
    return Path(root)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One Chromium for all tests of a worker; those marked ``needs_browser`` are skipped without one."""
    from browser import Browser

    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], AbstractContextManager[None]]:
    """``with stop_after(7): fit(...)``: the training inside is stopped after that step, as by a crash."""
    from soseleto.training.resume import Keeper

    class Stopped(Exception):
        pass

    @contextmanager
    def stop(last: int) -> Iterator[None]:
        after = Keeper.after

        def stopping(keeper: Keeper, step: int) -> None:
            after(keeper, step)
            if step == last:
                raise Stopped

        with monkeypatch.context() as patch:
            patch.setattr(Keeper, "after", stopping)
            with pytest.raises(Stopped):
                yield

    return stop
