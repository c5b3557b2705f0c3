"""News with wrong labels, a few trusted ones, and MiniLM: SOSELETO and what it is compared with.

NoisyAG-News (10,000 texts, labelled by people) with 100, 200 and 500 trusted texts, and Hausa news titles (5,215,
labelled by rules) with 200 trusted ones. MiniLM is fine-tuned, or a linear classifier is trained on its frozen
embeddings, which a CPU can do. Accuracy is that of the last epoch on the test texts. Settings are chosen with
``select``: part of the texts whose right label is known are held out of the source and evaluated instead.

    python -m experiments noisy_text --methods soseleto mixed --set noise=hausa encoder=frozen --out FILE
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from experiments import cleanlab, encoding, logistic, measures, news
from experiments.experiment import Cell, Experiment, Lines, Root, Run, Sides, fields_of, line
from experiments.results import Row, signal_rows, table, with_count
from experiments.settings import make_method
from experiments.training import accuracies, autocast, drawn, train
from soseleto.data import Examples, Preprocess
from soseleto.data.augment import AnyViews
from soseleto.data.batches import ExampleRandom
from soseleto.data.text import TextExamples, TextPreparation
from soseleto.defaults import (
    LAST_BLOCKS,
    MANY_SHARE,
    MANY_WEIGHT_STEP,
    PRETRAINED_WEIGHT_STEP,
    STRONG_TEXT_LR,
    kind_of_inputs,
    views_for,
)
from soseleto.errors import UsageError, did_you_mean
from soseleto.methods import Signals
from soseleto.models.pretrained import last_blocks, make_text_model
from soseleto.task.optimizers import adamw, sgd
from soseleto.task.task import MakeOptimizer, Method
from soseleto.training.options import Compute, Inputs
from soseleto.training.result import Result

NAME = news.NAME
TRUSTED: Mapping[str, tuple[int, ...]] = {"ag_news": (100, 200, 500), "hausa": (200,)}
ASKED = 0.9  # the precision that suspects are requested at
OPTIMIZERS: Mapping[str, MakeOptimizer] = {"adamw": adamw, "sgd": sgd}


@dataclass(frozen=True, kw_only=True)
class Config(Run):
    """settings: of the method; "last_blocks" is how many of the model's blocks the alignments are taken over
    noise: which news; n_trusted: trusted texts
    encoder: "trained", fine-tuned with a new linear classifier, or "frozen", a linear classifier of its embeddings
    model: the folder of the pretrained model, or its name below ``ROOT/pretrained``; max_tokens: of a text
    probes: the share of the trusted texts, or "auto", that is planted among the source to calibrate suspects
    folds: cleanlab by cross-validation with this many folds; the model is trained on the texts that it keeps
    """

    COLUMN = ("noise", "n_trusted", "encoder")
    FIXED: ClassVar = {"labels_before": True, "precision": "auto"}

    noise: str
    n_trusted: int
    encoder: str
    model: str = "minilm"
    max_tokens: int = 64
    target_batch_size: int = 32
    optimizer: str
    probes: float | str = 0.0
    folds: int = 0


# What differs between the two ways to use the model.
ENCODERS: Mapping[str, Mapping[str, Any]] = {
    "trained": {"epochs": 3, "batch_size": 64, "optimizer": "adamw", "lr": 3e-5, "weight_decay": 0.01,
                "schedule": "warmup_cosine"},
    "frozen": {"epochs": 30, "batch_size": 256, "optimizer": "sgd", "lr": 0.1, "schedule": "linear"},
}  # fmt: skip
USUAL_STEP = "usual"  # the weight step that ``fit`` takes where many labels are wrong
USUAL_STEPS: Mapping[str, float] = {"trained": PRETRAINED_WEIGHT_STEP, "frozen": MANY_WEIGHT_STEP}
# What ``fit`` chooses where it estimates that many labels are wrong.
USUAL: Mapping[str, Any] = {
    "target_share": MANY_SHARE, "doubt_labels": True, "weight_step": USUAL_STEP, "last_layer": True,
}  # fmt: skip
BY_BLOCKS: Mapping[str, Any] = {**USUAL, "last_blocks": LAST_BLOCKS}  # of a model that is fine-tuned
FROZEN_LOW: Mapping[str, Any] = {"weight_step": None, "initial_weight": 0.7}
# Those of the strong recipe for texts, chosen on held-out ones; token ids cannot be mixed.
STRONG: Mapping[str, Any] = {"by_class": 1.0, "target_share": 0.5, "mixup": 0.0}
LINES: Lines = {
    "logistic_noisy": line("logistic regression, noisy alone", logistic.NAME),
    "logistic_mixed": line("logistic regression, mixed", logistic.NAME, {"mixed": True}),
    "logistic_right": line("oracle: logistic regression, all right labels", logistic.NAME, {"right": True}),
    "ordinary": line("ordinary training", "ordinary"),
    "target_only": line("target only", "target_only"),
    "target_only_longer": line("target only, 5 epochs at 1e-4", "target_only"),
    "mixed": line("noisy and trusted mixed", "mixed"),
    "cleanlab": line("cleanlab, trained on what it keeps", "mixed", folds=5),
    "meta_weight_net": line("Meta-Weight-Net", "meta_weight_net"),
    "soseleto": line("**SOSELETO**", "soseleto"),
    "soseleto_usual": line("**SOSELETO, default for many wrong labels**", "soseleto", BY_BLOCKS),
    "soseleto_usual_frozen": line("… weights frozen at 0.7", "soseleto", {**USUAL, **FROZEN_LOW}),
    "soseleto_usual_shuffled": line("… weights shuffled", "shuffled_weights", BY_BLOCKS),
    "soseleto_usual_probes": line("… with probes", "soseleto", BY_BLOCKS, probes="auto"),
    "strong": line("**strong recipe**", "strong", STRONG),
    "strong_frozen": line("… weights frozen", "strong_frozen", STRONG),
    "strong_shuffled": line("… weights shuffled", "strong_shuffled", STRONG),
    "strong_believed": line("… labels believed", "strong", {**STRONG, "labels": "believed"}),
    "strong_ignored": line("… labels ignored", "strong", {**STRONG, "labels": "ignored"}),
    "strong_probes": line("… with probes", "strong", STRONG, probes="auto"),
}
ONLY_FROZEN = ("logistic_noisy", "logistic_mixed", "logistic_right")
ONLY_TRAINED = ("target_only_longer",)
# The target alone profits from more steps where trusted texts are hard, as the Hausa titles are.
LONGER: Mapping[str, Any] = {"epochs": 5, "lr": 1e-4}
FASTER: Mapping[str, Any] = {"lr": STRONG_TEXT_LR}  # of the strong recipe, where a model is trained
SMALL: Mapping[str, Any] = {"n_source": 1500, "n_test": 500, "epochs": 3, "batch_size": 64}


def lines_of(encoder: str) -> list[str]:
    """Logistic regression is on frozen embeddings, and a longer training is one of the model."""
    return [name for name in LINES if name not in (ONLY_FROZEN if encoder == "trained" else ONLY_TRAINED)]


def configuration(
    method: str,
    *,
    noise: str = "ag_news",
    n_trusted: int = 200,
    encoder: str = "trained",
    seed: int = 0,
    small: bool = False,
    **changes: Any,
) -> Config:
    """The run of one line; ``small`` takes a minute on a CPU."""
    for name, value, known in (("noise", noise, TRUSTED), ("encoder", encoder, ENCODERS)):
        if value not in known:
            raise UsageError(f"unknown {name} {value!r}{did_you_mean(value, known)}: choose from {', '.join(known)}.")
    if method in LINES and method not in lines_of(encoder):
        raise UsageError(f"{method} has no line for the encoder {encoder!r}: choose the other one.")
    of_line = LONGER if method in ONLY_TRAINED else FASTER if method.startswith("strong") else {}
    common = {**ENCODERS[encoder], **(of_line if encoder == "trained" else {}), **(SMALL if small else {})}
    fields = fields_of(LINES, method, common, changes)
    settings = dict(fields.pop("settings", {}))
    if settings.get("weight_step") == USUAL_STEP:
        settings["weight_step"] = USUAL_STEPS[encoder]
    if encoder == "frozen":
        settings.pop("last_blocks", None)
    return Config(noise=noise, n_trusted=n_trusted, encoder=encoder, seed=seed, settings=settings, **fields)


def cells(seed: int) -> list[Cell]:
    return [
        (name, {"noise": noise, "n_trusted": n_trusted, "encoder": encoder})
        for encoder in ENCODERS
        for noise, sizes in TRUSTED.items()
        for n_trusted in sizes
        for name in lines_of(encoder)
    ]


@dataclass(frozen=True, kw_only=True)
class Texts(Sides):
    """preparation: of tokens, None for embeddings. No side has ``truth``, so that nothing can train on it."""

    preparation: TextPreparation | None


def data(config: Config, root: Root = None, device: str = "auto") -> Texts:
    """Draw the sides by the seed; they are the same for every line."""
    texts = news.read(config.noise, root)
    sizes = {name: getattr(config, name) for name in ("n_trusted", "n_heldout", "n_source", "seed")}
    trusted, heldout, source = news.split(texts.truth, **sizes)
    encode, prepare = _encoder(config, root, device)
    inputs = encode(texts.texts)
    side = partial(_side, Examples if prepare is None else TextExamples, classes=texts.classes)
    tested = torch.arange(len(texts.test_labels))[: config.n_test]
    return Texts(
        source=side(inputs, texts.labels, source),
        target=side(inputs, texts.truth, trusted),
        heldout=side(inputs, texts.truth, heldout) if config.n_heldout else None,
        test=side(encode(texts.test_texts), texts.test_labels, tested),
        truth=texts.truth[source],
        before=texts.labels[trusted],
        preparation=prepare,
    )


def _encoder(
    config: Config, root: Root, device: str
) -> tuple[Callable[[tuple[str, ...]], Tensor], TextPreparation | None]:
    """From texts to inputs, and what prepares a batch of inputs for the model."""
    folder = encoding.model_folder(config.model, root)
    if config.encoder == "frozen":
        return lambda texts: encoding.embeddings(texts, folder, config.max_tokens, device), None
    prepare = encoding.preparation(folder, config.max_tokens)
    return prepare.tokenizer.encode, prepare


def _side(kind: type[Examples], inputs: Tensor, labels: Tensor, index: Tensor, *, classes: tuple[str, ...]) -> Examples:
    ids = tuple(str(at) for at in index.tolist())
    return kind(inputs[index], labels[index], ids=ids, classes=classes)


def method_of(config: Config, model: nn.Module) -> Method:
    """The method with its settings, for a model whose last blocks they may name by number."""
    settings = dict(config.settings)
    if (blocks := settings.pop("last_blocks", None)) is not None:
        settings["aligned"] = last_blocks(model, blocks) or None
    return make_method(config.base, settings)


def model_of(config: Config, texts: Texts, root: Root = None) -> nn.Module:
    """The linear classifier, behind the pretrained model if that is trained."""
    classes = len(texts.source.classes)
    with drawn(config.seed, f"{NAME}/model"):
        if config.encoder == "frozen":
            return nn.Linear(texts.source.inputs.shape[1], classes)
        return make_text_model(f"hf:{encoding.model_folder(config.model, root)}", "noisy", classes=classes)


def measure(config: Config, texts: Texts, root: Root = None, device: str = "auto") -> Row:
    """Train and evaluate once: accuracy in percent at the last epoch, and detection of wrong labels."""
    if config.base == logistic.NAME:
        return logistic.run(texts, config.settings, config.seed)
    return measured(config, texts, partial(trained, root=root, device=device), NAME)


def measured(config: Any, sides: Any, train_on: Callable[..., Result], name: str) -> Row:
    """A training with what its signals and suspects tell of the labels, or cleanlab's; also of pretrained images.

    train_on: from (config, sides) and signals to record
    """
    labels, truth = sides.source.labels, sides.truth
    if config.folds:
        result, found = cleanlab.cleaned(train_on, config, sides, name)
    else:
        signals = None if config.probes else Signals(len(labels))
        result = train_on(config, sides, signals=signals)
        found = measures.detection(labels, truth, measures.trusts(result, signals))
        if config.probes:
            found["suspects"] = [measures.suspects(result.suspects(ASKED), labels, truth, ASKED)]
    return {**accuracies(config, result, sides), **found, "messages": list(result.messages)}


def trained(config: Config, texts: Texts, root: Root, device: str, signals: Signals | None = None) -> Result:
    """One training by the configuration's method, with its optimizer and schedule."""
    model = model_of(config, texts, root)
    return train(
        config,
        model,
        texts,
        method=method_of(config, model),
        signals=signals,
        optimizer=OPTIMIZERS[config.optimizer],
        inputs=Inputs(augment=_views(config, texts), standardize=texts.preparation),
        compute=Compute(dtype=autocast("auto", device) if config.encoder == "trained" else None),
        device=device,
    )


