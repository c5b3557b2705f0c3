"""A trained model with its preprocessing, class names and temperature: raw inputs in, predictions out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import tee
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from soseleto.data import ExampleSet, as_example_set, structure
from soseleto.data.arrays import inputs_of
from soseleto.data.examples import in_order
from soseleto.data.feeding import Prepare
from soseleto.data.preparation import Preparation, TablePreparation, prepared
from soseleto.data.structure import Inputs
from soseleto.data.tables import frame_table, is_frame
from soseleto.data.text import TextExamples, TextPreparation
from soseleto.errors import DataError, UsageError
from soseleto.models.trunk_and_heads import evaluation_mode
from soseleto.task.losses import Loss, cross_entropy

TaskKind = Literal["classification", "regression"]
_LOWEST, _HIGHEST = 0.05, 20.0  # temperatures


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """Predicts from raw inputs.

    model: the trained model (in transfer mode trunk and heads; its forward pass is the target's)
    task: ``"classification"`` where labels are class indices and outputs (B, classes), whatever the loss
    temperature: outputs are divided by it before the softmax; 1 without calibration
    """

    model: nn.Module
    prepare: Prepare
    device: torch.device
    loss: Loss = cross_entropy
    task: TaskKind = "classification"
    classes: tuple[str, ...] | None = None
    temperature: float = 1.0

    @property
    def preparation(self) -> Preparation | None:
        """How the columns of a table become inputs; None for other inputs."""
        preparation = self.prepare.standardize
        return preparation if isinstance(preparation, TablePreparation | TextPreparation) else None

    def outputs(self, inputs: Any) -> Tensor:
        """The model's outputs (logits) on the CPU: for images, features, dicts, a data frame, a list of texts.

        Arrays are converted as ``fit`` converts them: images (N, H, W, C) become (N, C, H, W). A row of a data frame
        without any value that can be used gets NaN; other values that are not as in the training are logged.
        """
        usable = None
        if self.preparation is not None and is_frame(inputs):
            inputs, usable = prepared(frame_table(inputs), self.preparation, "the data frame")
        stored = self._stored(inputs)
        if isinstance(self.preparation, TextPreparation) and isinstance(stored, Tensor) and len(stored):
            outputs = self.outputs_of(TextExamples(stored, torch.zeros(len(stored), dtype=torch.int64)))
        else:
            pieces = structure.split(stored, self.prepare.evaluation_batch)
            outputs = torch.cat([structure.scores_of(raw).cpu() for raw in self._forward(self.model, pieces)])
        if usable is not None:
            outputs[~usable] = torch.nan
        return outputs

    def outputs_of(self, examples: ExampleSet, model: nn.Module | None = None) -> Tensor:
        """Outputs for every example, on the CPU, of ``self.model`` or of another model that is made of parts of it."""
        pieces = examples.pieces(self.prepare.evaluation_batch)
        inputs = (inputs for inputs, _ in examples.read(pieces))
        return in_order(pieces, [structure.scores_of(raw).cpu() for raw in self._forward(model or self.model, inputs)])

    def _forward(self, model: nn.Module, pieces: Iterable[Inputs]) -> Iterator[Any]:
        with evaluation_mode(self.model), torch.no_grad():
            for piece in pieces:
                inputs = self.prepare.match_input_range(structure.to_device(piece, self.device), "the data")
                yield structure.call(model, self.prepare(inputs))

    def _stored(self, inputs: Any) -> Inputs:
        if isinstance(self.preparation, TextPreparation) and isinstance(inputs, list | tuple):
            return self.preparation.tokens(inputs)
        if isinstance(inputs, list) and any(isinstance(part, Tensor) for part in inputs):  # arguments of the model
            return pytree.tree_map(torch.as_tensor, structure.plain(inputs))
        return inputs_of(inputs, name="given")

    def predict(self, inputs: Any) -> Tensor:
        """Class indices of a classifier, -1 for a row without any value; otherwise the outputs themselves."""
        outputs = self.outputs(inputs)
        if self.task != "classification":
            return outputs
        return torch.where(outputs.isnan().all(1), -1, outputs.argmax(1))

    def predict_proba(self, inputs: Any) -> Tensor:
        """One probability per class, (B, classes): softmax(outputs / temperature)."""
        self._need_classes("predict_proba")
        return (self.outputs(inputs) / self.temperature).softmax(1)

    def evaluate(self, dataset: Any) -> dict[str, float]:
        """Mean loss, and for classification the accuracy in percent."""
        examples = as_example_set(dataset, name="test", preparation=self.preparation)
        pieces, kept = tee(examples.read(examples.pieces(self.prepare.evaluation_batch)))
        losses, right = [], []
        for (_, labels), raw in zip(kept, self._forward(self.model, (inputs for inputs, _ in pieces)), strict=True):
            truth = structure.to_device(labels, self.device)
            losses.append(self.loss(raw, truth).double().cpu())
            if self.task == "classification":
                right.append((structure.scores_of(raw).argmax(1) == truth).cpu())
        numbers = {"loss": float(torch.cat(losses).mean())}
        return numbers | ({"accuracy": 100.0 * float(torch.cat(right).double().mean())} if right else {})

    def calibrated(self, dataset: Any) -> Self:
        """A copy whose temperature is fitted on ``dataset``: labelled examples that were not used in training."""
        self._need_classes("calibrated")
        examples = as_example_set(dataset, name="calibration", preparation=self.preparation)
        return replace(self, temperature=fit_temperature(self.outputs_of(examples), examples.labels.cpu()))

    def _need_classes(self, what: str) -> None:
        if self.task != "classification":
            raise UsageError(f"{what} is for classifiers, and this is a {self.task}: use outputs() or predict().")


def fit_temperature(outputs: Tensor, labels: Tensor) -> float:
    """Temperature scaling (Guo et al. 2017): T = argmin Σ_i −log softmax(z_i / T)[y_i] over held-out examples.

    In [0.05, 20], by Brent's method, since the loss is convex in 1/T. The predicted classes do not change.

    >>> logits = torch.tensor([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [4.0, 0.0]])
    >>> round(fit_temperature(logits, torch.tensor([0, 0, 0, 1])), 2)  # 3 of 4 correct: logit log 3
    3.64
    """
    if outputs.ndim != 2 or labels.shape != (len(outputs),) or labels.is_floating_point() or not len(labels):
        raise DataError(
            f"outputs of shape {tuple(outputs.shape)} and labels of shape {tuple(labels.shape)} cannot be calibrated: "
            "give (N, classes) outputs and N class indices."
        )
    from scipy.optimize import minimize_scalar

    logits = outputs.detach().to("cpu", torch.float64)
    if not bool(logits.isfinite().all()):
        raise DataError("some outputs are NaN or infinite and cannot be calibrated: check the inputs.")
    found = minimize_scalar(
        lambda inverse: float(F.cross_entropy(logits * inverse, labels)),
        bounds=(1 / _HIGHEST, 1 / _LOWEST),
        method="bounded",
        options={"xatol": 1e-6},
    )
    return float(1 / found.x)
