"""CIFAR-10N's worst human labels, 1,000 trusted images, and EfficientNet-lite0 with its weights from ImageNet.

The sides are those of ``cifar10_deep``: 1,000 training images are trusted, and the others are the source, with the
label set ``worse_label``. Images stay on the device as bytes of 32x32 pixels; each batch is cropped and flipped there,
and the network resizes it to ``size`` pixels a side. Everything is fine-tuned for 10 epochs but the statistics of
BatchNorm, which stay those of ImageNet: then no loss depends on the other images of a batch, and alignments are exact
at the price of a layerwise pass. Accuracy is that of the last epoch on the 10,000 test images. Settings are chosen with
``select``: 5,000 source images with their true labels are put aside and evaluated instead.

    python -m experiments pretrained_images --methods soseleto mixed --seeds 0 1 --out FILE
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from experiments import cifar10_deep, logistic
from experiments.efficientnet import pretrained_network, weights_file
from experiments.experiment import Cell, Experiment, Lines, Root, Run, Sides, fields_of, line
from experiments.noisy_text import LISTS, measured, suspects
from experiments.results import Row, table, with_count
from experiments.settings import make_method
from experiments.training import autocast, drawn, for_images, train
from soseleto.data import Augment, Preprocess
from soseleto.defaults import MANY_SHARE, PRETRAINED_WEIGHT_STEP, STANDARD_ERRORS, TARGET_SHARE, few_weight_step
from soseleto.errors import UsageError
from soseleto.methods import Signals
from soseleto.models.pretrained import BATCH_NORM, ImageNetwork
from soseleto.parallel.reducer import choose_device
from soseleto.task.optimizers import adamw
from soseleto.training.options import Compute, Inputs
from soseleto.training.result import Result

NAME = "pretrained-images"
NOISE, FEW_WRONG = "worse_label", "aggre_label"  # 40 and 9 % wrong
EPOCHS = 10
TOGETHER = 500  # images a pass


@dataclass(frozen=True, kw_only=True)
class Config(Run):
    """noise: which label set of CIFAR-10N the source has
    n_trusted: trusted images
    model: the folder of the pretrained network, or its name below ``ROOT/pretrained``
    size: pixels a side at which the network runs; crop: pixels of 32 by which images are shifted at most
    batch_norm: "fixed" keeps the statistics of ImageNet; "train" takes each batch's
    precision: "auto" is bfloat16 on a GPU, otherwise float32; cuda_graph: replay recorded steps on a GPU
    probes: the share of the trusted images, or "auto", that is planted among the source to calibrate suspects
    folds: cleanlab by cross-validation with this many folds; the network is trained on the images that it keeps
    """

    COLUMN = ("noise", "size", "n_trusted")
    mlc: ClassVar[bool] = False  # the protocol of ``cifar10_deep.data``

    noise: str = NOISE
    n_trusted: int = 1000
    model: str = "efficientnet-lite0"
    size: int = 96
    crop: int = 4
    batch_norm: str = "fixed"
    epochs: int = EPOCHS
    batch_size: int = 256
    target_batch_size: int = 32
    lr: float = 3e-4
    weight_decay: float = 0.01
    schedule: str = "warmup_cosine"
    precision: str = "auto"
    cuda_graph: bool = True
    probes: float | str = 0.0
    folds: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("batch_norm", BATCH_NORM), ("noise", cifar10_deep.HUMAN)):
            if getattr(self, name) not in known:
                raise UsageError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}.")


# What ``fit`` chooses for this network: many labels are wrong, and it has convolutions. Where few are, it is FEW.
USUAL: Mapping[str, Any] = {
    "target_share": MANY_SHARE, "doubt_labels": True, "by_last_layer": True, "weight_step": PRETRAINED_WEIGHT_STEP,
}  # fmt: skip
FEW: Mapping[str, Any] = {
    "target_share": TARGET_SHARE, "doubt_labels": True, "by_last_layer": True, "weight_step": few_weight_step(EPOCHS),
    "beyond_noise": STANDARD_ERRORS,
}  # fmt: skip
LINES: Lines = {
    "logistic_noisy": line("logistic regression on its features, noisy alone", logistic.NAME),
    "logistic_mixed": line("logistic regression on its features, mixed", logistic.NAME, {"mixed": True}),
    "ordinary": line("ordinary fine-tuning", "ordinary"),
    "target_only": line("target only", "target_only"),
    "mixed": line("noisy and trusted mixed", "mixed"),
    "cleanlab": line("cleanlab, trained on what it keeps", "mixed", folds=4),
    "meta_weight_net": line("Meta-Weight-Net", "meta_weight_net"),
    "soseleto": line("**SOSELETO**", "soseleto"),
    "soseleto_usual": line("**SOSELETO, what `fit` uses**", "soseleto", USUAL),
    "soseleto_usual_frozen": line(
        "… weights frozen at 0.7", "soseleto", {**USUAL, "weight_step": None, "initial_weight": 0.7}
    ),
    "soseleto_usual_shuffled": line("… weights shuffled", "shuffled_weights", USUAL),
    "soseleto_usual_probes": line("… with probes", "soseleto", USUAL, probes="auto"),
    "soseleto_few": line("**SOSELETO, settings for few wrong labels**", "soseleto", FEW),
}
WHERE_FEW = ("ordinary", "mixed", "soseleto_usual", "soseleto_few")
SMALL: Mapping[str, Any] = {
    "n_source": 1000, "n_trusted": 100, "n_test": 500, "size": 32, "crop": 2, "epochs": 2, "batch_size": 64,
}  # fmt: skip


def configuration(method: str, *, seed: int = 0, small: bool = False, **changes: Any) -> Config:
    """The run of one line; ``small`` takes a minute or two on a CPU."""
    return Config(seed=seed, **fields_of(LINES, method, SMALL if small else {}, changes))


def cells(seed: int) -> list[Cell]:
    many = [(name, {"noise": NOISE}) for name in LINES if name != "soseleto_few"]
    return many + [(name, {"noise": FEW_WRONG}) for name in WHERE_FEW]


def model_of(config: Config, root: Root, device: str) -> nn.Module:
    """The network, its new classifier drawn by the seed."""
    file = weights_file(config.model, root)
    with drawn(config.seed, f"{NAME}/model"):
        model = pretrained_network(file, classes=10, size=config.size, batch_norm=config.batch_norm)
    return for_images(model, device)


def measure(config: Config, sides: Sides, root: Root = None, device: str = "auto") -> Row:
    """Train and evaluate once: accuracy in percent at the last epoch, and detection of wrong labels."""
    if config.base != logistic.NAME:
        return measured(config, sides, partial(trained, root=root, device=device), NAME)
    inputs = {
        name: replace(side, inputs=features(config, side.inputs, root, device))
        for name in ("source", "target", "test", "heldout")
        if (side := getattr(sides, name)) is not None
    }
    return logistic.run(replace(sides, **inputs), config.settings, config.seed)


def features(config: Config, images: Tensor, root: Root, device: str) -> Tensor:
    """(N, F) of the network as ImageNet left it, on the CPU; images are neither moved nor flipped."""
    model, at = model_of(config, root, device), choose_device(device)
    assert isinstance(model, ImageNetwork)
    model.network._fc = nn.Identity()
    model.eval().to(at)
    with torch.no_grad():
        return torch.cat([model(some.to(at) / 255.0).cpu() for some in images.split(TOGETHER)])


def trained(config: Config, sides: Sides, root: Root, device: str, signals: Signals | None = None) -> Result:
    """One fine-tuning by the configuration's method."""
    return train(
        config,
        model_of(config, root, device),
        sides,
        method=make_method(config.base, config.settings),
        signals=signals,
        optimizer=adamw,
        # values from 0 to 1; the network normalises them itself
        inputs=Inputs(augment=Augment(crop=config.crop, flip=True), standardize=Preprocess((0.0,) * 3, (1.0,) * 3)),
        compute=Compute(dtype=autocast(config.precision, device), cuda_graph=config.cuda_graph),
        device=device,
    )


