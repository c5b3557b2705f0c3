"""The arguments of ``fit``: option objects, shorthands, one set of defaults, and errors for old or unknown names."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soseleto
from soseleto import Balanced, Checkpoints, Compute, Heads, Probes, Soseleto, SoseletoClassifier
from soseleto.cli import commands
from soseleto.cli import main as command_line
from soseleto.data import Augment
from soseleto.errors import UsageError
from soseleto.methods import Ordinary
from soseleto.run_folder.folder import RunFolder
from soseleto.training import defaults
from soseleto.training.checks import kind_of
from soseleto.training.options import RENAMED, as_augments, as_losses, as_probes, as_watchers

ARGUMENTS = (
    "model", "source", "target", "mode", "recipe", "test", "epochs", "batch_size", "target_batch_size", "lr",
    "optimizer", "schedule", "loss", "method", "augment", "standardize", "heads", "probes", "compute", "checkpoints",
    "seed", "device", "out", "progress",
)  # fmt: skip


def points(n: int, seed: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs[:, :3].argmax(1)


def net(outputs: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))


def fit(**changes: Any) -> soseleto.Result:
    given: dict[str, Any] = {
        "model": net(), "source": points(60, 0), "target": points(20, 1), "epochs": 2, "device": "cpu",
    }  # fmt: skip
    return soseleto.fit(**{**given, **changes})


# Names


def test_the_signature_lists_the_arguments_and_nothing_else() -> None:
    assert tuple(inspect.signature(soseleto.fit).parameters) == ARGUMENTS
    assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in inspect.signature(soseleto.fit).parameters.values())


@pytest.mark.parametrize("name", RENAMED)
def test_an_old_name_is_answered_with_the_new_one(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        fit(**{name: 5})
    assert str(caught.value) == f"fit has no argument {name!r}: write {RENAMED[name].format(5)}."


def test_every_new_name_exists() -> None:
    """What the table tells to write can be written."""
    values = {
        "weight_decay": 1e-3, "weight_step": 0.2, "engine": "loop", "source_head": None, "target_head": None,
        "labels_before": None, "suspect_precision": 0.9, "precision": torch.bfloat16, "micro_batch_size": 4,
        "cuda_graph": False, "non_finite": "skip", "reducer": None, "checkpoint_every": 5, "checkpoint_steps": 7,
        "resume": False, "notes": None, "augment_source": None, "augment_target": None, "loggers": False,
    }  # fmt: skip
    assert set(RENAMED) - set(values) == {"target_loss", "balanced_target"}
    names = {name: getattr(soseleto, name) for name in soseleto.__all__}
    for old, value in values.items():
        written = RENAMED[old].format(repr(value))
        argument, _, expression = written.partition("=")
        assert argument in ARGUMENTS
        eval(expression, {**names, "soseleto": soseleto, "torch": torch, "lr": 0.1})


def test_plain_values_are_repeated_and_others_are_not() -> None:
    with pytest.raises(UsageError, match=r"write compute=Compute\(dtype=torch.bfloat16\)\."):
        fit(precision=torch.bfloat16)
    with pytest.raises(UsageError, match=r"write heads=Heads\(target=\.\.\.\)\."):
        fit(target_head=nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"write method=Soseleto\(engine='loop'\)\."):
        fit(engine="loop")


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(
        UsageError, match=r"has no argument 'epoch' \(did you mean 'epochs'\?\): see help\(soseleto.fit"
    ):
        fit(epoch=3)


# Defaults


def default(function: Any, name: str) -> Any:
    return inspect.signature(function).parameters[name].default


@pytest.mark.parametrize("name", ["epochs", "batch_size", "target_batch_size", "lr", "mode", "device"])
def test_fit_command_line_and_estimator_have_the_same_defaults(name: str) -> None:
    of_fit = default(soseleto.fit, name)
    assert default(commands.fit, name) == of_fit
    assert default(SoseletoClassifier, name) == of_fit


def test_defaults_of_options_are_the_same_everywhere() -> None:
    assert default(commands.fit, "weight_step") is default(SoseletoClassifier, "weight_step") is None  # by the data
    assert default(Soseleto, "weight_step") == defaults.WEIGHT_STEP == 0.1
    assert default(commands.fit, "weight_decay") is default(SoseletoClassifier, "weight_decay") is None  # by the recipe
    assert default(commands.fit, "suspect_precision") == Probes().precision
    assert default(commands.fit, "checkpoint_every") == Checkpoints().seconds
    assert default(commands.fit, "non_finite") == Compute().non_finite
    assert default(commands.fit, "seed") == default(soseleto.fit, "seed")


def test_batch_sizes_follow_the_size_of_the_source_without_its_probes() -> None:
    result = fit(source=points(1200, 0), target=points(120, 1), probes="auto", epochs=1)
    assert result.config["batch_size"] == defaults.batch_size_for(1200) == 32
    assert result.config["target_batch_size"] == 32
    small = fit(target=points(9, 1), epochs=1)
    assert (small.config["batch_size"], small.config["target_batch_size"]) == (16, 9)
    assert small.config["lr"] == defaults.LR


# Shorthands


def test_probes_losses_and_augments_in_every_form() -> None:
    assert as_probes("auto") == Probes()
    assert as_probes(0.3) == Probes(share=0.3)
    assert as_probes(None) == as_probes(0) == Probes(share=0.0)
    with pytest.raises(UsageError, match=r"got 95: for 95 % write 0\.95"):
        Probes(precision=95)
    with pytest.raises(UsageError, match="labels_before has no effect without probes"):
        Probes(share=0, labels_before=[1])
    one, other = soseleto.cross_entropy, soseleto.squared_error
    assert as_losses(one, "noisy") == (one, None)
    assert as_losses((one, other), "transfer") == (one, other)
    flip = Augment(flip=True)
    assert as_augments(flip) == (flip, flip)
    assert as_augments((None, flip)) == (None, flip)
    assert as_augments(None) == (None, None)


def test_a_dtype_that_is_no_autocast_is_refused() -> None:
    with pytest.raises(UsageError, match=r"dtype must be torch.bfloat16, torch.float16 or None .* got torch.float32"):
        Compute(dtype=torch.float32)


class Kept:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.closed = 0

    def log(self, step: int, numbers: Any) -> None:
        self.steps.append(step)

    def close(self) -> None:
        self.closed += 1


def test_progress_takes_functions_and_loggers_together() -> None:
    events: list[str] = []
    kept = Kept()
    fit(progress=[lambda event, record: events.append(event), kept, lambda event, record: events.append(event)])
    assert events.count("start") == 2
    assert kept.steps == [4, 8]
    assert kept.closed == 1
    assert as_watchers(False) == as_watchers([]) == ([], [])
    (live,), loggers = as_watchers(True)
    assert type(live).__name__ == "LiveLine"
    assert loggers == []


def test_pairs_of_losses_heads_and_balanced_batches_reach_the_training(tmp_path: Path) -> None:
    head = nn.Linear(8, 3)
    trunk = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    result = fit(
        model=trunk, mode="transfer", heads=Heads(target=head), loss=(soseleto.cross_entropy, smoothed),
        target_batch_size=Balanced(9), optimizer=soseleto.sgd(0.05, 1e-3), out=tmp_path / "run",
        checkpoints=Checkpoints(seconds=None, notes={"project": "x"}),
    )  # fmt: skip
    assert result.model.target_head is head
    config = RunFolder(tmp_path / "run").config()
    named = (
        "loss",
        "target_loss",
        "target_batch_size",
        "balanced_target",
        "lr",
        "weight_decay",
        "optimizer",
        "project",
    )
    assert [config[name] for name in named] == [
        "cross_entropy", "smoothed", 9, True, 0.05, 1e-3, "SGD, momentum 0.9", "x",
    ]  # fmt: skip


# Methods without weights


# Classification is a matter of labels and outputs, not of the loss


def smoothed(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, labels, reduction="none", label_smoothing=0.1)


def test_a_loss_of_ones_own_still_makes_a_classifier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes = {"model": f"{tmp_path}/mine.py:make", "n_classes": 3, "columns": list("abcd")}
    out, test = tmp_path / "run", points(50, 3)
    result = fit(loss=smoothed, epochs=20, lr=0.1, test=test, out=out, checkpoints=Checkpoints(notes=notes))
    assert result.task == "classification"
    assert result.predict(test[0]).shape == (50,)
    assert result.evaluate(test)["accuracy"] == result.history[-1]["test_accuracy"] > 60
    assert RunFolder(out).config()["task"] == "classification"

    loaded = soseleto.load(out, net(), device="cpu")
    assert torch.equal(loaded.predict(test[0]), result.predict(test[0]))
    assert loaded.predict_proba(test[0]).shape == (50, 3)
    with pytest.raises(UsageError, match=r"trained with the loss 'smoothed', which evaluate needs"):
        loaded.evaluate(test)
    assert soseleto.load(out, net(), loss=smoothed, device="cpu").evaluate(test) == result.evaluate(test)

    (tmp_path / "mine.py").write_text(
        "from torch import nn\ndef make(classes, shape):\n"
        "    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, classes))\n"
    )
    rows = [",".join(map(str, row)) for row in test[0].tolist()]
    (tmp_path / "new.csv").write_text("\n".join(["a,b,c,d", *rows]))
    with pytest.raises(SystemExit) as left:
        command_line.main(["predict", str(out), str(tmp_path / "new.csv"), "--model", notes["model"]])
    assert left.value.code == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split(",")[1] for line in lines] == [str(label) for label in result.predict(test[0]).tolist()]
    sys.modules.pop("mine", None)


def test_what_is_a_classification() -> None:
    labels = torch.tensor([0, 2, 1])
    assert kind_of(torch.zeros(1, 3), [labels]) == "classification"
    assert kind_of(torch.zeros(1, 2), [labels]) == "regression"  # 2 is no index of two outputs
    assert kind_of(torch.zeros(1, 1), [torch.tensor([0, 1])]) == "regression"  # one logit, or one number
    assert kind_of(torch.zeros(1, 3), [labels.float()]) == "regression"
    assert kind_of(torch.zeros(1, 5, 3), [labels]) == "regression"
    assert kind_of(torch.zeros(1, 3), [labels, labels[:, None]]) == "regression"
    counts = fit(model=net(1), source=counted(60, 0), target=counted(20, 1), loss=soseleto.squared_error, epochs=1)
    assert counts.task == "regression"
    assert counts.predict(points(5, 2)[0]).shape == (5, 1)
    assert set(counts.evaluate(counted(9, 2))) == {"loss"}


def test_a_regression_has_no_suspects() -> None:
    result = fit(model=net(1), source=counted(60, 0), target=counted(20, 1), loss=soseleto.squared_error, epochs=1)
    with pytest.raises(UsageError, match="a regression has no classes, so there are no suspects"):
        result.suspects()


def counted(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Whole numbers that are no classes."""
    inputs, _ = points(n, seed)
    return inputs, (3 * inputs[:, 0].abs()).long()


# Top level


def test_every_exported_name_is_there() -> None:
    for name in soseleto.__all__:
        assert getattr(soseleto, name) is not None
    assert set(soseleto.__all__) <= set(dir(soseleto))
    for name in ("data", "pieces", "methods", "models"):
        assert inspect.ismodule(getattr(soseleto, name))
    with pytest.raises(AttributeError, match="has no attribute 'fitt'"):
        _ = soseleto.fitt


def test_import_does_not_load_torch() -> None:
    code = "import sys, soseleto, soseleto.training.defaults; dir(soseleto); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_micro_batch_is_a_whole_number_of_examples() -> None:
    with pytest.raises(soseleto.UsageError, match=r"micro_batch_size must be a whole number, got 2\.5"):
        soseleto.Compute(micro_batch_size=2.5)  # type: ignore[arg-type]


def test_a_method_without_weights_says_so() -> None:
    result = fit(method=Ordinary())
    for ask in (lambda: result.weights, lambda: result.scores, result.ranking):
        with pytest.raises(UsageError, match="the method 'ordinary' learns no weights") as caught:
            ask()
        assert "\n" not in str(caught.value)
