"""Probes: target examples planted among the source, some with their true label and some with a wrong one.

It is unknown which source labels are wrong, but known for the probes. So the probes calibrate the signals that separate
wrong from right labels during training, and measure how well they do.

This assumes that wrong probes are like wrong source labels. If the labels that the target's examples had before they
were checked are known, for example because the target was picked from the source, probes get these, and mistakes of any
kind are matched. Otherwise wrong probes are drawn from the mistakes that the data suggest (mistakes.py); where there
are too few target examples to estimate these, a wrong probe gets any other class with equal probability.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from soseleto.data import Examples, ExampleSet, generator, seed_for, storage
from soseleto.data.lazy import LazyDataset
from soseleto.data.structure import change, to_device
from soseleto.errors import UsageError
from soseleto.suspects.mistakes import Mistakes

Share = float | Literal["auto"]
FEWEST, FEWEST_WRONG = 10, 3
# "auto": this share of the target, but at most AUTO_MOST probes and a fifth of the source
AUTO_SHARE, AUTO_MOST = 0.3, 1500


@dataclass(frozen=True)
class PlantedProbes:
    """m probes, appended to the n source examples: their labels as planted, and their true labels.

    checked: the number of target examples and of their wrong labels, if their labels from before a check are known
    share: the interval of the share of wrong labels in the source, if wrong labels were drawn from estimated mistakes
    places: their indices in the target that they were taken from
    """

    n_source: int
    labels: Tensor
    truth: Tensor
    checked: tuple[int, int] | None = None
    share: tuple[float, float] | None = None
    places: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def wrong(self) -> Tensor:
        return self.labels != self.truth

    def describe(self) -> dict[str, Any]:
        """The entries of ``config.json`` from which ``plant_again`` plants the same probes."""
        assert self.places is not None
        return {"places": self.places.tolist(), "labels": self.labels.tolist(), "share": self.share}

    def without(self, planted: ExampleSet) -> ExampleSet:
        """The source without the appended probes; inputs and labels share the memory of ``planted``."""
        if isinstance(planted, LazyDataset):
            return planted.subset(range(self.n_source))
        assert isinstance(planted, Examples)
        n = self.n_source
        return replace(
            planted,
            inputs=change(lambda tensor: tensor[:n], planted.inputs),
            labels=planted.labels[:n],
            ids=None if planted.ids is None else planted.ids[:n],
            truth=None if planted.truth is None else planted.truth[:n],
            paths=None if planted.paths is None else planted.paths[:n],
            groups=None,
        )


@dataclass(frozen=True)
class Planted:
    """Source and target after planting: the probes are appended to the source and removed from the target."""

    source: ExampleSet
    target: ExampleSet
    probes: PlantedProbes


def plant(
    source: ExampleSet,
    target: ExampleSet,
    share: Share,
    *,
    seed: int,
    labels_before: Tensor | None = None,
    mistakes: Mistakes | None = None,
) -> Planted:
    """Move ``share`` of the target to the end of the source, half of it with wrong labels.

    With ``labels_before`` (one for each target example, -1 where it is unknown) probes get these: as many wrong ones as
    right ones, but at most half of all wrong ones, so that the target keeps examples that were mislabelled. With
    ``mistakes`` wrong probes are examples that are often mislabelled, and get labels that they are mistaken for.
    With neither, every second probe of a class gets any other label, and every class has its share of the probes.
    Probes get no label of a class without target examples, since none could get it rightly.
    """
    classes = class_count_of_both(source, target)
    truth = target.labels.cpu()
    present = truth.unique() if len(truth.unique()) > 1 else torch.arange(classes)
    m = number_of_probes(share, len(source), len(target))
    if labels_before is not None:
        before = _checked_before(labels_before, truth, classes)
        known = torch.isin(before, present).nonzero().flatten()
        wrong = (before != truth)[known]
        chosen = known[_some_of_both(wrong, truth[known], min(m, len(known)), classes, seed)]
        probes = PlantedProbes(len(source), before[chosen], truth[chosen], (len(known), int(wrong.sum())))
    elif mistakes is not None:
        chosen, labels = _mistaken(mistakes, truth, m, present, seed)
        probes = PlantedProbes(len(source), labels, truth[chosen], share=mistakes.share)
    else:
        chosen = _in_proportion(truth, m, classes, seed)
        shift = torch.randint(1, len(present), (m,), generator=generator(seed, "probes/labels"))
        labels = present[(torch.searchsorted(present, truth[chosen]) + shift * (torch.arange(m) % 2)) % len(present)]
        probes = PlantedProbes(len(source), labels, truth[chosen])
    return _moved(source, target, probes, chosen)


def plant_again(source: ExampleSet, target: ExampleSet, kept: Mapping[str, Any]) -> Planted | None:
    """With the probes that ``PlantedProbes.describe`` returned; None where they are not of this target."""
    places, labels = (torch.tensor(kept[name], dtype=torch.int64) for name in ("places", "labels"))
    if not len(places) or int(places.max()) >= len(target):
        return None
    low, high = kept["share"]
    truth = target.labels.cpu()[places]
    return _moved(source, target, PlantedProbes(len(source), labels, truth, share=(low, high)), places)


def _moved(source: ExampleSet, target: ExampleSet, probes: PlantedProbes, places: Tensor) -> Planted:
    left = torch.ones(len(target), dtype=torch.bool)
    left[places] = False
    probes = replace(probes, places=places)
    return Planted(_behind(source, target.subset(places), probes), target.subset(left), probes)


def _mistaken(mistakes: Mistakes, truth: Tensor, m: int, present: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """The indices and the labels of m probes, the wrong ones first; the target keeps one example of each class."""
    draw = np.random.default_rng(seed_for(seed, "probes/mistakes"))
    order = draw.permutation(len(truth))
    _, first = np.unique(truth.numpy()[order], return_index=True)
    free = np.ones(len(truth), dtype=bool)
    free[order[first]] = len(truth) - len(first) < m  # kept in the target, if there are enough others
    wrong = _weighted(np.flatnonzero(free), mistakes.rates, m // 2, draw)
    free[wrong] = False
    right = _weighted(np.flatnonzero(free), 1.0 - mistakes.rates, m - len(wrong), draw)
    of_wrong = mistakes.labels[wrong]
    sums = (of_wrong * np.isin(np.arange(of_wrong.shape[1]), present.numpy())).cumsum(axis=1)
    labels = (sums < draw.random((len(wrong), 1)) * sums[:, -1:]).sum(axis=1)
    chosen = torch.from_numpy(np.concatenate([wrong, right]))
    return chosen, torch.cat([torch.from_numpy(labels), truth[chosen[len(wrong) :]]])


def _weighted(places: np.ndarray, weights: np.ndarray, count: int, draw: np.random.Generator) -> np.ndarray:
    """``count`` of the places, drawn without replacement with these weights (Efraimidis and Spirakis 2006)."""
    keys = np.log(draw.random(len(places))) / np.maximum(weights[places], 1e-12)
    return places[np.argsort(-keys, kind="stable")[:count]]


def _checked_before(labels: Tensor, truth: Tensor, classes: int) -> Tensor:
    labels = torch.as_tensor(labels).cpu().to(torch.int64)
    if labels.shape != truth.shape or int(labels.min()) < -1 or int(labels.max()) >= classes:
        raise UsageError(
            f"labels_before must hold one class index from 0 to {classes - 1} for each of the {len(truth)} target "
            f"examples, got shape {tuple(labels.shape)}: give the labels they had before they were checked."
        )
    known = labels >= 0
    wrong = int((labels != truth)[known].sum())
    if not enough_of_both(wrong, int(known.sum())):
        raise UsageError(
            f"{wrong} of the {int(known.sum())} labels_before differ from the target's labels: at least "
            f"{2 * FEWEST_WRONG} must differ and as many be equal; leave labels_before out to have mistakes estimated."
        )
    return labels


def enough_of_both(wrong: int, of: int) -> bool:
    """Whether probes can be planted with labels from before a check, of which so many were wrong."""
    return 2 * FEWEST_WRONG <= wrong <= of - 2 * FEWEST_WRONG


def how_many_wrong(m: int, wrong: int, right: int) -> int:
    """How many of m probes are wrong, given the counts of target labels that were wrong and right before the check."""
    return max(min(m // 2, wrong // 2), m - right)


def _some_of_both(wrong: Tensor, truth: Tensor, m: int, classes: int, seed: int) -> Tensor:
    """m indices of the target, wrong and right ones in the proportion described at ``plant``."""
    kinds = (wrong.nonzero().flatten(), (~wrong).nonzero().flatten())
    n_wrong = how_many_wrong(m, len(kinds[0]), len(kinds[1]))
    numbers = (n_wrong, m - n_wrong)
    picks = [k[_in_proportion(truth[k], number, classes, seed)] for k, number in zip(kinds, numbers, strict=True)]
    return torch.cat(picks)


def number_of_probes(share: Share, n_source: int, n_target: int) -> int:
    """The number of probes."""
    if share == "auto":
        m = min(round(AUTO_SHARE * n_target), AUTO_MOST, n_source // 5)
        needed = math.ceil(FEWEST / AUTO_SHARE)
        if m < FEWEST:
            raise UsageError(
                f"probes='auto' needs at least {needed} target and {5 * FEWEST} source examples, got {n_target} target "
                f"and {n_source} source examples: give more, or say probes=0."
            )
        return m
    if not isinstance(share, float) or not 0.0 < share < 1.0:
        raise UsageError(f"probes must be a share of the target between 0 and 1, or 'auto', got {share!r}.")
    m = round(share * n_target)
    if not FEWEST <= m <= n_target - 1:
        raise UsageError(
            f"probes={share} of {n_target} target examples are {m} probes: at least {FEWEST} are needed, and at least "
            "one target example must remain; say probes='auto', or probes=0 for none."
        )
    return m


def class_count_of_both(source: ExampleSet, target: ExampleSet) -> int:
    """The number of classes of source and target."""
    labels = [side.sample_labels() for side in (source, target)]
    if any(each.is_floating_point() or each.ndim != 1 for each in labels):
        raise UsageError("probes need class labels, one index per example: say probes=0.")
    sides = zip((source, target), labels, strict=True)
    classes = max(len(side.classes or ()) or int(each.max()) + 1 for side, each in sides)
    if classes < 2:
        raise UsageError("probes need two classes or more, since half of them get a wrong label: say probes=0.")
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
    if isinstance(source, LazyDataset):
        return source.followed_by(taken, probes.labels, names)
    if not isinstance(taken, Examples):  # few: what is random in them is drawn once
        taken = Examples(*taken.take(torch.arange(len(taken))))
    assert isinstance(source, Examples)
    device = source.device
    ids = None if source.ids is None else (*source.ids, *names)
    paths = None if source.paths is None else (*source.paths, *(taken.paths or [""] * len(taken)))
    truth = None if source.truth is None else torch.cat([source.truth, probes.truth.to(source.truth.device)])
    return replace(
        source,
        inputs=pytree.tree_map(storage.concatenate, source.inputs, to_device(taken.inputs, device)),
        labels=torch.cat([source.labels, probes.labels.to(device)]),
        ids=ids,
        paths=paths,
        truth=truth,
        groups=None,
    )
