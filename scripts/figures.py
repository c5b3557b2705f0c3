"""Draw the figures of docs/ from the files in results/. Run it after a results file has changed.

python scripts/figures.py    # the figure of SVHN digits is drawn only if SOSELETO_DATA has them
"""

from __future__ import annotations

import os
from pathlib import Path

from experiments import figures, results
from experiments.data import load

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    docs = ROOT / "docs" / "results"
    noisy, digits = (results.load(ROOT / "results" / f"{name}.json").rows for name in ("cifar10-noise", "svhn-mnist"))
    figures.effective_noise(noisy, docs / "effective-noise.svg")
    figures.useful_classes(digits, docs / "svhn-classes.svg")
    if (Path(os.environ.get("SOSELETO_DATA", "/nowhere")) / "svhn").exists():
        drawn = [row for row in digits if row["method"] == "soseleto" and row["seed"] == 0 and "classes" in row]
        figures.best_and_worst(drawn[0]["classes"], load("svhn", "train"), docs / "svhn-best-worst.png")


if __name__ == "__main__":
    main()