def _views(config: Config, texts: Texts) -> AnyViews | None:
    """Of the strong recipe."""
    if not config.base.startswith("strong"):
        return None
    kind = kind_of_inputs(texts.source)
    return FeatureViews(missing=Preprocess.of(texts.source.inputs).mean) if kind == "rows" else views_for(kind)


@dataclass(frozen=True)
class FeatureViews(AnyViews):
    """Views of rows of numbers (N, D).

    The weak view is the row itself. In a strong view some values are replaced by the source's mean of that number.

    drop: the probability that a value is dropped
    count: strong views of every row, each with its own draws
    missing: (D,) what stands for a missing value
    """

    drop: float = 0.4
    count: int = 2
    missing: tuple[float, ...] = field(default=(), repr=False)
    made_of, wanted = "rows", "views of rows are made of numbers (D,)"

    def __call__(self, inputs: Tensor, random: ExampleRandom) -> tuple[Tensor, ...]:
        missing = torch.tensor(self.missing, dtype=inputs.dtype, device=inputs.device)
        numbers = random.uniform(self.count * len(self.missing)).view(self.count, -1, len(inputs))
        dropped = (numbers < self.drop).transpose(1, 2)  # (count, N, D)
        return inputs, *(torch.where(mask, missing, inputs) for mask in dropped)


