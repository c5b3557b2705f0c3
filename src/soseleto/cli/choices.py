"""What ``soseleto fit`` chooses by the data where an option is left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from soseleto.data import Augment, Examples, FeatureViews, TablePreparation, TokenViews, Views
from soseleto.data.prepare import Preparation
from soseleto.data.views import AnyViews
from soseleto.defaults import kind_of_inputs
from soseleto.defaults import views_for as default_views
from soseleto.errors import UsageError, counted, did_you_mean
from soseleto.methods.strong import Strong
from soseleto.models.by_name import default_name
from soseleto.suspects.probes import Share

FOLDS = 3
FEWEST = 4  # target examples left to train on beside a fold
PROBED_TARGET, PROBED_SOURCE = 34, 50  # the fewest examples that probes can be planted with
AUGMENTS = ("none", "crop", "crop+flip", "bend")
BEND = Augment(rotate=10.0, scale=0.15, shift=0.1, shear=20.0, elastic=0.12)  # for handwriting
DEEP = "preact-resnet18"  # for the strong recipe
PLAIN_TEXTS = "recipe plain, the default; --recipe strong was more accurate on news with many wrong labels"
STRONG_TABLES = "on the table that was measured, plain is better where fewer than 30 % of the labels are wrong"
CROP = 12  # an image is shifted by up to 1/12 of its side


def model_for(
    name: str | None, shape: tuple[int, ...], table: Preparation | None, recipe: str = "plain", mode: str = "noisy"
) -> str:
    """As given; else ``linear`` for texts, ``table`` for other tables, and by the shape for other inputs.

    The strong recipe for images is for networks with BatchNorm that would memorise wrong labels.
    """
    if name is not None:
        return name
    if recipe == "strong" and mode == "noisy" and len(shape) == 3:
        return DEEP
    if not isinstance(table, TablePreparation):
        return default_name(shape)
    return "linear" if table.is_text else "table"


def folds_for(n_target: int) -> int:
    """Three, fewer for a tiny target, 0 for one that cannot be split."""
    return FOLDS if n_target >= 2 * FEWEST else 2 if n_target >= FEWEST else 0


def probes_for(share: float | None, n_source: int, n_target: int) -> Share:
    """The share of the target to plant among the source: as given, else "auto" if there are enough examples."""
    if share is not None:
        return share
    return "auto" if n_target >= PROBED_TARGET and n_source >= PROBED_SOURCE else 0.0


def augment_for(name: str | None, shape: tuple[int, ...], classes: Sequence[str] | None = None) -> Augment | None:
    """As named; else small shifts for images, mirrored too where they are natural ones, and nothing for tables."""
    if name is not None and name not in AUGMENTS:
        raise UsageError(f"unknown augmentation {name!r}{did_you_mean(name, AUGMENTS)}: use {', '.join(AUGMENTS)}.")
    if len(shape) != 3:
        if name not in (None, "none"):
            raise UsageError(f"--augment {name} is for images, and these inputs have shape {shape}: leave it out.")
        return None
    if name == "none":
        return None
    if name == "bend":
        return BEND
    flip = name == "crop+flip" or (name is None and are_natural(shape, classes))
    return Augment(crop=max(1, min(shape[1:]) // CROP), flip=flip)


def views_for(
    name: str | None, source: Examples, classes: Sequence[str] | None = None, mode: str = "noisy"
) -> AnyViews:
    """Of the strong recipe, for this kind of inputs; images are mirrored where ``augment_for`` would mirror."""
    if name in ("none", "bend"):
        images = "write crop or crop+flip, or " if source.inputs.ndim == 4 else ""
        raise UsageError(f"--augment {name} has no effect with --recipe strong: {images}leave it out.")
    found = augment_for(name, tuple(source.inputs.shape[1:]), classes)
    views = default_views(kind_of_inputs(source), mode)
    return views if found is None or not isinstance(views, Views) else replace(views, flip=found.flip)


def unlabelled_batch(inputs: Tensor | None) -> int:
    """How many of the inputs without labels a step takes: none of them twice."""
    return 0 if inputs is None else min(Strong.unlabelled_batch, len(inputs))


def with_unlabelled(method: Strong, inputs: Tensor | None) -> Strong:
    """The method of the strong recipe with inputs without labels, if there are any."""
    if inputs is None:
        return method
    return replace(method, unlabelled=inputs, unlabelled_batch=unlabelled_batch(inputs))


def unlabelled_in_words(inputs: Tensor) -> str:
    """The line of the plan about inputs without labels."""
    count = counted(len(inputs), "unlabelled example")
    return f"{count}, {unlabelled_batch(inputs)} in every step: the teacher's answers stand in for their labels"


def are_natural(shape: tuple[int, ...], classes: Sequence[str] | None) -> bool:
    """Whether images are in colour and of things that have names: a mirrored digit or letter is another sign."""
    signs = classes is None or any(len(name) < 2 or not any(map(str.isalpha, name)) for name in classes)
    return shape[0] == 3 and not signs


def recipe_in_words(views: AnyViews | None, mode: str) -> str:
    """The line of the plan about the recipe; ``views``: of the strong one."""
    if views is not None:
        tables = f"; {STRONG_TABLES}" if isinstance(views, FeatureViews) and mode == "noisy" else ""
        teacher = "judges every label" if mode == "noisy" else "gives answers to learn beside the labels"
        return f"recipe strong, as asked for: a teacher {teacher}, and {_views_in_words(views)}{tables}"
    return "recipe plain, the default; --recipe strong is for networks that memorise and takes longer"


def _views_in_words(views: AnyViews) -> str:
    if isinstance(views, Views):
        return "learning images are strongly augmented"
    what = "tokens" if isinstance(views, TokenViews) else "values"
    return f"{100 * views.drop:g} % of the {what} are dropped in learning"


def augment_in_words(augment: Augment | AnyViews | None, *, chosen: bool) -> str:
    """The line of the plan; ``chosen``: by the data, not by the user."""
    if augment is None or isinstance(augment, TokenViews | FeatureViews):
        return "images are not augmented"
    if augment == BEND:
        return "images are bent at random"
    most = f"{100 * augment.crop:g} %" if isinstance(augment, Views) else f"{augment.crop} pixels"
    words = f"images are shifted by up to {most}" + (" and mirrored at random" if augment.flip else "")
    if isinstance(augment, Views):
        return words
    other = "crop" if augment.flip else "crop+flip"
    return f"{words} (--augment {other} or none to change that)" if chosen else words
