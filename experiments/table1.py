"""Table 1 and its figure: CIFAR-10 with noisy labels, Quick, every method in the table.

5,000 clean target images; the other 45,000 are the source, with 30, 40 or 50 % of their labels flipped to another
class, or with the human labels of CIFAR-10N. Batches of 256 and 32, 60 epochs, accuracy on the 10,000 test images
after the last epoch. All methods share data, preprocessing, augmentation, schedule and number of steps.

    python -m experiments table1 --methods soseleto ordinary --set noise=0.4 --seeds 0 1 2 --out FILE
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from experiments import cleanlab, measures
from experiments.data import LABEL_SETS, load
from experiments.experiment import Cell, Experiment, Lines, Root, Run, Sides, check_noise, fields_of, line
from experiments.results import Row, signal_rows, table, with_count
from experiments.settings import make_method
from experiments.training import ByEpoch, accuracies, autocast, drawn, for_images, train
from soseleto.data import Augment, Examples, Preprocess, generator, symmetric
from soseleto.data.examples import truth_known
from soseleto.defaults import (
    DOUBTFUL,
    MANY,
    MANY_SHARE,
    STANDARD_ERRORS,
    TARGET_SHARE,
    convolutional_weight_step,
    few_weight_step,
)
from soseleto.errors import UsageError
from soseleto.methods import Signals
from soseleto.models.architectures import by_name
from soseleto.task.optimizers import adamw, sgd
from soseleto.training.options import Compute, Inputs
from soseleto.training.result import Result

NAME = "cifar10-noise"
ASKED = (0.8, 0.9, 0.95)  # precisions that suspects are requested at
NOISE: tuple[float | str, ...] = (0.3, 0.4, 0.5, "worse_label", "aggre_label")
WRONG = {"worse_label": 0.40, "aggre_label": 0.09}  # the share that is wrong


@dataclass(frozen=True, kw_only=True)
class Config(Run):
    """noise: the share of flipped labels, or a label set of CIFAR-10N
    labels: "noisy", or for the oracle "corrected"
    n_clean: clean images, of which n_heldout are held out of training; the remaining train split is the source
    adam: Adam in place of SGD with momentum 0.9
    precision: "bfloat16" runs the network under autocast; micro_batch_size: maximum examples per forward pass
    early_stopping: keep the model of the epoch that is best on the held-out images
    record: record the running mean loss and margin of every source example
    probes: the share of the clean images, or "auto", that is planted among the source to calibrate suspects
    folds: instead of one training, cleanlab's rankings by cross-validation with this many folds
    """

    COLUMN = ("noise",)
    FIXED: ClassVar = {"size": 32}
    NEWER = ("probes", "folds", "micro_batch_size", "adam")

    noise: float | str = 0.4
    labels: str = "noisy"
    n_clean: int = 5000
    model: str = "quick"
    epochs: int = 60
    batch_size: int = 256
    target_batch_size: int = 32
    lr: float = 0.03
    weight_decay: float = 5e-4
    adam: bool = False
    schedule: str = "linear"
    crop: int = 4
    flip: bool = True
    precision: str | None = None
    micro_batch_size: int | None = None
    early_stopping: bool = False
    record: bool = True
    probes: float | str = 0.0
    folds: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.early_stopping and not 0 < self.n_heldout < self.n_clean:
            raise UsageError(f"n_heldout must lie between 0 and n_clean, got {self.n_heldout}: say n_heldout=1000.")


# SOSELETO's one setting that is not the default: 5,000 clean images are too many to be memorised, so θ may train on
# them too. Chosen on held-out target images at 40 % noise and used at every noise.
SHARED: Mapping[str, Any] = {"target_share": 0.3}
DOUBTING: Mapping[str, Any] = {"target_share": 0.2, "doubt_labels": True}  # chosen in the same way
# What ``fit`` chooses, but for what depends on the network and on the share of wrong labels: see ``usual_settings``.
USUAL: Mapping[str, Any] = {"doubt_labels": True, "by_last_layer": True}
FROZEN: Mapping[str, Any] = {"weight_step": None}
FROZEN_LOW: Mapping[str, Any] = {"weight_step": None, "initial_weight": 0.7}
STOPPED: Mapping[str, Any] = {"early_stopping": True, "n_heldout": 1000}
# The paper's own setting: no augmentation, a constant rate, λ_p = 1e-4. The paper names no optimizer: as Adam's rate
# 1e-4 trains the network, as SGD's it hardly does; with SGD's 0.01 ordinary training memorises the wrong labels.
PLAIN: Mapping[str, Any] = {"crop": 0, "flip": False, "schedule": "constant"}
PLAIN_RATES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "paper": ("Adam, 0.0001", {**PLAIN, "adam": True, "lr": 1e-4, "weight_decay": 0.0, "epochs": 120}),
    "sgd": ("SGD, 0.01", {**PLAIN, "lr": 0.01}),
}
PRINTED: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "ordinary": ("ordinary training", "ordinary", {}),
    "mixed": ("noisy and clean mixed", "mixed", {}),
    "soseleto_as_printed": ("SOSELETO, `Soseleto.paper()`", "paper", {}),
    "soseleto_as_printed_frozen": ("SOSELETO, weights frozen at 0.5", "paper", {"weight_step": None}),
}
PAPER_LINES: Lines = {
    f"{name}_{rate}": line(f"{words}: {title}", base, settings, **fields)
    for rate, (words, fields) in PLAIN_RATES.items()
    for name, (title, base, settings) in PRINTED.items()
}
LINES: Lines = {
    "ordinary_constant": line("ordinary training, constant rate", "ordinary", schedule="constant"),
    "ordinary": line("ordinary training", "ordinary"),
    "ordinary_early_stopped": line("ordinary training, early stopped", "ordinary", **STOPPED, schedule="constant"),
    "ordinary_stopped": line("ordinary training, early stopped, everybody's schedule", "ordinary", **STOPPED),
    "target_only": line("target only", "target_only"),
    "mixed": line("noisy and clean mixed", "mixed"),
    "mixed_shared": line("noisy and clean mixed, share chosen", "mixed", SHARED),
    "sukhbaatar": line("Sukhbaatar et al. 2014", "sukhbaatar"),
    "sukhbaatar_10k": line("Sukhbaatar et al. 2014, 10,000 clean", "sukhbaatar", n_clean=10000),
    "xiao": line("Xiao et al. 2015", "xiao"),
    "xiao_10k": line("Xiao et al. 2015, 10,000 clean", "xiao", n_clean=10000),
    "reweight": line("Learning to Reweight", "reweight", lr=0.003),  # at 0.01 it drops to chance level
    "reweight_256": line(
        "Learning to Reweight, 256 clean images a step, clipped", "reweight", {"clip": 1.0}, target_batch_size=256
    ),
    "reweight_shared": line(
        "Learning to Reweight, the same, target gradient in θ's step",
        "reweight",
        {**SHARED, "clip": 1.0},
        target_batch_size=256,
    ),
    "meta_weight_net": line("Meta-Weight-Net", "meta_weight_net"),
    "meta_weight_net_shared": line(
        "Meta-Weight-Net, weights normalised, target gradient in θ's step",
        "meta_weight_net",
        {**SHARED, "normalize_weights": True},
    ),
    "soseleto": line("**SOSELETO**", "soseleto", SHARED),
    "soseleto_doubting": line("**SOSELETO, labels doubted**", "soseleto", DOUBTING),
    "soseleto_usual": line("**SOSELETO, what `fit` uses**", "soseleto", USUAL),
    "soseleto_usual_frozen": line(
        "SOSELETO, what `fit` uses, weights frozen at 0.7", "soseleto", {**USUAL, **FROZEN_LOW}
    ),
    "soseleto_usual_probes": line("SOSELETO, what `fit` uses, with probes", "soseleto", USUAL, probes="auto"),
    "soseleto_last_layer": line(
        "SOSELETO, weights moved by the last layer, target not trained on", "soseleto", {"by_last_layer": True}
    ),
    "soseleto_last_layer_frozen": line(
        "the same with weights frozen at 1", "soseleto", {"by_last_layer": True, **FROZEN}
    ),
    "soseleto_frozen": line("… weights frozen", "soseleto", {**SHARED, **FROZEN}),
    "soseleto_no_share": line("… no target gradient in θ", "soseleto"),
    "soseleto_no_average": line("… one target batch", "soseleto", {**SHARED, "target_average": 0.0}),
    "soseleto_unscaled": line("… step not scaled", "soseleto", {**SHARED, "scale_free": False, "weight_step": 0.05}),
    "soseleto_mean": line("… loss not normalised", "soseleto", {**SHARED, "normalize_weights": False}),
    "soseleto_constant": line("… constant rate", "soseleto", SHARED, schedule="constant"),
    "soseleto_bfloat16": line("… in bfloat16", "soseleto", SHARED, precision="bfloat16", record=False),
    "soseleto_accumulated": line("… in micro-batches of 96", "soseleto", SHARED, micro_batch_size=96, record=False),
    "soseleto_probes": line("… with probes", "soseleto", SHARED, probes="auto"),
    "cleanlab": line("cleanlab", "mixed", folds=4),
    "oracle": line("oracle: every label corrected", "ordinary", labels="corrected"),
    **PAPER_LINES,
}
SMALL: Mapping[str, Any] = {
    "model": "mlp", "n_source": 4000, "n_clean": 2000, "n_test": 2000, "epochs": 20, "batch_size": 64,
    "lr": 0.02, "crop": 0, "flip": False,
}  # fmt: skip


def usual_settings(noise: float | str, epochs: int, model: str) -> dict[str, Any]:
    """What ``fit`` chooses where this share of the labels is wrong; a ResNet can learn them by heart, Quick cannot."""
    moves = {"weight_step": few_weight_step(epochs), "beyond_noise": STANDARD_ERRORS}
    if (noise if isinstance(noise, float) else WRONG[noise]) >= MANY:
        if model.startswith("resnet"):
            return {"target_share": MANY_SHARE, "weight_step": convolutional_weight_step(epochs)}
        return {**moves, "target_share": MANY_SHARE, "initial_weight": DOUBTFUL}
    return {**moves, "target_share": TARGET_SHARE}


def configuration(
    method: str, *, noise: float | str = 0.4, seed: int = 0, small: bool = False, **changes: Any
) -> Config:
    """The run of one line of the table; ``small`` takes minutes on a CPU."""
    check_noise(noise, NOISE)
    fields = fields_of(LINES, method, SMALL if small else {}, changes)
    if method.startswith("soseleto_usual"):
        chosen = usual_settings(noise, fields.get("epochs", Config.epochs), fields.get("model", Config.model))
        fields["settings"] = {**chosen, **fields["settings"]}
    return Config(noise=noise, seed=seed, **fields)


def cells(seed: int) -> list[Cell]:
    return [
        (name, {"noise": noise}) for noise in NOISE for name in LINES if name not in PAPER_LINES or noise not in WRONG
    ]


def data(config: Config, root: Root = None, device: str = "auto") -> Sides:
    """Draw by the seed the clean images, the noisy source and its flipped labels."""
    train, test, truth = labelled(config.noise, root)
    order = torch.randperm(len(train), generator=generator(config.seed, f"{NAME}/split"))
    clean, noisy_ones = order[: config.n_clean], order[config.n_clean :][: config.n_source]
    heldout, target = clean[: config.n_heldout], clean[config.n_heldout :]
    source = replace(train.subset(noisy_ones), truth=truth[noisy_ones])
    if isinstance(config.noise, float):
        source = replace(source, labels=symmetric(source.labels, config.noise, classes=10, seed=config.seed).labels)
    right = replace(train, labels=truth, truth=None)
    if config.labels == "corrected":
        source = corrected(source)
    return Sides(
        source=source,
        target=right.subset(target),
        heldout=right.subset(heldout) if len(heldout) else None,
        test=test.subset(range(config.n_test)) if config.n_test else test,
        truth=source.truth,
        before=train.labels[target] if train.truth is not None else None,
    )


@lru_cache(maxsize=4)
def split(part: str, root: Root, human: str | None) -> Examples:
    """CIFAR-10, or with a human label set CIFAR-10N."""
    return load("cifar10", part, root) if human is None else load("cifar10n", part, root, label_set=human)


def labelled(noise: float | str, root: Root) -> tuple[Examples, Examples, Tensor]:
    """Training images, with a human label set if ``noise`` names one; test images; and the right training labels."""
    train = split("train", root, noise if noise in LABEL_SETS else None)
    return train, split("test", root, None), train.labels if train.truth is None else train.truth


def corrected(source: Examples) -> Examples:
    """Every example with its true label, and with its own where that is not known."""
    return replace(source, labels=torch.where(truth_known(source.truth), source.truth, source.labels))


def model_of(config: Config, device: str) -> nn.Module:
    with drawn(config.seed, f"{NAME}/model"):
        return for_images(by_name(config.model, classes=10, shape=(3, 32, 32)), device)


def measure(config: Config, sides: Sides, root: Root = None, device: str = "auto") -> Row:
    """Train and evaluate once: accuracy in percent, and detection of wrong labels."""
    labels, truth = sides.source.labels, sides.truth
    if config.folds:
        by_fold = cleanlab.probabilities(partial(trained, device=device), config, sides, NAME)
        trust = cleanlab.trusts(by_fold, labels)
        return {**measures.detection(labels, truth, trust), **measures.kept(labels, truth, trust)}
    signals = Signals(len(labels)) if config.record and config.labels == "noisy" and not config.probes else None
    network, by_epoch = model_of(config, device), None
    if config.early_stopping:
        by_epoch = ByEpoch(network, Preprocess.of(sides.source.inputs), heldout=sides.heldout, test=sides.test)
    result = trained(config, sides, device, network, signals=signals, progress=by_epoch or False)
    trust = measures.trusts(result, signals)
    row = {**accuracies(config, result, sides), **measures.detection(labels, truth, trust)}
    if by_epoch is not None:
        best = max(by_epoch.percent["heldout"])
        row["accuracy"] = by_epoch.percent["test"][by_epoch.percent["heldout"].index(best)]
    if config.probes:
        lists = [(asked, result.suspects(asked)) for asked in ASKED]
        row["suspects"] = [measures.suspects(listed, labels, truth, asked) for asked, listed in lists if len(listed)]
    return {**row, **measures.kept(labels, truth, trust)}


def trained(config: Config, sides: Sides, device: str, network: nn.Module | None = None, **arguments: Any) -> Result:
    """One training of the configuration's network, with its schedule and augmentation, by any method."""
    return train(
        config,
        network or model_of(config, device),
        sides,
        method=make_method(config.base, config.settings),
        optimizer=adamw if config.adam else sgd,  # without weight decay AdamW is Adam
        inputs=Inputs(augment=Augment(crop=config.crop, flip=config.flip)),
        compute=Compute(dtype=autocast(config.precision, device), micro_batch_size=config.micro_batch_size),
        device=device,
        **arguments,
    )


