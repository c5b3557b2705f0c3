"""Checkpoints: killed at any moment, damaged, or asked to stop, a run goes on as if nothing had happened."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import soseleto
from experiments.methods import METHODS, Luo, MatchingNetworks
from experiments.methods.matching import Attention
from small_tasks import ask_at
from soseleto.errors import CannotSave, DataError, DiskError, Interrupted, UsageError
from soseleto.methods import Mixed
from soseleto.pieces import label_doubt, pooled_by_class
from soseleto.run_folder import checkpoint
from soseleto.run_folder.folder import RunFolder
from soseleto.training.options import Checkpoints

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals are a matter of POSIX")


def points(n: int, seed: int, classes: int = 3) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 4, generator=seeded)
    return inputs, inputs[:, :classes].argmax(1)


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


class Crash(Exception):
    """Stands for whatever ends a process."""


def crash() -> None:
    raise Crash


def ask(number: signal.Signals) -> Callable[[], None]:
    return lambda: signal.raise_signal(number)


def fit(out: Path | None, at: int = 0, then: Callable[[], None] = crash, **changes: Any) -> soseleto.Result:
    """24 steps, 8 an epoch; a checkpoint every 5."""
    given: dict[str, Any] = {
        "model": net(), "source": points(64, 0), "target": points(20, 1), "epochs": 3,
        "batch_size": 8, "target_batch_size": 10, "device": "cpu", "out": out,
        "optimizer": ask_at(at, then, partial(torch.optim.Adam, lr=0.01)),
        "checkpoints": Checkpoints(steps=None if out is None else 5),
    }  # fmt: skip
    return soseleto.fit(**{**given, **changes})


def history(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


def require_equal(one: soseleto.Result, other: soseleto.Result) -> None:
    mine, its = one.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(mine[name], its[name]) for name in mine)
    assert history(one.history) == history(other.history)
    if one.learned is not None:
        assert torch.equal(one.weights, other.weights)
        assert torch.equal(one.scores, other.scores)
        assert torch.equal(one.learned.visits, other.learned.visits)


def steps_saved(run: Path) -> list[int]:
    return [int(path.name) for path in checkpoint.existing(run)]


def cut_short(run: Path, at: int = 13, **changes: Any) -> None:
    with pytest.raises(Crash):
        fit(run, at, **changes)


# Killed


@pytest.mark.parametrize("at", [3, 8, 23])
def test_a_run_cut_short_goes_on_from_the_last_checkpoint(tmp_path: Path, at: int) -> None:
    cut_short(tmp_path / "run", at)
    result = fit(tmp_path / "run")
    require_equal(fit(None), result)
    assert (f"resumed after step {at - at % 5 if at % 5 else at - 5}" in result.messages) == (at > 5)


METHODS_AND_WRAPPERS: dict[str, Callable[[], Any]] = {
    **METHODS,
    "pooled": lambda: soseleto.Soseleto(scores=pooled_by_class()),
    "doubted": lambda: soseleto.Soseleto(source_loss=label_doubt()),
    "matching_networks": lambda: MatchingNetworks(fine_tune=0.5),
    "luo": lambda: Luo(unlabelled=points(30, 6)[0], batch_size=7),
}
TARGET_HEADS: dict[str, Callable[[], nn.Module]] = {  # of the methods that know transfer mode only
    "matching_networks": lambda: Attention(20, 8, 3),
    "luo": lambda: nn.Linear(8, 3),
}


@pytest.mark.parametrize("name", METHODS_AND_WRAPPERS)
def test_every_method_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    def changes() -> dict[str, Any]:
        method = METHODS_AND_WRAPPERS[name]()
        if name not in TARGET_HEADS:
            return {"method": method}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            head = TARGET_HEADS[name]()
        return {"method": method, "model": net()[:3], "mode": "transfer", "heads": soseleto.Heads(target=head)}

    for at in (2, 15):  # within and after the rivals' pre-training; the second counts from where it goes on
        with pytest.raises(Interrupted):
            fit(tmp_path / "run", at, ask(signal.SIGTERM), **changes())
    require_equal(fit(None, **changes()), fit(tmp_path / "run", **changes()))


class Fading(nn.Module):
    """Scales by a buffer that is not in the state dict and falls with every forward pass in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.scale.mul_(0.95)
        return inputs * self.scale


def test_buffers_outside_the_state_dict_go_on(tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(*net(), nn.BatchNorm1d(3), Fading())

    cut_short(tmp_path / "run", model=model(), method=Mixed())
    require_equal(fit(None, model=model(), method=Mixed()), fit(tmp_path / "run", model=model(), method=Mixed()))


# Damaged


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("saved") / "run"
    cut_short(run)
    assert steps_saved(run) == [10, 5]
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy of the saved run."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


@pytest.fixture(scope="module")
def uninterrupted() -> soseleto.Result:
    return fit(None)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from([checkpoint.TENSORS, checkpoint.STATE]), place=st.floats(0, 1), bit=st.integers(-1, 7))
def test_any_damage_is_found_and_the_checkpoint_before_is_used(
    saved: Path, tmp_path: Path, name: str, place: float, bit: int
) -> None:
    run = tmp_path / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(saved, run)
    damage(run / "checkpoint" / f"{10:012d}" / name, place, bit)
    told: list[str] = []
    found = checkpoint.load_last(run, told.append)
    assert found[0] == 5
    assert re.fullmatch(r"the checkpoint .*10 is damaged; using the previous one", told[0], re.DOTALL)
    assert steps_saved(run) == [5]


