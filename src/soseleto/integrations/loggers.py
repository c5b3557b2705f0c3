"""Loggers for ``fit(..., progress=...)``: TensorBoard, Weights & Biases and MLflow.

``fit(..., progress=TensorBoard("runs/tb"))`` logs the numbers of every epoch and closes the logger at the end.
A logger of one's own has ``log`` and ``close`` as these.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from soseleto.errors import first_line, need

logger = logging.getLogger("soseleto")


class EpochLogger:
    """A progress function that hands the numbers of every epoch to ``log``; one that fails costs no training."""

    _ended = False

    def __call__(self, event: str, record: Mapping[str, Any]) -> None:
        if self._ended:
            return
        try:
            if event == "epoch":
                self.log(record["step"], {name: float(n) for name, n in record.items() if type(n) in (int, float)})
            elif event == "close":
                self._ended = True
                self.close()
        except Exception as error:
            self._ended = True
            what = f"{type(error).__name__}: {first_line(error)}"
            logger.warning("the logger %s failed and is not used any more (%s)", type(self).__name__, what)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """The numbers of the epoch that ended with this step."""
        raise NotImplementedError

    def close(self) -> None:
        """The training has ended or failed."""


class TensorBoard(EpochLogger):
    """Event files in ``folder``; needs the package tensorboard."""

    def __init__(self, folder: str | Path) -> None:
        need("tensorboard", to="TensorBoard")
        self._writer = need("torch.utils.tensorboard", to="TensorBoard").SummaryWriter(str(folder))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(EpochLogger):
    """A run of Weights & Biases; ``settings`` are those of ``wandb.init``, such as project, name or mode."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._run = need("wandb", to="WeightsAndBiases").init(**settings)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow(EpochLogger):
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
