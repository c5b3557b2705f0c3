"""CIFAR-10 with wrong labels and 1,000 trusted images, PreAct ResNet-18: the strong recipe and its parts.

The source is the other 49,000 training images, with 20, 40 or 80 % of their labels flipped to another class, 40 % of
five classes flipped to a similar class, or the human labels of CIFAR-10N. ``mlc`` is the protocol of MLC and EMLC.
Accuracy is that of the last epoch on the 10,000 test images. Settings are chosen with ``select``: 5,000 source images
with their true labels are put aside and evaluated instead.

    python -m experiments cifar10_deep --methods strong --set noise=0.4 --seeds 0 1 2 --out FILE
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from experiments import measures
from experiments.experiment import Cell, Experiment, Lines, Root, Run, Sides, check_noise, fields_of, line
from experiments.results import Row, Spread, table
from experiments.settings import make_method
from experiments.table1 import labelled
from experiments.training import accuracies, autocast, drawn, for_images, train
from soseleto.data import Augment, StrongAugment, Views, generator, symmetric
from soseleto.methods.teacher import one_hot
from soseleto.models.architectures import by_name
from soseleto.task.optimizers import sgd
from soseleto.training.options import Compute, Inputs
from soseleto.training.result import Result

NAME = "cifar10-deep"
HUMAN = ("aggre_label", "random_label1", "worse_label")
NOISE: tuple[float | str, ...] = (0.2, 0.4, 0.8, "asymmetric", *HUMAN)
MAIN: tuple[float | str, ...] = (0.4, "worse_label")  # where every line runs
HARDEST = 0.8  # where the recipe is trained for longer too
TRUSTED = (100, 5000)  # besides the usual number
ASYMMETRIC = 0.4
# The usual pairs: truck → automobile, bird → airplane, deer → horse, cat ↔ dog.
PAIRS = ((9, 1), (2, 0), (4, 7), (3, 5), (5, 3))
MLC_NOISE: tuple[float | str, ...] = (0.2, 0.5, 0.8, 0.9, "asymmetric")
# Asymmetric noise in the code of MLC and EMLC: every class is called one other, drawn once.
MLC_PAIRS = ((0, 6), (1, 9), (2, 6), (3, 0), (4, 0), (5, 1), (6, 8), (7, 6), (8, 2), (9, 4))


@dataclass(frozen=True, kw_only=True)
class Config(Run):
    """noise: the share of flipped labels, "asymmetric", or a label set of CIFAR-10N
    n_trusted: trusted images
    views, changes, cutout: of the augmentation; without views images are cropped and flipped
    cuda_graph: replay recorded steps on a GPU
    mlc: as many trusted images of every class; a flipped label is drawn from all ten classes, so that it may be right
    """

    COLUMN = ("noise",)
    FIXED: ClassVar = {"strength": 1.0}
    NEWER = ("mlc",)

    noise: float | str = 0.4
    n_trusted: int = 1000
    model: str = "preact-resnet18"
    epochs: int = 100
    batch_size: int = 256
    target_batch_size: int = 64
    lr: float = 0.1
    weight_decay: float = 5e-4
    nesterov: bool = True
    schedule: str = "linear"
    views: int = 2
    changes: int = 1
    cutout: float = 0.5
    precision: str | None = "bfloat16"
    cuda_graph: bool = True
    mlc: bool = False


# Published: 0.02 with 256 mixed views a batch; here there are 640. Published for 50 and 80 % flipped is λ_u = 25, after
# 3,900 steps of warm-up. In as few steps as here that ends below mixed training: 0 and 3 tenths were chosen.
DIVIDE_MIX: Mapping[str, Any] = {"views": 1, "changes": 0, "cutout": 0.0, "lr": 0.05, "nesterov": False}
# Published: 0.05 with 256 images a batch, cosine.
PROMIX: Mapping[str, Any] = {"views": 1, "changes": 2, "lr": 0.05, "nesterov": False, "schedule": "cosine"}
# Those that take more or less computation a step than the recipe have fewer or more epochs, so that all take the same,
# but for ``strong_longer``, and for ``mixed``, which only learns more wrong labels by heart. Counted by passes of an
# image, three for one that is trained on: 2,176 a step of the recipe.
LINES: Lines = {
    "strong": line("**strong recipe**", "strong"),
    "strong_longer": line("… 200 epochs", "strong", epochs=200),
    "strong_believed": line("… labels believed", "strong", {"labels": "believed"}),
    "strong_ignored": line("… labels ignored", "strong", {"labels": "ignored"}),
    "strong_frozen": line("… weights frozen", "strong_frozen"),
    "strong_shuffled": line("… weights shuffled", "strong_shuffled"),
    "strong_frozen_others": line("… weights frozen, the rest to other classes", "strong_frozen", {"others": True}),
    "strong_shuffled_others": line(
        "… weights shuffled, the rest to other classes", "strong_shuffled", {"others": True}
    ),
    "strong_one_share": line("… one share of wrong labels", "strong", {"by_class": 0.0}),
    "strong_by_class": line("… mistakes by class alone", "strong", {"by_class": 1.0}),
    "strong_pair": line("… two networks", "strong_pair", epochs=50),
    # Published: 0.03 with 64 labelled images a batch, as here.
    "fixmatch": line("FixMatch, source unlabelled", "fixmatch", views=1, changes=2, lr=0.03, epochs=126),
    "divide_mix": line(
        "DivideMix, trusted images added", "divide_mix", {"unlabelled": 0.0, "warm_up": 0.3}, **DIVIDE_MIX, epochs=51
    ),
    "divide_mix_25": line("DivideMix, λ_u = 25 and a short warm-up", "divide_mix", **DIVIDE_MIX, epochs=45),
    # memory: of the same share of the steps as 0.9999 in 600 epochs
    "promix": line("ProMix, trusted images added", "promix", {"memory": 0.9983}, **PROMIX, epochs=35),
    "mixed": line("noisy and clean mixed, cropped and flipped", "mixed", views=0),
}
ONCE = ("strong", "strong_longer")  # not run beside every other line
SMALL: Mapping[str, Any] = {
    "model": "quick", "n_source": 2000, "n_trusted": 200, "n_test": 1000, "epochs": 2, "batch_size": 64,
    "target_batch_size": 16, "lr": 0.03, "precision": None,
}  # fmt: skip


def configuration(
    method: str, *, noise: float | str = 0.4, seed: int = 0, small: bool = False, **changes: Any
) -> Config:
    """The run of one line; ``small`` takes a minute on a CPU."""
    check_noise(noise, NOISE)
    return Config(noise=noise, seed=seed, **fields_of(LINES, method, SMALL if small else {}, changes))


def cells(seed: int) -> list[Cell]:
    """The recipe in every seed; the other lines, noises and trusted numbers once."""
    usual = Config.n_trusted
    found: list[Cell] = [("strong", {"noise": noise, "n_trusted": usual}) for noise in MAIN]
    found += [("strong", {"noise": noise, "n_trusted": usual, "mlc": True}) for noise in MLC_NOISE]
    if seed:
        return found
    found += [("strong", {"noise": noise, "n_trusted": usual}) for noise in NOISE if noise not in MAIN]
    found += [("strong", {"noise": noise, "n_trusted": n}) for n in TRUSTED for noise in MAIN]
    found += [("strong_longer", {"noise": noise, "n_trusted": usual}) for noise in (HARDEST, "worse_label")]
    found += [("strong_longer", {"noise": 0.9, "n_trusted": usual, "mlc": True})]
    return found + [(name, {"noise": n, "n_trusted": usual}) for n in MAIN for name in LINES if name not in ONCE]


def data(config: Any, root: Root = None, device: str = "auto") -> Sides:
    """Draw by the seed the trusted images, those held out, and the flipped labels; the same for every line."""
    train, test, truth = labelled(config.noise, root)
    order = torch.randperm(len(train), generator=generator(config.seed, f"{NAME}/split"))
    if getattr(config, "mlc", False):  # every class has its n-th example before any has the next
        turns = one_hot(truth[order], 10).cumsum(0).gather(1, truth[order][:, None]).squeeze(1)
        order = order[turns.argsort(stable=True)]
    trusted, others = order[: config.n_trusted], order[config.n_trusted :]
    heldout, others = others[: config.n_heldout], others[config.n_heldout :][: config.n_source]
    right = replace(train, labels=truth, truth=None)
    source = train.subset(others)
    return Sides(
        source=replace(source, labels=noisy_labels(source.labels, config), truth=truth[others]),
        target=right.subset(trusted),
        heldout=right.subset(heldout) if config.n_heldout else None,
        test=test.subset(range(config.n_test)) if config.n_test else test,
        truth=truth[others],
        before=train.labels[trusted] if train.truth is not None else None,
    )


def by_confusion(labels: Tensor, confusion: Tensor, seed: int) -> Tensor:
    """Labels of which a share confusion[c, d] of class c is d: exact counts, largest remainders first."""
    noisy = labels.clone()
    for c, shares in enumerate(confusion / confusion.sum(1, keepdim=True)):
        members = (labels == c).nonzero().flatten()
        exact = shares * len(members)
        counts = exact.floor().to(torch.int64)
        counts[(exact - counts).argsort(descending=True, stable=True)[: len(members) - int(counts.sum())]] += 1
        order = torch.randperm(len(members), generator=generator(seed, "noise/confusion", c))
        noisy[members[order]] = torch.arange(len(shares)).repeat_interleave(counts)
    return noisy


def noisy_labels(labels: Tensor, config: Any) -> Tensor:
    """The source's labels with the configuration's noise; human labels are noisy already."""
    confusion = torch.eye(10, dtype=torch.float64)
    if isinstance(config.noise, float):
        if not config.mlc:
            return symmetric(labels, config.noise, classes=10, seed=config.seed).labels
        return by_confusion(labels, torch.lerp(confusion, confusion.new_tensor(0.1), config.noise), config.seed)
    if config.noise != "asymmetric":
        return labels
    for right, wrong in MLC_PAIRS if config.mlc else PAIRS:
        confusion[right, right], confusion[right, wrong] = 1 - ASYMMETRIC, ASYMMETRIC
    return by_confusion(labels, confusion, config.seed)


def measure(config: Config, sides: Sides, root: Root = None, device: str = "auto") -> Row:
    """Train and evaluate once: accuracy in percent at the last epoch, and detection of wrong labels."""
    # cuDNN times its kernels and takes the fastest: 7 % of a step; a run is not repeated to the last bit.
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        result = trained(config, sides, device)
    trusts = measures.trusts(result, None)
    found = measures.detection(sides.source.labels, sides.truth, trusts)
    rejected = {name: measures.issues(trust < 0.5, sides.source.labels, sides.truth) for name, trust in trusts.items()}
    about = {"epochs": config.epochs, **found, "rejected": rejected, "messages": list(result.messages)}
    return {**accuracies(config, result, sides), **about}


def trained(config: Config, sides: Sides, device: str) -> Result:
    with drawn(config.seed, f"{NAME}/model"):
        model = by_name(config.model, classes=10, shape=(3, 32, 32))
    strong = StrongAugment(config.changes, cutout=config.cutout)
    return train(
        config,
        for_images(model, device),
        sides,
        method=make_method(config.base, config.settings),
        optimizer=partial(sgd, nesterov=config.nesterov),
        inputs=Inputs(augment=Views(strong=strong, count=config.views) if config.views else Augment(crop=4, flip=True)),
        compute=Compute(dtype=autocast(config.precision, device), cuda_graph=config.cuda_graph),
        device=device,
    )


EXPERIMENT = Experiment(NAME, LINES, 3, configuration, cells, data, measure)

COLUMNS: Mapping[str, float | str] = {
    "20 %": 0.2,
    "40 %": 0.4,
    "80 %": 0.8,
    "40 % asymmetric": "asymmetric",
    "CIFAR-10N aggregate": "aggre_label",
    "CIFAR-10N random": "random_label1",
    "CIFAR-10N worst": "worse_label",
}
MLC_COLUMNS = {"20 %": 0.2, "50 %": 0.5, "80 %": 0.8, "90 %": 0.9, "40 % asymmetric": "asymmetric"}
Published = Mapping[str, tuple[str, ...]]  # by column
# As published: no trusted images, 300 to 600 epochs, two networks; several are quoted in the tables of ProMix's paper.
PUBLISHED: Published = {
    "published: DivideMix": ("96.1", "94.0-94.9", "93.2", "93.4", "95.0", "95.2", "92.6"),
    "published: SOP+": ("96.3", "", "94.0", "93.8", "", "", "93.2"),
    "published: ProMix": ("97.6-97.7", "", "91.7-95.5", "96.0-96.6", "97.4-97.7", "97.4", "96.2-96.3"),
}
# From EMLC's README with 1,000 trusted images, and ProMix's last epoch without, whose asymmetric noise is another.
MLC_PUBLISHED: Published = {
    "published: MLC": ("92.6", "88.1", "77.4", "67.9", ""),
    "published: EMLC": ("93.6", "92.2", "91.0", "90.1", "92.7"),
    "published: ProMix": ("97.6", "97.3", "95.1", "91.1", ""),
}
TITLES = {name: title for name, (title, _) in LINES.items()}


def accuracy_table(rows: Sequence[Row]) -> str:
    """Accuracy after the last epoch, with published numbers on top."""
    return _table(_usual(rows), TITLES, published=PUBLISHED)


def mlc_table(rows: Sequence[Row]) -> str:
    """Accuracy in the protocol of MLC and EMLC."""
    return _table(_usual(rows, mlc=True), TITLES, MLC_COLUMNS, MLC_PUBLISHED)


def rejected_table(rows: Sequence[Row]) -> str:
    """The recipe's labels that are believed by less than a half, as a detection of wrong labels, in percent."""
    found = [
        {**row, "method": f"{of}{title}, {row['epochs']} epochs", "setting": {"number": name}, "value": value}
        for mlc, of, columns in ((True, "MLC's ", MLC_COLUMNS), (False, "", COLUMNS))
        for title, noise in columns.items()
        for row in _usual(rows, mlc=mlc)
        if row["method"] in ONCE and row["setting"]["noise"] == noise and "rejected" in row
        for name, value in _of_rejected(row, "weight").items()
    ]
    titles = {row["method"]: row["method"] for row in found}
    settings = {row["setting"]["number"]: row["setting"] for row in found}
    return table(found, methods=titles, settings=settings, show=_shown)