def damage(file: Path, place: float, bit: int) -> None:
    """Flip a bit, or cut the file where ``bit`` is -1."""
    content = bytearray(file.read_bytes())
    at = min(int(place * len(content)), len(content) - 1)
    if bit < 0:
        del content[at:]
    else:
        content[at] ^= 1 << bit
    file.write_bytes(content)


def test_after_damage_the_run_still_ends_the_same(run: Path, uninterrupted: Any) -> None:
    damage(run / "checkpoint" / f"{10:012d}" / checkpoint.TENSORS, 0.5, 3)
    result = fit(run)
    require_equal(uninterrupted, result)
    assert "is damaged" in result.messages[0]
    assert result.messages[1] == "resumed after step 5"


def test_no_whole_checkpoint_is_one_sentence_and_touches_nothing(run: Path) -> None:
    for step in (5, 10):
        (run / "checkpoint" / f"{step:012d}" / checkpoint.STATE).unlink()
    with pytest.raises(DataError, match=r"^none of the 2 checkpoints in .* is intact: restore one"):
        fit(run)
    assert steps_saved(run) == [10, 5]


# Refused


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 1, "epochs": 4}, "seed was 0 and is 1"),
        ({"epochs": 4}, "epochs was 3 and is 4"),
        ({"source": points(64, 9)}, "the source data changed"),
        ({"target": points(20, 9)}, "the target data changed"),
        ({"batch_size": 16}, "batch_size was 8 and is 16"),
        ({"method": Mixed()}, 'method was "soseleto" and is "mixed", settings.name was "Soseleto" and is "Mixed": '),
        ({"model": nn.Linear(4, 3)}, "parameters was 67 and is 15, the model changed"),
        ({"model": nn.Sequential(*net(), nn.Tanh())}, "the model changed"),
    ],
)
def test_what_changed_is_named(run: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match="holds an unfinished run that cannot be resumed, since") as refused:
        fit(run, **changes)
    assert said in str(refused.value)
    assert steps_saved(run) == [10, 5]


def test_a_run_without_a_checkpoint_starts_over_with_the_same_settings_only(tmp_path: Path, uninterrupted: Any) -> None:
    run = tmp_path / "run"
    cut_short(run, at=3)
    assert steps_saved(run) == []
    with pytest.raises(UsageError, match="cannot be resumed, since seed was 0 and is 1"):
        fit(run, seed=1)
    require_equal(uninterrupted, fit(run))


def test_an_ended_run_is_refused_and_resume_can_be_declined(run: Path) -> None:
    with pytest.raises(UsageError, match="holds a run already"):
        fit(run, checkpoints=Checkpoints(steps=5, resume=False))
    with RunFolder(run).held(), pytest.raises(UsageError, match="another process is training into"):
        fit(run)
    fit(run)
    with pytest.raises(UsageError, match="holds a run already"):
        fit(run)


def test_intervals_must_mean_something() -> None:
    with pytest.raises(UsageError, match="checkpoints every few steps have no effect without a run folder"):
        fit(None, checkpoints=Checkpoints(steps=3))
    with pytest.raises(UsageError, match="steps between checkpoints must be a whole number of at least 1"):
        Checkpoints(steps=0)
    with pytest.raises(UsageError, match="seconds between checkpoints must be 0 or more"):
        Checkpoints(seconds=-1.0)


class Forgetful(Mixed):
    """A method of somebody else's, whose state says nothing."""

    name = "forgetful"

    def init(self, task: Any) -> Any:
        inner = super().init(task)

        class Silent:
            def __getattr__(self, name: str) -> Any:
                if name in ("state", "load_state"):
                    raise AttributeError(name)
                return getattr(inner, name)

        return Silent()


def test_a_method_that_cannot_be_saved_says_so(tmp_path: Path) -> None:
    with pytest.raises(CannotSave, match=r"cannot be saved, since Silent has no state\(\) .*: train without out="):
        fit(tmp_path / "run", method=Forgetful())
    fit(None, method=Forgetful())


# Asked to stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path: Path, number: signal.Signals, uninterrupted: Any) -> None:
    before = signal.getsignal(number)
    run = tmp_path / "run"
    with pytest.raises(Interrupted) as stopped:
        fit(run, 11, ask(number))
    assert stopped.value.signal == number
    assert str(stopped.value) == (
        f"stopped by {number.name} after step 11 of 24, which is saved: run the same again with {run} to resume."
    )
    assert signal.getsignal(number) is before
    assert steps_saved(run) == [11, 10]
    require_equal(uninterrupted, fit(run))


def test_without_a_folder_control_c_is_what_it_was() -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(None, 3, ask(signal.SIGINT))


# Disks and clocks


def test_a_write_that_fails_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: Any
) -> None:
    cut_short(tmp_path / "run", 7)

    def fail(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(checkpoint, "sync", fail)
        with pytest.raises(DiskError, match="cannot be written"):
            fit(tmp_path / "run", 12)
    assert steps_saved(tmp_path / "run") == [5]
    assert not list((tmp_path / "run" / "checkpoint").glob(".*"))
    require_equal(uninterrupted, fit(tmp_path / "run"))
