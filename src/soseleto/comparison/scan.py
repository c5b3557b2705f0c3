"""``scan``, the first answer: frozen features, and cross-fitted beliefs in the source's labels, in seconds.

The network stays as it is up to its last linear layer; what it says there are the features, and a classifier is
trained on them. A logistic regression is then written into that layer, so that the answer is an ordinary network, which
can be trained further; any other classifier takes the layer's place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from soseleto.comparison.accuracy import SOSELETO, Judged, rows
from soseleto.data import Examples, ExampleSet, TablePreparation
from soseleto.data.examples import content_of
from soseleto.data.groups import kept_together
from soseleto.errors import UsageError
from soseleto.models.architectures import linear
from soseleto.models.trunk_and_heads import InUnits, Learned, last_linear, to_bytes
from soseleto.parallel.micro_batches import Sharing
from soseleto.parallel.reducer import Single, choose_device
from soseleto.run_folder.files import CHECKED, as_json, kept_features
from soseleto.run_folder.folder import COMPARISON, RunFolder
from soseleto.run_folder.source import digest, remember
from soseleto.suspects.cross_fit import FOLDS, ROUNDS, Array, Beliefs, cross_fit
from soseleto.suspects.probes import checked_before
from soseleto.suspects.residuals import Residuals, cross_fit_values
from soseleto.suspects.suspects import Evidence
from soseleto.task.losses import cross_entropy, squared_error
from soseleto.training.data import Data, class_count, enough_trusted, features_of_set, groups_of, seeded
from soseleto.training.history import Records, weight_record
from soseleto.training.loop import facts_of, write_result
from soseleto.training.options import SUSPECT_PRECISION, Checkpoints, Compute, Heads, Inputs, Probes, Watcher, as_losses
from soseleto.training.progress import functions_of
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
    labels_before: Any = None,
    inputs: Inputs = Inputs(),
    seed: int = 0,
    device: str | torch.device = "auto",
    out: str | Path | None = None,
    notes: Mapping[str, Any] | None = None,
    progress: Watcher | Sequence[Watcher] = False,
) -> FirstAnswer:
    """Judge the labels of a large, doubtful source by a small, trusted target, without training a network.

    Args:
        source, target: as in ``fit``, with classes or numbers as labels.
        learner: any scikit-learn classifier, or for numbers regressor, that takes sample weights; by default a logistic
            or a ridge regression.
        model: a network that ends in a linear layer, such as a pretrained one: its last inputs are the features. It is
            left as it is. By default the inputs themselves are the features.
        precision: the share of the suspects that should really be mislabelled.
        labels_before: of the target's examples, from before they were checked, -1 where unknown: where they were picked
            from the source, the share of wrong labels is counted on these.
        inputs: how inputs are standardised, as in ``fit``.
        out: the run folder to write.
        notes: further entries for its ``config.json``.

    Returns the same object as ``fit``, with the features. Weights are the probabilities that labels are right, of
    numbers the weights in the regression.

    Example:
        >>> x, y = torch.randn(200, 3), torch.randint(2, (200,))
        >>> found = scan((x[:150], y[:150]), (x[150:], y[150:]))
        >>> found.weights.shape
        torch.Size([150])
    """
    data, where = Data.read(source, target, "noisy"), choose_device(device)
    loss = squared_error if data.target.sample_labels().is_floating_point() else cross_entropy
    of_source, of_target = kept_together(data.source, data.target)
    data = replace(data, source=of_source, target=of_target)
    options = Options(
        mode="noisy",
        loss=as_losses(loss, "noisy"),
        inputs=inputs,
        heads=Heads(),
        probes=Probes(share=None, precision=precision, labels_before=labels_before),
        compute=Compute(),
        checkpoints=Checkpoints(notes={**({"model": "linear"} if model is None else {}), **(notes or {})}),
        seed=seed,
    )
    with seeded(seed, where):
        network = _network(model, data, options, where)
        folder = None if out is None else RunFolder.create(out, resume=True)
        with nullcontext() if folder is None else folder.held():
            answer = _answered(data, network, learner, options, Records(folder, functions_of(progress)), where)
            if folder is not None and isinstance(source, str | Path):
                remember(folder, source, data, digest(source))
    return answer


@dataclass(frozen=True, kw_only=True, repr=False)
class FirstAnswer(Result):
    """The result of a scan; pairs are (source, target)."""

    features: tuple[Array, Array]
    labels: tuple[Array, Array]
    groups: tuple[Array, Array] | None
    learner: Any
    seed: int

    @property
    def judgement(self) -> Beliefs | Residuals:
        judgement = None if self.evidence is None else self.evidence.judgement
        assert isinstance(judgement, Beliefs | Residuals)
        return judgement

    def beliefs_without(self, source: Array, target: Array) -> Beliefs:
        """As if only these examples were known, given by masks."""
        (x, of_target), (labels, target_labels) = self.features, self.labels
        groups = self.groups and (self.groups[0][source], self.groups[1][target])
        return cross_fit(
            x[source],
            labels[source],
            of_target[target],
            target_labels[target],
            classes=self.config["n_classes"],
            learner=self.learner,
            seed=self.seed,
            groups=groups,
        )


def too_many_classes(source: ExampleSet, target: ExampleSet) -> bool:
    classes = max(class_count(examples) or 0 for examples in (source, target))
    return (len(source) + len(target)) * classes > MOST_PROBABILITIES


def _network(model: nn.Module | None, data: Data, options: Options, device: torch.device) -> Network:
    """A copy of the model, checked against the data; without a model one linear layer on the inputs."""
    for side, examples in (("source", data.source), ("target", data.target)):
        if examples.sample_labels().ndim != 1:
            raise UsageError(f"the {side} labels are not one class or number each: use soseleto.fit.")
    if model is None:
        classes = max(class_count(examples) or 1 for examples in (data.source, data.target))
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
) -> FirstAnswer:
    classes = network.outputs or 1
    config = {
        **options.describe(),
        "mode": "noisy",
        "method": "scan",
        "settings": {"learner": "default" if learner is None else repr(learner)},
        "task": network.kind,
        "n_classes": classes,
        "device": str(device),
        **facts_of(data, data.source, network),
        **data.fingerprints(),
        **options.checkpoints.notes,
    }
    if records.folder is not None:
        records.folder.write_config(config)
        records.folder.cut_metrics(0)
    records.begin({"epochs": 1, "n_source": len(data.source), "n_target": len(data.target)}, resumed=False)
    assert isinstance(data.target, Examples)
    labels = data.source.labels.cpu().numpy(), data.target.labels.cpu().numpy()
    groups = groups_of(data.source, data.target)
    settings: dict[str, Any] = {"learner": learner, "seed": options.seed, "groups": groups}
    missing: tuple[int, ...] = ()
    found: Beliefs | Residuals
    if network.kind == "regression":
        if options.probes.labels_before is not None:
            raise UsageError("labels_before has no effect on labels that are numbers: leave it out.")
        if not all(np.isfinite(side).all() for side in labels):
            raise UsageError("some labels are NaN or infinite: leave these examples out.")
        features = _without_constants(*(_features(network, side, records) for side in (data.source, data.target)))
        found = cross_fit_values(features[0], labels[0], features[1], labels[1], **settings)
        evidence = Evidence.of_values(found, found.predicted)
    else:
        if too_many_classes(data.source, data.target):
            raise UsageError(
                f"{len(data.source) + len(data.target):,} examples of {network.outputs:,} classes are too many for a "
                "first answer: use soseleto.fit, or fewer examples."
            )
        if not enough_trusted(data.target):
            raise UsageError(
                "the target needs two examples each of at least two classes, of different groups: give more of them."
            )
        features = _without_constants(*(_features(network, side, records) for side in (data.source, data.target)))
        missing = data.classes_without_target()
        before = data.labels_before if options.probes.labels_before is None else options.probes.labels_before
        if before is not None:
            before = checked_before(before, data.target.labels.cpu(), classes).numpy()
        found = cross_fit(features[0], labels[0], features[1], labels[1], classes=classes, before=before, **settings)
        evidence = Evidence.of(found, missing)
    learned = _weights(found)
    records.epoch({"epoch": 1, "epochs": 1, "step": 1, **weight_record(learned, data.source, Single())})
    model = with_solution(network.model, found.model, classes)
    answer = FirstAnswer(
        model=model,
        source=data.source,
        history=records.history,
        messages=records.messages,
        prepare=network.prepare,
        device=device,
        learned=learned,
        loss=options.loss[1],
        task=network.kind,
        classes=data.target.classes,
        out=None if records.folder is None else records.folder.path,
        config=config,
        evidence=evidence,
        missing=missing,
        suspect_precision=options.probes.precision,
        features=features,
        labels=labels,
        groups=groups,
        learner=learner,
        seed=options.seed,
    )

    def write(folder: RunFolder) -> None:
        write_result(folder, answer, network.model.state_dict())
        if isinstance(model, Learned):
            folder.write_learner(to_bytes(found.model))
        judged = rows(compared(found, data.target))
        folder.write_json(COMPARISON, {"judged_on": "target", "folds": FOLDS, "rows": judged})

    records.end({"seconds": round(records.seconds, 3)}, write)
    return answer


def _weights(found: Beliefs | Residuals) -> Weights:
    weights = found.weights if isinstance(found, Residuals) else found.belief
    learned = Weights(len(found.labels))
    state = {"weights": weights, "scores": found.right, "visits": np.full(len(found.labels), 1 + ROUNDS)}
    like = learned.state()
    learned.load_state({name: torch.from_numpy(np.asarray(of)).to(like[name].dtype) for name, of in state.items()})
    return learned


def compared(found: Beliefs | Residuals, target: ExampleSet) -> list[Judged]:
    """The classifiers or regressions beside each other on the target, each example held out of its own training."""
    groups = target.groups if isinstance(target, Examples) else None
    places, labels = torch.arange(len(found.trusted_labels)), torch.from_numpy(found.trusted_labels)
    ours = found.trusted_predicted if isinstance(found, Residuals) else found.trusted_probabilities
    held_out = {SOSELETO: ours, **found.rivals}
    return [Judged(name, torch.from_numpy(said), labels, places, groups) for name, said in held_out.items()]


def _features(network: Network, examples: ExampleSet, records: Records) -> Array:
    def watch(done: int, of: int) -> None:
        records.step({}, {"epoch": 1, "step": done, "steps": of})

    def made(rows: ExampleSet, watch: Callable[[int, int], None] = watch) -> Array:
        return features_of_set(network.model, network.prepare, rows, network.prepare.evaluation_batch, watch)

    layer = last_linear(network.model)
    head = {id(value) for value in (layer.parameters() if layer is not None else ())}
    values = {**dict(network.model.named_parameters()), **dict(network.model.named_buffers())}
    body = {name: value for name, value in values.items() if id(value) not in head}
    if not body or not isinstance(examples, Examples):  # features that are nearly the inputs, or read as they come
        return made(examples)
    key = content_of((body, examples.inputs))
    key.update(f"{network.model}{as_json(network.prepare.describe())}".encode())
    few = examples.subset(torch.arange(min(CHECKED, len(examples))))
    return kept_features(key.hexdigest(), lambda: made(examples), lambda: made(few, lambda done, of: None))


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
    if isinstance(network, InUnits):
        weight, bias = weight / network.label_deviation, (bias - network.label_mean) / network.label_deviation
    with torch.no_grad():
        layer.weight.copy_(weight)
        if layer.bias is not None:
            layer.bias.copy_(bias)
    return network


def linear_solution(learner: Any, classes: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Weight (classes, d) and bias of a linear model, perhaps behind a StandardScaler; None of another learner."""
    from sklearn.linear_model import LogisticRegression, RidgeCV
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import StandardScaler

    *scalers, last = [step for _, step in learner.steps] if isinstance(learner, Pipeline) else [learner]
    if type(last) not in (LogisticRegression, RidgeCV) or any(type(step) is not StandardScaler for step in scalers):
        return None
    slope, constant = np.atleast_2d(last.coef_).astype(float), np.atleast_1d(last.intercept_).astype(float)
    if isinstance(last, LogisticRegression) and len(slope) == 1:  # of two classes: log p₁ − log p₀
        slope, constant = np.concatenate([-slope, slope]) / 2, np.concatenate([-constant, constant]) / 2
    for scaler in reversed(scalers):
        slope = slope / scaler.scale_
        constant = constant - slope @ scaler.mean_
    if isinstance(last, RidgeCV):
        return slope, constant
    weight, bias = np.zeros((classes, slope.shape[1])), np.full(classes, LEAST)
    weight[last.classes_], bias[last.classes_] = slope, constant
    return weight, bias
