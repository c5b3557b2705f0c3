"""The method that is used where none is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soseleto
from soseleto import Soseleto, squared_error
from soseleto.errors import UsageError
from soseleto.extensions import (
    beyond_noise,
    chain,
    hold_when_vanished,
    label_doubt,
    normalized,
    scale_by_rms,
    target_share,
)
from soseleto.run_folder.folder import RunFolder
from soseleto.training.settings import method_of
from soseleto.training.usual import LAST_LAYER, Usual

SIZED = (scale_by_rms(), hold_when_vanished())


def used(tmp_path: Path, model: nn.Module, mode: str = "noisy", **arguments: Any) -> Soseleto:
    x, y = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    given = {"source": (x, y), "target": (x[:10], y[:10]), "epochs": 1, "out": tmp_path / "run", **arguments}
    soseleto.fit(model, mode=mode, **given)  # type: ignore[arg-type]
    method = method_of(RunFolder.open(tmp_path / "run").config()["settings"])
    assert isinstance(method, Soseleto)
    return method


class Scaled(nn.Module):
    """Ends in a parameter of its own, so that the last linear layer is not the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x)


def test_wrong_labels_are_doubted_and_weights_move_by_the_last_layer(tmp_path: Path) -> None:
    method = used(tmp_path, nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)))
    assert method == Usual().method("noisy")
    assert method.alignment == chain(LAST_LAYER, *SIZED, beyond_noise(2.0))
    assert (method.source_loss, method.gradients) == (label_doubt(), target_share(0.1))


def test_all_layers_of_a_model_that_does_not_end_in_a_linear_one(tmp_path: Path) -> None:
    method = used(tmp_path, Scaled())
    assert method.alignment == chain(*SIZED, beyond_noise(2.0))
    assert method.source_loss == label_doubt()


@pytest.mark.parametrize("mode", ["noisy", "transfer"])
def test_other_tasks_keep_the_papers_losses(tmp_path: Path, mode: str) -> None:
    trunk = nn.Linear(3, 4)
    y = torch.randn(40, 1)
    regression: dict[str, Any] = {"source": (torch.randn(40, 3), y), "target": (torch.randn(10, 3), y[:10])}
    if mode == "noisy":
        method = used(tmp_path, nn.Linear(3, 1), loss=squared_error, **regression)
        assert method == Soseleto()
    else:
        method = used(tmp_path, trunk, mode)
        assert method == Soseleto(gradients=target_share(0.5))


def test_what_is_asked_for_is_done() -> None:
    asked = Usual(weight_step=0.2, target_share=0.0, doubt=False, all_layers=True, engine="loop").method("noisy")
    assert (asked.weight_step, asked.engine) == (0.2, "loop")
    assert (asked.gradients, asked.source_loss) == (chain(), normalized())
    assert asked.alignment == chain(*SIZED, beyond_noise(2.0))
    assert not Usual(engine="layerwise").method("noisy").alignment.replaces_engine  # an engine is for all layers
    with pytest.raises(UsageError, match="without direction and engine"):
        Usual(engine="layerwise", all_layers=False).method("noisy")
