"""Probes: target examples planted among the source, which show how right labels look to the training.

It is unknown which source labels are right, but known for the probes, and the training treats both alike. So the share
of probes below a score is how often a right label falls there (rates.py), whatever the mistakes are. If the labels that
the target's examples had before they were checked are known, probes get these: the wrong ones among them are counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from soseleto.data import Examples, ExampleSet, generator
from soseleto.data.lazy import LazyDataset
from soseleto.data.structure import concatenate, to_device
from soseleto.errors import UsageError
from soseleto.suspects.cross_fit import Array, Judgement

Share = float | Literal["auto"]
FEWEST = 10  # probes
FEWEST_WRONG = 6  # labels from before a check that differ, and as many that do not
# "auto": this share of the target, but at most AUTO_MOST probes and a fifth of the source
AUTO_SHARE, AUTO_MOST = 0.3, 1500
FAR = 4.0  # signals are clipped at this many standard deviations


@dataclass(frozen=True)
class PlantedProbes:
    """m probes, appended to the n source examples: their labels as planted, and their true labels.

    earlier: whether the labels are those from before a check of the target
    """

    n_source: int
    labels: Tensor
    truth: Tensor
    earlier: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def judgement(self, labels: Tensor, signals: Mapping[str, Tensor], probabilities: Tensor) -> Judgement:
        """What a training says of the labels of the n source examples.

        signals: by name (n + m,), each a trust: the higher, the more probably the label is right
        probabilities: (n + m, classes) of the trained model
        """
        n = self.n_source
        trust = np.mean([_standardized(signal.double().cpu().numpy(), n) for signal in signals.values()], axis=0)
        of_source, of_probes = np.split(probabilities.double().cpu().numpy(), [n])
        return Judgement(
            right=trust[:n],
            of_trusted=trust[n:],
            probabilities=of_source,
            trusted_probabilities=of_probes,
            labels=labels.cpu().numpy(),
            trusted_labels=self.truth.cpu().numpy(),
            before=self.labels.cpu().numpy() if self.earlier else None,
        )


def _standardized(signal: Array, reference: int) -> Array:
    """Centred and scaled robustly by the first ``reference`` entries, and clipped at ±FAR."""
    first = signal[:reference]
    low, middle, high = np.quantile(first, [0.16, 0.5, 0.84])  # ± one standard deviation of a normal distribution
    spread = (high - low) / 2 or first.std() or 1.0
    return np.asarray(np.clip((signal - middle) / spread, -FAR, FAR))


def plant(
    source: ExampleSet,
    target: ExampleSet,
    share: Share,
    *,
    seed: int,
    labels_before: Tensor | None = None,
    among: Tensor | None = None,
) -> tuple[ExampleSet, ExampleSet, PlantedProbes]:
    """Move ``share`` of the target to the end of the source; every class has its share of the probes.

    Returns source and target after planting, and the probes.

    among: (m,) which examples may be probes, if they are enough: those without copies, which would be trained on as
        target or source too

    With ``labels_before`` (one for each target example, -1 where it is unknown) probes are taken from those that have
    one, and get these labels; those of a class without target examples are left out.
    """
    classes = class_count_of_both(source, target)
    truth = target.labels.cpu()
    enough = among is not None and int(among.sum()) >= FEWEST
    labels, known = truth, among if among is not None and enough else torch.ones(len(truth), dtype=torch.bool)
    if labels_before is not None:
        labels = checked_before(labels_before, truth, classes)
        known = known & torch.isin(labels, truth.unique())
    places = known.nonzero().flatten()
    m = min(number_of_probes(share, len(source), len(target)), len(places))
    if m < FEWEST:
        raise UsageError(
            f"{len(places)} target examples can be probes, and at least {FEWEST} are needed: say probes=0, or leave "
            "labels_before out."
        )
    chosen = places[_in_proportion(truth[places], m, classes, seed)]
    left = torch.ones(len(target), dtype=torch.bool)
    left[chosen] = False
    probes = PlantedProbes(len(source), labels[chosen], truth[chosen], labels_before is not None)
    return _behind(source, target.subset(chosen), probes), target.subset(left), probes


def checked_before(labels: Tensor, truth: Tensor, classes: int) -> Tensor:
    """Labels from before a check of the trusted examples with the labels ``truth``, as int64."""
    labels = torch.as_tensor(labels).cpu().to(torch.int64)
    if labels.shape != truth.shape or int(labels.min()) < -1 or int(labels.max()) >= classes:
        raise UsageError(
            f"labels_before must hold one class index from 0 to {classes - 1} for each of the {len(truth)} target "
            f"examples, got shape {tuple(labels.shape)}: give the labels they had before they were checked."
        )
    known = labels >= 0
    if not enough_of_both(wrong := int((labels != truth)[known].sum()), int(known.sum())):
        raise UsageError(
            f"{wrong} of the {int(known.sum())} labels_before differ from the target's labels: at least "
            f"{FEWEST_WRONG} must differ and as many be equal; leave labels_before out."
        )
    return labels


def enough_of_both(wrong: int, of: int) -> bool:
    """Whether labels from before a check say anything, given how many of them were wrong."""
    return FEWEST_WRONG <= wrong <= of - FEWEST_WRONG


def number_of_probes(share: Share, n_source: int, n_target: int) -> int:
    """The number of probes."""
    if share == "auto":
        m = min(round(AUTO_SHARE * n_target), AUTO_MOST, n_source // 5)
    elif isinstance(share, float) and 0.0 < share < 1.0:
        m = round(share * n_target)
    else:
        raise UsageError(f"probes must be a share of the target between 0 and 1, or 'auto', got {share!r}.")
    if not FEWEST <= m < n_target:
        raise UsageError(
            f"probes={share!r} of {n_target} target and {n_source} source examples are {m} probes: at least {FEWEST} "
            "are needed, and at least one target example must remain; give more examples, or say probes=0."
        )
    return m


def class_count_of_both(source: ExampleSet, target: ExampleSet) -> int:
    """The number of classes of source and target."""
    if isinstance(source, LazyDataset):
        raise UsageError(
            "probes lie among a source in memory, and this one is read in every epoch: say probes=0, and take the "
            "suspects of soseleto.scan."
        )
    labels = [side.sample_labels() for side in (source, target)]
    if any(each.is_floating_point() or each.ndim != 1 for each in labels):
        raise UsageError("probes need class labels, one index per example: say probes=0.")
    sides = zip((source, target), labels, strict=True)
    classes = max(len(side.classes or ()) or int(each.max()) + 1 for side, each in sides)
    if classes < 2:
        raise UsageError("probes need two classes or more, and this data has one: say probes=0.")
    return classes


def _in_proportion(labels: Tensor, m: int, classes: int, seed: int) -> Tensor:
    """m indices, drawn from each class in proportion; one example of each class is left as long as that is possible.

    So probes are distributed like the examples they are drawn from, and the target keeps all its classes.
    """
    counts = labels.bincount(minlength=classes)
    due = m * counts.double() / len(labels)
    taken = torch.minimum(due.long(), (counts - 1).clamp_min(0))
    while (missing := m - int(taken.sum())) > 0:
        spare = counts - 1 - taken if int((counts - 1 - taken).clamp_min(0).sum()) else counts - taken
        after = (due - taken).masked_fill(spare <= 0, -math.inf).topk(min(missing, int((spare > 0).sum())))
        taken[after.indices] += 1
    order = torch.randperm(len(labels), generator=generator(seed, "probes/draw"))
    by_class = order[labels[order].argsort(stable=True)]
    return torch.cat([part[:n] for part, n in zip(by_class.split(counts.tolist()), taken.tolist(), strict=True)])


def _behind(source: ExampleSet, taken: ExampleSet, probes: PlantedProbes) -> ExampleSet:
    """One data set: the source examples, then the probes."""
    names = [f"probe {taken.id_of(at)}" for at in range(len(taken))]
    if not isinstance(taken, Examples):  # few: what is random in them is drawn once
        taken = Examples(*taken.take(torch.arange(len(taken))))
    assert isinstance(source, Examples)
    device = source.device
    ids = None if source.ids is None else (*source.ids, *names)
    paths = None if source.paths is None else (*source.paths, *(taken.paths or [""] * len(taken)))
    truth = None if source.truth is None else torch.cat([source.truth, probes.truth.to(source.truth.device)])
    return replace(
        source,
        inputs=concatenate([source.inputs, to_device(taken.inputs, device)]),
        labels=torch.cat([source.labels, probes.labels.to(device)]),
        ids=ids,
        paths=paths,
        truth=truth,
        groups=None,
    )
