"""The generated parts of the README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments import cifar10_deep, language, table1
from experiments.results import Spread, table
from pages.common import benchmark, load
from pages.speed import BATCH_NORM, STEPS
from soseleto.errors import counted

LANGUAGE = "docs/results/language.md"


def summary() -> str:
    """Table 1 in five lines: where SOSELETO is ahead and where it is not."""
    lines = {
        "ordinary": "ordinary training",
        "mixed": "source and target mixed",
        "sukhbaatar": "Sukhbaatar et al., a noise model",
        "soseleto_usual": "**SOSELETO, what `fit` uses**",
        "oracle": "oracle: all labels corrected",
    }
    rows = table1.at_every_noise(load("cifar10-noise.json")["rows"])
    columns = {"40 % flipped": 0.4, f"CIFAR-10N worst, {wrong_share(rows, 'worse_label'):.0f} % wrong": "worse_label"}
    settings = {title: {"noise": noise} for title, noise in columns.items()}
    return table(rows, methods=lines, settings=settings)


def deep() -> str:
    """What the weights add on a deep network, in one sentence."""
    lines = {"soseleto_last_layer": "learned", "soseleto_last_layer_frozen": "frozen"}
    parts = []
    for title, noise in (("40 % flipped", 0.4), ("CIFAR-10N worst", "worse_label")):
        found = _accuracies("cifar10-noise-resnet18.json", {"noise": noise}, lines)
        parts.append(f"{title} {Spread.of(found['learned'])} against {Spread.of(found['frozen'])}")
    return (
        f"- ResNet-18, plain training ({len(found['learned'])} seeds), weights learned or frozen: {', '.join(parts)}."
    )


def wrong_share(rows: Sequence[dict[str, Any]], noise: str) -> float:
    """The true share of wrong labels, percent, as the runs with probes recorded it."""
    row = next(row for row in rows if row["setting"]["noise"] == noise and row.get("suspects"))
    return row["suspects"][0]["wrong_share"]["truth"]


def paper() -> str:
    """The paper in its own settings: what Algorithm 1 as printed has, beside the paper's numbers."""
    points = [row for row in load("synthetic.json")["rows"] if row["method"] == "paper"]
    lost, kept = (100 * sum(row[key] for row in points) / len(points) for key in ("flipped_below", "clean_above"))
    in_table = {"ordinary": "ordinary", "soseleto_as_printed_frozen": "frozen", "soseleto_as_printed": "SOSELETO"}
    noisy = [
        f"{words}: {_cells('cifar10-noise.json', {'noise': 0.4}, lines)}"
        for rate, (words, _) in table1.PLAIN_RATES.items()
        if (lines := {f"{name}_{rate}": title for name, title in in_table.items()})
    ]
    digits = {"target_only": "target alone", "fine_tuning": "fine-tuning", "soseleto_printed_frozen": "frozen",
              "soseleto_printed_first": "SOSELETO"}  # fmt: skip
    setting = {"n_target": 25, "source": "0-4", "unlabelled": False, "plain": True}
    return (
        f"- [Figure 1](docs/results/synthetic.md) reproduces: {lost:.0f} % of the flipped points lose their weight, "
        f"{kept:.1f} % of the others keep it ({len(points)} seeds).\n"
        "- [Table 1](docs/results/table1.md#the-papers-setting), 40 % flipped: "
        f"{'; '.join(noisy)} (paper 62.4, 70.0).\n"
        "- [Table 2](docs/results/table2.md#the-papers-setting), 25 images: "
        f"{_cells('svhn-mnist.json', setting, digits)} (paper 84.0, 83.0, 87.9)."
    )


def _cells(file: str, setting: dict[str, Any], titles: Mapping[str, str]) -> str:
    """Means and standard errors, or that there are none."""
    found = _accuracies(file, setting, titles)
    cells = [f"{title} {Spread.of(own).with_error()}" for title, own in found.items() if own]
    return ", ".join(cells) or "not run yet"


def fine_tuned() -> str:
    """Pretrained models, texts and photos in a sentence each."""
    lines = {
        "soseleto_usual": "SOSELETO",
        "strong": "strong recipe",
        "soseleto_usual_frozen": "weights frozen",
        "target_only": "target alone",
        "cleanlab": "after cleanlab",
        "ordinary": "ordinary",
    }
    sentences = []
    for what, file, setting in (
        (
            "News that people labelled, 20 % wrong, 200 checked, MiniLM",
            "noisy-text.json",
            {"noise": "ag_news", "n_trusted": 200, "encoder": "trained"},
        ),
        (
            "CIFAR-10N worst, 40 % wrong, 1,000 checked, EfficientNet-lite0",
            "pretrained-images.json",
            {"noise": "worse_label", "size": 96, "n_trusted": 1000},
        ),
    ):
        found = _accuracies(file, setting, lines)
        seeds = len(found["SOSELETO"])
        cells = [
            f"{title} {Spread.of(values)}"
            + ("" if len(values) == seeds else f" ({counted(len(values), 'seed', 'seeds')})")
            for title, values in found.items()
            if values
        ]
        sentences.append(f"- {what} ({seeds} seeds): {', '.join(cells)}.")
    return "\n".join(sentences)


