"""Checksums of a run's files."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

import soseleto
from fabricated import fabricate
from soseleto.errors import DataError
from soseleto.models.architectures import mlp
from soseleto.report import write_report
from soseleto.review.queue import Decision, Decisions, read_decisions
from soseleto.run_folder import files
from soseleto.run_folder.folder import CALIBRATION, COMPARISON, RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = fabricate(tmp_path / "run", n=40, epochs=2)
    folder.end({"event": "end"})
    return folder


def test_every_file_is_listed_and_later_writes_keep_the_list_current(run: RunFolder, tmp_path: Path) -> None:
    write_report(run.path, tmp_path / "report.html")
    assert "report.html" not in (files.checksums_of(run.path) or {})
    write_report(run.path)
    run.write_json(COMPARISON, {"rows": []})
    decisions = Decisions(run)
    decisions.decide(Decision("a", "drop"))
    decisions.undo()
    decisions.close()
    listed = files.checksums_of(run.path)
    assert {*listed, "SHA256SUMS"} == {path.name for path in run.path.iterdir()}
    checked = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=run.path, capture_output=True)
    assert checked.returncode == 0
    assert read_decisions(run) == {}


@pytest.mark.parametrize("moment", ["before the rename", "after the rename"])
def test_a_kill_while_a_file_is_replaced_leaves_a_whole_file(
    run: RunFolder, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write_json(COMPARISON, {"rows": [1]})
    replace, name = Path.replace, "comparison.json"

    def killed(self: Path, to: Path) -> Path:
        if Path(to).name != name:
            return replace(self, to)
        if moment == "after the rename":
            replace(self, to)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            run.write_json(COMPARISON, {"rows": [2]})
    assert run.comparison() == {"rows": [1 if moment == "before the rename" else 2]}
    run.write_json(COMPARISON, {"rows": [3]})
    (run.path / name).write_text('{"rows": [4]}')
    with pytest.raises(DataError, match=r"comparison.json is damaged \(its checksum is not that in SHA256SUMS\)"):
        run.comparison()


def test_a_decision_that_was_cut_off_is_ignored_and_one_that_was_lost_is_not(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    decisions = Decisions(run)
    decisions.decide(Decision("a", "drop"))
    path = run.path / "review.jsonl"

    def cut(*_: object, **__: object) -> None:
        with path.open("ab") as file:
            file.write(b'{"id": "b", "act')
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("soseleto.review.queue.append_line", cut)
        with pytest.raises(KeyboardInterrupt):
            decisions.decide(Decision("b", "drop"))
    decisions.close()
    assert list(read_decisions(run)) == ["a"]
    again = Decisions(run)
    again.decide(Decision("c", "keep"))
    again.close()
    assert list(read_decisions(run)) == ["a", "c"]
    path.write_bytes(path.read_bytes()[:-1])  # the last decision is now an incomplete line
    with pytest.raises(DataError, match=r"review.jsonl is damaged"):
        read_decisions(run)
    path.unlink()
    with pytest.raises(DataError, match=r"review.jsonl is missing: restore it from a copy, or delete its line"):
        read_decisions(run)


def test_the_model_of_a_rival_that_was_kept_is_verified(tmp_path: Path) -> None:
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    given, notes = (x, x[:, :3].argmax(1)), soseleto.Checkpoints(notes={"model": "mlp", "n_classes": 3})
    soseleto.fit(mlp(4, 3), given, given, epochs=1, out=tmp_path / "run", device="cpu", checkpoints=notes)
    run = RunFolder(tmp_path / "run")
    run.keep_model(run)
    run.write_json(COMPARISON, {"rows": [], "kept": "mixed"})
    run.write_json(CALIBRATION, json.loads('{"temperature": 2.0}'))
    assert soseleto.load(run.path, device="cpu").temperature == 2.0
    content = bytearray((run.path / "kept.safetensors").read_bytes())
    content[-1] ^= 1
    (run.path / "kept.safetensors").write_bytes(content)
    with pytest.raises(DataError, match=r"kept.safetensors is damaged"):
        soseleto.load(run.path, device="cpu")
    (run.path / "comparison.json").unlink()  # without it, another model would be used
    with pytest.raises(DataError, match=r"comparison.json is missing"):
        soseleto.load(run.path, device="cpu")
