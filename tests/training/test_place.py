"""A run folder that is lost during the training: the run continues, and is written where that is possible."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import soseleto
from soseleto.errors import DiskError, Interrupted, UsageError
from soseleto.run_folder import checkpoint
from soseleto.run_folder.folder import RunFolder
from soseleto.training.options import Checkpoints
from training.test_checkpoint import ask, fit, history, require_equal, steps_saved

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(os.name != "posix", reason="a folder in use can be deleted on POSIX systems only")


@pytest.fixture(scope="module")
def uninterrupted() -> soseleto.Result:
    return fit(None)


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def require_whole(run: Path, result: soseleto.Result) -> None:
    """The folder is a complete run with this result."""
    folder = RunFolder.open(run)
    assert folder.has_ended()
    events = [record["event"] for record in folder.metrics()]
    assert (events[0], events.count("epoch"), events[-1]) == ("start", 3, "end")
    state = result.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in folder.model_state().items())
    assert len(folder.ranking()["id"]) == len(result.weights)
    assert sorted(path.name for path in run.iterdir()) == [
        "SHA256SUMS", "config.json", "metrics.jsonl", "model.safetensors", "ranking.parquet",
    ]  # fmt: skip


def test_a_deleted_folder_is_rescued(tmp_path: Path, uninterrupted: Any) -> None:
    run, rescue = tmp_path / "run", tmp_path / "elsewhere" / "rescue"
    result = fit(run, 12, lambda: shutil.rmtree(run), checkpoints=Checkpoints(steps=5, rescue=rescue))
    require_equal(uninterrupted, result)
    require_whole(rescue, result)
    assert result.out == rescue
    assert not run.exists()
    moved = [text for text in result.messages if "now written to" in text]
    assert moved == [f"{run} was deleted during the training: the run is now written to {rescue}"]


def test_a_rescued_run_can_be_resumed(tmp_path: Path, uninterrupted: Any) -> None:
    run, rescue = tmp_path / "run", tmp_path / "rescue"

    def lose_and_stop() -> None:
        shutil.rmtree(run)
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted, match=f"run the same again with {rescue} to resume"):
        fit(run, 12, lose_and_stop, checkpoints=Checkpoints(steps=5, rescue=rescue))
    assert steps_saved(rescue) == [12]
    result = fit(rescue)
    require_equal(uninterrupted, result)
    require_whole(rescue, result)


def test_an_emptied_folder_is_filled_again(tmp_path: Path, uninterrupted: Any) -> None:
    run = tmp_path / "run"
    result = fit(run, 12, lambda: empty(run))
    require_equal(uninterrupted, result)
    require_whole(run, result)
    assert f"{run} was emptied during the training: everything was written to it again" in result.messages


def test_a_folder_that_was_made_again_is_used(tmp_path: Path, uninterrupted: Any) -> None:
    run, steps = tmp_path / "run", []

    def lose_and_make() -> None:
        steps.append(len(steps))
        if len(steps) == 11:
            shutil.rmtree(run)
        if len(steps) == 18:
            run.mkdir()

    result = fit(run, optimizer=every_step(lose_and_make))
    require_equal(uninterrupted, result)
    require_whole(run, result)
    texts = " ".join(result.messages)
    assert "was deleted during the training: the training continues in memory" in texts
    assert "was emptied during the training: everything was written to it again" in texts


def every_step(then: Callable[[], None]) -> Any:
    def make(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.Adam(list(parameters), lr=0.01)
        made.register_step_post_hook(lambda *_: then())
        return made

    return make


def test_without_a_rescue_folder_the_error_says_what_is_lost(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(DiskError) as lost:
        fit(run, 12, lambda: shutil.rmtree(run))
    assert str(lost.value) == (
        f"{run} was deleted during the training: the training has ended, but its results are lost; fix that and run "
        "again, with --rescue DIR for another folder."
    )
    assert not run.exists()


def test_a_folder_of_somebody_else_in_its_place_is_left_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def replace() -> None:
        shutil.rmtree(run)
        run.mkdir()
        (run / "mine.txt").write_text("mine")

    with pytest.raises(DiskError, match="was replaced by another folder during the training"):
        fit(run, 12, replace)
    assert [path.name for path in run.iterdir()] == ["mine.txt"]


def test_a_stop_without_any_place_to_save_says_so(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def lose_and_stop() -> None:
        shutil.rmtree(run)
        ask(signal.SIGTERM)()

    with pytest.raises(Interrupted, match="it could not be saved"):
        fit(run, 12, lose_and_stop)


def test_a_rescue_folder_must_be_usable(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for rescue, said in (("full", "must be new or empty"), ("run/inside", "is inside"), ("run", "is inside")):
        with pytest.raises(UsageError, match=said):
            fit(tmp_path / "run", checkpoints=Checkpoints(rescue=tmp_path / rescue))
    with pytest.raises(UsageError, match="has no effect without a run folder"):
        fit(None, checkpoints=Checkpoints(rescue=tmp_path / "new"))


def test_the_command_continues_in_the_rescue_folder_when_its_folder_is_deleted(tmp_path: Path) -> None:
    """A real process, whose folder is deleted while a fold is trained: the main training had ended and is not lost."""
    sys.path.insert(0, str(BENCHMARKS))
    from data_safety.example import fit_words, write_data

    write_data(tmp_path)
    run, rescue, whole = tmp_path / "run", tmp_path / "rescue", tmp_path / "whole"
    words = [fit_words(tmp_path, whole, "--no-baselines")]
    words += [fit_words(tmp_path, run, "--rescue", rescue, "--no-baselines")]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOWLY, *map(json.dumps, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 100
    begun = run / "parts" / "fold-2" / "soseleto" / "metrics.jsonl"
    while not begun.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    shutil.rmtree(run)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert f"now written to {rescue}" in err.replace("\n", " ")
    assert out.endswith(f"report: {rescue / 'report.html'}\n")
    mine, its = RunFolder.open(rescue), RunFolder.open(whole)
    assert mine.comparison() == its.comparison()
    assert {path.name for path in rescue.iterdir()} == {path.name for path in whole.iterdir()}
    for name in ("model.safetensors", "ranking.parquet", "calibration.json", "suspects.json", "pictures.parquet"):
        assert (rescue / name).read_bytes() == (whole / name).read_bytes()
    epochs = [[r for r in one.metrics() if r["event"] == "epoch"] for one in (mine, its)]
    assert history(epochs[0]) == history(epochs[1])
    assert not run.exists()
    assert json.loads((rescue / "config.json").read_text()) == json.loads((whole / "config.json").read_text())
    assert not checkpoint.existing(rescue)


# Both runs in one process: most of its time are imports, and rounding depends on the number of threads.
SLOWLY = """
import contextlib, json, sys, time
from soseleto.cli.main import main
from soseleto.training import resume
after = resume.Keeper.after
def slow(self, step):
    time.sleep(0.05)
    after(self, step)
with contextlib.suppress(SystemExit):
    main(json.loads(sys.argv[1]))
resume.Keeper.after = slow
main(json.loads(sys.argv[2]))
"""
