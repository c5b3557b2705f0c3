"""``compare``: a training beside its baselines on the same data, all evaluated on the same held-out examples.

With a test set every method is evaluated on that. Without one the target is cut into folds, and each example is
evaluated by a model that was trained without it. Ordinary training does not use the target, so that one training serves
all folds. The model that is kept is SOSELETO's, unless a baseline is better by more than one standard error of the
paired difference. The target alone need only be better where the source does harm: where it beats mixed training too,
beyond the 95 % interval of their difference.

Where the main training has probes, SOSELETO's model has a training of its own in the comparison: the main one
moves a part of its target into the source.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from soseleto import methods
from soseleto.comparison.accuracy import BOOSTING, ON_FEATURES, SCAN, SOSELETO, TITLES, Judged, rows, table, winner
from soseleto.comparison.scan import First, compared, first_answer, too_many_classes, with_solution
from soseleto.data import (
    Augment,
    Examples,
    Pair,
    Reading,
    TablePreparation,
    as_example_set,
    as_examples,
    generator,
    read_pair,
)
from soseleto.data.groups import kept_together, unseen
from soseleto.data.lazy import ExampleSet
from soseleto.data.text import TextPreparation
from soseleto.defaults import DefaultMethod, augment_for, is_pretrained, kind_of_inputs, resolve
from soseleto.errors import TrainingError, UsageError, counted, first_line
from soseleto.methods.strong import Strong
from soseleto.models.learned import Learned, last_linear
from soseleto.models.trunk_and_heads import TrunkAndHeads
from soseleto.parallel.reducer import Reducer, Single
from soseleto.prediction.load import load_run
from soseleto.prediction.predictor import Predictor, fit_temperature
from soseleto.run_folder.folder import CALIBRATION, COMPARISON, FIRST, PARTS, REVIEW, SOURCE, RunFolder
from soseleto.run_folder.source import digest, remember
from soseleto.suspects.probes import AUTO_SHARE, FEWEST, Share
from soseleto.task.losses import Loss, cross_entropy
from soseleto.task.optimizers import describe
from soseleto.task.settings import to_data
from soseleto.task.task import MakeOptimizer, MakeSchedule, Method
from soseleto.training.data import enough_trusted, found_before
from soseleto.training.fit import fit
from soseleto.training.options import (
    Balanced,
    Checkpoints,
    Compute,
    Heads,
    Inputs,
    Probes,
    Progress,
    Watcher,
    as_probes,
)
from soseleto.training.progress import LiveLine
from soseleto.training.resume import comparable, differences, model_fingerprint

BASELINES = ("ordinary", "mixed", "target_only")
BASELINES_IN_TRANSFER = ("target_only",)  # ordinary training has no head for the target's classes
KEEP = ("best", SOSELETO)
FOLDS = 3
FEWEST_TARGET = 4  # examples left to train on beside a fold
MOST_BOOSTED = 1_000_000  # source rows, which scikit-learn holds in memory
MOST_NUMBERS = 30_000_000  # in the inputs of a first answer without a network; more would take minutes
Features = Literal["columns", "pixels", "network"]


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Comparison:
    """A method beside its baselines.

    rows: of every method its accuracy in percent with its 95 % interval, ``low`` to ``high``; of a baseline also
        ``minus_soseleto``, the paired difference in points with its interval
    kept: the model to use; method: the one that it was trained by, ``"soseleto"`` or a baseline
    result: SOSELETO's own training on all data, with the weights, scores and suspects; where that training had ended
        before an interruption, only its model, and the ranking is in the run folder
    """

    rows: list[dict[str, Any]]
    kept: Predictor
    method: str
    result: Predictor
    judged_on: Literal["target", "test"]
    folds: int

    def describe(self) -> str:
        """The accuracies as a text table, and whose model is kept."""
        lines = table({"rows": self.rows, "judged_on": self.judged_on, "folds": self.folds})
        return "\n".join([*lines, f"the model of {TITLES[self.method]} is kept"])

    __repr__ = describe


def compare(
    model: nn.Module | Callable[[], nn.Module],
    source: Any,
    target: Any,
    mode: Literal["noisy", "transfer"] = "noisy",
    *,
    test: Any = None,
    folds: int | None = None,
    baselines: bool | None = None,
    keep: Literal["best", "soseleto"] = "best",
    epochs: int | None = None,
    batch_size: int | None = None,
    target_batch_size: int | Balanced | None = None,
    lr: float | None = None,
    optimizer: MakeOptimizer | tuple[MakeOptimizer, MakeSchedule | None] | None = None,
    loss: Loss | tuple[Loss, Loss] = cross_entropy,
    method: Method | DefaultMethod | None = None,
    inputs: Inputs = Inputs(),
    heads: Heads = Heads(),
    probes: Probes | Share | None = None,
    compute: Compute = Compute(),
    checkpoints: Checkpoints = Checkpoints(),
    seed: int = 0,
    device: str | torch.device = "auto",
    out: str | Path | None = None,
    progress: Watcher | Sequence[Watcher] = False,
) -> Comparison:
    """Train as ``fit`` does, and beside it the baselines on the same data; keep the best model.

    In noisy mode it begins with ``scan``, where the features are columns, small images or those of a pretrained
    network: a first answer, which judges the labels, gives a pretrained network its first head, and is kept where
    training ends below it. The baselines are then trained on the same features, in seconds. Otherwise, and with
    ``baselines=True``, they are ordinary, mixed and target-only trainings of the network, in transfer mode only the
    last; for a table that was read from files also gradient boosting, which is shown and not kept. With ``out`` an
    interrupted comparison is continued: trainings that have ended are not repeated.

    Args:
        model: as in ``fit``, and left as it is: every training gets a copy. Or a function that makes a new one.
        source, target, mode: as in ``fit``; the target must fit into memory.
        test: examples to evaluate on, in place of folds of the target.
        folds: of the target; by default 3, fewer for a tiny target, and 0 with a test set.
        baselines: whether to train them; by default not beside a first answer, which has its own.
        keep: ``"soseleto"`` keeps SOSELETO's model whatever the comparison says.
        method: of SOSELETO's training alone, as are ``probes``; all others are for every training.
        probes: by default ``"auto"`` in noisy mode, if there are enough examples and no first answer judges the labels.
        out: the run folder of SOSELETO's training, with the comparison and the model that is kept; the first answer is
            in its folder ``first`` before the training begins.

    Example:
        >>> x, y = torch.randn(64, 2), torch.randint(2, (64,))
        >>> compared = compare(nn.Linear(2, 2), (x, y), (x[:8], y[:8]), epochs=1)
        >>> [row["method"] for row in compared.rows]
        ['soseleto', 'scan', 'scan_mixed', 'scan_target_only']
    """
    if keep not in KEEP:
        raise UsageError(f"keep must be {' or '.join(map(repr, KEEP))}, got {keep!r}.")
    sha256 = digest(source) if isinstance(source, str | Path) else None
    pair = _pair(source, target, test, mode)
    if inputs.standardize is None and isinstance(pair.preparation, TablePreparation) and pair.preparation.codes:
        inputs = replace(inputs, standardize=pair.preparation)  # codes of categories are no quantities
    make = _maker(model)
    features = features_by(make, pair, mode, compute)
    asked = default_probes(mode, compute, pair, features) if probes is None else as_probes(probes)
    if (asked.share or features is not None) and asked.labels_before is None:
        asked = replace(asked, labels_before=found_before(pair.labels_before, pair.target))
    baselines = features is None if baselines is None else baselines
    if pair.columns is not None:
        checkpoints = replace(checkpoints, notes={**checkpoints.notes, "columns": list(pair.columns)})
    comparing = Comparing(
        make=make,
        features=features,
        pair=pair,
        mode=mode,
        folds=folds_of(folds, pair),
        baselines=baselines,
        keep=keep,
        method=method,
        inputs=inputs,
        heads=heads,
        probes=asked,
        target_batch_size=target_batch_size,
        checkpoints=checkpoints,
        compute=compute,
        seed=seed,
        device=device,
        out=None if out is None else Path(out),
        watchers=_watchers(progress),
        chosen={"epochs": epochs, "batch_size": batch_size, "lr": lr, "optimizer": optimizer, "loss": loss},
    )
    if out is None or not isinstance(source, str | Path) or comparing.team.rank != 0:
        return comparing.run()

    def described(folder: RunFolder) -> None:
        remember_source(folder, source, pair, sha256, Reading())

    comparing.watchers.append(describes_first(Path(out), described))
    comparison = comparing.run()
    described(RunFolder(out))
    return comparison


def describes_first(out: Path, describe: Callable[[RunFolder], None]) -> Progress:
    """A progress function that describes the data of the first answer, as ``rank`` and ``predict`` need it."""
    first = RunFolder(out / FIRST)

    def watch(event: str, record: dict[str, Any]) -> None:
        if event == "start" and first.is_run() and first.has_ended() and not first.has(SOURCE):
            describe(first)

    return watch


def remember_source(folder: RunFolder, source: str | Path, pair: Pair, sha256: str | None, reading: Reading) -> None:
    """Record where the source is, with the features that a report shows."""
    table = pair.preparation
    features, beside = (pair.columns, ()) if table is None else (table.shown, table.beside)
    remember(folder, source, reading, features, sha256, beside, pair.checked)


def _pair(source: Any, target: Any, test: Any, mode: str) -> Pair:
    if any(isinstance(data, str | Path) for data in (source, target, test)):
        return read_pair(source, target, test, mode=mode)
    held_out = None if test is None else as_examples(test, name="test")
    sides = kept_together(as_example_set(source, name="source"), as_examples(target, name="target"))
    if held_out is not None:
        held_out = unseen(held_out, sides)
    return Pair(*sides, held_out)  # type: ignore[arg-type]


def _maker(model: nn.Module | Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    if isinstance(model, nn.Module):
        return lambda: copy.deepcopy(model)
    if not callable(model):
        raise UsageError(f"model must be a module, or a function that makes one, got {type(model).__name__}.")
    return model


def _watchers(progress: Watcher | Sequence[Watcher]) -> list[Watcher]:
    every: list[Any] = list(progress) if isinstance(progress, tuple | list) else [progress]
    return [LiveLine() if watcher is True else watcher for watcher in every]  # one line for all trainings


def default_probes(mode: str, compute: Compute, pair: Pair, features: Features | None) -> Probes:
    """They need one process, whole batches and enough examples of both sides.

    None where a first answer judges the labels; pixels judge worse than a network that is trained on them.
    """
    if features in ("columns", "network"):
        return Probes(share=0.0)
    alone = compute.micro_batch_size is None and (compute.reducer is None or compute.reducer.ranks == 1)
    enough = len(pair.source) >= 5 * FEWEST and len(pair.target) * AUTO_SHARE >= FEWEST
    return Probes(share="auto" if mode == "noisy" and alone and enough else 0.0)


def features_by(make: Callable[[], nn.Module], pair: Pair, mode: str, compute: Compute) -> Features | None:
    """What makes the features of a first answer; None where there is none."""
    labels = pair.target.labels
    alone = compute.reducer is None or compute.reducer.ranks == 1
    if mode != "noisy" or not alone or labels.is_floating_point() or labels.ndim != 1:
        return None
    if not isinstance(pair.source, Examples) or not enough_trusted(pair.target):
        return None
    if too_many_classes(pair.source, pair.target):
        return None
    if is_pretrained(model := make()):
        return "network" if last_linear(model) is not None else None
    inputs = pair.source.inputs
    if not isinstance(inputs, Tensor) or inputs.numel() > MOST_NUMBERS or inputs.ndim not in (2, 4):
        return None
    return "columns" if inputs.ndim == 2 else "pixels"


def folds_of(folds: int | None, pair: Pair) -> int:
    """As given, checked; by default three, fewer for a tiny target, and none with a test set."""
    n, groups = len(pair.target), pair.target.groups
    most = n if groups is None else len(groups.unique())
    if folds is None:
        if pair.test is not None or most < 2:
            return 0
        return min(FOLDS if n >= 2 * FEWEST_TARGET else 2 if n >= FEWEST_TARGET else 0, most)
    if folds < 0 or folds == 1:
        raise UsageError(f"folds must be 0 or at least 2, got {folds}.")
    if folds > most:
        raise UsageError(f"folds is {folds}, but the target has only {counted(most, 'group')}: take fewer folds.")
    if folds > n // 2:
        raise UsageError(f"folds is {folds}, but the target has only {counted(n, 'example')}: take fewer folds.")
    return folds


def is_apart(probes: Probes, pair: Pair, folds: int, *, rivals: bool) -> bool:
    """Whether SOSELETO's model has a training of its own, without the probes that the main one plants in its source."""
    return bool(probes.share) and rivals and (pair.test is not None or folds > 0)


