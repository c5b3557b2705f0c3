"""Inputs that are dicts, tuples or nested, and outputs that are objects: the same training as with one tensor."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import soseleto
from experiments.methods import Reweight
from soseleto.data.structure import split
from soseleto.training.options import Checkpoints, Compute

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
DICT = {"left": X[:, :2], "right": {"rest": X[:, 2:]}}
TUPLE = (X[:, :2], X[:, 2:])


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.hidden, self.last = nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.last(self.hidden(x).tanh())


class Named(Plain):
    def forward(self, *, left, right):
        return SimpleNamespace(logits=super().forward(torch.cat([left, right["rest"]], 1)))


class Positional(Plain):
    def forward(self, left, right):
        return super().forward(torch.cat([left, right], 1))


def rows(inputs, n):
    return split(inputs, [n, 40 - n])[0]


def fitted(model, given, **options):
    options = {"epochs": 2, "batch_size": 8, "target_batch_size": 5, **options}
    return soseleto.fit(model, (given, Y), (rows(given, 12), Y[:12]), **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compute": Compute(micro_batch_size=3)},
        {"compute": Compute(dtype=torch.bfloat16)},
        {"method": soseleto.methods.Mixed()},
        {"method": Reweight()},
    ],
    ids=str,
)
@pytest.mark.parametrize(("model", "inputs"), [(Named, DICT), (Positional, TUPLE)])
def test_a_structure_trains_like_one_tensor(model, inputs, options):
    plain, made = fitted(Plain(), X, **options), fitted(model(), inputs, **options)
    same = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)  # addresses can choose another matrix product
    same(plain.model.last.weight, made.model.last.weight)
    if plain.learned is not None:
        same(plain.weights, made.weights)
        same(plain.scores, made.scores)
    same(plain.predict_proba(X), made.predict_proba(inputs))


def test_a_run_with_dicts_and_a_model_output_is_written_resumed_and_loaded(tmp_path, stop_after):
    whole = fitted(Named(), DICT, out=tmp_path / "whole")
    with stop_after(7):
        fitted(Named(), DICT, out=tmp_path / "run", checkpoints=Checkpoints(steps=3))
    again = fitted(Named(), DICT, out=tmp_path / "run", checkpoints=Checkpoints(steps=3))
    assert "resumed after step 6" in again.messages
    assert torch.equal(whole.weights, again.weights)
    assert torch.equal(whole.model.last.weight, again.model.last.weight)
    loaded = soseleto.load(tmp_path / "run", model=Named())
    assert torch.equal(loaded.predict(DICT), again.predict(DICT))
    assert loaded.config["input_shape"] == {"['left']": [2], "['right']['rest']": [4]}


def test_probes_and_transfer_take_structures():
    x = torch.cat([X] * 3)
    named = {"left": x[:, :2], "right": {"rest": x[:, 2:]}}
    y = torch.cat([Y] * 3)
    found = []
    for model, inputs in ((Plain(), x), (Named(), named)):
        result = soseleto.fit(model, (inputs, y), (inputs, y), epochs=2, probes="auto", seed=3)
        found.append(result.suspects().probability)
    assert found[0].shape == (120,)
    assert torch.equal(*found)

    class Trunk(Positional):
        def forward(self, left, right):
            return self.hidden(torch.cat([left, right], 1))

    result = soseleto.fit(Trunk(), (TUPLE, Y), (rows(TUPLE, 12), Y[:12]), "transfer", epochs=1)
    assert result.predict(TUPLE).shape == (40,)
    assert result.ranking()["predicted_label"].shape == (40,)


def test_what_is_refused():
    with pytest.raises(soseleto.UsageError, match="standardize=True is for inputs that are one tensor"):
        fitted(Named(), DICT, inputs=soseleto.Inputs(standardize=True))
    with pytest.raises(soseleto.errors.DataError, match="beside one of length 40"):
        soseleto.fit(Named(), ({"left": X, "right": X[:3]}, Y), (X, Y))
    with pytest.raises(soseleto.UsageError, match=r"given as a dict \(\['left'\]"):
        fitted(Named(), {"left": X})
    with pytest.raises(soseleto.UsageError, match="augment"):
        fitted(Named(), DICT, inputs=soseleto.Inputs(augment=soseleto.Augment(flip=True)))
