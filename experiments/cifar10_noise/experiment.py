"""Table 1 and its figure: CIFAR-10 with noisy labels, Quick, every method in the table.

5,000 clean target images; the other 45,000 are the source, with 30, 40 or 50 % of their labels flipped to another
class, or with the human labels of CIFAR-10N. Batches of 256 and 32, 60 epochs, accuracy on the 10,000 test images
after the last epoch. All methods share data, preprocessing, augmentation, schedule and number of steps.

    python -m experiments.cifar10_noise --methods soseleto ordinary --noise 0.4 --seeds 0 1 2 --out FILE
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments import cleanlab, runner
from experiments.data import load
from experiments.detection import FRACTIONS, compare, wrong_among_kept
from experiments.flat_settings import soseleto
from experiments.lines import Lines, fields_of
from experiments.methods import EarlyStopping, by_name, correct_only, corrected
from experiments.results import Row
from soseleto.algorithm import Soseleto
from soseleto.data import Augment, Examples, Preprocess, generator, seed_for, symmetric
from soseleto.data.batches import Batch
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
from soseleto.methods import Recording, Signals
from soseleto.models.by_name import by_name as by_model_name
from soseleto.parallel.reducer import choose_device
from soseleto.schedules import SCHEDULES
from soseleto.task.optimizers import sgd
from soseleto.task.task import Method
from soseleto.training.options import Compute, Inputs, Probes
from soseleto.training.result import Result

NAME = "cifar10-noise"
ASKED = (0.8, 0.9, 0.95)  # precisions that suspects are requested at
NOISE: tuple[float | str, ...] = (0.3, 0.4, 0.5, "worse_label", "aggre_label")
WRONG = {"worse_label": 0.40, "aggre_label": 0.09}  # the share that is wrong
LABELS: Mapping[str, Callable[[Examples], Examples]] = MappingProxyType(
    {"noisy": lambda source: source, "corrected": corrected, "correct_only": correct_only}
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run, complete.

    method: the row's name; base, settings: which method that is, and what differs from its defaults
    noise: the share of flipped labels, or a label set of CIFAR-10N
    labels: "noisy", or for the oracles "corrected" or "correct_only"
    n_clean: clean images, of which n_heldout are held out of training; the remaining train split is the source
    n_source, n_test: maximum number of images; size: side of the images, 32 or averaged down to 16
    precision: "bfloat16" runs the network under autocast; micro_batch_size: maximum examples per forward pass
    early_stopping: keep the model of the epoch that is best on the held-out images
    select: evaluate on the held-out images and not on the test set, for choosing settings
    record: record the running mean loss and margin of every source example
    probes: the share of the clean images, or "auto", that is planted among the source to calibrate suspects
    folds: instead of one training, cleanlab's rankings by cross-validation with this many folds
    """

    method: str
    base: str
    noise: float | str
    seed: int = 0
    settings: tuple[tuple[str, Any], ...] = ()
    labels: str = "noisy"
    n_clean: int = 5000
    n_heldout: int = 0
    n_source: int | None = None
    n_test: int | None = None
    model: str = "quick"
    size: int = 32
    epochs: int = 60
    batch_size: int = 256
    target_batch_size: int = 32
    lr: float = 0.03
    weight_decay: float = 5e-4
    schedule: str = "linear"
    crop: int = 4
    flip: bool = True
    precision: str | None = None
    micro_batch_size: int | None = None
    early_stopping: bool = False
    select: bool = False
    record: bool = True
    probes: float | str = 0.0
    folds: int = 0

    def __post_init__(self) -> None:
        if (self.select or self.early_stopping) and not 0 < self.n_heldout < self.n_clean:
            raise UsageError(f"n_heldout must lie between 0 and n_clean, got {self.n_heldout}: say n_heldout=1000.")


