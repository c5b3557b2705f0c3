"""Checkpoints: killed at any moment, damaged, or asked to stop, a run goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import soseleto
from experiments.methods import METHODS, Attention, EarlyStopping, Luo, MatchingNetworks
from soseleto.data.batches import Batch
from soseleto.errors import DataError, DiskError, Interrupted, UsageError
from soseleto.methods import Mixed
from soseleto.pieces import label_doubt, pooled_by_class
from soseleto.run_folder import checkpoint
from soseleto.run_folder.folder import RunFolder
from soseleto.training.options import Checkpoints

KILLS = int(os.environ.get("SOSELETO_KILLS", "5"))
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


def optimizer(at: int = 0, then: Callable[[], None] = crash) -> Any:
    """Adam, which at its step ``at`` does ``then``."""

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        made = torch.optim.Adam(list(parameters), lr=0.01)
        taken = [0]

        def count(*_: object) -> None:
            taken[0] += 1
            if taken[0] == at:
                then()

        made.register_step_post_hook(count)
        return made

    return make


def fit(out: Path | None, at: int = 0, then: Callable[[], None] = crash, **changes: Any) -> soseleto.Result:
    """24 steps, 8 an epoch; a checkpoint every 5."""
    given: dict[str, Any] = {
        "model": net(), "source": points(64, 0), "target": points(20, 1), "epochs": 3,
        "batch_size": 8, "target_batch_size": 10, "optimizer": optimizer(at, then), "device": "cpu", "out": out,
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


DRIVER = """
import json, os, random, signal, sys, time, traceback
from pathlib import Path
import torch
from torch import nn
import soseleto
from soseleto.run_folder import checkpoint
from soseleto.training import resume

kills, folder = int(sys.argv[1]), Path(sys.argv[2])
EVERY, EPOCHS = 7, 5 + kills
torch.set_num_threads(1)
draw = random.Random(0)

def train(out, slow=0.0, die_at=0, epochs=EPOCHS):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
    x = torch.randn(400, 4)
    y = x[:, :3].argmax(1)
    after, sync, calls = resume.Keeper.after, checkpoint.sync, [0]

    def noted(self, step):
        (folder / "step").write_text(str(step))
        after(self, step)

    def hindered(path):
        calls[0] += 1
        if calls[0] == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(slow)
        sync(path)

    resume.Keeper.after, checkpoint.sync = noted, hindered
    soseleto.fit(model, (x, y), (x[:40], y[:40]), epochs=epochs, batch_size=16, device="cpu",
                 lr=0.01, out=out,
                 checkpoints=soseleto.Checkpoints(steps=None if out is None else EVERY))
    resume.Keeper.after, checkpoint.sync = after, sync

def process(*words, **more):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            train(*words, **more)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid

def alive(pid):
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

train(folder / "first", epochs=1)  # imports, once for all
begin = time.monotonic()
assert os.waitpid(process(folder / "whole"), 0)[1] == 0
print("uninterrupted", round(time.monotonic() - begin, 2), file=sys.stderr)
killed, torn, lost, done = 0, 0, [], False
while killed < kills:
    (folder / "step").write_text("0")
    pid = process(folder / "killed", slow=draw.choice([0.0, 0.01]), die_at=draw.choice([0, 0, 1, 2, 3, 4, 5, 6, 7, 8]))
    early = draw.random() < 0.2
    while not early and (folder / "step").read_text() in ("", "0") and alive(pid):
        time.sleep(0.002)
    time.sleep(draw.uniform(0.0, 0.3))
    os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status), "the run ended before it could be killed"
    killed += 1
    torn += any((folder / "killed" / "checkpoint").glob(".*.part"))
    saved = [int(path.name) for path in checkpoint.existing(folder / "killed")]
    assert len(saved) <= 3, saved  # the third for a moment, until it is let go
    reached = int((folder / "step").read_text() or 0)
    if reached:
        lost.append(reached - max(saved, default=0))
