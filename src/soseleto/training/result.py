"""The result of a training: the model, a weight and a score per source example, and the history."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from soseleto.data import Examples, ExampleSet, TablePreparation
from soseleto.data.examples import truth_known
from soseleto.defaults import Settings
from soseleto.errors import UsageError, counted
from soseleto.models.trunk_and_heads import TrunkAndHeads
from soseleto.prediction import Predictor
from soseleto.run_folder.folder import REPORT, RunFolder, require_writable
from soseleto.run_folder.ranking import MOST_TABLE_COLUMNS, Table
from soseleto.weights import Weights

if TYPE_CHECKING:
    from soseleto.suspects.suspects import Evidence, Suspects

MOST_FEATURE_COLUMNS = 16


@dataclass(frozen=True, kw_only=True, repr=False)
class Result(Predictor):
    """A finished training: a predictor with the learned weights and the records of the run.

    history: one record per epoch
    messages: the log messages of the run, such as which engine it used
    learned: the weights, None for a method without
    settings: the complete settings that the training ran with
    missing: the source's classes without target examples, which nothing is known about
    """

    source: ExampleSet
    history: list[dict[str, Any]]
    messages: list[str]
    learned: Weights | None
    out: Path | None = None
    engine: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    settings: Settings | None = None
    evidence: Evidence | None = None  # where the labels were judged
    missing: tuple[int, ...] = ()
    suspect_precision: float = 0.9

    def __repr__(self) -> str:
        model, epochs = type(self.model).__name__, counted(len(self.history), "epoch")
        return f"<Result: {model} after {epochs} on {len(self.source):,} source examples>"

    @property
    def weights(self) -> Tensor:
        """One float32 weight per source example, in the source's order."""
        return self._weights.values.cpu()

    @property
    def scores(self) -> Tensor:
        """One float32 score per source example: the running mean of its alignments, never clipped."""
        return self._weights.scores.cpu()

    @property
    def _weights(self) -> Weights:
        if self.learned is None:
            raise UsageError(
                f"the method {self.config.get('method', '')!r} learns no weights, so there are no scores and no "
                "ranking either: train with method=soseleto.Soseleto()."
            )
        return self.learned

    def suspects(self, precision: float | None = None) -> Suspects:
        """The source examples that are probably mislabelled, as many as ``precision`` allows.

        precision: the share of them that should really be mislabelled; by default that of ``Probes``, 0.9

        Every source example gets a probability, except where the target has no example of its label or of the class
        that it looks like; ``.at(threshold)`` gives precision and recall at any threshold.
        """
        return self._judged.for_precision(self.suspect_precision if precision is None else precision)

    @cached_property
    def _judged(self) -> Evidence:
        if self.config.get("mode") == "transfer":
            raise UsageError(
                "in transfer mode weights are about the target and not about wrong labels, so there are no suspects: "
                "use result.weights or result.ranking()."
            )
        if self.evidence is None and self.task == "regression":
            raise UsageError("a regression has no classes, so there are no suspects: use result.ranking().")
        if self.evidence is None and self.config.get("probes"):
            raise UsageError(
                "the target has too few of the source's classes to say which labels are wrong: give it examples of "
                "more classes, or use result.ranking()."
            )
        if self.evidence is None:
            raise UsageError("this run had no probes, which suspects need: call fit(..., probes='auto').")
        return self.evidence

    def ranking(self) -> Table:
        """Every source example, best first: id, label, weight, score, visits, and the truth where it is known.

        For a classifier also ``predicted_label``, for a table its values, and with probes ``mislabelled_probability``,
        ``is_label_issue`` and ``suggested_label``. Where the target lacks classes, ``is_unknown`` has the examples that
        are labelled as one, or with probes look like one.
        """
        learned, source, table = self._weights, self.source, self.preparation
        suspects = None if self.evidence is None else self.suspects()
        order = learned.order().cpu()
        at = order.numpy()
        columns: dict[str, np.ndarray] = {
            "id": np.array([source.id_of(i) for i in at.tolist()], dtype=object),
            "label": _labels(source, source.labels.cpu())[at],
            "weight": learned.values.cpu().numpy()[at],
            "score": learned.scores.cpu().numpy()[at],
            "visits": learned.visits.cpu().numpy()[at],
        }
        if self._predicted is not None:
            columns["predicted_label"] = _labels(source, self._predicted)[at]
        if suspects is not None:
            columns["mislabelled_probability"] = suspects.probability.numpy()[at]
            columns["is_label_issue"] = suspects.is_suspect.numpy()[at]
            columns["suggested_label"] = _labels(source, suspects.suggested)[at]
        if self.missing:
            without = torch.isin(source.labels.cpu(), torch.tensor(self.missing))
            columns["is_unknown"] = (without if suspects is None else suspects.probability.isnan()).numpy()[at]
        if source.paths is not None:
            columns["path"] = np.array(source.paths, dtype=object)[at]
        if source.truth is not None:
            truth = source.truth.cpu()
            columns["true_label"] = _labels(source, truth)[at]
            columns["wrong"] = ((truth != source.labels.cpu()) & truth_known(truth)).numpy()[at]
        if isinstance(table, TablePreparation) and isinstance(source, Examples):
            values = list(table.values_of(source.inputs[order]).values())[:MOST_TABLE_COLUMNS]
            columns |= {f"x{place}": value for place, value in enumerate(values)}
        elif (features := _features(source)) is not None:
            columns |= {f"x{i}": features[at, i] for i in range(features.shape[1])}
        return Table(columns)

    @cached_property
    def _predicted(self) -> Tensor | None:
        """The trained classifier's label of every source example, (n,)."""
        if self.evidence is not None:
            return self.evidence.predicted
        sample = self.source.sample_labels()
        if sample.is_floating_point() or sample.ndim != 1:
            return None
        model = self.model
        if isinstance(model, TrunkAndHeads):  # the source's own classes
            model = TrunkAndHeads(model.trunk, model.source_head, model.source_head)
        outputs = self.outputs_of(self.source, model)
        return outputs.argmax(1) if outputs.ndim == 2 and outputs.shape[1] > int(self.source.labels.max()) else None

    def report(self, path: str | Path = "report.html", *, force: bool = False) -> Path:
        """Write the run's report as one HTML file; needs a run folder, ``fit(..., out=...)``.

        force: replace an existing file, but never the data or a file of a run other than the report in its own folder
        """
        if self.out is None:
            raise UsageError("this run has no folder to report on: call fit(..., out='runs/name') and then report().")
        from soseleto.report import write_report

        if os.path.realpath(path) != os.path.realpath(self.out / REPORT):
            require_writable(Path(path), run=RunFolder(self.out), force=force)
        return write_report(self.out, path)


def _features(source: ExampleSet) -> np.ndarray | None:
    """The columns of a small table in memory."""
    inputs = source.inputs if isinstance(source, Examples) else None
    if not isinstance(inputs, Tensor) or inputs.ndim != 2 or not inputs.is_floating_point():
        return None
    return inputs.cpu().numpy() if inputs.shape[1] <= MOST_FEATURE_COLUMNS else None


def _labels(source: ExampleSet, labels: Tensor) -> np.ndarray:
    if source.classes is None or labels.is_floating_point() or labels.ndim > 1:
        values = labels.numpy()
        return values if values.ndim == 1 else np.array([str(v.tolist()) for v in values], dtype=object)
    unnamed = range(len(source.classes), int(labels.max()) + 1)  # outputs that a loss of the user's may have
    return np.array([*source.classes, *map(str, unnamed), ""], dtype=object)[labels.numpy()]  # -1 is the last, blank