EXPERIMENT = Experiment(NAME, LINES, 5, configuration, cells, data, measure)

COLUMNS = {
    "30 %": 0.3,
    "40 %": 0.4,
    "50 %": 0.5,
    "CIFAR-10N worst": "worse_label",
    "CIFAR-10N aggregate": "aggre_label",
}
PAPER = (
    ("paper: ordinary training", "65.57", "62.38", "57.36"),
    ("paper: Sukhbaatar et al., 10,000 clean", "69.73", "66.66", "63.39"),
    ("paper: Xiao et al., 10,000 clean", "69.81", "66.76", "63.00"),
    ("paper: SOSELETO", "72.41", "69.98", "66.33"),
    ("paper: wrong labels in the better half by weight", "4", "10", "20"),
)
TITLES = {name: title for name, (title, _) in LINES.items()}
VARIANTS = {name: title for name, title in TITLES.items() if title.startswith("…")}
UNAWARE = ("target_only", "oracle")  # lines that see no noisy label
FITTED, PROBED = "soseleto_usual", "soseleto_usual_probes"
SIGNALS = {
    "score": "score",
    "weight": "weight",
    "loss": "running mean loss",
    "margin": "running margin",
    "cleanlab_self_confidence": "cleanlab, self-confidence",
    "cleanlab_margin": "cleanlab, normalised margin",
    "cleanlab_confident": "cleanlab, confident thresholds",
    "probability": "**calibrated probability**",
}


