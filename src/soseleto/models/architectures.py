"""The networks of the paper's experiments, with and without their classifiers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from torch import Tensor, nn


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
