"""CIFAR-10N's worst human labels, 1,000 trusted images, and EfficientNet-lite0 with its weights from ImageNet.

The sides are those of ``cifar10_deep``: 1,000 training images are trusted, and the others are the source, with the
label set ``worse_label``. Images stay on the device as bytes of 32x32 pixels; each batch is cropped and flipped there,
and the network resizes it to ``size`` pixels a side. Everything is fine-tuned for 10 epochs but the statistics of
BatchNorm, which stay those of ImageNet: then no loss depends on the other images of a batch, and alignments are exact
at the price of a layerwise pass. Accuracy is that of the last epoch on the 10,000 test images. Settings are chosen with
``select``: 5,000 source images with their true labels are put aside and evaluated instead.

    python -m experiments.pretrained_images --methods soseleto mixed --seeds 0 1 --out FILE
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from experiments import fine_tuning, runner
from experiments.cifar10_deep import experiment as deep
from experiments.cifar10_deep.experiment import Data
from experiments.fine_tuning import LOGISTIC
from experiments.flat_settings import soseleto
from experiments.lines import Lines, fields_of
from experiments.methods import by_name
from experiments.pretrained_images.network import pretrained_network, weights_file
from experiments.results import Row
from experiments.shuffled_weights import ShuffledWeights
from soseleto.algorithm import Soseleto
from soseleto.data import Augment, Examples, Preprocess, seed_for
from soseleto.defaults import MANY_SHARE, PRETRAINED_WEIGHT_STEP, STANDARD_ERRORS, TARGET_SHARE, few_weight_step
from soseleto.errors import UsageError
from soseleto.methods import Recording, Signals
from soseleto.models.pretrained_images import BATCH_NORM, ImageNetwork
from soseleto.parallel.reducer import choose_device
from soseleto.schedules import SCHEDULES
from soseleto.task.optimizers import adamw
from soseleto.task.task import Method
from soseleto.training.options import Compute, Inputs, Probes
from soseleto.training.result import Result

NAME = "pretrained-images"
NOISE, FEW_WRONG = "worse_label", "aggre_label"  # 40 and 9 % wrong
CLASSES = 10
HELD_OUT = 5000
EPOCHS = 10
TOGETHER = 500  # images a pass


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run, complete.

    method: the row's name; base, settings: which method that is, and what differs from its defaults
    noise: which label set of CIFAR-10N the source has
    select: evaluate on n_heldout source images that are put aside, not on the test set, for choosing settings
    n_trusted: trusted images; n_source, n_test: maximum number of images
    model: the folder of the pretrained network, or its name below ``ROOT/pretrained``
    size: pixels a side at which the network runs; crop: pixels of 32 by which images are shifted at most
    batch_norm: "fixed" keeps the statistics of ImageNet; "train" takes each batch's
    precision: "auto" is bfloat16 on a GPU, otherwise float32; cuda_graph: replay recorded steps on a GPU
    probes: the share of the trusted images, or "auto", that is planted among the source to calibrate suspects
    folds: cleanlab by cross-validation with this many folds; the network is trained on the images that it keeps
    """

    method: str
    base: str
    noise: str = NOISE
    seed: int = 0
    settings: tuple[tuple[str, Any], ...] = ()
    select: bool = False
    n_heldout: int = 0
    n_trusted: int = 1000
    n_source: int | None = None
    n_test: int | None = None
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
        if self.batch_norm not in BATCH_NORM:
            raise UsageError(f"batch_norm must be {' or '.join(BATCH_NORM)}, got {self.batch_norm!r}.")
        if self.size < 32:
            raise UsageError(f"size must be at least 32 pixels, got {self.size}.")
        if self.noise not in deep.HUMAN:
            raise UsageError(f"noise must be one of {', '.join(deep.HUMAN)}, got {self.noise!r}.")


