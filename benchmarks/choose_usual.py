"""What should move the weights where no method is given: digits, photos, a table and texts, on draws not reported.

    python benchmarks/coverage.py --prepare FOLDER        # the same data
    python benchmarks/choose_usual.py --data FOLDER --out results/choose-usual.json [--lines NAME ...] [--only DATA ...]
    python benchmarks/choose_usual.py --data FOLDER --out results/choose-usual-steps.json --steps
    python benchmarks/choose_usual.py --data FOLDER --out results/choose-convolutional-cpu.json --first-weights

A draw has a source of 3,000 examples with mistakes, 200 trusted ones and 2,000 to compare on. Networks, augmentation
and training are those of the command line, without probes. Finished rows are skipped; ``--part 1/4`` trains every
fourth row, for four processes with a file each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import soseleto
from common import arguments, show
from coverage import FILE, Cell, drawn, read_rows, stored, write_rows
from experiments.detection import auroc
from soseleto import Soseleto, methods
from soseleto.cli.choices import augment_for
from soseleto.models.by_name import default_name, make_model
from soseleto.pieces import (
    at_temperature,
    beyond_noise,
    centred,
    chain,
    hold_when_vanished,
    label_doubt,
    last_layer,
    normalized,
    scale_by_rms,
    target_share,
    unit_length,
    without_own_error,
)
from soseleto.pieces.last_layer import Form
from soseleto.training.usual import LAST_LAYER

SIZES = (3000, 200, 2000)
FIRST_SEED, SEEDS = 200, 3
STEP_SEEDS = 14  # of the second comparison
FIRST_WEIGHT_SEEDS = range(310, 312)  # of the third
CELLS = (
    *(("digits", "uniform", rate) for rate in (0.0, 0.02, 0.3, 0.5)),
    ("digits", "pairs", 0.3),
    *(("table", "uniform", rate) for rate in (0.0, 0.02, 0.3, 0.5)),
    *(("text", "uniform", rate) for rate in (0.02, 0.3)),
    ("text", "pairs", 0.3),
    *(("photos", "uniform", rate) for rate in (0.02, 0.3)),
    ("photos", "pairs", 0.3),
)
# A second comparison, of the steps: more rates and draws, and fewer lines.
STEP_CELLS = (
    *((data, "uniform", rate) for data in ("digits", "photos", "table", "text") for rate in (0.0, 0.05)),
    *((data, "uniform", 0.2) for data in ("digits", "table", "text")),
    *(("photos", noise, rate) for noise, rate in (("uniform", 0.3), ("pairs", 0.3), ("uniform", 0.5))),
)
# A third, of first weights: networks with convolutions, and many wrong labels.
FIRST_WEIGHT_CELLS = tuple(cell for cell in CELLS if cell[0] in ("digits", "photos") and cell[2] >= 0.3)
HOT = (at_temperature(4.0), without_own_error())
FORMS: dict[str, tuple[Form, ...] | None] = {
    "all layers": None,
    "last layer": (),
    "last layer, hot": HOT,
    "last layer, centred hot": (centred(), unit_length(), *HOT),
    "last layer, half whitened hot": LAST_LAYER.forms,
}


def method(form: str, z: float, step: float, share: float, doubt: bool = True) -> Soseleto:
    forms = FORMS[form]
    pieces = [scale_by_rms(), hold_when_vanished(), *([beyond_noise(z)] if z else [])]
    return Soseleto(
        weight_step=step,
        alignment=chain(*pieces) if forms is None else chain(last_layer(*forms), *pieces),
        source_loss=label_doubt() if doubt else normalized(),
        gradients=target_share(share) if share else chain(),
    )


def named(form: str, z: float, step: float, share: float, doubt: bool = True) -> str:
    how = f"{form}, {f'beyond {z:g} standard errors' if z else 'as they are'}, step {step:g}, share {share:g}"
    return how if doubt else f"{how}, labels not doubted"


def frozen(share: float, doubt: bool) -> Soseleto:
    """Weights of 1."""
    return replace(method("all layers", 0.0, 0.1, share, doubt), weight_step=None)


GRID: tuple[tuple[str, float, float, float], ...] = (
    *(("all layers", z, 0.1, 0.1) for z in (0.0, 1.0, 2.0, 3.0)),
    *(("last layer", z, 0.1, 0.1) for z in (2.0, 3.0)),
    *(("last layer, half whitened hot", z, 0.1, 0.1) for z in (2.0, 3.0)),
    *(("last layer, centred hot", z, 0.1, 0.1) for z in (0.0, 2.0, 3.0)),
    ("last layer, centred hot", 2.0, 0.3, 0.1),
    ("last layer, hot", 2.0, 0.1, 0.1),
    ("last layer, half whitened hot", 0.0, 0.3, 0.1),
    ("last layer", 0.0, 0.3, 0.3),
    ("all layers", 2.0, 0.1, 0.3),
    ("all layers", 0.0, 0.3, 0.1),
    ("all layers", 0.0, 0.3, 0.3),
)
STEP_GRID: tuple[tuple[str, float, float, float, bool], ...] = (
    *(("last layer, half whitened hot", z, step, 0.1, True) for z in (2.0, 3.0) for step in (0.1, 0.03)),
    *(("last layer, half whitened hot", 2.0, 0.03, share, True) for share in (0.2, 0.3)),
    *(("last layer, half whitened hot", 0.0, step, 0.3, True) for step in (0.03, 0.05, 0.1)),
    ("last layer, half whitened hot", 2.0, 0.1, 0.3, True),
    ("last layer, half whitened hot", 2.0, 0.1, 0.0, True),
    ("last layer, half whitened hot", 2.0, 0.1, 0.1, False),
    *(("all layers", 0.0, 0.3, share, True) for share in (0.1, 0.3, 0.5)),
    *(("all layers", 0.0, step, 0.3, True) for step in (0.1, 1.0)),
    ("all layers", 0.0, 0.3, 0.3, False),
)
FROZEN = {
    f"weights of 1, share {share:g}{'' if doubt else ', labels not doubted'}": (share, doubt)
    for share, doubt in ((0.1, True), (0.3, True), (0.05, False), (0.1, False), (0.3, False))
}
STEP_LINES: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: methods.by_name(name) for name in ("ordinary", "mixed")},  # type: ignore[misc]
    **{name: lambda given=given: frozen(*given) for name, given in FROZEN.items()},  # type: ignore[misc]
    **{named(*given): lambda given=given: method(*given) for given in STEP_GRID},  # type: ignore[misc]
}
LINES: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: methods.by_name(name) for name in ("ordinary", "mixed", "target_only")},  # type: ignore[misc]
    "Soseleto()": Soseleto,
    **{named(*given): lambda given=given: method(*given) for given in GRID},  # type: ignore[misc]
}
HALF, DOUBTFUL = "last layer, half whitened hot", 0.7
FIRST_WEIGHT_LINES: dict[str, Callable[[], Any]] = {
    named(HALF, 0.0, 0.05, 0.3): lambda: method(HALF, 0.0, 0.05, 0.3),
    **{
        f"{named(HALF, 2.0, step, 0.3)}, from {DOUBTFUL}": lambda step=step: replace(  # type: ignore[misc]
            method(HALF, 2.0, step, 0.3), initial_weight=DOUBTFUL
        )
        for step in (0.03, 0.1)
    },
    f"weights of {DOUBTFUL}, share 0.3": lambda: replace(frozen(0.3, doubt=True), initial_weight=DOUBTFUL),
}
ALL_LINES = {**STEP_LINES, **LINES, **FIRST_WEIGHT_LINES}


def row_of(cell: Cell, line: str, data: Path, device: str, sizes: tuple[int, int, int], **more: Any) -> dict[str, Any]:
    n, m, tests = sizes
    draw = drawn(cell, stored(data), (n, m + tests, 0))
    shape, names = tuple(draw.source.inputs.shape[1:]), draw.source.classes or ()
    result = soseleto.fit(
        make_model(default_name(shape), "noisy", classes=len(names), shape=shape, seed=cell.seed),
        draw.source,
        draw.target.subset(range(m)),
        method=ALL_LINES[line](),
        augment=augment_for(None, shape),
        standardize=True,
        seed=cell.seed,
        device=device,
        **more,
    )
    accuracy = result.evaluate(draw.target.subset(range(m, m + tests)))["accuracy"]
    found = {"data": cell.data, "noise": cell.noise, "rate": cell.rate, "seed": cell.seed, "line": line}
    found["accuracy"] = round(accuracy, 2)
    wrong = torch.from_numpy(draw.wrong)
    if isinstance(ALL_LINES[line](), Soseleto) and bool(wrong.any()):
        found["AUROC weight"] = round(auroc(result.weights, wrong), 4)
        found["AUROC score"] = round(auroc(result.scores, wrong), 4)
    return found


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = arguments(__doc__ or "")
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help=f"with {FILE}")
    parser.add_argument("--only", nargs="+", metavar="DATA", default=("digits", "table", "text", "photos"))
    parser.add_argument("--steps", action="store_true", help="the second comparison, of steps and shares")
    parser.add_argument("--first-weights", action="store_true", help="the third comparison, of first weights")
    parser.add_argument("--lines", nargs="+", metavar="NAME", choices=list(ALL_LINES), help="those of the comparison")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--sizes", type=int, nargs=3, default=SIZES, metavar="N")
    parser.add_argument("--epochs", type=int, help="as the command line's by default")
    parser.add_argument("--part", default="0/1", help="every n-th row from the k-th on, as k/n")
    options = parser.parse_args(argv)
    k, n = (int(number) for number in options.part.split("/"))
    rows = read_rows(options.out)
    done = {(row["data"], row["noise"], row["rate"], row["seed"], row["line"]) for row in rows}
    of_steps = (STEP_LINES, STEP_CELLS, range(FIRST_SEED, FIRST_SEED + STEP_SEEDS))
    of_first_weights = (FIRST_WEIGHT_LINES, FIRST_WEIGHT_CELLS, FIRST_WEIGHT_SEEDS)
    of_forms = (LINES, CELLS, range(FIRST_SEED, FIRST_SEED + SEEDS))
    all_lines, cells, seeds = of_first_weights if options.first_weights else of_steps if options.steps else of_forms
    seeds = range(seeds.start, seeds.start + (options.seeds or len(seeds)))
    lines = options.lines or list(all_lines)
    jobs = [(Cell(*cell, seed), line) for seed in seeds for cell in cells for line in lines]
    more = {} if options.epochs is None else {"epochs": options.epochs}
    for cell, line in [job for job in jobs if job[0].data in options.only][k::n]:
        if (*cell.key, line) not in done:
            rows.append(row_of(cell, line, options.data / FILE, options.device, tuple(options.sizes), **more))
            write_rows(options.out, torch.device(options.device), rows, name="choose-usual")
    show("What moves the weights", rows)
    return rows


if __name__ == "__main__":
    main()
