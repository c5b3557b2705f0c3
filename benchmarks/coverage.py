"""Coverage of the 95 % intervals of suspects, over kinds of mistakes, their share, and kinds of data.

    python benchmarks/coverage.py --prepare FOLDER                     # writes FOLDER/coverage.npz from $SOSELETO_DATA
    python benchmarks/coverage.py --data FOLDER --out results/coverage.json --processes 15 --device cpu

A draw is a source of 3,000 and a target of 600 examples. Mistakes are made on both, and the target's are corrected. Two
trainings, one with the target's earlier labels and one without, give suspects and intervals, and the suspects of the
second are audited with 60 + 60 checks. Every row compares the intervals with the truth. Finished draws are skipped, so
that the command can be repeated after a stop; a line is written to the file after every draw.

- *uniform*: any other class; *pairs*: always the next class
- *hard*: examples that a model of its own finds hard, taken for the class that it finds most likely beside the truth
- *human*: CIFAR-10N's worst labels and NoisyAG-News, of whose mistakes a random part is corrected; *human, aggregate*
  and *human, random 1* are CIFAR-10N's as they are, the last one for choosing settings: it is not reported
"""

from __future__ import annotations

import csv
import json
import multiprocessing
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import soseleto
from common import arguments, machine, show
from experiments.data import data_root, human_labels, load
from soseleto.data import Examples, pair_flip, symmetric
from soseleto.models.architectures import mlp, quick
from soseleto.suspects import audit
from soseleto.suspects.probes import enough_of_both
from soseleto.suspects.rates import AUDITED, EARLIER_LABELS, Estimate
from soseleto.suspects.suspects import Suspects

FILE = "coverage.npz"
RATES = (0.005, 0.02, 0.05, 0.2, 0.4)
SOURCE, TARGET, OTHERS = 3000, 600, 4000
SEEDS = 20
WITHOUT = "without earlier labels"
CHOSEN_ON = "human, random 1"
CONFUSED = ("pairs", 0.3)  # on digits, for the precision at a recall of one half
WORDS = 1000
Array = np.ndarray


# The data


def prepare(folder: Path) -> Path:
    """Write small data sets from $SOSELETO_DATA: handwritten digits, photos, a table, and texts as TF-IDF."""
    parts: dict[str, Array] = {}
    digits, photos = load("mnist"), load("cifar10")
    parts["digits/x"] = _smaller(digits.inputs[:10_000], 4)
    parts["digits/y"] = digits.labels[:10_000].numpy()
    parts["photos/x"] = _smaller(photos.inputs[:10_000], 2)
    parts["photos/y"] = photos.labels[:10_000].numpy()
    human = human_labels(data_root())
    for name, key in (("human", "worse_label"), ("human, aggregate", "aggre_label"), (CHOSEN_ON, "random_label1")):
        parts[f"photos/{name}"] = np.asarray(human[key])[:10_000]
    parts["table/x"], parts["table/y"] = _adult(data_root() / "tables" / "adult.csv")
    parts["text/x"], parts["text/y"], parts["text/human"] = _news(data_root() / "text" / "noisy_ag_news_train.csv")
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / FILE, **parts)
    return folder / FILE


def _smaller(images: torch.Tensor, factor: int) -> Array:
    return F.avg_pool2d(images.float(), factor).round().to(torch.uint8).numpy()


def _adult(path: Path, n: int = 10_000) -> tuple[Array, Array]:
    """Numbers standardised, words one-hot."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))[:n]
    names = [name for name in rows[0] if name != "class"]
    columns = []
    for name in names:
        values = [row[name].strip() for row in rows]
        if all(re.fullmatch(r"-?\d+(\.\d+)?", value) for value in values):
            numbers = np.array(values, dtype=np.float64)
            columns.append(((numbers - numbers.mean()) / numbers.std())[:, None])
        else:
            columns.append(np.array(values)[:, None] == np.array(sorted(set(values))))
    labels = np.array([row["class"].strip().startswith(">") for row in rows]).astype(np.int64)
    return np.concatenate(columns, axis=1).astype(np.float16), labels


def _news(path: Path) -> tuple[Array, Array, Array]:
    """TF-IDF of the most frequent words, rows of length √WORDS, with true and given labels."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    texts = [Counter(re.findall(r"[a-z]{2,}", row["text"].lower())) for row in rows]
    known = Counter(word for text in texts for word in text)
    place = {word: at for at, (word, _) in enumerate(known.most_common(WORDS))}
    counts = np.zeros((len(texts), WORDS))
    for row, text in enumerate(texts):
        for word, count in text.items():
            if word in place:
                counts[row, place[word]] = 1 + np.log(count)
    weighted = counts * np.log(len(texts) / np.maximum((counts > 0).sum(0), 1))
    length = np.linalg.norm(weighted, axis=1, keepdims=True) / np.sqrt(WORDS)
    labels = [np.array([int(row[name]) for row in rows]) for name in ("gt", "label")]
    return (weighted / np.maximum(length, 1e-9)).astype(np.float16), *labels


