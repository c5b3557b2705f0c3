"""Nothing is lost by a full disk or a kill in any phase of ``soseleto fit``; SOSELETO_LONG_CAMPAIGN=1 for all of them.

The campaigns are in benchmarks/data_safety. They run in a process of their own, which forks the runs to be killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGNS = Path(__file__).parents[2] / "benchmarks" / "data_safety"
LONG = os.environ.get("SOSELETO_LONG_CAMPAIGN") == "1"
SIZES = ["--kills", "200"] if LONG else ["--kills", "2", "--writes", "2", "--short"]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked, and open files are found in /proc")
def test_nothing_is_lost_by_a_full_disk_or_a_kill(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, str(CAMPAIGNS), "--flips", "0", *SIZES, "--out", str(out)]
    ran = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = {row["campaign"]: row for row in json.loads(out.read_text())["rows"]}
    assert found["full_disk"]["wrong"] == []
    assert found["kills"]["wrong"] == []
    assert found["full_disk"]["tried"] >= 2
    assert sum(found["kills"]["killed"].values()) >= 1  # one may have ended before the signal came
