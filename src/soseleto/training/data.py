"""The data of a training: source, target, batch sizes, the planted probes, and how many labels seem wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from soseleto.data import (
    Examples,
    ExampleSet,
    LazyDataset,
    as_example_set,
    check_mode,
    generator,
    read_pair,
    seed_for,
    structure,
)
from soseleto.data.batches import Batch
from soseleto.data.examples import in_order
from soseleto.data.feeding import Prepare, match_input_range
from soseleto.data.groups import kept_together
from soseleto.data.preparation import Preparation
from soseleto.data.reading import some
from soseleto.engines.model_state import sharded_modules
from soseleto.errors import UsageError, counted, need
from soseleto.models.trunk_and_heads import evaluation_mode, last_inputs
from soseleto.parallel.micro_batches import Sharing
from soseleto.pieces.last_layer import has_last_layer
from soseleto.suspects import probes
from soseleto.suspects.cross_fit import cross_fit
from soseleto.suspects.probes import PlantedProbes, class_count_of_both, enough_of_both, number_of_probes
from soseleto.suspects.rates import judge
from soseleto.suspects.residuals import FEWEST
from soseleto.task.losses import NoisyLosses
from soseleto.training.options import Probes


@dataclass(frozen=True)
class Data:
    """Source and target; the probes, if any, are at the end of the source and no longer in the target."""

    source: ExampleSet
    target: ExampleSet
    probes: PlantedProbes | None = None
    unplanted: ExampleSet | None = None  # the source without them
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
    def own_source(self) -> ExampleSet:
        """The source without the probes."""
        if self.probes is not None and isinstance(self.source, LazyDataset):  # which learns its labels as it is read
            return self.source.subset(range(self.probes.n_source))
        return self.source if self.unplanted is None else self.unplanted

    def classes_without_target(self) -> tuple[int, ...]:
        """The classes of the source that no target example has; read after planting."""
        source, target = self.own_source.labels.cpu(), self.target.labels.cpu()
        if source.is_floating_point() or source.ndim != 1:
            return ()
        known = set(target.tolist()) | set(() if self.probes is None else self.probes.truth.tolist())
        return tuple(sorted(set(source.unique().tolist()) - known))

    def with_probes(self, options: Probes, *, seed: int) -> Data:
        """With probes planted, if there shall be any."""
        if not options.share:
            return self
        before = self.labels_before if options.labels_before is None else options.labels_before
        groups, alone = groups_of(*kept_together(self.source, self.target)), None
        if groups is not None:  # target examples of whose group there is no other
            _, at, counts = np.unique(np.concatenate(groups), return_inverse=True, return_counts=True)
            alone = torch.from_numpy(counts[at[len(self.source) :]] == 1)
        choices: dict[str, Any] = {"seed": seed, "labels_before": before, "among": alone}
        source, target, planted = probes.plant(self.source, self.target, options.share, **choices)
        return replace(self, source=source, target=target, probes=planted, unplanted=self.source)

    def require_shareable(self, sharing: Sharing, probes: Probes, mode: str) -> None:
        """Raise for data that probes, or the ranks or micro-batches of this training, cannot work on."""
        if not probes.share and probes.labels_before is not None and probes.evidence is None:
            raise UsageError("labels_before has no effect without probes: write share='auto', or leave it out.")
        if probes.share and mode != "noisy":
            raise UsageError("probes need source and target of the same classes: write mode='noisy', or probes=None.")
        if probes.share and not sharing.nothing:
            raise UsageError("probes need one process and whole batches: write probes=None, or leave those out.")
        if probes.share:
            need("sklearn", to="suspects by probes")
            class_count_of_both(self.source, self.target)
            number_of_probes(probes.share, len(self.source), len(self.target))
        ranks = sharing.reducer.ranks
        if len(self.source) < ranks:
            raise UsageError(
                f"{ranks} ranks are too many for {counted(len(self.source), 'source example')}: start fewer."
            )

    def fingerprints(self) -> dict[str, str | None]:
        """Of both sets; computed before they are moved to a GPU, since every byte is read."""
        return {"source_fingerprint": self.own_source.fingerprint(), "target_fingerprint": self.target.fingerprint()}

    def to(self, device: torch.device) -> Data:
        return replace(self, source=on_device(self.source, device), target=on_device(self.target, device))


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


# What is known about the labels before the training: how many are wrong

MOST_JUDGED, MOST_FEATURES = 2000, 256  # source examples and features by which the share of wrong labels is estimated


def wrong_share(model: nn.Module, prepare: Prepare, data: Data, *, seed: int) -> float | None:
    """Lower end of the estimated share of wrong source labels; None where it cannot be estimated.

    By cross-fitted beliefs in some of the labels, on the inputs and the features of the network before training.
    """
    trusted = data.target.labels.cpu()
    # scikit-learn is among the dependencies; where a GPU machine has PyTorch alone, everything but estimates works
    if sharded_modules(model) or not enough_trusted(data.target) or find_spec("sklearn") is None:
        return None
    some = torch.randperm(len(data.source), generator=generator(seed, "share/some"))[:MOST_JUDGED]
    labels = data.source.labels.cpu()[some]
    judged = torch.isin(labels, trusted)  # of another class nothing can be estimated
    source, labels = data.source.subset(some[judged]), labels[judged]
    if not len(labels):
        return None
    try:
        with seeded(seed, next((p.device for p in model.parameters()), torch.device("cpu"))):
            sides = [_blocks(model, prepare, examples) for examples in (source, data.target)]
        of_source, of_target = (np.concatenate(blocks, axis=1) for blocks in zip(*map(_reduced, *sides), strict=True))
        classes = 1 + max(int(labels.max()), int(trusted.max()))
        found = cross_fit(
            of_source,
            labels.numpy(),
            of_target,
            trusted.numpy(),
            classes=classes,
            seed=seed,
            groups=groups_of(source, data.target),
        )
    except Exception as error:
        if is_out_of_memory(error):  # the training does not fit either, and says what would
            return None
        raise
    return judge(found).wrong_share.low


def _blocks(model: nn.Module, prepare: Prepare, examples: ExampleSet) -> list[np.ndarray]:
    """The features of the network, and the inputs where they are numbers."""
    inputs: list[Tensor] = []

    def prepared(batch: structure.Inputs) -> structure.Inputs:
        made = prepare(batch)
        if isinstance(made, Tensor) and made.is_floating_point():
            inputs.append(made.flatten(1).cpu())
        return made

    blocks = [features_of_set(model, prepared, examples, prepare.evaluation_batch)]
    if inputs and len({piece.shape[1] for piece in inputs}) == 1:
        blocks.append(torch.cat(inputs).nan_to_num(0.0, 0.0, 0.0).numpy())
    return blocks


def _reduced(source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The principal components of many features."""
    if source.shape[1] <= MOST_FEATURES:
        return source, target
    from sklearn.decomposition import PCA

    components = PCA(min(MOST_FEATURES, len(source)), svd_solver="randomized", random_state=0).fit(source)
    return components.transform(source), components.transform(target)


