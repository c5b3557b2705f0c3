"""The trainings of one comparison: first answer, main training, baselines and folds, and what they come to."""

from __future__ import annotations

import copy
import hashlib
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
from soseleto.comparison.accuracy import ON_FEATURES, SCAN, SOSELETO, TITLES, Judged, rows, table, winner
from soseleto.comparison.plan import Features, Part, apart_from, features_by, folds_of, plan, share_of_probes, whole
from soseleto.comparison.scan import FirstAnswer, compared, scan, with_solution
from soseleto.data import Augment, Examples, Pair, TablePreparation
from soseleto.data.text import TextPreparation
from soseleto.defaults import Balanced, DefaultMethod, augment_for, kind_of_inputs, resolve, to_data
from soseleto.errors import TrainingError, UsageError, first_line
from soseleto.methods.strong import Strong
from soseleto.models.trunk_and_heads import Learned, TrunkAndHeads
from soseleto.parallel.reducer import Reducer, Single
from soseleto.prediction import Predictor, fit_temperature, load_run
from soseleto.run_folder.folder import CALIBRATION, COMPARISON, FIRST, PARTS, REVIEW, SOURCE, RunFolder
from soseleto.suspects.cross_fit import Beliefs
from soseleto.suspects.suspects import Evidence
from soseleto.task.optimizers import describe
from soseleto.task.task import Method
from soseleto.training.data import found_before
from soseleto.training.fit import fit
from soseleto.training.options import Checkpoints, Compute, Heads, Inputs, Probes, Progress, Watcher
from soseleto.training.progress import LiveLine, functions_of
from soseleto.training.resume import comparable, differences, model_fingerprint

KEEP = ("best", SOSELETO)


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
        beside = "; nothing is chosen on the test examples" if self.judged_on == "test" else ""
        return "\n".join([*lines, f"the model of {TITLES[self.method]} is kept{beside}"])

    __repr__ = describe


