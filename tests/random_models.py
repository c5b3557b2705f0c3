"""Models put together at random from layers, gates, hooks and losses, among them much that an engine could miss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

WIDTH, CLASSES, WORDS, LENGTH = 6, 3, 11, 7
SOURCE, TARGET = 5, 3


class Clock:
    """The number of the training step, shared by the parts of a model that change during a training."""

    step = 0


class Changing(nn.Module):
    """The identity before the step ``start``; then, at every step or at every second one, what ``act`` does."""

    def __init__(self, act: Callable[[Tensor], Tensor], clock: Clock, start: int, alternates: bool = False) -> None:
        super().__init__()
        self.act, self.clock, self.start, self.alternates = act, clock, start, alternates

    def forward(self, h: Tensor) -> Tensor:
        step = self.clock.step
        active = step >= self.start and not (self.alternates and step % 2)
        return self.act(h) if active else h


def mixup(h: Tensor) -> Tensor:
    return 0.6 * h + 0.4 * h.roll(1, 0)


def scaled_gradient(h: Tensor) -> Tensor:
    """A hook on an activation."""
    h = h * 1.0
    if h.requires_grad:
        h.register_hook(lambda g: 0.3 * g)
    return h


def no_grad_factor(h: Tensor) -> Tensor:
    with torch.no_grad():
        factor = 1 + h.sigmoid()
    return h * factor


class Reverse(torch.autograd.Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Tensor:  # type: ignore[override]
        return -0.5 * delta


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight)
        return h * weight

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        h, weight = ctx.saved_tensors
        return delta * weight, (delta * h).flatten(0, -2).sum(0).to(weight.dtype)


class OwnScale(nn.Module):
    """A parameter that only a user's own function takes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return Scale.apply(h, self.weight)  # type: ignore[no-untyped-call]


class Gated(nn.Module):
    """A branch with a gate, which may start at zero; the branch may mix examples."""

    def __init__(self, gate: Tensor, mixes: bool) -> None:
        super().__init__()
        self.branch, self.gate, self.mixes = nn.Linear(WIDTH, WIDTH), nn.Parameter(gate), mixes

    def forward(self, h: Tensor) -> Tensor:
        b = torch.tanh(self.branch(h))
        return h + self.gate * (b - b.mean(0) if self.mixes else b)


class Experts(nn.Module):
    """Every row goes to one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, h: Tensor) -> Tensor:
        rows = h.flatten(0, -2)
        share = self.router(rows).softmax(-1)
        chosen, out = share.argmax(-1), torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            index = (chosen == number).nonzero().flatten()
            if len(index):
                out = out.index_add(0, index, (expert(rows[index]) * share[index, number, None]).to(out.dtype))
        return h + out.view_as(h)


class OverRows(nn.Module):
    """A layer for matrices; tokens are taken as rows."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h.flatten(0, -2)).view_as(h)


class Product(nn.Module):
    """Functions of parameters: a matrix product, an outer product, a cast."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.randn(WIDTH, 2) / 2), nn.Parameter(torch.randn(2, WIDTH) / 2)

    def forward(self, h: Tensor) -> Tensor:
        return h + F.linear(h, (self.one @ self.two).T)


def twice() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(layer, nn.Tanh(), layer)


def hooked_parameter() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight.register_hook(lambda g: 0.2 * g)
    return layer


def batch_norm(training: bool) -> nn.Module:
    return OverRows(nn.BatchNorm1d(WIDTH).train(training))


# Name -> a function of the clock and a step at which the layer may change, to a layer for (..., WIDTH).
LAYERS: dict[str, Callable[[Clock, int], nn.Module]] = {
    "linear": lambda clock, start: nn.Linear(WIDTH, WIDTH),
    "tanh_linear": lambda clock, start: nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False)),
    "inplace_relu": lambda clock, start: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "batch_norm_train": lambda clock, start: batch_norm(True),
    "batch_norm_eval": lambda clock, start: batch_norm(False),
    "layer_norm": lambda clock, start: nn.LayerNorm(WIDTH),
    "rms_norm": lambda clock, start: nn.RMSNorm(WIDTH),
    "flat_layer_norm": lambda clock, start: OverRows(nn.LayerNorm(WIDTH)),
    "group_norm": lambda clock, start: OverRows(nn.GroupNorm(2, WIDTH)),
    "dropout": lambda clock, start: nn.Dropout(0.3),
    "experts": lambda clock, start: Experts(),
    "twice": lambda clock, start: twice(),
    "product": lambda clock, start: Product(),
    "weight_norm": lambda clock, start: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral_norm": lambda clock, start: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "rezero": lambda clock, start: Gated(torch.zeros(()), mixes=False),
    "rezero_mixes": lambda clock, start: Gated(torch.zeros(()), mixes=True),
    "layer_scale": lambda clock, start: Gated(torch.zeros(WIDTH), mixes=False),
    "layer_scale_mixes": lambda clock, start: Gated(torch.zeros(WIDTH), mixes=True),
    "gate": lambda clock, start: Gated(torch.rand(WIDTH), mixes=False),
    "own_scale": lambda clock, start: OwnScale(),
    "hooked_parameter": lambda clock, start: hooked_parameter(),
    "centre": partial(Changing, lambda h: h - h.mean(0)),
    "centre_detached": partial(Changing, lambda h: h - h.mean(0).detach()),
    "mixup": partial(Changing, mixup),
    "mixup_half": partial(Changing, mixup, alternates=True),
    "scaled_gradient": partial(Changing, scaled_gradient),
    "no_grad_factor": partial(Changing, no_grad_factor),
    "half_detached": partial(Changing, lambda h: h + torch.tanh(h.detach()) * h),
    "reversed": partial(Changing, lambda h: h + Reverse.apply(torch.tanh(h))),
}
DRAWS = {"dropout", "spectral_norm"}  # layers that draw random numbers or change their state in every pass


class Images(nn.Module):
    def __init__(self, *norms: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), *norms, nn.ReLU(), nn.Conv2d(4, WIDTH, 3, stride=2, groups=2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).mean((2, 3))


class Words(nn.Module):
    """Embeddings and positions of one row for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH, padding_idx=0), nn.Embedding(LENGTH, WIDTH)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places(torch.arange(LENGTH).unsqueeze(0))
        return torch.cat([h[:, 1:], self.token.expand(len(x), -1, -1)], 1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = Words()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.words(x))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(WORDS, WIDTH), kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.words(x))[0][:, -1]


