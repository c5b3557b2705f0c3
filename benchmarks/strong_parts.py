"""What the parts of the strong recipe and images without labels are worth, on features of photos.

    python benchmarks/by_class.py --prepare FOLDER            # writes FOLDER/by_class.npz from $SOSELETO_DATA
    python benchmarks/strong_parts.py --data FOLDER [--seeds 2] --out results/choose-strong-parts-cpu.json

The features and the network of ``by_class.py``, 80 epochs. A draw has 300 trusted images, 2,000 to compare on, 3,000 in
the source, whose labels are wrong, and 6,700 without labels, which one line uses and the others do not. Test images are
not used. Rows that are in the file already are not repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from by_class import noisy, read, trained
from common import arguments, is_in, rows_in, show, write
from experiments.detection import compare
from soseleto.data import generator
from soseleto.methods import Strong

NOISES = ("40 %", "worst")
EPOCHS = 80
UNLABELLED = "with images without labels"
# Settings that differ from the recipe's.
LINES: Mapping[str, Mapping[str, Any]] = {
    "all parts": {},
    UNLABELLED: {},
    "labels believed": {"labels": "believed"},
    "labels ignored": {"labels": "ignored"},
    "doubted labels not replaced": {"answers": False},
    "answers not sharpened": {"judging": 1.0},
    "answers not balanced": {"balance": False},
    "judged by the network itself": {"teacher": 0.0},
    "no mixup": {"mixup": 0.0},
}


def row(noise: str, line: str, seed: int, folder: Path | None, epochs: int) -> dict[str, Any]:
    """One training: its accuracy on the images that it is compared on, and the AUROC of its weights."""
    data = read(folder)
    x, y = data["x"].float(), data["y"]
    x = (x - x.mean(0)) / (x.std(0) + 1e-6)
    order = torch.randperm(len(y), generator=generator(seed, "by_class/split"))
    shares = len(y) // 40, len(y) // 6, len(y) // 4
    trusted, compared, source, others = order.split([*shares, len(y) - sum(shares)])
    labels = noisy(noise, y[source], data["worst"][source], seed)
    more = {"unlabelled": x[others], "unlabelled_batch": min(128, len(others))} if line == UNLABELLED else {}
    method = Strong(**LINES[line], **more)
    result = trained((x[source], labels), (x[trusted], y[trusted]), method, epochs, seed)
    right = result.outputs(x[compared]).argmax(1) == y[compared]
    found = compare({"weight": result.weights}, labels != y[source])
    return {
        **key_of(noise, line, seed),
        "accuracy": 100.0 * right.double().mean().item(),
        "auroc": found["weight"]["auroc"],
    }


def key_of(noise: str, line: str, seed: int) -> dict[str, Any]:
    return {"noise": noise, "line": line, "seed": seed}


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = arguments(__doc__ or "")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="with by_class.npz")
    parser.add_argument("--noise", nargs="+", default=list(NOISES), choices=NOISES, metavar="NAME")
    parser.add_argument("--lines", nargs="+", default=list(LINES), choices=LINES, metavar="NAME")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--tiny", action="store_true", help="made-up features, to test that it runs")
    options = parser.parse_args(argv)
    if options.data is None and not options.tiny:
        parser.error("--data FOLDER is needed; python benchmarks/by_class.py --prepare FOLDER writes it.")
    rows = rows_in(options.out)
    for seed in range(options.seeds):
        for line in options.lines:
            for noise in options.noise:
                if is_in(rows, key_of(noise, line, seed)):
                    continue
                rows.append(row(noise, line, seed, None if options.tiny else options.data, options.epochs))
                write(options.out, "strong_parts", torch.device("cpu"), rows)
                print(rows[-1], flush=True)
    show("Parts of the strong recipe", rows)
    return rows


if __name__ == "__main__":
    main()
