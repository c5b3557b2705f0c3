"""Fine-tuning of a pretrained text network after a first answer, by where its source weights start.

    python benchmarks/first_weights.py --models FOLDER --device cuda --out first.json

The rows that were kept are in results/choose-first-weights-gpu.json, with further epochs and rates. FOLDER has
pretrained/minilm, the texts are in $SOSELETO_DATA. Draws are those for choosing settings in `scan_data.py`:
up to 3,000 texts of three sets, a tenth as many trusted. The head starts from the first answer; weights start at 1, at
the beliefs or at their squares, and are frozen or moved by the last layer, beyond noise.
"""

from __future__ import annotations

import copy
import csv
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import soseleto
from common import arguments, show, write
from experiments import encoding, news
from experiments.data import data_root
from scan_data import DEVELOPMENT, drawn, stored, with_mistakes
from soseleto.comparison.scan import with_solution
from soseleto.data import Examples
from soseleto.defaults import SIZED, DefaultMethod, few_weight_step
from soseleto.models.pretrained import make_text_model
from soseleto.pieces import beyond_noise
from soseleto.suspects.cross_fit import SHARPNESS
from soseleto.training.options import Inputs, Probes

CELLS = [
    ("intents", 3000, "uniform", 0.2),
    ("intents", 3000, "paired", 0.2),
    ("intents", 3000, "hard", 0.2),
    ("news", 3000, "people", None),
    ("hausa", 850, "people", None),
]
FIRST = {"1": None, "belief": 1.0, "belief squared": SHARPNESS}  # the power of the beliefs


def texts_of(name: str) -> list[str]:
    """In the order of `scan_data.py`."""
    if name != "intents":
        read = news.read("ag_news" if name == "news" else name)
        if name == "news":
            return list(read.texts)
        checked = np.flatnonzero(read.truth.numpy() != news.UNKNOWN)
        return [*(read.texts[row] for row in checked), *read.test_texts]
    rows: list[dict[str, str]] = []
    for part in ("train", "test"):
        with open(data_root() / "text" / f"banking77_{part}.csv", newline="", encoding="utf-8") as file:
            rows += csv.DictReader(file)
    return [row["text"] for row in rows]


def method(epochs: int, *, frozen: bool) -> soseleto.Soseleto:
    """The form for few wrong labels, with the target's share of that for many."""
    pieces = (*SIZED, beyond_noise(2.0))
    ours = DefaultMethod()._method(pieces, few_weight_step(epochs), 0.3, doubt=True, all_layers=False)
    return replace(ours, initial_weight="beliefs", **({"weight_step": None} if frozen else {}))


def rows_of(cell: tuple[Any, ...], folder: Path, features: Path, models: Path, device: str) -> list[dict[str, Any]]:
    name, n, noise, rate = cell
    parts, prepare = stored(name, features, models), encoding.preparation(folder, 64)
    tokens = prepare.tokenizer.encode(texts_of(name))
    draw = with_mistakes(drawn(name, DEVELOPMENT, parts, n), noise, rate, DEVELOPMENT)
    place = {row.tobytes(): at for at, row in enumerate(parts["x"].astype(np.float32))}

    def side(x: np.ndarray, labels: np.ndarray) -> Examples:
        return Examples(tokens[[place[row.tobytes()] for row in x]], torch.from_numpy(labels))

    source, target = side(draw.x, draw.labels), side(draw.trusted_x, draw.trusted_y)
    test = side(draw.test_x, draw.test_y)
    torch.manual_seed(0)
    network = make_text_model(f"hf:{folder}", "noisy", classes=1 + int(draw.y.max()))
    inputs = Inputs(standardize=prepare)
    answer = soseleto.scan(source, target, model=network, inputs=inputs, device=device)
    heading = {"data": name, "noise": noise, "rate": rate, "seed": DEVELOPMENT}
    rows = [{**heading, "method": "scan", "accuracy": answer.evaluate(test)["accuracy"]}]
    for first, power in FIRST.items():
        for frozen in (True, False):
            evidence = answer.evidence
            if power is not None:  # fit squares them
                belief = evidence.judgement.belief ** (power / SHARPNESS)
                evidence = replace(evidence, judgement=replace(evidence.judgement, belief=belief))
            chosen = method(3, frozen=frozen)
            chosen = replace(chosen, initial_weight=1.0) if power is None else chosen
            started, start = (
                with_solution(copy.deepcopy(network), answer.beliefs.model, 1 + int(draw.y.max())),
                time.time(),
            )
            probes = Probes(share=None, evidence=evidence)
            result = soseleto.fit(
                started, source, target, epochs=3, method=chosen, inputs=inputs, probes=probes, device=device
            )
            row = {"first weights": first, "frozen": frozen, "accuracy": result.evaluate(test)["accuracy"]}
            rows.append({**heading, "method": "fit", **row, "seconds": round(time.time() - start, 1)})
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--models", type=Path, required=True, metavar="FOLDER", help="with pretrained/minilm")
    parser.add_argument("--features", type=Path, default=Path("runs/features"), help="where features are kept")
    options = parser.parse_args(argv)
    folder, rows = options.models / "pretrained" / "minilm", []
    for cell in CELLS:
        rows += rows_of(cell, folder, options.features, options.models, options.device)
        write(options.out, "first_weights", torch.device(options.device), rows)
    show("Accuracy by where weights start", rows)


if __name__ == "__main__":
    main()
