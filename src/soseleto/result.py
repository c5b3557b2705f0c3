"""What a training gives back: the model, a weight and a score per source example, and the history."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from soseleto.batch import Loss, cross_entropy
from soseleto.data import Examples
from soseleto.errors import UsageError
from soseleto.weights import Weights

EVALUATION_BATCH = 1000
MOST_FEATURE_COLUMNS = 16


class Table(Mapping[str, np.ndarray]):
    """Columns of equal length by name; ``to_pandas`` and ``to_arrow`` hand them on."""

    def __init__(self, columns: Mapping[str, np.ndarray]) -> None:
        self._columns = dict(columns)

    def __getitem__(self, column: str) -> np.ndarray:
        return self._columns[column]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        """The number of columns, as of any mapping; ``rows`` is the number of rows."""
        return len(self._columns)

    @property
    def rows(self) -> int:
        return len(next(iter(self._columns.values())))

    def head(self, n: int = 10) -> Table:
        return Table({name: column[:n] for name, column in self._columns.items()})

    def tail(self, n: int = 10) -> Table:
        return Table({name: column[-n:] for name, column in self._columns.items()})

    def to_pandas(self) -> Any:
        import pandas

        return pandas.DataFrame(self._columns)

    def to_arrow(self) -> Any:
        import pyarrow

        return pyarrow.table(self._columns)

    def __repr__(self) -> str:
        shown = min(10, self.rows)
        lines = ["  ".join(f"{name:>12}" for name in self)]
        for row in range(shown):
            lines.append("  ".join(f"{_cell(column[row]):>12}" for column in self._columns.values()))
        return "\n".join(lines) + (f"\n... {self.rows} rows" if self.rows > shown else "")


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (float, np.floating)) else str(value)


@dataclass(frozen=True)
class Result:
    """One finished training.

    model: the trained model (in transfer mode trunk and heads; called, it answers for the target)
    history: one record per epoch
    messages: what the run had to say, such as which engine it used
    """

    model: nn.Module
    source: Examples
    history: list[dict[str, Any]]
    messages: list[str]
    prepare: Callable[[Tensor], Tensor]
    device: torch.device
    learned: Weights
    loss: Loss = cross_entropy
    classes: tuple[str, ...] | None = None
    out: Path | None = None
    engine: str = ""
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def weights(self) -> Tensor:
        """One float32 weight per source example, in the source's order."""
        return self.learned.values.cpu()

    @property
    def scores(self) -> Tensor:
        """One float32 score per source example: the running mean of its alignments, never clipped."""
        return self.learned.scores.cpu()

    def outputs(self, inputs: Tensor | np.ndarray) -> Tensor:
        """The model's raw outputs for inputs as they came (uint8 images, features), on the CPU."""
        given = torch.as_tensor(inputs)
        was = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                pieces = [
                    self.model(self.prepare(piece.to(self.device))).cpu() for piece in given.split(EVALUATION_BATCH)
                ]
        finally:
            self.model.train(was)
        return torch.cat(pieces)

    def predict(self, inputs: Tensor | np.ndarray) -> Tensor:
        """Class indices, or the outputs themselves where the loss is not a classification's."""
        outputs = self.outputs(inputs)
        return outputs.argmax(1) if self.loss is cross_entropy else outputs

    def evaluate(self, dataset: Any) -> dict[str, float]:
        """Mean loss, and for classification the accuracy in percent."""
        from soseleto.data import as_examples

        examples = as_examples(dataset, name="test")
        outputs = self.outputs(examples.inputs)
        labels = examples.labels.cpu()
        numbers = {"loss": float(self.loss(outputs, labels).double().mean())}
        if self.loss is cross_entropy:
            numbers["accuracy"] = 100.0 * float((outputs.argmax(1) == labels).double().mean())
        return numbers

    def ranking(self) -> Table:
        """Every source example, best first: id, label, weight, score, visits, and the truth where it is known."""
        return ranking_table(self.source, self.learned)

    def report(self, path: str | Path = "report.html") -> Path:
        """Write the run's report as one HTML file; the run must have been given a folder with out=..."""
        if self.out is None:
            raise UsageError("this run kept no folder to report on: call fit(..., out='runs/name') and then report().")
        from soseleto.report import write_report

        return write_report(self.out, path)


def ranking_table(source: Examples, learned: Weights) -> Table:
    order = learned.order().cpu()
    at = order.numpy()
    ids = np.array([source.id_of(i) for i in range(len(source))], dtype=object)
    columns: dict[str, np.ndarray] = {"id": ids[at]}
    columns["label"] = _labels(source, source.labels.cpu())[at]
    columns["weight"] = learned.values.cpu().numpy()[at]
    columns["score"] = learned.scores.cpu().numpy()[at]
    columns["visits"] = learned.visits.cpu().numpy()[at]
    if source.paths is not None:
        columns["path"] = np.array(source.paths, dtype=object)[at]
    if source.truth is not None:
        truth = source.truth.cpu()
        columns["true_label"] = _labels(source, truth)[at]
        columns["wrong"] = (truth != source.labels.cpu()).numpy()[at]
    if source.inputs.ndim == 2 and source.inputs.is_floating_point() and source.inputs.shape[1] <= MOST_FEATURE_COLUMNS:
        features = source.inputs.cpu().numpy()
        columns |= {f"x{i}": features[at, i] for i in range(features.shape[1])}
    return Table(columns)


def _labels(source: Examples, labels: Tensor) -> np.ndarray:
    if source.classes is None or labels.is_floating_point() or labels.ndim > 1:
        values = labels.numpy()
        return values if values.ndim == 1 else np.array([str(v.tolist()) for v in values], dtype=object)
    return np.array(source.classes, dtype=object)[labels.numpy()]