@cache
def stored(path: Path) -> dict[str, Array]:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


# Cells


@dataclass(frozen=True)
class Cell:
    """One draw: a kind of data, of mistakes, their share (None: as they are), and a seed."""

    data: str
    noise: str
    rate: float | None
    seed: int

    @property
    def key(self) -> tuple[str, str, float | None, int]:
        return self.data, self.noise, self.rate, self.seed


def cells(seeds: int) -> Iterator[Cell]:
    """Seed by seed, so that an unfinished file has something of every kind."""
    kinds: list[tuple[str, str, float | None]] = []
    for data, noises in (("digits", 3), ("table", 3), ("text", 4), ("photos", 4)):
        for noise in ("uniform", "pairs", "hard", "human")[:noises]:
            if (data, noise) in (("table", "pairs"), ("photos", "uniform"), ("photos", "pairs"), ("photos", "hard")):
                continue  # pairs of two classes are uniform; photos are for human mistakes
            kinds += [(data, noise, rate) for rate in RATES if (data, noise, rate) != ("text", "human", 0.4)]
    kinds += [("digits", *CONFUSED), ("photos", "human, aggregate", None), ("photos", CHOSEN_ON, None)]
    return (Cell(*kind, seed) for seed in range(seeds) for kind in kinds)


@dataclass(frozen=True)
class Draw:
    source: Examples
    target: Examples
    before: torch.Tensor  # the target's labels before they were corrected
    wrong: Array  # (n,) of the source


def drawn(cell: Cell, parts: dict[str, Array], sizes: tuple[int, int, int] = (SOURCE, TARGET, OTHERS)) -> Draw:
    inputs, truth = parts[f"{cell.data}/x"], parts[f"{cell.data}/y"].astype(np.int64)
    classes, (n, m, others) = int(truth.max()) + 1, sizes
    order = np.random.default_rng([cell.seed, 1]).permutation(len(truth))
    at, rest = order[: n + m], order[n + m : n + m + others]
    labels = noisy(cell, parts, inputs, truth, at, rest, classes)
    given = torch.from_numpy(inputs[at])
    given = given if given.dtype == torch.uint8 else given.float()
    right = torch.from_numpy(truth[at])
    names = tuple(str(c) for c in range(classes))
    source = Examples(given[:n], labels[:n], classes=names, truth=right[:n])
    target = Examples(given[n:], right[n:], classes=names)
    return Draw(source, target, labels[n:], (labels != right)[:n].numpy())


def noisy(
    cell: Cell, parts: dict[str, Array], inputs: Array, truth: Array, at: Array, rest: Array, classes: int
) -> torch.Tensor:
    """The labels, with mistakes, of the examples ``at``; ``rest`` are others, to learn from which examples are hard."""
    right, draw = torch.from_numpy(truth[at]), np.random.default_rng([cell.seed, 2])
    if cell.noise == "uniform":
        return symmetric(right, float(cell.rate or 0), classes, cell.seed).labels
    if cell.noise == "pairs":
        return pair_flip(right, float(cell.rate or 0), classes, cell.seed).labels
    if cell.noise == "hard":
        return _hard(inputs, truth, at, rest, classes, float(cell.rate or 0), draw)
    given = parts[f"{cell.data}/{cell.noise}"][at].astype(np.int64)
    mistakes = draw.permutation(np.flatnonzero(given != truth[at]))
    count = len(mistakes) if cell.rate is None else min(round(cell.rate * len(at)), len(mistakes))
    labels = truth[at].copy()
    labels[mistakes[:count]] = given[mistakes[:count]]
    return torch.from_numpy(labels)


