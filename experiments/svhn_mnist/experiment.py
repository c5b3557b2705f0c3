"""Table 2 and its figures: SVHN digits 0-4 as source, 20 or 25 MNIST digits 5-9 as target, LeNet, every method.

Batches of 32 and 10, accuracy on the 4,861 MNIST test digits 5-9 after the last step. All methods share data,
preprocessing, augmentation, schedule and number of steps. Besides the paper's source there are SVHN 0-9 (appendix) and
two sources in which it is known which examples are of no use.

    python -m experiments.svhn_mnist --methods soseleto fine_tuning --n-target 25 --seeds 0 1 2 --out FILE
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from experiments import runner
from experiments.detection import compare
from experiments.flat_settings import soseleto
from experiments.lines import Lines, fields_of
from experiments.methods import Attention, Luo, by_name
from experiments.pseudo_labels import Unlabelled
from experiments.results import Row
from experiments.shuffled_weights import ShuffledWeights
from experiments.svhn_mnist.data import NAME, SIDE, SOURCES, TARGET_CLASSES, Digits, prepare
from soseleto.algorithm import Soseleto
from soseleto.data import Augment, Examples, seed_for
from soseleto.errors import UsageError, did_you_mean
from soseleto.models.architectures import lenet_trunk
from soseleto.run_folder.folder import REPORT
from soseleto.schedules import SCHEDULES
from soseleto.task.optimizers import sgd
from soseleto.task.task import Method
from soseleto.training.options import Balanced, Heads, Inputs
from soseleto.training.result import Result

CLASSIFIERS = ("last", "connected")
ALIGNED = ("all", "convolutions", "first")
USEFUL = 0.8  # the appendix counts examples with a weight above this


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run, complete.

    method: the row's name; base, settings: which method that is, and what differs from its defaults
    source: "0-4", "0-9", "shuffled" or "grey-cifar"; n_source, n_test: maximum number of images
    aligned: alignments over "all" of the trunk, its "convolutions", or the "first" of them
    classifier: a head is LeNet's "last" layer, or its fully "connected" layers (the trunk is then the convolutions)
    relu: a ReLU after each convolution too; Caffe's LeNet has one after its hidden layer only
    dropout: probability with which a hidden unit is dropped in training
    standardize: each image by its own mean and standard deviation, otherwise by the source's statistics
    sign: SVHN images are inverted at random
    rotate, scale, shift, shear, elastic: random augmentation of MNIST images; move_source: of SVHN images too
    rounds: what differs from the defaults of ``Unlabelled``, or with the prefix "method." from those of its method
    n_heldout: MNIST training digits held out of training; select: evaluate on them and not on the test set
    """

    method: str
    base: str
    n_target: int = 25
    source: str = "0-4"
    unlabelled: bool = False
    plain: bool = False
    seed: int = 0
    settings: tuple[tuple[str, Any], ...] = ()
    rounds: tuple[tuple[str, Any], ...] = ()
    n_source: int | None = None
    n_test: int | None = None
    n_heldout: int = 0
    select: bool = False
    epochs: int = 2
    batch_size: int = 32
    target_batch_size: int = 10
    lr: float = 0.03
    momentum: float = 0.5
    weight_decay: float = 0.0
    schedule: str = "linear"
    aligned: str = "convolutions"
    classifier: str = "last"
    relu: bool = False
    dropout: float = 0.0
    standardize: bool = True
    sign: bool = True
    rotate: float = 10.0
    scale: float = 0.15
    shift: float = 0.1
    shear: float = 20.0
    elastic: float = 0.12
    move_source: bool = False

    def __post_init__(self) -> None:
        if self.select and not self.n_heldout:
            raise UsageError("select evaluates on held-out digits, but n_heldout is 0: say n_heldout=5000.")
        if self.dropout and self.classifier != "last":
            raise UsageError(
                f"dropout is of the trunk's hidden layer, and classifier={self.classifier!r} moves it away."
            )
        for name, known in (("classifier", CLASSIFIERS), ("aligned", ALIGNED)):
            if getattr(self, name) not in known:
                raise UsageError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}.")


