"""The data of `scan.py`: features, which are computed once and kept, and draws with mistakes.

- *uniform*: any other class; *paired*: the class with which a cross-validated model confuses the true one most
- *hard*: drawn in proportion to 1 − p(true class) by that model, labelled with its most probable other class
- *people*: what annotators or rules gave; at a lower rate than theirs, a random part of it is corrected
"""

from __future__ import annotations

import csv
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.model_selection import cross_val_predict

from experiments import efficientnet, encoding, news
from experiments.data import data_root, human_labels, load
from soseleto.data import TablePreparation, tables
from soseleto.suspects.cross_fit import logistic_regression

RATES = (0.02, 0.1, 0.2, 0.4)
DEVELOPMENT = 100  # the first seed of draws that settings are chosen on
LABEL_SETS = ("aggre_label", "random_label2", "worse_label")  # of CIFAR-10N
MOST_TESTS = 3000
WHOLE = ("digits", "titanic")  # too small for rows of their own on either side of the choice
Array = np.ndarray


def digits(models: Path) -> dict[str, Array]:
    inputs, truth = load_digits(return_X_y=True)
    return {"x": inputs, "y": truth}


def table(file: str, label: str) -> dict[str, Array]:
    read = tables.load(data_root() / "tables" / file)
    truth = np.unique(np.array(read[label].to_pylist()).astype(str), return_inverse=True)[1]
    columns = read.drop_columns([label])
    preparation = TablePreparation.fit(columns, truth)
    return {"x": preparation(preparation.read(columns)).numpy(), "y": truth}


def adult(models: Path) -> dict[str, Array]:
    return table("adult.csv", "class")


def titanic(models: Path) -> dict[str, Array]:
    return table("titanic.csv", "Survived")


def of_texts(texts: Sequence[str], models: Path, **labels: Any) -> dict[str, Array]:
    start = time.perf_counter()
    vectors = encoding.embeddings(texts, models / "pretrained" / "minilm", 64, "cpu").numpy()
    return {"x": vectors, "seconds": np.array(time.perf_counter() - start), **labels}


def ag_news(models: Path) -> dict[str, Array]:
    read = news.read("ag_news")
    return of_texts(read.texts, models, y=read.truth.numpy(), people=read.labels.numpy())


def hausa(models: Path) -> dict[str, Array]:
    """The titles that were checked, with the labels that rules gave them, and test titles without."""
    read = news.read("hausa")
    checked = np.flatnonzero(read.truth.numpy() != news.UNKNOWN)
    tests = np.full(len(read.test_labels), news.UNKNOWN)
    return of_texts(
        [*(read.texts[row] for row in checked), *read.test_texts],
        models,
        y=np.concatenate([read.truth.numpy()[checked], read.test_labels.numpy()]),
        people=np.concatenate([read.labels.numpy()[checked], tests]),
    )


def intents(models: Path) -> dict[str, Array]:
    rows: list[dict[str, str]] = []
    for part in ("train", "test"):
        with open(data_root() / "text" / f"banking77_{part}.csv", newline="", encoding="utf-8") as file:
            rows += csv.DictReader(file)
    truth = np.unique([row["category"] for row in rows], return_inverse=True)[1]
    return of_texts([row["text"] for row in rows], models, y=truth)


def photos(models: Path, count: int = 12_000) -> dict[str, Array]:
    file = efficientnet.weights_file(str(models / "pretrained" / "efficientnet-lite0"))
    network: Any = efficientnet.pretrained_network(file, classes=10, size=128).eval()
    network.network._fc = torch.nn.Identity()
    with torch.no_grad():
        features = [network(some.float() / 255) for some in load("cifar10").inputs[:count].split(200)]
    labels = {name: found.numpy()[:count] for name, found in human_labels(data_root()).items()}
    return {"x": torch.cat(features).numpy(), "y": labels["clean_label"], **{n: labels[n] for n in LABEL_SETS}}


# By name: how to make its features, source examples, kinds of mistakes with their rates (None: as people made them)
SYNTHETIC = [(noise, rate) for noise in ("uniform", "paired", "hard") for rate in RATES]
TWO_CLASSES = [(noise, rate) for noise, rate in SYNTHETIC if noise != "paired"]  # where pairs are uniform
SETS: dict[str, tuple[Any, int, list[tuple[str, float | None]]]] = {
    "digits": (digits, 1150, [*SYNTHETIC]),
    "adult": (adult, 3000, [*TWO_CLASSES]),
    "titanic": (titanic, 540, [*TWO_CLASSES]),
    "news": (ag_news, 3000, [("people", 0.02), ("people", 0.1), ("people", None)]),
    "hausa": (hausa, 850, [*(("people", rate) for rate in RATES), ("people", None)]),
    "photos": (photos, 3000, [(name, None) for name in LABEL_SETS]),
    "intents": (intents, 2000, [*SYNTHETIC]),
}


def stored(name: str, features: Path, models: Path) -> dict[str, Array]:
    file = features / f"{name}.npz"
    if not file.exists():
        features.mkdir(parents=True, exist_ok=True)
        np.savez(file, **SETS[name][0](models))
    with np.load(file) as found:
        return {key: found[key] for key in found.files}


