"""The networks of the paper's experiments, with and without their classifiers, and models by name."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from soseleto.errors import UsageError, did_you_mean
from soseleto.models.pretrained import is_hugging_face, make_text_model


class _Layers(nn.Sequential):
    """A sequence that ``compile()`` makes one graph of; of an nn.Sequential it makes one for each layer."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


def quick(classes: int = 10, *, channels: int = 3, size: int = 32) -> nn.Sequential:
    """The CIFAR-10 "Quick" network of Caffe: three convolutions of 32, 32 and 64 channels, then 64 hidden units."""

    def pool(layer: type[nn.MaxPool2d] | type[nn.AvgPool2d]) -> nn.Module:
        return layer(3, stride=2, ceil_mode=True)

    side = _pooled(_pooled(_pooled(size)))
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2), pool(nn.MaxPool2d), nn.ReLU(),
        nn.Conv2d(32, 32, 5, padding=2), nn.ReLU(), pool(nn.AvgPool2d),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), pool(nn.AvgPool2d),
        nn.Flatten(), nn.Linear(64 * side * side, 64), nn.Linear(64, classes),
    )  # fmt: skip


def _pooled(side: int) -> int:
    return -(-(side - 3) // 2) + 1


def lenet(classes: int = 10, *, channels: int = 1, size: int = 28) -> nn.Sequential:
    """LeNet as Caffe ships it: convolutions of 20 and 50 channels, 500 hidden units."""
    side = ((size - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 20, 5), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(50 * side * side, 500), nn.ReLU(), nn.Linear(500, classes),
    )  # fmt: skip


def mlp(inputs: int, classes: int, *, hidden: int = 64, layers: int = 2) -> nn.Sequential:
    """Fully connected layers with ReLU; images are flattened."""
    widths = [inputs, *[hidden] * layers]
    body: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        body += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*body, nn.Linear(widths[-1], classes))


def linear(inputs: int, classes: int) -> nn.Sequential:
    """One linear layer: for texts as bags of words, where a deeper network memorises."""
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))


class _Residual(nn.Module):
    """x + W₂·relu(W₁·norm(x)), with dropout before W₂."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.body(x)
        return out


def table_network(
    inputs: int, classes: int, *, width: int = 64, blocks: int = 2, dropout: float = 0.2
) -> nn.Sequential:
    """A residual network for the encoded columns of a table, see ``soseleto.data.TablePreparation``.

    Its first layer is the embedding of categories and numbers: each has a row of weights for every place of its
    encoding.
    """
    body = [_Residual(width, dropout) for _ in range(blocks)]
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), *body, nn.LayerNorm(width), nn.Linear(width, classes))


def group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(min(32, channels // 2), channels)


class _Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), norm(after), nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, 1, 1, bias=False), norm(after),
        )  # fmt: skip
        self.short: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), norm(after))
        self.end = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.body(x) + self.short(x))


class _PreActivationBlock(nn.Module):
    """x + conv(relu(norm(conv(relu(norm(x)))))); where the shape changes, the shortcut starts after the first norm."""

    def __init__(self, before: int, after: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.begin = nn.Sequential(norm(before), nn.ReLU(inplace=True))
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), norm(after), nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
        )  # fmt: skip
        changes = stride != 1 or before != after
        self.short = nn.Conv2d(before, after, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        begun = self.begin(x)
        out: Tensor = self.body(begun) + (x if self.short is None else self.short(begun))
        return out


def resnet18(
    classes: int = 10, *, channels: int = 3, width: int = 64, norm: Callable[[int], nn.Module] = nn.BatchNorm2d
) -> nn.Sequential:
    """ResNet-18 for small images (3x3 stem, no early pooling); ``norm=group_norm`` does not mix examples."""
    stem = [nn.Conv2d(channels, width, 3, 1, 1, bias=False), norm(width), nn.ReLU(inplace=True)]
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return _Layers(*stem, *_stages(_Block, width, norm), *end, nn.Linear(8 * width, classes))


def preact_resnet18(
    classes: int = 10, *, channels: int = 3, width: int = 64, norm: Callable[[int], nn.Module] = nn.BatchNorm2d
) -> nn.Sequential:
    """ResNet-18 for small images with norms before the convolutions (He et al., 2016), as papers on noisy labels use
    it."""
    stem = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
    end = [norm(8 * width), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return _Layers(stem, *_stages(_PreActivationBlock, width, norm), *end, nn.Linear(8 * width, classes))


def _stages(block: Callable[..., nn.Module], width: int, norm: Callable[[int], nn.Module]) -> list[nn.Module]:
    """Four stages of two blocks; each stage after the first halves the image and doubles the channels."""
    layers = [block(width, width, 1, norm), block(width, width, 1, norm)]
    for after in (2 * width, 4 * width, 8 * width):
        layers += [block(after // 2, after, 2, norm), block(after, after, 1, norm)]
    return layers


# By name, or file.py:function

GROUP_NORM = "resnet18-groupnorm"
FOR_ROWS: dict[str, Callable[[int, int], nn.Module]] = {"mlp": mlp, "linear": linear, "table": table_network}
NAMES = ("quick", "lenet", "resnet18", "preact-resnet18", GROUP_NORM, *FOR_ROWS)
SMALL = 32  # the largest size of grey images on which LeNet is as accurate as Quick, at a third of the cost


def default_name(shape: tuple[int, ...]) -> str:
    """``lenet`` for small grey images, ``quick`` for other square ones, ``mlp`` for everything else."""
    if len(shape) != 3 or shape[1] != shape[2] or shape[1] < 16:
        return "mlp"
    return "lenet" if shape[0] == 1 and shape[1] <= SMALL else "quick"


def make_model(name: str, mode: str, *, classes: int, shape: tuple[int, ...], seed: int) -> nn.Module:
    """A whole classifier in noisy mode, its trunk in transfer mode; initialised from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if is_file(name):
            return _own_model(name, classes, shape)
        if is_hugging_face(name):
            return make_text_model(name, mode, classes=classes)
        whole = by_name(name, classes=classes, shape=shape)
    assert isinstance(whole, nn.Sequential)
    return whole if mode == "noisy" else whole[:-1]