# What ``fit`` chooses for this network: many labels are wrong, and it has convolutions. Where few are, it is FEW.
USUAL: tuple[tuple[str, Any], ...] = (
    ("target_share", MANY_SHARE),
    ("doubt_labels", True),
    ("by_last_layer", True),
    ("weight_step", PRETRAINED_WEIGHT_STEP),
)
FEW: tuple[tuple[str, Any], ...] = (
    ("target_share", TARGET_SHARE),
    ("doubt_labels", True),
    ("by_last_layer", True),
    ("weight_step", few_weight_step(EPOCHS)),
    ("beyond_noise", STANDARD_ERRORS),
)
# The lines: title, and what makes each differ from the common configuration.
LINES: Lines = MappingProxyType(
    {
        "logistic_noisy": ("logistic regression on its features, noisy alone", {"base": LOGISTIC}),
        "logistic_mixed": (
            "logistic regression on its features, mixed",
            {"base": LOGISTIC, "settings": (("mixed", True),)},
        ),
        "ordinary": ("ordinary fine-tuning", {"base": "ordinary"}),
        "target_only": ("target only", {"base": "target_only"}),
        "mixed": ("noisy and trusted mixed", {"base": "mixed"}),
        "cleanlab": ("cleanlab, trained on what it keeps", {"base": "mixed", "folds": 4}),
        "meta_weight_net": ("Meta-Weight-Net", {"base": "meta_weight_net"}),
        "soseleto": ("**SOSELETO**", {"base": "soseleto"}),
        "soseleto_shuffled": ("… weights shuffled", {"base": "shuffled_weights"}),
        "soseleto_probes": ("… with probes", {"base": "soseleto", "probes": "auto"}),
        "soseleto_usual": ("**SOSELETO, what `fit` uses**", {"base": "soseleto", "settings": USUAL}),
        "soseleto_usual_frozen": (
            "… weights frozen at 0.7",
            {"base": "soseleto", "settings": (*USUAL, ("weight_step", None), ("initial_weight", 0.7))},
        ),
        "soseleto_usual_shuffled": ("… weights shuffled", {"base": "shuffled_weights", "settings": USUAL}),
        "soseleto_usual_probes": ("… with probes", {"base": "soseleto", "settings": USUAL, "probes": "auto"}),
        "soseleto_few": ("**SOSELETO, settings for few wrong labels**", {"base": "soseleto", "settings": FEW}),
    }
)
WHERE_FEW = ("ordinary", "mixed", "soseleto_usual", "soseleto_few")
SMALL: Mapping[str, Any] = MappingProxyType(
    {"n_source": 1000, "n_trusted": 100, "n_test": 500, "size": 32, "crop": 2, "epochs": 2, "batch_size": 64}
)


def configuration(method: str, *, seed: int = 0, small: bool = False, **changes: Any) -> Config:
    """The complete configuration of one line; ``small`` takes a minute or two on a CPU."""
    if changes.get("select"):
        changes["n_heldout"] = changes.get("n_heldout") or HELD_OUT
    elif changes.get("n_heldout"):
        raise UsageError(f"n_heldout is {changes['n_heldout']}, but nothing is held out: add --held-out.")
    return Config(seed=seed, **fields_of(LINES, method, SMALL if small else {}, changes))


def prepare_data(config: Config, root: str | Path | None = None) -> Data:
    """Drawn by the seed, the same for every line, and the same as in ``cifar10_deep``."""
    names = ("noise", "seed", "select", "n_heldout", "n_trusted", "n_source", "n_test")
    return deep.prepare_data(deep.configuration("mixed", **{name: getattr(config, name) for name in names}), root)


def make_method(config: Config) -> Method:
    """The method with its settings."""
    settings = dict(config.settings)
    if config.base in (Soseleto.name, ShuffledWeights.name):
        return soseleto(ShuffledWeights if config.base == ShuffledWeights.name else Soseleto, **settings)
    method: Any = by_name(config.base)
    return replace(method, **settings) if settings else method


def make_model(config: Config, root: str | Path | None, device: str) -> nn.Module:
    """The network, its new classifier drawn by the seed; channels last on a GPU, which is faster."""
    file = weights_file(config.model, root)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(config.seed, f"{NAME}/model"))
        model = pretrained_network(file, classes=CLASSES, size=config.size, batch_norm=config.batch_norm)
    if choose_device(device).type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def heading(config: Config) -> Row:
    """The entries of a row that are known before the run; the folder of the network is not one of them."""
    plain = {**dataclasses.asdict(config), "settings": dict(config.settings), "model": Path(config.model).name}
    setting = {"noise": config.noise, "size": config.size, "n_trusted": config.n_trusted}
    return {"method": config.method, "setting": setting, "seed": config.seed, "config": plain}


