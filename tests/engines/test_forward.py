"""Our own forward mode: exact where it is used, PyTorch's forward mode elsewhere, and no tangent is kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import soseleto
from soseleto.engines.autograd import gradient
from soseleto.engines.contract import trainable
from soseleto.engines.forward import by_autograd, by_hand
from soseleto.engines.verified import VerifiedEngine
from soseleto.errors import EngineError
from soseleto.models.architectures import resnet18
from zoo import BY_NAME, CLASSES, cross_entropy

FOLLOWED = (
    "residual_batchnorm_train",
    "batchnorm_mlp_train",
    "residual_batchnorm_eval",
    "strided_convnet",
    "mixing",
    "lstm",
    "dropout",
    "transformer_encoder_layer",
    "tied_language_model",
    "checkpointed",
)


def random_direction(model: nn.Module) -> dict[str, Tensor]:
    seeded = torch.Generator().manual_seed(1)
    return {n: torch.randn(p.shape, dtype=p.dtype, generator=seeded) for n, p in trainable(model).items()}


@pytest.mark.parametrize("name", FOLLOWED)
def test_which_models_are_followed_by_hand(name: str) -> None:
    model, batch = BY_NAME[name].build()
    used: list[str] = []
    engine = VerifiedEngine("forward", noting(by_hand, used), noting(by_autograd, used))
    for _ in range(2):  # the first call holds a proof
        engine(model, BY_NAME[name].loss, batch, random_direction(model))
    assert used[-1] == "by_hand"


def noting(function: Callable[..., Any], used: list[str]) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        used.append(function.__name__)
        return function(*args)

    return called


@pytest.mark.parametrize("affine", [("weight",), ("bias",), ("weight", "bias")])
def test_batch_norm_with_directions_for_some_of_its_parameters(affine: tuple[str, ...]) -> None:
    model, batch = BY_NAME["residual_batchnorm_train"].build()
    wanted = {f"{block}.0.{k}" for block in ("one", "two") for k in affine} | {"stem.weight"}
    some = {k: v for k, v in random_direction(model).items() if k in wanted}
    _, right = soseleto.alignment(model, cross_entropy, batch, some, engine="loop")
    _, found = by_hand(model, cross_entropy, batch, some)
    assert float((found - right).norm() / right.norm()) < 1e-9


class Doubled(torch.autograd.Function):
    """A user's own function, which has no forward-mode rule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Tensor:  # type: ignore[override]
        return delta * 2


class WithOwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(7, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(Doubled.apply(self.one(x)))  # type: ignore[no-untyped-call]


def test_a_users_own_function_is_refused() -> None:
    model = WithOwnFunction().double()
    batch = torch.randn(4, 7, dtype=torch.float64), torch.randint(CLASSES, (4,))
    with pytest.raises(EngineError, match="no rule"):
        soseleto.alignment(model, cross_entropy, batch, random_direction(model), engine="forward")


class Peak(TorchDispatchMode):
    """The peak memory of the tensors created inside, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(made, Tensor) and made.untyped_storage() not in self._known:
                storage = made.untyped_storage()
                self._known.add(storage)
                self._move(storage.nbytes())
                weakref.finalize(storage, self._move, -storage.nbytes())
        return out

    def _move(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


def test_no_tangent_is_kept() -> None:
    """At most a tenth more memory than an ordinary step; PyTorch's forward mode needs more than twice as much."""
    model = resnet18(width=4, norm=nn.BatchNorm2d).train()
    batch = torch.randn(4, 3, 16, 16), torch.randint(10, (4,))
    direction, parameters = random_direction(model), trainable(model)

    def peak(losses: Callable[[], Tensor]) -> int:
        with Peak() as seen:
            gradient(losses().mean(), parameters)
        return seen.most

    ordinary = peak(lambda: cross_entropy(model, batch))
    assert peak(lambda: by_hand(model, cross_entropy, batch, direction)[0]) < 1.1 * ordinary
    assert peak(lambda: by_autograd(model, cross_entropy, batch, direction)[0]) > 2 * ordinary
