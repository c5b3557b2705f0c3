"""Ranks: several processes train the same model as one, and stop when one of them is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import soseleto
from experiments.methods import METHODS
from ranks import together
from small_tasks import ask_at
from soseleto.data import Augment
from soseleto.errors import RankLost
from soseleto.methods import Mixed, Ordinary, TargetOnly
from soseleto.parallel.reducer import Reducer
from soseleto.pieces import (
    at_temperature,
    chain,
    label_doubt,
    last_layer,
    mean,
    pooled_by_class,
    preconditioned,
    scale_by_rms,
    target_share,
    unit_length,
    whitened,
)
from soseleto.run_folder.folder import RunFolder
from soseleto.task.optimizers import adamw
from soseleto.training.options import Inputs

pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are started and killed as POSIX does")


class Reshaped(nn.Module):
    """Raises for an empty batch, as many models do."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1)


def points(n: int, seed: int) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 4, generator=seeded, dtype=torch.float64)
    return inputs, (inputs[:, :3] + 0.5 * torch.randn(n, 3, generator=seeded, dtype=torch.float64)).argmax(1)


def net(mode: str = "noisy") -> nn.Module:
    torch.manual_seed(0)
    trunk = [nn.Linear(4, 8), nn.Tanh(), Reshaped()]
    return nn.Sequential(*trunk, nn.Linear(8, 3)).double() if mode == "noisy" else nn.Sequential(*trunk).double()


def train(reducer: Reducer | None, compute: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """200 steps by default, 8 per epoch; the last batch has 2 source and 3 target examples, so some ranks get none."""
    given: dict[str, Any] = {
        "source": points(58, 0), "target": points(20, 1), "epochs": 25, "batch_size": 8,
        "target_batch_size": 3, "device": "cpu", "compute": soseleto.Compute(reducer=reducer, **(compute or {})),
    }  # fmt: skip
    rate = {} if "optimizer" in changes else {"lr": 0.05}
    given = {"model": net(changes.get("mode", "noisy")), **given, **rate, **changes}
    result = soseleto.fit(**given)
    found = {f"model {name}": value for name, value in result.model.state_dict().items()}
    if result.learned is not None:
        found |= {"weights": result.weights, "scores": result.scores, "visits": result.learned.visits.double()}
    drop = ("seconds", "epoch", "epochs", "groups")
    last = {name: value for name, value in result.history[-1].items() if name not in drop}
    return found | {name: torch.tensor(float(value)) for name, value in last.items()}


def require_close(one: dict[str, Any], other: dict[str, Any], tolerance: float = 1e-6) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value.double(), other[name].double(), rtol=tolerance, atol=tolerance, msg=name)


CASES: dict[str, dict[str, Any]] = {
    **{
        f"{mode}, {engine}": {"mode": mode, "method": soseleto.Soseleto(engine=engine)}
        for mode in ("noisy", "transfer")
        for engine in ("layerwise", "forward", "double_backward", "loop")
    },
    "paper's loss": {"method": soseleto.Soseleto(source_loss=mean(), gradients=target_share(0.3))},
    "frozen": {"method": soseleto.Soseleto(weight_step=None), "mode": "transfer"},
    "labels doubted": {"method": soseleto.Soseleto(source_loss=label_doubt(), initial_weight=0.7)},
    "last layer": {
        "method": soseleto.Soseleto(
            alignment=chain(last_layer(), scale_by_rms()),
            scores=last_layer(whitened(), unit_length(), at_temperature()),
        )
    },
    "preconditioned": {"method": soseleto.Soseleto(direction=preconditioned()), "optimizer": partial(adamw, lr=0.01)},
    "pooled by class": {"method": soseleto.Soseleto(scores=pooled_by_class())},
    "ordinary": {"method": Ordinary()},
    "mixed": {"method": Mixed()},
    "target only": {"method": TargetOnly()},
}


def train_all(reducer: Reducer | None) -> dict[str, Any]:
    long = "transfer, layerwise"  # 80 steps
    return {name: train(reducer, **case, epochs=10 if name == long else 2) for name, case in CASES.items()}


def test_ranks_train_what_one_process_does() -> None:
    alone = train_all(None)
    for answer in together(2, train_all):
        assert isinstance(answer, dict), answer
        for name in CASES:
            require_close(alone[name], answer[name])


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


def stopped_after(reducer: Reducer | None, out: str, steps: int) -> Any:
    """Train into ``out``; rank 1 (or the only process) receives SIGTERM after this many steps."""
    asked = reducer is None or reducer.rank == 1
    return train(reducer, epochs=5, out=out, optimizer=ask_at(steps if asked else 0, terminate))


@pytest.mark.long
def test_a_run_resumes_with_another_number_of_ranks(tmp_path: Path) -> None:
    whole = train(None, epochs=5, optimizer=ask_at(0, terminate))
    out = str(tmp_path / "run")
    answers = together(2, stopped_after, out, 11)
    assert [answer[0] for answer in answers] == ["Interrupted", "Interrupted"]
    assert "after step 11 of 40" in answers[0][1]
    with pytest.raises(soseleto.errors.Interrupted, match="after step 23 of 40"):
        stopped_after(None, out, 12)
    answers = together(4, stopped_after, out, 0)
    require_close(whole, answers[3])
    best_first = torch.sort(whole["scores"], descending=True, stable=True).indices
    assert RunFolder(out).ranking()["id"].tolist() == [str(i) for i in best_first.tolist()]


