"""What the longer verbs of the command line do: ``fit`` on one's own data, and ``check-gradients``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from soseleto import manifest, models
from soseleto.batch import cross_entropy
from soseleto.data import read_pair
from soseleto.data.reading import Pair
from soseleto.engines import FASTEST_FIRST, EngineReport
from soseleto.engines import check_gradients as compare
from soseleto.errors import UsageError, did_you_mean
from soseleto.progress import LiveLine
from soseleto.report import write_report
from soseleto.result import Result
from soseleto.run import RunFolder
from soseleto.training import fit as train

SUSPECT = 0.1  # a weight below this is counted as a suspect in the closing lines
_SHAPES = {"quick": (3, 32, 32), "lenet": (1, 28, 28), "resnet18": (3, 32, 32), "mlp": (2,)}


@dataclass(frozen=True, kw_only=True)
class FitWords:
    """The words of ``soseleto fit``; None leaves a choice to the library."""

    source: Path
    target: Path
    out: Path
    test: Path | None
    mode: str
    model: str | None
    epochs: int
    seed: int
    device: str
    skip_bad: bool
    reading: dict[str, Any]  # image size and columns, for the reader
    training: dict[str, Any]  # batch sizes, rates, engine, for the training


def fit(words: FitWords, say: Callable[[str], None]) -> None:
    """Read, train, report, and end with what was found."""
    reading = _given(words.reading)
    pair = read_pair(words.source, words.target, words.test, mode=words.mode, skip_bad=words.skip_bad, **reading)
    for problem in pair.problems:
        say(str(problem))
    model = _model(words.model, pair, words.mode, words.seed)
    say(_plan(pair, words, model))
    with LiveLine() as progress:
        result = train(
            model,
            pair.source,
            pair.target,
            words.mode,  # type: ignore[arg-type]  # read_pair has refused any other
            test=pair.test,
            epochs=words.epochs,
            seed=words.seed,
            device=words.device,
            out=words.out,
            progress=progress,
            **_given(words.training),
        )
    manifest.remember(RunFolder(words.out), words.source, reading, pair.columns)
    if pair.problems:
        dropped = set(pair.dropped)
        RunFolder(words.out).write_problems([{**p.to_dict(), "left_out": p in dropped} for p in pair.problems])
    for line in _found(result, write_report(words.out)):
        say(line)


def check_gradients(model: str, batch_size: int, engines: Sequence[str]) -> None:
    """Print a table of the engines' errors and times."""
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
    """A model, its per-example loss and a batch: random images for a model by name, else what the file gives."""
    if _is_file(model):
        made = load_function(model)(batch_size)
        if not isinstance(made, tuple) or len(made) != 3:
            raise UsageError(f"{model} must return (model, per_example_loss, batch), got {type(made).__name__}.")
        return made
    if model not in _SHAPES:
        models.by_name(model, classes=10, shape=(1,))  # raises, with the names there are
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(batch_size, *_SHAPES[model], generator=draw)
    labels = torch.randint(10, (batch_size,), generator=draw)
    return models.by_name(model, classes=10, shape=_SHAPES[model]), _labelled_loss, (inputs, labels)


def _labelled_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def _model(name: str | None, pair: Pair, mode: str, seed: int) -> nn.Module:
    """A whole classifier in noisy mode, its trunk in transfer mode; initialised from the seed."""
    shape = tuple(pair.source.inputs.shape[1:])
    name = name or ("quick" if len(shape) == 3 else "mlp")
    if pair.target.labels.is_floating_point() and not _is_file(name):
        raise UsageError("the labels are real numbers: train a regression with soseleto.fit(..., loss=...).")
    classes = len(pair.target.classes or ()) or int(pair.target.labels.max()) + 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if _is_file(name):
            return _own_model(name, classes, shape)
        whole = models.by_name(name, classes=classes, shape=shape)
    assert isinstance(whole, nn.Sequential)
    return whole if mode == "noisy" else whole[:-1]


def _own_model(name: str, classes: int, shape: tuple[int, ...]) -> nn.Module:
    model = load_function(name)(classes=classes, shape=shape)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{name} must return a torch.nn.Module, got {type(model).__name__}.")
    return model


def _is_file(name: str) -> bool:
    return ".py:" in name or name.endswith(".py")


def load_function(name: str) -> Callable[..., Any]:
    """``path/to/file.py:function`` as the function; the file's own folder can be imported from."""
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
    spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        raise UsageError(f"{path} has no function {function!r}{did_you_mean(function, dir(module))}.")
    return found


def _plan(pair: Pair, words: FitWords, model: nn.Module) -> str:
    size = sum(p.numel() for p in model.parameters())
    return (
        f"{len(pair.source):,} source and {len(pair.target):,} target examples, {words.mode} mode, "
        f"{words.epochs} epochs, a model of {size:,} parameters; writing to {words.out}"
    )


def _found(result: Result, page: Path) -> list[str]:
    last = result.history[-1]
    suspects = int((result.weights < SUSPECT).sum())
    lines = [
        f"effective source size {last['effective_source']:,.0f} of {len(result.weights):,}",
        f"{suspects:,} suspects: source examples of weight below {SUSPECT} (soseleto rank {result.out} --worst 20)",
    ]
    if last.get("test_accuracy") is not None:
        lines.insert(0, f"test accuracy {last['test_accuracy']:.1f} %")
    return [*lines, f"report: {page}"]


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
