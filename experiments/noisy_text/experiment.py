"""News with wrong labels, a few trusted ones, and MiniLM: SOSELETO and what it is compared with.

NoisyAG-News (10,000 texts, labelled by people) with 100, 200 and 500 trusted texts, and Hausa news titles (5,215,
labelled by rules) with 200 trusted ones. MiniLM is fine-tuned, or a linear classifier is trained on its frozen
embeddings, which a CPU can do. Accuracy is that of the last epoch on the test texts. Settings are chosen with
``select``: part of the texts whose right label is known are held out of the source and evaluated instead.

    python -m experiments.noisy_text --methods soseleto mixed --noise hausa --encoder frozen --out FILE
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
from experiments.flat_settings import soseleto
from experiments.methods import by_name
from experiments.noisy_text import data as texts
from experiments.noisy_text import encoding
from experiments.noisy_text.configuration import ENCODERS, TRUSTED, Config, configuration, lines_of
from experiments.noisy_text.data import NAME
from experiments.results import Row
from experiments.shuffled_weights import ShuffledWeights
from experiments.strong_controls import FrozenStrong, ShuffledStrong
from soseleto.algorithm import Soseleto
from soseleto.data import Examples, seed_for
from soseleto.data.text import TextExamples, TextPreparation
from soseleto.data.views import AnyViews
from soseleto.defaults import kind_of_inputs, views_for
from soseleto.methods import Recording, Signals, Strong
from soseleto.models.pretrained_images import last_blocks
from soseleto.models.pretrained_text import make_text_model
from soseleto.parallel.reducer import choose_device
from soseleto.schedules import SCHEDULES
from soseleto.task.optimizers import adamw, sgd
from soseleto.task.task import MakeOptimizer, Method
from soseleto.training.options import Compute, Inputs, Probes
from soseleto.training.result import Result

ORACLE_FOLDS = 5
VIEWS = "views"  # a setting that is not the method's
STRONG: Mapping[str, type[Strong]] = MappingProxyType({m.name: m for m in (Strong, FrozenStrong, ShuffledStrong)})
OPTIMIZERS: Mapping[str, Callable[[float, float], MakeOptimizer]] = MappingProxyType({"adamw": adamw, "sgd": sgd})


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data of one run.

    source: with the labels as given; truth: (n,) the right ones, -1 where unknown, for measuring alone
    before: the labels that the trusted texts had before they were checked
    evaluated: test texts, or those held out; preparation: of tokens, None for embeddings
    """

    source: Examples
    trusted: Examples
    evaluated: Examples
    truth: Tensor
    before: Tensor
    preparation: TextPreparation | None


def prepare_data(config: Config, root: str | Path | None = None, device: str = "auto") -> Data:
    """Draw the sides by the seed; they are the same for every line."""
    news = texts.read(config.noise, root)
    sides = texts.split(
        news.truth,
        n_trusted=config.n_trusted,
        n_heldout=config.n_heldout,
        n_source=config.n_source,
        seed=config.seed,
    )
    encode, prepare = _encoder(config, root, device)
    inputs = encode(news.texts)
    kind = Examples if prepare is None else TextExamples
    labelled, right = (partial(_side, kind, inputs, labels, news.classes) for labels in (news.labels, news.truth))
    if config.select:
        evaluated = right(sides.heldout)
    else:
        tested = torch.arange(len(news.test_labels))[: config.n_test]
        evaluated = _side(kind, encode(news.test_texts), news.test_labels, news.classes, tested)
    return Data(
        source=labelled(sides.source),
        trusted=right(sides.trusted),
        evaluated=evaluated,
        truth=news.truth[sides.source],
        before=news.labels[sides.trusted],
        preparation=prepare,
    )


def _encoder(
    config: Config, root: str | Path | None, device: str
) -> tuple[Callable[[tuple[str, ...]], Tensor], TextPreparation | None]:
    """From texts to inputs, and what prepares a batch of inputs for the model."""
    folder = encoding.model_folder(config.model, root)
    if config.encoder == "frozen":
        return lambda some: encoding.embeddings(some, folder, config.max_tokens, device), None
    prepare = encoding.preparation(folder, config.max_tokens)
    return prepare.tokens, prepare


def _side(kind: type[Examples], inputs: Tensor, labels: Tensor, classes: tuple[str, ...], index: Tensor) -> Examples:
    ids = tuple(str(at) for at in index.tolist())
    return kind(inputs[index], labels[index], ids=ids, classes=classes)


def make_method(config: Config, model: nn.Module) -> Method:
    """The method with its settings, for a model whose last blocks they may name by number."""
    settings = {name: value for name, value in config.settings if name != VIEWS}
    if (blocks := settings.pop("last_blocks", None)) is not None:
        settings["aligned"] = last_blocks(model, blocks) or None
    if config.base in (Soseleto.name, ShuffledWeights.name):
        return soseleto(ShuffledWeights if config.base == ShuffledWeights.name else Soseleto, **settings)
    method: Any = STRONG[config.base]() if config.base in STRONG else by_name(config.base)
    return replace(method, **settings) if settings else method


