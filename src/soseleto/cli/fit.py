"""``soseleto fit``: read, train, compare with the rivals, write the report, and print a summary.

RUN is the folder of the main training; the trainings of the comparison are in RUN/parts until all of them have ended.
The same command continues an interrupted one: trainings that have ended are not repeated.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from soseleto import methods
from soseleto.algorithm import Soseleto
from soseleto.cli import comparison
from soseleto.cli.choices import augment_for, augment_in_words, folds_for, model_for, probes_for, target_share_for
from soseleto.cli.comparison import BOOSTING, FINAL, METHOD, Judged, Part
from soseleto.cli.home import Home
from soseleto.data import Augment, Pair, Reading, column_of, read_labels_before, read_pair
from soseleto.errors import DiskError, TrainingError, UsageError, counted, did_you_mean, first_line
from soseleto.extensions import chain, label_doubt, normalized, target_share
from soseleto.models.by_name import make_model
from soseleto.parallel.device import choose_device
from soseleto.parallel.reducer import Reducer, first_reads, ranks
from soseleto.prediction.final import FINALS, FinalData, boosting, by_recipe, fit_final, gradient_boosting
from soseleto.prediction.load import load
from soseleto.prediction.temperature import fit_temperature
from soseleto.report import write_report
from soseleto.report.sentences import verdict
from soseleto.run_folder import manifest
from soseleto.run_folder.figures import in_words
from soseleto.run_folder.folder import FINAL as FINAL_FILE
from soseleto.run_folder.folder import PARTS, REPORT, RunFolder
from soseleto.run_folder.ranking import LOW_WEIGHT, is_suspect
from soseleto.run_folder.source_rows import Rows, unchanged
from soseleto.suspects.probes import AUTO_MOST, AUTO_SHARE, Share
from soseleto.task.losses import cross_entropy
from soseleto.task.settings import to_data
from soseleto.task.task import Method
from soseleto.training.agreement import require_same_settings
from soseleto.training.data import found_before
from soseleto.training.defaults import TARGET_BATCH, batch_size_for
from soseleto.training.fit import fit as train
from soseleto.training.optimizers import Momentum, linear, sgd
from soseleto.training.options import Checkpoints, Compute, Heads, Probes, as_augments, as_losses
from soseleto.training.place import check_rescue
from soseleto.training.progress import LiveLine
from soseleto.training.result import Result
from soseleto.training.resume import comparable, differences, model_fingerprint
from soseleto.training.setup import Settings

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """The options of ``soseleto fit``; None stands for the default by the data."""

    source: Path
    target: Path
    out: Path
    test: Path | None
    mode: str
    model: str | None
    epochs: int
    batch_size: int | None
    target_batch_size: int | None
    lr: float
    weight_decay: float
    weight_step: float
    target_share: float | None
    engine: str
    augment: str | None
    probes: float | None
    suspect_precision: float
    guarantee: bool
    labels_before: str | None
    doubt_labels: bool
    dtype: str | None
    folds: int | None
    baselines: bool
    keep: str
    final: str | None
    checkpoint_every: float
    rescue: Path | None
    micro_batch_size: int | None
    non_finite: str
    seed: int
    device: str
    skip_bad: bool
    reading: Reading


def fit(options: FitOptions, echo: Callable[[str], None]) -> None:
    """Run the command on every rank; only the first prints and writes."""
    with ranks(options.device) as reducer:
        _fit(options, echo if reducer.rank == 0 else lambda text: None, reducer)


def _fit(options: FitOptions, echo: Callable[[str], None], reducer: Reducer) -> None:
    require_same_settings(reducer, _settings(options))
    check_rescue(options.rescue, options.out)
    out = options.out
    if not reducer.first(lambda: _only_report_missing(RunFolder(out))):
        out = _train_all(options, echo, reducer)
    if reducer.rank != 0:
        return
    page = write_report(out)
    shutil.rmtree(out / PARTS, ignore_errors=True)
    for line in [*summary(RunFolder.open(out)), f"report: {page}"]:
        echo(line)


def _settings(options: FitOptions) -> dict[str, Any]:
    """The options, which must be the same on every rank; the same data may have another path on another machine."""
    settings: dict[str, Any] = to_data(options)
    return {
        name: value for name, value in settings.items() if name not in ("source", "target", "test", "out", "rescue")
    }


def _only_report_missing(folder: RunFolder) -> bool:
    """Whether a command was interrupted after its comparison; UsageError where nothing is left to do."""
    if folder.comparison() is None:
        return False
    if folder.has(REPORT) and not (folder.path / PARTS).exists():
        raise UsageError(f"{folder.path} holds a run already: give --out another folder, or delete that one.")
    return True


def _train_all(options: FitOptions, echo: Callable[[str], None], reducer: Reducer) -> Path:
    """The folder that the run was written to."""

    def read() -> tuple[Pair, Rows | None]:
        sets = options.source, options.target, options.test
        with unchanged(options.source):
            pair = read_pair(*sets, mode=options.mode, reading=_reading(options), skip_bad=options.skip_bad)
            return pair, Rows.of(options.source, options.reading) if reducer.rank == 0 else None

    pair, rows = first_reads(reducer, read)
    for problem in pair.problems:
        echo(str(problem))
    job = Job.of(options, pair, reducer, rows)
    for line in job.plan():
        echo(line)
    with LiveLine() as progress:
        job.run(progress)
    return job.home.path


def _reading(options: FitOptions) -> Reading:
    """With the column of earlier labels, which is not a feature."""
    if options.labels_before is None:
        return options.reading
    if options.mode == "transfer":
        raise UsageError("--labels-before has no effect in transfer mode, which has no suspects: leave it out.")
    column = column_of(options.labels_before, options.target.expanduser(), options.reading)
    return replace(options.reading, before_column=column)


def _class_names(pair: Pair) -> tuple[str, ...] | None:
    """Of both sides; None where a side has none."""
    names = pair.source.classes, pair.target.classes
    return None if None in names else tuple(name for side in names for name in side or ())


def _in_words(model: str) -> str:
    return f"{model} (BatchNorm)" if model == "resnet18" else model


@dataclass(frozen=True)
class Job:
    """Everything one ``soseleto fit`` will do, decided before the first step."""

    options: FitOptions
    pair: Pair
    model: str
    classes: int
    batch_size: int
    augment: Augment | None
    folds: int
    parts: list[Part]
    reducer: Reducer
    home: Home
    rows: Rows | None = None  # of a source table
    failed: set[str] = field(default_factory=set)  # parts that diverged
    # Of parts that have ended, where there is a rescue folder:
    remembered: dict[str, Judged] = field(default_factory=dict)
    models: dict[str, bytes] = field(default_factory=dict)
    before: Tensor | None = None  # the target's labels before they were checked

    @classmethod
    def of(cls, options: FitOptions, pair: Pair, reducer: Reducer, rows: Rows | None = None) -> Job:
        if pair.target.labels.is_floating_point():
            raise UsageError("the labels are real numbers: train a regression with soseleto.fit(..., loss=...).")
        shape = tuple(pair.source.inputs.shape[1:])
        if options.keep not in comparison.KEEP:
            raise UsageError(f"--keep must be {' or '.join(comparison.KEEP)}, got {options.keep!r}.")
        folds = _folds(options, len(pair.target))
        rivals = comparison.RIVALS if options.mode == "noisy" else comparison.RIVALS_IN_TRANSFER
        made = cls(
            options=options,
            pair=pair,
            model=model_for(options.model, shape, pair.preparation),
            classes=len(pair.target.classes or ()) or int(pair.target.labels.max()) + 1,
            batch_size=options.batch_size or batch_size_for(len(pair.source)),
            augment=augment_for(options.augment, shape, _class_names(pair)),
            folds=folds,
            reducer=reducer,
            home=Home(options.out, options.rescue),
            rows=rows,
            parts=comparison.plan(
                pair.target, pair.test, folds=folds, rivals=rivals if options.baselines else (), seed=options.seed
            ),
            before=_labels_before(options, pair),
        )
        _check_final(options, pair)
        if options.guarantee and not made._probes(made.main):
            raise UsageError("--guarantee has no effect, since this training has no probes: leave it out.")
        return made

    @property
    def main(self) -> Part:
        """The training that the comparison is about."""
        judged = self.pair.test or self.pair.target
        return Part("", METHOD, self.pair.target, judged, torch.arange(len(judged)))

    def plan(self) -> list[str]:
        """The plan, as lines to print."""
        options, pair = self.options, self.pair
        size = sum(p.numel() for p in self._module().parameters())
        lines = [
            *([] if pair.preparation is None else pair.preparation.describe()),
            f"{len(pair.source):,} source and {counted(len(pair.target), 'target example')}, {options.mode} mode, "
            f"{counted(options.epochs, 'epoch')} in batches of {self.batch_size}",
            f"model {_in_words(self.model)} with {counted(size, 'parameter')}; writing to {options.out}",
        ]
        if pair.source.inputs.ndim == 4:
            lines.append(augment_in_words(self.augment, chosen=options.augment is None))
        if options.mode == "noisy" and not self._probes(self.main):
            lines.append("suspects will be found by their weights alone, without a known precision")
        elif options.mode == "noisy" and self.before is None:
            lines.append(
                "the source's mistakes will be estimated; if you know the target's labels from before they were "
                "checked, give them with --labels-before COLUMN or FILE"
            )
        if self.parts:
            lines.append(comparison.describe_plan(self.parts, pair.test, self.folds))
        return lines

    def run(self, progress: LiveLine) -> None:
        """The main training, the parts and the comparison; a training that has ended is not repeated."""
        self.home.report = lambda text: progress("message", {"text": text})
        while todo := self._todo():
            part, *later = todo
            if self.reducer.rank == 0:
                progress.stage(part.title, later=sum(map(self._cost, later)) / self._cost(part))
            self._train_or_leave_out(part, progress)
        method = self.reducer.first(self._best)
        kept = None if method == METHOD else comparison.whole(method, self.pair.target, self.main.judged)
        if kept is not None and not self.reducer.first(lambda: self._is_done(kept)):
            progress.stage(f"{kept.title} on the whole target")
            self._note(kept, self._train(kept, progress))
        self.reducer.first(lambda: self._close(kept))

    def _todo(self) -> list[Part]:
        """The trainings that have not ended."""
        every = [self.main, *(part for part in self.parts if part.name not in self.failed)]
        ended = self.reducer.first(lambda: self._ended(every))
        return [part for part, has_ended in zip(every, ended, strict=True) if not has_ended]

    def _ended(self, every: list[Part]) -> list[bool]:
        self.home.check()
        if not self.home.main_ended and self._has_ended(self.main):
            self.home.keep()
        return [self._is_done(part) for part in every]

    def _is_done(self, part: Part) -> bool:
        """Whether a training has ended, in its folder or in memory."""
        return part.name in self.remembered or self._has_ended(part)

    def _train_or_leave_out(self, part: Part, progress: LiveLine) -> None:
        try:
            self._note(part, self._train(part, progress))
        except TrainingError as error:
            if part.method == METHOD:
                raise
            self.failed.add(part.name)
            progress("message", {"text": f"{part.title} is left out of the comparison: {error}"})

    def _note(self, part: Part, result: Result) -> None:
        """After a training: follow it to the rescue folder, and keep what the comparison needs in memory."""
        if self.reducer.rank != 0 or self.options.rescue is None:
            return
        if part.name:
            outputs = result.outputs(part.judged.inputs)
            self.remembered[part.name] = Judged(part.method, outputs, part.judged.labels.cpu(), part.places)
        if part.name == part.method and result.out is not None:  # trained on the whole target, so it may be kept
            self.models[part.name] = RunFolder(result.out).model_bytes()
        self.home.follow(result.out)

    def _best(self) -> str:
        """The method whose model is kept."""
        if self.options.keep == METHOD:
            return METHOD
        return comparison.winner(comparison.differences(self._judged))

    def _close(self, kept: Part | None) -> None:
        try:
            self._finish(kept)
        except DiskError as error:
            self.home.move(first_line(error).partition(": ")[0])
            self._finish(kept)

    def _finish(self, kept: Part | None) -> None:
        self.home.check()
        folder = RunFolder(self.home.path)
        table = self.pair.preparation
        features, texts = (self.pair.columns, ()) if table is None else (table.shown, table.texts)
        manifest.remember(folder, self.options.source, self.options.reading, features, self.rows, texts)
        self._write_problems(folder)
        if kept is not None:
            rival = RunFolder(self._place(kept))
            folder.keep_model(rival.model_bytes() if rival.is_run() else self.models[kept.name])
        self._conclude(folder, METHOD if kept is None else kept.method)

    def _train(self, part: Part, progress: LiveLine) -> Result:
        options = self.options
        return train(
            self._module(),
            self.pair.source,
            part.target,
            options.mode,  # type: ignore[arg-type]  # read_pair has checked it
            test=None if part.name else self.pair.test,
            epochs=options.epochs,
            batch_size=self.batch_size,
            target_batch_size=self._target_batch(part),
            optimizer=self._optimizer,
            method=self._method(part),
            augment=self.augment,
            standardize=self.pair.preparation or True,
            probes=self._planted(part),
            compute=self._compute(),
            checkpoints=self._checkpoints(part),
            seed=options.seed,
            device=options.device,
            out=self._place(part),
            progress=progress,
        )

    def _method(self, part: Part) -> Method:
        options = self.options
        if part.method != METHOD:
            return methods.by_name(part.method)
        share = target_share_for(options.target_share, options.mode)
        mixed = target_share(share) if share else chain()
        loss = label_doubt() if options.doubt_labels else normalized()
        return Soseleto(weight_step=options.weight_step, gradients=mixed, engine=options.engine, source_loss=loss)

    def _compute(self) -> Compute:
        options = self.options
        return Compute(
            dtype=_dtype(options.dtype),
            micro_batch_size=options.micro_batch_size,
            non_finite=options.non_finite,  # type: ignore[arg-type]  # Compute checks it
            reducer=self.reducer,
        )

    def _conclude(self, folder: RunFolder, kept: str) -> None:
        """Calibrate the temperature of the model that is kept, and write it with the comparison."""
        held_out = [one for one in self._in_folds if one.method == kept]
        if held_out:
            outputs, labels = comparison.pooled(held_out)
            folder.write_temperature(fit_temperature(outputs, labels), examples=len(labels))
        how = {"judged_on": "target" if self.pair.test is None else "test", "folds": self.folds}
        rows = comparison.rows(self._judged)
        for row in rows:
            if difference := comparison.differences(self._judged).get(row["method"]):
                row["minus_soseleto"] = {"value": difference.value, "low": difference.low, "high": difference.high}
        folder.write_comparison({**how, "rows": rows, "kept": kept})
        if self.options.final is not None:
            data = FinalData.of(self.pair.source, self.pair.target, self._weights(self.main))
            folder.write_final(data.tensors(), self._recipe)

    @cached_property
    def _in_folds(self) -> list[Judged]:
        """The parts that were trained, evaluated; a rival that diverged in one of its parts is left out."""
        failed = {part.method for part in self.parts if not self._is_done(part)}
        return [self._judge(part) for part in self.parts if part.method not in failed]

    @cached_property
    def _judged(self) -> list[Judged]:
        """What the comparison is made of: with a test set the main training, and not its folds."""
        if self.pair.test is None:
            return [*self._in_folds, *self._boosted]
        return [self._judge(self.main), *(one for one in self._in_folds if one.method != METHOD), *self._boosted]

    @property
    def _boosted(self) -> list[Judged]:
        """Of tables: gradient boosting on source and target, and the final model, on the same examples."""
        table = self.pair.preparation
        if table is None or self.options.mode != "noisy" or not (self.options.baselines or self.options.final):
            return []
        trained = [self.main] if self.pair.test is not None else [part for part in self.parts if part.method == METHOD]
        found: list[Judged] = []
        for part in trained:
            if self.options.final is not None:
                data = FinalData.of(self.pair.source, part.target, self._weights(part))
                found.append(_judge_final(FINAL, by_recipe(self._recipe), data, part))
            if self.options.baselines and importlib.util.find_spec("sklearn") is not None:
                data = FinalData.of(self.pair.source, part.target, None)
                found.append(_judge_final(BOOSTING, gradient_boosting(table.codes, self.options.seed), data, part))
        return found

    @property
    def _recipe(self) -> dict[str, Any]:
        """Of the final model."""
        assert self.pair.preparation is not None
        return {"name": self.options.final, "codes": list(self.pair.preparation.codes), "seed": self.options.seed}

    def _weights(self, part: Part) -> Tensor:
        """The learned weights of a part's training, in the source's order."""
        ranking = RunFolder(self._place(part)).ranking()
        by_id = dict(zip(ranking["id"].tolist(), ranking["weight"].tolist(), strict=True))
        return torch.tensor([by_id[self.pair.source.id_of(row)] for row in range(len(self.pair.source))])

    def _judge(self, part: Part) -> Judged:
        if part.name in self.remembered and not RunFolder(self._place(part)).is_run():
            return self.remembered[part.name]
        loaded = load(self._place(part), self._module(), device=self.options.device)
        return Judged(part.method, loaded.outputs(part.judged.inputs), part.judged.labels.cpu(), part.places)

    def _has_ended(self, part: Part) -> bool:
        """Whether the part's training has ended; one with other settings raises."""
        folder = RunFolder(self._place(part))
        if not folder.is_run() or not folder.has_ended():
            return False
        old, new = comparable(folder.config()), self._config(part)
        old["device"] = str(old.get("device")).partition(":")[0]
        if changed := differences(old, new, new):
            raise UsageError(
                f"{folder.path} holds a training with other settings, since {', '.join(changed)}: give the same as "
                "before, or --out another folder."
            )
        return True

    def _config(self, part: Part) -> dict[str, Any]:
        """The entries of ``config.json`` that affect a part's result."""
        options = self.options
        settings = Settings(
            mode=options.mode,
            epochs=options.epochs,
            optimizer=self._optimizer,
            schedule=linear,
            loss=as_losses(cross_entropy, options.mode),
            method=self._method(part),
            augment=as_augments(self.augment),
            heads=Heads(),
            probes=self._planted(part),
            compute=self._compute(),
            checkpoints=self._checkpoints(part),
            seed=options.seed,
        )
        sizes = {"batch_size": self.batch_size, "target_batch_size": self._target_batch(part)}
        device = self.reducer.device or choose_device(options.device)
        return comparable({**settings.describe(), **sizes, "device": device.type})

    @property
    def _optimizer(self) -> Momentum:
        return sgd(self.options.lr, self.options.weight_decay)

    def _planted(self, part: Part) -> Probes:
        share = self._probes(part)
        return Probes(
            share=share,
            labels_before=self._before(part),
            precision=self.options.suspect_precision,
            guarantee=self.options.guarantee and bool(share),
        )

    def _before(self, part: Part) -> Tensor | None:
        """The earlier labels of the part's target; None where too few of them were wrong to be planted."""
        asked = not part.name and self.options.labels_before is not None
        if self.before is None or not (asked or self._probes(part)):
            return None
        if not part.name:
            return self.before
        place = {self.pair.target.id_of(row): row for row in range(len(self.pair.target))}
        before = self.before[[place[part.target.id_of(row)] for row in range(len(part.target))]]
        return found_before(before, part.target)

    def _checkpoints(self, part: Part) -> Checkpoints:
        """With the entries of ``config.json`` in addition to the training's own settings."""
        notes = {**self._notes, "probe_share": self._probes(part)}
        rescue = None if self.home.rescue is None else _within(self.home.rescue, part)
        return Checkpoints(seconds=self.options.checkpoint_every, rescue=rescue, notes=notes)

    @cached_property
    def _notes(self) -> dict[str, Any]:
        """What the main training and all parts have in common."""
        columns = None if self.pair.columns is None else list(self.pair.columns)
        return {
            "model": self.model,
            "module_fingerprint": model_fingerprint(self._module()),
            "n_classes": self.classes,
            "columns": columns,
            "folds": self.folds,
            "baselines": self.options.baselines,
            "labels_before": None if self.before is None else hashlib.sha256(self.before.numpy().data).hexdigest(),
            "data": _digest(self.pair),
        }

    def _place(self, part: Part) -> Path:
        return _within(self.home.path, part)

    def _module(self) -> nn.Module:
        table = self.pair.preparation
        shape = tuple(self.pair.source.inputs.shape[1:]) if table is None else (table.width,)
        return make_model(self.model, self.options.mode, classes=self.classes, shape=shape, seed=self.options.seed)

    def _target_batch(self, part: Part) -> int:
        """As given, but at most what the target has without its probes."""
        probes = self._probes(part)
        share = AUTO_SHARE if probes == "auto" else probes
        left = len(part.target) - min(AUTO_MOST, round(share * len(part.target)))
        wanted = self.options.target_batch_size
        return min(TARGET_BATCH, left) if wanted is None else min(wanted, left) if part.name else wanted

    def _probes(self, part: Part) -> Share:
        if self.options.mode != "noisy" or part.method != METHOD:
            return 0.0
        if self.options.probes is None and (self.reducer.ranks > 1 or self.options.micro_batch_size):
            return 0.0  # they need one process and whole batches
        return probes_for(self.options.probes, len(self.pair.source), len(part.target))

    def _cost(self, part: Part) -> float:
        """The work of a step, in forward passes of one example."""
        target = self._target_batch(part)
        return {METHOD: 4 * self.batch_size + 3 * target, "ordinary": 3 * self.batch_size}.get(part.method, 3 * target)

    def _write_problems(self, folder: RunFolder) -> None:
        if self.pair.problems:
            dropped = set(self.pair.dropped)
            folder.write_problems([{**p.to_dict(), "left_out": p in dropped} for p in self.pair.problems])


