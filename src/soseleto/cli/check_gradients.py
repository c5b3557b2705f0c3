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

from soseleto import cross_entropy, engines
from soseleto.models.by_name import is_file, load_function, make_model, running
from soseleto.parallel.reducer import choose_device

CLASSES = 10  # of generated data


def check_gradients(name: str, size: int, names: Sequence[str], shape: tuple[int, ...], device_name: str) -> None:
    """Print a table of every engine's error and time, and which engine ``auto`` takes."""
    model, loss, batch = _problem(name, size, shape)
    device = choose_device(device_name)
    model, batch = model.to(device), tree_map_only(Tensor, lambda x: x.to(device), batch)
    chosen, *reports = engines.check_gradients(model, loss, batch, engines=("auto", *(names or engines.FASTEST_FIRST)))
    table = Table("engine", "error", "time", "remark", title="Error against the loop; time of an ordinary step = 1")
    for row in reports:
        numbers = ("–", "–") if row.error is None else (f"{row.error:.1e}", f"{row.ratio:.2f}")
        table.add_row(row.engine, *numbers, row.message)
    console = Console()
    console.print(table)
    console.print(f"auto takes {chosen.engine}.")


def _problem(name: str, size: int, shape: tuple[int, ...]) -> tuple[nn.Module, Any, Any]:
    """A model, its per-example loss and a batch: the user's, or generated."""
    function = load_function(name) if is_file(name) else None
    if function is not None and not {"classes", "shape"} & inspect.signature(function).parameters.keys():
        with running(name):
            model, loss, batch = function(size)
            return model, loss, batch
    model = make_model(name, "noisy", classes=CLASSES, shape=shape, seed=0)
    batch = torch.randn(size, *shape), torch.randint(CLASSES, (size,))
    return model, lambda model, batch: cross_entropy(model(batch[0]), batch[1]), batch
