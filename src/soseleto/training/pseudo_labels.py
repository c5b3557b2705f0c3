"""Target examples without labels: ``fit(..., unlabelled=...)``.

    round r:  classify the unlabelled examples with the classifier learned so far
              keep, of every class, the share of its examples that the classifier is surest of
              treat them as a noisy source and the labelled target as target: SOSELETO in noisy mode, one shared head

The share grows from round to round and is 1 in the last, so that in the end every example has a label and a weight.
Each round is a run of its own: with a folder ``out`` they are in ``out/round-1``, ``out/round-2``, ..., and a training
that was cut short goes on in the round it was in.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from soseleto.algorithm import Soseleto
from soseleto.data import Augment, Examples, generator, seed_for
from soseleto.data.preprocess import Prepare, make_prepare
from soseleto.errors import UsageError, need
from soseleto.extensions import target_share
from soseleto.models.trunk_and_heads import TrunkAndHeads
from soseleto.parallel.device import choose_device
from soseleto.run_folder.files import aside
from soseleto.run_folder.folder import RunFolder
from soseleto.task.task import Method
from soseleto.training.result import Guesses, Result
from soseleto.training.resume import require_same
from soseleto.training.setup import Data, assemble
from soseleto.weights import Weights

Fit = Callable[..., Result]
_PIECE = 4096  # examples that are augmented at a time


@dataclass(frozen=True, kw_only=True)
class Unlabelled:
    """Unlabelled target examples and how they are used; ``fit(..., unlabelled=inputs)`` takes these defaults.

    inputs: as those of the target: a tensor, an array, or ``Examples``, whose labels are not looked at
    rounds, first_share: how often they are classified anew, and the share of them that the first round learns from
    epochs, batch_size: of every round; lr: of its optimizer, where fit was not given one
    views: an example's class is that of the mean probability over so many augmented views of it; 1 takes it as it is
    restart: every round begins with the model that the source left, not with that of the round before
    method: what is run on them, in noisy mode
    """

    inputs: Any
    rounds: int = 4
    first_share: float = 0.5
    epochs: int = 2
    batch_size: int = 256
    lr: float = 0.01
    views: int = 1
    restart: bool = False
    method: Method = field(default_factory=lambda: Soseleto(gradients=target_share(0.2)))

    def __post_init__(self) -> None:
        for name in ("rounds", "epochs", "batch_size", "views"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} of Unlabelled must be at least 1, got {getattr(self, name)}.")
        if not 0.0 < self.first_share <= 1.0:
            raise UsageError(f"first_share of Unlabelled must lie in (0, 1], got {self.first_share}.")

    def share(self, number: int) -> float:
        """The share of the examples that round ``number`` (from 1) learns from."""
        left = (number - 1) / (self.rounds - 1) if self.rounds > 1 else 1.0
        return self.first_share + (1.0 - self.first_share) * left


def as_unlabelled(given: Any) -> Unlabelled:
    return given if isinstance(given, Unlabelled) else Unlabelled(inputs=given)


def fit_in_rounds(fit: Fit, given: Mapping[str, Any], unlabelled: Unlabelled) -> Result:
    """``fit`` with the arguments ``given``, then the rounds; the result has the source's weights and the guesses."""
    data = Data.read(given["source"], given["target"], given["test"], given["mode"])
    given = {**given, "source": data.source, "target": data.target, "test": data.test}
    inputs, out = _inputs(unlabelled.inputs), None if given["out"] is None else Path(given["out"])
    if out is not None and _ended(out / _round(unlabelled.rounds)):
        RunFolder.create(out, resume=given["resume"])  # raises: there is nothing left to do
    first = _taken(given, data, out) if out is not None and given["resume"] and _ended(out) else fit(**given)
    classifier = _classifier(first.model)
    after_source = copy.deepcopy(classifier.state_dict())
    history, messages = list(first.history), list(first.messages)
    for number in range(1, unlabelled.rounds + 1):
        labels, kept = _guesses(first, inputs, given["augment_target"], unlabelled, number, out, given["seed"])
        source = Examples(inputs, labels, classes=data.target.classes).subset(kept)
        if unlabelled.restart:
            classifier.load_state_dict(after_source)
        folder = None if out is None else out / _round(number)
        if folder is not None and _ended(folder):
            classifier.load_state_dict(RunFolder(folder).model_state())
            weights = _weights(folder, source)
            continue
        own = {"batch_size": min(unlabelled.batch_size, len(source)), "out": folder}
        result = fit(classifier, source, **_arguments(given, data, first, unlabelled, number), **own)
        weights = result.learned
        history += [{**record, "round": number} for record in result.history]
        messages += [f"round {number}: {text}" for text in result.messages if text not in messages]
    return replace(first, history=history, messages=messages, unlabelled=Guesses(labels, weights))