def _hard(
    inputs: Array, truth: Array, at: Array, rest: Array, classes: int, rate: float, draw: np.random.Generator
) -> torch.Tensor:
    """Drawn in proportion to 1 − p(truth) by a regression on random features of other examples with right labels."""
    from sklearn.linear_model import LogisticRegression

    flat = inputs.reshape(len(inputs), -1).astype(np.float64)
    flat = (flat - flat.mean(0)) / flat.std()
    directions = draw.normal(size=(flat.shape[1], 300)) / np.sqrt(flat.shape[1])
    features = np.maximum(flat @ directions + 0.3 * draw.normal(size=300), 0.0)
    model = LogisticRegression(C=0.1, tol=1e-3, max_iter=200).fit(features[rest], truth[rest])
    p = np.zeros((len(at), classes))
    p[:, model.classes_] = model.predict_proba(features[at])
    place, labels = np.arange(len(at)), truth[at].copy()
    chance = np.log(np.maximum(1.0 - p[place, labels], 1e-6)) + draw.gumbel(size=len(at))
    chosen = np.argsort(-chance)[: round(rate * len(at))]
    p[place, labels] = -1.0
    labels[chosen] = p[chosen].argmax(1)
    return torch.from_numpy(labels)


# One draw


def network(source: Examples) -> nn.Module:
    classes = len(source.classes or ())
    if source.inputs.ndim == 4 and source.inputs.shape[1] == 3:
        return quick(classes, size=source.inputs.shape[-1])
    return mlp(int(np.prod(source.inputs.shape[1:])), classes)


def suspects_of(draw: Draw, cell: Cell, *, earlier: bool, epochs: int, device: str) -> Suspects:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cell.seed)
        model = network(draw.source)
    result = soseleto.fit(
        model, draw.source, draw.target, epochs=epochs, lr=0.1 if draw.source.inputs.ndim == 4 else 0.03,
        probes=soseleto.Probes(labels_before=draw.before if earlier else None), seed=cell.seed, device=device,
    )  # fmt: skip
    return result.suspects()


def audited(found: Suspects, wrong: Array, seed: int) -> dict[str, Estimate]:
    """After all checks that an audit plans by default."""
    chosen = found.is_suspect.numpy()
    strata = audit.draw(found.probability.double().numpy(), chosen, seed=seed)
    checked = []
    for one in strata:
        answers = tuple(bool(wrong[row]) for row in one.order[: audit.CHECKS])
        counts = sum(answers), len(answers) - sum(answers)
        checked.append(audit.Checked(one.suspects, one.size, one.expected, answers, *counts))
    return audit.figures(checked)


def rows_of(cell: Cell, data: Path, device: str, epochs: int = 20, sizes: Any = (SOURCE, TARGET, OTHERS)) -> list[Any]:
    """Three rows: without earlier labels, the same audited, and with earlier labels."""
    torch.set_num_threads(1)
    draw = drawn(cell, stored(data), sizes)
    start = time.perf_counter()
    found = suspects_of(draw, cell, earlier=False, epochs=epochs, device=device)
    checked = audited(found, draw.wrong, cell.seed)
    rows = [
        row_of(cell, WITHOUT, draw, found, found.precision, found.wrong_share),
        row_of(cell, AUDITED, draw, found, checked.get("precision"), checked["wrong_share"]),
    ]
    differ = int((draw.before != draw.target.labels).sum())
    if enough_of_both(differ, len(draw.before)):
        found = suspects_of(draw, cell, earlier=True, epochs=epochs, device=device)
        rows.append(row_of(cell, EARLIER_LABELS, draw, found, found.precision, found.wrong_share))
    else:
        rows.append(_named(cell, EARLIER_LABELS) | {"suspects": None})  # too few mistakes to plant
    seconds = round(time.perf_counter() - start, 2)
    return [row | {"seconds": seconds} for row in rows]


def _named(cell: Cell, basis: str) -> dict[str, Any]:
    return {"data": cell.data, "noise": cell.noise, "rate": cell.rate, "seed": cell.seed, "basis": basis}