@dataclass(frozen=True)
class Part:
    """One training of a comparison: its target, and the examples that it is evaluated on."""

    name: str  # its folder; empty for the main training
    method: str
    source: Examples
    target: Examples
    judged: Examples
    places: Tensor  # of the judged examples in the target, or in the test set

    @property
    def title(self) -> str:
        fold = self.name.rpartition("/")[0].replace("fold-", ", fold ")
        return f"{TITLES[self.method]}{fold}" if self.name else ""


def whole(method: str, pair: Pair) -> Part:
    judged = pair.test or pair.target
    return Part(method, method, pair.source, pair.target, judged, torch.arange(len(judged)))


def plan(pair: Pair, mode: str, *, folds: int, baselines: bool, apart: bool, seed: int) -> list[Part]:
    """The trainings beside the main one. With a test set, folds serve the calibration only.

    apart: whether SOSELETO's model has a training of its own
    """
    names = () if not baselines else BASELINES if mode == "noisy" else BASELINES_IN_TRANSFER
    places = [] if folds == 0 else fold_places(pair.target, folds, seed)
    shared = folds > 0 and not bool(apart_from(pair.source, pair.target).all())
    parts = [whole(SOSELETO, pair)] if apart and pair.test is not None else []
    parts += _in_folds(SOSELETO, pair, places)
    for name in names:
        if pair.test is not None or (name == "ordinary" and folds and not shared):
            parts.append(whole(name, pair))
        else:
            parts += _in_folds(name, pair, places)
    return parts