def language_model() -> str:
    """A language model fine-tuned on a pool with few texts for its task, in a sentence."""
    wanted, rows = language.COLUMNS["370 right, 7,030 foreign"], load("language.json")["rows"]
    titles = {
        "all": "all alike",
        "right": "the right ones alone",
        "similarity": "by similarity",
        "soseleto": "SOSELETO",
    }
    found = {name: [100 * r["nll"] for r in rows if (r["method"], r["setting"]) == (name, wanted)] for name in titles}
    cells = ", ".join(f"{titles[name]} {Spread.of(values)}" for name, values in found.items())
    return (
        f"- SmolLM2-135M, once over 7,400 instructions, 370 of them [for the task]({LANGUAGE}) "
        f"({len(found['soseleto'])} seeds), 100·loss: {cells}."
    )


def strong_recipe() -> str:
    """The strong recipe in a sentence, beside the best of the other methods that use rejected images."""
    rivals, published = ("divide_mix", "promix", "fixmatch"), cifar10_deep.PUBLISHED["published: ProMix"][-1]
    mine, best, seeds = [], [], set()
    for noise in (0.4, "worse_label"):
        found = {line: _deep_accuracies(line, noise) for line in ("strong", *rivals)}
        mine.append(Spread.of(found["strong"]))
        best.append(max(sum(found[rival]) / len(found[rival]) for rival in rivals))
        seeds |= {len(found[rival]) for rival in rivals}
    of_rivals = " or ".join(map(str, sorted(seeds))) + (" seed" if seeds == {1} else " seeds")
    return (
        "The [strong recipe](docs/results/cifar10-deep.md) (PreAct ResNet-18, 1,000 "
        f"checked, {counted(len(found['strong']), 'seed', 'seeds')}) has {mine[0]} at 40 % flipped and {mine[1]} on "
        "CIFAR-10N worst, DivideMix, ProMix and FixMatch at equal computation at most "
        f"{' and '.join(f'{one:.1f}' for one in best)} ({of_rivals}); ProMix published {published} on "
        "the latter (600 epochs, none checked)."
    )


def _deep_accuracies(line: str, noise: float | str) -> list[float]:
    """With the usual number of trusted images."""
    return [
        row["accuracy"]
        for row in load("cifar10-deep.json")["rows"]
        if row["method"] == line
        and row["setting"]["noise"] == noise
        and row["config"]["n_trusted"] == cifar10_deep.Config.n_trusted
    ]


def _accuracies(file: str, setting: dict[str, Any], titles: Mapping[str, str]) -> dict[str, list[float]]:
    """Of the methods in one setting, by their titles."""
    rows = [row for row in load(file)["rows"] if row["setting"] == setting]
    return {title: [r["accuracy"] for r in rows if r["method"] == name] for name, title in titles.items()}


def cost() -> str:
    """The price of a step in one sentence: as CUDA graphs, and of transformers without."""
    found = load(STEPS[0])
    every = [*found["rows"], *load(BATCH_NORM)["rows"]]
    exact = [row for row in every if not row["engine"].startswith("held")]
    small = [row["times"] for row in exact if row["T"] * 8 == row["B"]]
    whole = [*load("models-eager-gpu.json")["rows"], *load("fine_tuning-gpu.json")["rows"]]
    eager = [row["times"] for row in whole if not row["graph"]]
    return (
        f"As a CUDA graph a step costs {min(small):.2f} to {max(small):.2f} ordinary steps with a target batch an "
        f"eighth of the source batch ({found['device']}); transformers without "
        f"graphs [{min(eager):.2f} to {max(eager):.2f}](docs/explanation/speed.md)."
    )


def first_answers() -> str:
    """`scan` beside cleanlab in two sentences, with where it is behind."""
    rows, module = load("scan.json")["rows"], benchmark("scan")
    auroc, rival = (f"{module.mean_of(rows, 'auroc', name):.3f}" for name in ("joined", "cleanlab"))
    ours, pruned, plain = (f"{module.mean_of(rows, 'accuracy', name):.1f}" for name in ("ours", "cleanlab", "ordinary"))
    lines = module.lines_of(rows)
    behind = [line["noise"] for line in lines if line["joined"] < line["cleanlab"]]
    sets, wrong = {row["setting"]["data"] for row in rows}, [100 * row["true_share"] for row in rows]
    return (
        f"`scan` on {len(sets)} data sets ({len(rows)} draws, {min(wrong):.0f} to {max(wrong):.0f} % wrong labels), "
        f"beside cleanlab on the same features: AUROC of wrong labels {auroc}, cleanlab {rival}; accuracy {ours}, "
        f"after cleanlab's pruning {pruned}, on all labels {plain}. Its "
        f"[ranking](docs/how-to/suspects.md#what-the-lists-of-a-scan-hold) is behind in {len(behind)} of {len(lines)} "
        f"cells, {behind.count('hard')} of them with mistakes on hard examples."
    )


def parts() -> dict[str, str]:
    weights = f"{deep()}\n{fine_tuned()}\n{language_model()}\n\n{strong_recipe()}"
    every = {"summary": summary(), "weights": weights, "scan": first_answers(), "cost": cost()}
    return {**every, "paper": paper()}