def row_of(
    cell: Cell, basis: str, draw: Draw, found: Suspects, precision: Estimate | None, share: Estimate
) -> dict[str, Any]:
    chosen, wrong = found.is_suspect.numpy(), draw.wrong
    hits = np.cumsum(wrong[np.argsort(-found.probability.numpy(), kind="stable")])
    half = int(np.searchsorted(hits, wrong.sum() / 2)) if wrong.any() else 0
    return _named(cell, basis) | {
        "suspects": len(found),
        "precision": _interval(precision) if len(found) else None,
        "true precision": round(float(wrong[chosen].mean()), 4) if len(found) else None,
        "share": _interval(share),
        "true share": round(float(wrong.mean()), 4),
        "precision at recall 0.5": round(float(hits[half] / (half + 1)), 4),
    }


def _interval(estimate: Estimate | None) -> list[float] | None:
    """Value and ends; None where it is unknown."""
    if estimate is None or not estimate.known:
        return None
    return [round(number, 4) for number in (estimate.value, estimate.low, estimate.high)]


# The table


def reported(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what was seen while the method was built."""
    return [row for row in rows if row["noise"] != CHOSEN_ON]


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By basis and kind of mistakes, and over everything: the share of known intervals that hold the truth."""
    lines = []
    for basis in (AUDITED, EARLIER_LABELS, WITHOUT):
        own = [row for row in reported(rows) if row["basis"] == basis]
        for noise in ["all", *dict.fromkeys(row["noise"] for row in own)]:
            some = [row for row in own if noise in ("all", row["noise"])]
            lines.append({"basis": basis, "mistakes": noise, "draws": len(some), **_counts(some)})
    return lines


def _counts(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("share", "precision"):
        known = [row for row in rows if row.get(name) is not None]
        held = [row[name][1] - 5e-5 <= row[f"true {name}"] <= row[name][2] + 5e-5 for row in known]
        found[f"{name} held %"] = 100 * float(np.mean(held)) if known else None
        found[f"{name} width"] = 100 * float(np.mean([row[name][2] - row[name][1] for row in known])) if known else None
        found[f"{name} unknown"] = sum(
            row["suspects"] is None or (row[name] is None and (name == "share" or row["suspects"] > 0)) for row in rows
        )
    found["no suspects"] = sum(row["suspects"] == 0 for row in rows)
    return found


def at_half_recall(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Of pairs at 30 % on digits, without earlier labels: the precision of the most probable half of wrong labels."""
    wanted = ("digits", *CONFUSED, WITHOUT)
    own = [row for row in reported(rows) if (row["data"], row["noise"], row["rate"], row["basis"]) == wanted]
    return [row["precision at recall 0.5"] for row in own]


def read_rows(path: Path | None) -> list[dict[str, Any]]:
    return json.loads(path.read_text("utf-8"))["rows"] if path is not None and path.exists() else []


def write_rows(path: Path | None, device: torch.device, rows: Sequence[dict[str, Any]], name: str = "coverage") -> None:
    """One row a line; written aside and renamed, so that a stop leaves the file whole."""
    if path is None:
        return
    head = json.dumps({"name": name, **machine(device)}, indent=1)[:-2]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    part = path.with_suffix(".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(f'{head},\n "rows": [\n{lines}\n]}}\n', "utf-8")
    part.replace(path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="write the data and end")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="with coverage.npz")
    parser.add_argument("--only", nargs="+", metavar="DATA", help="digits, table, text, photos")
    parser.add_argument("--noise", nargs="+", help="kinds of mistakes")
    parser.add_argument("--rates", nargs="+", type=float)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--processes", type=int, default=4)
    options = parser.parse_args(argv)
    if options.prepare:
        print(prepare(options.prepare))
        return
    if options.data is None:
        parser.error("--data FOLDER is needed, or --prepare FOLDER to write it.")
    rows = read_rows(options.out)
    done = {(row["data"], row["noise"], row["rate"], row["seed"]) for row in rows}
    wanted = [
        cell
        for cell in cells(options.seeds)
        if cell.key not in done
        and (not options.only or cell.data in options.only)
        and (not options.noise or cell.noise in options.noise)
        and (not options.rates or cell.rate in options.rates)
    ]
    device, context = torch.device(options.device), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        work = [pool.submit(rows_of, cell, options.data / FILE, options.device, options.epochs) for cell in wanted]
        for number, one in enumerate(as_completed(work), 1):
            rows += one.result()
            write_rows(options.out, device, rows)
            print(f"{number} of {len(work)} draws: {rows[-1]['seconds']} s", flush=True)
    show("95 % intervals", summary(rows))


if __name__ == "__main__":
    main()
