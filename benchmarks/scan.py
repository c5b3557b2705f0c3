"""`soseleto scan` beside cleanlab: the same features, learner, folds and examples, in the same run.

    python benchmarks/scan.py --models FOLDER --out results/scan.json       # the draws that are reported
    python benchmarks/scan.py --models FOLDER --development --out FILE      # other rows or draws, to choose settings on
    python benchmarks/scan.py --short                                       # one cell of digits
    python benchmarks/scan.py --models FOLDER --texts 10000 --out results/scan-texts-cpu.json  # only the time of texts

A draw has source examples with mistakes, trusted ones (a tenth as many, at least two of each class) and test examples
with right labels. Both methods get the trusted ones: the models behind cleanlab's probabilities and its final one are
trained on them too, and it prunes none of them. Features are computed once and kept below --features. The folder
--models has `minilm` and `efficientnet-lite0` below `pretrained`; tables, texts and photos are below $SOSELETO_DATA,
among them the 77 intents as `text/banking77_{train,test}.csv` (PolyAI's task-specific-datasets, CC BY 4.0).
"""

from __future__ import annotations

import argparse
import csv
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from sklearn.base import clone
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import cross_val_predict
from typer.testing import CliRunner

from common import show
from experiments import news, results
from experiments.data import data_root
from scan_data import DEVELOPMENT, SETS, Array, Cell, Draw, drawn, stored, with_mistakes
from soseleto.cli.commands import app
from soseleto.suspects.cross_fit import cross_fit
from soseleto.suspects.rates import Judged, judge
from soseleto.training.data import features_of_set

CACHE = Path.home() / ".cache" / "soseleto"
SEEDS = 3
PRECISION = 0.9


def cleanlab(draw: Draw) -> tuple[Array, Any]:
    """Its label quality of the source, and its model after pruning."""
    from cleanlab.classification import CleanLearning
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores

    x, labels = np.concatenate([draw.x, draw.trusted_x]), np.concatenate([draw.labels, draw.trusted_y])
    probabilities = cross_val_predict(clone(draw.learner), x, labels, method="predict_proba")
    quality = get_label_quality_scores(labels, probabilities)[: len(draw.y)]
    issues = find_label_issues(labels, probabilities, n_jobs=1)
    issues[len(draw.y) :] = False
    return quality, CleanLearning(clone(draw.learner)).fit(x, labels, label_issues=issues)


def row_of(cell: Cell, draw: Draw) -> dict[str, Any]:
    wrong = draw.labels != draw.y
    start = time.process_time()
    found = cross_fit(
        draw.x, draw.labels, draw.trusted_x, draw.trusted_y, classes=draw.classes, learner=draw.learner, seed=cell.seed
    )
    judged = judge(found, PRECISION)
    middle = time.process_time()
    quality, pruned = cleanlab(draw)
    end = time.process_time()
    both = np.concatenate([draw.x, draw.trusted_x]), np.concatenate([draw.labels, draw.trusted_y])
    models = {
        "ordinary": clone(draw.learner).fit(*both),
        "trusted": clone(draw.learner).fit(draw.trusted_x, draw.trusted_y),
        "cleanlab": pruned,
        "ours": found.model,
    }
    scores = {"cleanlab": quality, "joined": found.right, **found.signals}
    return {
        "method": "scan",
        "setting": cell.setting,
        "seed": cell.seed,
        "accuracy": {name: round(100 * model.score(draw.test_x, draw.test_y), 2) for name, model in models.items()},
        "auroc": {name: round(float(roc_auc_score(~wrong, score)), 4) for name, score in scores.items()},
        "true_share": round(float(wrong.mean()), 4),
        **list_of(judged, wrong),
        "earlier_labels": list_of(judge(replace(found, before=draw.before), PRECISION), wrong),
        "seconds": round(middle - start, 2),
        "cleanlab_seconds": round(end - middle, 2),
    }  # fmt: skip


def list_of(judged: Judged, wrong: Array) -> dict[str, Any]:
    """The suspects that are handed out, with what is stated of them and what is true."""
    count, suspects = judged.count, judged.order[: judged.count]
    return {
        "suspects": count,
        "true_precision": round(float(wrong[suspects].mean()), 4) if count else None,
        "recall": round(float(wrong[suspects].sum() / wrong.sum()), 4),
        "precision": interval(judged.precision(count)),
        "share": interval(judged.wrong_share),
    }


def interval(estimate: Any) -> list[float] | None:
    """Value and ends, None where it is not known."""
    return [round(float(x), 4) for x in (estimate.value, estimate.low, estimate.high)] if estimate.known else None


