"""Last-layer alignments against the slow oracle: one backward per example, in the changed coordinates, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import small_tasks
from small_tasks import noisy_task
from soseleto import Selection, Soseleto
from soseleto.data.batches import Batch
from soseleto.engines import alignment
from soseleto.errors import EngineError, SoseletoError, UsageError
from soseleto.pieces import (
    at_temperature,
    centred,
    chain,
    label_doubt,
    last_batch,
    last_layer,
    normalized,
    running_mean,
    scale_by_rms,
    unit_length,
    whitened,
    without_own_error,
)
from soseleto.pieces.last_layer import DECAY, Form
from soseleto.task.losses import NoisyLosses
from soseleto.task.optimizers import sgd

N, D, K = 24, 5, 3
task = partial(noisy_task, n_source=N, steps=40, make_optimizer=partial(sgd, lr=0.2), classes=K)
batches = partial(small_tasks.batches, n=12, t=7, of=N)
FORMS: dict[str, tuple[Form, ...]] = {
    "raw": (),
    "temperature": (at_temperature(4.0),),
    "centred": (centred(),),
    "whitened": (whitened(shrink=0.2),),
    "unit length": (unit_length(),),
    "own error": (without_own_error(),),
    "all": (whitened(), unit_length(), at_temperature(3.0), without_own_error()),
}


def network(kind: str = "plain") -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        norm = nn.BatchNorm1d(D) if kind == "batch norm" else nn.Identity()
        return nn.Sequential(nn.Linear(4, D), norm, nn.ReLU(), nn.Linear(D, K)).double()


class Changed(nn.Module):
    """Outputs z + W·φ(h) with W = 0: its gradient in W is r φ(h)ᵀ, for any coordinates φ of the last layer's inputs."""

    def __init__(self, model: nn.Sequential, coordinates: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.coordinates = model, coordinates
        self.weight = nn.Parameter(torch.zeros(K, D, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.model[:-1](x).detach()
        return self.model[-1](h).detach() + self.coordinates(h) @ self.weight.T


class Oracle:
    """The slow way, with statistics of its own: one backward per example over the weight in the new coordinates."""

    def __init__(self, forms: tuple[Form, ...]) -> None:
        self.forms = {type(form).__name__: form for form in forms}
        self.inputs: list[Tensor] = []  # of all source batches so far
        self.means: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.factor = torch.eye(D, dtype=torch.float64)

    def __call__(self, model: nn.Sequential, source: Batch, target: Batch, *, refresh: bool) -> Tensor:
        self.inputs.append(model[:-1](source.inputs).detach())
        changed = Changed(model, self.coordinates(refresh))
        heat: Any = self.forms.get("at_temperature")
        tau = 1.0 if heat is None else heat.temperature
        wanted = tau * F.cross_entropy(changed(target.inputs) / tau, target.labels)
        (found,) = torch.autograd.grad(wanted, changed.weight)
        self.gradients.append(found)
        direction = averaged(self.gradients)
        loss = lambda m, b: F.cross_entropy(m(b.inputs), b.labels, reduction="none")  # noqa: E731
        _, q = alignment(changed, loss, source, {"weight": direction}, engine="loop")
        if "without_own_error" in self.forms:
            p = model(source.inputs).detach().softmax(1)
            q = q / (p - F.one_hot(source.labels, K)).norm(dim=1)
        return q

    def coordinates(self, refresh: bool) -> Callable[[Tensor], Tensor]:
        form: Any = self.forms.get("centred") or self.forms.get("whitened")
        mean = torch.zeros(D, dtype=torch.float64)
        if form is not None:
            mean = averaged([h.mean(0) for h in self.inputs])
            self.means.append(mean)
        if "whitened" in self.forms and refresh:
            moments = [(h - m).T @ (h - m) / len(h) for h, m in zip(self.inputs, self.means, strict=True)]
            covariance = averaged(moments)
            ridge = form.shrink * covariance.trace() / D
            values, vectors = torch.linalg.eigh(covariance + ridge * torch.eye(D, dtype=torch.float64))
            # symmetric: another root of the same inverse
            self.factor = vectors @ torch.diag(values.rsqrt()) @ vectors.T
        factor, unit = self.factor, "unit_length" in self.forms
        return lambda h: F.normalize((h - mean) @ factor.T, dim=1) if unit else (h - mean) @ factor.T


def averaged(values: list[Tensor]) -> Tensor:
    """The bias-corrected exponential moving average, as a sum."""
    weights = [DECAY ** (len(values) - 1 - i) for i in range(len(values))]
    return sum((w * v for w, v in zip(weights, values, strict=True)), torch.zeros_like(values[0])) / sum(weights)


@pytest.mark.parametrize("doubt", [False, True], ids=["", "doubted"])
@pytest.mark.parametrize("name", FORMS)
def test_alignments_are_those_of_one_backward_per_example_in_the_changed_coordinates(name: str, doubt: bool) -> None:
    """Of the losses as they are, also where training doubts the labels."""
    model, forms = network(), FORMS[name]
    doubted: dict[str, Any] = {"source_loss": label_doubt(), "initial_weight": 0.6} if doubt else {}
    method = Soseleto(alignment=last_layer(*forms), **doubted)
    state, oracle = method.init(task(model)), Oracle(forms)
    for number in range(4):
        source, target = batches(number)
        expected = oracle(model, source, target, refresh=number == 0)
        before = state.weights.rows(source.index)
        method.step(state, source, target)
        visits = before[2] + 1
        seen = (state.weights.scores[source.index] - before[1]) * visits + before[1]  # this visit's alignment
        torch.testing.assert_close(seen.double(), expected, rtol=2e-4, atol=2e-5)  # scores are float32


@pytest.mark.parametrize("kind", ["plain", "batch norm"])
def test_without_forms_they_are_the_engines_over_the_layers_weight(kind: str) -> None:
    """For a BatchNorm network too, whose engines need forward mode, and weights and parameters move alike."""
    methods = (
        Soseleto(alignment=chain(last_layer(), scale_by_rms())),
        Soseleto(direction=running_mean(DECAY, layers=("3.weight",)), alignment=scale_by_rms()),
    )
    states = [method.init(task(network(kind))) for method in methods]
    for number in range(4):
        for method, state in zip(methods, states, strict=True):
            method.step(state, *batches(number))
    ours, theirs = ([s.weights.values, s.weights.scores, *s.task.model.parameters()] for s in states)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("source_loss", [normalized(), label_doubt()], ids=repr)
@pytest.mark.parametrize("engine", ["layerwise", "forward", "double_backward", "loop"])
def test_scores_of_a_form_of_their_own_beside_any_engine(engine: str, source_loss: Any) -> None:
    """The weights are those of the engine alone, the scores those of the form alone."""
    form = last_layer(centred(), unit_length(), at_temperature(), without_own_error())
    methods = (
        Soseleto(engine=engine, scores=form, source_loss=source_loss, initial_weight=0.8),
        Soseleto(engine=engine, source_loss=source_loss, initial_weight=0.8),
        Soseleto(alignment=form, weight_step=1e-12),
    )
    states = [method.init(task(network(), make_optimizer=partial(sgd, lr=1e-12))) for method in methods]
    for number in range(3):
        for method, state in zip(methods, states, strict=True):
            method.step(state, *batches(number))
    both, raw, scored = (state.weights for state in states)
    torch.testing.assert_close(both.values, raw.values, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(both.scores, scored.scores, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(both.scores, raw.scores)


def test_the_target_takes_one_forward_and_no_backward_through_the_model() -> None:
    model, seen = network(), list[Any]()
    model[1].register_full_backward_hook(lambda *_: seen.append("backward"))
    model[1].register_forward_hook(lambda module, given, out: seen.append(len(given[0])))
    method = Soseleto(alignment=last_layer())
    method.step(method.init(task(model)), *batches(0))
    assert seen == [12, "backward", 7]  # rows


class Sequences(nn.Module):
    """Per-token logits, of which an example's loss uses some; a frozen head under trained adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(4, D), nn.Linear(D, K)
        self.adapter = nn.Linear(4, D, bias=False)
        for p in (*self.base.parameters(), *self.head.parameters()):
            p.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.base(x) + self.adapter(x)))


def test_a_loop_with_sequences_and_a_frozen_head() -> None:
    """Selection, whose losses nothing knows: q_j = Σ over tokens of r G h, and masked tokens count for nothing."""
    torch.manual_seed(0)
    model = Sequences().double()
    x, y = torch.randn(9, 6, 4, dtype=torch.float64), torch.randint(K, (9, 6))
    mask = (torch.arange(6) < torch.arange(2, 11).clamp_max(6)[:, None]).double()

    def loss(m: nn.Module, b: Any) -> Tensor:
        return (F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten(), reduction="none").view(b[1].shape) * b[2]).sum(1)

    method = Soseleto(alignment=last_layer(centred()))
    selection = Selection(model, n_source=5, loss=loss, method=method)
    selection.backward((x[:5], y[:5], mask[:5]), (x[5:], y[5:], mask[5:]), index=torch.arange(5))
    h = torch.tanh(model.base(x) + model.adapter(x)).detach()
    r = (model.head(h).softmax(-1) - F.one_hot(y, K)) * mask[..., None]
    used = mask[:5].bool()
    h = h - h[:5][used].mean(0)
    gradient = torch.einsum("tlk,tld->kd", r[5:], h[5:]) / 4
    expected = torch.einsum("nlk,kd,nld->n", r[:5], gradient, h[:5])
    torch.testing.assert_close(selection.scores.double(), expected, rtol=1e-4, atol=1e-5)


def test_float16_losses_under_a_scaler() -> None:
    model = network()
    x, y = torch.randn(10, 4, dtype=torch.float64), torch.arange(10) % K

    class Scaler:
        def scale(self, value: Tensor) -> Tensor:
            return value * 1024.0

    def loss(m: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(m(b[0]), b[1], reduction="none")

    found = []
    for scaler in (None, Scaler()):
        selection = Selection(model, n_source=6, loss=loss, method=Soseleto(alignment=last_layer()))
        selection.backward((x[:6], y[:6]), (x[6:], y[6:]), index=torch.arange(6), scaler=scaler)
        found.append(selection.scores)
    torch.testing.assert_close(*found)


class Twice(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.trunk, self.head = kind, nn.Linear(4, K), nn.Linear(K, K)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        z = self.head(self.trunk(x))
        if self.kind == "twice":
            return self.head(z)
        if self.kind == "in place":
            return z.mul_(2.0)
        return z * self.scale


@pytest.mark.parametrize(
    ("kind", "words"),
    [("twice", "called 2 times"), ("in place", "changed in place"), ("scaled", "without passing through")],
)
def test_a_model_that_does_not_end_in_one_linear_layer_is_refused(kind: str, words: str) -> None:
    method = Soseleto(alignment=last_layer())
    with pytest.raises(EngineError, match=words):
        method.step(method.init(task(Twice(kind).double())), *batches(0))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Soseleto(alignment=last_layer(), direction=last_batch()), "without direction and engine"),
        (lambda: Soseleto(alignment=last_layer(), engine="loop"), "without direction and engine"),
        (lambda: last_layer(scale_by_rms()), "takes forms such as centred"),  # type: ignore[arg-type]
        (lambda: whitened(shrink=0.0), "shrink of whitened"),
        (lambda: at_temperature(0.0), "temperature must be above 0"),
        (lambda: last_layer().init(task(network(), target_head=frozenset({"3.weight"}))), "mode='transfer' has two"),
    ],
)
def test_what_has_no_effect_or_no_meaning_is_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(SoseletoError, match=words):
        make()


def test_a_temperature_needs_a_cross_entropy() -> None:
    losses = NoisyLosses(lambda outputs, labels: (outputs - F.one_hot(labels, K)).square().sum(1))
    method = Soseleto(alignment=last_layer(at_temperature()))
    with pytest.raises(UsageError, match="at_temperature needs a cross-entropy"):
        method.step(method.init(task(network(), losses=losses)), *batches(0))
