"""The data of a training: source, target, batch sizes, how many labels seem wrong, and the planted probes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from soseleto.data import (
    Examples,
    ExampleSet,
    LazyDataset,
    TargetCycle,
    as_example_set,
    check_mode,
    generator,
    read_pair,
    seed_for,
    structure,
)
from soseleto.data.batches import Batch
from soseleto.data.examples import in_pieces
from soseleto.data.feeding import Prepare, match_input_range
from soseleto.data.preparation import Preparation
from soseleto.data.reading import some
from soseleto.defaults import Settings
from soseleto.engines.model_state import sharded_modules
from soseleto.errors import UsageError, counted
from soseleto.models.learned import last_inputs
from soseleto.models.trunk_and_heads import evaluation_mode
from soseleto.parallel.micro_batches import Sharing
from soseleto.pieces.last_layer import no_last_layer
from soseleto.suspects import mistakes, probes
from soseleto.suspects.probes import Planted, PlantedProbes, class_count_of_both, enough_of_both, number_of_probes
from soseleto.suspects.signals import features_of
from soseleto.task.losses import NoisyLosses
from soseleto.training.options import Balanced, Probes, require_size


@dataclass(frozen=True)
class Data:
    """Source and target; the probes, if any, are at the end of the source and no longer in the target."""

    source: ExampleSet
    target: ExampleSet
    probes: PlantedProbes | None = None
    columns: tuple[str, ...] | None = None  # the names of a table's features
    labels_before: Tensor | None = None  # of target examples that were found in the source, -1 for the others
    # the target's labels, by id, of source examples that were left out because they are also in the target
    checked: Mapping[str, str] = field(default_factory=dict)
    preparation: Preparation | None = None  # of a table

    @classmethod
    def read(cls, source: Any, target: Any, mode: str) -> Data:
        """Files are read as a pair, with one list of classes and every check; arrays and Datasets are taken as is."""
        check_mode(mode)
        if any(isinstance(data, (str, Path)) for data in (source, target)):
            if any(isinstance(data, LazyDataset) for data in (source, target)):
                raise UsageError(
                    "a path cannot stand beside data that is read in every epoch, since classes are matched among "
                    "files only: give all of them as Datasets."
                )
            pair = read_pair(source, target, None, mode=mode)
            return cls(
                pair.source,
                pair.target,
                columns=pair.columns,
                labels_before=found_before(pair.labels_before, pair.target),
                checked=pair.checked,
                preparation=pair.preparation,
            )._in_one_range()
        data = cls(as_example_set(source, name="source"), as_example_set(target, name="target"))
        data._require_same_classes(mode)
        return data._in_one_range()

    def _in_one_range(self) -> Data:
        """The target in bytes where the source is."""
        if self.preparation is not None or not isinstance(self.target, Examples):
            return self
        first, _ = self.source.take(torch.tensor([0]))
        trained = first.dtype if isinstance(first, Tensor) else None
        inputs = match_input_range(self.target.inputs, trained, "the target")
        return self if inputs is self.target.inputs else replace(self, target=replace(self.target, inputs=inputs))

    def _require_same_classes(self, mode: str) -> None:
        source, target = self.source.classes, self.target.classes
        if mode == "noisy" and source is not None and target is not None and source != target:
            raise UsageError(
                f"the source has the classes {some(source)} and the target {some(target)}: give both the same list in "
                "the same order, as by classes=."
            )

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        """The columns of a table that a ranking shows."""
        return self.columns if self.preparation is None else self.preparation.shown

    @property
    def beside(self) -> tuple[str, ...]:
        """The columns that a ranking shows as they are in the table."""
        return () if self.preparation is None else self.preparation.beside

    @property
    def own_source(self) -> ExampleSet:
        """The source without the probes."""
        return self.source if self.probes is None else self.probes.without(self.source)

    def classes_without_target(self) -> tuple[int, ...]:
        """The classes of the source that no target example has; read after planting."""
        source, target = self.own_source.labels.cpu(), self.target.labels.cpu()
        if source.is_floating_point() or source.ndim != 1:
            return ()
        known = set(target.tolist()) | set(() if self.probes is None else self.probes.truth.tolist())
        return tuple(sorted(set(source.unique().tolist()) - known))

    def with_probes(self, planted: Planted) -> Data:
        return replace(self, source=planted.source, target=planted.target, probes=planted.probes)

    def require_shareable(self, sharing: Sharing, probes: Probes, mode: str) -> None:
        """Raise for data that probes, or the ranks or micro-batches of this training, cannot work on."""
        if probes.share and mode != "noisy":
            raise UsageError("probes need source and target of the same classes: write mode='noisy', or probes=None.")
        if probes.share and not sharing.nothing:
            raise UsageError("probes need one process and whole batches: write probes=None, or leave those out.")
        if probes.share:
            class_count_of_both(self.source, self.target)
            number_of_probes(probes.share, len(self.source), len(self.target))
        ranks = sharing.reducer.ranks
        if len(self.source) < ranks:
            raise UsageError(
                f"{ranks} ranks are too many for {counted(len(self.source), 'source example')}: start fewer."
            )

    def fingerprints(self) -> dict[str, str | None]:
        """Of both sets; computed before they are moved to a GPU, since every byte is read."""
        return {
            "source_fingerprint": self.own_source.fingerprint(),
            "target_fingerprint": self.target.fingerprint(),
        }

    def to(self, device: torch.device) -> Data:
        return replace(
            self,
            source=on_device(self.source, device),
            target=on_device(self.target, device),
        )


def found_before(labels: Tensor | None, target: ExampleSet) -> Tensor | None:
    """Labels from before a check that were found in the source, where enough of them differ from the target's."""
    if labels is None:
        return None
    known = labels >= 0
    wrong = int((labels != target.labels.cpu())[known].sum())
    return labels if enough_of_both(wrong, int(known.sum())) else None


