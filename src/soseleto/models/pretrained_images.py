"""Pretrained image networks: ``timm:NAME`` and ``hf:FOLDER_OR_ID``, with what is trained of them.

The network gets images as its own configuration says: in its size and normalisation. It is rebuilt from ``described``,
which a run folder keeps, so that a run can be loaded without the folder or the download that it began with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soseleto.errors import UsageError
from soseleto.models.network_sources import HF, RANDOM, TIMM, Source, fresh_head, head_of, of_hf, of_timm
from soseleto.models.trained_parts import add_lora, check_train, freeze

BATCH_NORM = ("train", "fixed")


@dataclass(frozen=True, kw_only=True)
class PretrainedOptions:
    """What is asked of a pretrained network.

    weights: a .safetensors file in place of the network's own weights, or ``"none"`` for random ones (timm)
    train: ``"all"``, ``"head"``, or ``"last:N"``, the last N blocks with what follows them
    lora: the rank of LoRA adapters, which are trained instead, with the head; 0 for none
    batch_norm: ``"fixed"`` keeps the statistics of BatchNorm as they are; ``"train"`` takes each batch's
    size: pixels a side at which the network runs; None takes the network's own
    """

    weights: str | None = None
    train: str = "all"
    lora: int = 0
    batch_norm: str = "train"
    size: int | None = None

    def __post_init__(self) -> None:
        check_train(self.train)
        if self.lora < 0:
            raise UsageError(f"the rank of LoRA must be 0 or more, got {self.lora}.")
        if self.lora and self.train != "all":
            raise UsageError("LoRA trains its adapters and the head: leave --train out.")
        if self.batch_norm not in BATCH_NORM:
            raise UsageError(f"batch-norm must be train or fixed, got {self.batch_norm!r}.")


class ImageNetwork(nn.Module):
    """A network behind the preprocessing of its own configuration; takes images (B, C, H, W) with values from 0 to 1.

    Grey images are repeated for its three channels.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, source: Source) -> None:
        super().__init__()
        self.network, self.size = network, source.size
        self.register_buffer("mean", torch.tensor(source.mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(source.std).view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[1] == 1:
            images = images.expand(-1, self.mean.shape[1], -1, -1)
        if images.shape[2:] != (self.size, self.size):
            images = _resized(images, self.size)
        found = self.network((images - self.mean) / self.std)
        logits: Tensor = getattr(found, "logits", found)  # a Hugging Face ModelOutput has them by name
        return logits


def _resized(images: Tensor, size: int) -> Tensor:
    """In float32 or better: PyTorch does not resize bfloat16 with anti-aliasing on every device."""
    wide = images.float() if images.dtype in (torch.bfloat16, torch.float16) else images
    return F.interpolate(wide, size=(size, size), mode="bilinear", antialias=True).to(images.dtype)


def is_pretrained(name: str) -> bool:
    """Whether ``name`` is ``timm:NAME`` or ``hf:FOLDER_OR_ID``."""
    return name.startswith((TIMM, HF))


def pretrained_images(
    name: str, mode: str, *, classes: int, shape: tuple[int, ...], options: PretrainedOptions, seed: int
) -> tuple[nn.Module, dict[str, Any]]:
    """A network with its weights (in transfer mode the trunk), and its description for ``rebuilt``.

    A new head and LoRA adapters are initialised from the seed.
    """
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise UsageError(f"model {name!r} takes images with 1 or 3 channels, got inputs of shape {shape}: give others.")
    if mode == "transfer" and options.train == "head":
        raise UsageError("in transfer mode the heads are new and --train head leaves the trunk as it is: leave it out.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name.startswith(TIMM):
            source = of_timm(name, options.weights, options.size)
        else:
            source = of_hf(name, options.weights, options.size)
        described = {**asdict(options), **source.describe()}
        if options.weights is not None:
            described["weights"] = Path(options.weights).name
        return _assembled(source, mode, classes, options), described


def rebuilt(name: str, mode: str, *, classes: int, described: Mapping[str, Any]) -> nn.Module:
    """The architecture that ``described`` says, with random weights."""
    options = PretrainedOptions(**{field: described[field] for field in ("train", "lora", "batch_norm")})
    size = described["input_size"]
    if name.startswith(TIMM):
        source = of_timm(name, RANDOM, size)
    else:
        source = of_hf(name, None, size, described["architecture"])
    source = replace(source, size=size, mean=tuple(described["mean"]), std=tuple(described["std"]))
    return _assembled(source, mode, classes, options)


def _assembled(source: Source, mode: str, classes: int, options: PretrainedOptions) -> nn.Module:
    """With a new head, or none in transfer mode, and what is trained of it."""
    network = source.network.train()
    head = head_of(network)
    if options.lora:
        network = add_lora(network, options.lora, head)
    else:
        freeze(network, options.train)
    fresh_head(network, head, classes if mode == "noisy" else None)  # which is trained in any case
    if options.batch_norm == "fixed":
        for module in network.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
    return ImageNetwork(network, source)
