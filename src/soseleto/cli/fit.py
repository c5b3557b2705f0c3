"""``soseleto fit``: read, train, compare with the rivals, report, and end with what was found.

RUN is the main training's own folder; the trainings of the comparison lie in RUN/parts until all of them have ended.
Typed again after a kill, what has ended is kept and the rest goes on.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from soseleto import methods
from soseleto.algorithm import Soseleto
from soseleto.cli import comparison
from soseleto.cli.comparison import METHOD, Judged, Part
from soseleto.data import Augment, Pair, Reading, read_pair
from soseleto.errors import TrainingError, UsageError
from soseleto.extensions import chain, target_share
from soseleto.models.by_name import default_name, make_model
from soseleto.parallel.reducer import Reducer, first_reads, ranks
from soseleto.prediction.load import load
from soseleto.prediction.temperature import fit_temperature
from soseleto.report import write_report
from soseleto.run_folder import manifest
from soseleto.run_folder.folder import PARTS, RunFolder
from soseleto.run_folder.ranking import LOW_WEIGHT, is_suspect
from soseleto.suspects.probes import AUTO_MOST, AUTO_SHARE, Share
from soseleto.training.defaults import (
    TARGET_BATCH,
    augment_for,
    batch_size_for,
    folds_for,
    probes_for,
    target_share_for,
)
from soseleto.training.fit import fit as train
from soseleto.training.progress import LiveLine


@dataclass(frozen=True, kw_only=True)
class FitWords:
    """The words of ``soseleto fit``; None leaves a choice to the library."""

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
    precision: float
    folds: int | None
    baselines: bool
    checkpoint_every: float
    micro_batch_size: int | None
    non_finite: str
    seed: int
    device: str
    skip_bad: bool
    reading: Reading


def fit(words: FitWords, say: Callable[[str], None]) -> None:
    """Of several ranks, only the first says anything and writes."""
    with ranks(words.device) as reducer:
        _fit(words, say if reducer.rank == 0 else lambda text: None, reducer)


def _fit(words: FitWords, say: Callable[[str], None], reducer: Reducer) -> None:
    def read() -> Pair:
        if RunFolder(words.out).comparison() is not None:
            raise UsageError(f"{words.out} holds a run already: give --out another folder, or delete that one.")
        sets = words.source, words.target, words.test
        return read_pair(*sets, mode=words.mode, reading=words.reading, skip_bad=words.skip_bad)

    pair = first_reads(reducer, read)
    for problem in pair.problems:
        say(str(problem))
    job = Job.of(words, pair, reducer)
    for line in job.plan():
        say(line)
    with LiveLine() as progress:
        job.run(progress)
    if reducer.rank != 0:
        return
    page = write_report(words.out)
    for line in [*summary(RunFolder.open(words.out)), f"report: {page}"]:
        say(line)


@dataclass(frozen=True)
class Job:
    """Everything one ``fit`` will do, settled before the first step."""

    words: FitWords
    pair: Pair
    model: str
    classes: int
    batch_size: int
    augment: Augment | None
    folds: int
    parts: list[Part]
    reducer: Reducer

    @classmethod
    def of(cls, words: FitWords, pair: Pair, reducer: Reducer) -> Job:
        if pair.target.labels.is_floating_point():
            raise UsageError("the labels are real numbers: train a regression with soseleto.fit(..., loss=...).")
        shape = tuple(pair.source.inputs.shape[1:])
        folds = _folds(words, len(pair.target))
        rivals = comparison.RIVALS if words.mode == "noisy" else comparison.RIVALS_IN_TRANSFER
        return cls(
            words=words,
            pair=pair,
            model=words.model or default_name(shape),
            classes=len(pair.target.classes or ()) or int(pair.target.labels.max()) + 1,
            batch_size=words.batch_size or batch_size_for(len(pair.source)),
            augment=augment_for(words.augment, shape),
            folds=folds,
            reducer=reducer,
            parts=comparison.plan(
                pair.target, pair.test, folds=folds, rivals=rivals if words.baselines else (), seed=words.seed
            ),
        )

    @property
    def main(self) -> Part:
        """The training that the others are there to judge."""
        return Part("", METHOD, self.pair.target, self.pair.test or self.pair.target)

    def plan(self) -> list[str]:
        """What is going to happen, for people."""
        words, pair = self.words, self.pair
        size = sum(p.numel() for p in self._module().parameters())
        lines = [
            f"{len(pair.source):,} source and {len(pair.target):,} target examples, {words.mode} mode, "
            f"{words.epochs} epochs in batches of {self.batch_size}",
            f"model {self.model} with {size:,} parameters; writing to {words.out}",
        ]
        if words.mode == "noisy" and not self._probes(self.main):
            lines.append("suspects will be told by their weights alone, without known precision")
        if self.parts:
            lines.append(comparison.plan_in_words(self.parts, pair.test, self.folds))
        return lines

    def run(self, progress: LiveLine) -> None:
        """The main training, the parts, and what they tell; what has ended already is not repeated."""
        every = (self.main, *self.parts)
        ended = self.reducer.first(lambda: [self._has_ended(part) for part in every])
        todo = [part for part, has_ended in zip(every, ended, strict=True) if not has_ended]
        for at, part in enumerate(todo):
            if self.reducer.rank == 0:
                progress.stage(part.title, later=sum(map(self._cost, todo[at + 1 :])) / self._cost(part))
            try:
                self._train(part, progress)
            except TrainingError as error:
                if part.method == METHOD:
                    raise
                progress("message", {"text": f"{part.title} is left out of the comparison: {error}"})
        self.reducer.first(self._close)

    def _close(self) -> None:
        folder = RunFolder(self.words.out)
        manifest.remember(folder, self.words.source, self.words.reading, self.pair.columns)
        self._write_problems(folder)
        self._conclude(folder)
        shutil.rmtree(folder.path / PARTS, ignore_errors=True)

    def _train(self, part: Part, progress: LiveLine) -> None:
        words = self.words
        share = target_share_for(words.target_share, words.mode)
        mixed = target_share(share) if share else chain()
        method = Soseleto(weight_step=words.weight_step, gradients=mixed, engine=words.engine)
        train(
            self._module(),
            self.pair.source,
            part.target,
            words.mode,  # type: ignore[arg-type]  # read_pair has refused any other
            test=None if part.name else self.pair.test,
            epochs=words.epochs,
            batch_size=self.batch_size,
            target_batch_size=self._target_batch(part),
            lr=words.lr,
            weight_decay=words.weight_decay,
            method=method if part.method == METHOD else methods.by_name(part.method),
            augment_source=self.augment,
            augment_target=self.augment,
            standardize=True,
            probes=self._probes(part),
            suspect_precision=words.precision,
            seed=words.seed,
            device=words.device,
            out=self._place(part),
            checkpoint_every=words.checkpoint_every,
            micro_batch_size=words.micro_batch_size,
            non_finite=words.non_finite,  # type: ignore[arg-type]  # fit refuses any other word
            notes=self._notes,
            progress=progress,
            reducer=self.reducer,
        )

    def _conclude(self, folder: RunFolder) -> None:
        """Judge every part, calibrate, and write both down."""
        failed = {part.method for part in self.parts if not self._has_ended(part)}  # a rival whose loss went astray
        judged = [self._judge(part) for part in self.parts if part.method not in failed]
        held_out = [one for one in judged if one.method == METHOD]
        if held_out:
            outputs, labels = comparison.pooled(held_out)
            folder.write_temperature(fit_temperature(outputs, labels), examples=len(labels))
        if self.pair.test is not None:
            judged = [self._judge(self.main), *(one for one in judged if one.method != METHOD)]
        how = {"judged_on": "target" if self.pair.test is None else "test", "folds": self.folds}
        folder.write_comparison({**how, "rows": comparison.rows(judged)})

    def _judge(self, part: Part) -> Judged:
        loaded = load(self._place(part), self._module(), device=self.words.device)
        return Judged(part.method, loaded.outputs(part.judged.inputs), part.judged.labels.cpu())

    def _has_ended(self, part: Part) -> bool:
        """Whether the part needs no training any more; one of other settings is refused."""
        folder = RunFolder(self._place(part))
        if not folder.is_run() or not folder.has_ended():
            return False
        config, same = folder.config(), {**self._notes, **self._basics(part)}
        changed = [name for name, value in same.items() if config.get(name) != value]
        if changed:
            raise UsageError(
                f"{folder.path} holds a run of another kind ({', '.join(changed)} differ): give --out another folder, "
                "or delete that one."
            )
        return True

    def _basics(self, part: Part) -> dict[str, Any]:
        words = self.words
        return {"mode": words.mode, "epochs": words.epochs, "batch_size": self.batch_size, "lr": words.lr} | {
            "target_batch_size": self._target_batch(part),
            "seed": words.seed,
        }

    @cached_property
    def _notes(self) -> dict[str, Any]:
        """What ``config.json`` keeps beside the training's own settings."""
        sets = [self.pair.source, self.pair.target, *([] if self.pair.test is None else [self.pair.test])]
        digest = hashlib.sha256("".join(one.fingerprint() for one in sets).encode()).hexdigest()
        columns = None if self.pair.columns is None else list(self.pair.columns)
        return {"model": self.model, "n_classes": self.classes, "columns": columns, "folds": self.folds, "data": digest}

    def _place(self, part: Part) -> Path:
        return self.words.out / PARTS / part.name if part.name else self.words.out

    def _module(self) -> nn.Module:
        shape = tuple(self.pair.source.inputs.shape[1:])
        return make_model(self.model, self.words.mode, classes=self.classes, shape=shape, seed=self.words.seed)

    def _target_batch(self, part: Part) -> int:
        """As asked, but no more than the target has beside its probes."""
        probes = self._probes(part)
        share = AUTO_SHARE if probes == "auto" else probes
        left = len(part.target) - min(AUTO_MOST, round(share * len(part.target)))
        wanted = self.words.target_batch_size
        return min(TARGET_BATCH, left) if wanted is None else min(wanted, left) if part.name else wanted

    def _probes(self, part: Part) -> Share:
        if self.words.mode != "noisy" or part.method != METHOD:
            return 0.0
        if self.words.probes is None and (self.reducer.ranks > 1 or self.words.micro_batch_size):
            return 0.0  # they are followed in one process and on whole batches
        return probes_for(self.words.probes, len(self.pair.source), len(part.target))

    def _cost(self, part: Part) -> float:
        """The work of a step, in forwards of one example."""
        target = self._target_batch(part)
        return {METHOD: 4 * self.batch_size + 3 * target, "ordinary": 3 * self.batch_size}.get(part.method, 3 * target)

    def _write_problems(self, folder: RunFolder) -> None:
        if self.pair.problems:
            dropped = set(self.pair.dropped)
            folder.write_problems([{**p.to_dict(), "left_out": p in dropped} for p in self.pair.problems])