EXPERIMENT = Experiment(NAME, LINES, 5, configuration, cells, data, measure)

NEWS = {"ag_news": "NoisyAG-News", "hausa": "Hausa"}
USED = {"trained": "fine-tuned", "frozen": "frozen"}
# Signals that rank labels: the line, the entry of its row, and the title.
SIGNALS = (
    ("ordinary", "margin", "ordinary training, running margin"),
    ("target_only", "margin", "target only, running margin"),
    ("mixed", "margin", "noisy and trusted mixed, running margin"),
    ("cleanlab", "cleanlab_self_confidence", "cleanlab, self-confidence"),
    ("logistic_right", "right labels", "oracle: logistic regression, right labels of four other fifths"),
    ("soseleto_usual", "weight", "SOSELETO, default for many wrong labels, weight"),
    ("soseleto_usual", "score", "SOSELETO, default for many wrong labels, score"),
    ("soseleto_usual", "margin", "… running margin"),
    ("strong", "weight", "strong recipe, weight"),
    ("soseleto_usual_probes", "probability", "**SOSELETO, default for many wrong labels, calibrated probability**"),
    ("strong_probes", "probability", "**strong recipe, calibrated probability**"),
)
PROBES = {"soseleto_usual_probes": "SOSELETO, default for many wrong labels", "strong_probes": "strong recipe"}
LISTS = {"claimed": "precision, claimed", "truth": "precision, true", "recall": "recall, true"}


