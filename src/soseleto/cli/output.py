"""Where a command writes, and how it shows a page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from soseleto.errors import UsageError


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


def show_report(page: Path, show: bool) -> None:
    typer.echo(f"report: {page}")
    if show:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())


def show_link(link: str, show: bool, command: str = "review") -> None:
    typer.echo(f"{command}: {link}")
    typer.echo("the link works once; Ctrl-C stops, and every decision is kept")
    if show:
        import webbrowser

        webbrowser.open(link)
