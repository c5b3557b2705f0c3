"""The command line: verbs only. What they do lives in the library, and is imported when a verb is used."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from soseleto.errors import SoseletoError, UsageError

DONE, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130

app = typer.Typer(
    name="soseleto",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)]
Seed = Annotated[int, typer.Option(help="Same seed, same result, to the last bit on a CPU.")]


@app.callback()
def soseleto(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Learn which examples of a large, doubtful source set help a small, trusted
    target set: out come a model, a ranking of the source and a report.
    """


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The run folder to write.")] = Path("runs/demo"),
    seed: Seed = 0,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Show the report in a browser.")] = False,
) -> None:
    """The paper's synthetic experiment: no data needed, done in seconds.

    500 points in the plane, 100 of them with a flipped label; SOSELETO finds
    most of those with the help of 50 clean points.
    """
    from soseleto.experiments import synthetic
    from soseleto.progress import LiveLine
    from soseleto.report import write_report

    with LiveLine() as progress:
        result = synthetic.run(out, seed=seed, progress=progress)
    page = write_report(out)
    for line in synthetic.describe(synthetic.summary(result, synthetic.make_data(seed)[0])):
        typer.echo(line)
    _tell_report(page, open_)


@app.command()
def report(
    run: RunArgument,
    out: Annotated[Path | None, typer.Option(help="Where to write the page. [default: RUN/report.html]")] = None,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Show the page in a browser.")] = False,
) -> None:
    """Write a run's report: one HTML file that opens offline."""
    from soseleto.report import write_report

    _tell_report(write_report(run, out), open_)


@app.command()
def rank(
    run: RunArgument,
    format: Annotated[str, typer.Option(metavar="csv|parquet|json", help="How to write it.")] = "csv",
    best: Annotated[int | None, typer.Option(metavar="N", help="Only the N best.")] = None,
    worst: Annotated[int | None, typer.Option(metavar="N", help="Only the N worst, worst first.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write to a file instead.")] = None,
) -> None:
    """Print the ranking of a run's source examples, best first."""
    from soseleto.report.export import export_ranking
    from soseleto.run import aside

    if format == "parquet" and out is None and sys.stdout.isatty():
        raise UsageError("a terminal cannot show parquet: add --out FILE, or take --format csv.")
    content = export_ranking(run, format=format, best=best, worst=worst)
    if out is None:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with aside(out) as part:
        part.write_bytes(content)
    typer.echo(f"wrote {out}", err=True)


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME", help="synthetic", show_default=False)],
    out: Annotated[Path, typer.Option(help="Where to write results and runs.", show_default=False)],
    seeds: Annotated[int, typer.Option(metavar="N", help="Seeds 0 to N-1.")] = 20,
) -> None:
    """Repeat a table or figure of the paper over several seeds.

    Writes NAME.json with one row a run into the folder.
    """
    from soseleto import experiments

    path = experiments.reproduce(name, out, seeds=seeds, report=typer.echo)
    typer.echo(f"wrote {path}")


@app.command("check-gradients")
def check_gradients(
    model: Annotated[
        str, typer.Option(metavar="NAME|FILE.py:FUNCTION", help="A model by name, or your own.")
    ] = "quick",
    batch: Annotated[int, typer.Option(metavar="N", help="Examples in the batch.")] = 32,
    engine: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="An engine to compare; may be repeated.")
    ] = None,
) -> None:
    """Compare the engines on a model: errors against the oracle, and times.

    FUNCTION(batch_size) of your own file returns (model, per_example_loss,
    batch), where per_example_loss(model, batch) gives one loss an example.
    """
    from soseleto import commands

    commands.check_gradients(model, batch, engine or [])


@app.command()
def data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The data set.", show_default=False)],
    data_root: Annotated[
        Path | None, typer.Option(help="Where data sets are kept.", envvar="SOSELETO_DATA", show_default=False)
    ] = None,
) -> None:
    """Fetch and verify a public data set, or say what is missing."""
    from soseleto.data import fetch

    raise typer.Exit(fetch.main(name, data_root, typer.echo))


def _tell_report(page: Path, show: bool) -> None:
    typer.echo(f"report: {page}")
    if show:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())


def main(arguments: list[str] | None = None) -> None:
    """The console entry point: every error is one sentence on standard error, and an exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    if "--version" in words[:1]:
        from importlib.metadata import version

        typer.echo(f"soseleto {version('soseleto')}")
        sys.exit(DONE)
    sys.exit(_run([word for word in words if word != "--debug"], debug))


def _run(words: list[str], debug: bool) -> int:
    try:
        code: Any = app(words, prog_name="soseleto", standalone_mode=False)
        code = code if isinstance(code, int) else DONE
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        if debug:
            raise
        typer.echo(f"soseleto: {_sentence(error)}", err=True)
        return MISUSED if isinstance(error, UsageError) or _is_usage(error) else FAILED
    if code == INTERRUPTED:
        typer.echo("soseleto: stopped; what was written so far is kept.", err=True)
    return code


def _is_usage(error: Exception) -> bool:
    """Whether the command line itself was off (typer has carried click's errors along under several names)."""
    return getattr(error, "exit_code", None) == MISUSED


def _sentence(error: Exception) -> str:
    if hasattr(error, "format_message"):
        return f"{error.format_message().rstrip('.')}: see `soseleto --help`."
    if isinstance(error, SoseletoError):
        return str(error)
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {(error.strerror or str(error)).lower()}."
    return f"unexpected {type(error).__name__}: {error} (add --debug to see where)."