# The paper's own setting, shown in columns of its own: no augmentation, λ_p = 0.01.
PLAIN: Mapping[str, Any] = MappingProxyType(
    {"plain": True, "lr": 0.01, "momentum": 0.9, "relu": True, "dropout": 0.5, "sign": False}
    | dict.fromkeys(("rotate", "scale", "shift", "shear", "elastic"), 0.0)
)
# In the paper's setting the baselines take one epoch. A weight is first used at its example's second visit: lines with
# weights take two.
PLAIN_EPOCHS: Mapping[str, int] = MappingProxyType({"target_only": 1, "fine_tuning": 1})
# Algorithm 1 as printed: mean(αℓ), one target batch, alignments as they are; λ_α and the first weights are those of the
# authors' notebook.
PAPER: Mapping[str, Any] = MappingProxyType(
    {"initial_weight": 0.5, "weight_step": 0.2, "scale_free": False, "normalize_weights": False, "target_average": 0.0}
)
# SOSELETO's settings in every line that does not override them.
SETTINGS: Mapping[str, Any] = MappingProxyType(
    {"target_share": 0.5, "weight_step": 3.0, "per_error": True, "pool_classes": True}
)
RATE = 0.05  # only half of SOSELETO's step is the target's, so a larger rate than for target only is stable
# To judge the weights, the trunk is trained by the source alone, as in the paper, and for an epoch more.
ALONE: Mapping[str, Any] = MappingProxyType({"lr": 0.03, "epochs": 3})
ROUNDS: Mapping[str, Any] = MappingProxyType({"rounds": 5, "epochs": 2, "views": 4, "batch_size": 64})
# Two epochs on the source and these rounds are 6,300 steps; five epochs on the source are 7,100.
LONGER = 5


def _soseleto(
    title: str, base: str = "soseleto", more: Mapping[str, Any] = MappingProxyType({}), **changes: Any
) -> tuple[str, Mapping[str, Any]]:
    return title, {"base": base, "lr": RATE, "settings": tuple({**SETTINGS, **changes}.items()), **more}


def _paper(title: str, **changes: Any) -> tuple[str, Mapping[str, Any]]:
    return title, {"base": "soseleto", "settings": tuple({**PAPER, **changes}.items()), "aligned": "all"}


# The lines of the table: title, and what differs from the common configuration.
LINES: Lines = MappingProxyType(
    {
        "target_only": ("target only", {"base": "target_only"}),
        "fine_tuning": ("fine-tuning", {"base": "fine_tuning"}),
        "matching": ("Matching Networks", {"base": "matching_networks"}),
        "matching_fine_tuned": (
            "Matching Networks, fine-tuned",
            {"base": "matching_networks", "settings": (("fine_tune", 0.5),)},
        ),
        "soseleto": _soseleto("**SOSELETO**"),
        "soseleto_frozen": _soseleto("… weights frozen at 1", weight_step=None),
        "soseleto_shuffled": _soseleto("… weights shuffled", base="shuffled_weights"),
        "soseleto_paper": _paper("… as the paper writes it, weights from 0.5"),
        "soseleto_paper_one": _paper("… as the paper writes it, weights from 1", initial_weight=1.0),
        "soseleto_paper_frozen": _paper(
            "… as the paper writes it, weights frozen at 1", initial_weight=1.0, weight_step=None
        ),
        "soseleto_alone": _soseleto("**SOSELETO**, trunk from the source alone", more=ALONE, target_share=0.0),
        "soseleto_alone_frozen": _soseleto("… weights frozen at 1", more=ALONE, target_share=0.0, weight_step=None),
        "luo": (
            "Luo et al. 2017, unlabelled data",
            {"base": "luo", "unlabelled": True, "settings": (("entropy", 0.0),)},
        ),
        "luo_label_efficient": (
            "Luo et al. 2017, label-efficient, unlabelled data",
            {"base": "luo", "unlabelled": True},
        ),
        "luo_longer": (
            f"Luo et al. 2017, unlabelled data, {LONGER} epochs",
            {"base": "luo", "unlabelled": True, "settings": (("entropy", 0.0),), "epochs": LONGER},
        ),
        "luo_label_efficient_longer": (
            f"Luo et al. 2017, label-efficient, unlabelled data, {LONGER} epochs",
            {"base": "luo", "unlabelled": True, "epochs": LONGER},
        ),
        "soseleto_unlabelled": _soseleto(
            "**SOSELETO**, unlabelled data", more={"unlabelled": True, "rounds": tuple(ROUNDS.items())}
        ),
        "soseleto_unlabelled_frozen": _soseleto(
            "… weights frozen at 1",
            more={"unlabelled": True, "rounds": tuple({**ROUNDS, "method.weight_step": None}.items())},
            weight_step=None,
        ),
    }
)
SMALL: Mapping[str, Any] = MappingProxyType(
    {"n_source": 1000, "n_test": 1000, "epochs": 4, "lr": 0.01, "momentum": 0.9}
)