# SOSELETO's one setting that is not the default: 5,000 clean images are too many to be memorised, so θ may train on
# them too. Chosen on held-out target images at 40 % noise and used at every noise.
SHARED: tuple[tuple[str, Any], ...] = (("target_share", 0.3),)
# What ``fit`` chooses, but for what depends on the network and on the share of wrong labels: see ``usual_settings``.
USUAL: tuple[tuple[str, Any], ...] = (("doubt_labels", True), ("by_last_layer", True))
FAST: tuple[tuple[str, Any], ...] = (
    ("target_share", MANY_SHARE),
    ("weight_step", convolutional_weight_step(Config.epochs)),
)
# The lines of the table: title, and what makes each differ from the common configuration.
LINES: Lines = MappingProxyType(
    {
        "ordinary_constant": ("ordinary training, constant rate", {"base": "ordinary", "schedule": "constant"}),
        "ordinary": ("ordinary training", {"base": "ordinary"}),
        "ordinary_early_stopped": (
            "ordinary training, early stopped",
            {"base": "ordinary", "early_stopping": True, "n_heldout": 1000, "schedule": "constant"},
        ),
        "ordinary_stopped": (
            "ordinary training, early stopped, everybody's schedule",
            {"base": "ordinary", "early_stopping": True, "n_heldout": 1000},
        ),
        "target_only": ("target only", {"base": "target_only"}),
        "mixed": ("noisy and clean mixed", {"base": "mixed"}),
        "mixed_shared": ("noisy and clean mixed, share chosen", {"base": "mixed", "settings": SHARED}),
        "sukhbaatar": ("Sukhbaatar et al. 2014", {"base": "sukhbaatar"}),
        "sukhbaatar_10k": ("Sukhbaatar et al. 2014, 10,000 clean", {"base": "sukhbaatar", "n_clean": 10000}),
        "xiao": ("Xiao et al. 2015", {"base": "xiao"}),
        "xiao_10k": ("Xiao et al. 2015, 10,000 clean", {"base": "xiao", "n_clean": 10000}),
        "reweight": ("Learning to Reweight", {"base": "reweight", "lr": 0.003}),  # at 0.01 it drops to chance level
        "reweight_256": (
            "Learning to Reweight, 256 clean images a step, clipped",
            {"base": "reweight", "target_batch_size": 256, "settings": (("clip", 1.0),)},
        ),
        "reweight_shared": (
            "Learning to Reweight, the same, target gradient in θ's step",
            {"base": "reweight", "target_batch_size": 256, "settings": (*SHARED, ("clip", 1.0))},
        ),
        "meta_weight_net": ("Meta-Weight-Net", {"base": "meta_weight_net"}),
        "meta_weight_net_shared": (
            "Meta-Weight-Net, weights normalised, target gradient in θ's step",
            {"base": "meta_weight_net", "settings": (*SHARED, ("normalize_weights", True))},
        ),
        "soseleto": ("**SOSELETO**", {"base": "soseleto", "settings": SHARED}),
        "soseleto_doubting": (
            "**SOSELETO, labels doubted**",
            {"base": "soseleto", "settings": (("target_share", 0.2), ("doubt_labels", True))},  # chosen in the same way
        ),
        "soseleto_doubting_frozen": (
            "SOSELETO, labels doubted, weights frozen at 0.7",
            {
                "base": "soseleto",
                "settings": (
                    ("target_share", 0.2),
                    ("doubt_labels", True),
                    ("weight_step", None),
                    ("initial_weight", 0.7),
                ),
            },
        ),
        "soseleto_usual": ("**SOSELETO, what `fit` uses**", {"base": "soseleto", "settings": USUAL}),
        "soseleto_usual_frozen": (
            "SOSELETO, what `fit` uses, weights frozen at 0.7",
            {"base": "soseleto", "settings": (*USUAL, ("weight_step", None), ("initial_weight", 0.7))},
        ),
        "soseleto_usual_probes": (
            "SOSELETO, what `fit` uses, with probes",
            {"base": "soseleto", "settings": USUAL, "probes": "auto"},
        ),
        "soseleto_fast": (
            "SOSELETO, what `fit` uses in a larger network",
            {"base": "soseleto", "settings": (*USUAL, *FAST)},
        ),
        "soseleto_last_layer": (
            "SOSELETO, weights moved by the last layer, target not trained on",
            {"base": "soseleto", "settings": (("by_last_layer", True),)},
        ),
        "soseleto_last_layer_frozen": (
            "the same with weights frozen at 1",
            {"base": "soseleto", "settings": (("by_last_layer", True), ("weight_step", None))},
        ),
        "soseleto_frozen": ("… weights frozen", {"base": "soseleto", "settings": (*SHARED, ("weight_step", None))}),
        "soseleto_paper": ("… no target gradient in θ", {"base": "soseleto"}),
        "soseleto_no_average": (
            "… one target batch",
            {"base": "soseleto", "settings": (*SHARED, ("target_average", 0.0))},
        ),
        "soseleto_unscaled": (
            "… step not scaled",
            {"base": "soseleto", "settings": (*SHARED, ("scale_free", False), ("weight_step", 0.05))},
        ),
        "soseleto_mean": (
            "… loss not normalised",
            {"base": "soseleto", "settings": (*SHARED, ("normalize_weights", False))},
        ),
        "soseleto_constant": ("… constant rate", {"base": "soseleto", "settings": SHARED, "schedule": "constant"}),
        "soseleto_bfloat16": (
            "… in bfloat16",
            {"base": "soseleto", "settings": SHARED, "precision": "bfloat16", "record": False},
        ),
        "soseleto_accumulated": (
            "… in micro-batches of 96",
            {"base": "soseleto", "settings": SHARED, "micro_batch_size": 96, "record": False},
        ),
        "soseleto_probes": ("… with probes", {"base": "soseleto", "settings": SHARED, "probes": "auto"}),
        "cleanlab": ("cleanlab", {"base": "mixed", "folds": 4}),
        "oracle_subset": ("oracle: only the right labels", {"base": "ordinary", "labels": "correct_only"}),
        "oracle": ("oracle: every label corrected", {"base": "ordinary", "labels": "corrected"}),
    }
)
USUAL_LINES = tuple(line for line in LINES if line.startswith("soseleto_usual"))
SMALL: Mapping[str, Any] = MappingProxyType(
    {
        "model": "mlp",
        "size": 16,
        "n_source": 4000,
        "n_clean": 2000,
        "n_test": 2000,
        "epochs": 20,
        "batch_size": 64,
        "lr": 0.02,
        "crop": 0,
        "flip": False,
    }
)


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
    """The complete configuration of one line of the table; ``small`` takes minutes on a CPU."""
    fields = fields_of(LINES, method, SMALL if small else {}, changes)
    if method in USUAL_LINES:
        chosen = usual_settings(noise, fields.get("epochs", Config.epochs), fields.get("model", Config.model))
        fields["settings"] = tuple({**chosen, **dict(fields["settings"])}.items())
    if noise not in NOISE and not (isinstance(noise, float) and 0.0 < noise < 1.0):
        raise UsageError(f"noise must be a share between 0 and 1, 'worse_label' or 'aggre_label', got {noise!r}.")
    return Config(noise=noise, seed=seed, **fields)


