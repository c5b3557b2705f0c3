"""All defaults, for ``fit``, the command line, the estimator, ``Selection`` and the trainers: ``resolve`` fills in what
the caller left out, from what the caller knows.

Epochs, batches and optimizers are the constants below (docs/how-to/settings.md has them in words). Views for
``Strong()`` follow the inputs; otherwise nothing is augmented. The method, where none is given:

| task                                | weights move by          | weight step          | target share | labels   |
|-------------------------------------|--------------------------|----------------------|--------------|----------|
| classes, few wrong labels or share  | last layer, beyond noise | 0.9/epochs, <= 0.3   | 0.1          | doubted  |
| not known                           |                          |                      |              |          |
| classes, many wrong labels          | all layers               | 0.3                  | 0.3          | doubted  |
| ... with convolutions               | last layer               | 1.5/epochs, 0.05-0.3 | 0.3          | doubted  |
| ... and too small to memorise       | as few; weights from 0.7 | as few               | 0.3          | doubted  |
| ... pretrained                      | last two blocks          | 2.0                  | 0.3          | doubted  |
| classes, after a first answer, that | as few; weights from the | as few               | 0.3          | doubted  |
| gives the network its head          | beliefs in the labels    |                      |              |          |
| numbers, squared errors             | all layers               | 0.1                  | 0.1          | believed |
| another loss, or a loop that does   | all layers               | 0.1                  | 0            | believed |
| not name its classes                |                          |                      |              |          |
| a loop with features of its         | all layers, as Adam      | expected from        | 0            | believed |
| examples, such as language models   | scales them              | features             |              |          |
| transfer mode                       | all layers               | 0.1                  | 0.5          | believed |

Why: where few labels are wrong, a right but hard example must not lose its weight, so that a weight moves only when an
example's mean alignment exceeds its own noise. Where many are wrong, weights must fall before the network has learned
the wrong labels; a network too small to memorise them needs no haste, and a pretrained one has few epochs. A model that
does not end in a linear layer has no last-layer alignments and uses all layers. A language model passes over its source
once or twice, so that weights must be there before an example's first visit. Measurements of other choices are in
``docs/explanation/alignments.md``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from soseleto.algorithm import Soseleto
from soseleto.data import Augment, ExampleSet, TokenViews, Views
from soseleto.data.augment import AnyViews, has_mask
from soseleto.data.text import TextExamples
from soseleto.errors import UsageError
from soseleto.methods.strong import Strong
from soseleto.models.pretrained import last_blocks
from soseleto.pieces import (
    at_temperature,
    beyond_noise,
    chain,
    from_features,
    hold_when_vanished,
    label_doubt,
    last_layer,
    normalized,
    preconditioned,
    running_mean,
    scale_by_rms,
    target_share,
    unit_length,
    whitened,
    without_own_error,
)
from soseleto.schedules import linear, warmup_cosine
from soseleto.task import optimizers
from soseleto.task.task import MakeOptimizer, MakeSchedule, Method

Inputs = Literal["images", "tokens", "rows", "other"]
Augments = tuple[Augment | AnyViews | None, Augment | AnyViews | None]  # of source and target

EPOCHS, PRETRAINED_EPOCHS, PRETRAINED_IMAGE_EPOCHS = 30, 3, 10
STRONG_EPOCHS = 100  # 95 % on CIFAR-10 with 40 % flipped, where 30 epochs have 92
NUMBERS_LR = 0.01  # squared errors have no bound, and diverged at 0.03
LR, PRETRAINED_LR, PRETRAINED_IMAGE_LR, ADAPTER_LR = 0.03, 3e-5, 1e-4, 1e-4
STRONG_LR, STRONG_WEIGHT_DECAY = 0.1, 5e-4
STRONG_TEXT_LR = 6e-5  # twice the plain rate was better on held-out texts
LARGEST_BATCH, SMALLEST_BATCH, STEPS = 256, 16, 48  # STEPS: per epoch to aim at, where the source is large enough
PRETRAINED_BATCH = 64  # at most, for texts, whose few epochs must have enough steps
TARGET_BATCH, STRONG_TARGET_BATCH = 32, 64
CROP = 12  # an image is shifted by up to 1/12 of its side

WEIGHT_STEP = 0.1  # Soseleto's own
FEW_WAY = 0.9  # how far a weight moves over all epochs; 3 costs accuracy where few labels are wrong
MANY_WEIGHT_STEP, PRETRAINED_WEIGHT_STEP = 0.3, 2.0
CONVOLUTIONAL_WAY, LEAST_STEP = 1.5, 0.05
TARGET_SHARE, MANY_SHARE, TRANSFER_SHARE = 0.1, 0.3, 0.5
MANY = 0.125  # share of wrong labels from which they are many, by the lower end of its interval
MANY_PRETRAINED = 0.04  # the same for a pretrained network, which sees half of people's mistakes beforehand
STANDARD_ERRORS = 2.0  # of an example's mean alignment, before its weight moves
MEMORISES = 10  # parameters per example from which a network can memorise labels; compared with 3 and with 48
LAST_BLOCKS = 2  # of a pretrained network; as good as all layers, and cheaper
DOUBTFUL = 0.7  # first weight where many labels are wrong and the network is too small to memorise them
LAST_LAYER = last_layer(whitened(shrink=1.0), unit_length(), at_temperature(4.0), without_own_error())
SIZED = (scale_by_rms(), hold_when_vanished())
LIBRARIES = ("transformers", "timm", "peft")


@dataclass(frozen=True)
class Balanced:
    """Class-balanced target batches of ``size`` examples: ``fit(..., target_batch_size=Balanced(32))``."""

    size: int


@dataclass(frozen=True, kw_only=True)
class DefaultMethod:
    """The default method with changes; None is the default.

    weight_step: how far a source weight moves per visit
    target_share: of the target's gradient in the network's step
    doubt: doubt labels, see ``pieces.label_doubt``
    all_layers: weights move by the alignments of all layers, which ``engine`` computes

    Example:
        >>> DefaultMethod(weight_step=0.2).for_losses("transfer").gradients
        target_share(share=0.5)
    """

    weight_step: float | None = None
    target_share: float | None = None
    doubt: bool | None = None
    all_layers: bool | None = None
    engine: str = "auto"

    def for_features(self, *, adam: bool) -> Soseleto:
        """For loops in which features of the examples say what to expect of them."""
        if self != DefaultMethod(engine=self.engine):
            raise UsageError(
                "with features DefaultMethod takes the engine alone: write Soseleto(alignment=from_features(), ...) "
                "with the other settings."
            )
        direction = preconditioned() if adam else running_mean()
        return Soseleto(direction=direction, alignment=from_features(), engine=self.engine)

    def for_losses(self, mode: str, *, numbers: bool = False) -> Soseleto:
        """For transfer mode, squared errors, and losses of which nothing but their values is known."""
        share = TRANSFER_SHARE if mode == "transfer" else TARGET_SHARE * numbers
        return self._method(SIZED, WEIGHT_STEP, share, doubt=False, all_layers=True)

    def for_classes(
        self, facts: _Model, *, many_wrong: bool, ends_in_linear: bool, epochs: int, memorises: bool, judged: bool
    ) -> Soseleto:
        convolutional, pretrained = facts.convolutional, facts.pretrained
        judged = judged and pretrained  # by features of this very network
        all_layers = (many_wrong and not convolutional and not judged) or not ends_in_linear or self.engine != "auto"
        patient = not many_wrong or judged or (convolutional and not memorises and not pretrained)
        pieces, step = SIZED, MANY_WEIGHT_STEP
        if patient:
            pieces, step = (*SIZED, beyond_noise(STANDARD_ERRORS)), few_weight_step(epochs)  # type: ignore[assignment]
        elif pretrained:
            step = PRETRAINED_WEIGHT_STEP
        elif convolutional:
            step = convolutional_weight_step(epochs)
        by_blocks = pretrained and not patient and not convolutional and self.all_layers is None
        layers = last_blocks(facts.model, LAST_BLOCKS) if by_blocks and self.engine == "auto" else ()
        share = MANY_SHARE if many_wrong or judged else TARGET_SHARE
        method = self._method(pieces, step, share, doubt=True, all_layers=all_layers, layers=layers)
        if judged or (many_wrong and patient):
            method = replace(method, initial_weight="beliefs" if judged else DOUBTFUL)
        scored = ends_in_linear and not method.alignment.reads_layer
        return replace(method, scores=LAST_LAYER) if scored else method

    def _method(
        self,
        pieces: tuple[Any, ...],
        weight_step: float,
        share: float,
        *,
        doubt: bool,
        all_layers: bool,
        layers: tuple[str, ...] = (),
    ) -> Soseleto:
        share = share if self.target_share is None else self.target_share
        doubt = doubt if self.doubt is None else self.doubt
        all_layers = all_layers if self.all_layers is None else self.all_layers
        return Soseleto(
            weight_step=weight_step if self.weight_step is None else self.weight_step,
            direction=running_mean(layers=layers or None),
            alignment=chain(*pieces) if all_layers else chain(LAST_LAYER, *pieces),
            source_loss=label_doubt() if doubt else normalized(),
            gradients=target_share(share) if share else chain(),
            engine=self.engine,
        )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The complete settings of a training; pairs are (source, target).

    batch_size, target_batch_size: None for a loop that makes its own batches
    reason: what was known about the labels, for the log
    """

    mode: str
    method: Method
    epochs: int
    batch_size: Any
    target_batch_size: Any
    balanced_target: bool
    optimizer: MakeOptimizer
    schedule: MakeSchedule | None
    augment: Augments
    reason: str = ""

    def describe(self) -> dict[str, Any]:
        """The entries of ``config.json``."""
        return {
            "mode": self.mode,
            "method": self.method.name,
            "settings": to_data(self.method),
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "target_batch_size": self.target_batch_size,
            "balanced_target": self.balanced_target,
            **optimizers.describe(self.optimizer),
            "schedule": name_of(self.schedule),
            "augment_source": repr(self.augment[0]),
            "augment_target": repr(self.augment[1]),
        }

    def line(self) -> str:
        """One line for the log: ``at least 20 % of the source labels look wrong: last-layer alignments, ...``."""
        method = self.method
        if not isinstance(method, Soseleto) or method.weight_step is None:
            return ""
        if method.alignment.reads_layer:
            layers = "last-layer alignments"
        else:
            some = getattr(method.direction, "layers", None)
            layers = "alignments of the last blocks" if some else "alignments of all layers"
        step = f"weight step {method.weight_step:g}"
        if isinstance(method.alignment, from_features):
            step = "weights expected from features"
        return f"{self.reason}: " * bool(self.reason) + f"{layers}, {step}"