def configuration(
    method: str,
    *,
    n_target: int = 25,
    source: str = "0-4",
    plain: bool = False,
    seed: int = 0,
    small: bool = False,
    **changes: Any,
) -> Config:
    """The complete configuration of one line of the table; ``small`` takes seconds on a CPU."""
    common = {**PLAIN, "epochs": PLAIN_EPOCHS.get(method, Config.epochs)} if plain else {}
    fields = fields_of(LINES, method, {**common, **(SMALL if small else {})}, changes)
    if source not in SOURCES:
        raise UsageError(f"unknown source {source!r}{did_you_mean(source, SOURCES)}: choose from {', '.join(SOURCES)}.")
    return Config(n_target=n_target, source=source, seed=seed, **fields)


def make_method(config: Config, data: Digits) -> Method:
    """The method with its settings."""
    first = 1 if config.standardize else 0  # index of LeNet's first layer in the trunk
    if config.base in (Soseleto.name, ShuffledWeights.name):
        convolutions = (f"trunk.{first}.", f"trunk.{first + 2}.")
        layers = {"all": None, "first": convolutions[:1], "convolutions": convolutions}[config.aligned]
        made = ShuffledWeights if config.base == ShuffledWeights.name else Soseleto
        return soseleto(made, aligned=layers, **dict(config.settings))
    method: Any = by_name(config.base)
    if isinstance(method, Luo):  # aligns the second convolution, after its pooling, and the features
        aligned = (str(first + 3),)
        method = replace(method, unlabelled=data.unlabelled.inputs, augment=moves(config), layers=aligned)
    return replace(method, **dict(config.settings)) if config.settings else method


def moves(config: Config) -> Augment:
    """Random changes of MNIST images, labelled or not."""
    return Augment(
        rotate=config.rotate, scale=config.scale, shift=config.shift, shear=config.shear, elastic=config.elastic
    )


def make_trunk(config: Config) -> nn.Sequential:
    """LeNet without its classifier, after a layer that standardises each image if so configured."""
    layers = list(lenet_trunk(size=SIDE))
    if config.relu:  # beside its pooling, so that the layers keep their names
        layers = [nn.Sequential(layer, nn.ReLU()) if isinstance(layer, nn.MaxPool2d) else layer for layer in layers]
    if config.dropout:
        layers.append(nn.Dropout(config.dropout))
    if config.classifier == "connected":
        layers = layers[:-2]
    ahead = [nn.LayerNorm([1, SIDE, SIDE], elementwise_affine=False)] if config.standardize else []
    return nn.Sequential(*ahead, *layers)


