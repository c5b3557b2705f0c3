"""What would fail after a training fails before its first step, in one sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import soseleto
from soseleto.errors import SoseletoError, UsageError
from soseleto.integrations.loggers import EpochLogger
from soseleto.run_folder.folder import RunFolder

X = torch.randn(80, 1, 6, 6, generator=torch.Generator().manual_seed(0))
Y = (X.mean((1, 2, 3)) > 0).long()


def flat() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 2))


def fit(model: nn.Module, **more: Any) -> soseleto.Result:
    return soseleto.fit(model, (X, Y), (X[:40] + 0.1, Y[:40]), epochs=1, device="cpu", **more)


class Answer(NamedTuple):
    scores: Tensor


class Returns(nn.Module):
    """A model whose output is made by ``wrap``, in training mode as well."""

    def __init__(self, wrap: Callable[[Tensor], Any], *, only_evaluation: bool = False) -> None:
        super().__init__()
        self.body, self.wrap, self.only_evaluation = flat(), wrap, only_evaluation

    def forward(self, inputs: Tensor) -> Any:
        outputs = self.body(inputs)
        return outputs if self.only_evaluation and self.training else self.wrap(outputs)


def of_logits(outputs: Any, labels: Tensor) -> Tensor:
    tensor = outputs if isinstance(outputs, Tensor) else outputs[0]
    return soseleto.cross_entropy(tensor, labels)


def fails(outputs: Tensor) -> Tensor:
    raise ValueError("no evaluation\nhere")


class Extra(nn.Sequential):
    """A module whose state is not all tensors."""

    def get_extra_state(self) -> dict[str, str]:
        return {"note": "text"}

    def set_extra_state(self, state: Any) -> None:
        pass


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "an object without logits": (lambda: Returns(Answer), r"the model returns a Answer, and prediction needs a tensor"),
    "eval fails": (lambda: Returns(fails, only_evaluation=True), r"ValueError: no evaluation"),
    "one row": (lambda: Returns(lambda o: o[:1], only_evaluation=True), r"returns shape \(1, 2\) for 2 examples"),
    "extra state": (lambda: Extra(nn.Flatten(), nn.Linear(36, 2)), "the model's state '_extra_state' is not a tensor"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_fails_afterwards_fails_before_the_first_step(kind: str, tmp_path: Path) -> None:
    make, sentence = MODELS[kind]
    steps: list[str] = []
    with pytest.raises(SoseletoError, match=sentence) as raised:
        fit(make(), loss=of_logits, out=tmp_path / "run", progress=lambda event, record: steps.append(event))
    assert "\n" not in str(raised.value)
    assert not steps
    fit(flat(), out=tmp_path / "run")  # the folder is not spoiled


def test_without_a_folder_nothing_is_asked_of_the_model_that_is_not_used() -> None:
    assert len(fit(Returns(Answer), loss=of_logits).weights) == 80
    with pytest.raises(UsageError, match="the model returns a Answer"):
        fit(Returns(Answer), loss=of_logits, probes="auto")


@pytest.mark.parametrize("package", ["PIL.Image", "pyarrow.parquet", "safetensors.torch"])
def test_a_missing_package_is_named_before_the_first_step(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    steps: list[str] = []
    with pytest.raises(SoseletoError, match=r"which is not installed: type pip install"):
        fit(flat(), out=tmp_path / "run", progress=lambda event, record: steps.append(event))
    assert not steps


# Loggers and progress functions


class Logger(EpochLogger):
    """Fails at the given moments."""

    def __init__(self, *, log: int | None = None, close: bool = False) -> None:
        self.fail_at, self.fail_close, self.calls = log, close, 0

    def log(self, step: int, numbers: Any) -> None:
        self.calls += 1
        if self.calls == self.fail_at:
            raise ConnectionError("the server is gone")

    def close(self) -> None:
        if self.fail_close:
            raise ConnectionError("the server is gone")


@pytest.mark.parametrize("logger", [Logger(log=1), Logger(close=True)], ids=["log", "close"])
def test_a_logger_that_fails_costs_no_training(
    logger: Logger, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Logger()
    model, sets = flat(), ((X, Y), (X[:40] + 0.1, Y[:40]))
    soseleto.fit(model, *sets, epochs=3, out=tmp_path / "run", progress=[logger, other])
    said = "the logger Logger failed and is not used any more (ConnectionError: the server is gone)"
    assert caplog.messages.count(said) == 1
    assert other.calls == 3
    assert logger.calls == (1 if logger.fail_at else 3)
    assert RunFolder.open(tmp_path / "run").has_ended()


def test_a_progress_function_that_fails_at_the_end_costs_no_training(tmp_path: Path) -> None:
    def progress(event: str, record: dict[str, Any]) -> None:
        if event == "end":
            raise RuntimeError("late")

    assert fit(flat(), out=tmp_path / "run", progress=progress)
    assert not (tmp_path / "run" / "checkpoint").exists()

    def stops(event: str, record: dict[str, Any]) -> None:
        if event == "epoch":
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        fit(flat(), progress=stops)