def _judge_final(method: str, estimator: Any, data: FinalData, part: Part) -> Judged:
    outputs = fit_final(estimator, data).outputs(part.judged.inputs)
    return Judged(method, outputs, part.judged.labels.cpu(), part.places)


def _check_final(options: FitOptions, pair: Pair) -> None:
    if options.final is None:
        return
    if options.final not in FINALS:
        known = " or ".join(FINALS)
        raise UsageError(f"unknown final model {options.final!r}{did_you_mean(options.final, FINALS)}: write {known}.")
    if pair.preparation is None or options.mode != "noisy":
        raise UsageError("--final is for tables in noisy mode: leave it out.")
    if options.rescue is not None:
        raise UsageError("--final and --rescue cannot be used together: leave one out.")
    boosting()  # raises without scikit-learn


def _within(folder: Path, part: Part) -> Path:
    return folder / PARTS / part.name if part.name else folder


def _labels_before(options: FitOptions, pair: Pair) -> Tensor | None:
    if options.labels_before is None:
        return found_before(pair.labels_before, pair.target)
    return read_labels_before(options.labels_before, pair.target, options.target.expanduser(), _reading(options))


def _digest(pair: Pair) -> str:
    """sha256 of the data sets with the names of their classes and, where known, the correct labels."""
    digest = hashlib.sha256()
    for one in [pair.source, pair.target, *([] if pair.test is None else [pair.test])]:
        truth = None if one.truth is None else one.truth.tolist()
        digest.update(f"{one.fingerprint()}{one.classes}{truth}".encode())
    return digest.hexdigest()