def make_heads(config: Config, data: Digits) -> tuple[nn.Module | None, nn.Module | None]:
    """Source and target head; None for the default, one linear layer."""
    if config.base == "matching_networks":
        width = 500 if config.classifier == "last" else 800
        return None, Attention(len(data.target), width, len(TARGET_CLASSES))
    if config.classifier == "last":
        return None, None
    assert data.source.classes is not None
    return _connected(len(data.source.classes)), _connected(len(TARGET_CLASSES))


def _connected(classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, classes))


def setting_of(config: Config) -> dict[str, Any]:
    """The column of the table a run belongs to."""
    setting = {"n_target": config.n_target, "source": config.source, "unlabelled": config.unlabelled}
    return {**setting, "plain": True} if config.plain else setting


def heading(config: Config) -> Row:
    """The entries of a row that are known before the run."""
    plain = {**dataclasses.asdict(config), "settings": dict(config.settings), "rounds": dict(config.rounds)}
    # Fields newer than some rows: left out at their defaults, so that those rows still count as the same run.
    plain = {name: value for name, value in plain.items() if value or name not in ("relu", "dropout")}
    return {"method": config.method, "setting": setting_of(config), "seed": config.seed, "config": plain}


def digits(config: Config, root: str | Path | None = None) -> Digits:
    """The data of a run."""
    return prepare(
        config.source,
        config.n_target,
        seed=config.seed,
        n_source=config.n_source,
        n_heldout=config.n_heldout,
        n_test=config.n_test,
        root=root,
    )


def run_one(config: Config, root: str | Path | None = None, device: str = "auto") -> Row:
    """Train once and measure: accuracy in percent, seconds of training, and what is known of the weights."""
    data = digits(config, root)
    begin = time.perf_counter()
    result, guesses = train(config, data, device=device)
    found: Row = {"seconds": time.perf_counter() - begin}
    if data.heldout is not None:
        found["heldout_accuracy"] = result.evaluate(data.heldout)["accuracy"]
    if not config.select:
        found["accuracy"] = result.evaluate(data.test)["accuracy"]
    return {**heading(config), **found, **weight_facts(config, data, result, guesses)}


def train(config: Config, data: Digits, *, device: str, out: Path | None = None) -> tuple[Result, Any]:
    from experiments.pseudo_labels import fit_unlabelled
    from soseleto.training.fit import fit

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(config.seed, f"{NAME}/model"))
        trunk, (source_head, target_head) = make_trunk(config), make_heads(config, data)
    of_source = replace(moves(config) if config.move_source else Augment(), sign=config.sign)
    arguments: dict[str, Any] = {
        "mode": "transfer",
        "epochs": config.epochs,
        "batch_size": config.batch_size,
        "target_batch_size": Balanced(config.target_batch_size),
        "optimizer": (
            partial(sgd, lr=config.lr, weight_decay=config.weight_decay, momentum=config.momentum),
            SCHEDULES[config.schedule],
        ),
        "method": make_method(config, data),
        "heads": Heads(source=source_head, target=target_head),
        "inputs": Inputs(augment=(of_source, moves(config)), standardize=not config.standardize),
        "seed": config.seed,
        "device": device,
        "out": out,
    }
    rounds = make_rounds(config, data)
    if rounds is None:
        return fit(trunk, data.source, data.target, **arguments), None
    return fit_unlabelled(trunk, data.source, data.target, rounds, **arguments)


def make_rounds(config: Config, data: Digits) -> Unlabelled | None:
    """SOSELETO's rounds on unlabelled digits; None for Luo's method, which takes unlabelled digits itself."""
    if not config.unlabelled or config.base != "soseleto":
        return None
    rounds = Unlabelled(inputs=data.unlabelled.inputs)
    of_method = {name.removeprefix("method."): v for name, v in config.rounds if name.startswith("method.")}
    of_rounds = {name: value for name, value in config.rounds if not name.startswith("method.")}
    if of_method:
        rounds = replace(rounds, method=soseleto(**{"target_share": 0.2, **of_method}))
    return replace(rounds, **of_rounds)