EXPERIMENT = Experiment(NAME, LINES, 5, configuration, cells, cifar10_deep.data, measure)

NUMBERS = {"accuracy": "accuracy, percent", "seconds": "seconds of a run"}
SIGNALS = {
    "weight": "weight",
    "score": "score",
    "loss": "running mean loss",
    "margin": "running mean margin",
    "probability": "calibrated probability",
    "cleanlab_self_confidence": "self-confidence",
    "cleanlab_margin": "normalised margin",
}
OF_FEW = {**NUMBERS, **{f"auroc {name}": f"100·AUROC, {title}" for name, title in list(SIGNALS.items())[:2]}}
TITLES = {name: title for name, (title, _) in LINES.items()}
TITLES_OF_FEW = {**TITLES, "soseleto_usual": "**SOSELETO, settings for many wrong labels**"}
Entry = tuple[str, float | None]  # of a row: its column and its value


def numbers(row: Row) -> Iterator[Entry]:
    """Accuracy on the test images, and seconds with as many parallel processes as the file says."""
    for name in NUMBERS:
        yield name, row[name]


def signals(row: Row) -> Iterator[Entry]:
    """100·AUROC of right against wrong labels."""
    for name in SIGNALS:
        if name in row.get("detection", {}):
            yield name, 100.0 * row["detection"][name]["auroc"]


def numbers_and_aurocs(row: Row) -> Iterator[Entry]:
    yield from numbers(row)
    for name, value in signals(row):
        yield f"auroc {name}", value


def lines_table(
    rows: Sequence[Row],
    entries: Callable[[Row], Iterator[Entry]],
    columns: dict[str, str],
    noise: str = NOISE,
    titles: Mapping[str, str] = TITLES,
) -> str:
    """One line per method; a column per entry of ``entries``."""
    found = [
        {**row, "setting": {"column": column}, "value": value}
        for row in rows
        if "accuracy" in row and row["setting"]["noise"] == noise
        for column, value in entries(row)
    ]
    settings = {title: {"column": name} for name, title in columns.items()}
    return table(found, methods=titles, settings=settings, show=with_count(EXPERIMENT.seeds))


TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "accuracy": partial(lines_table, entries=numbers, columns=NUMBERS),
    "auroc": partial(lines_table, entries=signals, columns=SIGNALS),
    "suspects": partial(lines_table, entries=suspects, columns=LISTS),
    "few": partial(lines_table, entries=numbers_and_aurocs, columns=OF_FEW, noise=FEW_WRONG, titles=TITLES_OF_FEW),
}
