"""Loggers for ``fit(..., progress=...)``: TensorBoard, and the base of loggers of one's own.

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
