"""Shared by every test: two threads at most, and where the large data lies."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(2)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts us in the background ignores it


@pytest.fixture(scope="session")
def data_root() -> Path:
    root = os.environ.get("SOSELETO_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("SOSELETO_DATA does not name a folder with the public data sets")
    return Path(root)
