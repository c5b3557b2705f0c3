"""AdamW, warm-up and cosine, and which optimizer a model gets by default."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import soseleto
from soseleto.data import FeatureViews, TokenViews, Views
from soseleto.errors import UsageError
from soseleto.training.optimizers import (
    default_batch_size,
    default_epochs,
    default_optimizer,
    default_schedule,
    linear,
    warmup_cosine,
)
from soseleto.training.recipe import strong_optimizer, strong_target_batch


def pretrained() -> nn.Module:
    """A model with a part whose class comes from a library of pretrained models."""
    part = type("Block", (nn.Linear,), {"__module__": "transformers.models.block"})
    return nn.Sequential(part(3, 4), nn.Linear(4, 2))


def test_the_rate_rises_and_falls_along_a_cosine() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = warmup_cosine(optimizer, 40)
    rates = []
    for _ in range(40):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert rates[4:] == pytest.approx([1.0 + math.cos(math.pi * step / 36) for step in range(36)])


def test_weight_decay_acts_on_matrices_alone() -> None:
    model = nn.Linear(3, 2)
    optimizer = soseleto.adamw(0.1, weight_decay=0.5)(model.parameters())
    decayed = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decayed == {model.weight: 0.5, model.bias: 0.0}
    for make in (soseleto.sgd, soseleto.adamw):
        with pytest.raises(UsageError, match=r"weight_decay must be 0 or more, got -1.0: 0.0005 is usual"):
            make(0.1, -1.0)
    with pytest.raises(UsageError, match="lr must be above 0, got 0"):
        soseleto.adamw(0)


def test_models_of_libraries_get_adamw() -> None:
    own, library = nn.Linear(3, 2), pretrained()
    assert default_optimizer(own, None) == soseleto.sgd(0.03)
    assert default_optimizer(library, None) == soseleto.adamw(3e-5)
    assert default_optimizer(pretrained_on_images("timm"), None) == soseleto.adamw(1e-4)
    assert default_optimizer(library, 0.5, 0.1) == soseleto.adamw(0.5, 0.1)
    assert (default_schedule(own), default_schedule(library)) == (linear, warmup_cosine)


def pretrained_on_images(library: str) -> nn.Module:
    """timm's are known by the library, those of transformers by their configuration."""
    part = type("Block", (nn.Linear,), {"__module__": f"{library}.models.block"})(3, 4)
    if library == "transformers":
        part.config = type("Config", (), {"num_channels": 3})
    return nn.Sequential(part, nn.Linear(4, 2))


def test_pretrained_models_are_trained_for_fewer_epochs() -> None:
    assert default_epochs(nn.Linear(3, 2)) == 30
    assert default_epochs(pretrained()) == 3
    assert [default_epochs(pretrained_on_images(library)) for library in ("timm", "transformers")] == [10, 10]
    x, y = torch.randn(12, 3), torch.arange(12) % 2
    given: Any = {"device": "cpu", "batch_size": 12}
    for model, epochs in ((nn.Linear(3, 2), 30), (pretrained(), 3), (pretrained_on_images("timm"), 10)):
        assert soseleto.fit(copy.deepcopy(model), (x, y), (x, y), **given).config["epochs"] == epochs
    assert soseleto.fit(pretrained(), (x, y), (x, y), epochs=2, **given).config["epochs"] == 2
    estimator = pytest.importorskip("soseleto.estimator").SoseletoClassifier(model=pretrained(), device="cpu")
    assert len(estimator.fit(x.numpy(), y.numpy()).history_) == 3


def test_adapters_are_trained_faster() -> None:
    adapter = type("Adapter", (nn.Linear,), {"__module__": "peft.tuners.lora"})(3, 2)
    assert default_optimizer(nn.Sequential(pretrained(), adapter), None) == soseleto.adamw(1e-4)


def test_the_strong_recipe_has_a_rate_of_its_own_for_texts_and_for_networks_of_images() -> None:
    adapter = type("Adapter", (nn.Linear,), {"__module__": "peft.tuners.lora"})(3, 2)
    adapted = nn.Sequential(pretrained(), adapter)
    for views, model, given, expected in (
        (TokenViews(), pretrained(), (None, None), soseleto.adamw(6e-5)),
        (TokenViews(), pretrained(), (None, 0.01), soseleto.adamw(6e-5, 0.01)),
        (TokenViews(), pretrained(), (3e-5, None), soseleto.adamw(3e-5)),
        (TokenViews(), adapted, (None, None), soseleto.adamw(1e-4)),
        (FeatureViews(), pretrained(), (None, None), soseleto.adamw(3e-5)),
        (FeatureViews(), nn.Linear(3, 2), (None, None), soseleto.sgd(0.03)),
        (Views(), pretrained_on_images("timm"), (None, None), soseleto.adamw(1e-4)),
        (Views(), nn.Linear(3, 2), (None, None), soseleto.sgd(0.1, 5e-4, nesterov=True)),
        (Views(), nn.Linear(3, 2), (0.2, 0.0), soseleto.sgd(0.2, nesterov=True)),
    ):
        assert strong_optimizer(views, model, *given) == expected
    assert [strong_target_batch(views) for views in (TokenViews(), FeatureViews(), Views())] == [32, 64, 64]


def test_batches_of_a_pretrained_model_of_texts_are_small() -> None:
    models = nn.Linear(3, 2), pretrained(), pretrained_on_images("timm")
    assert [default_batch_size(model, 50_000) for model in models] == [256, 64, 256]
    assert [default_batch_size(model, 500) for model in models] == [16, 16, 16]


def test_fit_takes_the_default_of_the_model(tmp_path: Any) -> None:
    x, y = torch.randn(12, 3), torch.arange(12) % 2
    given: Any = {"epochs": 1, "device": "cpu", "batch_size": 4}
    result = soseleto.fit(pretrained(), (x, y), (x, y), **given)
    assert result.config["optimizer"] == "AdamW, betas 0.9 and 0.999"
    assert (result.config["lr"], result.config["schedule"]) == (3e-5, "warmup_cosine")
    other = soseleto.fit(pretrained(), (x, y), (x, y), optimizer=soseleto.sgd(0.1), schedule=None, **given)
    assert (other.config["optimizer"], other.config["schedule"]) == ("SGD, momentum 0.9", None)
    own = soseleto.fit(nn.Linear(3, 2), (x, y), (x, y), **given)
    assert (own.config["lr"], own.config["schedule"]) == (0.03, "linear")
