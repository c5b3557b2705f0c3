"""``soseleto.score``: alignments of a pool with the gradients of several targets, at checkpoints of a model.

    q = ⟨∂ℓ_j/∂θ, P ∂L_t/∂θ⟩ for every example j of the pool, target t and checkpoint θ

P is the preconditioner of Adam, where its state is given. This is what selection before a training needs (as LESS does
it, with exact gradients in place of projected ones); weights that are learned in the run are those of ``Selection``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from soseleto.data import structure
from soseleto.data.examples import content_of
from soseleto.engines import make_engine, trainable
from soseleto.engines.autograd import add_gradients, gradient
from soseleto.engines.interface import reductions_dtype
from soseleto.engines.model_state import sharded_modules
from soseleto.errors import DataError, UsageError, need
from soseleto.models.trunk_and_heads import evaluation_mode
from soseleto.parallel.reducer import PATIENCE, Reducer, existing
from soseleto.pieces.direction import as_optimizer_steps
from soseleto.pieces.piece import ParameterStates
from soseleto.run_folder.files import aside, tensors_of, write_text
from soseleto.task.loop import PerExampleLoss

logger = logging.getLogger("soseleto")
PER_PART = 32  # batches between two files
MODELS = ("model.safetensors", "adapter_model.safetensors")  # in a checkpoint's folder, with optimizer.pt beside it


@dataclass(frozen=True, eq=False)
class Scores:
    """targets: names; alignments: (checkpoints, targets, n) in the pool's order, as they are."""

    targets: tuple[str, ...]
    alignments: Tensor

    @property
    def values(self) -> Tensor:
        """(targets, n): means over checkpoints of alignments whose root mean square over the pool is 1 at each."""
        size = self.alignments.square().mean(-1, keepdim=True).sqrt()
        return (self.alignments / size.clamp_min(torch.finfo(size.dtype).tiny)).mean(0)

    def top(self, k: int, target: str | None = None) -> Tensor:
        """The places of the k best examples of the pool, for one target or for the one that each serves best."""
        if target is not None and target not in self.targets:
            raise UsageError(f"there is no target {target!r}: choose from {', '.join(self.targets)}.")
        if not 1 <= k <= self.alignments.shape[-1]:
            raise UsageError(f"k must be from 1 to {self.alignments.shape[-1]}, the size of the pool, got {k}.")
        values = self.values.amax(0) if target is None else self.values[self.targets.index(target)]
        return values.topk(k).indices


def score(
    model: nn.Module,
    pool: Any,
    targets: Mapping[str, Any],
    *,
    loss: PerExampleLoss,
    collate: Callable[[list[Any]], Any] = default_collate,
    batch_size: int = 16,
    checkpoints: Sequence[str | Path] = (),
    optimizer: Optimizer | None = None,
    out: str | Path | None = None,
) -> Scores:
    """Alignments of the examples of a pool with the gradients of targets. The model is left as it was.

    Args:
        model: any module; the gradients are those of its trainable parameters, in evaluation mode.
        pool: a data set with a length; ``collate`` makes batches of its items, as for a DataLoader.
        targets: data sets by name, each for one direction. Every target costs a pass over the pool.
        loss: ``loss(model, batch) -> (B,)``, one loss per example.
        checkpoints: files of safetensors with the model's parameters, or folders that have one, such as the
            checkpoints of a Hugging Face Trainer; by default the model as it is.
        optimizer: alignments as this Adam's own steps would have them. Its state is read from ``optimizer.pt`` in the
            folders of ``checkpoints``; without checkpoints it is that of the optimizer as it is.
        out: a folder to which alignments are written as they are found; a call that was interrupted goes on from
            these, where model, optimizer and sizes are the same. Started by torchrun, every process scores its own
            part of the pool.

    Example:
        >>> import torch.nn.functional as F
        >>> model = nn.Linear(3, 2)
        >>> examples = [(torch.randn(3), i % 2) for i in range(8)]
        >>> loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        >>> scores = score(model, examples, {"first": examples[:2], "second": examples[2:4]}, loss=loss)
        >>> scores.values.shape, scores.top(3, "first").shape
        (torch.Size([2, 8]), torch.Size([3]))
    """
    if not targets or not len(pool) or not all(map(len, targets.values())):
        raise UsageError(
            "score needs examples in the pool and in every target: write score(model, pool, {'name': ...})."
        )
    if sharded_modules(model):
        raise UsageError("score needs a whole model on every process: give it the model before fully_shard.")
    device = next(model.parameters()).device
    reducer = existing(device, answer=PATIENCE)
    steps = [str(path) for path in checkpoints] or [""]
    asked = {
        "examples": len(pool),
        "batch_size": batch_size,
        "targets": {name: len(data) for name, data in targets.items()},
        "checkpoints": steps,
        "optimizer": None if optimizer is None else type(optimizer).__name__,
        "parameters": sum(p.numel() for p in trainable(model).values()),
    }
    if out is not None and not checkpoints:
        values = model.state_dict(), {} if optimizer is None else optimizer.state_dict()
        asked["model"] = content_of(values).hexdigest()
    parts = _Parts(None if out is None else Path(out), len(pool), batch_size * PER_PART, len(steps))
    reducer.first(lambda: parts.begin(asked))
    engine = make_engine("auto")

    def batches(data: Any, places: range) -> Iterator[Any]:
        for begin in places[::batch_size]:
            items = [data[i] for i in places[begin - places.start : begin - places.start + batch_size]]
            yield structure.to_device(structure.plain(collate(items)), device)

    def direction(data: Any) -> dict[str, Tensor]:
        """The gradient of the mean loss, as the optimizer would step along it."""
        total, parameters = dict[str, Tensor](), trainable(model)
        for batch in batches(data, range(len(data))):
            losses = loss(model, batch)
            more = gradient(losses, parameters, torch.full_like(losses, 1.0 / len(data)))
            add_gradients(total, {name: g.to(reductions_dtype(g.dtype)) for name, g in more.items()})
        total = {name: g.to(parameters[name].dtype) for name, g in total.items()}
        return total if optimizer is None else as_optimizer_steps(total, ParameterStates(optimizer, model))

    with _restored(model, optimizer) if checkpoints else nullcontext(), evaluation_mode(model):
        for step, path in enumerate(steps):
            missing = reducer.first(partial(parts.missing, step))
            if not missing:
                continue
            mine = missing[reducer.rank :: reducer.ranks]
            if path:
                _load(model, optimizer, Path(path))
            directions = [direction(data) for data in targets.values()]
            for at, part in enumerate(mine):
                logger.info("scores: checkpoint %d of %d, part %d of %d", step + 1, len(steps), at + 1, len(mine))
                alignments = [
                    torch.stack([engine(model, loss, batch, g)[1] for g in directions]).float().cpu()
                    for batch in batches(pool, parts.places(part))
                ]
                parts.put(step, part, torch.cat(alignments, 1))
    return Scores(tuple(targets), parts.joined(reducer))


