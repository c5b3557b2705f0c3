"""The commands, one function each. The library is imported when a command runs, to keep ``--help`` fast."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from soseleto.cli.line import DEVICE, SEED, FitLine, ScanLine, takes
from soseleto.errors import UsageError, did_you_mean

app = typer.Typer(
    name="soseleto",
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]
Seed = Annotated[int, typer.Option(help=SEED)]
Device = Annotated[str, typer.Option(help=DEVICE)]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Write to a file.")]
Port = Annotated[int, typer.Option(help="Port of the page; 0 for any free one.")]
Open = Annotated[bool, typer.Option("--open/--no-open", help="Show the page in a browser.")]
Model = Annotated[str | None, typer.Option(metavar="FILE.py:FUNCTION", help="Makes the model, if it is your own.")]


@app.callback()
def soseleto(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Learn which examples of a large, doubtful source set help a small, trusted
    target set; write a model, a ranking of the source and a report.
    """


@app.command(short_help="The paper's synthetic experiment, in seconds.")
def demo(
    out: Annotated[Path, typer.Option(help="The run folder to write.")] = Path("runs/demo"),
    seed: Seed = 0,
    open_: Open = False,
) -> None:
    """The paper's synthetic experiment: no data needed, done in seconds.

    500 points in the plane, 100 of them with a flipped label; SOSELETO finds
    most of those with the help of 50 clean points.
    """
    import torch

    from soseleto.cli import demo as experiment
    from soseleto.report import write_report
    from soseleto.training.progress import LiveLine

    torch.set_num_threads(1)  # faster for a network this small
    with LiveLine() as progress:
        result = experiment.run(out, seed=seed, progress=progress)
    page = write_report(out)
    for line in experiment.describe(experiment.summary(result, seed)):
        typer.echo(line)
    show("report", page.resolve().as_uri(), open_, str(page))


@app.command(short_help="A first answer in seconds.")
@takes(ScanLine)
def scan(options: dict[str, Any]) -> None:
    """Judge the labels of the source without training a network: a model, a
    ranking, suspects and a report in seconds.

    The data sets are as for `soseleto fit`. Classifiers that have not seen an
    example judge its label; how right labels look is known from the target.
    `rank`, `review`, `audit`, `predict` and `export` work as after `fit`.
    """
    import soseleto.cli.fit as command
    from soseleto.cli.options import FitOptions

    learner = options.pop("learner")
    command.scan(FitOptions(**options), learner, typer.echo)


@app.command(short_help="Train on your own data.")
@takes(FitLine)
def fit(options: dict[str, Any]) -> None:
    """Train on your own data; write a model, a ranking and a report.

    A data set is a folder of images with one subfolder per class, a table
    (.csv, .tsv, .parquet, .jsonl) of features or of image paths, or an .npz
    file with x and y. FUNCTION(classes=..., shape=...) of your own file returns
    the model (in transfer mode its trunk). The accuracy is measured on target
    examples held out of the training, and compared with ordinary training and
    with the target alone. The same command resumes an interrupted run.
    """
    import soseleto.cli.fit as command
    from soseleto.cli.options import FitOptions

    command.fit(FitOptions(**options), typer.echo)


@app.command()
def report(
    run: RunArgument,
    out: Annotated[Path | None, typer.Option(help="Where to write the page. [default: RUN/report.html]")] = None,
    force: Force = False,
    open_: Open = False,
) -> None:
    """Write a run's report: one HTML file that opens offline."""
    from soseleto.report import write_report
    from soseleto.run_folder.folder import REPORT

    if out is None or os.path.realpath(out) != os.path.realpath(run / REPORT):
        check_output(run, out, force)
    page = write_report(run, out)
    show("report", page.resolve().as_uri(), open_, str(page))


@app.command(short_help="The ranking of the source, and its suspects.")
def rank(
    run: RunArgument,
    format: Annotated[str, typer.Option(metavar="csv|parquet|json", help="Format of the output.")] = "csv",
    best: Annotated[int | None, typer.Option(metavar="N", help="Only the N best.")] = None,
    worst: Annotated[int | None, typer.Option(metavar="N", help="Only the N worst, worst first.")] = None,
    suspects: Annotated[bool, typer.Option("--suspects", help="Only the suspects, most suspicious first.")] = False,
    out: Out = None,
    force: Force = False,
) -> None:
    """Print the ranking of a run's source examples, best first.

    --worst orders by the probability of a wrong label where there is one.
    --suspects also prints their precision and its basis to standard error.
    """
    from soseleto.report.export import describe_list, export_ranking

    if format == "parquet" and out is None and sys.stdout.isatty():
        raise UsageError("a terminal cannot show parquet: add --out FILE, or use --format csv.")
    check_output(run, out, force)
    content = export_ranking(run, format=format, best=best, worst=worst, suspects=suspects)
    write(content, out)
    if suspects:
        typer.echo(describe_list(run), err=True)


