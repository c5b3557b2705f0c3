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

from soseleto.data import as_examples
from soseleto.data.feeding import make_prepare
from soseleto.engines import FASTEST_FIRST, EngineReport
from soseleto.engines import check_gradients as compare
from soseleto.errors import UsageError, did_you_mean
from soseleto.models.by_name import GROUP_NORM, by_name, is_file, load_function, make_model, running
from soseleto.parallel.reducer import choose_device
from soseleto.task.losses import cross_entropy, squared_error
from soseleto.training.data import class_count

_SHAPES = {
    "quick": (3, 32, 32),
    "lenet": (1, 28, 28),
    "resnet18": (3, 32, 32),
    "preact-resnet18": (3, 32, 32),
    GROUP_NORM: (3, 32, 32),
    "mlp": (2,),
}
_CLASSES = 10  # of generated data


def check_gradients(
    name: str, size: int, engines: Sequence[str], source: str | None, shape: str | None, device_name: str
) -> None:
    """Print which engine ``auto`` takes, and a table of every engine's error and time."""
    if size < 1:
        raise UsageError(f"--batch must be at least 1, got {size}.")
    for engine in engines:
        if engine not in FASTEST_FIRST:
            known = ", ".join(FASTEST_FIRST)
            raise UsageError(f"unknown engine {engine!r}{did_you_mean(engine, FASTEST_FIRST)}: choose from {known}.")
    model, loss, batch = _problem(name, size, source, shape)
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
        table.add_row(row.engine, error, _ratio(row.ratio), row.message)
    return table


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _problem(name: str, size: int, source: str | None, shape: str | None) -> tuple[nn.Module, Any, Any]:
    """A model, its per-example loss and a batch: of the user's data, or generated."""
    if source and shape:
        raise UsageError("--shape has no effect with --source, whose inputs have a shape of their own: leave it out.")
    if is_file(name) and not _makes_models(name):
        function = load_function(name)
        with running(name):
            made = function(size)
        if not isinstance(made, tuple) or len(made) != 3:
            raise UsageError(f"{name} must return (model, per_example_loss, batch), got {type(made).__name__}.")
        return made
    if source:
        return _on_data(name, source, size)
    return _generated(name, _shape(name, shape), size)


def _makes_models(name: str) -> bool:
    """Whether a user's function is one for ``fit``, of the number of classes and the shape of an input."""
    return {"classes", "shape"} & inspect.signature(load_function(name)).parameters.keys() != set()


def _on_data(name: str, source: str, size: int) -> tuple[nn.Module, Any, Any]:
    examples = as_examples(source, name="source")
    outputs = class_count(examples)
    examples = examples.subset(range(min(size, len(examples))))
    model = make_model(name, "noisy", classes=outputs or 1, shape=tuple(examples.inputs.shape[1:]), seed=0)
    inputs = make_prepare(examples, model, standardize=None)(examples.inputs)
    return model, _labelled_loss if outputs else _regression_loss, (inputs, examples.labels)


def _generated(name: str, shape: tuple[int, ...], size: int) -> tuple[nn.Module, Any, Any]:
    """Random inputs with random labels."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(size, *shape, generator=draw)
    labels = torch.randint(_CLASSES, (size,), generator=draw)
    return make_model(name, "noisy", classes=_CLASSES, shape=shape, seed=0), _labelled_loss, (inputs, labels)


def _shape(name: str, stated: str | None) -> tuple[int, ...]:
    if stated is not None:
        try:
            return tuple(int(size) for size in stated.split(","))
        except ValueError:
            raise UsageError(f"--shape must be numbers with commas, such as 3,32,32, got {stated!r}.") from None
    if is_file(name):
        raise UsageError(f"{name} needs the shape of its inputs: add --source DATA, or --shape 3,32,32.")
    if name not in _SHAPES:
        by_name(name, classes=_CLASSES, shape=(1,))  # raises, with the known names
    return _SHAPES[name]


def _labelled_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def _regression_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return squared_error(model(batch[0]), batch[1])
