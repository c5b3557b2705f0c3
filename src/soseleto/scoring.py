"""``soseleto.score``: alignments of a pool with the gradients of several targets, at checkpoints of a model.

    q = ⟨∂ℓ_j/∂θ, P ∂L_t/∂θ⟩ for every example j of the pool, target t and checkpoint θ

P is the preconditioner of Adam, where its state is given. This is what selection before a training needs (as LESS does
it, with exact gradients in place of projected ones); weights that are learned in the run are those of ``Selection``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from soseleto.engines import make_engine, trainable
from soseleto.engines.autograd import add_gradients, gradient
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
            these. Started by torchrun, every process scores its own part of the pool.

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
    parts = _Parts(None if out is None else Path(out), len(pool), batch_size, tuple(targets), steps)
    reducer.first(parts.begin)
    engine = make_engine("auto")

    def batches(data: Any, places: range) -> Iterator[Any]:
        for begin in places[::batch_size]:
            items = [data[i] for i in places[begin - places.start : begin - places.start + batch_size]]
            yield structure.to_device(structure.plain(collate(items)), device)

    def direction(data: Any) -> dict[str, Tensor]:
        """The gradient of the mean loss, as the optimizer would step along it."""
        total: dict[str, Tensor] = {}
        for batch in batches(data, range(len(data))):
            losses = loss(model, batch)
            add_gradients(total, gradient(losses, trainable(model), torch.full_like(losses, 1.0 / len(data))))
        return total if optimizer is None else as_optimizer_steps(total, ParameterStates(optimizer, model))

    with _restored(model, optimizer, needed=bool(checkpoints)), evaluation_mode(model):
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
                found = [
                    torch.stack([engine(model, loss, batch, g)[1] for g in directions]).float().cpu()
                    for batch in batches(pool, parts.places(part))
                ]
                parts.put(step, part, torch.cat(found, 1))
    return Scores(tuple(targets), parts.joined(reducer))


class _Parts:
    """Alignments by checkpoint and part of the pool, in files where there is a folder."""

    def __init__(self, out: Path | None, n: int, batch_size: int, targets: tuple[str, ...], steps: list[str]) -> None:
        self._out, self._n, self._size, self._steps = out, n, batch_size * PER_PART, steps
        self._asked = {"examples": n, "batch_size": batch_size, "targets": list(targets), "checkpoints": steps}
        self._found: dict[tuple[int, int], Tensor] = {}

    def begin(self) -> None:
        """Refuse a folder of other scores."""
        if self._out is None:
            return
        self._out.mkdir(parents=True, exist_ok=True)
        config = self._out / "config.json"
        if not config.exists():
            write_text(config, json.dumps(self._asked))
        elif (known := json.loads(config.read_text("utf-8"))) != self._asked:
            raise UsageError(f"{self._out} has other scores ({known}): give another folder as out=.")

    def places(self, part: int) -> range:
        return range(part * self._size, min((part + 1) * self._size, self._n))

    def missing(self, step: int) -> list[int]:
        return [part for part in range(-(-self._n // self._size)) if not self._file(step, part).is_file()]

    def put(self, step: int, part: int, found: Tensor) -> None:
        if self._out is None:
            self._found[step, part] = found
            return
        with aside(self._file(step, part)) as path, path.open("wb") as file:
            np.save(file, found.numpy())

    def joined(self, reducer: Reducer) -> Tensor:
        """(checkpoints, targets, n), on every process."""
        found = {key: tensor for every in reducer.every(self._found) for key, tensor in every.items()}
        parts = range(-(-self._n // self._size))
        of_steps = [torch.cat([self._read(found, step, part) for part in parts], 1) for step in range(len(self._steps))]
        return torch.stack(of_steps)

    def _read(self, found: Mapping[tuple[int, int], Tensor], step: int, part: int) -> Tensor:
        if self._out is None:
            return found[step, part]
        return torch.from_numpy(np.load(self._file(step, part), allow_pickle=False))

    def _file(self, step: int, part: int) -> Path:
        return (self._out or Path()) / f"{step}-{part:06d}.npy"


@contextmanager
def _restored(model: nn.Module, optimizer: Optimizer | None, *, needed: bool) -> Iterator[None]:
    """Give model and optimizer their own values back afterwards."""
    if not needed:
        yield
        return
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
    if file.name == MODELS[1]:
        missing = need("peft", to="an adapter").set_peft_model_state_dict(model, tensors).unexpected_keys
    else:
        found = model.load_state_dict(tensors, strict=False)
        tied = {p.data_ptr() for name, p in model.state_dict(keep_vars=True).items() if name in tensors}
        lost = [name for name in found.missing_keys if model.state_dict()[name].data_ptr() not in tied]
        missing = [*found.unexpected_keys, *lost]
    if missing:
        raise DataError(f"{file} does not fit the model, as {missing[0]!r}: build the model that was saved.")
    if optimizer is not None:
        state = path / "optimizer.pt"
        if not state.is_file():
            raise DataError(f"{state} is missing: leave optimizer out for plain alignments, or give its checkpoints.")
        optimizer.load_state_dict(torch.load(state, map_location="cpu", weights_only=True))
