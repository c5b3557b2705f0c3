"""The closing lines of ``soseleto fit``."""

from __future__ import annotations

from soseleto.cli import comparison
from soseleto.errors import counted
from soseleto.report.sentences import verdict
from soseleto.run_folder.folder import FINAL as FINAL_FILE
from soseleto.run_folder.folder import RunFolder
from soseleto.run_folder.ranking import LOW_WEIGHT, about_suspects, about_unknown, is_suspect


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
        *filter(None, [about_unknown(folder.ranking())]),
    ]


def _suspects(folder: RunFolder) -> str:
    """Their number, their estimated precision, and the command that lists them."""
    command, found = f"soseleto rank {folder.path} --suspects", folder.suspects()
    if found is None:
        count = int(is_suspect(folder.ranking()).sum())
        if folder.config().get("mode") == "transfer":
            low = counted(count, "source example has", "source examples have")
            return f"{low} a weight below {LOW_WEIGHT:g} (soseleto rank {folder.path} --worst 20)"
        return (
            f"{counted(count, 'suspect')}: source examples of weight below {LOW_WEIGHT:g}, with an unknown precision "
            f"({command}; soseleto audit {folder.path} measures it)"
        )
    if not found["count"]:
        return f"{about_suspects(folder.ranking(), found)} ({command})"
    return f"{about_suspects(folder.ranking(), found)} ({command}; soseleto audit {folder.path} measures them)"
