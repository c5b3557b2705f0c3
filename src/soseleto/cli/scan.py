"""``soseleto scan``: read, judge the labels on frozen features, write the report, and print a summary."""

from __future__ import annotations

from collections.abc import Callable

from soseleto.cli.fit import Training, describe_data, read, summary
from soseleto.cli.options import FitOptions
from soseleto.comparison.scan import scan as judge
from soseleto.errors import UsageError, counted, did_you_mean, need
from soseleto.parallel.reducer import Single
from soseleto.report import write_report
from soseleto.run_folder.folder import RunFolder
from soseleto.training.data import found_before
from soseleto.training.options import Inputs
from soseleto.training.progress import LiveLine

LEARNERS = ("logistic", "boosting")


def scan(options: FitOptions, learner: str, echo: Callable[[str], None]) -> None:
    options.check()
    if learner not in LEARNERS:
        raise UsageError(f"unknown learner {learner!r}{did_you_mean(learner, LEARNERS)}: logistic or boosting.")
    folder = RunFolder(options.out)
    folder.require_place()
    if folder.is_run() and folder.has_ended():
        raise UsageError(f"{folder.path} holds a run already: give --out another folder, or delete that one.")
    pair, sha256 = read(options, Single())
    training = Training(options, pair, Single())
    described = [] if pair.preparation is None else pair.preparation.describe()
    sizes = f"{len(pair.source):,} source and {counted(len(pair.target), 'target example')}"
    for line in [*map(str, pair.problems), *described, f"{sizes}, on {_features(options, training)}"]:
        echo(line)
    boosting = None
    if learner == "boosting":
        ensemble = need("sklearn.ensemble", to="boosting")
        numbers = pair.target.labels.is_floating_point()
        make = ensemble.HistGradientBoostingRegressor if numbers else ensemble.HistGradientBoostingClassifier
        boosting = make(random_state=options.seed)
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
    page = write_report(options.out)
    folder.tidy()
    for line in [*summary(folder), f"report: {page}"]:
        echo(line)


def _features(options: FitOptions, training: Training) -> str:
    if options.model != "linear":
        return f"the frozen features of {options.model}"
    if len(training.shape) == 3:
        return "pixels; a pretrained network knows more: --model timm:NAME or hf:FOLDER_OR_ID"
    return "the columns of the table" if training.pair.columns is not None else "the inputs themselves"
