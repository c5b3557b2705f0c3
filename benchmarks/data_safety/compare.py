"""Whether two finished runs of the same ``soseleto fit`` are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from soseleto.run_folder.files import CHECKSUMS, checksums_of, verified
from soseleto.run_folder.folder import RunFolder

SAME_BYTES = (
    "model.safetensors", "ranking.parquet", "suspects.json", "comparison.json", "calibration.json", "problems.json",
    "source.json", "pictures.parquet",
)  # fmt: skip


def differences(run: Path, whole: Path) -> list[str]:
    """What differs between a resumed run and an uninterrupted one, beside seconds and messages."""
    found = [name for name in SAME_BYTES if _bytes(run / name) != _bytes(whole / name)]
    if _config(run) != _config(whole):
        found.append("config.json")
    # a run whose checksums could not be written has ended all the same, and is read without them
    # safetensors writes to .tmpXXXXXX beside a file before it renames it, and a kill in that moment leaves it there
    names = [
        sorted(path.name for path in one.iterdir() if path.name != CHECKSUMS and not path.name.startswith(".tmp"))
        for one in (run, whole)
    ]
    if names[0] != names[1]:
        found.append(f"files {names[0]} and {names[1]}")
    listed = checksums_of(run) or {}
    found += [f"checksum of {name}" for name in listed if verified(run / name) is None]
    if _records(run) != _records(whole):
        found.append("metrics.jsonl")
    return found


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _config(run: Path) -> dict[str, Any]:
    """Without the step at which the alignments were last checked, which a resumed run does earlier."""
    return {name: value for name, value in RunFolder.open(run).config().items() if name != "alignments"}


def _records(run: Path) -> list[dict[str, Any]]:
    """Without messages, such as that the run was resumed, and times."""
    records = [record for record in RunFolder.open(run).metrics() if record["event"] != "message"]
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]