def run_one(config: Config, root: str | Path | None = None, device: str = "auto") -> Row:
    """Train and evaluate once: accuracy in percent at the last epoch, seconds, and detection of wrong labels."""
    data = prepare_data(config, root)
    begin = time.perf_counter()
    if config.base == LOGISTIC:
        found = _logistic(config, data, root, device)
    else:
        found = _cleaned(config, data, root, device) if config.folds else _trained(config, data, root, device)
    name = "heldout_accuracy" if config.select else "accuracy"
    return {**heading(config), name: found.pop("accuracy"), "seconds": time.perf_counter() - begin, **found}


def _trained(config: Config, data: Data, root: str | Path | None, device: str) -> Row:
    def once(signals: Signals | None) -> Result:
        return train(config, data, root, device, signals)

    return fine_tuning.trained(once, data.source, _truth(data), data.evaluated, probes=bool(config.probes))


def _cleaned(config: Config, data: Data, root: str | Path | None, device: str) -> Row:
    def on_part(source: Examples, **changes: Any) -> Result:
        return train(replace(config, **changes), replace(data, source=source), root, device)

    of_run = {"epochs": config.epochs, "folds": config.folds, "seed": config.seed}
    return fine_tuning.cleaned(on_part, data.source, _truth(data), data.evaluated, **of_run, name=NAME)


def _logistic(config: Config, data: Data, root: str | Path | None, device: str) -> Row:
    source, trusted, evaluated = (
        replace(side, inputs=features(config, side.inputs, root, device))
        for side in (data.source, data.trusted, data.evaluated)
    )
    return fine_tuning.logistic([source, trusted] if dict(config.settings).get("mixed") else [source], evaluated)


def features(config: Config, images: Tensor, root: str | Path | None, device: str) -> Tensor:
    """(N, F) of the network as ImageNet left it, on the CPU; images are neither moved nor flipped."""
    model, at = make_model(config, root, device), choose_device(device)
    assert isinstance(model, ImageNetwork)
    model.network._fc = nn.Identity()
    model.eval().to(at)
    with torch.no_grad():
        return torch.cat([model(some.to(at) / 255.0).cpu() for some in images.split(TOGETHER)])


def _truth(data: Data) -> Tensor:
    assert data.source.truth is not None
    return data.source.truth


def train(config: Config, data: Data, root: str | Path | None, device: str, signals: Signals | None = None) -> Result:
    """One fine-tuning by the configuration's method."""
    from soseleto.training.fit import fit

    method = make_method(config)
    return fit(
        make_model(config, root, device),
        data.source,
        data.trusted,
        mode="noisy",
        epochs=config.epochs,
        batch_size=min(config.batch_size, len(data.source)),  # cleanlab may keep few
        target_batch_size=min(config.target_batch_size, config.n_trusted),
        optimizer=(partial(adamw, lr=config.lr, weight_decay=config.weight_decay), SCHEDULES[config.schedule]),
        method=method if signals is None else Recording(method, signals),
        # values from 0 to 1; the network normalises them itself
        inputs=Inputs(augment=Augment(crop=config.crop, flip=True), standardize=Preprocess((0.0,) * 3, (1.0,) * 3)),
        probes=Probes(share=config.probes, labels_before=data.before) if config.probes else None,  # type: ignore[arg-type]
        compute=Compute(dtype=_autocast(config, device), cuda_graph=config.cuda_graph),
        seed=config.seed,
        device=device,
    )


def _autocast(config: Config, device: str) -> torch.dtype | None:
    if config.precision != "auto":
        return None if config.precision == "float32" else getattr(torch, config.precision)
    return torch.bfloat16 if choose_device(device).type == "cuda" else None


run_all = runner.bound(NAME, heading, run_one)


def reproduce(out: Path, *, seeds: int, report: Callable[[str], None]) -> list[Row]:
    """Every line, and some where few labels are wrong; runs that are saved are skipped."""
    many = [(NOISE, line) for line in LINES if line != "soseleto_few"]
    todo = [
        configuration(line, noise=noise, seed=seed)
        for seed in range(seeds)
        for noise, line in (*many, *((FEW_WRONG, line) for line in WHERE_FEW))
    ]
    return list(run_all(todo, out / f"{NAME}.json", report=report).rows)
