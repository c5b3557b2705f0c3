"""Labels that are numbers: ``soseleto fit``'s network, controls, baselines and the first answer, by explained variance.

    python benchmarks/regression.py --out results/regression-cpu.json --processes 2

A draw has 1,000 source rows, of which a fifth have the label of another row, 200 trusted rows and 1,000 test rows (of
diabetes 200, 60 and 182). Rate and target share were chosen on ``CHOICE``; ``HELD_OUT`` had no part in it. Every line
trains the command's network with its epochs, batches and optimizer. Finished draws are skipped.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn import datasets

import soseleto
from common import arguments, show
from coverage import read_rows, write_rows
from experiments.controls import ShuffledWeights
from soseleto.data import Pair, Reading, read_pair
from soseleto.defaults import DefaultMethod
from soseleto.methods import Mixed, Ordinary, TargetOnly
from soseleto.models.trunk_and_heads import InUnits
from soseleto.task.losses import in_units

CHOICE, HELD_OUT = ("friedman1", "friedman2", "diabetes"), ("friedman3", "adult age")
WRONG = 0.2
SEEDS = 3
DEFAULT = DefaultMethod().for_losses("noisy", numbers=True)
# A method with changes of the training.
LINES: dict[str, tuple[Any, dict[str, Any]]] = {
    "soseleto": (None, {}),
    "weights frozen": (replace(DEFAULT, weight_step=None), {}),
    "weights shuffled": (ShuffledWeights(**vars(DEFAULT)), {}),
    "ordinary": (Ordinary(), {}),
    "mixed": (Mixed(), {}),
    "target only": (TargetOnly(), {}),
}
CHOICES: dict[str, tuple[Any, dict[str, Any]]] = {
    **{f"share {share}": (DefaultMethod(target_share=share), {}) for share in (0.0, 0.3)},
    **{f"rate {lr}": (None, {"lr": lr}) for lr in (0.003, 0.03)},
}
SCAN = "first answer"


def table(name: str, seed: int) -> tuple[pd.DataFrame, np.ndarray]:
    """Columns and labels, in an order of this seed."""
    if name == "adult age":
        frame = pd.read_csv(Path(os.environ["SOSELETO_DATA"]) / "tables" / "adult.csv", skipinitialspace=True)
        frame = frame.sample(2200, random_state=seed).drop(columns=["fnlwgt"])
        return frame.drop(columns=["age"]), frame["age"].to_numpy(float)
    if name == "diabetes":
        x, y = datasets.load_diabetes(return_X_y=True)
        order = np.random.default_rng(seed).permutation(len(y))
        return pd.DataFrame(x[order]).add_prefix("x"), y[order]
    noise = {"friedman1": 1.0, "friedman2": 100.0, "friedman3": 0.1}[name]
    x, y = getattr(datasets, f"make_{name}")(2200, noise=noise, random_state=seed)
    return pd.DataFrame(x).add_prefix("x"), y


def drawn(name: str, seed: int) -> Pair:
    columns, labels = table(name, seed)
    m, n = (60, 200) if name == "diabetes" else (200, 1000)
    draw = np.random.default_rng([seed, 1])
    given = labels.copy()
    wrong = m + draw.choice(n, round(WRONG * n), replace=False)
    given[wrong] = draw.choice(labels, len(wrong), replace=False)
    if (given == given.round()).all():  # whole numbers would be read as classes
        given = given + 0.5
    frame = columns.assign(label=given)
    target, source, test = frame[:m], frame[m : m + n], frame[m + n :]
    return read_pair(source, target, test, mode="noisy", reading=Reading(label_column="label"))


def trained(pair: Pair, seed: int, method: Any, changes: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(seed)
    model = InUnits(soseleto.models.table_network(pair.preparation.width, 1), pair.target.labels)
    loss = in_units(float(pair.target.labels.var(correction=0)))
    prepared = soseleto.Inputs(standardize=pair.preparation)
    shared = {"loss": loss, "inputs": prepared, "seed": seed, "device": "cpu"}
    return soseleto.fit(model, pair.source, pair.target, method=method, **shared, **changes).predict(pair.test.inputs)


def scanned(pair: Pair, seed: int) -> torch.Tensor:
    prepared = soseleto.Inputs(standardize=pair.preparation)
    return soseleto.scan(pair.source, pair.target, inputs=prepared, seed=seed).predict(pair.test.inputs)


def row_of(name: str, line: str, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    pair = drawn(name, seed)
    run: Callable[[Pair, int], torch.Tensor] = scanned
    if line != SCAN:
        method, changes = {**LINES, **CHOICES}[line]
        run = partial(trained, method=method, changes=changes)
    truth = pair.test.labels.double()
    try:
        errors = (run(pair, seed).double().flatten() - truth).square().mean()
        explained = round(float(100 * (1 - errors / truth.var(correction=0))), 2)
    except soseleto.errors.TrainingError:  # the loss is no longer finite
        explained = None
    return {"data": name, "line": line, "seed": seed, "explained_variance": explained}


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds, and the mean difference from SOSELETO with its standard error."""
    values = {(row["data"], row["line"], row["seed"]): row["explained_variance"] for row in rows}
    lines = []
    for data in (*CHOICE, *HELD_OUT):
        for line in (*LINES, *CHOICES, SCAN):
            own = {seed: v for (of, name, seed), v in values.items() if (of, name) == (data, line)}
            if not own:
                continue
            if None in own.values():
                lines.append({"data": data, "line": line, "mean": "diverged", "draws": len(own)})
                continue
            apart = [value - values[data, "soseleto", seed] for seed, value in own.items()]
            error = float(np.std(apart, ddof=1) / len(apart) ** 0.5) if len(apart) > 1 else 0.0
            measured = {"mean": float(np.mean([*own.values()])), "minus soseleto": float(np.mean(apart)), "±": error}
            lines.append({"data": data, "line": line, **measured, "draws": len(own)})
    return lines


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", nargs="+", metavar="DATA", default=(*CHOICE, *HELD_OUT))
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(argv)
    rows = read_rows(options.out)
    done = {(row["data"], row["line"], row["seed"]) for row in rows}
    wanted = [
        (name, line, seed)
        for seed in range(options.seeds)
        for name in options.only
        for line in (*LINES, SCAN, *(CHOICES if name in CHOICE else ()))
        if (name, line, seed) not in done
    ]
    with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for number, one in enumerate(as_completed([pool.submit(row_of, *each) for each in wanted]), 1):
            rows.append(one.result())
            write_rows(options.out, torch.device("cpu"), rows, name="regression")
            print(f"{number} of {len(wanted)} trainings", flush=True)
    show("Explained variance, percent", summary(rows))
    return rows


if __name__ == "__main__":
    main()