def accuracy_table(rows: Sequence[Row]) -> str:
    """Accuracy of every method after the last epoch."""
    titles = {name: title for name, title in TITLES.items() if name not in {**VARIANTS, **PAPER_LINES}}
    return _table(at_every_noise(rows), titles)


def paper_table(rows: Sequence[Row]) -> str:
    """The paper's own setting: accuracy, and the percent of wrong labels in the better half by weight."""
    mine = [row for row in rows if row["method"] in PAPER_LINES]
    weighted = [row for row in mine if "kept" in row and row["config"]["base"].startswith("paper")]
    half = [{**row, "method": f"{row['method']}, half", "value": _better_half(row, "weight")} for row in weighted]
    titles = {name: TITLES[name] for name in PAPER_LINES}
    titles |= {f"{name}, half": f"{title}: wrong labels in the better half by weight" for name, title in titles.items()}
    return _table(mine + half, titles, more=PAPER)


def _better_half(row: Row, signal: str) -> float:
    """Percent of wrong labels among the half of the source that this signal trusts more."""
    wrong: float = row["kept"][signal][row["kept"]["fraction"].index(0.5)]
    return wrong


def ingredients_table(rows: Sequence[Row]) -> str:
    """SOSELETO's accuracy at 40 % noise with one setting changed at a time."""
    titles = {"soseleto": TITLES["soseleto"], **VARIANTS}
    return _table([row for row in rows if row["method"] in titles and row["setting"]["noise"] == 0.4], titles)


