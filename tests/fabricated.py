"""Fabricated run folders, as training would write them, and an object whose pickle runs code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from soseleto.data import Examples
from soseleto.run_folder.folder import RunFolder
from soseleto.run_folder.source import save_thumbnails


def fabricate(path: Path, *, n: int = 500, features: int = 2, truth: bool = True, epochs: int = 30) -> RunFolder:
    """A run folder with falling weights of mislabelled examples and rising weights of the others."""
    rng = np.random.default_rng(0)
    run = RunFolder.create(path)
    run.write_config({"mode": "noisy", "seed": 0, "lr": 0.1, "source": {"fingerprint": "ab" * 32}})
    wrong = rng.permutation(n) < n // 5
    hard = rng.random(n)
    run.log(_start(n))
    for epoch in range(1, epochs + 1):
        weight = _weights(wrong, hard, epoch / epochs)
        run.log(_epoch(epoch, weight, wrong if truth else None))
    run.log({"event": "message", "text": "the target loss is <small>"})
    run.log({"event": "end", "seconds": 12.5})
    order = np.argsort(-weight, kind="stable")
    run.write_ranking({name: values[order] for name, values in _columns(rng, weight, wrong, features, truth).items()})
    return run


def _weights(wrong: np.ndarray, hard: np.ndarray, progress: float) -> np.ndarray:
    drift = np.where(wrong, -1.3, 1.1) * progress * (0.4 + hard)
    return np.clip(0.5 + drift, 0, 1).astype(np.float32)


def _start(n: int) -> dict[str, object]:
    messages = ["auto chose the layerwise engine"]
    sizes = {"n_source": n, "n_target": 50, "parameters": 42}
    return {"event": "start", "engine": "layerwise", "messages": messages, **sizes}


def _epoch(epoch: int, weight: np.ndarray, wrong: np.ndarray | None) -> dict[str, object]:
    record: dict[str, object] = {
        "event": "epoch",
        "epoch": epoch,
        "step": epoch * 32,
        "lr": 0.1,
        "source_loss": 0.7 / epoch + 0.2,
        "target_loss": 0.7 / epoch if epoch != 3 else float("nan"),
        "mean_weight": float(weight.mean()),
        "effective_source": float(weight.sum() ** 2 / (weight**2).sum()),
        "seconds": 0.4,
    }
    if wrong is not None:
        means = {"right": weight[~wrong].mean(), "wrong": weight[wrong].mean()}
        record["groups"] = {name: {"mean": float(mean)} for name, mean in means.items()}
    return record


def _columns(
    rng: np.random.Generator, weight: np.ndarray, wrong: np.ndarray, features: int, truth: bool
) -> dict[str, np.ndarray]:
    n = len(weight)
    points = rng.uniform(-1, 1, (n, features))
    right = (points[:, 0] > 0) if features else rng.random(n) > 0.5
    names = np.array(["left", "right & proper"])
    columns = {
        "id": np.array([f"{i:05d}" for i in range(n)]),
        "label": names[(right ^ wrong).astype(int)],
        "weight": weight,
        "score": (weight - 0.4 + rng.normal(0, 0.1, n)).astype(np.float32),
        "visits": np.full(n, 30),
    }
    if truth:
        columns |= {"true_label": names[right.astype(int)], "wrong": wrong}
    return columns | {f"x{i}": points[:, i].astype(np.float32) for i in range(features)}


def add_probe_columns(run: RunFolder) -> RunFolder:
    """Add to the ranking the columns that a run with probes has."""
    columns = run.ranking()
    probability = (1 - columns["weight"]).astype(np.float32)
    names = np.unique(columns["label"].astype(str))
    other = {name: names[(place + 1) % len(names)] for place, name in enumerate(names)}
    suspect = probability > 0.5
    suggested = np.array(
        [other[str(label)] if wrong else str(label) for label, wrong in zip(columns["label"], suspect, strict=True)],
        dtype=object,
    )
    columns |= {
        "predicted_label": suggested,
        "mislabelled_probability": probability,
        "is_label_issue": suspect,
        "suggested_label": suggested,
    }
    run.write_ranking(columns)
    return run


def fabricate_images(
    path: Path, *, n: int = 60, side: int = 12, classes: int = 3, files: Path | None = None
) -> RunFolder:
    """A run with probes on grey images; every fifth label is wrong. With ``files`` the image files are written too."""
    rng = np.random.default_rng(0)
    run = RunFolder.create(path)
    names = tuple(f"class {i}" for i in range(classes))
    run.write_config({"mode": "noisy", "seed": 0, "classes": names})
    wrong = np.arange(n) % 5 == 0
    label = np.arange(n) % classes
    weight = np.where(wrong, 0.05, 0.95) + rng.uniform(-0.05, 0.05, n)
    order = np.argsort(-weight, kind="stable")
    ids = [f"{names[label[i]]}/{i:03d}.png" for i in range(n)]
    inputs = torch.from_numpy(rng.integers(0, 256, (n, 1, side, side), dtype=np.uint8))
    paths = None if files is None else tuple(str(files / name) for name in ids)
    source = Examples(inputs, torch.from_numpy(label), ids=tuple(ids), classes=names, paths=paths)
    for at, file in enumerate(paths or ()):
        _write_image(Path(file), inputs[at, 0].numpy())
    columns = {
        "id": np.array(ids)[order],
        "label": np.array(names)[label[order]],
        "weight": weight[order].astype(np.float32),
        "score": (weight[order] - 0.5).astype(np.float32),
        "visits": np.full(n, 3),
    }
    if paths is not None:
        columns["path"] = np.array(paths)[order]
    run.log(_start(n))
    run.log(_epoch(1, columns["weight"], None))
    run.log({"event": "end", "seconds": 1.0})
    run.write_ranking(columns)
    add_probe_columns(run)
    save_thumbnails(run, source)
    return run


def _write_image(path: Path, pixels: np.ndarray) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


class Hostile:
    """Unpickling it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def saved(frame: Any, path: Path) -> Path:
    """A frame of pandas in the format of the path's ending."""
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    elif path.suffix == ".parquet":
        frame.to_parquet(path, index=False)
    else:
        frame.to_json(path, orient="records", lines=True, date_format="iso", double_precision=15)
    return path
