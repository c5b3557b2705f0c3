"""``soseleto fit`` and ``scan``: read, train beside the baselines or judge the labels, write the report, and summarise.

RUN is the folder of the main training; the others are in RUN/parts until all of them have ended. The same command
continues an interrupted one: trainings that have ended are not repeated.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from soseleto.cli.options import FitOptions, open_text
from soseleto.comparison import accuracy
from soseleto.comparison.scan import scan as judge
from soseleto.comparison.trainings import Comparing
from soseleto.data import Augment, Pair, Preprocess, TablePreparation, Views, read_pair
from soseleto.data.augment import AnyViews
from soseleto.data.cells import plan_of
from soseleto.data.text import TextPreparation
from soseleto.defaults import resolve
from soseleto.errors import UsageError, counted, did_you_mean, need
from soseleto.models.architectures import default_name, make_model
from soseleto.models.pretrained import pretrained_images
from soseleto.models.trunk_and_heads import InUnits
from soseleto.parallel.reducer import Reducer, Single, choose_device, ranks
from soseleto.report import write_report
from soseleto.report.sentences import about_wrong, verdict
from soseleto.run_folder.files import checksums_of
from soseleto.run_folder.folder import FIRST, PARTS, PRETRAINED, PROBLEMS, REPORT, RunFolder
from soseleto.run_folder.ranking import LOW_WEIGHT, about_suspects, about_unknown, is_known, is_suspect
from soseleto.run_folder.source import digest, remember
from soseleto.task.losses import Loss, cross_entropy, in_units
from soseleto.training.data import found_before
from soseleto.training.options import Heads, Inputs
from soseleto.training.progress import LiveLine

LEARNERS = ("logistic", "boosting")  # of a scan
KNOWN = {"columns": "the columns", "pixels": "the pixels", "network": "frozen features of the network"}
DEEP = "preact-resnet18"  # for --method strong, whose teacher needs BatchNorm


def fit(options: FitOptions, echo: Callable[[str], None]) -> None:
    """Run the command on every rank; only the first prints and writes."""
    options.check()
    with ranks(options.device) as reducer:
        _fit(options, echo if reducer.rank == 0 else lambda text: None, reducer)


def _fit(options: FitOptions, echo: Callable[[str], None], reducer: Reducer) -> None:
    folder = RunFolder(options.out)
    reducer.first(folder.require_place)
    compared = reducer.first(lambda: folder.is_run() and folder.comparison() is not None)
    if compared and reducer.first(lambda: _has_ended(folder)):
        raise UsageError(f"{folder.path} holds a run already: give --out another folder, or delete that one.")
    here: list[tuple[Pair, str | None]] = []
    reducer.first(lambda: here.append(read(options, reducer)))  # rank 0 fills the caches that the others read
    pair, sha256 = here[0] if here else read(options, reducer)
    if not compared:
        _train(options, Training(options, pair, reducer), echo, sha256)
    if reducer.rank != 0:
        return
    _finish(folder, echo)


def _finish(folder: RunFolder, echo: Callable[[str], None]) -> None:
    page = write_report(folder.path)
    shutil.rmtree(folder.path / PARTS, ignore_errors=True)
    folder.tidy()
    for line in [*summary(folder), f"report: {page}"]:
        echo(line)


def _has_ended(folder: RunFolder) -> bool:
    """Whether the last file has been written and is in the list of checksums."""
    listed = REPORT in (checksums_of(folder.path) or {})
    return listed and folder.has(REPORT) and not (folder.path / PARTS).exists()


def read(options: FitOptions, reducer: Reducer) -> tuple[Pair, str | None]:
    """The data, and the sha256 of the source's file."""
    pair = read_pair(
        options.source,
        options.target,
        options.test,
        mode=options.mode,
        reading=options.reading(),
        skip_bad=options.skip_bad,
    )
    return pair, digest(options.source) if reducer.rank == 0 else None


def _train(options: FitOptions, training: Training, echo: Callable[[str], None], sha256: str | None) -> None:
    pair = training.pair
    chosen = {"epochs": options.epochs, "batch_size": options.batch_size, "lr": options.lr}
    with LiveLine() as progress:
        comparing = Comparing(
            make=training.make,
            pair=pair,
            mode=options.mode,  # type: ignore[arg-type]  # check has seen it
            folds=options.folds,
            baselines=options.baselines,
            keep=options.keep,
            method=options.chosen_method(),
            inputs=Inputs(augment=training.augment, standardize=training.standardize),
            heads=Heads(),
            probes=options.probes_of(pair),
            target_batch_size=options.config.get("target_batch_size"),
            checkpoints=options.checkpoints(training.notes),
            compute=training.compute,
            seed=options.seed,
            device=options.device,
            out=options.out,
            progress=progress,
            chosen={**chosen, "optimizer": options.optimizer(), "loss": training.loss},
            describe=lambda folder: describe_data(folder, options, pair, sha256),
        )
        for line in [*map(str, pair.problems), *training.plan(comparing)]:
            echo(line)
        comparing.run()


