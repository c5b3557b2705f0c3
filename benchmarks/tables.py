"""Adult from its raw CSV with flipped labels: SOSELETO's network, SOSELETO with a final boosted model, and boosting.

    python benchmarks/tables.py [--noise 0 0.05 0.3] [--seeds 5] [--out results/tables.json]

The table's rows are shuffled once. The first 14,561 of them were used to choose the network and the final model, and
are never reported. (Weights by class, the first form of the final model, were given up after one seed of the reported
rows.) Of the other 18,000, every seed draws 5,000 test rows, 300 trusted rows and 12,700
source rows, whose labels are flipped with the given probability. All methods get the same rows; boosting is trained on
source and target together. Runs that are in the results file already are not repeated.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import soseleto
from boosting import JUDGES, FinalData, boosting, fit_final, gradient_boosting
from experiments import results
from experiments.data import data_root
from soseleto.data import Examples, TablePreparation
from soseleto.data.tables import load
from soseleto.models import table_network
from soseleto.training.fit import fit

CHOOSING = 14_561  # rows that were used to choose, and are not reported
TEST, TARGET = 5_000, 300
NOISE = (0.0, 0.05, 0.3)
EPOCHS = 12
RESULTS = Path(__file__).parents[1] / "results" / "tables.json"


class Split(NamedTuple):
    source: Examples  # with flipped labels
    target: Examples
    test: Examples
    true_labels: torch.Tensor  # of the source
    preparation: TablePreparation


def split(
    noise: float, seed: int, tiny: bool = False, *, choosing: bool = False, n_test: int = TEST, n_source: int = -1
) -> Split:
    """The data of one seed; the preparation is fitted on the source alone.

    choosing: take the rows that are not reported; n_source: -1 for all that are left
    """
    table = load(data_root() / "tables" / "adult.csv")
    labels = np.array([label == ">50K" for label in table["class"].to_pylist()], dtype=np.int64)
    order = np.random.default_rng(20240601).permutation(len(labels))
    draw = np.random.default_rng(1000 + seed)
    rows = draw.permutation(order[:CHOOSING] if choosing else order[CHOOSING:])
    at = rows[:n_test], rows[n_test : n_test + TARGET], rows[n_test + TARGET :][: n_source if n_source >= 0 else None]
    test, target, source = (part[:400] for part in at) if tiny else at
    flipped = np.where(draw.random(len(source)) < noise, 1 - labels[source], labels[source])
    features = table.drop_columns(["class"])
    preparation = TablePreparation.fit(features.take(source), flipped)

    def examples(part: np.ndarray, given: np.ndarray) -> Examples:
        return Examples(preparation.read(features.take(part)), torch.from_numpy(given))

    truth = torch.from_numpy(labels[source])
    return Split(
        examples(source, flipped), examples(target, labels[target]), examples(test, labels[test]), truth, preparation
    )


def evaluated(data: Split, seed: int, epochs: int) -> Iterator[tuple[str, float, float]]:
    """(method, accuracy in percent, seconds) of every method."""

    def accuracy(outputs: torch.Tensor) -> float:
        return 100 * float((outputs.argmax(1) == data.test.labels).double().mean())

    codes = data.preparation.codes
    clean = Examples(data.source.inputs, data.true_labels)
    for method, source in (("gradient_boosting", data.source), ("gradient_boosting_clean", clean)):
        start = time.perf_counter()
        made = fit_final(gradient_boosting(codes, seed), FinalData.of(source, data.target, None))
        yield method, accuracy(made.outputs(data.test.inputs)), time.perf_counter() - start
    start = time.perf_counter()
    made = fit_final(boosting(codes, seed), FinalData.of(data.source, data.target, None))  # all weights frozen at 1
    yield "boosting_frozen", accuracy(made.outputs(data.test.inputs)), time.perf_counter() - start
    start = time.perf_counter()
    torch.manual_seed(seed)
    result = fit(
        table_network(data.preparation.width, 2), data.source, data.target,
        inputs=soseleto.Inputs(standardize=data.preparation),
        epochs=epochs, lr=0.03, seed=seed, device="cpu",
    )  # fmt: skip
    yield "soseleto", accuracy(result.outputs(data.test.inputs)), time.perf_counter() - start
    for weights, names in ((result.weights, ("mean", "each", "doubted")), (None, ("frozen_doubted",))):
        for how in names:
            start = time.perf_counter()
            given = FinalData.of(data.source, data.target, weights, "each" if how == "each" else "mean")
            if how.endswith("doubted"):
                given = given.doubted(boosting(codes, seed, JUDGES), len(data.source), seed)
            made = fit_final(boosting(codes, seed), given)
            yield f"soseleto_then_boosting_{how}", accuracy(made.outputs(data.test.inputs)), time.perf_counter() - start


METHODS = 8


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", type=float, nargs="+", default=NOISE)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--tiny", action="store_true", help="400 rows and one epoch, to see that it runs")
    parser.add_argument("--device", default="cpu", choices=["cpu"])
    options = parser.parse_args(arguments)
    found = results.load(options.out) if options.out.exists() else results.started("tables")
    for seed in range(options.seeds):
        for noise in options.noise:
            setting: dict[str, Any] = {"noise": noise, "n_target": TARGET}
            if len(found.select(setting=setting, seed=seed)) == METHODS:
                continue
            made = evaluated(split(noise, seed, options.tiny), seed, 1 if options.tiny else EPOCHS)
            rows = [
                {"method": method, "setting": setting, "seed": seed, "accuracy": accuracy, "seconds": seconds}
                for method, accuracy, seconds in made
            ]
            found = found.merged(rows)
            results.save(options.out, found)
            print(noise, seed, {row["method"]: round(row["accuracy"], 2) for row in rows}, flush=True)


if __name__ == "__main__":
    main()
