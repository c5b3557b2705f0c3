"""Table 2 and its figures: SVHN digits 0-4 as source, 20 or 25 MNIST digits 5-9 as target, LeNet, every method.

Batches of 32 and 10, accuracy on the 4,861 MNIST test digits 5-9 after the last step. All methods share data,
preprocessing, augmentation, schedule and number of steps. Besides the paper's source there are SVHN 0-9 (appendix) and
two sources in which it is known which examples are of no use.

    python -m experiments table2 --methods soseleto fine_tuning --set n_target=25 --seeds 0 1 2 --out FILE
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from torch import nn

from experiments.digits import NAME, SIDE, SOURCES, TARGET_CLASSES, Digits, as_the_authors_load, prepare
from experiments.experiment import Cell, Experiment, Lines, Root, Run, fields_of, line
from experiments.measures import compare
from experiments.methods.luo import Luo
from experiments.methods.matching import Attention
from experiments.pseudo_labels import Guesses, Rounds, fit_unlabelled
from experiments.results import Row, Spread, signal_rows, table
from experiments.settings import BY_PIECES, make_method, soseleto
from experiments.training import ByEpoch, accuracies, drawn, rates, train
from soseleto.data import Augment, Examples
from soseleto.defaults import Balanced
from soseleto.errors import UsageError
from soseleto.models.architectures import lenet
from soseleto.task.optimizers import sgd
from soseleto.task.task import Method
from soseleto.training.options import Heads, Inputs
from soseleto.training.result import Result

HIDDEN = 500  # units of LeNet
USEFUL = 0.8  # the appendix counts examples with a weight above this
LISTED = 10  # best and worst examples of a class


@dataclass(frozen=True, kw_only=True)
class Config(Run):
    """source: "0-4", "0-9", "shuffled" or "grey-cifar"
    plain: the paper's own setting, with images as the authors' data_loader.py gives them: every domain standardised by
        its own constants, SVHN mirrored at random, nothing else
    relu: a ReLU after each convolution too; Caffe's LeNet has one after its hidden layer only
    dropout: probability with which a hidden unit is dropped in training
    standardize: each image by its own mean and standard deviation, otherwise by the source's statistics
    sign: SVHN images are inverted at random
    rotate, scale, shift, shear, elastic: random augmentation of MNIST images
    rounds: what differs from the defaults of ``Rounds``, or with the prefix "method." from those of its method
    """

    COLUMN = ("n_target", "source", "unlabelled")
    FIXED: ClassVar = {"aligned": "convolutions", "classifier": "last", "move_source": False}
    NEWER = ("relu", "dropout")

    n_target: int = 25
    source: str = "0-4"
    unlabelled: bool = False
    plain: bool = False
    rounds: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = 2
    batch_size: int = 32
    target_batch_size: int = 10
    lr: float = 0.03
    momentum: float = 0.5
    schedule: str = "linear"
    relu: bool = False
    dropout: float = 0.0
    standardize: bool = True
    sign: bool = True
    rotate: float = 10.0
    scale: float = 0.15
    shift: float = 0.1
    shear: float = 20.0
    elastic: float = 0.12

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source not in SOURCES:
            raise UsageError(f"source must be one of {', '.join(SOURCES)}, got {self.source!r}.")

    def column(self) -> dict[str, Any]:
        return {**super().column(), "plain": True} if self.plain else super().column()


# The paper's own setting: its rate, and what it leaves open as in the authors' notebook (momentum 0.5, no schedule) or
# as chosen on held-out digits (ReLUs and dropout: ``results/choose-table2-cpu.json``).
PLAIN: Mapping[str, Any] = {
    "plain": True, "lr": 0.01, "schedule": "constant", "epochs": 10, "relu": True, "dropout": 0.5, "standardize": False,
    "sign": False, **dict.fromkeys(("rotate", "scale", "shift", "shear", "elastic"), 0.0),
}  # fmt: skip
# SOSELETO's settings in every line that does not override them.
SETTINGS: Mapping[str, Any] = {"target_share": 0.5, "weight_step": 3.0, "per_error": True, "pool_classes": True}
RATE = 0.05  # only half of SOSELETO's step is the target's, so a larger rate than for target only is stable
# To judge the weights, the trunk is trained by the source alone, as in the paper, and for an epoch more.
ALONE: Mapping[str, Any] = {"lr": 0.03, "epochs": 3}
ROUNDS: Mapping[str, Any] = {"rounds": 5, "epochs": 2, "views": 4, "batch_size": 64}
ONE_ROUND: Mapping[str, Any] = {"rounds": 1, "epochs": 2, "batch_size": 32}  # the paper's use of unlabelled data
# Two epochs on the source and these rounds are 6,300 steps; five epochs on the source are 7,100.
LONGER = 5
FROZEN: Mapping[str, Any] = {**SETTINGS, "weight_step": None}
JUDGED: Mapping[str, Any] = {**SETTINGS, "target_share": 0.0}
ADVERSARIAL: Mapping[str, Any] = {"entropy": 0.0}
LINES: Lines = {
    "target_only": line("target only", "target_only"),
    "fine_tuning": line("fine-tuning", "fine_tuning"),
    "matching": line("Matching Networks", "matching_networks"),
    "matching_fine_tuned": line("Matching Networks, fine-tuned", "matching_networks", {"fine_tune": 0.5}),
    "soseleto": line("**SOSELETO**", "soseleto", SETTINGS, lr=RATE),
    "soseleto_frozen": line("… weights frozen at 1", "soseleto", FROZEN, lr=RATE),
    "soseleto_shuffled": line("… weights shuffled", "shuffled_weights", SETTINGS, lr=RATE),
    "soseleto_printed": line("`Soseleto.paper()`", "paper"),
    "soseleto_printed_first": line("`Soseleto.paper()`, weights before θ", "paper", {"weights_first": True}),
    "soseleto_printed_frozen": line("`Soseleto.paper()`, weights frozen at 0.5", "paper", {"weight_step": None}),
    "soseleto_printed_unlabelled": line(
        "`Soseleto.paper()`, then its guesses on unlabelled data", "paper", unlabelled=True, rounds=ONE_ROUND
    ),
    "soseleto_half": line("SOSELETO, half of the step the target's", "soseleto", SETTINGS),
    "soseleto_half_frozen": line("… weights frozen at 1", "soseleto", FROZEN),
    "soseleto_alone": line("**SOSELETO**, trunk from the source alone", "soseleto", JUDGED, **ALONE),
    "soseleto_alone_frozen": line("… weights frozen at 1", "soseleto", {**JUDGED, "weight_step": None}, **ALONE),
    "luo": line("Luo et al. 2017, unlabelled data", "luo", ADVERSARIAL, unlabelled=True),
    "luo_label_efficient": line("Luo et al. 2017, label-efficient, unlabelled data", "luo", unlabelled=True),
    "luo_longer": line(
        f"Luo et al. 2017, unlabelled data, {LONGER} epochs", "luo", ADVERSARIAL, unlabelled=True, epochs=LONGER
    ),
    "luo_label_efficient_longer": line(
        f"Luo et al. 2017, label-efficient, unlabelled data, {LONGER} epochs", "luo", unlabelled=True, epochs=LONGER
    ),
    "soseleto_unlabelled": line(
        "**SOSELETO**, unlabelled data", "soseleto", SETTINGS, lr=RATE, unlabelled=True, rounds=ROUNDS
    ),
    "soseleto_unlabelled_frozen": line(
        "… weights frozen at 1",
        "soseleto",
        FROZEN,
        lr=RATE,
        unlabelled=True,
        rounds={**ROUNDS, "method.weight_step": None},
    ),
}
SMALL: Mapping[str, Any] = {"n_source": 1000, "n_test": 1000, "epochs": 4, "lr": 0.01, "momentum": 0.9}
_PLAIN = tuple(name for name in LINES if "printed" in name or "half" in name)
MAIN_LINES = tuple(name for name in LINES if name not in _PLAIN and "alone" not in name)
_RIVALS = ("target_only", "fine_tuning", "matching", "matching_fine_tuned", "luo", "luo_label_efficient")
PLAIN_LINES = (*_RIVALS, *_PLAIN)
_JUDGED = ("soseleto_alone", "soseleto_alone_frozen")
SOURCE_LINES: Mapping[str, tuple[str, ...]] = {
    "0-4": _JUDGED,
    "shuffled": _JUDGED,
    "grey-cifar": _JUDGED,
    "0-9": ("fine_tuning", "soseleto", "soseleto_frozen"),
}


def configuration(method: str, *, plain: bool = False, seed: int = 0, small: bool = False, **changes: Any) -> Config:
    """The run of one line of the table; ``small`` takes seconds on a CPU."""
    common = {**(PLAIN if plain else {}), **(SMALL if small else {})}
    return Config(seed=seed, **fields_of(LINES, method, common, changes))


def cells(seed: int) -> list[Cell]:
    main = {"source": "0-4", "plain": False}
    found: list[Cell] = []
    for n_target in (20, 25):
        found += [(name, {**main, "n_target": n_target}) for name in MAIN_LINES]
        found += [(name, {**main, "n_target": n_target, "plain": True}) for name in PLAIN_LINES]
    found += [(name, {"source": "0-9", "n_target": 25, "plain": True}) for name in PLAIN_LINES]
    for source, lines in SOURCE_LINES.items():
        found += [(name, {**main, "source": source, "n_target": 25}) for name in lines]
    return found


def data(config: Config, root: Root = None, device: str = "auto") -> Digits:
    sizes = {name: getattr(config, name) for name in ("n_source", "n_heldout", "n_test")}
    digits = prepare(config.source, config.n_target, root=root, seed=config.seed, **sizes)
    return as_the_authors_load(digits) if config.plain else digits


def method_of(config: Config, digits: Digits) -> Method:
    """The method with its settings."""
    first = 1 if config.standardize else 0  # index of LeNet's first layer in the trunk
    if config.base in BY_PIECES:
        convolutions = (f"trunk.{first}.", f"trunk.{first + 2}.")
        return make_method(config.base, {"aligned": convolutions, **config.settings})
    method = make_method(config.base, config.settings)
    if isinstance(method, Luo):  # aligns the second convolution, after its pooling, and the features
        aligned = (str(first + 3),)
        method = replace(method, unlabelled=digits.unlabelled.inputs, augment=moves(config), layers=aligned)
    return method


def moves(config: Config) -> Augment:
    """Random changes of MNIST images, labelled or not."""
    return Augment(
        rotate=config.rotate, scale=config.scale, shift=config.shift, shear=config.shear, elastic=config.elastic
    )


def trunk_of(config: Config) -> nn.Sequential:
    """LeNet without its classifier, after a layer that standardises each image if so configured."""
    layers = list(lenet(size=SIDE)[:-1])
    if config.relu:  # beside its pooling, so that the layers keep their names
        layers = [nn.Sequential(layer, nn.ReLU()) if isinstance(layer, nn.MaxPool2d) else layer for layer in layers]
    if config.dropout:
        layers.append(nn.Dropout(config.dropout))
    ahead = [nn.LayerNorm([1, SIDE, SIDE], elementwise_affine=False)] if config.standardize else []
    return nn.Sequential(*ahead, *layers)


def heads_of(config: Config, digits: Digits) -> Heads:
    """Source and target head; None for the default, one linear layer."""
    if config.base == "matching_networks":
        return Heads(target=Attention(len(digits.target), HIDDEN, len(TARGET_CLASSES)))
    if not config.plain:
        return Heads()
    source, target = (nn.Linear(HIDDEN, len(classes)) for classes in (digits.source.classes, TARGET_CLASSES))
    return Heads(source=nn.Sequential(source), target=nn.Sequential(target))


def measure(config: Config, digits: Digits, root: Root = None, device: str = "auto") -> Row:
    """Train once and measure: accuracy in percent, and what is known of the weights."""
    with drawn(config.seed, f"{NAME}/model"):
        trunk, heads = trunk_of(config), heads_of(config, digits)
    of_source = Augment(sign=config.sign, flip=config.plain)
    shared: dict[str, Any] = {
        "target_batch_size": Balanced(config.target_batch_size),
        "inputs": Inputs(augment=(of_source, moves(config)), standardize=not (config.standardize or config.plain)),
        "device": device,
    }
    optimizer, by_epoch = partial(sgd, momentum=config.momentum), None
    if config.plain and heads.target is not None:
        evaluated = digits.heldout if config.select else digits.test
        by_epoch = ByEpoch(nn.Sequential(trunk, heads.target), evaluated=evaluated)
    result = train(
        config,
        trunk,
        digits,
        mode="transfer",
        method=method_of(config, digits),
        heads=heads,
        optimizer=optimizer,
        progress=by_epoch or False,
        **shared,
    )
    rounds, guesses = rounds_of(config), None
    if rounds is not None:
        shared |= {"optimizer": rates(config, optimizer), "seed": config.seed}
        guesses = fit_unlabelled(result, digits.target, digits.unlabelled.inputs, rounds, shared)
    row = {**accuracies(config, result, digits), **weight_facts(config, digits, result, guesses)}
    return row if by_epoch is None else {**row, "by_epoch": by_epoch.percent["evaluated"]}


def rounds_of(config: Config) -> Rounds | None:
    """SOSELETO's rounds on unlabelled digits; None for Luo's method, which takes unlabelled digits itself."""
    if not config.unlabelled or config.base not in ("soseleto", "paper"):
        return None
    of_method = {k.removeprefix("method."): v for k, v in config.rounds.items() if k.startswith("method.")}
    of_rounds = {name: value for name, value in config.rounds.items() if not name.startswith("method.")}
    rounds = Rounds(**of_rounds)
    if config.base == "paper":
        return replace(rounds, method=make_method("paper", of_method))
    return replace(rounds, method=soseleto(**{"target_share": 0.2, **of_method})) if of_method else rounds


def weight_facts(config: Config, digits: Digits, result: Result, guesses: Guesses | None) -> Row:
    """Detection of useless examples, where they are known; on SVHN 0-9 the share of useful examples per class."""
    if result.learned is None:
        return {}
    facts: Row = {"mean_weight": float(result.weights.mean())}
    if digits.useless is not None:
        facts["detection"] = compare({"weight": result.weights, "score": result.scores}, digits.useless)
    if guesses is not None:
        right = guesses.labels == digits.unlabelled.labels
        facts["guessed_right"] = 100.0 * float(right.double().mean())
        if bool(right.any()) and not bool(right.all()):
            facts["guesses"] = compare({"weight": guesses.weights, "score": guesses.scores}, ~right)
    if config.source == "0-9":
        facts["classes"] = class_facts(digits.source, result)
    return facts


def class_facts(source: Examples, result: Result) -> list[Row]:
    """For each class the percent of weights above 0.8, and the ids of its best and worst examples by score."""
    order = result.learned.order().cpu()
    facts: list[Row] = []
    for c, name in enumerate(source.classes):
        mine = order[source.labels[order] == c]
        useful = 100.0 * float((result.weights[mine] > USEFUL).double().mean())
        ids = [source.id_of(i) for i in mine.tolist()]
        facts.append({"class": name, "useful": round(useful, 2), "best": ids[:LISTED], "worst": ids[::-1][:LISTED]})
    return facts


EXPERIMENT = Experiment(NAME, LINES, 20, configuration, cells, data, measure)

PUBLISHED = (
    ("paper: target only", "80.1", "84.0"),
    ("paper: fine-tuning", "80.2", "83.0"),
    ("paper: SOSELETO", "83.2", "87.9"),
    ("paper: Matching Networks", "56.6", "51.3"),
    ("paper: Matching Networks, fine-tuned", "79.3", "82.7"),
    ("paper: Luo et al. 2017", "80.4", "83.1"),
    ("paper: Luo et al. 2017, label-efficient", "94.2", "95.0"),
    ("paper: SOSELETO, unlabelled data", "", "92"),
)
TITLES = {name: title for name, (title, _) in LINES.items()}
IMAGES = {"20 images": 20, "25 images": 25}
USELESS = {"half its labels shuffled": "shuffled", "half grey CIFAR-10": "grey-cifar"}


def accuracy_table(rows: Sequence[Row]) -> str:
    """SVHN 0-4 with augmentation: accuracy by the number of labelled images."""
    mine = [_at(row, row["setting"]["n_target"]) for row in rows if row["setting"]["source"] == "0-4" and _moved(row)]
    return _table(mine, TITLES, IMAGES)


def plain_table(rows: Sequence[Row]) -> str:
    """The paper's setting: accuracy after the last epoch, after every run's best one, and with SVHN 0-9 as source."""
    columns = {title: (n, "0-4") for title, n in IMAGES.items()}
    columns |= {"25, best epoch": (25, "best"), "25, SVHN 0-9": (25, "0-9")}
    mine = [_at(row, (row["setting"]["n_target"], row["setting"]["source"])) for row in rows if not _moved(row)]
    best = [
        {**_at(row, (25, "best")), "value": max(row["by_epoch"])}
        for row in mine
        if row["setting"] == {"at": (25, "0-4")} and "by_epoch" in row and not row["config"]["unlabelled"]
    ]
    published = [(*line, "", "90.3" if line[0] == "paper: SOSELETO" else "") for line in PUBLISHED]
    return _table(mine + best, TITLES, columns, more=published)


def sources_table(rows: Sequence[Row]) -> str:
    """25 labelled images, every source: accuracy."""
    columns = {"SVHN 0-4": "0-4", "SVHN 0-9": "0-9", **USELESS}
    mine = [row for row in rows if row["setting"]["n_target"] == 25 and _augmented(row)]
    shown = {name: TITLES[name] for name in LINES if any(name in lines for lines in SOURCE_LINES.values())}
    return _table([_at(row, row["setting"]["source"]) for row in mine], shown, columns)


def detection_table(rows: Sequence[Row]) -> str:
    """100·AUROC of useful against useless source examples, where it is known which are which."""
    mine = [_at(row, row["setting"]["source"]) for row in rows if row["method"] == "soseleto_alone"]
    return _table(signal_rows(mine), {"score": "score", "weight": "weight"}, USELESS)


def paired_table(rows: Sequence[Row]) -> str:
    """SOSELETO's accuracy minus another line's, draw by draw: draws differ far more than methods do."""
    over = {
        "target_only": "target only",
        "fine_tuning": "fine-tuning",
        "soseleto_frozen": "its weights frozen at 1",
        "soseleto_shuffled": "its weights shuffled",
    }
    mine = [row for row in rows if row["setting"]["source"] == "0-4" and _augmented(row)]
    return _paired([_at(row, row["setting"]["n_target"]) for row in mine], "soseleto", over, IMAGES)


def paired_plain_table(rows: Sequence[Row]) -> str:
    """The paper's setting: accuracy of the printed algorithm, weights first, minus another line's, draw by draw."""
    over = {"target_only": "target only", "fine_tuning": "fine-tuning", "soseleto_printed": "θ before weights",
            "soseleto_printed_frozen": "weights frozen at 0.5"}  # fmt: skip
    mine = [row for row in rows if row["setting"]["source"] == "0-4" and not _moved(row)]
    return _paired([_at(row, row["setting"]["n_target"]) for row in mine], "soseleto_printed_first", over, IMAGES)


def paired_sources_table(rows: Sequence[Row]) -> str:
    """Trunk trained by the source alone: accuracy with learned weights minus that with frozen ones, draw by draw."""
    over = {"soseleto_alone_frozen": "learned weights over weights frozen at 1"}
    mine = [_at(row, row["setting"]["source"]) for row in rows]
    return _paired(mine, "soseleto_alone", over, {"SVHN 0-4": "0-4", **USELESS})


TABLES = {
    "paired": paired_table,
    "paired plain": paired_plain_table,
    "paired sources": paired_sources_table,
    "accuracy": accuracy_table,
    "plain": plain_table,
    "sources": sources_table,
    "detection": detection_table,
}


def _moved(row: Row) -> bool:
    """Whether images are augmented: not in the paper's setting."""
    return not row["setting"].get("plain")