def at_every_noise(rows: Sequence[Row]) -> list[Row]:
    """Copy the runs of lines that see no noisy label to every noise, where they would be the same."""
    noises = dict.fromkeys(row["setting"]["noise"] for row in rows)
    unaware = {(row["method"], row["seed"]): row for row in rows if row["method"] in UNAWARE}
    same = [{**row, "setting": {"noise": noise}} for row in unaware.values() for noise in noises]
    return [row for row in rows if row["method"] not in UNAWARE] + same


def deep_table(rows: Sequence[Row]) -> str:
    """A deep network's accuracy with learned and with frozen weights, and 100·AUROC of weight and score."""
    learned, frozen = "soseleto_last_layer", "soseleto_last_layer_frozen"
    signals = {name: f"100·AUROC of the {SIGNALS[name]}" for name in ("score", "weight", "loss", "margin")}
    shown = [row for row in rows if row["method"] in (learned, frozen)]
    shown += [row for row in signal_rows(rows) if row["config"]["method"] == learned]
    return _table(shown, {learned: TITLES[learned], frozen: TITLES[frozen], **signals}, show=str)


def better_half_table(rows: Sequence[Row]) -> str:
    """Percent of wrong labels in the better half of SOSELETO's source, by weight, score and the other signals."""
    shown = signal_rows([row for row in rows if row["method"] == FITTED])
    return _table([{**row, "value": _better_half(row, row["method"])} for row in shown], SIGNALS, show=str)


def auroc_table(rows: Sequence[Row]) -> str:
    """100·AUROC of right against wrong labels: runs with probes, and cleanlab's."""
    compared = signal_rows([row for row in rows if row["method"] in (PROBED, "cleanlab")])
    return _table(compared, SIGNALS, show=str)


def suspects_table(rows: Sequence[Row]) -> str:
    """True precision and recall of the suspects at a requested precision."""
    shown = [
        {**row, "method": f"requested {listed['asked']:.0f} %: {rate}", "value": listed[rate]["truth"]}
        for row in rows
        if row["method"] == PROBED
        for listed in row.get("suspects", [])
        for rate in ("precision", "recall")
    ]
    return _table(shown, {row["method"]: row["method"] for row in shown}, show=str)


def _table(rows: Sequence[Row], titles: Mapping[str, str], **more: Any) -> str:
    settings = {title: {"noise": noise} for title, noise in COLUMNS.items()}
    return table(rows, methods=titles, settings=settings, **{"show": with_count(EXPERIMENT.seeds), **more})


TABLES = {
    "accuracy": accuracy_table,
    "paper setting": paper_table,
    "ingredients": ingredients_table,
    "better half": better_half_table,
    "auroc": auroc_table,
    "suspects": suspects_table,
}
