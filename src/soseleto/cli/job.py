"""One ``soseleto fit``: its plan, its trainings, and their comparison."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from soseleto.cli import comparison, texts
from soseleto.cli.choices import DEEP, PLAIN_TEXTS, augment_in_words, recipe_in_words, unlabelled_in_words
from soseleto.cli.comparison import BOOSTING, FINAL, METHOD, Judged, Part
from soseleto.cli.fit_options import FitOptions
from soseleto.cli.trainings import Trainings
from soseleto.data import Pair, TablePreparation
from soseleto.data.text import TextExamples
from soseleto.defaults import EPOCHS, STRONG_EPOCHS
from soseleto.errors import TrainingError, UsageError, counted, did_you_mean
from soseleto.parallel.reducer import Reducer
from soseleto.prediction.final import FINALS, JUDGES, FinalData, boosting, by_recipe, fit_final, gradient_boosting
from soseleto.prediction.predictor import fit_temperature
from soseleto.run_folder.folder import CALIBRATION, COMPARISON, PROBLEMS, RunFolder
from soseleto.run_folder.source import remember
from soseleto.training.progress import LiveLine

MOST_BOOSTED = 1_000_000  # source rows, which scikit-learn holds in memory


@dataclass(frozen=True)
class Job:
    """Everything one ``soseleto fit`` will do, decided before the first step."""

    options: FitOptions
    pair: Pair
    trainings: Trainings
    parts: list[Part]
    source_sha256: str | None = None
    failed: set[str] = field(default_factory=set)  # parts that diverged

    @classmethod
    def of(cls, options: FitOptions, pair: Pair, reducer: Reducer, source_sha256: str | None = None) -> Job:
        trainings = Trainings.of(options, pair, reducer)
        if options.keep not in comparison.KEEP:
            raise UsageError(f"--keep must be {' or '.join(comparison.KEEP)}, got {options.keep!r}.")
        rivals = comparison.RIVALS if options.mode == "noisy" else comparison.RIVALS_IN_TRANSFER
        made = cls(
            options=options,
            pair=pair,
            trainings=trainings,
            source_sha256=source_sha256,
            parts=comparison.plan(
                pair.target,
                pair.test,
                folds=trainings.folds,
                rivals=rivals if options.baselines else (),
                seed=options.seed,
            ),
        )
        if made._apart and pair.test is not None:
            made.parts.insert(0, comparison.whole(METHOD, pair.target, pair.test))
        _check_final(options, pair)
        if options.guarantee and not trainings.probes(made.main):
            raise UsageError("--guarantee has no effect, since this training has no probes: leave it out.")
        return made

    @property
    def reducer(self) -> Reducer:
        """The ranks of the run."""
        return self.trainings.reducer

    @property
    def main(self) -> Part:
        """The training that the comparison is about."""
        judged = self.pair.test or self.pair.target
        return Part("", METHOD, self.pair.target, judged, torch.arange(len(judged)))

    @property
    def _apart(self) -> bool:
        """Whether SOSELETO's model has a training of its own, on the whole target.

        The main training finds the suspects: a part of its target is planted in the source, half of it with wrong
        labels. Where models are compared, that would count against SOSELETO's.
        """
        compared = self.options.baselines and (self.pair.test is not None or self.trainings.folds > 0)
        return compared and bool(self.trainings.probes(self.main))

    @property
    def _epochs_of_others(self) -> int | None:
        """For how long the rivals are trained, if not as long as SOSELETO; they have the plain recipe's settings."""
        epochs = {self.trainings.settings(part).epochs for part in self.parts if part.method != METHOD}
        return next(iter(epochs), None) if epochs != {self.trainings.settings(self.main).epochs} else None

    def plan(self) -> list[str]:
        """The plan, as lines to print."""
        options, pair, settings = self.options, self.pair, self.trainings.settings(self.main)
        epochs = settings.epochs
        size = sum(p.numel() for p in self.trainings.module().parameters())
        lines = [
            *([] if pair.preparation is None else pair.preparation.describe()),
            f"{len(pair.source):,} source and {counted(len(pair.target), 'target example')}, {options.mode} mode, "
            f"{counted(epochs, 'epoch')} in batches of {settings.batch_size}",
            f"model {_in_words(self.trainings.model)} with {counted(size, 'parameter')}; writing to {options.out}",
        ]
        if pair.unlabelled is not None:
            lines.insert(-1, unlabelled_in_words(pair.unlabelled))
        if options.model is None and self.trainings.model == DEEP and self.trainings.device.type == "cpu":
            lines.append("without a GPU this network is slow: --model quick is a smaller one")
        if options.epochs is None and epochs != EPOCHS:
            trained = "the strong recipe trains images" if epochs == STRONG_EPOCHS else "a pretrained model is trained"
            lines.append(f"{trained} for {epochs} epochs by default (--epochs N)")
        lines += texts.plan(pair, options.model)
        if self.trainings.views is not None or (options.mode == "noisy" and pair.source.inputs.ndim == 4):
            lines.append(recipe_in_words(self.trainings.views, options.mode))
        elif isinstance(pair.source, TextExamples) and options.mode == "noisy" and self.trainings.many_seem_wrong:
            lines.append(PLAIN_TEXTS)
        if pair.source.inputs.ndim == 4:
            lines.append(augment_in_words(self.trainings.augment(self.main), chosen=options.augment is None))
        if options.mode == "noisy" and options.recipe == "plain":
            lines.append(settings.line())
        if options.mode == "noisy" and not self.trainings.probes(self.main):
            lines.append("suspects will be found by their weights alone, without a known precision")
        elif options.mode == "noisy" and self.trainings.before is None:
            lines.append(
                "the source's mistakes will be estimated; if you know the target's labels from before they were "
                "checked, give them with --labels-before COLUMN or FILE"
            )
        if self._boosts and len(pair.source) > MOST_BOOSTED:
            lines.append(f"gradient boosting is trained on {MOST_BOOSTED:,} of the source rows, evenly spaced")
        if self.parts:
            others = self._epochs_of_others
            lines.append(comparison.describe_plan(self.parts, pair.test, self.trainings.folds, epochs_of_others=others))
        return lines

    def run(self, progress: LiveLine) -> None:
        """The main training, the parts and the comparison; a training that has ended is not repeated."""
        while todo := self._todo():
            part, *later = todo
            if self.reducer.rank == 0:
                progress.stage(part.title, later=sum(map(self.trainings.cost, later)) / self.trainings.cost(part))
            self._train_or_leave_out(part, progress)
        method = self.reducer.first(self._best)
        of_main = method == METHOD and not self._apart
        kept = None if of_main else comparison.whole(method, self.pair.target, self.main.judged)
        if kept is not None and not self.reducer.first(lambda: self.trainings.has_ended(kept)):
            progress.stage(f"{kept.title} on the whole target")
            self.trainings.train(kept, progress)
        self.reducer.first(lambda: self._finish(kept))

    def _todo(self) -> list[Part]:
        """The trainings that have not ended."""
        every = [self.main, *(part for part in self.parts if part.name not in self.failed)]
        ended = self.reducer.first(lambda: self._ended(every))
        return [part for part, has_ended in zip(every, ended, strict=True) if not has_ended]

    def _ended(self, every: list[Part]) -> list[bool]:
        return [self.trainings.has_ended(part) for part in every]

    def _train_or_leave_out(self, part: Part, progress: LiveLine) -> None:
        try:
            self.trainings.train(part, progress)
        except TrainingError as error:
            if part.method == METHOD:
                raise
            self.failed.add(part.name)
            progress("message", {"text": f"{part.title} is left out of the comparison: {error}"})

    def _best(self) -> str:
        """The method whose model is kept."""
        if self.options.keep == METHOD:
            return METHOD
        found, harms = comparison.differences(self._judged), comparison.source_harms(self._judged)
        return comparison.winner(found, source_harms=harms)

    def _finish(self, kept: Part | None) -> None:
        folder = RunFolder(self.options.out)
        table = self.pair.preparation
        features, read = (self.pair.columns, ()) if table is None else (table.shown, table.texts)
        source = self.options.source
        remember(folder, source, self.options.reading, features, self.source_sha256, read, self.pair.checked)
        texts.keep_model(folder, self.pair, self.options.model)
        self._write_problems(folder)
        if kept is not None:
            folder.keep_model(RunFolder(self.trainings.place(kept)).model_bytes())
        self._conclude(folder, METHOD if kept is None else kept.method)

    def _conclude(self, folder: RunFolder, kept: str) -> None:
        """Calibrate the temperature of the model that is kept, and write it with the comparison."""
        held_out = [one for one in self._on_target if one.method == kept]
        if held_out:
            outputs, labels = comparison.pooled(held_out)
            temperature = fit_temperature(outputs, labels)
            folder.write_json(CALIBRATION, {"temperature": temperature, "examples": len(labels)}, indent=None)
        how: dict[str, Any] = {
            "judged_on": "target" if self.pair.test is None else "test",
            "folds": self.trainings.folds,
        }
        if (others := self._epochs_of_others) is not None:
            how["epochs_of_others"] = others
        rows = comparison.rows(self._judged)
        for row in rows:
            if difference := comparison.differences(self._judged).get(row["method"]):
                row["minus_soseleto"] = {"value": difference.value, "low": difference.low, "high": difference.high}
        if self._apart and kept == METHOD:
            how["apart"] = True
        folder.write_json(COMPARISON, {**how, "rows": rows, "kept": kept})
        if self.options.final is not None:
            data = self._final_data(self.main, self.trainings.weights(self.main))
            folder.write_final(data.tensors(), self._recipe)

    def _evaluated(self, parts: list[Part]) -> list[Judged]:
        """The parts that were trained, evaluated; a rival that diverged in one of its parts is left out."""
        failed = {part.method for part in parts if not self.trainings.has_ended(part)}
        return [self.trainings.judge(part) for part in parts if part.method not in failed]

    @cached_property
    def _on_target(self) -> list[Judged]:
        """The parts that are evaluated on examples of the target that they were not trained on."""
        folds = [part for part in self.parts if part.name.startswith("fold-")]
        return self._evaluated(self.parts if self.pair.test is None else folds)

    @cached_property
    def _judged(self) -> list[Judged]:
        """What the comparison is made of: with a test set the main training, and not its folds."""
        if self.pair.test is None:
            return [*self._on_target, *self._boosted]
        ours = [] if self._apart else [self.trainings.judge(self.main)]
        on_test = [part for part in self.parts if not part.name.startswith("fold-")]
        return [*ours, *self._evaluated(on_test), *self._boosted]

    @property
    def _boosts(self) -> bool:
        """Whether the comparison has boosted models: that of a table has."""
        wanted = self.options.mode == "noisy" and (self.options.baselines or self.options.final is not None)
        return isinstance(self.pair.preparation, TablePreparation) and wanted

    @property
    def _boosted(self) -> list[Judged]:
        """Of tables: gradient boosting on source and target, and the final model, on the same examples."""
        table = self.pair.preparation
        if not isinstance(table, TablePreparation) or not self._boosts:
            return []
        trained = [self.main] if self.pair.test is not None else [part for part in self.parts if part.method == METHOD]
        found: list[Judged] = []
        for part in trained:
            if self.options.final is not None:
                data = self._final_data(part, self.trainings.weights(part))
                found.append(_judge_final(FINAL, by_recipe(self._recipe), data, part))
            if self.options.baselines and importlib.util.find_spec("sklearn") is not None:
                data = self._final_data(part, None)
                found.append(_judge_final(BOOSTING, gradient_boosting(table.codes, self.options.seed), data, part))
        return found

    def _final_data(self, part: Part, weights: Tensor | None) -> FinalData:
        """What a boosted model is trained on, with evenly spaced source rows where there are too many for memory."""
        source, n = self.pair.source, len(self.pair.source)
        if n > MOST_BOOSTED:
            places = torch.linspace(0, n - 1, MOST_BOOSTED, dtype=torch.float64).round().long()
            source, weights = source.subset(places), None if weights is None else weights[places]
        made = FinalData.of(source, part.target, weights)
        if weights is None:
            return made
        recipe = self._recipe
        return made.doubted(boosting(recipe["codes"], recipe["seed"], JUDGES), len(source), recipe["seed"])

    @property
    def _recipe(self) -> dict[str, Any]:
        """Of the final model."""
        assert isinstance(self.pair.preparation, TablePreparation)
        return {"name": self.options.final, "codes": list(self.pair.preparation.codes), "seed": self.options.seed}

    def _write_problems(self, folder: RunFolder) -> None:
        if self.pair.problems:
            dropped = set(self.pair.dropped)
            folder.write_json(PROBLEMS, [{**p.to_dict(), "left_out": p in dropped} for p in self.pair.problems])


def _in_words(model: str) -> str:
    return f"{model} (BatchNorm)" if model == "resnet18" else model


def _judge_final(method: str, estimator: Any, data: FinalData, part: Part) -> Judged:
    outputs = fit_final(estimator, data).outputs(part.judged.inputs)
    return Judged(method, outputs, part.judged.labels.cpu(), part.places)


def _check_final(options: FitOptions, pair: Pair) -> None:
    if options.final is None:
        return
    if options.final not in FINALS:
        known = " or ".join(FINALS)
        raise UsageError(f"unknown final model {options.final!r}{did_you_mean(options.final, FINALS)}: write {known}.")
    if not isinstance(pair.preparation, TablePreparation) or options.mode != "noisy":
        raise UsageError("--final is for tables in noisy mode: leave it out.")
    boosting()  # raises without scikit-learn