def _augmented(row: Row) -> bool:
    """Whether a run is with augmentation and without unlabelled data."""
    return _moved(row) and not row["setting"]["unlabelled"]


def _at(row: Row, column: Any) -> Row:
    """The row in a column of the table, in place of its setting."""
    return {**row, "setting": {"at": column}}


def _paired(rows: Sequence[Row], method: str, over: Mapping[str, str], columns: Mapping[str, Any]) -> str:
    """By how much ``method`` is better than each of the lines ``over`` in the same column and draw."""
    ours = {(row["setting"]["at"], row["seed"]): row["accuracy"] for row in rows if row["method"] == method}
    found = [
        {**row, "value": ours[draw] - row["accuracy"]}
        for row in rows
        if row["method"] in over and (draw := (row["setting"]["at"], row["seed"])) in ours
    ]
    return _table(found, over, columns)


def _table(rows: Sequence[Row], methods: Mapping[str, str], columns: Mapping[str, Any], **more: Any) -> str:
    """Mean and standard error; cells with another number of draws than usual state it in brackets."""
    settings = {title: {"at": at} for title, at in columns.items()}

    def show(cell: Spread) -> str:
        return cell.with_error() if cell.n == EXPERIMENT.seeds else f"{cell.with_error()} ({cell.n})"

    return table(rows, methods=methods, settings=settings, show=show, **more)