# Draws


@dataclass(frozen=True)
class Cell:
    data: str
    noise: str
    rate: float | None
    seed: int

    @property
    def setting(self) -> dict[str, Any]:
        return {"data": self.data, "noise": self.noise, "rate": self.rate}


@dataclass(frozen=True, eq=False)
class Draw:
    x: Array
    y: Array  # right labels of the source
    labels: Array  # given ones
    people: dict[str, Array]
    trusted_x: Array
    trusted_y: Array
    test_x: Array
    test_y: Array
    learner: Any
    held_out: Array  # (n, classes): probabilities by models that were trained on right labels of other folds
    of_trusted: Array  # (m, classes): the same by a model that was trained on the right labels of the source
    people_trusted: dict[str, Array]
    before: Array  # of trusted examples: their labels before they were checked

    @property
    def classes(self) -> int:
        return self.held_out.shape[1]


def drawn(name: str, seed: int, parts: dict[str, Array], n: int) -> Draw:
    """With right labels on the source, to which ``with_mistakes`` gives those of a cell."""
    x, y, rows = parts["x"].astype(np.float32), parts["y"].astype(np.int64), np.arange(len(parts["y"]))
    if name not in WHOLE:
        chosen = np.random.default_rng(45).permutation(rows)
        rows = chosen[: len(rows) // 2] if seed >= DEVELOPMENT else chosen[len(rows) // 2 :]
    rows = np.random.default_rng([seed, 1]).permutation(rows)
    people = {key: parts[key].astype(np.int64) for key in ("people", *LABEL_SETS) if key in parts}
    usable = rows[people["people"][rows] >= 0] if "people" in people else rows
    source, others = usable[:n], usable[n:]
    rank_in_class = np.array([np.sum(y[others[:at]] == y[row]) for at, row in enumerate(others)])
    trusted = others[np.argsort(rank_in_class >= 2, kind="stable")][: n // 10]
    test = np.setdiff1d(rows, np.concatenate([source, trusted]))[:MOST_TESTS]
    learner = HistGradientBoostingClassifier(random_state=0) if name == "titanic" else logistic_regression()
    held_out = cross_val_predict(clone(learner), x[source], y[source], method="predict_proba")
    of_trusted = clone(learner).fit(x[source], y[source]).predict_proba(x[trusted])
    given, before = ({key: found[at] for key, found in people.items()} for at in (source, trusted))
    return Draw(
        x[source], y[source], y[source], given, x[trusted], y[trusted], x[test], y[test], learner, held_out,
        of_trusted, before, y[trusted],
    )  # fmt: skip


def with_mistakes(draw: Draw, noise: str, rate: float | None, seed: int) -> Draw:
    """The source has the rate exactly; of trusted examples each earlier label is wrong with that probability."""
    random, n = np.random.default_rng([seed, 2]), len(draw.y)
    of_trusted = np.random.default_rng(
        [seed, crc32(f"{noise} {rate} {n}".encode())]
    )  # counts independent of other cells
    pairs = np.array([_others(draw.held_out, draw.y)[draw.y == c].mean(axis=0).argmax() for c in range(draw.classes)])
    if noise in draw.people:
        wrong = int((draw.people[noise] != draw.y).sum())
        counts = wrong if rate is None else round(rate * n), np.sum(draw.people_trusted[noise] != draw.trusted_y)
        kept = int(counts[1] if rate is None else of_trusted.binomial(counts[1], min(rate * n / wrong, 1.0)))
        labels = _of_people(draw.people[noise], draw.y, counts[0], random)
        return replace(
            draw, labels=labels, before=_of_people(draw.people_trusted[noise], draw.trusted_y, kept, of_trusted)
        )
    rate = float(rate or 0)
    labels = _mistaken(draw.y, draw.held_out, pairs, noise, round(rate * n), random)
    count = int(of_trusted.binomial(len(draw.trusted_y), rate))
    return replace(
        draw, labels=labels, before=_mistaken(draw.trusted_y, draw.of_trusted, pairs, noise, count, of_trusted)
    )


def _others(held_out: Array, y: Array) -> Array:
    """The probabilities, with 0 for the true class."""
    others = held_out.copy()
    others[np.arange(len(y)), y] = 0
    return others


def _of_people(people: Array, y: Array, count: int, random: np.random.Generator) -> Array:
    labels, at = y.copy(), random.permutation(np.flatnonzero(people != y))[:count]
    labels[at] = people[at]
    return labels


def _mistaken(y: Array, held_out: Array, pairs: Array, noise: str, count: int, random: np.random.Generator) -> Array:
    labels, n, others = y.copy(), len(y), _others(held_out, y)
    chance = others.sum(axis=1) if noise == "hard" else np.ones(n)
    at = np.argsort(-np.log(np.maximum(chance, 1e-6)) - random.gumbel(size=n))[:count]
    if noise == "hard":
        labels[at] = others[at].argmax(axis=1)
    elif noise == "paired":
        labels[at] = pairs[y[at]]
    else:
        labels[at] = (labels[at] + random.integers(1, held_out.shape[1], len(at))) % held_out.shape[1]
    return labels