@dataclass(frozen=True)
class Data:
    """The data of one run; the source has the true labels besides its noisy ones.

    before: for human noise, the labels that people gave the target's images; probes get these, so that their mistakes
        are like the source's
    """

    source: Examples
    target: Examples
    heldout: Examples | None
    test: Examples
    before: Tensor | None


def prepare_data(config: Config, root: str | Path | None = None) -> Data:
    """Draw by the seed the clean images, the noisy source and its flipped labels; the same for every method."""
    human = config.noise if isinstance(config.noise, str) else None
    train, test = _split("train", root, human), _split("test", root, None)
    truth = train.labels if train.truth is None else train.truth
    order = torch.randperm(len(train), generator=generator(config.seed, f"{NAME}/split"))
    clean, noisy_ones = order[: config.n_clean], order[config.n_clean :][: config.n_source]
    heldout, target = clean[: config.n_heldout], clean[config.n_heldout :]
    source = replace(train.subset(noisy_ones), truth=truth[noisy_ones])
    if isinstance(config.noise, float):
        noisy = symmetric(source.labels, config.noise, classes=10, seed=config.seed)
        source = replace(source, labels=noisy.labels)
    right = replace(train, labels=truth, truth=None)
    shrink = partial(_shrunk, size=config.size)
    return Data(
        source=shrink(LABELS[config.labels](source)),
        target=shrink(right.subset(target)),
        heldout=shrink(right.subset(heldout)) if len(heldout) else None,
        test=shrink(test.subset(range(config.n_test)) if config.n_test else test),
        before=None if human is None else train.labels[target],
    )