class _Parts:
    """Alignments by checkpoint and part of the pool, in files where there is a folder."""

    def __init__(self, out: Path | None, n: int, size: int, steps: int) -> None:
        self._out, self._n, self._size, self._steps = out, n, size, steps
        self._numbers = range(-(-n // size))
        self._made: dict[tuple[int, int], Tensor] = {}  # where there is no folder

    def begin(self, asked: Mapping[str, Any]) -> None:
        """Refuse a folder of other scores."""
        if self._out is None:
            return
        self._out.mkdir(parents=True, exist_ok=True)
        config = self._out / "config.json"
        if not config.exists():
            write_text(config, json.dumps(asked))
        elif (known := json.loads(config.read_text("utf-8"))) != asked:
            raise UsageError(f"{self._out} has other scores ({known}): give another folder as out=.")

    def places(self, part: int) -> range:
        return range(part * self._size, min((part + 1) * self._size, self._n))

    def missing(self, step: int) -> list[int]:
        return [part for part in self._numbers if self._out is None or not self._file(step, part).is_file()]

    def put(self, step: int, part: int, alignments: Tensor) -> None:
        if self._out is None:
            self._made[step, part] = alignments
            return
        with aside(self._file(step, part)) as path, path.open("wb") as file:
            np.save(file, alignments.numpy())

    def joined(self, reducer: Reducer) -> Tensor:
        """(checkpoints, targets, n), on every process."""
        made = {key: part for of_rank in reducer.every(self._made) for key, part in of_rank.items()}

        def of(step: int, part: int) -> Tensor:
            return made[step, part] if self._out is None else torch.from_numpy(np.load(self._file(step, part)))

        return torch.stack([torch.cat([of(step, part) for part in self._numbers], 1) for step in range(self._steps)])

    def _file(self, step: int, part: int) -> Path:
        assert self._out is not None
        return self._out / f"{step}-{part:06d}.npy"


@contextmanager
def _restored(model: nn.Module, optimizer: Optimizer | None) -> Iterator[None]:
    """Give model and optimizer their own values back afterwards."""
    before = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    states = None if optimizer is None else optimizer.state_dict()
    try:
        yield
    finally:
        model.load_state_dict(before)
        if optimizer is not None and states is not None:
            optimizer.load_state_dict(states)


def _load(model: nn.Module, optimizer: Optimizer | None, path: Path) -> None:
    file = next((path / name for name in MODELS if (path / name).is_file()), path)
    if not file.is_file():
        raise DataError(f"{path} is neither a file nor a folder with {' or '.join(MODELS)}: give such a checkpoint.")
    tensors, _ = tensors_of(file)
    try:
        wrong = _load_adapter(model, tensors) if file.name == MODELS[1] else _load_whole(model, tensors)
    except RuntimeError as error:  # tensors of other shapes
        why = " ".join(str(error).split())
        raise DataError(f"{file} does not fit the model ({why}): build the model that was saved.") from error
    if wrong:
        raise DataError(f"{file} does not fit the model, as {wrong[0]!r}: build the model that was saved.")
    if optimizer is not None:
        state = path / "optimizer.pt"
        if not state.is_file():
            raise DataError(f"{state} is missing: leave optimizer out for plain alignments, or give its checkpoints.")
        optimizer.load_state_dict(torch.load(state, map_location="cpu", weights_only=True))


def _load_whole(model: nn.Module, tensors: dict[str, Tensor]) -> list[str]:
    """The names that only the model or only the file has; of tied parameters a file has one."""
    result = model.load_state_dict(tensors, strict=False)
    own = model.state_dict(keep_vars=True)
    tied = {p.data_ptr() for name, p in own.items() if name in tensors}
    return [*result.unexpected_keys, *(name for name in result.missing_keys if own[name].data_ptr() not in tied)]


def _load_adapter(model: nn.Module, tensors: dict[str, Tensor]) -> list[str]:
    peft = need("peft", to="an adapter")
    own = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    unexpected: list[str] = peft.set_peft_model_state_dict(model, tensors).unexpected_keys
    return [*unexpected, *(own.keys() - tensors.keys())]