def _in_folds(method: str, pair: Pair, places: Sequence[Tensor]) -> list[Part]:
    parts, target = [], pair.target
    for number, held_out in enumerate(places, start=1):
        left = torch.ones(len(target), dtype=torch.bool)
        left[held_out] = False
        name = f"fold-{number}/{method}"
        judged = target.subset(held_out)
        kept = apart_from(pair.source, judged)
        source = pair.source if bool(kept.all()) else pair.source.subset(kept)
        parts.append(Part(name, method, source, target.subset(left), judged, held_out))
    return parts


def apart_from(source: ExampleSet, held_out: Examples) -> Tensor:
    """(N,) the source examples that are in no group of the held-out ones."""
    if not isinstance(source, Examples) or source.groups is None or held_out.groups is None:
        return torch.ones(len(source), dtype=torch.bool)
    return ~torch.isin(source.groups, held_out.groups)


def fold_places(target: Examples, folds: int, seed: int) -> list[Tensor]:
    """The places of each fold: every class spread over the folds as evenly as possible, at random.

    A group counts as its first example, and is in one fold.
    """
    labels = target.labels.cpu()
    groups = torch.arange(len(labels)) if target.groups is None else target.groups
    _, first, group = np.unique(groups.numpy(), return_index=True, return_inverse=True)
    of_group = labels[first]
    shuffled = torch.randperm(len(of_group), generator=generator(seed, "folds"))
    by_class = shuffled[of_group[shuffled].argsort(stable=True)]
    return [torch.from_numpy(np.flatnonzero(np.isin(group, by_class[fold::folds]))) for fold in range(folds)]