def rows_of(cells: Sequence[Cell], features: Path, models: Path) -> list[dict[str, Any]]:
    """Of one data set and seed."""
    torch.set_num_threads(1)
    name, seed = cells[0].data, cells[0].seed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # classes with fewer examples than folds, and steps at the limit
        draw = drawn(name, seed, stored(name, features, models), SETS[name][1])
        return [row_of(cell, with_mistakes(draw, cell.noise, cell.rate, seed)) for cell in cells]


# The time of texts


def times_of_texts(count: int, trusted: int, models: Path) -> list[dict[str, Any]]:
    """Seconds of ``soseleto scan`` on news texts, in all and in the encoder: at first, and with the features kept."""
    read, rows = news.read("ag_news", data_root()), []
    sides = {"source": (read.texts[:count], read.labels), "target": (read.test_texts[:trusted], read.test_labels)}
    with tempfile.TemporaryDirectory() as name, patch.dict(os.environ, SOSELETO_CACHE=f"{name}/kept"):
        for side, (texts, labels) in sides.items():
            with open(f"{name}/{side}.csv", "w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([("text", "label"), *zip(texts, labels.tolist(), strict=False)])
        words = ["scan", *(f"--{side}={name}/{side}.csv" for side in sides), "--text-column=text", "--device=cpu"]
        for run in ("first", "features kept"):
            inside: list[float] = []

            def timed(*arguments: Any, inside: list[float] = inside) -> Array:
                start = time.perf_counter()
                found = features_of_set(*arguments)
                inside.append(time.perf_counter() - start)
                return found

            start = time.perf_counter()
            with patch("soseleto.comparison.scan.features_of_set", timed):
                model = f"--model=hf:{models / 'pretrained' / 'minilm'}"
                CliRunner().invoke(app, [*words, model, f"--out={name}/{run}"], catch_exceptions=False)
            seconds = {"seconds": round(time.perf_counter() - start, 3), "encoder_seconds": round(sum(inside), 3)}
            seconds["threads"] = torch.get_num_threads()
            setting = {"texts": len(sides["source"][0]), "trusted": len(sides["target"][0]), "run": run}
            rows.append({"method": "scan", "setting": setting, "seed": 0, **seconds})
    return rows


# Summary


def by_cell(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    for setting in [*dict.fromkeys(tuple(row["setting"].items()) for row in rows)]:
        yield dict(setting), [row for row in rows if tuple(row["setting"].items()) == setting]


def mean_of(rows: Sequence[dict[str, Any]], *path: str) -> float:
    values = [row[path[0]] if len(path) == 1 else row[path[0]][path[1]] for row in rows]
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else float("nan")


def lines_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each cell: means over its draws."""
    lines = []
    for setting, own in by_cell(rows):
        aurocs = {name: mean_of(own, "auroc", name) for name in own[0]["auroc"]}
        accuracies = {name: mean_of(own, "accuracy", name) for name in own[0]["accuracy"]}
        rates = {name: mean_of(own, name) for name in ("suspects", "true_precision", "recall", "true_share")}
        shares = {"share": float(np.mean([row["share"][0] for row in own if row["share"]] or [np.nan]))}
        times = {name: mean_of(own, name) for name in ("seconds", "cleanlab_seconds")}
        lines.append({**setting, **aurocs, **{f"{n} %": a for n, a in accuracies.items()}, **rates, **shares, **times})
    return lines


def holds(value: float, stated: list[float] | None) -> bool | None:
    return None if stated is None else stated[1] - 5e-5 <= value <= stated[2] + 5e-5


def must_show(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was asked for, and what was found."""
    cells = [own for _, own in by_cell(rows)]

    def gaps(kind: str, ours: str, *rivals: str) -> list[float]:
        return [mean_of(own, kind, ours) - max(mean_of(own, kind, rival) for rival in rivals) for own in cells]

    signals = [name for name in rows[0]["auroc"] if name not in ("cleanlab", "joined")]
    ranking, best = gaps("auroc", "joined", "cleanlab"), gaps("auroc", "joined", *signals)
    pruning, ordinary = gaps("accuracy", "ours", "cleanlab"), gaps("accuracy", "ours", "ordinary")
    lists = [("", rows), ("with earlier labels, ", [{**row, **row["earlier_labels"]} for row in rows])]
    big = [row["seconds"] for row in rows if SETS[row["setting"]["data"]][1] == 3000]
    lines = [
        ("AUROC above cleanlab's: least of all cells", 0.0, min(ranking)),
        ("AUROC above cleanlab's: cells below / of", "0", f"{sum(gap < 0 for gap in ranking)} / {len(ranking)}"),
        ("AUROC above cleanlab's: mean", 0.02, float(np.mean(ranking))),
        ("accuracy above cleanlab's pruning: mean, points", 1.0, float(np.mean(pruning))),
        ("accuracy above ordinary training: least, points", -0.3, min(ordinary)),
        ("AUROC above our best single signal: least", -0.005, min(best)),
        *(line for name, of in lists for line in of_lists(name, of)),
        ("longest CPU seconds, 3,000 rows (at most 30)", "", max(big) if big else None),
    ]
    return [{"what": what, "at least": least, "found": found} for what, least, found in lines]


def reached(row: dict[str, Any]) -> bool:
    """Whether the list is stated to have the precision that was asked for."""
    return bool(row["suspects"] and row["precision"] and row["precision"][0] >= PRECISION)


def of_lists(name: str, rows: Sequence[dict[str, Any]]) -> list[tuple[str, Any, Any]]:
    """What was asked of the lists of suspects, for one way to judge them."""
    kinds = {noise: [row for row in rows if row["setting"]["noise"] == noise] for noise in
             dict.fromkeys(row["setting"]["noise"] for row in rows)}  # fmt: skip
    fifth = [row for row in rows if row["setting"]["rate"] == 0.2 and row["setting"]["noise"] in ("uniform", "paired")]
    share, precision = ([h for h in found if h is not None] for found in (
        [holds(row["true_share"], row["share"]) for row in rows],
        [holds(row["true_precision"], row["precision"]) for row in rows if row["suspects"]]))  # fmt: skip
    checked, others = [row for row in rows if reached(row)], [row for row in rows if not reached(row)]

    def precisions(of: Sequence[dict[str, Any]]) -> str:
        found = {noise: mean_of([row for row in own if row in of], "true_precision") for noise, own in kinds.items()}
        return str({noise: round(value, 2) for noise, value in found.items() if value == value})

    return [
        (f"{name}true precision of all lists, asked {PRECISION:.0%}: mean", 0.85, mean_of(rows, "true_precision")),
        ("… by kind of mistakes", 0.7, precisions(rows)),
        ("… stated to reach it: draws", "", f"{len(checked)} / {len(rows)}"),
        ("… stated to reach it: mean", 0.9 if name else 0.85, mean_of(checked, "true_precision")),
        ("… stated to reach it: by kind of mistakes", 0.7, precisions(checked)),
        ("… stated as less: mean", "", mean_of(others, "true_precision")),
        (f"{name}recall, 20 % uniform or paired: mean", 0.6, mean_of(fifth, "recall")),
        (f"{name}wrong share: stated intervals that hold, %", 90.0, 100 * float(np.mean(share)) if share else None),
        (f"{name}precision: stated intervals that hold, %", "", 100 * float(np.mean(precision)) if precision else None),
    ]


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", type=Path, default=CACHE / "models")
    parser.add_argument("--features", type=Path, default=CACHE / "bench-features")
    parser.add_argument("--only", nargs="+", choices=SETS, default=[*SETS])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--development", action="store_true", help="rows and seeds on which settings are chosen")
    parser.add_argument("--short", action="store_true", help="digits with 20 %% paired mistakes, one draw")
    parser.add_argument("--texts", type=int, metavar="N", help="only the time of soseleto scan on N news texts, MiniLM")
    parser.add_argument("--trusted", type=int, default=400, help="of --texts")
    options = parser.parse_args(arguments)
    if options.texts:
        timed = results.started("scan-texts").merged(times_of_texts(options.texts, options.trusted, options.models))
        if options.out:
            results.save(options.out, timed)
        show("Seconds", [{**row["setting"], **row} for row in timed.rows])
        return [*timed.rows]
    first = DEVELOPMENT if options.development else 0
    seeds = range(first, first + options.seeds)
    cells = [Cell(name, *kind, seed) for seed in seeds for name in options.only for kind in SETS[name][2]]
    if options.short:
        cells = [Cell("digits", "paired", 0.2, first)]
    found = results.load(options.out) if options.out and options.out.exists() else results.started("scan")
    todo = [cell for cell in cells if not found.select(setting=cell.setting, seed=cell.seed)]
    groups = [list(group) for _, group in groupby(todo, key=lambda cell: (cell.data, cell.seed))]
    with ProcessPoolExecutor(1 if options.short else options.processes) as pool:
        work = [pool.submit(rows_of, group, options.features, options.models) for group in groups]
        for done in as_completed(work):
            found = found.merged(done.result())
            if options.out:
                results.save(options.out, found)
            last = found.rows[-1]
            print(last["setting"]["data"], last["seed"], flush=True)
    rows = [row for row in found.rows if (row["seed"] >= DEVELOPMENT) == options.development]
    show("Means over draws", lines_of(rows))
    show("Must show", must_show(rows))
    return rows


if __name__ == "__main__":
    main()