def make_model(config: Config, data: Data, root: str | Path | None = None) -> nn.Module:
    """The linear classifier, behind the pretrained model if that is trained; its first values follow the seed."""
    assert data.source.classes is not None
    classes = len(data.source.classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(config.seed, f"{NAME}/model"))
        if config.encoder == "frozen":
            assert isinstance(data.source.inputs, Tensor)
            return nn.Linear(data.source.inputs.shape[1], classes)
        return make_text_model(f"hf:{encoding.model_folder(config.model, root)}", "noisy", classes=classes)


def heading(config: Config) -> Row:
    """The entries of a row that are known before the run; the folder of the model is not one of them."""
    plain = {**dataclasses.asdict(config), "settings": dict(config.settings), "model": Path(config.model).name}
    setting = {"noise": config.noise, "n_trusted": config.n_trusted, "encoder": config.encoder}
    return {"method": config.method, "setting": setting, "seed": config.seed, "config": plain}


def run_one(config: Config, root: str | Path | None = None, device: str = "auto") -> Row:
    """Train and evaluate once: accuracy in percent at the last epoch, seconds, and detection of wrong labels."""
    data = prepare_data(config, root, device)
    begin = time.perf_counter()
    if config.base == fine_tuning.LOGISTIC:
        found = _logistic(config, data)
    elif config.folds:
        found = _cleaned(config, data, root, device)
    else:
        found = _trained(config, data, root, device)
    name = "heldout_accuracy" if config.select else "accuracy"
    return {**heading(config), name: found.pop("accuracy"), "seconds": time.perf_counter() - begin, **found}


def _trained(config: Config, data: Data, root: str | Path | None, device: str) -> Row:
    def once(signals: Signals | None) -> Result:
        return train(config, data, root, device, signals)

    return fine_tuning.trained(once, data.source, data.truth, data.evaluated, probes=bool(config.probes))


def _cleaned(config: Config, data: Data, root: str | Path | None, device: str) -> Row:
    def on_part(source: Examples, **changes: Any) -> Result:
        return train(replace(config, **changes), replace(data, source=source), root, device)

    of_run = {"epochs": config.epochs, "folds": config.folds, "seed": config.seed}
    return fine_tuning.cleaned(on_part, data.source, data.truth, data.evaluated, **of_run, name=NAME)


def _logistic(config: Config, data: Data) -> Row:
    settings, sides = dict(config.settings), (data.source, data.trusted)
    if settings.get("right"):
        return fine_tuning.logistic_on_right_labels(
            data.source, data.truth, data.trusted, data.evaluated, folds=ORACLE_FOLDS, seed=config.seed
        )
    return fine_tuning.logistic(sides if settings.get("mixed") else sides[:1], data.evaluated)


def train(config: Config, data: Data, root: str | Path | None, device: str, signals: Signals | None = None) -> Result:
    """One training by the configuration's method, with its optimizer and schedule."""
    from soseleto.training.fit import fit

    model = make_model(config, data, root)
    method = make_method(config, model)
    before = data.before if config.labels_before else None
    return fit(
        model,
        data.source,
        data.trusted,
        mode="noisy",
        epochs=config.epochs,
        batch_size=min(config.batch_size, len(data.source)),  # cleanlab may keep few
        target_batch_size=min(config.target_batch_size, config.n_trusted),
        optimizer=(
            partial(OPTIMIZERS[config.optimizer], lr=config.lr, weight_decay=config.weight_decay),
            SCHEDULES[config.schedule],
        ),
        method=method if signals is None else Recording(method, signals),
        inputs=Inputs(augment=_views(config, data), standardize=data.preparation),
        probes=Probes(share=config.probes, labels_before=before) if config.probes else None,  # type: ignore[arg-type]
        compute=Compute(dtype=_autocast(config, device)),
        seed=config.seed,
        device=device,
    )


def _views(config: Config, data: Data) -> AnyViews | None:
    """Of the strong recipe, as many as usual or as the line says."""
    if config.base not in STRONG:
        return None
    views = views_for(kind_of_inputs(data.source))
    return replace(views, count=dict(config.settings).get(VIEWS, views.count))


def _autocast(config: Config, device: str) -> torch.dtype | None:
    if config.precision != "auto":
        return None if config.precision == "float32" else getattr(torch, config.precision)
    return torch.bfloat16 if config.encoder == "trained" and choose_device(device).type == "cuda" else None


run_all = runner.bound(NAME, heading, run_one)


def reproduce(out: Path, *, seeds: int, report: Callable[[str], None]) -> list[Row]:
    """Every line of every setting, as ``soseleto reproduce noisy-text`` does; runs that are saved are skipped."""
    todo = [
        configuration(line, noise=noise, n_trusted=n_trusted, encoder=encoder, seed=seed)
        for seed in range(seeds)
        for encoder in ENCODERS
        for noise, sizes in TRUSTED.items()
        for n_trusted in sizes
        for line in lines_of(encoder)
    ]
    return list(run_all(todo, out / f"{NAME}.json", report=report).rows)
