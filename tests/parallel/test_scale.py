"""Micro-batches, skipped steps, out of memory, and loggers."""

from __future__ import annotations

import copy
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soseleto
from experiments.methods import METHODS
from parallel.test_ranks import CASES, points, require_close, train
from soseleto.errors import DataError, OutOfMemory, TrainingError, UsageError
from soseleto.integrations import loggers
from soseleto.methods import Strong


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.long), 3])
def test_micro_batches_train_as_whole_batches(case: str, size: int) -> None:
    changes = {**CASES[case], "epochs": 2}
    require_close(train(None, **changes), train(None, **changes, compute={"micro_batch_size": size}), 1e-9)


FOUR = {"micro_batch_size": 4}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compute": FOUR, "method": METHODS["reweight"]()}, "'reweight' trains in one process and on whole"),
        ({"compute": FOUR, "probes": 0.5}, "probes need one process and whole batches"),
    ],
)
def test_settings_without_micro_batches_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        train(None, epochs=1, **changes)


# Memory


class Greedy(nn.Linear):
    """Runs out of memory above ``room`` examples per forward pass."""

    room = 3

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.room and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return super().forward(x)


def test_out_of_memory_names_a_smaller_size(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), Greedy(8, 3)).double()
    sentence = r"memory on cpu for 8 examples at a time: add compute=Compute\(micro_batch_size=4\) or less"
    with pytest.raises(OutOfMemory, match=sentence):
        train(None, model=model, epochs=1, out=tmp_path / "run")
    train(None, model=model, epochs=1, out=tmp_path / "run", compute={"micro_batch_size": 2})


def squares(n: int) -> tuple[Tensor, Tensor]:
    """Images of 2×2 bytes."""
    inputs, labels = points(n, 0)
    return (255 * inputs.view(n, 1, 2, 2).sigmoid()).to(torch.uint8), labels


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        (
            {"method": Strong(), "source": squares(58), "target": squares(20)},
            r"write batch_size=4 \(--batch-size 4\) or less",
        ),
        ({"method": METHODS["ordinary"](), "probes": 0.5}, "write batch_size=4 "),
        ({"method": METHODS["reweight"](), "target_batch_size": 12}, "write target_batch_size=6 "),
    ],
)
def test_out_of_memory_of_whole_batches_asks_for_smaller_ones(given: dict[str, Any], fix: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), Greedy(8, 3)).double()
    with pytest.raises(OutOfMemory, match=fix):
        train(None, model=model, epochs=1, **given)


# Loggers


class Kept(loggers.EpochLogger):
    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def log(self, step: int, numbers: Any) -> None:
        self.seen.append((step, dict(numbers)))

    def close(self) -> None:
        self.closed += 1


def test_every_epoch_reaches_the_loggers_and_every_event_the_functions_beside_them(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing import event_accumulator as accumulator

    kept, board, events = Kept(), loggers.TensorBoard(tmp_path), list[str]()
    functions = [lambda event, record: events.append(event), lambda *_: events.append("too")]
    train(None, epochs=2, progress=[functions[0], kept, board, functions[1]])
    written = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in written.Scalars("source_loss")] == [8, 16]
    assert events.count("start") == 1
    assert events.count("too") == len(events) / 2
    assert [step for step, _ in kept.seen] == [8, 16]
    assert {"source_loss", "target_loss", "mean_weight"} <= kept.seen[0][1].keys()
    assert all(type(number) is float for _, numbers in kept.seen for number in numbers.values())
    assert kept.closed == 1


def test_a_failed_training_closes_its_loggers() -> None:
    kept, (inputs, labels) = Kept(), points(58, 0)
    inputs[5] = torch.nan
    with pytest.raises(TrainingError):
        train(None, source=(inputs, labels), progress=kept)
    assert kept.closed == 1


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(DataError, match="TensorBoard needs tensorboard, which is not installed: type pip install"):
        loggers.TensorBoard("runs")


# Models that were compiled, or split over processes


@pytest.mark.parametrize(("engine", "in_place"), [("layerwise", True), ("forward", False), ("auto", False)])
def test_a_compiled_model_runs_uncompiled_for_the_alignments(
    engine: str, in_place: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(4, 3).double()
    model = copy.deepcopy(plain)
    if in_place:
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    given = {"epochs": 1, "batch_size": 8, "device": "cpu", "method": soseleto.Soseleto(engine=engine)}
    wanted = soseleto.fit(plain, points(16, 0), points(8, 1), **given)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, logger="soseleto"):
        found = soseleto.fit(model, points(16, 0), points(8, 1), **given)  # type: ignore[arg-type]
    torch.testing.assert_close(found.weights, wanted.weights)
    assert sum("run uncompiled" in record.getMessage() for record in caplog.records) == 1