def name_of(function: Any) -> str | None:
    """The name of a function, as ``config.json`` holds it."""
    return None if function is None else getattr(function, "__qualname__", None) or repr(function)


def to_data(value: Any) -> Any:
    """Settings in the types that JSON has, for ``config.json``.

    A frozen dataclass becomes ``{"name": its class, field: value, ...}``. A function of the user's own is kept by its
    name alone, and a tensor by a digest of its values, which is enough to compare two runs.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [to_data(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_data(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: to_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"name": type(value).__name__, **fields}
    if isinstance(value, Tensor):
        values = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        digest = hashlib.sha256(f"{value.dtype}".encode() + values.tobytes()).hexdigest()
        return {"object": "Tensor", "shape": list(value.shape), "values": digest}
    if callable(value) and hasattr(value, "__qualname__"):
        return {"function": f"{value.__module__}.{value.__qualname__}"}
    return {"object": type(value).__name__}


def resolve(
    model: nn.Module,
    *,
    mode: str = "noisy",
    inputs: Inputs = "other",
    n_source: int | None = None,
    n_target: int | None = None,
    classes: bool = False,
    numbers: bool = False,
    ends_in_linear: bool = False,
    wrong_share: float | None = None,
    judged: bool = False,
    features: bool = False,
    adam: bool = False,
    method: Method | DefaultMethod | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    target_batch_size: int | Balanced | None = None,
    lr: float | None = None,
    optimizer: MakeOptimizer | tuple[MakeOptimizer, MakeSchedule | None] | None = None,
    augment: Augment | AnyViews | Sequence[Augment | AnyViews | None] | None = None,
) -> Settings:
    """The complete settings, from what is known and what was chosen; the table above has the methods.

    What is known:
        model: the user's module; whether it is pretrained, convolutional or large is read off it.
        inputs: see ``kind_of_inputs``.
        n_source, n_target: numbers of examples, without and after planting probes; None leaves the batches to a loop.
        classes: the task is noisy mode with cross-entropy of class labels that the training can see.
        numbers: the task is noisy mode with squared errors.
        ends_in_linear: the model's outputs are those of a linear layer (``training.data.ends_in_linear``).
        wrong_share: lower end of the estimated share of wrong source labels; None if it was not estimated.
        judged: a first answer has beliefs in the source labels.
        features: a loop gives features of its source examples.
        adam: a loop steps with an optimizer that ``preconditioned`` knows.
    What was chosen, None for the default:
        method, epochs, batch_size, target_batch_size, lr, optimizer, augment: as in ``fit``.

    Example:
        >>> settings = resolve(nn.Linear(4, 2), n_source=3000, classes=True, ends_in_linear=True, wrong_share=0.3)
        >>> settings.epochs, settings.batch_size, settings.line()
        (30, 64, 'at least 30 % of the source labels look wrong: alignments of all layers, weight step 0.3')
    """
    if lr is not None and not 0 < lr < math.inf:
        raise UsageError(f"lr must be above 0, got {lr}: 0.03 is usual for SGD, 3e-5 for a pretrained model.")
    if lr is not None and optimizer is not None:
        raise UsageError(
            "lr has no effect beside optimizer=...: give it there, as in functools.partial(torch.optim.SGD, lr=0.1)."
        )
    facts = _Model(model)
    judges = isinstance(method, Strong)  # the strong recipe has settings of its own
    if epochs is None:
        epochs = STRONG_EPOCHS if judges and inputs == "images" and not facts.pretrained else facts.epochs
    elif epochs < 1 or epochs != int(epochs):
        raise UsageError(f"epochs must be a whole number of at least 1, got {epochs!r}: write epochs=20, for example.")
    reason = ""
    if isinstance(method, Strong):
        method = _strong(method, mode, inputs)
    elif method is not None and not isinstance(method, DefaultMethod):
        if not hasattr(method, "init"):
            raise UsageError(f"method must be an object, got {method!r}: write method=soseleto.Soseleto().")
    elif features:
        method = (method or DefaultMethod()).for_features(adam=adam)
    elif not classes:
        method = (method or DefaultMethod()).for_losses(mode, numbers=numbers)
    else:
        reason = "share of wrong labels not known"
        if wrong_share is not None:
            reason = f"at least {100 * wrong_share:.0f} % of the source labels look wrong"
        method = (method or DefaultMethod()).for_classes(
            facts,
            many_wrong=(wrong_share or 0.0) >= (MANY_PRETRAINED if facts.pretrained else MANY),
            ends_in_linear=ends_in_linear,
            epochs=epochs,
            memorises=facts.memorises(n_source),
            judged=judged,
        )
    balanced = isinstance(target_batch_size, Balanced)
    of_target = target_batch_size.size if isinstance(target_batch_size, Balanced) else target_batch_size
    chosen_optimizer, schedule = _optimizer(facts, optimizer, lr, inputs if judges else None, numbers)
    return Settings(
        mode=mode,
        method=method,
        epochs=epochs,
        batch_size=facts.batch_size(n_source) if batch_size is None else batch_size,
        target_batch_size=_target_batch(of_target, n_target, inputs if judges else None),
        balanced_target=balanced,
        optimizer=chosen_optimizer,
        schedule=schedule,
        augment=_augments(augment, method, inputs),
        reason=reason,
    )


# The model


@dataclass(frozen=True)
class _Model:
    """What the defaults depend on in a model."""

    model: nn.Module

    @cached_property
    def pretrained(self) -> bool:
        """A part comes from a library of pretrained models."""
        return any(_library(part) in LIBRARIES for part in self.model.modules())

    @cached_property
    def reads_images(self) -> bool:
        """A part comes from timm, or from transformers with image channels in its configuration."""
        parts = self.model.modules()
        return any(_library(part) == "timm" or hasattr(getattr(part, "config", None), "num_channels") for part in parts)

    @property
    def convolutional(self) -> bool:
        return any(isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d) for part in self.model.modules())

    def memorises(self, n_source: int | None) -> bool:
        """It has parameters enough to memorise the source's labels."""
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        return n_source is None or trained > MEMORISES * n_source

    @property
    def epochs(self) -> int:
        if not self.pretrained:
            return EPOCHS
        return PRETRAINED_IMAGE_EPOCHS if self.reads_images else PRETRAINED_EPOCHS

    @property
    def lr(self) -> float:
        """Small for pretrained texts, since larger rates memorise wrong labels."""
        if not self.pretrained:
            return LR
        if any(_library(part) == "peft" for part in self.model.modules()):
            return ADAPTER_LR
        return PRETRAINED_IMAGE_LR if self.reads_images else PRETRAINED_LR

    def batch_size(self, n_source: int | None) -> int | None:
        if n_source is None:
            return None
        size = batch_size_for(n_source)
        return min(size, PRETRAINED_BATCH) if self.pretrained and not self.reads_images else size


