"""Settings as data: every method and every piece is written to JSON and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soseleto
from experiments.methods import METHODS
from soseleto import Soseleto, pieces
from soseleto.errors import UsageError
from soseleto.pieces import (
    at_temperature,
    beyond_noise,
    centred,
    chain,
    hold_when_vanished,
    label_doubt,
    last_batch,
    last_layer,
    mean,
    normalized,
    per_error,
    pooled_by_class,
    preconditioned,
    running_mean,
    scale_by_rms,
    target_share,
    unit_length,
    whitened,
    without_own_error,
)
from soseleto.run_folder.folder import RunFolder
from soseleto.task.settings import from_data, to_data
from soseleto.training.settings import method_of, settings_of

METHODS_AND_PIECES: list[Any] = [
    *(make() for make in METHODS.values()),
    Soseleto.paper(),
    Soseleto(direction=running_mean(0.9, layers=("a.", "b."))),
    Soseleto(direction=last_batch(layers=("a.",)), alignment=chain(per_error(), scale_by_rms())),
    Soseleto(
        alignment=chain(hold_when_vanished(0.01), beyond_noise(1.5)), source_loss=mean(), scores=pooled_by_class()
    ),
    Soseleto(gradients=chain(target_share(0.5))),
    Soseleto(source_loss=label_doubt(normalize=False), weight_step=None, initial_weight=0.25),
    Soseleto(source_loss=normalized(), engine="loop"),
    Soseleto(
        alignment=chain(last_layer(centred(0.9), decay=0.5), scale_by_rms()),
        scores=last_layer(whitened(0.2), unit_length(), at_temperature(3.0), without_own_error()),
    ),
    Soseleto(direction=preconditioned(running_mean(0.95))),
]


@pytest.mark.parametrize("method", METHODS_AND_PIECES, ids=repr)
def test_settings_are_read_back(method: Any) -> None:
    assert method_of(json.loads(json.dumps(settings_of(method)))) == method


def test_every_piece_is_in_the_list() -> None:
    text = repr(METHODS_AND_PIECES)
    assert [name for name in pieces.__all__ if name != "Piece" and f"{name}(" not in text] == []


def test_a_run_keeps_its_settings(tmp_path: Path) -> None:
    method = Soseleto(weight_step=0.25, alignment=chain(per_error(), scale_by_rms()))
    x, y = torch.randn(20, 3), torch.arange(20) % 2
    soseleto.fit(nn.Linear(3, 2), (x, y), (x[:6], y[:6]), epochs=1, method=method, out=tmp_path / "run", device="cpu")
    config = json.loads((tmp_path / "run" / "config.json").read_text("utf-8"))
    assert method_of(config["settings"]) == method
    assert config["settings"]["alignment"]["pieces"] == [{"name": "per_error"}, {"name": "scale_by_rms"}]
    assert RunFolder(tmp_path / "run").config()["settings"] == settings_of(method)


def of_my_own(parameter: Tensor, state: Any, group: Any) -> Tensor:
    return torch.ones_like(parameter)


def test_a_function_is_kept_by_its_name_and_cannot_be_read_back() -> None:
    settings = settings_of(Soseleto(direction=preconditioned(by=of_my_own)))
    assert settings["direction"]["by"]["function"].endswith("of_my_own")
    with pytest.raises(UsageError, match="of_my_own is an object of the program that wrote the settings"):
        method_of(settings)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "Sosoleto"}, "unknown setting 'Sosoleto' .did you mean"),
        ({"colour": 1}, "settings of 'Soseleto' do not fit this version"),
    ],
)
def test_settings_of_another_version_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        method_of({**settings_of(Soseleto()), **change})


def test_a_tensor_is_known_by_its_values() -> None:
    tensors = [torch.tensor(1.0), torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([1.0], dtype=torch.bfloat16)]
    found = [json.dumps(to_data(tensor)) for tensor in tensors]
    assert len(set(found)) == 4
    assert json.dumps(to_data(torch.ones(2, 2)[:, 0])) == json.dumps(to_data(torch.ones(2)))
    with pytest.raises(UsageError, match="Tensor is an object of the program that wrote the settings"):
        from_data(to_data(tensors[0]), {})
