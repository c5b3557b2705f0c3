"""The data of a training: source, target and test, the planted probes, and the batch sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soseleto.data import Examples, ExampleSet, LazyDataset, TargetCycle, as_example_set, check_mode, read_pair
from soseleto.data.feeding import match_input_range
from soseleto.data.prepare import Preparation
from soseleto.data.reading import some
from soseleto.errors import UsageError, counted
from soseleto.parallel.micro_batches import Sharing
from soseleto.suspects.probes import Planted, PlantedProbes, class_count_of_both, enough_of_both, number_of_probes
from soseleto.training.defaults import TARGET_BATCH, batch_size_for
from soseleto.training.options import Balanced, Probes, require_whole


@dataclass(frozen=True)
class Data:
    """Source, target and test; the probes, if any, are at the end of the source and no longer in the target."""

    source: ExampleSet
    target: ExampleSet
    test: ExampleSet | None
    probes: PlantedProbes | None = None
    columns: tuple[str, ...] | None = None  # the names of a table's features
    labels_before: Tensor | None = None  # of target examples that were found in the source, -1 for the others
    # the target's labels, by id, of source examples that were left out because they are also in the target
    checked: Mapping[str, str] = field(default_factory=dict)
    preparation: Preparation | None = None  # of a table

    @classmethod
    def read(cls, source: Any, target: Any, test: Any, mode: str) -> Data:
        """Files are read as a pair, with one list of classes and every check; arrays and Datasets are taken as is."""
        check_mode(mode)
        if any(isinstance(data, (str, Path)) for data in (source, target, test)):
            if any(isinstance(data, LazyDataset) for data in (source, target, test)):
                raise UsageError(
                    "a path cannot stand beside data that is read in every epoch, since classes are matched among "
                    "files only: give all of them as Datasets."
                )
            pair = read_pair(source, target, test, mode=mode)
            return cls(
                pair.source,
                pair.target,
                pair.test,
                columns=pair.columns,
                labels_before=found_before(pair.labels_before, pair.target),
                checked=pair.checked,
                preparation=pair.preparation,
            )._on_one_scale()
        made = cls(
            as_example_set(source, name="source"),
            as_example_set(target, name="target"),
            None if test is None else as_example_set(test, name="test"),
        )
        made._require_same_classes(mode)
        return made._on_one_scale()

    def _on_one_scale(self) -> Data:
        """Target and test in bytes where the source is."""
        if self.preparation is not None:
            return self
        first, _ = self.source.take(torch.tensor([0]))
        trained = first.dtype if isinstance(first, Tensor) else None
        target = _like_source(self.target, trained, "the target")
        return replace(self, target=target, test=self.test and _like_source(self.test, trained, "the test set"))

    def _require_same_classes(self, mode: str) -> None:
        one, other = self.source.classes, self.target.classes
        if mode == "noisy" and one is not None and other is not None and one != other:
            raise UsageError(
                f"the source has the classes {some(one)} and the target {some(other)}: give both the same list in the "
                "same order, as by classes=."
            )

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        """The columns of a table that a ranking shows."""
        return self.columns if self.preparation is None else self.preparation.shown

    @property
    def texts(self) -> tuple[str, ...]:
        """The columns of text of a table."""
        return () if self.preparation is None else self.preparation.texts

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
        """Of the three sets; computed before they are moved to a GPU, since every byte is read."""
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


def _like_source(examples: ExampleSet, trained: torch.dtype | None, name: str) -> ExampleSet:
    if not isinstance(examples, Examples):
        return examples
    inputs = match_input_range(examples.inputs, trained, name)
    return examples if inputs is examples.inputs else replace(examples, inputs=inputs)


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
    def of(cls, data: Data, source: int | None, target: int | Balanced | None) -> BatchSizes:
        balanced = isinstance(target, Balanced)
        size = target.size if isinstance(target, Balanced) else target
        n = len(data.target)
        return cls(
            _size("batch_size", batch_size_for(len(data.own_source)) if source is None else source, data.source),
            _size("target_batch_size", min(TARGET_BATCH, n) if size is None else size, data.target),
            balanced,
        )

    def target_cycle(self, target: ExampleSet, seed: int) -> TargetCycle:
        return TargetCycle(len(target), self.target, seed, target.labels.cpu() if self.balanced else None)

    def describe(self) -> dict[str, Any]:
        return {"batch_size": self.source, "target_batch_size": self.target, "balanced_target": self.balanced}


def _size(name: str, size: int, examples: ExampleSet) -> int:
    side, n = "target" if name.startswith("target") else "source", len(examples)
    require_whole(name, size)
    if size < 1:
        raise UsageError(f"{name} must be at least 1, got {size}.")
    if size > n:
        raise UsageError(
            f"{name} is {size}, but the {side} has only {counted(n, 'example')}: write {name}={n} or less."
        )
    return size


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
