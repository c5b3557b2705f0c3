"""``soseleto check-gradients``: compare the engines on one model."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from soseleto.engines import FASTEST_FIRST, EngineReport
from soseleto.engines import check_gradients as compare
from soseleto.errors import UsageError, did_you_mean
from soseleto.models.by_name import is_file, load_function, make_model, running
from soseleto.parallel.reducer import choose_device
from soseleto.task.losses import cross_entropy

_SHAPES = {"lenet": (1, 28, 28), "mlp": (2,)}  # others take colour images
_CLASSES = 10  # of generated data


def check_gradients(name: str, size: int, engines: Sequence[str], shape: str | None, device_name: str) -> None:
    """Print which engine ``auto`` takes, and a table of every engine's error and time."""
    if size < 1:
        raise UsageError(f"--batch must be at least 1, got {size}.")
    for engine in engines:
        if engine not in FASTEST_FIRST:
            known = ", ".join(FASTEST_FIRST)
            raise UsageError(f"unknown engine {engine!r}{did_you_mean(engine, FASTEST_FIRST)}: choose from {known}.")
    model, loss, batch = _problem(name, size, shape)
    device = choose_device(device_name)
    model, batch = model.to(device), tree_map_only(Tensor, lambda x: x.to(device), batch)
    chosen, *reports = compare(model, loss, batch, engines=("auto", *(engines or FASTEST_FIRST)))
    console = Console()
    console.print(_engine_table(reports))
    console.print(f"auto takes {chosen.engine}.")


def _engine_table(reports: Sequence[EngineReport]) -> Table:
    table = Table(title="Error against the loop; time of an ordinary step = 1", title_justify="left")
    table.add_column("engine")
    table.add_column("error", justify="right")
    table.add_column("time", justify="right")
    table.add_column("remark", overflow="fold")
    for row in reports:
        error = "–" if row.error is None else f"{row.error:.1e}"
        time = "–" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.engine, error, time, row.message)
    return table


def _problem(name: str, size: int, shape: str | None) -> tuple[nn.Module, Any, Any]:
    """A model, its per-example loss and a batch: the user's, or generated."""
    function = load_function(name) if is_file(name) else None
    if function is not None and not {"classes", "shape"} & inspect.signature(function).parameters.keys():
        with running(name):
            problem = function(size)
        if not isinstance(problem, tuple) or len(problem) != 3:
            raise UsageError(f"{name} must return (model, per_example_loss, batch), got {type(problem).__name__}.")
        return problem
    sizes = _shape(name, shape)
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(size, *sizes, generator=draw)
    labels = torch.randint(_CLASSES, (size,), generator=draw)
    return make_model(name, "noisy", classes=_CLASSES, shape=sizes, seed=0), _labelled_loss, (inputs, labels)


def _shape(name: str, stated: str | None) -> tuple[int, ...]:
    if stated is not None:
        try:
            return tuple(int(size) for size in stated.split(","))
        except ValueError:
            raise UsageError(f"--shape must be numbers with commas, such as 3,32,32, got {stated!r}.") from None
    if is_file(name):
        raise UsageError(f"{name} needs the shape of its inputs: add --shape 3,32,32.")
    return _SHAPES.get(name, (3, 32, 32))


def _labelled_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])