def is_pretrained(model: nn.Module) -> bool:
    """Whether a part of the model comes from a library of pretrained models."""
    return _Model(model).pretrained


def _library(part: nn.Module) -> str:
    return type(part).__module__.partition(".")[0]


def _optimizer(
    facts: _Model, chosen: Any, lr: float | None, judged: Inputs | None, numbers: bool
) -> tuple[MakeOptimizer, MakeSchedule | None]:
    """judged: the inputs of the strong recipe in noisy mode."""
    schedule: MakeSchedule | None = warmup_cosine if facts.pretrained else linear
    if isinstance(chosen, tuple | list):
        chosen, schedule = chosen
    if chosen is not None:
        if not callable(chosen) or not (schedule is None or callable(schedule)):
            raise UsageError(
                "optimizer must be a function that makes one, since transfer mode adds heads, or a pair of it and a "
                "schedule: write optimizer=functools.partial(torch.optim.Adam, lr=1e-3)."
            )
        return chosen, schedule
    usual, more = facts.lr, dict[str, Any]()
    if facts.pretrained:
        usual = STRONG_TEXT_LR if judged == "tokens" and usual == PRETRAINED_LR else usual
    elif numbers:
        usual = NUMBERS_LR
    elif judged == "images":
        usual, more = STRONG_LR, {"weight_decay": STRONG_WEIGHT_DECAY, "nesterov": True}
    make = optimizers.adamw if facts.pretrained else optimizers.sgd
    return partial(make, **{"lr": usual if lr is None else lr, "weight_decay": 0.0, **more}), schedule