@lru_cache(maxsize=4)
def _split(split: str, root: str | Path | None, human: str | None) -> Examples:
    return load("cifar10", split, root) if human is None else load("cifar10n", split, root, label_set=human)


def _shrunk(examples: Examples, *, size: int) -> Examples:
    side = examples.inputs.shape[-1]
    if side == size:
        return examples
    small = F.avg_pool2d(examples.inputs.float(), side // size).round().to(torch.uint8)
    return replace(examples, inputs=small)


def make_method(config: Config, data: Data, signals: Signals | None = None) -> Method:
    """The method with its settings, wrapped in early stopping if configured, and in recording if there are signals."""
    settings = dict(config.settings)
    base: Any = by_name(config.base)
    method = soseleto(**settings) if config.base == Soseleto.name else replace(base, **settings)
    if config.early_stopping:
        assert data.heldout is not None
        inputs = Preprocess.of(data.source.inputs)(data.heldout.inputs)  # as fit prepares them
        heldout = Batch(torch.arange(len(inputs)), inputs, data.heldout.labels)
        method = EarlyStopping(method=method, heldout=heldout, every=-(-len(data.source) // config.batch_size))
    return method if signals is None else Recording(method, signals)


def make_model(config: Config) -> nn.Module:
    """The network with initial values drawn by the seed; the global random state is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(config.seed, f"{NAME}/model"))
        return by_model_name(config.model, classes=10, shape=(3, config.size, config.size))


def heading(config: Config) -> Row:
    """The entries of a row that are known before the run."""
    plain = {**dataclasses.asdict(config), "settings": dict(config.settings)}
    # Fields newer than some rows: left out at their defaults, so that those rows still count as the same run.
    later = ("probes", "folds", "micro_batch_size")
    plain = {name: value for name, value in plain.items() if value or name not in later}
    return {"method": config.method, "setting": {"noise": config.noise}, "seed": config.seed, "config": plain}


def run_one(config: Config, root: str | Path | None = None, device: str = "auto") -> Row:
    """Train and evaluate once: accuracy in percent, seconds of training, and detection of wrong labels."""
    data = prepare_data(config, root)
    begin = time.perf_counter()
    if config.folds:
        trust = _cross_validated(config, data, device)
        return {**heading(config), "seconds": time.perf_counter() - begin, **detection(data.source, trust)}
    signals = Signals(len(data.source)) if config.record and config.labels == "noisy" and not config.probes else None
    result = train(config, data, make_method(config, data, signals), device)
    found: Row = {"seconds": time.perf_counter() - begin}
    if data.heldout is not None:
        found["heldout_accuracy"] = result.evaluate(data.heldout)["accuracy"]
    if not config.select:
        found["accuracy"] = result.evaluate(data.test)["accuracy"]
    return {**heading(config), **found, **detection(data.source, _trusts(result, signals)), **_suspects(result)}


def train(config: Config, data: Data, method: Method, device: str) -> Result:
    """One training of the configuration's network, with its schedule and augmentation, by any method."""
    from soseleto.training.fit import fit

    model = make_model(config)
    if choose_device(device).type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # faster, same result
    return fit(
        model,
        data.source,
        data.target,
        mode="noisy",
        epochs=config.epochs,
        batch_size=config.batch_size,
        target_batch_size=config.target_batch_size,
        optimizer=(partial(sgd, lr=config.lr, weight_decay=config.weight_decay), SCHEDULES[config.schedule]),
        method=method,
        inputs=Inputs(augment=Augment(crop=config.crop, flip=config.flip)),
        probes=Probes(share=config.probes, labels_before=data.before) if config.probes else None,  # type: ignore[arg-type]
        compute=Compute(
            dtype=None if config.precision is None else getattr(torch, config.precision),
            micro_batch_size=config.micro_batch_size,
        ),
        seed=config.seed,
        device=device,
    )


def _cross_validated(config: Config, data: Data, device: str) -> dict[str, Tensor]:
    """cleanlab's rankings, from ``folds`` trainings that together take as many steps as one run of any other line."""
    epochs = cleanlab.fold_epochs(config.epochs, config.folds)

    def predict(training: Examples, inputs: Tensor, fold: int) -> Tensor:
        part, seed = replace(data, source=training), seed_for(config.seed, f"{NAME}/fold", fold)
        of_fold = replace(config, epochs=epochs, seed=seed)
        return train(of_fold, part, make_method(of_fold, part), device).outputs(inputs).softmax(1)

    found = cleanlab.out_of_sample(data.source, config.folds, config.seed, predict)
    return cleanlab.trusts(found, data.source.labels)


def _trusts(result: Result, signals: Signals | None) -> dict[str, Tensor]:
    """Every signal of a training, and with probes the calibrated probability computed from all of them."""
    found = {} if result.learned is None else {"weight": result.weights, "score": result.scores}
    if signals is not None and bool((signals.visits > 0).all()):
        found |= {"loss": -signals.loss.cpu(), "margin": signals.margin.cpu()}
    if result.evidence is not None:
        names = {"mean_loss": "loss", "mean_margin": "margin"}
        gathered = {names.get(name, name): s[: len(result.source)] for name, s in result.evidence.signals.items()}
        found |= {**gathered, "probability": -result.suspects().probability}
    return found


def _suspects(result: Result) -> Row:
    """At each requested precision, the probes' estimates (with 95 % intervals) and the true values, in percent."""
    source = result.source
    if result.evidence is None or source.truth is None:
        return {}
    wrong = (source.labels != source.truth).cpu()
    rows = []
    for asked in ASKED:
        found = result.suspects(asked)
        if len(found) == 0:
            continue  # no threshold reaches this precision
        hits = int((found.is_suspect & wrong).sum())
        truth = {
            "precision": hits / len(found),
            "recall": hits / max(int(wrong.sum()), 1),
            "wrong_share": float(wrong.double().mean()),
        }
        estimates = {
            name: {**{k: round(100 * v, 2) for k, v in vars(getattr(found, name)).items()}, "truth": round(100 * t, 2)}
            for name, t in truth.items()
        }
        rows.append({"asked": 100 * asked, "count": len(found), "threshold": round(found.threshold, 4), **estimates})
    return {"suspects": rows}


def detection(source: Examples, trust: Mapping[str, Tensor]) -> Row:
    """AUROC and precision of every signal, and the appendix's curves at 20 sizes of the kept source."""
    assert source.truth is not None
    wrong = source.labels.cpu() != source.truth.cpu()
    if not trust or not bool(wrong.any()):
        return {}
    kept = {name: [round(100 * share, 2) for share in wrong_among_kept(t, wrong)] for name, t in trust.items()}
    return {"detection": compare(trust, wrong), "kept": {"fraction": list(FRACTIONS), **kept}}


run_all = runner.bound(NAME, heading, run_one)


def reproduce(out: Path, *, seeds: int, report: Callable[[str], None]) -> list[Row]:
    """Run every line at every noise, as ``soseleto reproduce cifar10-noise`` does; runs that are saved are skipped."""
    from experiments import figures  # needs matplotlib; the trainings need only torch and numpy

    todo = [configuration(line, noise=n, seed=seed) for seed in range(seeds) for n in NOISE for line in LINES]
    rows = list(run_all(todo, out / f"{NAME}.json", report=report).rows)
    report(f"the appendix's figure is in {figures.effective_noise(rows, out / 'effective-noise.svg')}")
    return rows