def on_device(examples: ExampleSet, device: torch.device) -> ExampleSet:
    """The examples on the model's device if they fit there beside it, otherwise where they are."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return examples.to(device) if examples.nbytes < free // 2 else examples
    return examples.to(device)


@dataclass(frozen=True)
class BatchSizes:
    """Examples per step of each side."""

    source: int
    target: int
    balanced: bool  # the target's batches, by class

    @classmethod
    def of(cls, data: Data, settings: Settings) -> BatchSizes:
        target, balanced = settings.target_batch_size, isinstance(settings.target_batch_size, Balanced)
        assert settings.batch_size is not None  # since the size of the source is known
        sizes = cls(settings.batch_size, target.size if balanced else target, balanced)
        _require_at_most("batch_size", sizes.source, data.source)
        _require_at_most("target_batch_size", sizes.target, data.target)
        return sizes

    def target_cycle(self, target: ExampleSet, seed: int) -> TargetCycle:
        return TargetCycle(len(target), self.target, seed, target.labels.cpu() if self.balanced else None)

    def describe(self) -> dict[str, Any]:
        return {"batch_size": self.source, "target_batch_size": self.target, "balanced_target": self.balanced}


def _require_at_most(name: str, size: int, examples: ExampleSet) -> None:
    require_size(name, size)
    side, n = "target" if name.startswith("target") else "source", len(examples)
    if size > n:
        raise UsageError(
            f"{name} is {size}, but the {side} has only {counted(n, 'example')}: write {name}={n} or less."
        )


def classes_of(examples: ExampleSet, side: str) -> int:
    """The number of classes of a side."""
    count = class_count(examples)
    if count is None:
        raise UsageError(f"the {side} labels are not class indices: pass a head, as in heads=Heads({side}=...).")
    return count


def class_count(examples: ExampleSet, outputs: int | None = None) -> int | None:
    """The number of classes, or None where labels are not class indices.

    outputs: of the classifier; the number of classes of a set whose labels are not read in advance
    """
    if not are_class_indices(examples.sample_labels()):
        return None
    if examples.classes is not None:
        return len(examples.classes)
    if outputs is not None and examples.reads_ahead:
        return outputs
    return int(examples.labels.max()) + 1


def class_shares(examples: ExampleSet, classes: int) -> Tensor:
    """The share of every class, (C,) float32."""
    return torch.bincount(examples.labels.cpu(), minlength=classes).float() / len(examples)


def are_class_indices(labels: Tensor) -> bool:
    """One integer per example."""
    return labels.ndim == 1 and not labels.is_floating_point()


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, the global random state follows from the seed; afterwards it is as it was."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed_for(seed, "training"))
        yield


_PHRASES = ("out of memory", "can't allocate memory", "not enough memory")


def is_out_of_memory(error: Exception) -> bool:
    """PyTorch has an exception for it on a GPU, and several messages on a CPU."""
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in _PHRASES)


# What is known about the labels before the training: how many are wrong, and probes planted among the source


@dataclass(frozen=True)
class Labels:
    """The labels of a classification, judged by the network before training.

    before: the configuration of an unfinished run that is to be continued. Its estimates are taken over, since one
        that differs a little on another machine must not make it another run.
    known_share: the lower end of the share of wrong labels, where a first answer has estimated it
    """

    model: nn.Module
    prepare: Prepare
    source: ExampleSet
    target: ExampleSet
    seed: int
    before: Mapping[str, Any]
    known_share: float | None = None

    @cached_property
    def mistakes(self) -> mistakes.Mistakes | None:
        """The estimated mistakes of the source; None where nothing can be estimated."""
        sides = self.source, self.target
        if sharded_modules(self.model):
            return None
        classes = max(len(side.classes or ()) or int(side.sample_labels().max()) + 1 for side in sides)
        if classes < 2 or not mistakes.can_estimate(len(self.target), classes):
            return None
        try:
            return estimate_mistakes(self.model, self.prepare, *sides, classes, seed=self.seed)
        except Exception as error:
            if is_out_of_memory(error):  # the training does not fit either, and says what would
                return None
            raise

    @property
    def wrong_share(self) -> float | None:
        """Lower end of the estimated share of wrong source labels."""
        if "wrong_share" in self.before:
            return float(self.before["wrong_share"])
        if self.known_share is not None:
            return self.known_share
        return None if self.mistakes is None else self.mistakes.share[0]

    @property
    def ends_in_linear(self) -> bool:
        """Whether the model has last-layer alignments, found by one pass in evaluation mode."""
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        inputs, labels = structure.to_device(self.source.take(torch.tensor([0])), device)
        example = Batch(torch.zeros(1, dtype=torch.int64, device=device), self.prepare(inputs), labels)
        with evaluation_mode(self.model):
            return no_last_layer(NoisyLosses(), self.model, example) is None


def with_probes(data: Data, options: Probes, labels: Labels | None, before: Mapping[str, Any], *, seed: int) -> Data:
    """The data with probes planted; ``labels``: of a classification; ``before``: as in ``Labels``."""
    if options.share == 0:
        return data
    planted = before.get("planted")
    if isinstance(planted, Mapping) and (again := probes.plant_again(data.source, data.target, planted)) is not None:
        return data.with_probes(again)
    labels_before = data.labels_before if options.labels_before is None else options.labels_before
    estimated = labels.mistakes if labels_before is None and labels is not None else None
    return data.with_probes(
        probes.plant(
            data.source,
            data.target,
            options.share,
            seed=seed,
            labels_before=labels_before,
            mistakes=estimated,
        )
    )


def estimate_mistakes(
    model: nn.Module, prepare: Prepare, source: ExampleSet, target: ExampleSet, classes: int, *, seed: int
) -> mistakes.Mistakes:
    """From some of the source: features are the inputs, and those of the network before training."""
    some = torch.randperm(len(source), generator=generator(seed, "probes/some"))[: mistakes.MOST_SOURCE]
    source = source.subset(some)
    trusted = torch.isin(source.labels.cpu(), target.labels.cpu())  # of another class nothing can be estimated
    if trusted.any() and not trusted.all():
        source = source.subset(trusted)
    return mistakes.estimate(
        _blocks(model, prepare, source, seed),
        source.labels.cpu().numpy(),
        _blocks(model, prepare, target, seed),
        target.labels.cpu().numpy(),
        classes,
        np.random.default_rng(seed_for(seed, "probes/estimate")),
    )


def _blocks(model: nn.Module, prepare: Prepare, examples: ExampleSet, seed: int) -> list[np.ndarray]:
    """Features of the examples: their inputs, where these are numbers, and those of the network before training."""
    inputs, features = [], []
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def outputs(prepared: structure.Inputs) -> Tensor:
        return structure.scores_of(structure.call(model, prepared))

    with seeded(seed, device), evaluation_mode(model), torch.no_grad(), last_inputs(model) as seen:
        for piece, _ in examples.read(in_pieces(len(examples), prepare.evaluation_batch)):
            prepared = prepare(structure.to_device(piece, device))
            if isinstance(prepared, Tensor) and prepared.is_floating_point():
                inputs.append(prepared)
            features.append(features_of(prepared, outputs, seen)[0])
    blocks = [torch.cat(features)]
    if inputs and len({piece.shape[1:] for piece in inputs}) == 1:
        blocks.append(torch.cat(inputs))
    return [_array(block) for block in blocks]


def _array(block: Tensor) -> np.ndarray:
    return block.flatten(1).double().nan_to_num(0.0, 0.0, 0.0).cpu().numpy()
