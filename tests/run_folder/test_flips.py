"""A flipped bit anywhere in a finished run is noticed by every command that reads the file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from data_safety.flips import flips

FLIPS = 2000 if os.environ.get("SOSELETO_LONG_CAMPAIGN") == "1" else 56
FILES = """SHA256SUMS calibration.json comparison.json config.json metrics.jsonl
model.safetensors pictures.parquet problems.json ranking.parquet report.html review.jsonl source.json suspects.json"""


def test_every_flip_is_named_by_every_command_that_reads_the_file(tmp_path: Path) -> None:
    found = flips(tmp_path, FLIPS)
    assert found["wrong"] == []
    assert found["files"] == FILES.split()
    assert set(found["detected"]) == {*FILES.split()} - {"report.html"}
