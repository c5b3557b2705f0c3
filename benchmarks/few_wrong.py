"""Settings for sources with few wrong labels, on SVHN images that serve to choose and are not reported elsewhere.

    python benchmarks/few_wrong.py [--device cuda] [--lines NAME ...] [--seeds 3] [--part 0/4] [--tiny] --out FILE

3,000 source, 200 trusted and 2,500 test images of SVHN; 0, 5 and 30 % of the source's labels flipped at random, and
30 % to the next class; the defaults of the command line, without probes. A row that is in FILE already is not repeated;
``--part 1/4`` trains every fourth row, for four processes with a file each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import soseleto
from common import arguments, show, write
from experiments.detection import auroc
from soseleto import Soseleto, data, methods
from soseleto.cli.choices import augment_for
from soseleto.data import Examples, generator, symmetric
from soseleto.models.by_name import by_name
from soseleto.pieces import (
    beyond_noise,
    chain,
    hold_when_vanished,
    label_doubt,
    last_layer,
    scale_by_rms,
    target_share,
)

SIZES, TINY = (3000, 200, 2500), (120, 40, 60)
NOISES = (("random class", 0.0), ("random class", 0.05), ("random class", 0.3), ("next class", 0.3))
FIRST_SEED = 100  # those of the tests and tables are below it


def beyond(z: float, **settings: Any) -> Soseleto:
    return Soseleto(alignment=chain(scale_by_rms(), hold_when_vanished(), beyond_noise(z)), **settings)


LINES: dict[str, Callable[[], Any]] = {
    "ordinary": lambda: methods.by_name("ordinary"),
    "mixed": lambda: methods.by_name("mixed"),
    "default": Soseleto,
    "beyond_noise(2)": lambda: beyond(2.0),
    "beyond_noise(3)": lambda: beyond(3.0),
    "target_share(0.1)": lambda: Soseleto(gradients=target_share(0.1)),
    "target_share(0.3)": lambda: Soseleto(gradients=target_share(0.3)),
    "beyond_noise(2), target_share(0.1)": lambda: beyond(2.0, gradients=target_share(0.1)),
    "beyond_noise(2), target_share(0.3)": lambda: beyond(2.0, gradients=target_share(0.3)),
    "beyond_noise(3), weight_step 0.3": lambda: beyond(3.0, weight_step=0.3),
    "beyond_noise(3), weight_step 0.3, target_share(0.1)": lambda: beyond(
        3.0, weight_step=0.3, gradients=target_share(0.1)
    ),
    "beyond_noise(3), weight_step 0.3, target_share(0.3)": lambda: beyond(
        3.0, weight_step=0.3, gradients=target_share(0.3)
    ),
    "label_doubt, target_share(0.1)": lambda: Soseleto(source_loss=label_doubt(), gradients=target_share(0.1)),
    "label_doubt, beyond_noise(2), target_share(0.3)": lambda: beyond(
        2.0, source_loss=label_doubt(), gradients=target_share(0.3)
    ),
    "last layer, target_share(0.1)": lambda: Soseleto(
        alignment=chain(last_layer(), scale_by_rms(), hold_when_vanished()), gradients=target_share(0.1)
    ),
}


def parted(seed: int, sizes: tuple[int, int, int]) -> list[Examples]:
    images = data.load("svhn", "train")
    order = torch.randperm(len(images), generator=generator(seed, "few wrong"))
    return [images.subset(part) for part in order[: sum(sizes)].split(sizes)]


def with_mistakes(source: Examples, kind: str, share: float, seed: int) -> Examples:
    """Source labels with mistakes; ``truth`` has the right ones."""
    truth = source.labels
    wrong = symmetric(truth, share, classes=10, seed=seed).labels
    if kind == "next class":
        wrong = torch.where(wrong != truth, (truth + 1) % 10, truth)
    return Examples(source.inputs, wrong, truth=truth)


def run(line: str, kind: str, share: float, seed: int, device: str, sizes: tuple[int, int, int]) -> dict[str, Any]:
    source, target, test = parted(seed, sizes)
    source = with_mistakes(source, kind, share, seed)
    torch.manual_seed(seed)
    result = soseleto.fit(
        by_name("quick", classes=10, shape=(3, 32, 32)),
        source,
        target,
        method=LINES[line](),
        augment=augment_for(None, (3, 32, 32), [str(digit) for digit in range(10)]),
        standardize=True,
        seed=seed,
        device=device,
        optimizer=soseleto.sgd(0.03, 5e-4),
        **({"epochs": 1} if sizes == TINY else {}),
    )
    found = {"noise": kind, "share": share, "seed": seed, "method": line, "accuracy": result.evaluate(test)["accuracy"]}
    wrong = source.labels != source.truth
    if result.learned is not None and not line.startswith(("ordinary", "mixed")):
        low = result.weights < 0.1
        found["right examples below 0.1, %"] = 100.0 * float(low[~wrong].double().mean())
        if bool(wrong.any()):
            found["wrong examples below 0.1, %"] = 100.0 * float(low[wrong].double().mean())
            found["AUROC weight"], found["AUROC score"] = auroc(result.weights, wrong), auroc(result.scores, wrong)
    return found


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = arguments(__doc__ or "")
    parser.add_argument("--lines", nargs="+", default=list(LINES), choices=list(LINES), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--part", default="0/1", help="every n-th row from the k-th on, as k/n")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test that it runs")
    options = parser.parse_args(argv)
    k, n = (int(number) for number in options.part.split("/"))
    kept: Path | None = options.out
    rows = json.loads(kept.read_text("utf-8"))["rows"] if kept is not None and kept.exists() else []
    done = {(row["method"], row["noise"], row["share"], row["seed"]) for row in rows}
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
    jobs = [(line, *noise, seed) for seed in seeds for noise in NOISES for line in options.lines]
    for job in jobs[k::n]:
        if job not in done:
            rows.append(run(*job, options.device, TINY if options.tiny else SIZES))
            write(kept, "few_wrong", torch.device(options.device), rows)
    show("Few wrong labels", rows)
    return rows


if __name__ == "__main__":
    main()
