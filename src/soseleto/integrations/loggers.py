"""Loggers for ``fit(..., progress=...)``: TensorBoard, Weights & Biases and MLflow.

``fit(..., progress=TensorBoard("runs/tb"))`` logs the numbers of every epoch and closes the logger at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from soseleto.errors import need


class TensorBoard:
    """Event files in ``folder``; needs the package tensorboard."""

    def __init__(self, folder: str | Path) -> None:
        need("tensorboard", to="TensorBoard")
        self._writer = need("torch.utils.tensorboard", to="TensorBoard").SummaryWriter(str(folder))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases; ``settings`` are those of ``wandb.init``, such as project, name or mode."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._run = need("wandb", to="WeightsAndBiases").init(**settings)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of an MLflow experiment, at ``tracking_uri`` or where MLflow is configured to store it."""

    def __init__(self, experiment: str, tracking_uri: str | None = None) -> None:
        self._client = need("mlflow", to="MLflow").MlflowClient(tracking_uri)
        known = self._client.get_experiment_by_name(experiment)
        place = self._client.create_experiment(experiment) if known is None else known.experiment_id
        self._run: str = self._client.create_run(place).info.run_id

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._client.log_metric(self._run, name, number, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run)