def weight_facts(config: Config, data: Digits, result: Result, of_unlabelled: Any = None) -> Row:
    """Detection of useless examples, where they are known; on SVHN 0-9 the share of useful examples per class."""
    facts: Row = {} if result.learned is None else {"mean_weight": float(result.weights.mean())}
    if not facts:
        return facts
    if data.useless is not None:
        facts["detection"] = compare({"weight": result.weights, "score": result.scores}, data.useless)
    if of_unlabelled is not None:
        right = of_unlabelled.labels == data.unlabelled.labels
        facts["guessed_right"] = 100.0 * float(right.double().mean())
        if bool(right.any()) and not bool(right.all()):
            guesses = {"weight": of_unlabelled.weights, "score": of_unlabelled.scores}
            facts["guesses"] = compare(guesses, ~right)
    if config.source == "0-9":
        facts["classes"] = class_facts(data.source, result)
    return facts


def class_facts(source: Examples, result: Result, *, shown: int = 10) -> list[Row]:
    """For each class the percent of weights above 0.8, and the ids of its best and worst examples by score."""
    assert source.classes is not None
    assert result.learned is not None
    order = result.learned.order().cpu()
    facts: list[Row] = []
    for c, name in enumerate(source.classes):
        mine = order[source.labels[order] == c]
        useful = 100.0 * float((result.weights[mine] > USEFUL).double().mean())
        ids = [source.id_of(i) for i in mine.tolist()]
        facts.append({"class": name, "useful": round(useful, 2), "best": ids[:shown], "worst": ids[::-1][:shown]})
    return facts


run_all = runner.bound(NAME, heading, run_one)


def everything(seeds: Sequence[int]) -> list[Config]:
    """The configurations of every cell of the tables."""
    made = []
    for seed in seeds:
        for n_target in (20, 25):
            made += [configuration(line, n_target=n_target, seed=seed) for line in MAIN_LINES]
            made += [configuration(line, n_target=n_target, plain=True, seed=seed) for line in PLAIN_LINES]
        for source, lines in SOURCE_LINES.items():
            made += [configuration(line, source=source, seed=seed) for line in lines]
    return made


MAIN_LINES = tuple(line for line in LINES if "paper" not in line and "alone" not in line)
PLAIN_LINES = ("target_only", "fine_tuning", "soseleto", *(line for line in LINES if "paper" in line))
_JUDGED = ("soseleto_alone", "soseleto_alone_frozen")
SOURCE_LINES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "0-4": _JUDGED,
        "shuffled": _JUDGED,
        "grey-cifar": _JUDGED,
        "0-9": ("fine_tuning", "soseleto", "soseleto_frozen"),
    }
)


def reproduce(out: Path, *, seeds: int, report: Callable[[str], None]) -> list[Row]:
    """Every cell and the appendix's figures, as ``soseleto reproduce svhn-mnist``; runs that are saved are skipped."""
    from experiments import figures  # needs matplotlib; the trainings need only torch and numpy

    rows = list(run_all(everything(range(seeds)), out / f"{NAME}.json", report=report).rows)
    report(f"the share of useful examples per class is in {figures.useful_classes(rows, out / 'svhn-classes.svg')}")
    appendix(out / "svhn-0-9", report=report)
    return rows


def appendix(
    folder: Path, *, root: str | Path | None = None, device: str = "auto", report: Callable[[str], None]
) -> Path:
    """One run on SVHN 0-9 with a run folder, whose report shows the best and worst examples of every class."""
    page = folder / REPORT
    if not page.exists():
        config = configuration("soseleto", source="0-9")
        result, _ = train(config, digits(config, root), device=device, out=folder)
        report(f"the best and the worst examples of SVHN 0-9 are in {result.report(page)}")
    return page
