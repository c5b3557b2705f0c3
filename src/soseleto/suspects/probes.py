"""Probes: target examples planted among the source, some with their true label and some with a wrong one.

It is unknown which source labels are wrong, but known for the probes. So the probes calibrate the signals that separate
wrong from right labels during training, and measure how well they do.

This assumes that wrong probes are like wrong source labels. By default a wrong probe gets any other class with equal
probability. If the labels that the target's examples had before they were checked are known, for example because the
target was picked from the source, probes get these instead, and mistakes of any kind are matched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from soseleto.data import Examples, ExampleSet, generator
from soseleto.data.joined import Joined
from soseleto.data.structure import change, concatenate, to_device
from soseleto.errors import UsageError

Share = float | Literal["auto"]
FEWEST, FEWEST_WRONG = 10, 3
# "auto": this share of the target, but at most AUTO_MOST probes and a fifth of the source
AUTO_SHARE, AUTO_MOST = 0.3, 1500


@dataclass(frozen=True)
class PlantedProbes:
    """m probes, appended to the n source examples: their labels as planted, and their true labels.

    checked: the number of target examples and of their wrong labels, if their labels from before a check are known
    """

    n_source: int
    labels: Tensor
    truth: Tensor
    checked: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def wrong(self) -> Tensor:
        return self.labels != self.truth

    def without(self, planted: ExampleSet) -> ExampleSet:
        """The source without the appended probes; inputs and labels share the memory of ``planted``."""
        if isinstance(planted, Joined):
            return planted.first
        assert isinstance(planted, Examples)
        n = self.n_source
        return replace(
            planted,
            inputs=change(lambda tensor: tensor[:n], planted.inputs),
            labels=planted.labels[:n],
            ids=None if planted.ids is None else planted.ids[:n],
            truth=None if planted.truth is None else planted.truth[:n],
            paths=None if planted.paths is None else planted.paths[:n],
        )


@dataclass(frozen=True)
class Planted:
    """Source and target after planting: the probes are appended to the source and removed from the target."""

    source: ExampleSet
    target: ExampleSet
    probes: PlantedProbes


def plant(
    source: ExampleSet, target: ExampleSet, share: Share, *, seed: int, labels_before: Tensor | None = None
) -> Planted:
    """Move ``share`` of the target, the same share of each class, to the end of the source.

    Every second probe of a class gets a wrong label. With ``labels_before`` (one for each target example) probes get
    these: as many wrong ones as right ones, but at most half of all wrong ones, so that the target keeps examples that
    were mislabelled.
    """
    classes = _classes(source, target)
    truth = target.labels.cpu()
    m = _number(share, len(source), len(target))
    if labels_before is None:
        chosen = _in_proportion(truth, m, classes, seed)
        shift = torch.randint(1, classes, (m,), generator=generator(seed, "probes/labels"))
        labels = (truth[chosen] + shift * (torch.arange(m) % 2)) % classes
        probes = PlantedProbes(len(source), labels, truth[chosen])
    else:
        before = _checked_before(labels_before, truth, classes)
        chosen = _some_of_both(before != truth, truth, m, classes, seed)
        checked = (len(truth), int((before != truth).sum()))
        probes = PlantedProbes(len(source), before[chosen], truth[chosen], checked)
    left = torch.ones(len(target), dtype=torch.bool)
    left[chosen] = False
    return Planted(_behind(source, target.subset(chosen), probes), target.subset(left), probes)


def _checked_before(labels: Tensor, truth: Tensor, classes: int) -> Tensor:
    labels = torch.as_tensor(labels).cpu().to(torch.int64)
    if labels.shape != truth.shape or int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise UsageError(
            f"labels_before must hold one class index from 0 to {classes - 1} for each of the {len(truth)} target "
            f"examples, got shape {tuple(labels.shape)}: give the labels they had before they were checked."
        )
    wrong = int((labels != truth).sum())
    if not 2 * FEWEST_WRONG <= wrong <= len(labels) - 2 * FEWEST_WRONG:
        raise UsageError(
            f"{wrong} of the {len(labels)} labels_before differ from the target's labels: at least {2 * FEWEST_WRONG} "
            "must differ and as many be equal; leave labels_before out to have wrong labels drawn at random."
        )
    return labels


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


def _number(share: Share, n_source: int, n_target: int) -> int:
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


def _classes(source: ExampleSet, target: ExampleSet) -> int:
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
    if not isinstance(source, Examples) or not isinstance(taken, Examples):
        return Joined(source, taken, probes.labels)
    device = source.device
    ids = None
    if source.ids is not None:
        ids = (*source.ids, *(f"probe {name}" for name in taken.ids or ()))
    paths = None if source.paths is None else (*source.paths, *(taken.paths or [""] * len(taken)))
    truth = None if source.truth is None else torch.cat([source.truth, probes.truth.to(source.truth.device)])
    return replace(
        source,
        inputs=concatenate([source.inputs, to_device(taken.inputs, device)]),
        labels=torch.cat([source.labels, probes.labels.to(device)]),
        ids=ids,
        paths=paths,
        truth=truth,
    )
