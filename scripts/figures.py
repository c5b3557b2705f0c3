"""Draw the figures of docs/ from the files in results/. Run it after a results file has changed.

python scripts/figures.py    # the figure of SVHN digits is drawn only if SOSELETO_DATA has them
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from experiments.data import load
from experiments.results import Row
from experiments.results import load as load_results
from soseleto.data import Examples

ROOT = Path(__file__).resolve().parent.parent
COLOURS = {0.3: "#0072b2", 0.4: "#d55e00", 0.5: "#009e73"}  # distinguishable to the colour-blind
STYLES = {"weight": "-", "score": "--"}
PAPER = {0.3: 4.0, 0.4: 10.0, 0.5: 20.0}  # percent of wrong labels in the better half, read off its figure
SHOWN = 10  # best and worst examples of a class


def effective_noise(rows: Iterable[Row], path: str | Path) -> Path:
    """The percent of wrong labels among the kept source examples against the percent kept, by weight and by score.

    Lines are means over seeds, bands one standard deviation.
    """
    rows = [row for row in rows if row["method"] == "soseleto_usual" and "kept" in row]
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot(xlabel="best percent of the source kept", ylabel="percent of wrong labels among them")
    for noise, colour in COLOURS.items():
        mine = [row["kept"] for row in rows if row["setting"]["noise"] == noise]
        for signal, style in STYLES.items() if mine else ():
            kept = 100 * np.asarray(mine[0]["fraction"])
            wrong = np.asarray([one[signal] for one in mine], dtype=float)
            mean, spread = wrong.mean(0), wrong.std(0, ddof=1) if len(wrong) > 1 else np.zeros(len(kept))
            axes.plot(kept, mean, style, color=colour, label=f"{100 * noise:.0f} % noise, by {signal}")
            axes.fill_between(kept, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)
        if mine:
            axes.plot(50, PAPER[noise], "x", color=colour)
    axes.plot([], [], "x", color="black", label="the paper, better half by weight")
    axes.set(xlim=(0, 100), ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return _save(figure, path)


def useful_classes(rows: Iterable[Row], path: str | Path) -> Path:
    """The percent of each class's examples with a weight above 0.8, mean and standard deviation over draws."""
    mine = [row["classes"] for row in rows if row["method"] == "soseleto" and "classes" in row]
    names = [facts["class"] for facts in mine[0]]
    useful = np.asarray([[facts["useful"] for facts in one] for one in mine], dtype=float)
    figure = Figure(figsize=(6.4, 2.8), layout="constrained")
    axes = figure.add_subplot(xlabel="class", ylabel="percent above 0.8", ylim=(0, 100))
    spread = useful.std(0, ddof=1) if len(useful) > 1 else None
    axes.bar(names, useful.mean(0), yerr=spread, color=COLOURS[0.3], capsize=3)
    axes.grid(axis="y", alpha=0.3)
    return _save(figure, path)


def best_and_worst(classes: Sequence[Mapping[str, Any]], source: Examples, path: str | Path) -> Path:
    """A row of images per class: its best examples by score on the left, its worst on the right."""
    places = {source.id_of(i): i for i in range(len(source))}
    figure = Figure(figsize=(8.0, 0.4 * len(classes) + 0.4), layout="constrained")
    for column, (key, title) in enumerate((("best", "the best by score"), ("worst", "the worst"))):
        lines = [[places[name] for name in facts[key][:SHOWN]] for facts in classes]
        axes = figure.add_subplot(1, 2, column + 1)
        axes.imshow(np.concatenate([_strip(source, line) for line in lines]))
        side = source.inputs.shape[-1]
        axes.set_yticks([side * (i + 0.5) for i in range(len(classes))], [facts["class"] for facts in classes])
        axes.set_xticks([])
        axes.set_title(title, fontsize="medium")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    return _save(figure, path, dpi=120)


def _strip(source: Examples, line: Sequence[int]) -> np.ndarray:
    """The images of a row side by side, (height, width, 3)."""
    pictures = source.inputs[list(line)].cpu().numpy()
    return np.concatenate([np.broadcast_to(p, (3, *p.shape[1:])).transpose(1, 2, 0) for p in pictures], axis=1)


def _save(figure: Figure, path: str | Path, dpi: float = 100) -> Path:
    """Save without dates and random ids, so that the same rows give the same bytes."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, dpi=dpi, metadata=metadata)
    return path


def main() -> None:
    docs = ROOT / "docs" / "results"
    noisy, digits = (load_results(ROOT / "results" / f"{name}.json").rows for name in ("cifar10-noise", "svhn-mnist"))
    effective_noise(noisy, docs / "effective-noise.svg")
    useful_classes(digits, docs / "svhn-classes.svg")
    if (Path(os.environ.get("SOSELETO_DATA", "/nowhere")) / "svhn").exists():
        drawn = [row for row in digits if row["method"] == "soseleto" and row["seed"] == 0 and "classes" in row]
        best_and_worst(drawn[0]["classes"], load("svhn", "train"), docs / "svhn-best-worst.png")


if __name__ == "__main__":
    main()