def describe_data(folder: RunFolder, options: FitOptions, pair: Pair, sha256: str | None) -> None:
    """Write where the source is, what was wrong with the data, and what a pretrained text model is built from."""
    if isinstance(pair.preparation, TextPreparation) and options.model is not None:
        folder.write_json(PRETRAINED, vars(open_text(options.model)), indent=None)
    remember(folder, options.source, pair, sha256, options.reading())
    if pair.problems:
        dropped = set(pair.dropped)
        problems = [{**vars(problem), "left_out": problem in dropped} for problem in pair.problems]
        folder.write_json(PROBLEMS, problems)


def scan(options: FitOptions, learner: str, echo: Callable[[str], None]) -> None:
    options.check()
    if learner not in LEARNERS:
        raise UsageError(f"unknown learner {learner!r}{did_you_mean(learner, LEARNERS)}: logistic or boosting.")
    folder = RunFolder(options.out)
    folder.require_place()
    pair, sha256 = read(options, Single())
    training = Training(options, pair, Single())
    described = [] if pair.preparation is None else plan_of(pair.preparation.seen)
    sizes = f"{len(pair.source):,} source and {counted(len(pair.target), 'target example')}"
    for line in [*map(str, pair.problems), *described, f"{sizes}, on {_features(options, training)}"]:
        echo(line)
    boosting = None
    if learner == "boosting":
        ensemble = need("sklearn.ensemble", to="boosting")
        numbers = pair.target.labels.is_floating_point()
        make = ensemble.HistGradientBoostingRegressor if numbers else ensemble.HistGradientBoostingClassifier
        # As good as 255 bins on Adult; with weights scikit-learn searches every column once for each.
        boosting = make(max_bins=64, random_state=options.seed)
    with LiveLine() as progress:
        judge(
            pair.source,
            pair.target,
            boosting,
            training.make(),
            labels_before=found_before(pair.labels_before, pair.target),
            inputs=Inputs(standardize=training.standardize),
            seed=options.seed,
            device=options.device,
            out=options.out,
            notes=training.notes,
            progress=progress,
            **({} if options.suspect_precision is None else {"precision": options.suspect_precision}),
        )
    describe_data(folder, options, pair, sha256)
    _finish(folder, echo)


def _features(options: FitOptions, training: Training) -> str:
    if options.model != "linear":
        return f"the frozen features of {options.model}"
    if len(training.shape) == 3:
        return "pixels; a pretrained network knows more: --model timm:NAME or hf:FOLDER_OR_ID"
    return "the columns of the table" if training.pair.preparation is not None else "the inputs themselves"


