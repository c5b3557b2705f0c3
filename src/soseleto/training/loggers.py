"""Where a run's numbers go beside its folder: one small protocol, and adapters for those who keep such things.

``fit(..., loggers=[TensorBoard("runs/tb")])`` hands every epoch's numbers to each logger and closes it at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from soseleto.errors import UsageError


class Logger(Protocol):
    """Anything with these two calls."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """The numbers after so many steps of the training."""
        ...

    def close(self) -> None:
        """No more will come, whether the training has ended or failed."""
        ...


class TensorBoard:
    """Event files in ``folder``; needs the package tensorboard."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("TensorBoard", "tensorboard") from error
        self._writer = SummaryWriter(str(folder))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases; ``settings`` are those of ``wandb.init``, such as project, name or mode."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("WeightsAndBiases", "wandb") from error
        self._run = wandb.init(**settings)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of an MLflow experiment, at ``tracking_uri`` or where MLflow is configured to keep it."""

    def __init__(self, experiment: str, tracking_uri: str | None = None) -> None:
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise _missing("MLflow", "mlflow") from error
        self._client = MlflowClient(tracking_uri)
        known = self._client.get_experiment_by_name(experiment)
        place = self._client.create_experiment(experiment) if known is None else known.experiment_id
        self._run: str = self._client.create_run(place).info.run_id

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._client.log_metric(self._run, name, number, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run)


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The plain numbers of an epoch's record."""
    return {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _missing(name: str, package: str) -> UsageError:
    return UsageError(f"{name} needs the package {package}: type pip install {package}.")