@dataclass(frozen=True, kw_only=True)
class Comparing:
    """The trainings of one comparison; ``chosen`` are arguments of ``fit`` that all of them share."""

    make: Callable[[], nn.Module]
    features: Features | None
    pair: Pair
    mode: Literal["noisy", "transfer"]
    folds: int
    baselines: bool
    keep: str
    method: Method | DefaultMethod | None
    inputs: Inputs
    heads: Heads
    probes: Probes
    target_batch_size: int | Balanced | None
    checkpoints: Checkpoints
    compute: Compute
    seed: int
    device: str | torch.device
    out: Path | None
    watchers: list[Watcher]
    chosen: dict[str, Any]
    trained: dict[str, Predictor] = field(default_factory=dict)  # by the name of the part
    first: list[First] = field(default_factory=list)  # the first answer, if there is one
    failed: set[str] = field(default_factory=set)  # methods that diverged in one of their parts

    def __post_init__(self) -> None:
        if self.pair.target.labels.is_floating_point():
            raise UsageError("the labels are real numbers and have no accuracy: train a regression with soseleto.fit.")
        if self.out is not None:
            self.team.first(lambda: self._check_folder(RunFolder(self.out)))  # type: ignore[arg-type]

    def _check_folder(self, folder: RunFolder) -> None:
        folder.require_place()
        if folder.is_run() and folder.comparison() is not None:
            raise UsageError(f"{folder.path} holds a run already: give --out another folder, or delete that one.")

    @property
    def team(self) -> Reducer:
        return self.compute.reducer or Single()

    @cached_property
    def main(self) -> Part:
        return replace(whole(SOSELETO, self.pair), name="")

    @property
    def apart(self) -> bool:
        return is_apart(self.probes, self.pair, self.folds, rivals=self.baselines or self.features is not None)

    @cached_property
    def parts(self) -> list[Part]:
        choices: dict[str, Any] = {"folds": self.folds, "baselines": self.baselines, "apart": self.apart}
        return plan(self.pair, self.mode, seed=self.seed, **choices)

    def run(self) -> Comparison:
        """All trainings that have not ended, and what they come to."""
        self._begin()
        every = [self.main, *self.parts]
        for part in every:
            if not self.team.first(lambda part=part: self._has_ended(part)):  # type: ignore[misc]
                self._train_or_leave_out(part)
        method = self.team.first(self._best)
        kept = self.main if method == SOSELETO and not self.apart else whole(method, self.pair)
        if not self.team.first(lambda: self._has_ended(kept)):
            self._train(kept)
        temperature = self.team.first(lambda: self._conclude(kept))
        result = self.trained.get("") or self._model(self.main)
        predictor = result if kept is self.main else self._model(kept)
        if self.out is not None:
            self.team.first(self._tidy)
        return Comparison(
            rows=self.team.first(lambda: rows(self._judged)),
            kept=replace(predictor, temperature=temperature),
            method=method,
            result=result,
            judged_on="target" if self.pair.test is None else "test",
            folds=self.folds,
        )

    def _begin(self) -> None:
        """The first answer; after an interruption it is made again, since its folder does not hold the features."""
        if self.features is None:
            return
        for watcher in self.watchers:
            if isinstance(watcher, LiveLine):
                watcher.stage(TITLES[SCAN])
        place = None if self.out is None else self.out / FIRST
        ended = place is not None and RunFolder(place).is_run() and RunFolder(place).has_ended()
        if ended:
            self._require_same(RunFolder(place))  # type: ignore[arg-type]
        notes = self.checkpoints.notes
        if self.features != "network":  # without the name of the network, which it does not use
            notes = {name: value for name, value in notes.items() if name == "columns"}
        first = first_answer(
            self.pair.source,
            self.pair.target,
            None,
            self.make() if self.features == "network" else None,
            self.probes.precision,
            self.inputs,
            labels_before=self.probes.labels_before,
            seed=self.seed,
            device=self.device,
            out=None if ended else place,
            notes={**notes, **self._notes},
            progress=[watcher for watcher in self.watchers if not hasattr(watcher, "log")],
        )
        self.trained[SCAN] = first.result
        self.first.append(first)

    def _started(self, part: Part) -> nn.Module:
        """A new model; a pretrained one begins with a head that was learned without the examples it is judged on."""
        model = self.make()
        if self.features != "network" or part.method != SOSELETO:
            return model
        (first,) = self.first
        found = first.found
        if part.name.startswith("fold-"):
            kept = np.isin(np.arange(len(self.pair.target)), part.places.numpy(), invert=True)
            found = first.beliefs(apart_from(self.pair.source, part.judged).numpy(), kept)
        started = with_solution(model, found.model, first.classes)
        return model if isinstance(started, Learned) else started

    def _tidy(self) -> None:
        """Delete the parts; what was decided in a review of the first answer is decided of the whole run."""
        assert self.out is not None
        shutil.rmtree(self.out / PARTS, ignore_errors=True)
        earlier, decisions = self.out / FIRST / REVIEW, self.out / REVIEW
        if earlier.exists() and not decisions.exists():
            shutil.copyfile(earlier, decisions)

    # One training

    def _train_or_leave_out(self, part: Part) -> None:
        try:
            self._train(part)
        except TrainingError as error:
            if part.method == SOSELETO:
                raise
            self.failed.add(part.method)
            for watcher in self.watchers:
                if callable(watcher):
                    text = f"{part.title} is left out of the comparison: {first_line(error)}."
                    watcher("message", {"text": text})

    def _train(self, part: Part) -> None:
        for watcher in self.watchers:
            if isinstance(watcher, LiveLine):
                watcher.stage(part.title)
        ours = part.method == SOSELETO
        method = self.method if ours else methods.by_name(part.method)
        result = fit(
            self._started(part),
            part.source,
            part.target,
            self.mode,
            method=method,
            inputs=self.inputs if ours or not self._is_strong else replace(self.inputs, augment=self._plain_augment),
            target_batch_size=self._target_batch(part),
            heads=copy.deepcopy(self.heads),
            probes=self._judging(part),
            compute=self.compute,
            checkpoints=replace(self.checkpoints, notes={**self.checkpoints.notes, **self._notes}),
            seed=self.seed,
            device=self.device,
            out=self._place(part),
            # a logger is closed at the end of a training, so that only the main one has it
            progress=[watcher for watcher in self.watchers if not (part.name and hasattr(watcher, "log"))],
            **self.chosen,
        )
        if self.out is None or not part.name:  # others are in their folders, and would fill a GPU
            self.trained[part.name] = result

    def _judging(self, part: Part) -> Probes | None:
        """Probes of the main training, and what the first answer says, by which the settings are chosen."""
        if part.method != SOSELETO:
            return None
        probes = replace(self.probes, share=0.0, labels_before=None) if part.name else self.probes
        evidence = self.first[0].result.evidence if self.first else None
        if evidence is not None and len(part.source) < len(self.pair.source):
            evidence = evidence.subset(apart_from(self.pair.source, part.judged))
        return replace(probes, evidence=evidence)

    @property
    def _is_strong(self) -> bool:
        return isinstance(self.method, Strong)

    @cached_property
    def _plain_augment(self) -> Augment | None:
        """Of the baselines of the strong recipe, which has views in place of augmentation."""
        inputs, _ = self.pair.source.take(torch.tensor([0]))
        return augment_for(tuple(inputs.shape[1:]), self.pair.source.classes) if isinstance(inputs, Tensor) else None

    def _target_batch(self, part: Part) -> int | Balanced | None:
        """As given, but at most what a fold leaves of the target."""
        given, n = self.target_batch_size, len(part.target)
        if given is None or not part.name:
            return given
        return replace(given, size=min(given.size, n)) if isinstance(given, Balanced) else min(given, n)

    def _place(self, part: Part) -> Path | None:
        if self.out is None:
            return None
        return self.out / PARTS / part.name if part.name else self.out

    @cached_property
    def _notes(self) -> dict[str, Any]:
        """What was asked for, in ``config.json`` of every training; the same must be asked for to continue."""
        if self.out is None:
            return {}
        sides = (self.pair.source, self.pair.target, self.pair.test)
        parts = [(s.fingerprint(), s.classes, _of(s.truth), _of(getattr(s, "groups", None))) for s in sides if s]
        data = "".join(map(str, itertools.chain(*parts)))
        asked = {
            **to_data(self.chosen),
            "mode": self.mode,
            "optimizer": [None if part is None else describe(part) for part in _pair_of(self.chosen["optimizer"])],
            "target_batch_size": to_data(self.target_batch_size),
            "settings": to_data(self.method),
            "augment": repr(self.inputs.augment),
            "probes": to_data(self.probes),
            "dtype": str(self.compute.dtype),
            "seed": self.seed,
            "folds": self.folds,
            "baselines": self.baselines,
            "module_fingerprint": model_fingerprint(self.make()),
            "data": hashlib.sha256(data.encode()).hexdigest(),
        }
        return {"asked": comparable(asked)}

    def _has_ended(self, part: Part) -> bool:
        """Whether a training of this comparison has ended before; one with other settings raises."""
        place = self._place(part)
        if part.name in self.trained:
            return True
        if place is None or not RunFolder(place).is_run():
            return False
        self._require_same(folder := RunFolder(place))
        return folder.has_ended()

    def _require_same(self, folder: RunFolder) -> None:
        asked = self._notes["asked"]
        if changed := differences(folder.config().get("asked") or {}, asked, asked):
            raise UsageError(
                f"{folder.path} holds a training with other settings, since {', '.join(changed)}: give the same as "
                "before, or --out another folder."
            )

    def _model(self, part: Part) -> Predictor:
        """From the part's folder, since in a sharded training no rank has the whole model."""
        place, module, heads = self._place(part), self.make(), copy.deepcopy(self.heads)
        if place is None or part.method == SCAN:
            return self.trained[part.name]
        if heads.source is not None and heads.target is not None:
            module = TrunkAndHeads(module, heads.source, heads.target)
        standardize = self.inputs.standardize
        text = standardize if isinstance(standardize, TextPreparation) else None
        return load_run(RunFolder(place), module, device=self.device, text=text)

    # What they come to

    def _judge(self, part: Part) -> Judged:
        outputs = self._model(part).outputs_of(part.judged)
        return Judged(part.method, outputs, part.judged.labels.cpu(), part.places, part.judged.groups)

    def _evaluated(self, parts: Sequence[Part]) -> list[Judged]:
        return [self._judge(part) for part in parts if part.method not in self.failed]

    @cached_property
    def _on_folds(self) -> list[Judged]:
        """On target examples that the models were not trained on."""
        if self.pair.test is None:
            return self._evaluated(self.parts)
        return self._evaluated([part for part in self.parts if part.name.startswith("fold-")])

    @cached_property
    def _judged(self) -> list[Judged]:
        """What the comparison is made of: with a test set the main training, and not its folds."""
        if self.pair.test is None:
            return [*self._on_folds, *self._of_first, *self._boosted] if self._on_folds else []
        main = [] if self.apart else [self.main]
        on_test = [part for part in self.parts if not part.name.startswith("fold-")]
        first = [self._judge(whole(SCAN, self.pair))] if self.first else []
        return [*self._evaluated([*main, *on_test]), *first, *self._boosted]

    @property
    def _of_first(self) -> list[Judged]:
        """The first answer and training on its features, on target examples that their classifiers have not seen."""
        judged = compared(self.first[0].found, self.pair.target) if self.first else []
        return [replace(each, method=SCAN if each.method == SOSELETO else ON_FEATURES + each.method) for each in judged]

    @property
    def _boosted(self) -> list[Judged]:
        """Of tables: gradient boosting on source and target, which is what tables are usually trained with."""
        table = self.inputs.standardize
        if not (self.baselines and self.mode == "noisy" and isinstance(table, TablePreparation)):
            return []
        parts = [part for part in self.parts if part.method == SOSELETO and part.name.startswith("fold-")]
        places = torch.linspace(0, len(self.pair.source) - 1, min(MOST_BOOSTED, len(self.pair.source))).round().long()
        source = self.pair.source.subset(places)
        chosen = parts if self.pair.test is None else [self.main]
        return [_boosting(source, part, table.codes, self.seed) for part in chosen]

    def _best(self) -> str:
        return SOSELETO if self.keep == SOSELETO else winner(self._judged)

    def _conclude(self, kept: Part) -> float:
        """Calibrate the model that is kept, and write the comparison; returns the temperature."""
        held_out = [one for one in [*self._on_folds, *self._of_first] if one.method == kept.method]
        labels = torch.cat([one.labels for one in held_out]) if held_out else torch.zeros(0)
        temperature = fit_temperature(torch.cat([one.outputs for one in held_out]), labels) if held_out else 1.0
        if self.out is None:
            return temperature
        folder = RunFolder(self.out)
        if kept.name and kept.method != SCAN:
            folder.keep_model(RunFolder(self._place(kept)))  # type: ignore[arg-type]
        if held_out:
            folder.write_json(CALIBRATION, {"temperature": temperature, "examples": len(labels)}, indent=None)
        comparison: dict[str, Any] = {"judged_on": "target" if self.pair.test is None else "test", "folds": self.folds}
        if (others := self.epochs_of_others) is not None:
            comparison["epochs_of_others"] = others
        if self.apart and kept.method == SOSELETO:
            comparison["apart"] = True
        folder.write_json(COMPARISON, {**comparison, "rows": rows(self._judged), "kept": kept.method})
        return temperature

    @property
    def epochs_of_others(self) -> int | None:
        """For how long the baselines are trained, if not as long as SOSELETO by the strong recipe."""
        epochs, others = self.chosen["epochs"], [part for part in self.parts if part.method != SOSELETO]
        if epochs is not None or not others or not self._is_strong:
            return None
        known: dict[str, Any] = {"mode": self.mode, "inputs": kind_of_inputs(self.pair.source)}
        ours = resolve(self.make(), method=self.method, **known).epochs
        plain = resolve(self.make(), **known).epochs
        return plain if plain != ours else None


