"""The tables made from the results file; runs on held-out images are in none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from experiments.cifar10_deep.experiment import LINES, MAIN, Config
from experiments.methods import DivideMix
from experiments.results import Row, Spread, fill_page, table
from soseleto.methods import Strong
from soseleto.methods.strong import IMAGES_CUT

COLUMNS: Mapping[str, float | str] = {
    "20 %": 0.2,
    "40 %": 0.4,
    "80 %": 0.8,
    "40 % asymmetric": "asymmetric",
    "CIFAR-10N aggregate": "aggre_label",
    "CIFAR-10N random": "random_label1",
    "CIFAR-10N worst": "worse_label",
}
# As published: no trusted images, 300 to 600 epochs, two networks; several are quoted in the tables of ProMix's paper.
PUBLISHED: Mapping[str, Mapping[float | str, str]] = {
    "published: DivideMix": {
        0.2: "96.1",
        0.4: "94.0-94.9",
        0.8: "93.2",
        "asymmetric": "93.4",
        "aggre_label": "95.0",
        "random_label1": "95.2",
        "worse_label": "92.6",
    },
    "published: SOP+": {0.2: "96.3", 0.8: "94.0", "asymmetric": "93.8", "worse_label": "93.2"},
    "published: ProMix": {
        0.2: "97.6-97.7",
        0.4: "96.8",
        0.8: "91.7-95.5",
        "asymmetric": "96.0-96.6",
        "aggre_label": "97.4-97.7",
        "random_label1": "97.4",
        "worse_label": "96.2-96.3",
    },
}
SHOWN = ("cutmix", "by_class")  # settings that have columns of their own
TITLES = {name: title for name, (title, _) in LINES.items()}


def accuracy_table(rows: Sequence[Row]) -> str:
    """Accuracy after the last epoch, with published numbers on top."""
    mine = _usual(rows)
    shown = [noise for noise in COLUMNS.values() if any(row["setting"]["noise"] == noise for row in mine)]
    published = [[title, *(found.get(noise, "") for noise in shown)] for title, found in PUBLISHED.items()]
    return _table(mine, lambda row: row["accuracy"], TITLES, more=published)


def auroc_table(rows: Sequence[Row]) -> str:
    """100·AUROC of right against wrong labels, by the weights of every line that has them."""
    found = [row for row in _usual(rows) if "weight" in row.get("detection", {})]
    return _table(found, lambda row: 100.0 * row["detection"]["weight"]["auroc"], TITLES)


def trusted_table(rows: Sequence[Row]) -> str:
    """The recipe's accuracy by the number of trusted images."""
    found = [
        {**row, "method": str(row["config"]["n_trusted"])}
        for row in rows
        if row["method"] == "strong" and row["setting"]["noise"] in MAIN and "accuracy" in row
    ]
    numbers = sorted({row["config"]["n_trusted"] for row in found})
    if not numbers:
        return "Not measured yet."
    return _table(found, lambda row: row["accuracy"], {str(n): f"{n:,} trusted images" for n in numbers})


def _usual(rows: Sequence[Row]) -> list[Row]:
    """Runs on the test images with the usual number of trusted ones."""
    return [row for row in rows if "accuracy" in row and row["config"]["n_trusted"] == Config.n_trusted]


def _table(
    rows: Sequence[Row], value: Callable[[Row], float], titles: Mapping[str, str], more: Sequence[Sequence[str]] = ()
) -> str:
    """Cells of several seeds state their number in brackets."""

    def show(cell: Spread) -> str:
        return f"{cell} ({cell.n})" if cell.n > 1 else str(cell)

    columns: dict[str, dict[str, Any]] = {title: {"noise": noise} for title, noise in COLUMNS.items()}
    return table(rows, value, methods=titles, settings=columns, more=more, show=show)


def chosen_table(rows: Sequence[Row]) -> str:
    """Runs of the recipe on held-out images, by which its settings were chosen."""
    names = {noise: name for name, noise in COLUMNS.items()}
    ours = [row for row in rows if row["config"]["base"] == "strong"]
    order = sorted(ours, key=lambda row: list(names).index(row["setting"]["noise"]))
    head = ["noise", "epochs", "views", "changes", "mixed by", "`by_class`", "otherwise", "held out"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in order:
        config, settings = row["config"], row["config"]["settings"]
        kind = [names[row["setting"]["noise"]], config["epochs"], config["views"], config["changes"]]
        judged = [_mixed_by(settings), f"{settings.get('by_class', Strong.by_class):g}"]
        cells = [*kind, *judged, ", ".join(_otherwise(config)), f"{row['heldout_accuracy']:.1f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def rivals_table(rows: Sequence[Row]) -> str:
    """Runs of DivideMix on held-out images, by which its settings were chosen."""
    lines = ["| λ_u | warm-up | learning rate | epochs | source | held out |", "|---|---|---|---|---|---|"]
    for config, row in ((row["config"], row) for row in rows if row["config"]["base"] == "divide_mix"):
        settings = {"unlabelled": DivideMix.unlabelled, "warm_up": DivideMix.warm_up, **config["settings"]}
        cells = [f"{settings['unlabelled']:g}", f"{settings['warm_up']:g}", config["lr"], config["epochs"]]
        lines.append(f"| {' | '.join(map(str, cells))} | {config['n_source']:,} | {row['heldout_accuracy']:.1f} |")
    return "\n".join(lines)


def _mixed_by(settings: Mapping[str, Any]) -> str:
    cutmix = settings.get("cutmix", IMAGES_CUT)
    return {0.0: "mixup", 1.0: "cutmix"}.get(cutmix, "both")


def _otherwise(config: Mapping[str, Any]) -> list[str]:
    """What else differs from the experiment's configuration."""
    usual = {"lr": ("learning rate", Config.lr), "target_batch_size": ("trusted a step", Config.target_batch_size)}
    found = [f"{name} {config[field]}" for field, (name, value) in usual.items() if config[field] != value]
    return found + [f"{name} {value}" for name, value in config["settings"].items() if name not in SHOWN]


TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "accuracy": accuracy_table,
    "auroc": auroc_table,
    "trusted": trusted_table,
}


page = partial(fill_page, tables=TABLES)