assert os.waitpid(process(folder / "killed"), 0)[1] == 0
print(json.dumps({"killed": killed, "torn": torn, "lost": lost, "every": EVERY}))
"""


@pytest.mark.long
def test_killed_at_random_moments_it_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # forked processes have no GPU
    ran = subprocess.run(
        [sys.executable, "-c", DRIVER, str(KILLS), str(tmp_path)], capture_output=True, text=True, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["killed"] == KILLS
    assert told["torn"] > 0  # some in the middle of writing
    assert max(told["lost"]) <= told["every"]
    whole, killed = RunFolder.open(tmp_path / "whole"), RunFolder.open(tmp_path / "killed")
    mine, its = whole.model_state(), killed.model_state()
    assert all(torch.equal(mine[name], its[name]) for name in mine)
    assert {name: list(column) for name, column in whole.ranking().items()} == {
        name: list(column) for name, column in killed.ranking().items()
    }
    assert told_events(whole) == told_events(killed)
    assert not (killed.path / "checkpoint").exists()


def told_events(run: RunFolder) -> list[dict[str, Any]]:
    return history([record for record in run.metrics() if record["event"] != "message"])


@pytest.mark.parametrize("at", [3, 8, 23])
def test_a_run_cut_short_goes_on_from_the_last_checkpoint(tmp_path: Path, at: int) -> None:
    cut_short(tmp_path / "run", at)
    result = fit(tmp_path / "run")
    require_equal(fit(None), result)
    assert (f"resumed after step {at - at % 5 if at % 5 else at - 5}" in result.messages) == (at > 5)


METHODS_AND_WRAPPERS: dict[str, Callable[[], Any]] = {
    **METHODS,
    "early stopping": lambda: EarlyStopping(
        method=METHODS["meta_weight_net"](), heldout=Batch(torch.arange(9), *points(9, 5)), every=4
    ),
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
    assert found is not None
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


def test_after_damage_the_run_still_ends_the_same(saved: Path, tmp_path: Path, uninterrupted: Any) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    damage(run / "checkpoint" / f"{10:012d}" / checkpoint.TENSORS, 0.5, 3)
    result = fit(run)
    require_equal(uninterrupted, result)
    assert "is damaged" in result.messages[0]
    assert result.messages[1] == "resumed after step 5"


def test_no_whole_checkpoint_is_one_sentence_and_touches_nothing(saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
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
def test_what_changed_is_named(saved: Path, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
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


def test_an_ended_run_is_refused_and_resume_can_be_declined(saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    with pytest.raises(UsageError, match="holds a run already"):
        fit(run, checkpoints=Checkpoints(steps=5, resume=False))
    fit(run)
    with pytest.raises(UsageError, match="holds a run already"):
        fit(run)


def test_two_processes_cannot_train_into_one_folder(saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    with RunFolder(run).held(), pytest.raises(UsageError, match="another process is training into"):
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
    result = fit(tmp_path / "run", method=Forgetful())
    assert [m for m in result.messages if "cannot be saved: Silent has no state()" in m]
    assert RunFolder(tmp_path / "run").metrics()[0]["event"] == "start"


# Asked to stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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


@pytest.mark.long
def test_the_command_line_stops_and_goes_on(tmp_path: Path) -> None:
    for side, n, seed in (("source", 300, 0), ("target", 40, 1)):
        inputs, labels = points(n, seed)
        rows = [[*row, f"class {label}"] for row, label in zip(inputs.tolist(), labels.tolist(), strict=True)]
        lines = ["a,b,c,d,label", *(",".join(map(str, row)) for row in rows)]
        (tmp_path / f"{side}.csv").write_text("\n".join(lines))
    words = ["fit", "--source", "source.csv", "--target", "target.csv", "--out", "run", "--label-column", "label"]
    words += ["--epochs", "40", "--batch-size", "16", "--device", "cpu", "--no-baselines", "--folds", "0"]
    for number in (signal.SIGTERM, signal.SIGINT):
        ended = stop_when_training(words, tmp_path, number)
        assert ended.returncode == 128 + number
        assert re.fullmatch(
            rf"soseleto: stopped by {number.name} after step \d+ of \d+, which is saved: "
            r"run the same again with run to resume\.",
            ended.stderr.splitlines()[-1],
        )
        assert "Traceback" not in ended.stderr
    assert steps_saved(tmp_path / "run")


def stop_when_training(words: list[str], folder: Path, number: signal.Signals) -> subprocess.CompletedProcess[str]:
    """Start the command line; the signal comes from within, at the third step of this sitting."""
    code = (
        "import signal, sys, torch; from soseleto.training import resume; from soseleto.cli.main import main\n"
        "torch.set_num_threads(1); after, calls = resume.Keeper.after, [0]\n"
        "def counted(self, step):\n"
        "    calls[0] += 1\n"
        f"    if calls[0] == 3: signal.raise_signal({int(number)})\n"
        "    after(self, step)\n"
        "resume.Keeper.after = counted\n"
        "main(sys.argv[1:])"
    )
    return subprocess.run([sys.executable, "-c", code, *words], cwd=folder, capture_output=True, text=True)


# Disks and clocks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 kB; skipped where it cannot be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_when_there_is_room(
    small_disk: Path, uninterrupted: Any
) -> None:
    run = small_disk / "run"
    cut_short(run, 7)
    free = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(free.f_bavail * free.f_bsize))
    with pytest.raises(DiskError, match=r"cannot be written \(.*No space left.*\): fix that"):
        fit(run)
    assert steps_saved(run) == [5]
    (small_disk / "filler").unlink()
    require_equal(uninterrupted, fit(run, checkpoints=Checkpoints(steps=20)))


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
