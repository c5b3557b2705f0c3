"""The lines of the experiment, and the complete configuration of one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from experiments.fine_tuning import LOGISTIC
from experiments.lines import Lines, fields_of
from soseleto.defaults import LAST_BLOCKS, MANY_SHARE, MANY_WEIGHT_STEP, PRETRAINED_WEIGHT_STEP, STRONG_TEXT_LR
from soseleto.errors import UsageError, did_you_mean

TRUSTED: Mapping[str, tuple[int, ...]] = MappingProxyType({"ag_news": (100, 200, 500), "hausa": (200,)})
HELD_OUT: Mapping[str, int] = MappingProxyType({"ag_news": 2000, "hausa": 500})
USUAL_STEP = "usual"  # the weight step that ``fit`` takes where many labels are wrong
USUAL_STEPS: Mapping[str, float] = MappingProxyType({"trained": PRETRAINED_WEIGHT_STEP, "frozen": MANY_WEIGHT_STEP})


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run, complete.

    method: the row's name; base, settings: which method that is, and what differs from its defaults; "last_blocks" is
        how many of the model's blocks the alignments are taken over, "views" how many strong views of a text there are
    noise: which news; n_trusted: trusted texts; n_source, n_test: maximum number of texts
    encoder: "trained", fine-tuned with a new linear classifier, or "frozen", a linear classifier of its embeddings
    model: the folder of the pretrained model, or its name below ``ROOT/pretrained``; max_tokens: of a text
    select: evaluate on n_heldout texts that are held out of the source, not on the test texts
    precision: "auto" is bfloat16 for a model that is fine-tuned on a GPU, otherwise float32
    probes: the share of the trusted texts, or "auto", that is planted among the source to calibrate suspects
    labels_before: whether probes get the labels that the trusted texts had before they were checked
    folds: cleanlab by cross-validation with this many folds; the model is trained on the texts that it keeps
    """

    method: str
    base: str
    noise: str
    n_trusted: int
    encoder: str
    seed: int = 0
    settings: tuple[tuple[str, Any], ...] = ()
    select: bool = False
    n_heldout: int = 0
    n_source: int | None = None
    n_test: int | None = None
    model: str = "minilm"
    max_tokens: int = 64
    epochs: int
    batch_size: int
    target_batch_size: int = 32
    optimizer: str
    lr: float
    weight_decay: float = 0.0
    schedule: str
    precision: str = "auto"
    probes: float | str = 0.0
    labels_before: bool = True
    folds: int = 0


