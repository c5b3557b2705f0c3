"""The checksums of a run's files, ``checksums.json``: written when the training ends, updated by every later write.

``{"sha256": of the payload, "payload": {"format": ..., "files": {"model.safetensors": ["<bytes> <sha256>"], ...}}}``

While a file is replaced, both its old and its new checksum are listed (null where there was no file), so that a run
killed at any moment can still be verified. Files of one record per line are compared up to their last complete line.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from soseleto.errors import DataError
from soseleto.run_folder.files import aside, write_text, writing
from soseleto.run_folder.reading import MOST_JSON, bounded, complete_lines, json_of, regular

CHECKSUMS = "checksums.json"
FORMAT = "soseleto checksums 1"
LINES = ".jsonl"

logger = logging.getLogger("soseleto.run_folder")  # the command line prints its warnings

Listed = dict[str, list[str | None]]  # file name -> accepted checksums, None for no file

# What can be done without a file; it may be deleted where this says so.
_ENTRY = re.compile(r"\d{1,18} [0-9a-f]{64}")
_EVERYTHING_ELSE = "every other command works without it"
WITHOUT = {
    "config.json": "no command works without it",
    "metrics.jsonl": "rank, predict, export and review work without it",
    "ranking.parquet": "predict and export work without it",
    "model.safetensors": "rank, report and review work without it",
    "pictures.parquet": "if you delete it, report and review show no thumbnails",
    "suspects.json": "if you delete it, the report has no estimates of the suspects",
    "comparison.json": "rank and review work without it",
    "kept.safetensors": "rank, report and review work without it",
    "final.safetensors": "rank, report and review work without it",
    "pretrained.json": "rank, report and review work without it",
    "calibration.json": "if you delete it, probabilities are not calibrated",
    "source.json": "rank and predict to standard output work without it",
    "rows.parquet": f"--export-clean and review --export need it, {_EVERYTHING_ELSE}",
    "review.jsonl": f"it holds the decisions of the review, {_EVERYTHING_ELSE}",
}
OPTIONAL = ("pictures.parquet", "suspects.json", "calibration.json")


def digest_of(content: bytes) -> str:
    """Size and sha256."""
    return f"{len(content)} {hashlib.sha256(content).hexdigest()}"


def digest(path: Path) -> str:
    """Size and sha256 of a file; of one with a record per line, up to the last complete line."""
    if path.suffix == LINES:
        return digest_of(complete_lines(path))
    with path.open("rb") as file:
        return f"{path.stat().st_size} {hashlib.file_digest(file, 'sha256').hexdigest()}"


def _matches(path: Path, accepted: list[str | None]) -> bool:
    """Whether the file has one of the checksums; a file of another size is not read."""
    sizes = [int(one.split()[0]) for one in accepted if one is not None]
    return (path.suffix == LINES or path.stat().st_size in sizes) and digest(path) in accepted


def create(run: Path, names: Iterable[str]) -> None:
    """List those of the files that exist."""
    _write(run, {name: [digest(run / name)] for name in names if _there(run / name)})


def remove(run: Path) -> None:
    """Before a run is written again."""
    if os.path.lexists(run / CHECKSUMS):
        with writing(run / CHECKSUMS):
            (run / CHECKSUMS).unlink()


def read(run: Path) -> Listed | None:
    """The accepted checksums of every file; None where the run has none."""
    path = run / CHECKSUMS
    if regular(path) is None:
        return None
    fix = "restore it from a copy, or delete it to read the run unverified"
    content = json_of(path, fix=fix)
    try:
        listed: Listed = content["payload"]["files"]
        sound = _sealed(listed) == path.read_text("utf-8")
        sound &= all(one is None or _ENTRY.fullmatch(one) for entry in listed.values() for one in entry)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError):
        sound = False
    if not sound:
        raise DataError(f"{path} is damaged (its own checksum does not match): {fix}.")
    return listed


def are_ours(run: Path) -> bool:
    """Whether the folder has a file of checksums in this format, damaged or not (other programs use that name too)."""
    try:
        path = regular(run / CHECKSUMS)
        return path is not None and FORMAT.encode() in bounded(path, MOST_JSON)
    except (OSError, DataError):
        return False


def verified(run: Path, name: str) -> Path | None:
    """The path of a file of the run after a comparison with its checksum; None where there is none and may be none."""
    path = _there(run / name)
    listed = read(run)
    if listed is None:
        return path
    accepted = listed.get(name, [None])
    if path is None:
        if None not in accepted:
            _report_missing(run / name)
        return None
    if accepted == [None]:
        raise DataError(f"{path} is not listed in {CHECKSUMS}, so it was added by another program: delete it.")
    if not _matches(path, accepted):
        without = WITHOUT.get(name, _EVERYTHING_ELSE)
        raise DataError(f"{path} is damaged (its checksum does not match): restore it from a copy; {without}.")
    return path


def _there(path: Path) -> Path | None:
    """A file that has content: one without a complete line was only created to be locked."""
    found = regular(path)
    return None if found is None or (path.suffix == LINES and not complete_lines(path)) else found


def _report_missing(path: Path) -> None:
    """Warn about a deleted file that a run can be read without; raise for any other."""
    if path.name not in OPTIONAL:
        without = WITHOUT.get(path.name, _EVERYTHING_ELSE)
        raise DataError(f"{path} is missing, although it was written: restore it from a copy; {without}.")
    _, _, effect = WITHOUT[path.name].partition(", ")
    logger.warning("%s is missing: %s", path, effect)


@contextlib.contextmanager
def changing(path: Path, new: str) -> Iterator[None]:
    """Inside, the file may have its old content or the one with the checksum ``new``; afterwards only the new one."""
    listed = read(path.parent)
    if listed is None:
        yield
        return
    _write(path.parent, {**listed, path.name: [new, *listed.get(path.name, [None])]})
    yield
    _write(path.parent, {**listed, path.name: [new]})


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """``aside`` for a file of a run, with its checksum updated."""
    with contextlib.ExitStack() as after_rename, aside(path) as part:
        yield part
        after_rename.enter_context(changing(path, _digest_of_part(part, path)))


def write(path: Path, text: str) -> None:
    """``write_text`` for a file of a run, with its checksum updated."""
    with replacing(path) as part:
        part.write_text(text, "utf-8")


def _digest_of_part(part: Path, path: Path) -> str:
    assert path.suffix != LINES  # these are appended to
    return digest(part)


def _write(run: Path, listed: Listed) -> None:
    write_text(run / CHECKSUMS, _sealed(listed))


def _sealed(listed: Listed) -> str:
    payload = json.dumps({"format": FORMAT, "files": dict(sorted(listed.items()))}, indent=1)
    return f'{{"sha256": "{hashlib.sha256(payload.encode()).hexdigest()}",\n"payload": {payload}}}\n'
