"""Small images of three classes, wrong labels, a network, a training, and an optimizer that stops it."""

from typing import Any

import torch
from torch import Tensor, nn

from small_tasks import ask_at
from soseleto.data import StrongAugment, Views
from soseleto.training.fit import fit
from soseleto.training.options import Inputs


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


VIEWS = {
    "fixmatch": Views(flip=False, count=1),
    "promix": Views(flip=False, count=1),
    "divide_mix": Views(flip=False, count=1, strong=StrongAugment(0, cutout=0.0)),
}


def trained(model: nn.Module, method: Any = None, epochs: int = 2, **options: Any) -> Any:
    """By a method with views, on pictures of which four in ten have a wrong label."""
    x, y = pictures(120, 0)
    common: dict[str, Any] = {"batch_size": 32, "target_batch_size": 8, "device": "cpu"}
    if method is not None:
        common["inputs"] = Inputs(augment=VIEWS.get(method.name, Views(flip=False)))
    return fit(model, (x, wrong(y)[0]), pictures(24, 1), method=method, epochs=epochs, **{**common, **options})


class Stop(Exception):
    pass


def stopping(at: int) -> Any:
    def stop() -> None:
        raise Stop

    return ask_at(at, stop)