# What differs between the two ways to use the model.
ENCODERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "trained": {"epochs": 3, "batch_size": 64, "optimizer": "adamw", "lr": 3e-5, "weight_decay": 0.01,
                    "schedule": "warmup_cosine"},
        "frozen": {"epochs": 30, "batch_size": 256, "optimizer": "sgd", "lr": 0.1, "schedule": "linear"},
    }
)  # fmt: skip
SHARED: tuple[tuple[str, Any], ...] = (("target_share", 0.3),)
DOUBTING: tuple[tuple[str, Any], ...] = (("target_share", 0.2), ("doubt_labels", True))
# What ``fit`` chooses where it estimates that many labels are wrong.
USUAL: tuple[tuple[str, Any], ...] = (
    ("target_share", MANY_SHARE),
    ("doubt_labels", True),
    ("weight_step", USUAL_STEP),
    ("last_layer", True),
)
BY_BLOCKS: tuple[tuple[str, Any], ...] = (*USUAL, ("last_blocks", LAST_BLOCKS))  # of a model that is fine-tuned
# Those of ``fit(recipe="strong")`` for texts, chosen on held-out ones; token ids cannot be mixed.
STRONG: tuple[tuple[str, Any], ...] = (("by_class", 1.0), ("target_share", 0.5), ("mixup", 0.0))
# The lines: title, and what makes each differ from the common configuration.
LINES: Lines = MappingProxyType(
    {
        "logistic_noisy": ("logistic regression, noisy alone", {"base": LOGISTIC}),
        "logistic_mixed": ("logistic regression, mixed", {"base": LOGISTIC, "settings": (("mixed", True),)}),
        "logistic_right": (
            "oracle: logistic regression, all right labels",
            {"base": LOGISTIC, "settings": (("right", True),)},
        ),
        "ordinary": ("ordinary training", {"base": "ordinary"}),
        "target_only": ("target only", {"base": "target_only"}),
        "target_only_longer": ("target only, 5 epochs at 1e-4", {"base": "target_only"}),
        "mixed": ("noisy and trusted mixed", {"base": "mixed"}),
        "cleanlab": ("cleanlab, trained on what it keeps", {"base": "mixed", "folds": 5}),
        "meta_weight_net": ("Meta-Weight-Net", {"base": "meta_weight_net"}),
        "soseleto": ("**SOSELETO**", {"base": "soseleto"}),
        "soseleto_shuffled": ("… weights shuffled", {"base": "shuffled_weights"}),
        "soseleto_probes": ("… with probes", {"base": "soseleto", "probes": "auto"}),
        "soseleto_probes_alone": (
            "… with probes, earlier labels unknown",
            {"base": "soseleto", "probes": "auto", "labels_before": False},
        ),
        "soseleto_shared": ("**SOSELETO, target gradient in θ's step**", {"base": "soseleto", "settings": SHARED}),
        "soseleto_shared_frozen": (
            "… weights frozen",
            {"base": "soseleto", "settings": (*SHARED, ("weight_step", None))},
        ),
        "soseleto_shared_shuffled": ("… weights shuffled", {"base": "shuffled_weights", "settings": SHARED}),
        "soseleto_shared_probes": ("… with probes", {"base": "soseleto", "settings": SHARED, "probes": "auto"}),
        "soseleto_doubting": ("**SOSELETO, labels doubted**", {"base": "soseleto", "settings": DOUBTING}),
        "soseleto_doubting_frozen": (
            "… weights frozen at 0.7",
            {"base": "soseleto", "settings": (*DOUBTING, ("weight_step", None), ("initial_weight", 0.7))},
        ),
        "soseleto_doubting_probes": ("… with probes", {"base": "soseleto", "settings": DOUBTING, "probes": "auto"}),
        "soseleto_usual": ("**SOSELETO, default for many wrong labels**", {"base": "soseleto", "settings": BY_BLOCKS}),
        "soseleto_usual_frozen": (
            "… weights frozen at 0.7",
            {"base": "soseleto", "settings": (*USUAL, ("weight_step", None), ("initial_weight", 0.7))},
        ),
        "soseleto_usual_shuffled": ("… weights shuffled", {"base": "shuffled_weights", "settings": BY_BLOCKS}),
        "soseleto_usual_probes": ("… with probes", {"base": "soseleto", "settings": BY_BLOCKS, "probes": "auto"}),
        "strong": ("**strong recipe**", {"base": "strong", "settings": STRONG}),
        "strong_frozen": ("… weights frozen", {"base": "strong_frozen", "settings": STRONG}),
        "strong_shuffled": ("… weights shuffled", {"base": "strong_shuffled", "settings": STRONG}),
        "strong_believed": ("… labels believed", {"base": "strong", "settings": (*STRONG, ("labels", "believed"))}),
        "strong_ignored": ("… labels ignored", {"base": "strong", "settings": (*STRONG, ("labels", "ignored"))}),
        "strong_one_view": ("… one strong view", {"base": "strong", "settings": (*STRONG, ("views", 1))}),
        "strong_probes": ("… with probes", {"base": "strong", "settings": STRONG, "probes": "auto"}),
    }
)  # fmt: skip
# The target alone profits from more steps where trusted texts are hard, as the Hausa titles are.
LONGER: Mapping[str, Any] = MappingProxyType({"epochs": 5, "lr": 1e-4})
FASTER: Mapping[str, Any] = MappingProxyType({"lr": STRONG_TEXT_LR})  # of the strong recipe, where a model is trained
SMALL: Mapping[str, Any] = MappingProxyType({"n_source": 1500, "n_test": 500, "epochs": 3, "batch_size": 64})


def lines_of(encoder: str) -> list[str]:
    """Logistic regression is on frozen embeddings, and a longer training is one of the model."""
    of_frozen = {line for line, (_, fields) in LINES.items() if fields["base"] == LOGISTIC}
    return [line for line in LINES if line not in (of_frozen if encoder == "trained" else ("target_only_longer",))]


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
    """The complete configuration of one line; ``small`` takes a minute on a CPU."""
    for name, value, known in (("noise", noise, TRUSTED), ("encoder", encoder, ENCODERS)):
        if value not in known:
            raise UsageError(f"unknown {name} {value!r}{did_you_mean(value, known)}: choose from {', '.join(known)}.")
    if changes.get("select"):
        changes["n_heldout"] = changes.get("n_heldout") or HELD_OUT[noise]
    elif changes.get("n_heldout"):
        raise UsageError(f"n_heldout is {changes['n_heldout']}, but nothing is held out: add --held-out.")
    common = {**ENCODERS[encoder], **_of_line(method, encoder), **(SMALL if small else {})}
    fields = fields_of(LINES, method, common, changes)
    if method not in lines_of(encoder) and method in LINES:
        other = next(one for one in ENCODERS if one != encoder)
        raise UsageError(f"{method} has no line for the encoder {encoder!r}: choose the encoder {other!r}.")
    step = USUAL_STEPS[encoder]
    settings = tuple(
        (name, step if value == USUAL_STEP else value)
        for name, value in fields.pop("settings", ())
        if name != "last_blocks" or encoder == "trained"
    )
    return Config(noise=noise, n_trusted=n_trusted, encoder=encoder, seed=seed, settings=settings, **fields)


def _of_line(method: str, encoder: str) -> Mapping[str, Any]:
    """What a line has in place of what the encoder's lines have."""
    if method == "target_only_longer":
        return LONGER
    return FASTER if method.startswith("strong") and encoder == "trained" else {}
