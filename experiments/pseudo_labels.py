"""Target examples without labels: ``fit_unlabelled``.

    round r:  classify the unlabelled examples with the classifier learned so far
              keep, of every class, the share of its examples that the classifier is surest of
              treat them as a noisy source and the labelled target as target: SOSELETO in noisy mode, one shared head

The share grows from round to round and is 1 in the last, so that in the end every example has a label and a weight.
Each round is a run of its own: with a folder ``out`` they are in ``out/round-1``, ``out/round-2``, ..., and an
interrupted training is resumed in its round.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from soseleto.algorithm import Soseleto
from soseleto.data import Augment, Examples, ExampleSet, generator, seed_for
from soseleto.data.feeding import Prepare, make_prepare
from soseleto.data.views import AnyViews
from soseleto.errors import UsageError, need
from soseleto.models.trunk_and_heads import TrunkAndHeads
from soseleto.parallel.reducer import Single, choose_device
from soseleto.pieces import target_share
from soseleto.run_folder.files import replacing, tensors_of, verified
from soseleto.run_folder.folder import RANKING, RunFolder
from soseleto.task.task import Method
from soseleto.training.data import Data, are_class_indices
from soseleto.training.fit import fit
from soseleto.training.optimizers import default_epochs, sgd
from soseleto.training.options import as_augments, as_losses, as_watchers, check_arguments
from soseleto.training.result import Guesses, Result
from soseleto.training.resume import require_same
from soseleto.training.setup import assemble
from soseleto.weights import Weights

_PIECE = 4096  # examples that are augmented at a time
_OWN = ("model", "source", "target", "mode")  # arguments that fit_unlabelled takes by name or place itself


@dataclass(frozen=True, kw_only=True)
class Unlabelled:
    """Unlabelled target examples and how they are used; ``fit_unlabelled`` given inputs alone takes these defaults.

    inputs: like those of the target: a tensor, an array, or ``Examples``, whose labels are ignored
    rounds, first_share: how often they are classified, and the share of them that the first round learns from
    epochs, batch_size: of every round; lr: of its SGD, if ``fit_unlabelled`` was given no optimizer
    views: number of augmented views whose mean probability decides an example's class; 1 uses the input itself
    restart: every round starts from the model that the source training left, not from the previous round's
    method: how a round is trained, in noisy mode
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
        progress = (number - 1) / (self.rounds - 1) if self.rounds > 1 else 1.0
        return self.first_share + (1.0 - self.first_share) * progress


def fit_unlabelled(
    model: nn.Module,
    source: Any,
    target: Any,
    unlabelled: Any,
    mode: Literal["noisy", "transfer"] = "noisy",
    **arguments: Any,
) -> Result:
    """``fit``, and then rounds in which the classifier labels ``unlabelled`` examples and learns from them.

    Args:
        unlabelled: inputs like the target's without labels, or ``Unlabelled(inputs=..., rounds=...)``.
        model, source, target, mode, arguments: those of ``fit``.

    The result has the source's weights; ``result.unlabelled`` has the labels and weights of the unlabelled examples.
    """
    known = [name for name in inspect.signature(fit).parameters if name not in _OWN]
    check_arguments("fit_unlabelled", known, arguments)
    chosen = unlabelled if isinstance(unlabelled, Unlabelled) else Unlabelled(inputs=unlabelled)
    bound = inspect.signature(fit).bind(model, source, target, mode, **arguments)
    bound.apply_defaults()
    given = bound.arguments
    if not isinstance(given["compute"].reducer or Single(), Single):
        raise UsageError("unlabelled examples are used in one process: start one, or leave them out.")
    if given["recipe"] != "plain" or isinstance(given["augment"], AnyViews):
        raise UsageError(
            "fit_unlabelled is for the plain recipe: with recipe='strong' call fit, method=Strong(unlabelled=inputs)."
        )
    data = Data.read(source, target, given["test"], mode)
    if not all(isinstance(one, Examples) and isinstance(one.inputs, Tensor) for one in (data.source, data.target)):
        raise UsageError("fit_unlabelled takes data in memory with one tensor as inputs: give soseleto.Examples.")
    if not are_class_indices(data.target.labels):
        raise UsageError("unlabelled examples get class indices as labels, and the target has other labels: use fit.")
    if given["optimizer"] is not None:
        del given["lr"]
    return _Rounds(chosen, {**given, "source": data.source, "target": data.target, "test": data.test}, data).run()


def _signature() -> inspect.Signature:
    """That of ``fit`` with ``unlabelled`` behind ``target``, for ``help``."""
    of_fit, own = inspect.signature(fit), inspect.signature(fit_unlabelled).parameters["unlabelled"]
    first, others = list(of_fit.parameters.values())[:3], list(of_fit.parameters.values())[3:]
    return of_fit.replace(parameters=[*first, own, *others])