def summary(folder: RunFolder) -> list[str]:
    """The closing lines, from the run folder."""
    last = [record for record in folder.metrics() if record.get("event") == "epoch"][-1]
    n_source = folder.config()["n_source"]
    return [
        *comparison.describe(folder.comparison() or {}),
        *filter(None, [verdict(folder.comparison() or {})]),
        *(["predictions are made by the final model, SOSELETO, then boosting"] if folder.has(FINAL_FILE) else []),
        f"effective source size {last['effective_source']:,.0f} of {n_source:,}",
        _suspects(folder),
    ]


def _suspects(folder: RunFolder) -> str:
    """Their number, their estimated precision, and the command that lists them."""
    command, found = f"soseleto rank {folder.path} --suspects", folder.suspects()
    if found is None:
        count = int(is_suspect(folder.ranking()).sum())
        if folder.config().get("mode") == "transfer":
            low = counted(count, "source example has", "source examples have")
            return f"{low} a weight below {LOW_WEIGHT} (soseleto rank {folder.path} --worst 20)"
        return (
            f"{counted(count, 'suspect')}: source examples of weight below {LOW_WEIGHT}, with an unknown precision "
            f"({command}; soseleto audit {folder.path} measures it)"
        )
    if not found["count"]:
        highest = f"{100 * float(folder.ranking()['mislabelled_probability'].max()):.0f} %"
        best = found.get("best") or {}
        return (
            f"no suspects: no label is mislabelled with a probability above {highest} by estimate; the best list has "
            f"{best.get('count', 0):,} examples with precision {in_words(best.get('precision'))} ({command})"
        )
    return (
        f"{counted(found['count'], 'suspect')} with precision {in_words(found['precision'])} and recall "
        f"{in_words(found['recall'])} ({command}; soseleto audit {folder.path} measures them)"
    )


def _dtype(name: str | None) -> torch.dtype | None:
    """For autocast; float32 is how the model runs without it."""
    if name is not None and name not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}{did_you_mean(name, DTYPES)}: choose from {', '.join(DTYPES)}.")
    return None if name in (None, "float32") else getattr(torch, name)


def _folds(options: FitOptions, n_target: int) -> int:
    if options.folds is None:
        return 0 if options.test is not None or not options.baselines else folds_for(n_target)
    if options.folds < 0 or options.folds == 1:
        raise UsageError(f"--folds must be 0 or at least 2, got {options.folds}.")
    if options.folds > n_target // 2:
        raise UsageError(
            f"--folds is {options.folds}, but the target has only {counted(n_target, 'example')}: take fewer folds."
        )
    return options.folds