def features_of_set(
    model: nn.Module,
    prepare: Callable[[structure.Inputs], structure.Inputs],
    examples: ExampleSet,
    batch: int,
    watch: Callable[[int, int], None] = lambda done, of: None,
) -> np.ndarray:
    """The inputs of the network's last linear layer, (n, d) float32; its outputs where it has no such layer."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    places, made = examples.pieces(batch), []
    with evaluation_mode(model), torch.no_grad(), last_inputs(model) as seen:
        for inputs, _ in examples.read(places):
            seen.clear()
            outputs = structure.scores_of(structure.call(model, prepare(structure.to_device(inputs, device))))
            features = torch.cat(seen) if seen else outputs
            made.append((features if len(features) == len(outputs) else outputs).float().cpu())
            watch(len(made), len(places))
    return in_order(places, made).flatten(1).nan_to_num(0.0, 0.0, 0.0).numpy()


def enough_trusted(target: ExampleSet) -> bool:
    """Whether every fold leaves two classes to learn, or enough numbers."""
    labels = target.labels.cpu().numpy()
    if target.labels.is_floating_point():
        groups = target.groups if isinstance(target, Examples) else None
        return len(np.unique(labels if groups is None else groups.numpy())) >= FEWEST
    if isinstance(target, Examples) and target.groups is not None:
        labels = np.unique(np.stack([target.groups.numpy(), labels]), axis=1)[1]
    return int((np.bincount(labels) >= 2).sum()) >= 2


def groups_of(source: ExampleSet, target: ExampleSet) -> tuple[np.ndarray, np.ndarray] | None:
    if not isinstance(source, Examples) or not isinstance(target, Examples):
        return None
    return None if source.groups is None or target.groups is None else (source.groups.numpy(), target.groups.numpy())


def ends_in_linear(model: nn.Module, prepare: Prepare, source: ExampleSet) -> bool:
    """Whether the model has last-layer alignments, found by one pass in evaluation mode."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    inputs, labels = structure.to_device(source.take(torch.tensor([0])), device)
    example = Batch(torch.zeros(1, dtype=torch.int64, device=device), prepare(inputs), labels)
    with evaluation_mode(model):
        return has_last_layer(NoisyLosses(), model, example)
