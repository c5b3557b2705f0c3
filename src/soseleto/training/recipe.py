"""Recipes: what ``fit(recipe=...)`` sets at once. ``"plain"`` is SOSELETO, ``"strong"`` that of ``methods/strong``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from soseleto.algorithm import Soseleto
from soseleto.data import Augment, Views
from soseleto.errors import UsageError, did_you_mean
from soseleto.methods.strong import Strong
from soseleto.task.task import MakeOptimizer, Method
from soseleto.training.defaults import STRONG_LR, STRONG_TARGET_BATCH, STRONG_WEIGHT_DECAY
from soseleto.training.optimizers import sgd
from soseleto.training.options import as_augments, as_optimizer

Name = Literal["plain", "strong"]
NAMES = ("plain", "strong")
Augments = tuple[Augment | Views | None, Augment | Views | None]


@dataclass(frozen=True)
class Recipe:
    """What a recipe and the arguments given beside it come to.

    target_batch: target examples per step where none are asked for; None for the usual number
    """

    method: Method
    augment: Augments
    optimizer: MakeOptimizer
    target_batch: int | None = None

    @classmethod
    def of(
        cls,
        name: str,
        model: nn.Module,
        *,
        mode: str,
        method: Method | None,
        augment: Augment | Views | tuple[Augment | None, Augment | None] | None,
        optimizer: MakeOptimizer | None,
        lr: float | None,
    ) -> Recipe:
        """Arguments that are None are the recipe's to choose."""
        check_recipe(name, mode)
        augments = as_augments(augment)
        if name == "plain":
            method = Soseleto() if method is None else method
            _require_views(method, augments)
            return cls(method, augments, as_optimizer(optimizer, lr, model))
        if method is not None and not isinstance(method, Strong):
            raise UsageError(
                f"recipe='strong' is a method of its own: leave out method={method.name!r}, or the recipe."
            )
        if augment is not None and not isinstance(augment, Views):
            raise UsageError(
                "recipe='strong' augments by Views: write augment=soseleto.data.Views(...), or leave it out."
            )
        rate = STRONG_LR if lr is None else lr
        own = as_optimizer(optimizer, lr, model) if optimizer else sgd(rate, STRONG_WEIGHT_DECAY, nesterov=True)
        views = augment or Views()
        return cls(method or Strong(), (views, views), own, STRONG_TARGET_BATCH)


def check_recipe(name: str, mode: str) -> None:
    """Raise for an unknown recipe, or one that the mode has not."""
    if name not in NAMES:
        raise UsageError(f"unknown recipe {name!r}{did_you_mean(name, NAMES)}: choose 'plain' or 'strong'.")
    if name == "strong" and mode != "noisy":
        raise UsageError("the strong recipe is for noisy mode, where both sides have the same classes: leave it out.")


def _require_views(method: Method, augments: Augments) -> None:
    """Raise where views are made for a method that takes plain batches, or the other way round."""
    takes_views = getattr(method, "takes_views", False)
    if takes_views and not all(isinstance(one, Views) for one in augments):
        recipe = "recipe='strong' or " if isinstance(method, Strong) else ""
        raise UsageError(
            f"the method {type(method).__name__} needs two views of every image: say {recipe}augment=Views()."
        )
    if not takes_views and any(isinstance(one, Views) for one in augments):
        raise UsageError(f"the method {method.name!r} takes one view of an image: say augment=Augment(...).")