def _arguments(
    given: Mapping[str, Any], data: Data, first: Result, unlabelled: Unlabelled, number: int
) -> dict[str, Any]:
    """Of a round: as the user wanted the training, but for what a round has of its own."""
    prepare = first.prepare
    assert isinstance(prepare, Prepare)
    kept = (
        "target_batch_size", "weight_decay", "optimizer", "schedule", "balanced_target", "precision", "cuda_graph",
        "device", "micro_batch_size", "non_finite", "checkpoint_every", "checkpoint_steps", "resume",
        "progress", "augment_target",
    )  # fmt: skip
    return {name: given[name] for name in kept} | {
        "target": data.target,
        "test": data.test,
        "mode": "noisy",
        "epochs": unlabelled.epochs,
        "lr": unlabelled.lr,
        "loss": given["target_loss"] or given["loss"],
        "method": unlabelled.method,
        "augment_source": given["augment_target"],
        "standardize": prepare.standardize or False,
        "seed": seed_for(given["seed"], "unlabelled/round", number),
    }


def _guesses(
    result: Result, inputs: Tensor, augment: Augment | None, unlabelled: Unlabelled, number: int, out: Path | None,
    seed: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The class of every example, and the places of those to learn from; a round that goes on has them in its file."""
    file = None if out is None else out / f"{_round(number)}.safetensors"
    if file is not None and file.exists():
        saved = need("safetensors.torch", to="loading pseudo-labels").load_file(file)
        return saved["labels"], saved["kept"]
    sure, labels = class_probabilities(result, inputs, augment, unlabelled.views, seed=seed, number=number).max(1)
    kept = surest(labels, sure, unlabelled.share(number))
    if file is not None:
        with aside(file) as part:
            need("safetensors.torch", to="saving pseudo-labels").save_file({"labels": labels, "kept": kept}, part)
    return labels, kept


def class_probabilities(
    result: Result, inputs: Tensor, augment: Augment | None, views: int, *, seed: int, number: int
) -> Tensor:
    """(N, classes): the classifier's mean over ``views`` augmented views, or for the inputs as they are."""
    if views == 1 or augment is None or augment.nothing:
        return result.outputs(inputs).softmax(1)
    total = torch.zeros(())
    for view in range(views):
        random = generator(seed, f"unlabelled/views/{number}", view, result.device)
        pieces = [result.outputs(augment(piece.to(result.device), random)) for piece in inputs.split(_PIECE)]
        total = total + torch.cat(pieces).softmax(1) / views
    return total


def surest(labels: Tensor, sure: Tensor, share: float) -> Tensor:
    """The places of the surest ``share`` of every class, in the data's order."""
    order = torch.argsort(sure, descending=True, stable=True)
    by_class = [order[labels[order] == c] for c in labels.unique()]
    kept = [places[: math.ceil(share * len(places))] for places in by_class]
    return torch.cat(kept).sort().values


def _inputs(given: Any) -> Tensor:
    inputs = given.inputs if isinstance(given, Examples) else torch.as_tensor(given)
    if inputs.ndim < 2:
        raise UsageError(f"unlabelled inputs must have one row an example, got shape {tuple(inputs.shape)}.")
    return inputs.cpu()


def _classifier(model: nn.Module) -> nn.Module:
    """The target's classifier: the trunk with the target head, or the whole model where both sides share one."""
    return nn.Sequential(model.trunk, model.target_head) if isinstance(model, TrunkAndHeads) else model


def _round(number: int) -> str:
    return f"round-{number}"


def _ended(folder: Path) -> bool:
    run = RunFolder(folder)
    return run.is_run() and run.has_ended()


def _taken(given: Mapping[str, Any], data: Data, out: Path) -> Result:
    """The training on the source, which has ended, from its folder."""
    run = RunFolder(out)
    config, device = run.config(), choose_device(given["device"])
    now = {
        "mode": given["mode"],
        "epochs": given["epochs"],
        "seed": given["seed"],
        "source_fingerprint": data.source.fingerprint(),
        "target_fingerprint": data.target.fingerprint(),
    }
    require_same(out, {name: config.get(name) for name in now}, now)
    model: nn.Module = given["model"].to(device)
    prepare = make_prepare(data.source, model, standardize=given["standardize"])
    heads = {name: given[name] for name in ("source_head", "target_head")}
    whole = assemble(model, given["mode"], data, prepare, **heads)
    whole.load_state_dict(run.model_state())
    return Result(
        model=whole,
        source=data.source,
        history=[record for record in run.metrics() if record["event"] == "epoch"],
        messages=[record["text"] for record in run.metrics() if record["event"] == "message"],
        prepare=prepare,
        device=device,
        learned=_weights(out, data.source),
        loss=given["target_loss"] or given["loss"],
        classes=data.target.classes,
        out=out,
        config=config,
    )


def _weights(folder: Path, source: Examples) -> Weights:
    """The weights of an ended run, from its ranking."""
    ranking = RunFolder(folder).ranking()
    place = {id_: row for row, id_ in enumerate(ranking["id"])}
    rows = [place[source.id_of(i)] for i in range(len(source))]
    weights = Weights(len(source))
    weights.load_state(
        {
            "weights": torch.tensor(ranking["weight"][rows]),
            "scores": torch.tensor(ranking["score"][rows]),
            "visits": torch.tensor(ranking["visits"][rows]),
        }
    )
    return weights