@dataclass(frozen=True)
class Training:
    """What the options and the data come to."""

    options: FitOptions
    pair: Pair
    reducer: Reducer

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input, as the model gets it."""
        table = self.pair.preparation
        return (table.width,) if isinstance(table, TablePreparation) else tuple(self.pair.source.inputs.shape[1:])

    @property
    def model(self) -> str:
        """As given; else by the inputs."""
        table = self.pair.preparation
        if self.options.model is not None:
            return self.options.model
        if self.options.method == "strong" and len(self.shape) == 3:
            return DEEP
        if not isinstance(table, TablePreparation):
            return default_name(self.shape)
        return "linear" if table.is_text else "table"

    @cached_property
    def classes(self) -> int:
        """1 for labels that are numbers."""
        target = self.pair.target
        return 1 if self.reads_numbers else len(target.classes or ()) or int(target.labels.max()) + 1

    @property
    def reads_numbers(self) -> bool:
        """As labels."""
        return self.pair.target.labels.is_floating_point()

    @property
    def loss(self) -> Loss:
        return in_units(float(self.pair.target.labels.var(correction=0))) if self.reads_numbers else cross_entropy

    def make(self) -> nn.Module:
        return self._made()[0]

    def _made(self) -> tuple[nn.Module, dict[str, Any] | None]:
        """A new model, and the description of a pretrained one."""
        options = self.options
        sizes: Any = {"classes": self.classes, "shape": self.shape, "seed": options.seed}
        pretrained = options.pretrained(self.model, self.pair)
        if pretrained is not None:
            model, described = pretrained_images(self.model, options.mode, options=pretrained, **sizes)
        else:
            model, described = make_model(self.model, options.mode, **sizes), None
        return InUnits(model, self.pair.target.labels) if self.reads_numbers else model, described

    @cached_property
    def notes(self) -> dict[str, Any]:
        """Entries of ``config.json``, from which ``load`` builds the model again."""
        _, described = self._made()
        return {
            "model": self.model,
            **({} if described is None else {"pretrained": described}),
            "n_classes": self.classes,
        }

    @property
    def standardize(self) -> Any:
        """By the source's statistics; a pretrained network normalises images itself and gets values from 0 to 1."""
        if "pretrained" not in self.notes:
            return self.pair.preparation or True
        channels = self.pair.source.inputs.shape[1]
        return Preprocess((0.0,) * channels, (1.0,) * channels)

    @cached_property
    def augment(self) -> Augment | AnyViews | None:
        return self.options.augment(self.pair)

    @cached_property
    def compute(self) -> Any:
        """The strong method runs images, whose networks are large, in bfloat16 on a GPU."""
        device = self.reducer.device or choose_device(self.options.device)
        large = device.type == "cuda" and self.options.method == "strong" and isinstance(self.augment, Views)
        return self.options.compute_with(self.reducer if self.reducer.ranks > 1 else None, large=large)

    def plan(self, comparing: Comparing) -> list[str]:
        """What is known of the data, the model and the method before the training."""
        options, pair = self.options, self.pair
        model = self.make()
        batch = resolve(model, n_source=len(pair.source), batch_size=options.batch_size).batch_size
        lines = [
            *([] if pair.preparation is None else plan_of(pair.preparation.seen)),
            f"{len(pair.source):,} source and {counted(len(pair.target), 'target example')}, {options.mode} mode, "
            f"{counted(comparing.epochs, 'epoch')} in batches of {batch}",
            f"model {self.model} with {counted(sum(p.numel() for p in model.parameters()), 'parameter')}; "
            f"writing to {options.out}",
        ]
        if comparing.parts and comparing.features is not None:
            lines.append(
                f"a first answer by {KNOWN[comparing.features]} comes before the training, in {options.out / FIRST}"
            )
        if comparing.features == "network":
            lines.append(
                "fine-tuning often adds little to it: the first answer can be used, and the training left, at any time"
            )
        return [*lines, *self._about_texts(), *_about_folds(comparing)]

    def _about_texts(self) -> list[str]:
        table = self.pair.preparation
        if isinstance(table, TextPreparation):
            cut = int(table.cut(self.pair.source.inputs).sum())
            longer = f"; {cut:,} of {len(self.pair.source):,} source texts are cut" if cut else ""
            return [f"column {table.column!r} is read up to {table.tokenizer.longest} tokens a text{longer}"]
        if table is None or not table.texts or self.options.model is not None:
            return []
        return ["texts are read as hashed words, which is fast; --model hf:FOLDER_OR_ID also knows their meaning"]


def _about_folds(comparing: Comparing) -> list[str]:
    """What is trained beside the main training."""
    if not comparing.parts:
        return []
    names = [accuracy.TITLES[name] for name in dict.fromkeys(part.method for part in comparing.parts)]
    where = f"{comparing.fold_count} held-out folds of the target" if comparing.fold_count else "the test examples"
    beside = " beside " * (len(names) > 1) + ", ".join(name for name in names if name != "SOSELETO")
    more = counted(len({part.name for part in comparing.parts}), "more training")
    return [f"compared on {where}{beside}: {more} (--folds 0 and --no-baselines leave them out)"]


def summary(folder: RunFolder) -> list[str]:
    """The closing lines: accuracies, wrong labels, suspects, and the command to type next."""
    comparison, suspects, ranking = folder.comparison() or {}, folder.suspects(), folder.ranking()
    count, command = int(is_suspect(ranking).sum()), f"rank {folder.path} --worst 20"
    if folder.config().get("mode") == "transfer":
        low = counted(count, "source example has", "source examples have")
        about = f"{low} a weight below {LOW_WEIGHT:g}"
    else:
        about = about_suspects(ranking, suspects)
        if count:
            precision = (suspects or {}).get("precision")
            command = f"{'review' if is_known(precision) else 'audit'} {folder.path}"
    wrong = about_wrong(suspects or {}, len(ranking["weight"]))
    lines = [*accuracy.table(comparison), verdict(comparison), wrong, about, about_unknown(ranking)]
    return [*filter(None, lines), f"next: soseleto {command}"]
