"""``soseleto audit``: check a random sample in the browser, and print error rates that need no assumption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from soseleto.errors import UsageError
from soseleto.review.audit import Audit, require_auditable
from soseleto.review.queue import read_decisions
from soseleto.review.server import serve
from soseleto.run_folder.folder import RunFolder


def audit(
    run: Path,
    checks: int | None,
    width: float | None,
    echo: Callable[[str], None],
    show: Callable[[str], None],
    *,
    port: int = 0,
) -> None:
    """Serve the page until it is interrupted, then print the figures."""
    try:
        serve(run, show, port=port, audit=True, checks=checks, width=width)
    except KeyboardInterrupt:  # how an audit ends
        echo("")
        print_summary(run, echo)


def print_summary(run: Path, echo: Callable[[str], None]) -> None:
    """Print the figures of the decisions so far."""
    folder = RunFolder.open(run)
    require_auditable(folder)
    there = Audit.load(folder)
    if there is None:
        folder.ranking()  # which an unfinished run does not have
        raise UsageError(f"{run} has not been audited yet: type `soseleto audit {run}`.")
    for line in there.progress(read_decisions(folder)).summary():
        echo(line)
