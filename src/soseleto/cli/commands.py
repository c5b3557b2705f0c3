"""The commands, one function each. The library is imported when a command runs, to keep ``--help`` fast."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from soseleto.cli.output import check_output, file_of, note_unfinished, show_link, show_report, write
from soseleto.errors import Interrupted, UsageError, counted

SUSPECT_PRECISION, CHECKPOINT_SECONDS = 0.95, 60.0  # as in soseleto.Probes and soseleto.Checkpoints
BY_MODEL = "[default: by model and data; printed at start]"

app = typer.Typer(
    name="soseleto",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]
Seed = Annotated[int, typer.Option(help="Same seed, same result, to the last bit on a CPU.")]


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
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Show the report in a browser.")] = False,
) -> None:
    """The paper's synthetic experiment: no data needed, done in seconds.

    500 points in the plane, 100 of them with a flipped label; SOSELETO finds
    most of those with the help of 50 clean points. An earlier demo in the
    folder is replaced, any other run is not.
    """
    import torch

    from soseleto.cli import demo as experiment
    from soseleto.report import write_report
    from soseleto.run_folder.folder import RunFolder
    from soseleto.training.progress import LiveLine

    torch.set_num_threads(1)  # faster for a network this small
    command = "soseleto demo"
    RunFolder.clear(out, written_by=command)  # a demo can be run again
    try:
        with LiveLine() as progress:
            result = experiment.run(out, seed=seed, progress=progress, written_by=command)
    except Interrupted as stopped:  # a demo is not resumed
        raise KeyboardInterrupt from stopped
    page = write_report(out)
    for line in experiment.describe(experiment.summary(result, seed)):
        typer.echo(line)
    show_report(page, open_)


@app.command(short_help="Train on your own data.")
def fit(
    source: Annotated[Path, typer.Option(help="The large, doubtful set.", show_default=False)],
    target: Annotated[Path, typer.Option(help="The small, trusted set.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The run folder to write.", show_default=False)],
    test: Annotated[Path | None, typer.Option(help="A set to measure the accuracy on.")] = None,
    unlabelled: Annotated[
        Path | None,
        typer.Option(help="Further inputs without labels, to learn from with --recipe strong, noisy."),
    ] = None,
    mode: Annotated[str, typer.Option(metavar="noisy|transfer", help="Same classes, or different ones.")] = "noisy",
    recipe: Annotated[
        str,
        typer.Option(
            metavar="plain|strong",
            help="SOSELETO; or, made for images and a GPU: a teacher judges labels, inputs are strongly augmented.",
        ),
    ] = "plain",
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.py:FUNCTION|timm:NAME|hf:FOLDER_OR_ID",
            help="table, linear, mlp, quick, lenet, resnet18, resnet18-groupnorm, preact-resnet18, yours, or a "
            "pretrained one. [default: by the inputs]",
        ),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="FILE.safetensors|none", help="Of a timm model, instead of its own.")
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(metavar="all|head|last:N", help="Parts of a pretrained image model to train. [default: all]"),
    ] = None,
    lora: Annotated[
        int | None, typer.Option(metavar="RANK", help="Train LoRA adapters of a pretrained model and its head.")
    ] = None,
    batch_norm: Annotated[
        str | None,
        typer.Option(metavar="train|fixed", help="Statistics of a pretrained model's BatchNorm. [default: train]"),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help=f"Passes over the source. {BY_MODEL}")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Source examples per step. [default: 16 to 256, by the size of the source]")
    ] = None,
    target_batch_size: Annotated[
        int | None, typer.Option(help="Target examples per step. [default: 32; 64 if strong and noisy, but for texts]")
    ] = None,
    lr: Annotated[float | None, typer.Option(help=f"Learning rate, falls to 0. {BY_MODEL}")] = None,
    weight_decay: Annotated[float | None, typer.Option(help=f"Weight decay of the model. {BY_MODEL}")] = None,
    weight_step: Annotated[float | None, typer.Option(help=f"How far a weight moves per visit. {BY_MODEL}")] = None,
    target_share: Annotated[
        float | None, typer.Option(metavar="SHARE", help=f"Share of the target's gradient. {BY_MODEL}")
    ] = None,
    augment: Annotated[
        str | None,
        typer.Option(
            metavar="none|crop|crop+flip|bend",
            help="Random changes of images. [default: crop, with flip for colour images of named classes]",
        ),
    ] = None,
    folds: Annotated[
        int | None,
        typer.Option(metavar="N", help="Of the target, to measure accuracy on. [default: 3; 0 with --test]"),
    ] = None,
    baselines: Annotated[
        bool,
        typer.Option(
            "--baselines/--no-baselines",
            help="Also train without weights, on both sets mixed, and on the target alone.",
        ),
    ] = True,
    keep: Annotated[
        str, typer.Option(metavar="best|soseleto", help="The model to keep: the best on held-out examples, or ours.")
    ] = "best",
    final: Annotated[
        str | None,
        typer.Option(
            metavar="boosting", help="Of a table: predict with boosted trees, trained on the weighted source."
        ),
    ] = None,
    probes: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Of the target, planted to calibrate suspects. [default: 0.3, if enough]"),
    ] = None,
    suspect_precision: Annotated[
        float, typer.Option(metavar="SHARE", help="Of real errors among the suspects.")
    ] = SUSPECT_PRECISION,
    guarantee: Annotated[
        bool, typer.Option("--guarantee", help="Suspects must have that precision by the lower end of its interval.")
    ] = False,
    labels_before: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN|FILE",
            help="The target's labels before they were checked: a column of its table, or a table of its own.",
        ),
    ] = None,
    doubt_labels: Annotated[
        bool | None,
        typer.Option(
            "--doubt-labels/--no-doubt-labels",
            help="Weigh a label also by the model's own prediction. [default: not in transfer]",
        ),
    ] = None,
    alignments: Annotated[
        str | None,
        typer.Option(
            metavar="last|all",
            help="Of the last layer, or of all. [default: last; all in transfer or if many labels are wrong]",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="bfloat16|float16|float32", help="Of the model under autocast. [default: float32]"),
    ] = None,
    precision: Annotated[str | None, typer.Option(hidden=True)] = None,
    engine: Annotated[str, typer.Option(metavar="NAME", help="Computes the alignments.")] = "auto",
    checkpoint_every: Annotated[
        float, typer.Option(metavar="SECONDS", help="Between two checkpoints.")
    ] = CHECKPOINT_SECONDS,
    micro_batch_size: Annotated[
        int | None, typer.Option(metavar="N", help="Examples per forward pass, to save memory; same result.")
    ] = None,
    non_finite: Annotated[str, typer.Option(metavar="stop|skip", help="For a loss that is NaN or infinite.")] = "stop",
    seed: Seed = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "auto",
    image_size: Annotated[int | None, typer.Option(help="Resize images to this many pixels a side.")] = None,
    label_column: Annotated[str | None, typer.Option(metavar="NAME", help="Of a table: the labels.")] = None,
    path_column: Annotated[str | None, typer.Option(metavar="NAME", help="Of a table: the image files.")] = None,
    id_column: Annotated[str | None, typer.Option(metavar="NAME", help="Of a table: the examples' ids.")] = None,
    truth_column: Annotated[str | None, typer.Option(metavar="NAME", help="Of a table: the true labels.")] = None,
    numeric_column: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Of a table: numbers. [default: inferred; repeatable]")
    ] = None,
    categorical_column: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Of a table: one of a few values. [repeatable]")
    ] = None,
    text_column: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Of a table: text. [repeatable; one for a pretrained model]"),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Of a text for a pretrained model; the rest is cut. [default: 256]")
    ] = None,
    drop_column: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Of a table: not a feature. [repeatable]")
    ] = None,
    encoding: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of a text file, such as latin-1. [default: UTF-8]")
    ] = None,
    merge_labels: Annotated[
        bool, typer.Option("--merge-labels", help="Make one class of Cat, 'cat ' and cat.")
    ] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave unusable examples out.")] = False,
) -> None:
    """Train on your own data; write a model, a ranking and a report.

    A data set is a folder of images with one subfolder per class, a table
    (.csv, .tsv, .parquet, .jsonl) of features or of image paths, or an .npz
    file with x and y. Columns of a table may hold numbers, words, dates and
    missing values; their kinds are printed first. FUNCTION(classes=..., shape=...) of your own file returns
    the model (in transfer mode its trunk). The accuracy is measured on target
    examples held out of the training, and compared with ordinary training and
    with the target alone. The same command resumes an interrupted run.
    """
    import soseleto.cli.fit as command
    from soseleto.cli.fit_options import FitOptions
    from soseleto.data import Reading

    if precision is not None:
        raise UsageError(
            "there is no option --precision: write --suspect-precision 0.95 for the precision of the suspects, or "
            "--dtype bfloat16 for the number format of the model."
        )
    options = FitOptions(
        source=source,
        target=target,
        out=out,
        test=test,
        unlabelled=unlabelled,
        mode=mode,
        recipe=recipe,
        model=model,
        weights=weights,
        train=train,
        lora=lora,
        batch_norm=batch_norm,
        epochs=epochs,
        batch_size=batch_size,
        target_batch_size=target_batch_size,
        lr=lr,
        weight_decay=weight_decay,
        weight_step=weight_step,
        target_share=target_share,
        engine=engine,
        augment=augment,
        probes=probes,
        suspect_precision=suspect_precision,
        guarantee=guarantee,
        labels_before=labels_before,
        doubt_labels=doubt_labels,
        alignments=alignments,
        dtype=dtype,
        folds=folds,
        baselines=baselines,
        keep=keep,
        final=final,
        checkpoint_every=checkpoint_every,
        micro_batch_size=micro_batch_size,
        non_finite=non_finite,
        seed=seed,
        device=device,
        skip_bad=skip_bad,
        max_tokens=max_tokens,
        reading=Reading(
            image_size=image_size,
            label_column=label_column,
            path_column=path_column,
            id_column=id_column,
            truth_column=truth_column,
            numeric_columns=tuple(numeric_column or ()),
            categorical_columns=tuple(categorical_column or ()),
            text_columns=tuple(text_column or ()),
            drop_columns=tuple(drop_column or ()),
            encoding=encoding,
            merge_labels=merge_labels,
        ),
    )
    command.fit(options, typer.echo)


@app.command()
def report(
    run: RunArgument,
    out: Annotated[Path | None, typer.Option(help="Where to write the page. [default: RUN/report.html]")] = None,
    force: Force = False,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Show the page in a browser.")] = False,
) -> None:
    """Write a run's report: one HTML file that opens offline."""
    from soseleto.report import write_report
    from soseleto.run_folder.folder import REPORT

    if out is None or os.path.realpath(out) != os.path.realpath(run / REPORT):
        check_output(run, out, force)
    show_report(write_report(run, out), open_)


