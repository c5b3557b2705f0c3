"""Checksums of a run's files, and values that cannot be right even where the checksums match."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import soseleto
from fabricated import fabricate
from soseleto.errors import DataError, DiskError
from soseleto.models.by_name import by_name
from soseleto.report import write_report
from soseleto.report.export import export_ranking
from soseleto.review.decisions import Decision, Decisions, read_decisions
from soseleto.run_folder import checksums
from soseleto.run_folder.folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = fabricate(tmp_path / "run", n=40, epochs=2)
    folder.end({"event": "end"})
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    source = soseleto.Examples(x, x[:, :3].argmax(1), classes=("a", "b", "c"))
    notes = {"model": "mlp", "n_classes": 3}
    model = by_name("mlp", classes=3, shape=(4,))
    checkpoints = soseleto.Checkpoints(notes=notes)
    soseleto.fit(model, source, source, epochs=1, out=out, device="cpu", checkpoints=checkpoints)
    return out


def copied(run: Path, to: Path) -> RunFolder:
    to.mkdir()
    for path in run.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return RunFolder(to)


def edit(run: RunFolder, **changes: Any) -> None:
    """Change ``config.json`` and write its checksum again, as someone would who edits a run on purpose."""
    config = json.loads((run.path / "config.json").read_text())
    checksums.write(run.path / "config.json", json.dumps({**config, **changes}))


def test_every_file_is_listed_and_later_writes_keep_the_list_current(run: RunFolder) -> None:
    write_report(run.path)
    run.write_comparison({"rows": []})
    decisions = Decisions(run)
    decisions.decide(Decision("a", "drop"))
    decisions.undo()
    decisions.close()
    listed = checksums.read(run.path)
    assert listed is not None
    assert {*listed, "checksums.json"} == {path.name for path in run.path.iterdir()}
    for name, accepted in listed.items():
        content = (run.path / name).read_bytes()
        assert accepted == [f"{len(content)} {hashlib.sha256(content).hexdigest()}"], name
    assert read_decisions(run) == {}


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_run_whose_end_could_not_be_written_is_unfinished_or_has_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """The checksums are written three times: without the last record, with and without it, and with it."""
    run = fabricate(tmp_path / "run", n=10, epochs=1)
    run.write_metrics([record for record in run.metrics() if record["event"] != "end"])
    true, calls = checksums._write, []

    def full(*given: Any) -> None:
        calls.append(given)
        if len(calls) >= failing:
            raise DiskError("no space")
        true(*given)

    with monkeypatch.context() as patched:
        patched.setattr(checksums, "_write", full)
        with nullcontext() if failing == 3 else pytest.raises(DiskError):
            run.end({"event": "end"})
    assert run.has_ended() == (checksums.read(run.path) is not None) == (failing == 3)


def test_a_report_written_elsewhere_is_not_listed(run: RunFolder, tmp_path: Path) -> None:
    write_report(run.path, tmp_path / "report.html")
    assert "report.html" not in (checksums.read(run.path) or {})


@pytest.mark.parametrize("moment", ["before the rename", "after the rename"])
def test_a_kill_while_a_file_is_replaced_leaves_a_run_that_is_verified(
    run: RunFolder, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write_comparison({"rows": [1]})
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
            run.write_comparison({"rows": [2]})
    assert run.comparison() == {"rows": [1 if moment == "before the rename" else 2]}
    (run.path / name).write_text('{"rows": [3]}')
    with pytest.raises(DataError, match=r"comparison.json is damaged"):
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
        patched.setattr("soseleto.run_folder.json_lines.append", cut)
        with pytest.raises(KeyboardInterrupt):
            decisions.decide(Decision("b", "drop"))
    decisions.close()
    assert list(read_decisions(run)) == ["a"]
    again = Decisions(run)
    again.decide(Decision("c", "keep"))
    again.close()
    assert list(read_decisions(run)) == ["a", "c"]
    path.write_bytes(path.read_bytes()[:-1])  # the last decision is now an incomplete line
    with pytest.raises(DataError, match=r"review.jsonl is damaged .* holds the decisions of the review"):
        read_decisions(run)
    path.unlink()
    with pytest.raises(DataError, match=r"review.jsonl is missing, although it was written"):
        read_decisions(run)


def test_a_run_without_checksums_is_read_and_says_so(trained: Path, tmp_path: Path, caplog: Any) -> None:
    old = copied(trained, tmp_path / "old")
    with caplog.at_level(logging.WARNING):
        RunFolder.open(old.path)
        assert caplog.messages == []
        (old.path / "checksums.json").unlink()
        RunFolder.open(old.path)
    assert caplog.messages == [f"{old.path} has no checksums, so that damage to its files may not be noticed"]


def test_an_optional_file_may_be_deleted_with_a_warning(run: RunFolder, caplog: Any) -> None:
    run.write_temperature(2.0, examples=9)
    (run.path / "calibration.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert run.temperature() == 1.0
    assert caplog.messages == [f"{run.path / 'calibration.json'} is missing: probabilities are not calibrated"]


def test_a_file_that_no_command_wrote_is_not_used(run: RunFolder) -> None:
    (run.path / "calibration.json").write_text('{"temperature": 9}')
    with pytest.raises(DataError, match=r"is not listed in checksums.json"):
        run.temperature()


def test_damage_to_a_format_is_damage_and_not_another_program(run: RunFolder) -> None:
    (run.path / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"config.json is damaged .* no command works without it"):
        RunFolder.open(run.path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"classes": ["b", "a", "c"]}, "its classes are not those that the model was trained with"),
        ({"classes": ["a", "b"]}, "it names 2 classes and its n_classes is 3"),
        ({"classes": ["a", "b"], "n_classes": 2}, "its classes are not those that the model was trained with"),
        ({"classes": ["a", "a", "c"]}, "instead of a list of different names"),
        ({"classes": None, "n_classes": 10**6}, "its classes are not those"),
        ({"n_classes": 10**15}, "its n_classes is 1000000000000000 instead of a whole number up to 10,000,000"),
        ({"input_shape": [10**9, 10**9]}, "its input_shape is [1000000000, 1000000000] instead of at most 8 sizes"),
        ({"input_shape": [5]}, "its input_shape are not those"),
    ],
)
def test_class_names_and_sizes_are_those_of_the_model(
    trained: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    run = copied(trained, tmp_path / "run")
    edit(run, **changes)
    with pytest.raises(DataError) as refused:
        soseleto.load(run.path, device="cpu")
    assert said in str(refused.value)


def test_sizes_are_compared_with_the_model_before_memory_is_allocated(trained: Path, tmp_path: Path) -> None:
    """In a run of an earlier version, whose model has no copy of the class names."""
    run = copied(trained, tmp_path / "run")
    run.write_model(run.model_state())
    edit(run, classes=None, n_classes=10**7, input_shape=[2**28])  # 2**28 x 64 numbers in the first layer
    with pytest.raises(DataError, match=r"the sizes in .* are not those of model.safetensors"):
        soseleto.load(run.path, device="cpu")


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("weight", np.nan, "1 of its 24 entries in weight are missing or out of range"),
        ("weight", 1.5, "1 of its 24 entries in weight are missing or out of range"),
        ("score", np.inf, "1 of its 24 entries in score are missing or out of range"),
    ],
)
def test_weights_that_cannot_be_right_are_named(
    trained: Path, tmp_path: Path, column: str, value: float, said: str
) -> None:
    run = copied(trained, tmp_path / "run")
    columns = {name: values.copy() for name, values in run.ranking().items()}
    columns[column][3] = value
    run.write_ranking(columns)
    with pytest.raises(DataError, match=said):
        export_ranking(run.path)
    run.write_ranking({name: values[:-1] for name, values in columns.items()})
    with pytest.raises(DataError, match="it has 23 rows for 24 source examples"):
        write_report(run.path, os.devnull)


def test_a_model_with_nan_is_refused(tmp_path: Path) -> None:
    run = fabricate(tmp_path / "run", n=10, epochs=1)
    run.write_model({"weight": torch.tensor([1.0, float("nan")])})
    with pytest.raises(DataError, match=r"its entry 'weight' has numbers that are NaN"):
        soseleto.load(run.path, nn.Linear(1, 2))


def test_the_model_of_a_rival_that_was_kept_is_verified(trained: Path, tmp_path: Path) -> None:
    run = copied(trained, tmp_path / "run")
    run.keep_model(run.model_bytes())
    run.write_comparison({"rows": [], "kept": "mixed"})
    soseleto.load(run.path, device="cpu")
    content = bytearray((run.path / "kept.safetensors").read_bytes())
    content[-1] ^= 1
    (run.path / "kept.safetensors").write_bytes(content)
    with pytest.raises(DataError, match=r"kept.safetensors is damaged"):
        soseleto.load(run.path, device="cpu")
    (run.path / "comparison.json").unlink()  # without it, another model would be used
    with pytest.raises(DataError, match=r"comparison.json is missing, although it was written"):
        soseleto.load(run.path, device="cpu")
