"""A trained model with its preprocessing, class names and temperature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from soseleto.data.readers.frames import frame_table, is_frame
from soseleto.data.readers.tables import prepared
from soseleto.data.table_columns.preparation import TablePreparation
from soseleto.errors import UsageError
from soseleto.models.evaluation import evaluation_mode
from soseleto.prediction.temperature import fit_temperature
from soseleto.task.losses import Loss, cross_entropy

EVALUATION_BATCH = 1000
TaskKind = Literal["classification", "regression"]


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """Predicts from raw inputs.

    model: the trained model (in transfer mode trunk and heads; its forward pass is the target's)
    task: ``"classification"`` where labels are class indices and outputs (B, classes), whatever the loss
    temperature: outputs are divided by it before the softmax; 1 without calibration
    """

    model: nn.Module
    prepare: Callable[[Tensor], Tensor]
    device: torch.device
    loss: Loss = cross_entropy
    task: TaskKind = "classification"
    classes: tuple[str, ...] | None = None
    temperature: float = 1.0

    @property
    def preparation(self) -> TablePreparation | None:
        """How the columns of a table become inputs; None for other inputs."""
        found = getattr(self.prepare, "standardize", None)
        return found if isinstance(found, TablePreparation) else None

    def outputs(self, inputs: Any) -> Tensor:
        """The model's outputs (logits) for raw inputs (uint8 images, features, a data frame), on the CPU."""
        return self._outputs(self.model, inputs)

    def _outputs(self, model: nn.Module, inputs: Any) -> Tensor:
        """Outputs of ``model``, which is ``self.model`` or a part of it."""
        given = torch.as_tensor(self._stored(inputs))
        with evaluation_mode(self.model), torch.no_grad():
            pieces = [model(self.prepare(piece.to(self.device))).cpu() for piece in given.split(EVALUATION_BATCH)]
        return torch.cat(pieces)

    def _stored(self, inputs: Any) -> Tensor | np.ndarray:
        """A data frame as the training stored its tables; other inputs as they are."""
        if self.preparation is not None and is_frame(inputs):
            return prepared(frame_table(inputs), self.preparation, "the data frame")
        return inputs

    def predict(self, inputs: Any) -> Tensor:
        """Class indices of a classifier, otherwise the outputs themselves."""
        outputs = self.outputs(inputs)
        return outputs.argmax(1) if self.task == "classification" else outputs

    def predict_proba(self, inputs: Any) -> Tensor:
        """One probability per class, (B, classes): softmax(outputs / temperature)."""
        self._need_classes("predict_proba")
        return (self.outputs(inputs) / self.temperature).softmax(1)

    def evaluate(self, dataset: Any) -> dict[str, float]:
        """Mean loss, and for classification the accuracy in percent."""
        from soseleto.data import as_examples

        examples = as_examples(dataset, name="test", preparation=self.preparation)
        outputs = self.outputs(examples.inputs)
        labels = examples.labels.cpu()
        numbers = {"loss": float(self.loss(outputs, labels).double().mean())}
        if self.task == "classification":
            numbers["accuracy"] = 100.0 * float((outputs.argmax(1) == labels).double().mean())
        return numbers

    def calibrated(self, dataset: Any) -> Self:
        """A copy whose temperature is fitted on ``dataset``: labelled examples that were not used in training."""
        from soseleto.data import as_examples

        self._need_classes("calibrated")
        examples = as_examples(dataset, name="calibration", preparation=self.preparation)
        return replace(self, temperature=fit_temperature(self.outputs(examples.inputs), examples.labels.cpu()))

    def _need_classes(self, what: str) -> None:
        if self.task != "classification":
            raise UsageError(f"{what} is for classifiers, and this is a {self.task}: use outputs() or predict().")