def _of_rejected(row: Row, signal: str) -> dict[str, float]:
    """The last is the share of wrong labels that are missed where as many labels are rejected as are wrong."""
    precision, recall = row["rejected"][signal]["precision"], row["rejected"][signal]["recall"]
    return {
        "precision": precision,
        "recall": recall,
        "F1": 2 * precision * recall / (precision + recall),
        "missed": 100 * (1 - row["detection"][signal]["precision"]),
    }


def trusted_table(rows: Sequence[Row]) -> str:
    """The recipe's accuracy by the number of trusted images."""
    found = [
        {**row, "method": str(row["config"]["n_trusted"])}
        for row in rows
        if row["method"] == "strong" and row["setting"]["noise"] in MAIN and "accuracy" in row
    ]
    numbers = sorted({row["config"]["n_trusted"] for row in found})
    return _table(found, {str(n): f"{n:,} trusted images" for n in numbers})


def _usual(rows: Sequence[Row], mlc: bool = False) -> list[Row]:
    """Runs on the test images with the usual number of trusted ones, in one of the two protocols."""
    usual = [row for row in rows if "accuracy" in row and row["config"]["n_trusted"] == Config.n_trusted]
    return [row for row in usual if row["config"].get("mlc", False) == mlc]


def _table(
    rows: Sequence[Row],
    titles: Mapping[str, str],
    columns: Mapping[str, float | str] = COLUMNS,
    published: Published | None = None,
) -> str:
    """Published numbers on top."""
    more = [[title, *numbers] for title, numbers in (published or {}).items()]
    settings = {title: {"noise": noise} for title, noise in columns.items()}
    return table(rows, methods=titles, settings=settings, show=_shown, more=more)


def _shown(cell: Spread) -> str:
    """Cells of several seeds state their number in brackets."""
    return f"{cell} ({cell.n})" if cell.n > 1 else str(cell)


TABLES = {"accuracy": accuracy_table, "mlc": mlc_table, "rejected": rejected_table, "trusted": trusted_table}
