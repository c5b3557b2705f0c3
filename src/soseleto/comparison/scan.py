"""``scan``, the first answer: frozen features, and cross-fitted beliefs in the source's labels, in seconds.

The network stays as it is up to its last linear layer; what it says there are the features, and a classifier is
trained on them. A logistic regression is then written into that layer, so that the answer is an ordinary network, which
can be trained further; any other classifier takes the layer's place.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from soseleto.beliefs.cross_fit import FOLDS, ROUNDS, Array, Beliefs, cross_fit
from soseleto.beliefs.suspects import FromBeliefs
from soseleto.comparison.accuracy import SOSELETO, Judged, rows
from soseleto.data import Examples, ExampleSet, TablePreparation, structure
from soseleto.data.examples import in_pieces
from soseleto.data.groups import kept_together
from soseleto.data.reading import Reading
from soseleto.errors import UsageError
from soseleto.models.architectures import linear
from soseleto.models.learned import Learned, last_inputs, last_linear, to_bytes
from soseleto.models.trunk_and_heads import evaluation_mode
from soseleto.parallel.micro_batches import Sharing
from soseleto.parallel.reducer import Single, choose_device
from soseleto.run_folder.folder import COMPARISON, RunFolder
from soseleto.run_folder.source import digest, remember
from soseleto.task.losses import cross_entropy
from soseleto.training.data import Data, class_count, seeded
from soseleto.training.history import Records, weight_record
from soseleto.training.loop import facts_of, write_result
from soseleto.training.options import SUSPECT_PRECISION, Checkpoints, Compute, Heads, Inputs, Probes, Watcher, as_losses
from soseleto.training.progress import as_watchers
from soseleto.training.result import Result
from soseleto.training.setup import Network, Options
from soseleto.weights import Weights

MOST_PROBABILITIES = 50_000_000  # examples times classes, of which several arrays are in memory
LEAST = -30.0  # the output for a class without any example
SMALLEST, ROUNDING = 1e-8, 1e-5  # standard deviation of a feature that varies: of the median one, and of its size


def scan(
    source: Any,
    target: Any,
    learner: Any = None,
    model: nn.Module | None = None,
    *,
    precision: float = SUSPECT_PRECISION,
    inputs: Inputs = Inputs(),
    seed: int = 0,
    device: str | torch.device = "auto",
    out: str | Path | None = None,
    notes: Mapping[str, Any] | None = None,
    progress: Watcher | Sequence[Watcher] = False,
) -> Result:
    """Judge the labels of a large, doubtful source by a small, trusted target, without training a network.

    Args:
        source, target: as in ``fit``, with the labels of a classification.
        learner: any scikit-learn classifier that takes sample weights; a logistic regression by default.
        model: a network that ends in a linear layer, such as a pretrained one: its last inputs are the features. It is
            left as it is. By default the inputs themselves are the features.
        precision: the share of the suspects that should really be mislabelled.
        inputs: how inputs are standardised, as in ``fit``.
        out: the run folder to write.
        notes: further entries for its ``config.json``.

    Returns the same object as ``fit``: weights are the probabilities that labels are right.

    Example:
        >>> x, y = torch.randn(200, 3), torch.randint(2, (200,))
        >>> found = scan((x[:150], y[:150]), (x[150:], y[150:]))
        >>> found.weights.shape
        torch.Size([150])
    """
    return first_answer(
        source,
        target,
        learner,
        model,
        precision,
        inputs,
        seed=seed,
        device=device,
        out=out,
        notes=notes,
        progress=progress,
    ).result


@dataclass(frozen=True, eq=False)
class First:
    """A first answer, and what it was made from: a network, and its features of source and target."""

    result: Result
    network: Network
    features: tuple[Array, Array]
    labels: tuple[Array, Array]
    groups: tuple[Array, Array] | None
    learner: Any
    seed: int

    @property
    def classes(self) -> int:
        assert self.network.outputs is not None
        return self.network.outputs

    @property
    def found(self) -> Beliefs:
        assert isinstance(self.result.evidence, FromBeliefs)
        return self.result.evidence.found

    def beliefs(self, source: Array, target: Array) -> Beliefs:
        """As if only these examples were known, given by masks."""
        features, labels, groups = (
            pair and (pair[0][source], pair[1][target]) for pair in (self.features, self.labels, self.groups)
        )
        assert features is not None
        assert labels is not None
        return _beliefs(features, labels, groups, self.network, self.learner, self.seed)


def first_answer(
    source: Any,
    target: Any,
    learner: Any,
    model: nn.Module | None,
    precision: float,
    inputs: Inputs,
    *,
    seed: int,
    device: str | torch.device,
    out: str | Path | None,
    notes: Mapping[str, Any] | None,
    progress: Watcher | Sequence[Watcher],
) -> First:
    """As ``scan``, with what ``compare`` needs further."""
    data, where = Data.read(source, target, "noisy"), choose_device(device)
    of_source, of_target = kept_together(data.source, data.target)
    data = replace(data, source=of_source, target=of_target)
    options = Options(
        mode="noisy",
        loss=as_losses(cross_entropy, "noisy"),
        inputs=inputs,
        heads=Heads(),
        probes=Probes(share=0.0, precision=precision),
        compute=Compute(),
        checkpoints=Checkpoints(notes={**({"model": "linear"} if model is None else {}), **(notes or {})}),
        seed=seed,
    )
    with seeded(seed, where):
        network = _network(model, data, options, where)
        folder = None if out is None else RunFolder.create(out, resume=True)
        with nullcontext() if folder is None else folder.held():
            first = _answered(data, network, learner, options, Records(folder, *as_watchers(progress)), where)
            if folder is not None and isinstance(source, str | Path):
                remember(folder, source, Reading(), data.feature_names, digest(source), data.beside, data.checked)
    return first


def too_many_classes(source: ExampleSet, target: ExampleSet) -> bool:
    classes = max(class_count(examples) or 0 for examples in (source, target))
    return (len(source) + len(target)) * classes > MOST_PROBABILITIES


def enough_trusted(examples: Examples) -> bool:
    """Whether every fold leaves two classes to learn."""
    labels, groups = examples.labels.cpu().numpy(), examples.groups
    if groups is not None:
        labels = np.unique(np.stack([groups.numpy(), labels]), axis=1)[1]
    return int((np.bincount(labels) >= 2).sum()) >= 2


def _beliefs(
    features: tuple[Array, Array],
    labels: tuple[Array, Array],
    groups: tuple[Array, Array] | None,
    network: Network,
    learner: Any,
    seed: int,
) -> Beliefs:
    assert network.outputs is not None
    choices: dict[str, Any] = {"classes": network.outputs, "learner": learner, "seed": seed, "groups": groups}
    return cross_fit(features[0], labels[0], features[1], labels[1], **choices)


def _network(model: nn.Module | None, data: Data, options: Options, device: torch.device) -> Network:
    """A copy of the model, checked against the data; without a model one linear layer on the inputs."""
    for side, examples in (("source", data.source), ("target", data.target)):
        if class_count(examples) is None:
            raise UsageError(f"the {side} labels are not class indices, and scan judges classes: use soseleto.fit.")
    if model is None:
        classes = max(class_count(examples) or 0 for examples in (data.source, data.target))
        first, _ = data.source.take(torch.tensor([0]))
        if not isinstance(first, Tensor):
            raise UsageError("the inputs are a structure of tensors: give scan a model that makes features of them.")
        table = data.preparation if options.inputs.standardize is None else options.inputs.standardize
        model = linear(table.width if isinstance(table, TablePreparation) else first.numel(), classes)
    else:
        model = copy.deepcopy(model)
    if last_linear(model) is None:
        raise UsageError("the model has no linear layer, whose inputs are the features: give one that ends in one.")
    return Network.of(model, options, data, sharing=Sharing(Single(), None), device=device)


def _answered(
    data: Data, network: Network, learner: Any, options: Options, records: Records, device: torch.device
) -> First:
    config = {
        **options.describe(),
        "mode": "noisy",
        "method": "scan",
        "settings": {"learner": "logistic regression" if learner is None else repr(learner), "rounds": ROUNDS},
        "task": "classification",
        "n_classes": network.outputs,
        "device": str(device),
        **({} if data.columns is None else {"columns": list(data.columns)}),
        **facts_of(data, data.source, network),
        **data.fingerprints(),
        **options.checkpoints.notes,
    }
    if records.folder is not None:
        records.folder.write_config(config)
        records.folder.cut_metrics(0)
    records.begin({"epochs": 1, "n_source": len(data.source), "n_target": len(data.target)}, resumed=False)
    assert isinstance(data.target, Examples)
    if too_many_classes(data.source, data.target):
        raise UsageError(
            f"{len(data.source) + len(data.target):,} examples of {network.outputs:,} classes are too many for a first "
            "answer: use soseleto.fit, or fewer examples."
        )
    if not enough_trusted(data.target):
        raise UsageError(
            "the target needs two examples each of at least two classes, of different groups: give more of them."
        )
    features = _without_constants(
        features_of_set(network, data.source, device, records),
        features_of_set(network, data.target, device, records),
    )
    labels = data.source.labels.cpu().numpy(), data.target.labels.cpu().numpy()
    groups = _groups_of(data.source, data.target)
    found = _beliefs(features, labels, groups, network, learner, options.seed)
    learned = _weights(found)
    records.epoch({"epoch": 1, "epochs": 1, "step": 1, **weight_record(learned, _wrong(data.source), Single())})
    missing = data.classes_without_target()
    judged = ~torch.isin(data.source.labels.cpu(), torch.tensor(missing, dtype=torch.int64))
    assert network.outputs is not None
    model = with_solution(network.model, found.model, network.outputs)
    result = Result(
        model=model,
        source=data.source,
        history=records.history,
        messages=records.messages,
        prepare=network.prepare,
        device=device,
        learned=learned,
        loss=cross_entropy,
        classes=data.target.classes,
        out=None if records.folder is None else records.folder.path,
        config=config,
        evidence=FromBeliefs(found, judged),
        missing=missing,
        suspect_precision=options.probes.precision,
    )

    def write(folder: RunFolder) -> None:
        write_result(folder, result, network.model.state_dict())
        if isinstance(model, Learned):
            folder.write_learner(to_bytes(found.model))
        judged = compared(found, data.target)
        folder.write_json(COMPARISON, {"judged_on": "target", "folds": FOLDS, "rows": rows(judged)})

    records.end({"seconds": round(records.seconds, 3)}, write)
    return First(result, network, features, labels, groups, learner, options.seed)


def _groups_of(source: ExampleSet, target: Examples) -> tuple[Array, Array] | None:
    if not isinstance(source, Examples) or source.groups is None or target.groups is None:
        return None
    return source.groups.numpy(), target.groups.numpy()


def _weights(found: Beliefs) -> Weights:
    learned = Weights(len(found.labels))
    state = {"weights": found.belief, "scores": found.right, "visits": np.full(len(found.labels), 1 + ROUNDS)}
    like = learned.state()
    learned.load_state({name: torch.from_numpy(np.asarray(of)).to(like[name].dtype) for name, of in state.items()})
    return learned


def _wrong(source: ExampleSet) -> tuple[Tensor, Tensor] | None:
    """Which labels are wrong, and of which the truth is known."""
    if source.truth is None:
        return None
    truth = source.truth.cpu()
    return truth != source.labels.cpu(), truth >= 0


def compared(found: Beliefs, target: ExampleSet) -> list[Judged]:
    """The classifiers beside each other on the target, each example held out of its own training."""
    groups = target.groups if isinstance(target, Examples) else None
    places, labels = torch.arange(len(found.trusted_labels)), torch.from_numpy(found.trusted_labels)
    held_out = {SOSELETO: found.trusted_probabilities, **found.rivals}
    return [Judged(name, torch.from_numpy(said), labels, places, groups) for name, said in held_out.items()]


def features_of_set(network: Network, examples: ExampleSet, device: torch.device, records: Records) -> np.ndarray:
    """The inputs of the network's last linear layer, (n, d) float32."""
    pieces, batch = [], network.prepare.evaluation_batch
    with evaluation_mode(network.model), torch.no_grad(), last_inputs(network.model) as seen:
        for inputs, _ in examples.read(in_pieces(len(examples), batch)):
            seen.clear()
            structure.call(network.model, network.prepare(structure.to_device(inputs, device)))
            pieces.append(torch.cat(seen).cpu())
            records.step({}, {"epoch": 1, "step": len(pieces), "steps": -(-len(examples) // batch)})
    features = torch.cat(pieces).flatten(1)
    if len(features) != len(examples):
        raise UsageError("the model's last linear layer does not take one row an example: give another model.")
    return features.nan_to_num(0.0, 0.0, 0.0).numpy()


def _without_constants(source: Array, target: Array) -> tuple[Array, Array]:
    """Features that are constant but for rounding become 0: scaled to one, their noise would count like any other."""
    spread, size = source.std(axis=0), np.abs(source).mean(axis=0)
    varies = (spread > SMALLEST * np.median(spread)) & (spread > ROUNDING * size)
    return source * varies, target * varies


def with_solution(network: nn.Module, learner: Any, classes: int) -> nn.Module:
    """The network with a logistic regression in its last linear layer; with another learner in place of that layer."""
    solution = linear_solution(learner, classes)
    layer = last_linear(network)
    assert layer is not None
    if solution is None or layer.out_features != classes:
        return Learned(network, learner, classes)
    weight, bias = (torch.from_numpy(part).to(layer.weight) for part in solution)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if layer.bias is not None:
            layer.bias.copy_(bias)
    return network


def linear_solution(learner: Any, classes: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Weight (classes, d) and bias of a logistic regression, perhaps behind a StandardScaler; None of another."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import StandardScaler

    steps = [step for _, step in learner.steps] if isinstance(learner, Pipeline) else [learner]
    if not isinstance(steps[-1], LogisticRegression) or any(type(step) is not StandardScaler for step in steps[:-1]):
        return None
    slope, constant = steps[-1].coef_.astype(float), steps[-1].intercept_.astype(float)
    if len(slope) == 1:  # of two classes: log p₁ − log p₀
        slope, constant = np.concatenate([-slope, slope]) / 2, np.concatenate([-constant, constant]) / 2
    for scaler in reversed(steps[:-1]):
        slope = slope / scaler.scale_
        constant = constant - slope @ scaler.mean_
    weight, bias = np.zeros((classes, slope.shape[1])), np.full(classes, LEAST)
    weight[steps[-1].classes_], bias[steps[-1].classes_] = slope, constant
    return weight, bias