@app.command(short_help="The ranking of the source, and its suspects.")
def rank(
    run: RunArgument,
    format: Annotated[
        str, typer.Option(metavar="csv|parquet|json|label-studio|argilla|fiftyone", help="Of the output.")
    ] = "csv",
    best: Annotated[int | None, typer.Option(metavar="N", help="Only the N best.")] = None,
    worst: Annotated[int | None, typer.Option(metavar="N", help="Only the N worst, worst first.")] = None,
    suspects: Annotated[bool, typer.Option("--suspects", help="Only the suspects, most suspicious first.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write to a file.")] = None,
    force: Force = False,
) -> None:
    """Print the ranking of a run's source examples, best first.

    --worst orders by the probability of a wrong label where there is one.
    --suspects also prints their precision, and what it rests on, to standard
    error; without suspects it lists the best there is.

    Some columns have the names of cleanlab (given_label, predicted_label,
    is_label_issue, label_quality) and of FiftyOne (filepath, mistakenness).
    --format label-studio, argilla or fiftyone writes a file that the tool
    imports, with the label and the suggested one.
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
    format: Annotated[str, typer.Option(metavar="csv|json", help="Of the output.")] = "csv",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write to a file.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="FILE.py:FUNCTION", help="Makes the model, if it is your own.")
    ] = None,
    encoding: Annotated[str | None, typer.Option(metavar="NAME", help="Of text tables. [default: utf-8]")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "auto",
    force: Force = False,
) -> None:
    """Label new inputs with a run's model: path, label and probability.

    Tables need the feature columns of the training, in any order and format,
    or a column of image paths; other columns, such as labels, are ignored.
    """
    import soseleto.cli.predict as command

    check_output(run, out, force, reads=[*files, *file_of(model)])
    note_unfinished(run)
    write(command.predict(run, files, model=model, format=format, device=device, encoding=encoding).encode(), out)


@app.command(short_help="Write a run's model for use elsewhere.")
def export(
    run: RunArgument,
    onnx: Annotated[Path | None, typer.Option(metavar="FILE", help="The ONNX file to write.")] = None,
    pretrained: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Of a text model: the folder to write, for AutoModel, and classifier.safetensors."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="FILE.py:FUNCTION", help="Makes the model, if it is your own.")
    ] = None,
    force: Force = False,
) -> None:
    """Write a run's model as ONNX, from raw inputs to probabilities, or as a
    folder of safetensors that transformers reads.

    The ONNX file is run once by onnxruntime and compared with PyTorch. Needs
    pip install 'soseleto[onnx]'. A text model takes input_ids and
    attention_mask there.
    """
    from soseleto.prediction.export import export_folder
    from soseleto.prediction.load import load

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
        typer.echo(f"wrote {loaded.export_onnx(onnx, force=force)}", err=True)


@app.command(short_help="Review a run's suspects by hand.")
def review(
    run: RunArgument,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the corrected source (.csv, .parquet; .npz of an .npz), and exit."),
    ] = None,
    suspects: Annotated[
        str, typer.Option(metavar="keep|drop|relabel", help="What --export does with suspects that are not decided.")
    ] = "keep",
    force: Force = False,
    port: Annotated[int, typer.Option(help="Of the page; 0 for any free one.")] = 0,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Show the page in a browser.")] = False,
) -> None:
    """Review a run's suspects in the browser: keep, drop, relabel, undo.

    The page is served on this machine only, under a link that works once. Every
    decision is written to RUN/review.jsonl at once. The file of --export can be
    given to `soseleto fit --source`.
    """
    from soseleto.review.queue import read_decisions
    from soseleto.review.server import serve
    from soseleto.run_folder.folder import RunFolder

    if export is not None:
        from soseleto.review.queue import export_source

        done = export_source(run, export, suspects=suspects, force=force)
        copies = f", {done.copies:,} of them because they are in the target" if done.copies else ""
        unchanged = f", {counted(done.undecided, 'suspect')} not decided and left unchanged" * (suspects == "keep")
        typer.echo(
            f"wrote {done.path}: {counted(done.rows, 'example')}, {done.dropped:,} dropped, "
            f"{done.relabelled:,} relabelled{copies}{unchanged}"
        )
        return
    check_output(run, None, force)
    try:
        serve(run, lambda link: show_link(link, open_), port=port)
    except KeyboardInterrupt:  # how a review ends
        decided = len(read_decisions(RunFolder(run)))
        typer.echo(f"\ndecided so far: {decided:,}; `soseleto review {run} --export FILE` applies them")


@app.command(short_help="Measure the error rate of a run's suspects.")
def audit(
    run: RunArgument,
    checks: Annotated[
        int | None,
        typer.Option(metavar="N", help="Of suspects, and as many others. [default: 60; no limit with --width]"),
    ] = None,
    width: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Check until the intervals are this narrow, such as 0.1.")
    ] = None,
    summary: Annotated[bool, typer.Option("--summary", help="Print the figures so far, and exit.")] = False,
    port: Annotated[int, typer.Option(help="Of the page; 0 for any free one.")] = 0,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Show the page in a browser.")] = False,
) -> None:
    """Check a random sample of suspects and of other examples in the browser.

    The answers give the precision and recall of the suspects and the share of
    wrong labels, without any assumption about the mistakes. The intervals hold
    whenever you stop, and the same command continues an audit. Report, rank and
    suspects.json then have these figures instead of the estimates.
    """
    import soseleto.cli.audit as command

    if summary:
        if (checks, width) != (None, None):
            raise UsageError("--summary prints an audit as it is: leave --checks and --width out.")
        command.print_summary(run, typer.echo)
        return
    command.audit(run, checks, width, typer.echo, lambda link: show_link(link, open_, "audit"), port=port)


@app.command("check-gradients", short_help="Compare the engines on a model.")
def check_gradients(
    model: Annotated[
        str, typer.Option(metavar="NAME|FILE.py:FUNCTION", help="A model by name, or your own.")
    ] = "quick",
    batch: Annotated[int, typer.Option(metavar="N", help="Examples in the batch.")] = 32,
    source: Annotated[
        str | None, typer.Option(metavar="DATA", help="Take the batch from this data, as in fit.", show_default=False)
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(metavar="C,H,W", help="Generate inputs of this shape, without --source.", show_default=False),
    ] = None,
    engine: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="An engine to compare; may be repeated.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "auto",
) -> None:
    """Compare the engines on a model: which one auto takes, and every engine's
    error against the reference, time, memory, or reason to decline.

    FUNCTION of your own file is as for fit: FUNCTION(classes=, shape=) returns
    a model. Or FUNCTION(batch_size) returns (model, per_example_loss, batch),
    where per_example_loss(model, batch) returns one loss per example.
    """
    import soseleto.cli.check_gradients as command

    command.check_gradients(command.CheckOptions(model, batch, tuple(engine or ()), source, shape, device))