@dataclass(frozen=True)
class Stem:
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]


def vectors(n: int) -> Tensor:
    return torch.randn(n, 4)


def images(n: int) -> Tensor:
    return torch.randn(n, 3, 5, 5)


def tokens(n: int) -> Tensor:
    return torch.randint(WORDS, (n, LENGTH))


STEMS = {
    "linear": Stem(lambda: nn.Linear(4, WIDTH), vectors),
    "images": Stem(Images, images),
    "images_batch_norm": Stem(lambda: Images(nn.BatchNorm2d(4)), images),
    "images_group_norm": Stem(lambda: Images(nn.GroupNorm(2, 4)), images),
    "words": Stem(Words, tokens),
    "attention": Stem(Attention, tokens),
    "lstm": Stem(lambda: Recurrent(nn.LSTM), tokens),
    "gru": Stem(lambda: Recurrent(nn.GRU), tokens),
    "bag": Stem(lambda: nn.EmbeddingBag(WORDS, WIDTH, mode="mean"), tokens),
}


class RandomModel(nn.Module):
    def __init__(self, stem: nn.Module, layers: list[nn.Module], zero_head: bool) -> None:
        super().__init__()
        self.stem, self.layers, self.head = stem, nn.ModuleList(layers), nn.Linear(WIDTH, CLASSES)
        if zero_head:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


# --- losses: (outputs, labels, step) -> (B,) ---------------------------------------------------------------------


def tokens_mean(outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy, for tokens the mean over each sequence."""
    if outputs.ndim == 2:
        return F.cross_entropy(outputs, labels, reduction="none", label_smoothing=smoothing)
    every = labels.unsqueeze(1).expand(outputs.shape[:2])
    return F.cross_entropy(outputs.transpose(1, 2), every, reduction="none", label_smoothing=smoothing).mean(1)


def squared(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels.view(-1, *[1] * (outputs.ndim - 1))).square().flatten(1).mean(1)


def focal(outputs: Tensor, labels: Tensor) -> Tensor:
    losses = tokens_mean(outputs, labels)
    with torch.no_grad():
        factor = 1 - torch.exp(-losses)
    return factor * losses


def over_detached_mean(outputs: Tensor, labels: Tensor) -> Tensor:
    losses = tokens_mean(outputs, labels)
    return losses / losses.mean().detach()


def over_mean(outputs: Tensor, labels: Tensor) -> Tensor:
    losses = tokens_mean(outputs, labels)
    return losses / losses.mean()


def ramp(outputs: Tensor, labels: Tensor, step: int) -> Tensor:
    """A term that couples the examples, with a factor that grows from zero on."""
    losses = tokens_mean(outputs, labels)
    return losses + 0.3 * step * (losses - losses.mean()).square()


LOSSES: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "cross_entropy": lambda outputs, labels, step: tokens_mean(outputs, labels),
    "smoothing": lambda outputs, labels, step: tokens_mean(outputs, labels, 0.1),
    "squared": lambda outputs, labels, step: squared(outputs, labels),
    "focal": lambda outputs, labels, step: focal(outputs, labels),
    "over_detached_mean": lambda outputs, labels, step: over_detached_mean(outputs, labels),
    "over_mean": lambda outputs, labels, step: over_mean(outputs, labels),
    "ramp": ramp,
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=0.03),
}
