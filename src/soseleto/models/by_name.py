"""Build a model from a name or ``file.py:function``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from soseleto.errors import UsageError, did_you_mean
from soseleto.models.architectures import (
    group_norm,
    lenet,
    linear,
    mlp,
    preact_resnet18,
    quick,
    resnet18,
    table_network,
)
from soseleto.models.pretrained_text import is_pretrained, make_text_model

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
        if is_pretrained(name):
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
        raise UsageError(
            f"{name} stopped with {' '.join(what.split())[:300].rstrip('.')}: correct that file."
        ) from error


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