@app.command(short_help="Label new inputs with a run's model.")
def predict(
    run: RunArgument,
    files: Annotated[list[Path], typer.Argument(metavar="FILES", help="Images, folders, tables, .npz files.")],
    format: Annotated[str, typer.Option(metavar="csv|json", help="Format of the output.")] = "csv",
    out: Out = None,
    model: Model = None,
    encoding: Annotated[
        str | None, typer.Option(metavar="NAME", help="Encoding of text tables. [default: utf-8]")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse values that are not as in the training, instead of a warning.")
    ] = False,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Label new inputs with a run's model: path, label and probability.

    Tables need the feature columns of the training, in any order and format,
    or a column of image paths; other columns, such as labels, are ignored.
    Values that are missing, unreadable, unseen or outside the training's range
    are counted on standard error; a row without any usable value has no label.
    """
    import numpy as np

    from soseleto.data import Reading
    from soseleto.data.read import read_inputs
    from soseleto.data.tables import SUFFIXES
    from soseleto.prediction import load
    from soseleto.report.export import WRITERS

    check_output(run, out, force, reads=[*files, *file_of(model)])
    note_unfinished(run)
    if format not in ("csv", "json"):
        raise UsageError(f"unknown format {format!r}{did_you_mean(format, ('csv', 'json'))}: choose csv or json.")
    loaded = load(run, model, device=device)
    if loaded.shape is None:
        raise UsageError(f"{run} was not written by the command line: use soseleto.load in Python.")
    lists_images = loaded.preparation is None and any(file.suffix.lower() in SUFFIXES for file in files)
    path_column = loaded.run.source().get("path_column") if lists_images else None
    reading = Reading(encoding=encoding, path_column=path_column)
    preparation = loaded.preparation
    inputs = read_inputs(files, shape=loaded.shape, reading=reading, preparation=preparation, strict=strict)
    if loaded.task == "classification":
        probability, best = loaded.predict_proba(inputs.values).max(1)
        columns = {
            "label": np.array([loaded.class_name(index) for index in best.tolist()], dtype=object),
            "probability": probability.double().numpy().round(4).astype(object),
        }
    else:
        columns = {"label": loaded.predict(inputs.values).flatten().double().numpy().astype(object)}
    for column in columns.values():
        column[~inputs.usable.numpy()] = None
    columns = {"path": np.array(inputs.names, dtype=object), **columns}
    write(WRITERS[format](columns), out)


@app.command(short_help="Write a run's model for use elsewhere.")
def export(
    run: RunArgument,
    onnx: Annotated[Path | None, typer.Option(metavar="FILE", help="The ONNX file to write.")] = None,
    pretrained: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The folder to write of a text model, for AutoModel.")
    ] = None,
    model: Model = None,
    force: Force = False,
) -> None:
    """Write a run's model as ONNX, from raw inputs to probabilities, or as a
    folder of safetensors that transformers reads.

    The ONNX file is run once by onnxruntime and compared with PyTorch. Needs
    pip install 'soseleto[onnx]'.
    """
    from soseleto.prediction import export_folder, export_onnx, load

    if onnx is None and pretrained is None:
        raise UsageError("nothing to write: add --onnx FILE, or --pretrained FOLDER for a text model.")
    if force and onnx is None:
        raise UsageError("--force has no effect on --pretrained, which never replaces a folder: give a new one.")
    check_output(run, onnx, force, reads=file_of(model))
    note_unfinished(run)
    loaded = load(run, model, device="cpu")
    if pretrained is not None:
        typer.echo(f"wrote {export_folder(loaded, pretrained)}", err=True)
    if onnx is not None:
        typer.echo(f"wrote {export_onnx(loaded, onnx, force=force)}", err=True)


@app.command(short_help="Review a run's suspects by hand.")
def review(
    run: RunArgument,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the corrected source (.csv, .parquet), and exit.")
    ] = None,
    suspects: Annotated[
        str, typer.Option(metavar="keep|drop|relabel", help="What --export does with suspects without a decision.")
    ] = "keep",
    force: Force = False,
    port: Port = 0,
    open_: Open = False,
) -> None:
    """Review a run's suspects in the browser: keep, drop, relabel, undo.

    The page is served on this machine only, under a link that works once. Every
    decision is written to RUN/review.jsonl at once. The file of --export can be
    given to `soseleto fit --source`.
    """
    from soseleto.review.queue import export_source, read_decisions
    from soseleto.review.server import serve
    from soseleto.run_folder.folder import RunFolder

    if export is not None:
        typer.echo(export_source(run, export, suspects=suspects, force=force))
        return
    check_output(run, None, force)
    try:
        serve(run, partial(show_link, "review", open_), port=port)
    except KeyboardInterrupt:  # how a review ends
        decided = len(read_decisions(RunFolder(run)))
        typer.echo(f"\ndecided so far: {decided:,}; `soseleto review {run} --export FILE` applies them")


@app.command(short_help="Measure the error rate of a run's suspects.")
def audit(
    run: RunArgument,
    checks: Annotated[
        int | None, typer.Option(metavar="N", help="Number of suspects to check, and of other examples. [default: 60]")
    ] = None,
    port: Port = 0,
    open_: Open = False,
) -> None:
    """Check a random sample of suspects and of other examples in the browser.

    The answers give the precision and recall of the suspects and the share of
    wrong labels, without any assumption about the mistakes. The intervals hold
    whenever you stop, and the same command continues an audit. Report and rank
    then have these figures instead of the estimates.
    """
    from soseleto.review.queue import Audit, read_decisions
    from soseleto.review.server import serve
    from soseleto.run_folder.folder import RunFolder

    try:
        serve(run, partial(show_link, "audit", open_), port=port, audit=True, checks=checks)
    except KeyboardInterrupt:  # how an audit ends
        folder = RunFolder(run)
        checked = Audit.load(folder)
        figures = [] if checked is None else checked.progress(read_decisions(folder)).summary()
        for line in ["", *figures]:
            typer.echo(line)


def sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


@app.command("check-gradients", short_help="Compare the engines on a model.")
def check_gradients(
    model: Annotated[
        str, typer.Option(metavar="NAME|FILE.py:FUNCTION", help="A model by name, or your own.")
    ] = "quick",
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Examples in the batch.")] = 32,
    shape: Annotated[
        Any, typer.Option(metavar="C,H,W", help="Shape of the generated inputs.", parser=sizes)
    ] = "3,32,32",
    engine: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="An engine to compare; may be repeated.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Compare the engines on a model: which one auto takes, and every engine's
    error against the reference, time, or reason to decline.

    FUNCTION of your own file is as for fit: FUNCTION(classes=, shape=) returns
    a model.
    """
    import torch
    from rich.console import Console
    from rich.table import Table

    from soseleto import cross_entropy, engines
    from soseleto.models.architectures import make_model
    from soseleto.parallel.reducer import choose_device

    where = choose_device(device)
    made = make_model(model, "noisy", classes=10, shape=shape, seed=0).to(where)
    examples = torch.randn(batch, *shape).to(where), torch.randint(10, (batch,)).to(where)
    compared = ("auto", *(engine or engines.FASTEST_FIRST))
    chosen, *reports = engines.check_gradients(
        made, lambda model, batch: cross_entropy(model(batch[0]), batch[1]), examples, engines=compared
    )
    table = Table("engine", "error", "time", "remark", title="Error against the loop; time of an ordinary step = 1")
    for row in reports:
        numbers = ("–", "–") if row.error is None else (f"{row.error:.1e}", f"{row.ratio:.2f}")
        table.add_row(row.engine, *numbers, row.message)
    Console().print(table)
    typer.echo(f"auto takes {chosen.engine}.")


# What several commands do


def check_output(run: Path, out: Path | None, force: bool, reads: Sequence[Path] = ()) -> None:
    """Raise, before any work, where the output must not be written to ``out``."""
    from soseleto.run_folder.folder import RunFolder, require_writable

    if out is not None:
        require_writable(out, run=RunFolder.open(run), force=force, reads=reads)
    elif force:
        raise UsageError("--force has no effect without an output file: leave it out.")


def note_unfinished(run: Path) -> None:
    """Say on standard error that a run's ``fit`` was stopped before its comparison."""
    from soseleto.run_folder.folder import COMPARISON, PARTS

    if (run / PARTS).is_dir() and not (run / COMPARISON).exists():
        typer.echo(
            f"the fit of {run} has not ended, so probabilities are not calibrated and the model to keep is not chosen: "
            "the same fit command continues it.",
            err=True,
        )


def file_of(model: str | None) -> list[Path]:
    """The file in ``FILE.py:FUNCTION``; none for a model by name."""
    file = (model or "").rpartition(":")[0]
    return [Path(file)] if file else []


def write(content: bytes, out: Path | None) -> None:
    """To standard output, or atomically to a file."""
    from soseleto.run_folder.files import aside

    if out is None:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with aside(out) as part:
        part.write_bytes(content)
    typer.echo(f"wrote {out}", err=True)


def show(what: str, address: str, in_browser: bool, shown: str = "") -> None:
    """Print where a page is, and open it on request."""
    typer.echo(f"{what}: {shown or address}")
    if in_browser:
        import webbrowser

        webbrowser.open(address)


def show_link(command: str, in_browser: bool, link: str) -> None:
    show(command, link, in_browser, f"{link}\nthe link works once; Ctrl-C stops, and every decision is kept")
