"""The report page: the sections that the run's files allow, rendered through one autoescaped template."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from soseleto.report import charts, sentences
from soseleto.report.sentences import RunFiles
from soseleto.run_folder.files import aside, readable, replacing
from soseleto.run_folder.folder import REPORT, measure_of
from soseleto.run_folder.ranking import LOW_WEIGHT, SHOWN, Ranking, most_suspicious_first, suspect_rows

PAGE = Path(__file__).parent / "page"
GROUPS = 50  # the largest, of a table of weights by label
FILTERS = (sentences.count, sentences.share, sentences.percent, sentences.number)


def write_report(run_path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of a run to ``out`` (default: into the run folder) and return its path."""
    own = Path(run_path) / REPORT
    path = own if out is None else Path(out)
    page = render(run_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with (replacing if os.path.realpath(path) == os.path.realpath(own) else aside)(path) as part:
        part.write_text(page, "utf-8")
    return path


def render(run_path: str | os.PathLike[str]) -> str:
    """The report of a run as one self-contained HTML page."""
    with readable(Path(run_path)):
        run, style = RunFiles(run_path), asset("style.css")
        policy = f"default-src 'none'; style-src '{digest(style)}'; img-src data:; base-uri 'none'; form-action 'none'"
        return template("report.html.j2", filters=FILTERS).render(
            run=run,
            style=Markup(style),  # a file of this package: the only text that is not escaped
            policy=policy,
            sentences=sentences.sentences(run),
            next_steps=sentences.next_steps(run),
            training=sentences.training(run),
            measure=measure_of(run.comparison) if run.comparison.get("rows") else "",
            compared_how=sentences.compared_how(run) if run.comparison.get("rows") else "",
            curves=[*filter(None, _curves(run))],
            settings=json.dumps(run.config, indent=2, ensure_ascii=False),
            low_weight=LOW_WEIGHT,
            **(_ranking_sections(run) if run.ranking and len(run.ranking["weight"]) else {}),
        )


# Templates and styles, which the review page uses too


def asset(name: str, folder: Path = PAGE) -> str:
    return (folder / name).read_text("utf-8")


def digest(text: str) -> str:
    """The source expression of an inline style or script in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@functools.cache
def template(name: str, folder: Path = PAGE, filters: tuple[Callable[..., str], ...] = ()) -> jinja2.Template:
    """An autoescaped template with ``filters`` under their function names; undefined names raise."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update({function.__name__: function for function in filters})
    return environment.get_template(name)


# The sections


def _curves(run: RunFiles) -> list[charts.Figure | None]:
    about = (
        "The source loss is the unweighted mean, mislabelled examples included: it may rise while the model improves."
    )
    losses = (("source_loss", "first", "source"), ("target_loss", "second", "target"))
    return [
        charts.curves(run, "Losses", losses, "loss", about),
        charts.curves(run, "Mean weight", [("mean_weight", "all", "mean weight")]),
        charts.curves(run, "Effective sample size", [("effective_source", "all", "effective sample size")]),
    ]


def _ranking_sections(run: RunFiles) -> dict[str, Any]:
    assert run.ranking is not None
    suspects, by_suspicion = suspect_rows(run.ranking), most_suspicious_first(run.ranking)
    half = min(SHOWN, -(-len(by_suspicion) // 2))
    return {
        "weights": charts.weights(run.ranking["weight"], run.wrong),
        "shown": SHOWN,
        "suspects_count": len(suspects),
        "best": _examples(run, np.arange(half)),
        "worst": _examples(run, suspects[:SHOWN] if len(suspects) else by_suspicion[:half]),
        "features": run.features,
        "groups": [*_groups(run.ranking)] if run.is_transfer else [],
    }


def _groups(ranking: Ranking) -> Iterator[dict[str, Any]]:
    """Weights summed up by label, or by the file that a text came from, and by quarters of length."""
    names, places, counts = np.unique(ranking["label"], return_inverse=True, return_counts=True)
    parts = [(str(names[at]), places == at) for at in np.argsort(-counts, kind="stable")[:GROUPS]]
    if len(parts) == 1:
        parts = []
    if "tokens" in ranking:
        tokens = ranking["tokens"]
        of_quarter = np.searchsorted(np.quantile(tokens, (0.25, 0.5, 0.75)), tokens)
        quarters = [mine for at in range(4) if (mine := of_quarter == at).any()]
        ends = [dict.fromkeys(f"{end:,}" for end in (tokens[mine].min(), tokens[mine].max())) for mine in quarters]
        parts += [(f"{' to '.join(both)} tokens", mine) for both, mine in zip(ends, quarters, strict=True)]
    for name, mine in parts:
        weight, score = (float(np.nanmean(ranking[column][mine])) for column in ("weight", "score"))
        yield {"name": name, "examples": int(mine.sum()), "weight": weight, "score": score}


def _examples(run: RunFiles, rows: np.ndarray) -> list[dict[str, Any]]:
    assert run.ranking is not None
    columns = {name: values[rows].tolist() for name, values in run.ranking.items()}
    columns["suggested"] = [None] * len(rows) if run.suggested is None else run.suggested[rows].tolist()
    columns["rank"] = (rows + 1).tolist()
    pictures = [base64.b64encode(run.pictures.get(name, b"")).decode() for name in columns["id"]]
    columns["picture"] = [f"data:image/jpeg;base64,{picture}" if picture else "" for picture in pictures]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
