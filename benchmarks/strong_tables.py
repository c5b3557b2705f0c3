"""The strong recipe on a table: how many values its strong views should lack, and what its parts are worth.

    python benchmarks/strong_tables.py [--seeds 5] --out results/choose-strong-tables-cpu.json

Adult from its raw CSV: 2,000 source rows with flipped labels, 300 trusted rows and 3,000 other rows to compare on, all
of them rows that ``tables.py`` keeps for choosing. ``table_network``, SGD with rate 0.03, 10 epochs. Rows that are in
the file already are not repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from common import arguments, is_in, rows_in, show, write
from experiments.detection import compare
from soseleto import sgd
from soseleto.data import FeatureViews
from soseleto.methods import Strong
from soseleto.models import table_network
from soseleto.training.fit import fit
from tables import Split, split

NOISE = (0.4, 0.3, 0.2)
EPOCHS = 10
# Name: values dropped from the strong views, settings of the method. The plain recipe has neither.
LINES: Mapping[str, tuple[float, Mapping[str, Any]] | None] = {
    "plain": None,
    "nothing dropped": (0.0, {}),
    "20 %": (0.2, {}),
    "40 %": (0.4, {}),
    "60 %": (0.6, {}),
    "40 %, labels ignored": (0.4, {"labels": "ignored"}),
    "40 %, labels believed": (0.4, {"labels": "believed"}),
}


def trained(data: Split, line: str, seed: int, epochs: int) -> dict[str, Any]:
    """Accuracy on the rows to compare on, and the AUROC of the weights against flipped labels."""
    made = LINES[line]
    recipe: dict[str, Any] = {}
    if made is not None:
        recipe = {"recipe": "strong", "method": Strong(**made[1]), "augment": FeatureViews(drop=made[0])}
    torch.manual_seed(seed)
    result = fit(
        table_network(data.preparation.width, 2), data.source, data.target, standardize=data.preparation,
        epochs=epochs, optimizer=sgd(0.03), seed=seed, device="cpu", **recipe,
    )  # fmt: skip
    right = result.outputs(data.test.inputs).argmax(1) == data.test.labels
    found = compare({"weight": result.weights}, data.source.labels != data.true_labels)
    return {"accuracy": 100 * right.double().mean().item(), "auroc": found["weight"]["auroc"]}


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = arguments(__doc__ or "")
    parser.add_argument("--noise", type=float, nargs="+", default=NOISE)
    parser.add_argument("--lines", nargs="+", default=list(LINES), choices=LINES, metavar="NAME")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="400 rows and one epoch, to test that it runs")
    options = parser.parse_args(argv)
    rows = rows_in(options.out)
    for seed in range(options.seeds):
        for noise in options.noise:
            keys = [{"noise": noise, "line": line, "seed": seed} for line in options.lines]
            wanted = [key for key in keys if not is_in(rows, key)]
            data = split(noise, seed, options.tiny, choosing=True, n_test=3000, n_source=2000) if wanted else None
            for key in wanted:
                assert data is not None
                rows.append({**key, **trained(data, key["line"], seed, 1 if options.tiny else EPOCHS)})
                write(options.out, "strong_tables", torch.device("cpu"), rows)
                print(rows[-1], flush=True)
    show("The strong recipe on Adult", rows)
    return rows


if __name__ == "__main__":
    main()
