"""Which views a method that learns from views gets: by the kind of inputs, and with what the source is needed for."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from soseleto.data import Augment, ExampleSet, FeatureViews, Preprocess, TablePreparation, TokenViews, Views
from soseleto.data.feeding import Prepare, Standardize
from soseleto.data.text import TextExamples
from soseleto.data.views import AnyViews, UnlabelledViews, has_mask
from soseleto.errors import UsageError
from soseleto.task.task import Method
from soseleto.training.data import Data

Augments = tuple[Augment | AnyViews | None, Augment | AnyViews | None]
KINDS = (Views, TokenViews, FeatureViews)
NEEDED = {
    Views: "views of images are made of uint8 tensors (C, H, W)",
    TokenViews: "views of texts are made of dicts with input_ids and attention_mask",
    FeatureViews: "views of tables are made of rows of numbers (D,)",
}


def usual_views(examples: ExampleSet) -> AnyViews:
    """The views for this kind of inputs."""
    for kind in KINDS:
        if fits(kind, examples):
            return kind()
    raise UsageError(
        f"recipe='strong' takes uint8 images (C, H, W), rows of numbers (D,), and dicts with input_ids and "
        f"attention_mask, got {_shown(examples)}: give one of these, or leave the recipe out."
    )


def fits(kind: type[AnyViews], examples: ExampleSet) -> bool:
    """Whether views of this kind can be made of the examples."""
    inputs, _ = examples.take(torch.tensor([0]))
    if kind is TokenViews:
        return isinstance(examples, TextExamples) or has_mask(inputs)
    if not isinstance(inputs, Tensor):
        return False
    if kind is FeatureViews:
        return inputs.is_floating_point() and inputs.ndim == 2
    return inputs.dtype == torch.uint8 and inputs.ndim == 4


def check_augment(augments: Augments, data: Data, method: Method) -> None:
    """Raise for augmentation that these inputs, or this method, cannot have."""
    for one, examples in zip(augments, (data.source, data.target), strict=True):
        if one is None or one.nothing:
            continue
        if isinstance(one, AnyViews):
            if not fits(type(one), examples):
                raise UsageError(
                    f"{NEEDED[type(one)]}, got {_shown(examples)}: give such inputs, or leave these views out."
                )
            _check_mixing(one, method)
        elif not isinstance(examples.take(torch.tensor([0]))[0], Tensor):
            raise UsageError("augment is for inputs that are one tensor: augment in the Dataset, and leave it out.")


def _check_mixing(views: AnyViews, method: Method) -> None:
    """Raise where a method mixes inputs that cannot be mixed."""
    if isinstance(views, TokenViews) and getattr(method, "mixup", False):
        raise UsageError(
            f"the method {method.name!r} mixes inputs, and token ids cannot be mixed: say Strong(mixup=0.0), or use "
            "FixMatch()."
        )
    if not isinstance(views, Views) and getattr(method, "cutmix", False):
        raise UsageError("cutmix pastes a part of another image, and these are no images: say Strong(cutmix=0.0).")


def completed(augments: Augments, data: Data, standardize: Standardize | bool | None) -> Augments:
    """With what stands for missing values in views of a table."""
    source, target = (
        with_missing(one, data, standardize) if isinstance(one, FeatureViews) and not one.missing else one
        for one in augments
    )
    return source, target


def with_missing(views: FeatureViews, data: Data, standardize: Standardize | bool | None) -> FeatureViews:
    """By the preparation of the table, or by the means of the source."""
    table = standardize if isinstance(standardize, TablePreparation) else data.preparation
    if isinstance(table, TablePreparation):
        missing, columns = table.missing()
        return replace(views, missing=missing, columns=columns)
    missing = Preprocess.of(data.own_source.sample()).mean
    return replace(views, missing=missing, columns=tuple(range(len(missing))))


def with_views(method: Method, views: Augment | AnyViews | None, source: ExampleSet, prepare: Prepare) -> Method:
    """With the views of its inputs without labels, where the method has any."""
    given = getattr(method, "unlabelled", None)
    if not isinstance(given, Tensor) or not isinstance(views, AnyViews):
        return method
    one = source.take(torch.tensor([0]))[0]
    wanted = (one.dtype, one.shape[1:]) if isinstance(one, Tensor) else None
    if (given.dtype, given.shape[1:]) != wanted:
        raise UsageError(
            f"inputs without labels must be like the source's, {_shown(source)}, got {given.dtype} of shape "
            f"{tuple(given.shape[1:])}: give such ones, or leave unlabelled out."
        )
    if not len(given):
        raise UsageError("unlabelled has no inputs: give some, or leave it out.")
    return replace(method, unlabelled=UnlabelledViews(given, views, prepare))  # type: ignore[type-var]


def _shown(examples: ExampleSet) -> str:
    inputs, _ = examples.take(torch.tensor([0]))
    return f"{inputs.dtype} of shape {tuple(inputs.shape[1:])}" if isinstance(inputs, Tensor) else type(inputs).__name__