def with_accident(reducer: Reducer, accident: str) -> Any:
    accidents: dict[str, Callable[[], None]] = {
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "hangs": lambda: time.sleep(7),
        "fails": lambda: (_ for _ in ()).throw(ValueError("no more")),
    }
    begin = time.monotonic()
    try:
        train(reducer, optimizer=ask_at(5 if reducer.rank == 1 else 0, accidents[accident]))
    except RankLost as error:
        return time.monotonic() - begin, str(error)


@pytest.mark.parametrize(
    "accident", ["killed", *(pytest.param(name, marks=pytest.mark.long) for name in ("hangs", "fails"))]
)
def test_no_rank_waits_for_one_that_is_lost(accident: str) -> None:
    answers = together(3, with_accident, accident, answer=3.0)
    for rank in (0, 2):
        seconds, sentence = answers[rank]
        assert seconds < 60
        assert sentence.startswith(f"rank {rank} of 3 stops, since another rank has died or does not answer (")
    if accident == "killed":
        assert answers[1] is None


def broken(reducer: Reducer, out: str) -> list[str]:
    """The messages of trainings with an error on one rank, or on all."""
    x, y = points(58, 0)
    bad = x.clone()
    bad[33] = torch.nan  # which belongs to rank 1 of 2
    other = (x + reducer.rank, y)
    return [
        message(reducer, source=(bad, y)),
        message(reducer, source=other),
        message(reducer, model=nn.SyncBatchNorm(4).double()),
        message(reducer, method=METHODS["xiao"]()),
        message(reducer, source=points(1, 0), batch_size=1),
        message(reducer, out=out),
    ]


def message(reducer: Reducer | None, **changes: Any) -> str:
    """Of the error of a training."""
    try:
        train(reducer, **changes)
    except soseleto.SoseletoError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def require_words(sentences: list[str], *words: str) -> None:
    for sentence, expected in zip(sentences, words, strict=True):
        assert expected in sentence


def test_all_ranks_stop_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first, second = together(2, broken, str(tmp_path / "file"))
    assert first[:-1] == second[:-1]
    require_words(
        first,
        "TrainingError: the loss of 1 source example (id 33) is NaN",
        "since the source data changed: give every rank the same.",
        "UsageError: SyncBatchNorm '' is not supported with ranks",
        "UsageError: the method 'xiao' trains in one process",
        "UsageError: 2 ranks are too many for 1 source example:",
        f"UsageError: {tmp_path / 'file'} is a file",
    )
    assert second[-1] == first[-1].replace("UsageError", "RankStopped")


def disagreeing(reducer: Reducer) -> list[str]:
    """The messages of trainings whose settings differ from rank to rank."""
    mine = reducer.rank
    return [
        message(reducer, seed=mine, epochs=3 + mine, batch_size=8 + mine),
        message(reducer, lr=0.1 * (1 + mine)),
        message(reducer, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9 * mine)),
        message(reducer, method=soseleto.Soseleto(weight_step=0.1 + mine)),
        message(reducer, inputs=Inputs(augment=Augment(crop=1) if mine else None)),
    ]


def test_ranks_with_different_settings_stop_with_all_differences() -> None:
    first, second = together(2, disagreeing, answer=20.0)
    assert first == second
    require_words(
        first,
        "epochs is 3 on rank 0 and 4 on rank 1, batch_size is 8 on rank 0",
        "lr is 0.1 on rank 0 and 0.2 on rank 1",
        "optimizer group 0.momentum is 0.0 on rank 0 and 0.9 on rank 1",
        "settings.weight_step is 0.1 on rank 0 and 1.1 on rank 1",
        "augment_source changed",
    )
    for sentence in first:
        assert "Error: the ranks were started with different settings, since " in sentence
        assert sentence.endswith(": give every rank the same.")


def test_torchrun_runs_the_command_line(tmp_path: Path) -> None:
    for name, n in (("source", 40), ("target", 12)):
        x, y = points(n, n)
        np.savez(tmp_path / name, x=x.numpy(), y=y.numpy())
    words = "-m torch.distributed.run --standalone --nproc-per-node 2 -m soseleto fit --source source.npz --out run"
    more = "--target target.npz --epochs 2 --batch-size 8 --folds 2 --device cpu"
    done = subprocess.run(
        [sys.executable, *words.split(), *more.split()], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("next: soseleto ") == 1
    run = RunFolder.open(tmp_path / "run")
    assert run.has_ended()
    assert run.config()["ranks"] == 2
    assert sorted(run.ranking()["id"].tolist(), key=int) == [str(i) for i in range(40)]
    assert set(run.ranking()["visits"].tolist()) == {2}
