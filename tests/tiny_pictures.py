"""Small images of three classes, wrong labels, a network, and an optimizer that stops a training."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def pictures(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Three classes: where the bright third of the image is."""
    seeded = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (n,), generator=seeded)
    images = torch.randint(0, 100, (n, 1, 9, 9), generator=seeded)
    images += 150 * (torch.arange(9) // 3 == labels[:, None])[:, None, :, None]
    return images.to(torch.uint8), labels


def small_net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(81, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def wrong(labels: Tensor, share: float = 0.4) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(5)
    flip = torch.rand(len(labels), generator=seeded) < share
    return torch.where(flip, (labels + torch.randint(1, 3, labels.shape, generator=seeded)) % 3, labels), flip


class Stop(Exception):
    pass


def stopping(at: int) -> Any:
    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        made, taken = torch.optim.SGD(list(parameters), lr=0.05, momentum=0.9), [0]

        def count(*_: object) -> None:
            taken[0] += 1
            if taken[0] == at:
                raise Stop

        made.register_step_pre_hook(count)
        return made

    return make