fit_unlabelled.__signature__ = _signature()  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Rounds:
    """The training on the source, then the rounds; ``given`` are the arguments of ``fit``."""

    unlabelled: Unlabelled
    given: Mapping[str, Any]
    data: Data

    def run(self) -> Result:
        unlabelled, out = self.unlabelled, self._out
        inputs = _inputs(unlabelled.inputs)
        if self.given["checkpoints"].rescue is not None:
            raise UsageError("fit_unlabelled writes several runs and has no rescue folder: leave rescue out.")
        if out is not None and _ended(out / _round(unlabelled.rounds)):
            RunFolder.create(out, resume=self.given["checkpoints"].resume)  # raises: the last round has ended
        first = self._on_source()
        classifier = _classifier(first.model)
        after_source = copy.deepcopy(classifier.state_dict())
        history, messages = list(first.history), list(first.messages)
        for number in range(1, unlabelled.rounds + 1):
            labels, kept = self._guesses(first, inputs, number)
            source = Examples(inputs, labels, classes=self.data.target.classes).subset(kept)
            if unlabelled.restart:
                classifier.load_state_dict(after_source)
            folder = None if out is None else out / _round(number)
            if folder is not None and _ended(folder):
                classifier.load_state_dict(RunFolder(folder).model_state())
                weights = _weights(folder, source)
                records, texts = _recorded(folder)
            else:
                result = fit(classifier, source, **self._arguments(first, source, folder, number))
                weights, records, texts = result.learned, result.history, result.messages
            history += [{**record, "round": number} for record in records]
            messages += [f"round {number}: {text}" for text in texts if text not in messages]
        guesses = Guesses(labels, weights, unlabelled.method.name)
        return replace(first, history=history, messages=messages, unlabelled=guesses)

    @property
    def _out(self) -> Path | None:
        return None if self.given["out"] is None else Path(self.given["out"])

    def _on_source(self) -> Result:
        """The training on the source, read from its folder if it has ended."""
        out = self._out
        if out is not None and self.given["checkpoints"].resume and _ended(out):
            return self._from_folder(out)
        return fit(**self.given)

    def _arguments(self, first: Result, source: Examples, folder: Path | None, number: int) -> dict[str, Any]:
        """The arguments of a round: the user's, except for what a round has of its own."""
        unlabelled, given, prepare = self.unlabelled, self.given, first.prepare
        assert isinstance(prepare, Prepare)
        kept = ("target_batch_size", "schedule", "compute", "device")
        optimizer = sgd(unlabelled.lr) if given["optimizer"] is None else given["optimizer"]
        functions, _ = as_watchers(given["progress"])  # the loggers were closed after the training on the source
        return {name: given[name] for name in kept} | {
            "optimizer": optimizer,
            "target": self.data.target,
            "test": self.data.test,
            "mode": "noisy",
            "epochs": unlabelled.epochs,
            "batch_size": min(unlabelled.batch_size, len(source)),
            "loss": first.loss,
            "method": unlabelled.method,
            "augment": self._augment,
            "standardize": prepare.standardize or False,
            "seed": seed_for(given["seed"], "unlabelled/round", number),
            "checkpoints": replace(given["checkpoints"], notes={}),
            "out": folder,
            "progress": functions,
        }

    @property
    def _augment(self) -> Augment | None:
        """The target's, since the unlabelled examples are like the target."""
        of_target = as_augments(self.given["augment"])[1]
        assert not isinstance(of_target, AnyViews)  # refused before
        return of_target

    def _guesses(self, result: Result, inputs: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """The class of every example, and the places of those to learn from; a resumed round reads both from a file."""
        file = None if self._out is None else self._out / f"{_round(number)}.safetensors"
        if file is not None and verified(file):
            saved, _ = tensors_of(file)
            return saved["labels"], saved["kept"]
        views, seed = self.unlabelled.views, self.given["seed"]
        sure, labels = class_probabilities(result, inputs, self._augment, views, seed=seed, number=number).max(1)
        kept = surest(labels, sure, self.unlabelled.share(number))
        if file is not None:
            with replacing(file) as part:
                need("safetensors.torch", to="saving pseudo-labels").save_file({"labels": labels, "kept": kept}, part)
        return labels, kept

    def _from_folder(self, out: Path) -> Result:
        """The training on the source, which has ended, from its folder."""
        given, data, run = self.given, self.data, RunFolder(out)
        config, device = run.config(), choose_device(given["device"])
        now = {
            "mode": given["mode"],
            "epochs": default_epochs(given["model"]) if given["epochs"] is None else given["epochs"],
            "seed": given["seed"],
            "source_fingerprint": data.source.fingerprint(),
            "target_fingerprint": data.target.fingerprint(),
        }
        require_same(out, {name: config.get(name) for name in now}, now)
        model: nn.Module = given["model"].to(device)
        prepare = make_prepare(data.source, model, standardize=given["standardize"])
        whole = assemble(model, given["mode"], data, prepare, given["heads"])
        whole.load_state_dict(run.model_state())
        source_loss, target_loss = as_losses(given["loss"], given["mode"])
        history, messages = _recorded(out)
        return Result(
            model=whole,
            source=data.source,
            history=history,
            messages=messages,
            prepare=prepare,
            device=device,
            learned=_weights(out, data.source),
            loss=target_loss or source_loss,
            classes=data.target.classes,
            out=out,
            config=config,
        )


def class_probabilities(
    result: Result, inputs: Tensor, augment: Augment | None, views: int, *, seed: int, number: int
) -> Tensor:
    """(N, classes): the classifier's mean over ``views`` augmented views, or for the inputs themselves."""
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
        raise UsageError(f"unlabelled inputs must have one row per example, got shape {tuple(inputs.shape)}.")
    return inputs.cpu()


def _classifier(model: nn.Module) -> nn.Module:
    """The target's classifier: the trunk with the target head, or the whole model in noisy mode."""
    return nn.Sequential(model.trunk, model.target_head) if isinstance(model, TrunkAndHeads) else model


def _round(number: int) -> str:
    return f"round-{number}"


def _ended(folder: Path) -> bool:
    run = RunFolder(folder)
    return run.is_run() and run.has_ended()


def _recorded(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """History and messages of an ended run."""
    records = list(RunFolder(folder).metrics())
    epochs = [{**record} for record in records if record["event"] == "epoch"]
    for record in epochs:
        del record["event"]
    return epochs, [record["text"] for record in records if record["event"] == "message"]


def _weights(folder: Path, source: ExampleSet) -> Weights | None:
    """The weights of an ended run, from its ranking; None for a method without weights."""
    if not RunFolder(folder).has(RANKING):
        return None
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
