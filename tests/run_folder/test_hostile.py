"""Damaged and hostile run folders: every command answers with one sentence, without a hang."""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from fabricated import fabricate
from soseleto.errors import DataError
from soseleto.run_folder import checkpoint
from typing_in import typed

DEEP = "[" * 10**6 + "]" * 10**6


def write(name: str, content: str | bytes) -> Callable[[Path], None]:
    return lambda run: (run / name).write_bytes(content.encode() if isinstance(content, str) else content) and None


def replace(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / name).unlink()
        make(run / name)

    return change


CASES: dict[str, Callable[[Path], None]] = {
    "deep config": write("config.json", '{"format": "soseleto run 1", "x": ' + DEEP + "}"),
    "deep metrics": write("metrics.jsonl", DEEP + "\n"),
    "deep suspects": write("suspects.json", DEEP),
    "deep checksums": write("SHA256SUMS", DEEP),
    "checksum of another file": write("SHA256SUMS", "0" * 64 + "  config.json\n"),
    "config links to itself": replace("config.json", lambda path: path.symlink_to("config.json")),
    "ranking links to a device": replace("ranking.parquet", lambda path: path.symlink_to("/dev/zero")),
    "ranking links out": replace("ranking.parquet", lambda path: path.symlink_to("/etc/passwd")),
    "metrics is a pipe": replace("metrics.jsonl", os.mkfifo),
    "ranking is a folder": replace("ranking.parquet", Path.mkdir),
    "a pickle": write("ranking.parquet", pickle.dumps({"id": ["a"]})),
    "a huge footer": write("ranking.parquet", b"PAR1" + bytes(100) + struct.pack("<I", 1 << 31) + b"PAR1"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_folder_is_one_sentence(case: str, tmp_path: Path) -> None:
    run = fabricate(tmp_path / "run", n=24, epochs=2).path
    CASES[case](run)
    codes = []
    for words in (("rank", run), ("report", run, "--out", tmp_path / "page.html", "--force")):
        (tmp_path / "page.html").write_text("")
        code, _, said = typed(*words)
        codes.append(code)
        assert code == 0 or re.fullmatch(r"soseleto: [^\n]+\.\n", said), said[:2000]
        assert len(said) < 1200
    assert any(codes)


def test_models_of_other_sizes_are_refused(tmp_path: Path) -> None:
    header = json.dumps({"0.weight": {"dtype": "F32", "shape": [1 << 58], "data_offsets": [0, 1 << 60]}}).encode()
    run = fabricate(tmp_path / "run", n=24, epochs=1)
    for content in (struct.pack("<Q", len(header)) + header, struct.pack("<Q", 1 << 63), pickle.dumps({"a": [1.0]})):
        (run.path / "model.safetensors").write_bytes(content)
        with pytest.raises(DataError, match=r"model.safetensors cannot be read, it may be damaged"):
            run.model_state()


def test_checkpoints_behind_a_link_are_not_deleted(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    for year in ("2019", "2020", "2021"):
        (photos / year).mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint").symlink_to(photos)
    with pytest.raises(DataError, match="is a link, but must be a folder"):
        checkpoint.load_last(tmp_path / "run", print)
    with pytest.raises(DataError, match="is a link, but must be a folder"):
        checkpoint.save(tmp_path / "run", 1, {})
    assert len(list(photos.iterdir())) == 3