def _pair_of(optimizer: Any) -> tuple[Any, ...]:
    return tuple(optimizer) if isinstance(optimizer, tuple | list) else (optimizer,)


def _of(truth: Tensor | None) -> Any:
    return None if truth is None else truth.tolist()


def _boosting(source: Examples, part: Part, codes: Sequence[int], seed: int) -> Judged:
    """scikit-learn's gradient boosting with its defaults, evaluated as the part is; codes: columns of categories."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    if part.name:
        source = source.subset(apart_from(source, part.judged))
    inputs = torch.cat([source.inputs, part.target.inputs]).cpu().numpy()
    labels = torch.cat([source.labels, part.target.labels]).cpu()
    stops = int(labels.bincount()[labels.unique()].min()) >= 2 and "auto"  # its validation needs one of every class
    trees = HistGradientBoostingClassifier(
        categorical_features=list(codes) or None, early_stopping=stops, random_state=seed
    )
    trees.fit(inputs, labels.numpy())
    said = torch.from_numpy(trees.predict(part.judged.inputs.cpu().numpy()))
    classes = 1 + max(int(labels.max()), int(part.judged.labels.max()))
    outputs = nn.functional.one_hot(said.long(), classes).float()
    return Judged(BOOSTING, outputs, part.judged.labels.cpu(), part.places, part.judged.groups)
