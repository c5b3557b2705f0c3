"""``soseleto check-gradients``: compare the engines on one model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from soseleto.engines import FASTEST_FIRST, EngineReport
from soseleto.engines import check_gradients as compare
from soseleto.errors import UsageError, did_you_mean
from soseleto.models.by_name import by_name, is_file, load_function, running
from soseleto.task.losses import cross_entropy

_SHAPES = {"quick": (3, 32, 32), "lenet": (1, 28, 28), "resnet18": (3, 32, 32), "mlp": (2,)}


def check_gradients(model: str, batch_size: int, engines: Sequence[str]) -> None:
    """Print a table of every engine's error and time."""
    if batch_size < 1:
        raise UsageError(f"--batch must be at least 1, got {batch_size}.")
    for name in engines:
        if name not in FASTEST_FIRST:
            known = ", ".join(FASTEST_FIRST)
            raise UsageError(f"unknown engine {name!r}{did_you_mean(name, FASTEST_FIRST)}: choose from {known}.")
    module, loss, batch = _problem(model, batch_size)
    reports = compare(module, loss, batch, engines=tuple(engines) or FASTEST_FIRST)
    Console().print(_engine_table(reports))


def _engine_table(reports: Sequence[EngineReport]) -> Table:
    table = Table(title="Engines against the loop, one example at a time", title_justify="left")
    table.add_column("engine")
    table.add_column("relative error", justify="right")
    table.add_column("times an ordinary step", justify="right")
    table.add_column("remark", overflow="fold")
    for row in reports:
        error = "–" if row.error is None else f"{row.error:.1e}"
        ratio = "–" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.engine, error, ratio, row.message)
    return table


def _problem(model: str, batch_size: int) -> tuple[nn.Module, Any, Any]:
    """A model, its per-example loss and a batch: random images for a named model, otherwise from the user's file."""
    if is_file(model):
        function = load_function(model)
        with running(model):
            made = function(batch_size)
        if not isinstance(made, tuple) or len(made) != 3:
            raise UsageError(f"{model} must return (model, per_example_loss, batch), got {type(made).__name__}.")
        return made
    if model not in _SHAPES:
        by_name(model, classes=10, shape=(1,))  # raises, with the known names
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(batch_size, *_SHAPES[model], generator=draw)
    labels = torch.randint(10, (batch_size,), generator=draw)
    return by_name(model, classes=10, shape=_SHAPES[model]), _labelled_loss, (inputs, labels)


def _labelled_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])
