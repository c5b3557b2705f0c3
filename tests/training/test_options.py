"""The arguments of ``fit``: option objects and shorthands; what is a classification; the names of the package."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soseleto
from soseleto import Balanced, Checkpoints, Heads, Probes
from soseleto.errors import UsageError
from soseleto.methods import Ordinary
from soseleto.run_folder.folder import RunFolder
from soseleto.task.optimizers import sgd
from soseleto.training.options import as_losses, as_probes
from soseleto.training.progress import functions_of
from training.test_checkpoint import points


def net(outputs: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))


def fit(**changes: Any) -> soseleto.Result:
    given: dict[str, Any] = {
        "model": net(), "source": points(60, 0), "target": points(20, 1), "epochs": 2, "device": "cpu",
    }  # fmt: skip
    return soseleto.fit(**{**given, **changes})


# Defaults


def test_batch_sizes_follow_the_size_of_the_source_without_its_probes() -> None:
    result = fit(source=points(1200, 0), target=points(120, 1), probes="auto", epochs=1)
    assert (result.config["batch_size"], result.config["target_batch_size"]) == (32, 32)
    small = fit(target=points(9, 1), epochs=1)
    assert (small.config["batch_size"], small.config["target_batch_size"]) == (16, 9)


# Shorthands


def test_shorthands_in_every_form() -> None:
    assert as_probes("auto") == Probes()
    assert as_probes(0.3) == Probes(share=0.3)
    assert (as_probes(None), as_probes(0)) == (Probes(share=None), Probes(share=0))
    with pytest.raises(UsageError, match=r"got 95: for 95 % write 0\.95"):
        Probes(precision=95)
    with pytest.raises(UsageError, match="labels_before has no effect without probes"):
        fit(probes=Probes(share=0, labels_before=[1]))
    of_source, of_target = soseleto.cross_entropy, soseleto.squared_error
    assert as_losses(of_source, "noisy") == (of_source, of_source)
    assert as_losses((of_source, of_target), "transfer") == (of_source, of_target)
    assert functions_of(False) == functions_of([]) == []
    (live,) = functions_of(True)
    assert type(live).__name__ == "LiveLine"


def test_pairs_of_losses_heads_and_balanced_batches_reach_the_training(tmp_path: Path) -> None:
    head = nn.Linear(8, 3)
    trunk = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    result = fit(
        model=trunk, mode="transfer", heads=Heads(target=head), loss=(soseleto.cross_entropy, smoothed),
        target_batch_size=Balanced(9), optimizer=partial(sgd, lr=0.05, weight_decay=1e-3), out=tmp_path / "run",
        checkpoints=Checkpoints(seconds=None, notes={"project": "x"}),
    )  # fmt: skip
    assert result.model.target_head is head
    config = RunFolder(tmp_path / "run").config()
    named = {"loss": "cross_entropy", "target_loss": "smoothed", "target_batch_size": 9, "balanced_target": True}
    named |= {"lr": 0.05, "weight_decay": 1e-3, "optimizer": "sgd", "project": "x"}
    assert {name: config[name] for name in named} == named


# Classification is a matter of labels and outputs, not of the loss


def smoothed(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, labels, reduction="none", label_smoothing=0.1)


def test_what_is_a_classification() -> None:
    def of(outputs: int, labels: Tensor) -> str:
        def loss(given: Tensor, wanted: Tensor) -> Tensor:
            return given.sum(1) * 0.0

        data = points(3, 0)[0], labels
        return fit(model=net(outputs), source=data, target=data, loss=loss, epochs=1).task

    labels = torch.tensor([0, 2, 1])
    assert of(3, labels) == "classification"
    assert of(2, labels) == "regression"  # 2 is no index of two outputs
    assert of(1, torch.tensor([0, 1, 1])) == "regression"  # one logit, or one number
    assert of(3, labels.float()) == "regression"
    counts = fit(model=net(1), source=counted(60, 0), target=counted(20, 1), loss=soseleto.squared_error, epochs=1)
    assert counts.task == "regression"
    assert counts.predict(points(5, 2)[0]).shape == (5, 1)
    assert set(counts.evaluate(counted(9, 2))) == {"loss"}
    with pytest.raises(UsageError, match="a regression has no classes, so there are no suspects"):
        counts.suspects()


def counted(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Whole numbers that are no classes."""
    inputs, _ = points(n, seed)
    return inputs, (3 * inputs[:, 0].abs()).long()


# Top level


def test_every_exported_name_is_there() -> None:
    for name in soseleto.__all__:
        assert getattr(soseleto, name) is not None
    assert set(soseleto.__all__) <= set(dir(soseleto))
    assert len(soseleto.__all__) <= 38
    for name in ("data", "defaults", "pieces", "methods", "models", "schedules"):
        assert inspect.ismodule(getattr(soseleto, name))
    with pytest.raises(AttributeError, match="has no attribute 'fitt'"):
        _ = soseleto.fitt


def test_a_method_without_weights_says_so() -> None:
    result = fit(method=Ordinary())
    for ask in (lambda: result.weights, lambda: result.scores, result.ranking):
        with pytest.raises(UsageError, match="the method 'ordinary' learns no weights") as caught:
            ask()
        assert "\n" not in str(caught.value)
