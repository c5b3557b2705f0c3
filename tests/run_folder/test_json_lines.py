"""Append-only JSON lines: order, an incomplete last line, a broken line, a failed write, and the lock."""

import os
from pathlib import Path
from typing import Any

import pytest

from soseleto.errors import DataError, DiskError, UsageError
from soseleto.run_folder import json_lines
from soseleto.run_folder.files import locked


def read(path: Path) -> list[dict[str, Any]]:
    return json_lines.read(path, dict, kind="a JSON object", fix="restore the file")


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    assert read(tmp_path / "none.jsonl") == []


def test_records_are_read_in_the_order_they_were_appended(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for value in (1.5, float("nan"), "ä"):
        json_lines.append(path, {"value": value})
    assert path.read_text("utf-8") == '{"value": 1.5}\n{"value": null}\n{"value": "ä"}\n'
    assert read(path) == [{"value": 1.5}, {"value": None}, {"value": "ä"}]


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_cut_at_any_byte_keeps_its_complete_records(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "log.jsonl"
    for name in "aäb":
        json_lines.append(path, {"id": name})
    content = path.read_bytes()
    for size in range(len(content) + 1):
        path.write_bytes(content[:size])
        complete = [{"id": name} for name in "aäb"][: content[:size].count(b"\n")]
        assert read(path) == complete
        json_lines.append(path, {"id": "next"}, durable=durable)
        assert read(path) == [*complete, {"id": "next"}]


@pytest.mark.parametrize("line", ["{", "[1]", "7"])
def test_a_complete_line_that_is_not_an_object_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f'{{"id": 1}}\n\n{line}\n{{"id": 2}}\n')  # blank lines are skipped, but counted
    with pytest.raises(DataError, match=r"^line 3 of .*log.jsonl is not a JSON object: restore the file\.$"):
        read(path)


def test_what_parse_rejects_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    json_lines.append(path, {"id": 1})
    with pytest.raises(DataError, match=r"line 1 of .* is not a label: delete it"):
        json_lines.read(path, lambda record: record["label"], kind="a label", fix="delete it")


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    json_lines.append(path, {"id": 1})
    before = path.read_bytes()

    def no_space(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(DiskError, match=r"cannot be written \(No space left on device\)"):
        json_lines.append(path, {"id": 2}, durable=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize("folder", [False, True])
def test_a_lock_excludes_others_until_it_is_released(tmp_path: Path, folder: bool) -> None:
    path = tmp_path if folder else tmp_path / "log.jsonl"
    with locked(path, "taken."), pytest.raises(UsageError, match=r"^taken\.$"), locked(path, "taken."):
        pass
    with locked(path, "taken."):
        assert path.exists()