@dataclass(frozen=True, kw_only=True)
class Comparing:
    """The trainings of one comparison: what was asked for, where None is the default, and what it comes to.

    probes: of the main training; chosen: arguments of ``fit`` that all trainings share
    describe: writes about the data into the run folder, and into that of the first answer
    """

    make: Callable[[], nn.Module]
    pair: Pair
    mode: Literal["noisy", "transfer"]
    folds: int | None
    baselines: bool | None
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
    progress: Watcher | Sequence[Watcher]
    chosen: dict[str, Any]
    describe: Callable[[RunFolder], None]
    trained: dict[str, Predictor] = field(default_factory=dict)  # by the name of the part
    failed: set[str] = field(default_factory=set)  # methods that diverged in one of their parts

    def __post_init__(self) -> None:
        if self.keep not in KEEP:
            raise UsageError(f"keep must be {' or '.join(map(repr, KEEP))}, got {self.keep!r}.")
        if self.is_regression and (self.mode == "transfer" or self.pair.target.labels.ndim != 1):
            raise UsageError(
                "labels that are numbers are compared in noisy mode alone, one for each example: train a network on "
                "others by soseleto.fit(..., loss=soseleto.squared_error)."
            )
        if self.out is not None:
            self.team.first(lambda: self._check_folder(RunFolder(self.out)))  # type: ignore[arg-type]

    def _check_folder(self, folder: RunFolder) -> None:
        folder.require_place()
        if folder.is_run() and folder.comparison() is not None:
            raise UsageError(f"{folder.path} holds a run already: give --out another folder, or delete that one.")

    @property
    def is_regression(self) -> bool:
        return self.pair.target.labels.is_floating_point()

    @property
    def team(self) -> Reducer:
        return self.compute.reducer or Single()

    @cached_property
    def features(self) -> Features | None:
        return features_by(self.make, self.pair, self.mode, self.compute)

    @cached_property
    def fold_count(self) -> int:
        return folds_of(self.folds, self.pair, needed=self.pair.test is None or self.keep != SOSELETO)

    @property
    def trains_baselines(self) -> bool:
        return self.features is None if self.baselines is None else self.baselines

    @cached_property
    def main_probes(self) -> Probes:
        share, before = self.probes.share, self.probes.labels_before
        if share is None:
            share = share_of_probes(self.mode, self.compute, self.pair, self.features)
        if (share or self.features is not None) and before is None:
            before = found_before(self.pair.labels_before, self.pair.target)
        return replace(self.probes, share=share, labels_before=before)

    @cached_property
    def prepared(self) -> Inputs:
        """Codes of categories are no quantities."""
        table = self.pair.preparation
        if self.inputs.standardize is None and isinstance(table, TablePreparation) and table.codes:
            return replace(self.inputs, standardize=table)
        return self.inputs

    @cached_property
    def epochs(self) -> int:
        """The same for all trainings."""
        known: dict[str, Any] = {"mode": self.mode, "inputs": kind_of_inputs(self.pair.source)}
        return resolve(self.make(), method=self.method, epochs=self.chosen["epochs"], **known).epochs

    @cached_property
    def main(self) -> Part:
        return replace(whole(SOSELETO, self.pair, self._shown_on), name="")

    @property
    def _shown_on(self) -> Examples:
        return self.pair.test or self.pair.target

    @cached_property
    def parts(self) -> list[Part]:
        choices: dict[str, Any] = {"folds": self.fold_count, "baselines": self.trains_baselines}
        return plan(self.pair, self.mode, seed=self.seed, **choices)

    def run(self) -> Comparison:
        """All trainings that have not ended, and what they come to."""
        self._begin()
        for part in [self.main, *self.parts]:
            if not self.team.first(lambda part=part: self._has_ended(part)):  # type: ignore[misc]
                self._train_or_leave_out(part)
        method = self.team.first(lambda: SOSELETO if self.keep == SOSELETO else winner(self._held_out))
        kept = self.main if method == SOSELETO else whole(method, self.pair, self._shown_on)
        if not self.team.first(lambda: self._has_ended(kept)):
            self._train(kept)
        temperature = self.team.first(lambda: self._conclude(kept))
        result = self.trained.get("") or self._model(self.main)
        predictor = result if kept is self.main else self._model(kept)
        if self.out is not None:
            self.team.first(self._tidy)
        return Comparison(
            rows=self.team.first(lambda: rows(self._shown)),
            kept=replace(predictor, temperature=temperature),
            method=method,
            result=result,
            judged_on="target" if self.pair.test is None else "test",
            folds=self.fold_count,
        )

    @cached_property
    def _watchers(self) -> list[Progress]:
        """Of the main training."""
        return functions_of(self.progress)

    def _begin_stage(self, title: str) -> list[LiveLine]:
        """The watchers of any other training: it is shown, but its numbers are not those of the main one."""
        lines = [watcher for watcher in self._watchers if isinstance(watcher, LiveLine)]
        for line in lines:
            line.stage(title)
        return lines

    # The first answer

    def _begin(self) -> None:
        """The first answer; after an interruption it is made again, from features that were kept."""
        if self.features is None:
            return
        lines = self._begin_stage(TITLES[SCAN])
        folder = None if self.out is None else RunFolder(self.out / FIRST)
        ended = folder is not None and folder.is_run() and folder.has_ended()
        if folder is not None and ended:
            self._require_same(folder)
        notes = self._all_notes
        if self.features != "network":  # without the name of the network, which it does not use
            notes = {"asked": notes["asked"]} if "asked" in notes else {}
        self.trained[SCAN] = scan(
            self.pair.source,
            self.pair.target,
            model=self.make() if self.features == "network" else None,
            precision=self.main_probes.precision,
            labels_before=self.main_probes.labels_before,
            inputs=self.prepared,
            seed=self.seed,
            device=self.device,
            out=None if folder is None or ended else folder.path,
            notes=notes,
            progress=lines,
        )
        if folder is not None and not folder.has(SOURCE):
            self.describe(folder)

    @property
    def first(self) -> FirstAnswer | None:
        answer = self.trained.get(SCAN)
        return answer if isinstance(answer, FirstAnswer) else None

    def _evidence_of(self, part: Part) -> Evidence | None:
        """What the first answer says of the part's source, if it knows nothing of the examples that are held out."""
        first = self.first
        if first is None or first.evidence is None or part.method != SOSELETO:
            return None
        if not part.name.startswith("fold-"):
            return first.evidence
        if self.is_regression:  # whose settings do not depend on it
            return None
        kept = apart_from(self.pair.source, part.judged)
        others = np.isin(np.arange(len(self.pair.target)), part.places.numpy(), invert=True)
        return replace(first.evidence.subset(kept), judgement=first.beliefs_without(kept.numpy(), others))

    def _started(self, evidence: Evidence | None) -> nn.Module:
        """A new model; a pretrained one begins with the first answer's head."""
        model = self.make()
        if self.features != "network" or evidence is None or self.first is None or self.is_regression:
            return model
        assert isinstance(evidence.judgement, Beliefs)
        started = with_solution(model, evidence.judgement.model, self.first.config["n_classes"])
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
            for watcher in self._watchers:
                watcher("message", {"text": f"{part.title} is left out of the comparison: {first_line(error)}."})

    def _train(self, part: Part) -> None:
        lines = self._begin_stage(part.title)
        ours = part.method == SOSELETO
        plain = not ours and isinstance(self.method, Strong)
        evidence = self._evidence_of(part)
        result = fit(
            self._started(evidence),
            part.source,
            part.target,
            self.mode,
            method=self.method if ours else methods.METHODS[part.method](),
            inputs=replace(self.prepared, augment=self._plain_augment) if plain else self.prepared,
            target_batch_size=self._target_batch(part),
            heads=copy.deepcopy(self.heads),
            probes=self._probes_of(part, evidence),
            compute=self.compute,
            checkpoints=replace(self.checkpoints, notes=self._all_notes),
            seed=self.seed,
            device=self.device,
            out=self._place(part),
            progress=lines if part.name else self._watchers,
            **{**self.chosen, "epochs": self.epochs},
        )
        if self.out is None or not part.name:  # others are in their folders, and would fill a GPU
            self.trained[part.name] = result

    def _probes_of(self, part: Part, evidence: Evidence | None) -> Probes | None:
        """Probes of the main training, and what the first answer says, by which the settings are chosen."""
        if part.method != SOSELETO:
            return None
        probes = replace(self.main_probes, share=None, labels_before=None) if part.name else self.main_probes
        return replace(probes, evidence=evidence)

    @cached_property
    def _plain_augment(self) -> Augment | None:
        """Of the baselines of the strong recipe, which has views in place of augmentation."""
        inputs, _ = self.pair.source.take(torch.tensor([0]))
        return augment_for(tuple(inputs.shape[1:]), self.pair.source.classes) if isinstance(inputs, Tensor) else None

    def _target_batch(self, part: Part) -> int | Balanced | None:
        """As given, but at most what a fold leaves of the target."""
        size, n = self.target_batch_size, len(part.target)
        if size is None or not part.name:
            return size
        return replace(size, size=min(size.size, n)) if isinstance(size, Balanced) else min(size, n)

    def _place(self, part: Part) -> Path | None:
        if self.out is None:
            return None
        return self.out / PARTS / part.name if part.name else self.out

    @cached_property
    def _all_notes(self) -> dict[str, Any]:
        """Entries of ``config.json`` of every training; "asked" must be the same to continue."""
        return {**self.checkpoints.notes, **self._notes}

    @cached_property
    def _notes(self) -> dict[str, Any]:
        if self.out is None:
            return {}
        sides = (self.pair.source, self.pair.target, self.pair.test)
        data = ""
        for side in filter(None, sides):
            more = (None if of is None else of.tolist() for of in (side.truth, getattr(side, "groups", None)))
            data += "".join(map(str, (side.fingerprint(), side.classes, *more)))
        optimizer = self.chosen["optimizer"]
        optimizer = optimizer if isinstance(optimizer, tuple | list) else [optimizer]
        asked = {
            **to_data(self.chosen),
            "mode": self.mode,
            "optimizer": [part and describe(part) for part in optimizer],
            "target_batch_size": to_data(self.target_batch_size),
            "settings": to_data(self.method),
            "augment": repr(self.inputs.augment),
            "probes": to_data(self.main_probes),
            "dtype": str(self.compute.dtype),
            "seed": self.seed,
            "folds": self.fold_count,
            "baselines": self.trains_baselines,
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
        if changed := differences(folder.config().get("asked") or {}, asked):
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
        standardize = self.prepared.standardize
        text = standardize if isinstance(standardize, TextPreparation) else None
        return load_run(RunFolder(place), module, device=self.device, text=text)

    # What they come to

    def _judge(self, part: Part) -> Judged:
        outputs = self._model(part).outputs_of(part.judged)
        return Judged(part.method, outputs, part.judged.labels.cpu(), part.places, part.judged.groups)

    @cached_property
    def _held_out(self) -> list[Judged]:
        """On target examples that the models were not trained on: what the model to keep is chosen by."""
        parts = [part for part in self.parts if part.judged is not self.pair.test]
        judged = [self._judge(part) for part in parts if part.method not in self.failed]
        return [*judged, *self._of_first] if judged else judged

    @cached_property
    def _shown(self) -> list[Judged]:
        """What the comparison shows: the test set, which chooses nothing, or else the held-out target examples."""
        if self.pair.test is None:
            return self._held_out
        first = [] if self.first is None else [whole(SCAN, self.pair, self.pair.test)]
        parts = [part for part in (self.main, *self.parts, *first) if part.judged is self.pair.test]
        return [self._judge(part) for part in parts if part.method not in self.failed]

    @property
    def _of_first(self) -> list[Judged]:
        """The first answer and training on its features, on target examples that their classifiers have not seen."""
        judged = compared(self.first.judgement, self.pair.target) if self.first else []
        return [replace(each, method=SCAN if each.method == SOSELETO else ON_FEATURES + each.method) for each in judged]

    def _conclude(self, kept: Part) -> float:
        """Calibrate the model that is kept, and write the comparison; returns the temperature."""
        held_out = [one for one in self._held_out if one.method == kept.method]
        labels = torch.cat([one.labels for one in held_out]) if held_out else torch.zeros(0)
        calibrates = bool(held_out) and not self.is_regression
        temperature = fit_temperature(torch.cat([one.outputs for one in held_out]), labels) if calibrates else 1.0
        if self.out is None:
            return temperature
        folder = RunFolder(self.out)
        if kept.name and kept.method != SCAN:
            folder.keep_model(RunFolder(self._place(kept)))  # type: ignore[arg-type]
        if calibrates:
            folder.write_json(CALIBRATION, {"temperature": temperature, "examples": len(labels)}, indent=None)
        self.describe(folder)
        comparison: dict[str, Any] = {"judged_on": "target", "folds": self.fold_count}
        if self.pair.test is not None:
            comparison = {**comparison, "judged_on": "test", "held_out": rows(self._held_out)}
        folder.write_json(COMPARISON, {**comparison, "rows": rows(self._shown), "kept": kept.method})
        return temperature