# The sizes


def batch_size_for(n: int) -> int:
    """A power of two from 16 to 256 that gives about 48 steps per epoch or more; never above ``n``.

    >>> [batch_size_for(n) for n in (10, 500, 3000, 50_000)]
    [10, 16, 64, 256]
    """
    wanted = max(1, n // STEPS)
    power = 1 << (wanted.bit_length() - 1)
    if wanted >= 1.5 * power:
        power *= 2
    return min(n, max(SMALLEST_BATCH, min(LARGEST_BATCH, power)))


def _target_batch(chosen: Any, n_target: int | None, judged: Inputs | None) -> Any:
    if chosen is not None or n_target is None:
        return chosen
    return min(TARGET_BATCH if judged in (None, "tokens") else STRONG_TARGET_BATCH, n_target)


def few_weight_step(epochs: int) -> float:
    """Step that moves a weight by at most 0.9 over all epochs."""
    return min(FEW_WAY / max(epochs, 1), MANY_WEIGHT_STEP)


def convolutional_weight_step(epochs: int) -> float:
    """Step of a network with convolutions where many labels are wrong."""
    return min(max(CONVOLUTIONAL_WAY / max(epochs, 1), LEAST_STEP), MANY_WEIGHT_STEP)


# The method


def _strong(method: Strong, mode: str, inputs: Inputs) -> Strong:
    """The strong recipe for these inputs; fields that differ from the class's defaults are kept."""
    if mode == "transfer":
        raise UsageError("Strong() is for wrong labels, in noisy mode: leave method out in transfer mode.")
    if inputs != "tokens":
        return method
    # token ids cannot be mixed; the other two were chosen on news
    suited: dict[str, Any] = {"mixup": 0.0, "by_class": 1.0, "target_share": 0.5}
    usual = {f.name for f in fields(method) if getattr(method, f.name) == f.default}
    return replace(method, **{name: value for name, value in suited.items() if name in usual})


# The inputs


def kind_of_inputs(examples: ExampleSet) -> Inputs:
    """uint8 images (C, H, W), token ids with a mask, rows of numbers (D,), or anything else."""
    if isinstance(examples, TextExamples):
        return "tokens"
    inputs, _ = examples.take(torch.tensor([0]))
    if not isinstance(inputs, Tensor):
        return "tokens" if has_mask(inputs) else "other"
    if inputs.dtype == torch.uint8 and inputs.ndim == 4:
        return "images"
    return "rows" if inputs.is_floating_point() and inputs.ndim == 2 else "other"


def views_for(inputs: Inputs) -> AnyViews:
    """The views of ``Strong()``."""
    if inputs == "rows":
        raise UsageError(
            "Strong() is for images and texts, and a table is judged better by its columns: use soseleto.scan, or "
            "leave the method out."
        )
    if inputs == "other":
        raise UsageError(
            "Strong() takes uint8 images (C, H, W), and dicts with input_ids and attention_mask: give one of these, or "
            "another method."
        )
    return Views() if inputs == "images" else TokenViews()


def augment_for(shape: tuple[int, ...], class_names: Sequence[str] | None = None) -> Augment | None:
    """What the command line uses: small shifts of images (C, H, W), mirrored too where they are natural ones.

    Natural images are in colour, of things that have names: a mirrored digit or letter is another sign.
    """
    if len(shape) != 3:
        return None
    signs = class_names is None or any(len(name) < 2 or not any(map(str.isalpha, name)) for name in class_names)
    return Augment(crop=max(1, min(shape[1:]) // CROP), flip=shape[0] == 3 and not signs)


def _augments(chosen: Any, method: Method, inputs: Inputs) -> Augments:
    """As chosen, checked against the method; by default views for a method that takes them, else nothing."""
    takes_views = getattr(method, "takes_views", False)
    if chosen is None and isinstance(method, Strong):
        chosen = views_for(inputs)
    if chosen is None or isinstance(chosen, Augment | AnyViews):
        chosen = (chosen, chosen)
    if not isinstance(chosen, tuple | list) or len(chosen) != 2:
        raise UsageError("augment must be one Augment for both sides, or a pair (source, target): either may be None.")
    if takes_views and not all(isinstance(side, AnyViews) for side in chosen):
        raise UsageError(f"the method {type(method).__name__} needs two views of every image: write augment=Views().")
    if not takes_views and any(isinstance(side, AnyViews) for side in chosen):
        raise UsageError(f"the method {method.name!r} takes one view of an image: write augment=Augment(...).")
    source, target = (None if side == Augment() else side for side in chosen)
    return source, target