def accuracy_table(rows: Sequence[Row], encoder: str) -> str:
    """Accuracy on the test texts in percent."""
    return _table(_tested(rows), {name: title for name, (title, _) in LINES.items()}, (encoder,))


def auroc_table(rows: Sequence[Row]) -> str:
    """100·AUROC of right against wrong labels, by line and signal, with the number of trusted texts that all have."""
    found = [{**row, "method": f"{row['config']['method']} {row['method']}"} for row in signal_rows(_tested(rows))]
    titles = {f"{name} {signal}": title for name, signal, title in SIGNALS}
    return table(found, methods=titles, settings=_columns(tuple(ENCODERS), (200,)), show=with_count(EXPERIMENT.seeds))


def suspects_table(rows: Sequence[Row]) -> str:
    """Suspects at a requested precision of 90 %, and the issues of cleanlab, in percent."""
    found = [
        {**row, "method": f"{row['method']} {name}", "value": value}
        for row in _tested(rows)
        for name, value in suspects(row)
    ]
    lines = {"cleanlab": "cleanlab", **PROBES}
    titles = {f"{name} {rate}": f"{title}: {what}" for name, title in lines.items() for rate, what in LISTS.items()}
    return _table(found, titles)


def suspects(row: Row) -> Iterator[tuple[str, float | None]]:
    """Suspects at a requested precision of 90 %, and the issues of cleanlab, in percent, by their name in ``LISTS``."""
    for listed in row.get("suspects", []):
        yield from {**listed["precision"], "recall": listed["recall"]["truth"]}.items()
    if issues := row.get("issues"):
        yield "truth", issues["precision"]
        yield "recall", issues["recall"]


def _tested(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "accuracy" in row]


def _table(rows: Sequence[Row], titles: Mapping[str, str], encoders: Sequence[str] = tuple(ENCODERS)) -> str:
    return table(rows, methods=titles, settings=_columns(encoders), show=with_count(EXPERIMENT.seeds))


def _columns(encoders: Sequence[str], shown: Sequence[int] | None = None) -> dict[str, dict[str, Any]]:
    """Settings by title; the title names the encoder where there are both."""
    return {
        f"{NEWS[noise]}, {n} trusted{f', {USED[encoder]}' if len(encoders) > 1 else ''}": {
            "noise": noise,
            "n_trusted": n,
            "encoder": encoder,
        }
        for encoder in encoders
        for noise, sizes in TRUSTED.items()
        for n in shown or sizes
    }


TABLES = {
    "fine-tuned": partial(accuracy_table, encoder="trained"),
    "frozen": partial(accuracy_table, encoder="frozen"),
    "auroc": auroc_table,
    "suspects": suspects_table,
}
