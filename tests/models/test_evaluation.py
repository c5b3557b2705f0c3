"""Evaluation mode that gives every module its own training flag back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from soseleto.data.feeding import Prepare
from soseleto.models.trunk_and_heads import evaluation_mode
from soseleto.prediction import Predictor


def with_frozen_norm() -> nn.Sequential:
    """In training mode, with a BatchNorm that its user keeps in evaluation mode."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3)).train()
    model[1].eval()
    return model


def flags(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_every_module_gets_its_own_flag_back() -> None:
    model = with_frozen_norm()
    before = flags(model)
    with evaluation_mode(model):
        assert not any(flags(model))
    with pytest.raises(ZeroDivisionError), evaluation_mode(model):
        raise ZeroDivisionError
    assert flags(model) == before == [True, True, False, True, True]


def test_predictions_are_those_of_evaluation_mode() -> None:
    """Without dropout, and by a norm's running statistics, also while the model is in training mode."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3)).train()
    inputs = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    found = Predictor(model=model, prepare=Prepare(None, torch.float32), device=torch.device("cpu")).outputs(inputs)
    assert all(flags(model))
    statistics = model[1].running_mean.clone()
    with torch.no_grad():
        assert torch.allclose(found, model.eval()(inputs), atol=1e-6)
    assert torch.equal(statistics, torch.zeros(4))
