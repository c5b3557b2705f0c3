"""What the trainings of all tables have in common: budget, rates, initial values, and how accuracy is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.experiment import Run, Sides
from experiments.results import Row
from soseleto.data import Examples, seed_for
from soseleto.methods import Recording, Signals
from soseleto.models.trunk_and_heads import evaluation_mode
from soseleto.parallel.reducer import choose_device
from soseleto.schedules import SCHEDULES
from soseleto.task.task import MakeOptimizer, Method
from soseleto.training.fit import fit
from soseleto.training.options import Probes
from soseleto.training.result import Result

_TOGETHER = 1000  # examples per forward pass


def train(
    run: Run,
    model: nn.Module,
    sides: Sides,
    *,
    method: Method,
    optimizer: MakeOptimizer,
    signals: Signals | None = None,
    **arguments: Any,
) -> Result:
    """``fit`` with the run's budget, rates, schedule and probes; ``arguments`` are further ones of ``fit``."""
    batches = {"batch_size": min(run.batch_size, len(sides.source)),  # cleanlab may keep few
               "target_batch_size": min(run.target_batch_size, len(sides.target))}  # fmt: skip
    given = {**batches, "epochs": run.epochs, "optimizer": rates(run, optimizer), "seed": run.seed}
    given["method"] = method if signals is None else Recording(method, signals)
    if share := getattr(run, "probes", 0.0):
        given["probes"] = Probes(share=share, labels_before=sides.before)
    return fit(model, sides.source, sides.target, **{**given, **arguments})


class ByEpoch:
    """Percent after every epoch, for ``fit(progress=...)``; the model is trained in place.

    prepare: makes the inputs of the examples those of the model
    """

    def __init__(self, model: nn.Module, prepare: Callable[[Tensor], Tensor] | None = None, **parts: Examples) -> None:
        self.model, self.parts = model, parts
        self.prepare = prepare or (lambda inputs: inputs)
        self.percent = {name: list[float]() for name in parts}

    def __call__(self, event: str, record: Mapping[str, Any]) -> None:
        if event == "epoch":
            for name, examples in self.parts.items():
                right = [self._answers(inputs) for inputs in examples.inputs.split(_TOGETHER)]
                self.percent[name].append(100.0 * float((torch.cat(right) == examples.labels).double().mean()))

    def _answers(self, inputs: Tensor) -> Tensor:
        device = next(self.model.parameters()).device
        with evaluation_mode(self.model), torch.no_grad():
            answers: Tensor = self.model(self.prepare(inputs.to(device))).argmax(1).cpu()
        return answers


def rates(run: Run, optimizer: MakeOptimizer) -> tuple[MakeOptimizer, Any]:
    """The optimizer with the run's rates, and the run's schedule."""
    return partial(optimizer, lr=run.lr, weight_decay=run.weight_decay), SCHEDULES[run.schedule]


def accuracies(run: Run, result: Result, data: Any) -> Row:
    """Percent on held-out examples, if there are any, and on the test set, unless settings are being chosen."""
    found = {} if data.heldout is None else {"heldout_accuracy": result.evaluate(data.heldout)["accuracy"]}
    return found if run.select else {**found, "accuracy": result.evaluate(data.test)["accuracy"]}


@contextmanager
def drawn(seed: int, purpose: str) -> Iterator[None]:
    """Initial values of a model are drawn by the seed; the global random state is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(seed, purpose))
        yield


def for_images(model: nn.Module, device: str) -> nn.Module:
    """Channels last on a GPU: faster, same result."""
    on_gpu = choose_device(device).type == "cuda"
    return model.to(memory_format=torch.channels_last) if on_gpu else model  # type: ignore[call-overload]


def autocast(precision: str | None, device: str) -> torch.dtype | None:
    """The dtype by its name; None and "float32" are full precision, and "auto" is bfloat16 on a GPU."""
    if precision == "auto":
        return torch.bfloat16 if choose_device(device).type == "cuda" else None
    return None if precision in (None, "float32") else getattr(torch, precision)