def summary(folder: RunFolder) -> list[str]:
    """The closing lines, from what the run folder holds."""
    last = [record for record in folder.metrics() if record.get("event") == "epoch"][-1]
    n_source = folder.config()["n_source"]
    return [
        *comparison.in_words(folder.comparison() or {}),
        f"effective source size {last['effective_source']:,.0f} of {n_source:,}",
        _suspects(folder),
    ]


def _suspects(folder: RunFolder) -> str:
    """How many, how surely, and how to see them."""
    look, found = f"soseleto rank {folder.path} --suspects", folder.suspects()
    if found is None:
        count = int(is_suspect(folder.ranking()).sum())
        return f"{count:,} suspects: source examples of weight below {LOW_WEIGHT} ({look})"
    if not found["count"]:
        highest = f"{100 * float(folder.ranking()['mislabelled_probability'].max()):.0f} %"
        most = f"the worst ranked: soseleto rank {folder.path} --worst 20"
        return f"no suspects: no label is mislabelled with a probability above {highest} by estimate ({most})"
    precision, recall = found["precision"], found["recall"]
    return (
        f"{found['count']:,} suspects, of which {100 * precision['value']:.0f} % ({100 * precision['low']:.0f} to "
        f"{100 * precision['high']:.0f}) are mislabelled by estimate, and {100 * recall['value']:.0f} % of the "
        f"mislabelled are among them ({look})"
    )


def _folds(words: FitWords, n_target: int) -> int:
    if words.folds is None:
        return 0 if words.test is not None else folds_for(n_target)
    if words.folds < 0 or words.folds == 1:
        raise UsageError(f"--folds must be 0 or at least 2, got {words.folds}.")
    if words.folds > n_target // 2:
        raise UsageError(f"--folds is {words.folds}, but the target has only {n_target} examples: take fewer folds.")
    return words.folds
