"""Before the first step: the device, the inputs' preparation, the assembled model, and what must fit together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from soseleto.data import Examples, as_examples, check_mode, read_pair
from soseleto.data.batch import Batch
from soseleto.data.preprocess import Prepare
from soseleto.errors import DataError, UsageError
from soseleto.models.evaluation import evaluation_mode
from soseleto.models.trunk_and_heads import TrunkAndHeads, feature_width
from soseleto.suspects.probes import Probes, Share, plant
from soseleto.task.losses import Loss, NoisyLosses, TransferLosses, cross_entropy


@dataclass(frozen=True)
class Data:
    """The three sides of a problem; where there are probes, they stand behind the source and not in the target."""

    source: Examples
    target: Examples
    test: Examples | None
    probes: Probes | None = None

    @classmethod
    def read(cls, source: Any, target: Any, test: Any, mode: str) -> Data:
        """Files are read as a pair, with one list of classes and every check; arrays are taken as they are."""
        check_mode(mode)
        if any(isinstance(data, (str, Path)) for data in (source, target, test)):
            pair = read_pair(source, target, test, mode=mode)
            return cls(pair.source, pair.target, pair.test)
        return cls(
            as_examples(source, name="source"),
            as_examples(target, name="target"),
            None if test is None else as_examples(test, name="test"),
        )

    @property
    def own_source(self) -> Examples:
        """The source without the probes."""
        return self.source if self.probes is None else self.probes.without(self.source)

    def plant(self, share: Share, labels_before: Any, *, mode: str, seed: int) -> Data:
        """With that share of the target planted as probes; 0 plants none."""
        if share == 0:
            if labels_before is not None:
                raise UsageError("labels_before has no effect without probes: say probes='auto', or leave it out.")
            return self
        if mode != "noisy":
            raise UsageError("probes need source and target of the same classes: say mode='noisy', or probes=0.")
        planted = plant(self.source, self.target, share, seed=seed, labels_before=labels_before)
        return replace(self, source=planted.source, target=planted.target, probes=planted.probes)

    def fingerprints(self) -> dict[str, str | None]:
        """Of the three sets; best asked for before they lie on a GPU, from where every byte would have to come back."""
        return {
            "source_fingerprint": self.own_source.fingerprint(),
            "target_fingerprint": self.target.fingerprint(),
            "test_fingerprint": None if self.test is None else self.test.fingerprint(),
        }

    def to(self, device: torch.device) -> Data:
        return replace(
            self,
            source=on_device(self.source, device),
            target=on_device(self.target, device),
            test=None if self.test is None else on_device(self.test, device),
        )


def on_device(examples: Examples, device: torch.device) -> Examples:
    """The examples where the model is, if they fit there beside it; else where they are."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return examples.to(device) if examples.nbytes < free // 2 else examples
    return examples.to(device)


def assemble(
    model: nn.Module,
    mode: str,
    data: Data,
    prepare: Prepare,
    *,
    source_head: nn.Module | None,
    target_head: nn.Module | None,
) -> nn.Module:
    """The whole model: as it is in noisy mode, trunk and heads in transfer mode."""
    if mode == "noisy":
        if source_head is not None or target_head is not None:
            raise UsageError("heads have no effect in noisy mode, where both sides share one: say mode='transfer'.")
        return model
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    width = feature_width(model, prepare(data.source.inputs[:1].to(device)))
    whole = TrunkAndHeads(
        model,
        source_head or nn.Linear(width, classes_of(data.source, "source")),
        target_head or nn.Linear(width, classes_of(data.target, "target")),
    )
    return whole.to(device=device, dtype=prepare.dtype)


def classes_of(examples: Examples, side: str) -> int:
    """How many classes a side has."""
    count = class_count(examples)
    if count is None:
        raise UsageError(f"the {side} labels are not class indices: pass {side}_head=... with a head of your own.")
    return count


def class_count(examples: Examples) -> int | None:
    """How many classes there are, or None where labels are not class indices."""
    if examples.labels.is_floating_point() or examples.labels.ndim != 1:
        return None
    return int(examples.labels.max()) + 1 if examples.classes is None else len(examples.classes)


def check_fit(model: nn.Module, losses: NoisyLosses | TransferLosses, data: Data, prepare: Prepare) -> None:
    """One example through the model from each side: inputs, labels and losses must fit together."""
    shape = data.source.inputs.shape[1:]
    for side, examples in (("target", data.target), ("test", data.test)):
        if examples is not None and examples.inputs.shape[1:] != shape:
            raise DataError(
                f"source inputs have shape {tuple(shape)} and {side} inputs {tuple(examples.inputs.shape[1:])}: "
                "bring them to one shape."
            )
    with evaluation_mode(model), torch.no_grad():
        for side, examples in (("source", data.source), ("target", data.target)):
            _check_side(model, losses, side, examples, prepare)


def _check_side(
    model: nn.Module, losses: NoisyLosses | TransferLosses, side: str, examples: Examples, prepare: Prepare
) -> None:
    loss: Loss
    if isinstance(losses, NoisyLosses):
        loss, call = losses.loss, model
    else:
        assert isinstance(model, TrunkAndHeads)
        loss, call = getattr(losses, f"{side}_loss"), nn.Sequential(model.trunk, getattr(model, f"{side}_head"))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if loss is cross_entropy:
        if examples.labels.is_floating_point():
            raise DataError(
                f"{side} labels are of float type {examples.labels.dtype}: pass class indices (labels.long()), "
                "or for regression a loss of your own, loss=soseleto.squared_error."
            )
        outputs = call(prepare(examples.inputs[:1].to(device)))
        classes, highest = outputs.shape[1], int(examples.labels.max())
        if highest >= classes:
            raise DataError(
                f"a {side} label is {highest}, but the model has {classes} outputs (labels 0 to {classes - 1}): "
                "give the model more outputs or fix the label."
            )
    one = examples.subset([0])
    batch = Batch(torch.zeros(1, dtype=torch.int64), prepare(one.inputs.to(device)), one.labels.to(device))
    getattr(losses, side)(model, batch)