def _own_model(name: str, classes: int, shape: tuple[int, ...]) -> nn.Module:
    function = load_function(name)
    with running(name):
        model = function(classes=classes, shape=shape)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{name} must return a torch.nn.Module, got {type(model).__name__}.")
    return model


@contextmanager
def running(name: str) -> Iterator[None]:
    """Turn an error or an exit in the user's own file into one sentence."""
    try:
        yield
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise UsageError(f"{name} stopped with {' '.join(what.split())[:300].rstrip('.')}: correct it.") from error


def is_file(name: str) -> bool:
    """Whether ``name`` is FILE.py:FUNCTION."""
    return ".py:" in name or name.endswith(".py")


def load_function(name: str) -> Callable[..., Any]:
    """Load a function from ``path/to/file.py:function``; the file may import from its own folder."""
    file, _, function = name.rpartition(":")
    path = Path(file)
    if not function or not file:
        raise UsageError(f"{name!r} names no function: write FILE.py:FUNCTION.")
    if not path.is_file():
        raise UsageError(f"there is no file {path}: write FILE.py:FUNCTION.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent.resolve()))
    with running(str(path)):
        spec.loader.exec_module(module)
    maker = getattr(module, function, None)
    if not callable(maker):
        raise UsageError(f"{path} has no function {function!r}{did_you_mean(function, dir(module))}.")
    return maker


def by_name(name: str, *, classes: int, shape: tuple[int, ...]) -> nn.Module:
    """A whole classifier by its name, for inputs of ``shape`` (without the batch dimension)."""
    if name not in NAMES:
        raise UsageError(f"unknown model {name!r}{did_you_mean(name, NAMES)}: choose one of {', '.join(NAMES)}.")
    if name in FOR_ROWS:
        return FOR_ROWS[name](torch.Size(shape).numel(), classes)
    if len(shape) != 3 or shape[1] != shape[2]:
        raise UsageError(f"model {name!r} takes square images (C, H, W), got inputs of shape {shape}: use 'mlp'.")
    if name == "preact-resnet18":
        return preact_resnet18(classes, channels=shape[0])
    if name in ("resnet18", GROUP_NORM):
        return resnet18(classes, channels=shape[0], norm=group_norm if name == GROUP_NORM else nn.BatchNorm2d)
    small = quick if name == "quick" else lenet
    return small(classes, channels=shape[0], size=shape[2])
