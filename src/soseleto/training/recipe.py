"""Recipes: what ``fit(recipe=...)`` sets at once. ``"plain"`` is SOSELETO, ``"strong"`` that of ``methods/strong``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from soseleto.algorithm import Soseleto
from soseleto.data import Augment, TokenViews, Views
from soseleto.data.views import AnyViews
from soseleto.errors import UsageError, did_you_mean
from soseleto.methods.strong import Strong, StrongTransfer
from soseleto.task.task import MakeOptimizer, Method
from soseleto.training.data import Data
from soseleto.training.defaults import (
    PRETRAINED_LR,
    STRONG_EPOCHS,
    STRONG_LR,
    STRONG_TARGET_BATCH,
    STRONG_TEXT_LR,
    STRONG_WEIGHT_DECAY,
    TARGET_BATCH,
)
from soseleto.training.optimizers import Adaptive, Momentum, default_optimizer, is_from_library, sgd
from soseleto.training.options import as_augments, as_optimizer
from soseleto.training.usual import Usual
from soseleto.training.views_for import Augments, usual_views

Name = Literal["plain", "strong"]
NAMES = ("plain", "strong")


@dataclass(frozen=True)
class Choice:
    """What a recipe and the arguments given beside it come to.

    target_batch, epochs: target examples per step and passes over the source where none are asked for; None for the
        usual number
    """

    method: Method
    augment: Augments
    optimizer: MakeOptimizer
    target_batch: int | None = None
    epochs: int | None = None


@dataclass(frozen=True)
class Recipe:
    """A recipe and the arguments given beside it, checked; those that are None are the recipe's to choose."""

    name: str
    mode: str
    model: nn.Module
    method: Method | None
    augment: Augments
    optimizer: MakeOptimizer | None
    lr: float | None

    @classmethod
    def of(
        cls,
        name: str,
        model: nn.Module,
        *,
        mode: str,
        method: Method | None,
        augment: Augment | AnyViews | tuple[Augment | None, Augment | None] | None,
        optimizer: MakeOptimizer | None,
        lr: float | None,
    ) -> Recipe:
        check_recipe(name)
        wanted = StrongTransfer if mode == "transfer" else Strong
        augments = as_augments(augment)
        if name == "plain":
            _require_views(method or Soseleto(), augments)
        elif method is not None and not isinstance(method, wanted):
            raise UsageError(
                f"recipe='strong' is a method of its own: leave out method={method.name!r}, or the recipe, or give "
                f"method={wanted.__name__}(...) for {mode} mode."
            )
        elif augment is not None and not isinstance(augment, AnyViews):
            raise UsageError(
                "recipe='strong' augments by Views: write augment=soseleto.data.Views(...), or leave it out."
            )
        return cls(name, mode, model, method, augments, optimizer, lr)

    def choice(self, data: Data | None = None) -> Choice:
        """By the kind of inputs; before the data are read, as for images."""
        if self.name == "plain":
            return Choice(self.method or Soseleto(), self.augment, as_optimizer(self.optimizer, self.lr, self.model))
        views = self.augment[0] or strong_views(Views() if data is None else usual_views(data.source), self.mode)
        if self.mode == "transfer":
            plain = as_optimizer(self.optimizer, self.lr, self.model)
            return Choice(self.method or strong_transfer(Usual()), (views, views), plain)
        return Choice(
            self.method or strong_for(views),
            (views, views),
            as_optimizer(self.optimizer or strong_optimizer(views, self.model, self.lr), self.lr, self.model),
            strong_target_batch(views),
            strong_epochs(views, self.model),
        )


def strong_epochs(views: Augment | AnyViews | None, model: nn.Module) -> int | None:
    """Of the strong recipe in noisy mode; None where it takes as many as the plain one."""
    return STRONG_EPOCHS if isinstance(views, Views) and not is_from_library(model) else None


def strong_for(views: Augment | AnyViews | None) -> Strong:
    """The method of the strong recipe in noisy mode; token ids are not mixed, and the rest was chosen on news."""
    return Strong(mixup=0.0, by_class=1.0, target_share=0.5) if isinstance(views, TokenViews) else Strong()


def strong_transfer(usual: Usual) -> StrongTransfer:
    """The method of the strong recipe in transfer mode, whose weights move by the usual one."""
    return StrongTransfer(selection=usual.method("transfer"))


def strong_optimizer(
    views: Augment | AnyViews | None, model: nn.Module, lr: float | None, weight_decay: float | None = None
) -> Momentum | Adaptive:
    """Of the strong recipe in noisy mode: its own for networks of images, for others that of the plain one.

    A pretrained model of texts has twice the plain rate, which was better on held-out texts.
    """
    if isinstance(views, Views) and not is_from_library(model):
        decay = STRONG_WEIGHT_DECAY if weight_decay is None else weight_decay
        return sgd(STRONG_LR if lr is None else lr, decay, nesterov=True)
    usual = default_optimizer(model, lr, weight_decay or 0.0)
    is_ours = lr is None and isinstance(views, TokenViews) and usual.lr == PRETRAINED_LR
    return replace(usual, lr=STRONG_TEXT_LR) if is_ours else usual


def strong_target_batch(views: Augment | AnyViews | None) -> int:
    """Target examples per step of the strong recipe in noisy mode."""
    return TARGET_BATCH if isinstance(views, TokenViews) else STRONG_TARGET_BATCH


def strong_views(views: AnyViews, mode: str) -> AnyViews:
    """In transfer mode one strong view, since an example has one weight in a step."""
    return replace(views, count=1) if mode == "transfer" else views


def check_recipe(name: str) -> None:
    """Raise for an unknown recipe."""
    if name not in NAMES:
        raise UsageError(f"unknown recipe {name!r}{did_you_mean(str(name), NAMES)}: choose 'plain' or 'strong'.")


def _require_views(method: Method, augments: Augments) -> None:
    """Raise where views are made for a method that takes plain batches, or the other way round."""
    takes_views = getattr(method, "takes_views", False)
    if takes_views and not all(isinstance(one, AnyViews) for one in augments):
        recipe = "recipe='strong' or " if isinstance(method, Strong | StrongTransfer) else ""
        raise UsageError(
            f"the method {type(method).__name__} needs two views of every image: say {recipe}augment=Views()."
        )
    if not takes_views and any(isinstance(one, AnyViews) for one in augments):
        raise UsageError(f"the method {method.name!r} takes one view of an image: say augment=Augment(...).")
