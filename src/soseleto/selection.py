"""Source weights in a training loop of your own: ``Selection`` takes the place of ``loss.backward()``.

    selection = Selection(model, n_source=len(source), loss=per_example_loss)
    for batch, target_batch in zip(source_loader, cycle(target_loader)):
        selection.backward(batch, target_batch, index=batch["index"])
        optimizer.step()
        optimizer.zero_grad()

A call evaluates the gradient of the weighted source loss and adds it to ``.grad``, as ``loss.backward()`` would, and
moves the weights of the batch's examples: the same Algorithm 1 that ``fit`` runs, up to the optimizer's step.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from soseleto.algorithm import Evaluated, Soseleto
from soseleto.data import structure
from soseleto.data.batches import Batch
from soseleto.defaults import resolve, to_data
from soseleto.engines import trainable
from soseleto.engines.model_state import sharded_modules
from soseleto.errors import UsageError
from soseleto.models.trunk_and_heads import evaluation_mode
from soseleto.parallel.fsdp import ShardedSharing, gathered, parts_of, shards, sharing_of
from soseleto.parallel.micro_batches import PER_PART, Sharing, average_running_statistics, require_divisible
from soseleto.parallel.reducer import Reducer, existing
from soseleto.pieces.direction import ADAMS, preconditioned
from soseleto.pieces.last_layer import has_last_layer
from soseleto.task.cuda_graph import CapturedStep
from soseleto.task.loop import JoinBatches, LoopBatch, LoopLosses, PerExampleLoss, Unscaled, batch_length
from soseleto.task.task import Coverage, Task, laid_out_like

logger = logging.getLogger("soseleto")
GRADIENT = "gradient of "  # before a parameter's name, among the numbers of a step
Features = Tensor | Callable[[Any], Tensor] | None
Part = nn.Module | str | Iterable[str] | None  # of a model: a submodule, or prefixes of parameter names


class Selection:
    """A weight and a score for each of ``n_source`` source examples, learned inside a loop of your own.

    Args:
        model: any module; it is neither wrapped nor changed.
        n_source: the number of source examples; ``index`` counts from 0 to n_source − 1.
        loss: ``loss(model, batch) -> (B,)``, one loss per example, of batches of any structure.
        target_loss: where the target's loss is another, as with classes of its own (transfer mode).
        source_head, target_head: the parts of the model that only the source's or only the target's loss trains
            (transfer mode): a submodule, or prefixes of parameter names. All other parameters are shared.
        classes: the number of classes, where ``loss`` is the cross-entropy of class labels and source and target have
            the same ones. The default method is then that of ``fit`` for classes.
        epochs: for how long the loop trains, by which the default weight step goes.
        features: numbers by which examples that are alike can be told, a matrix with one row per source example or
            ``features(batch) -> (B, d)``. Weights are then those that the features let one expect
            (``pieces.from_features``), so that one pass over the source is enough.
        method: ``Soseleto(...)`` with settings of its own; by default ``soseleto.defaults.resolve`` chooses it.
        optimizer: the weight step follows this optimizer's learning rate down, as in ``fit``; without one it is
            constant. ``preconditioned``, the default with features, takes Adam's state into the alignments. The
            optimizer is only read.
        reducer: the ranks of a training on several processes, see ``soseleto.ranks``; by default those of the process
            group that exists. Every rank gives its own part of the batch and gets the whole batch's gradient; all ranks
            hold the same model and the same weights. The losses get the model without DistributedDataParallel. Of a
            model that was split by ``fully_shard`` every rank gets its part of the gradient.
        join: ``join(batch, target_batch)`` makes one batch of both, source first, so that they share a pass, which is
            faster; it returns None for batches that it cannot join. Used where the engine can.
        cuda_graph: on a GPU, record a call once for every shape of its batches and replay it, which is several times
            faster where the model is small; for batches that are tensors or dicts, tuples and lists of these. A message
            in the log says where that is impossible.

    Example:
        >>> import torch.nn.functional as F
        >>> model = nn.Linear(3, 2)
        >>> selection = Selection(
        ...     model, n_source=8, loss=lambda model, b: F.cross_entropy(model(b[0]), b[1], reduction="none")
        ... )
        >>> x, y = torch.randn(8, 3), torch.arange(8) % 2
        >>> numbers = selection.backward((x[:4], y[:4]), (x[4:], y[4:]), index=torch.arange(4))
        >>> model.weight.grad.shape, selection.weights.shape
        (torch.Size([2, 3]), torch.Size([8]))
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        n_source: int,
        loss: PerExampleLoss,
        target_loss: PerExampleLoss | None = None,
        source_head: Part = None,
        target_head: Part = None,
        classes: int | None = None,
        epochs: int | None = None,
        features: Features = None,
        method: Soseleto | None = None,
        optimizer: Optimizer | None = None,
        reducer: Reducer | None = None,
        join: JoinBatches | None = None,
        cuda_graph: bool = False,
    ) -> None:
        if join is not None and target_loss is not None:
            raise UsageError("join lets source and target share a pass, which needs one loss: leave target_loss out.")
        model = model.module if isinstance(model, DistributedDataParallel) else model
        self._losses = LoopLosses(loss, target_loss or loss, join)
        of_source, of_target = _names(model, source_head, "source_head"), _names(model, target_head, "target_head")
        device = next(model.parameters()).device
        self._sharing = sharing_of(model, Sharing(reducer or existing(device)))
        _require_same(model, self._sharing.reducer)
        self._of_source = of_source
        self._task = Task(
            model=model,
            losses=self._losses,
            n_source=n_source,
            steps=0,
            shared=frozenset(trainable(model)) - of_source - of_target,
            target_head=of_target,
            make_optimizer=_no_optimizer,
            device=device,
            classes=classes,
            sharing=self._sharing,
            features=_by_batch(features, n_source, device),
        )
        self._announced = False
        self._optimizer = optimizer
        self._chosen = method
        is_noisy, alone = target_loss is None and not of_source and not of_target, self._sharing.reducer.ranks == 1
        self._known: dict[str, Any] = {  # by which the method is resolved
            "mode": "noisy" if is_noisy else "transfer",
            # The default for classes keeps means of every example, which ranks of a loop do not share.
            "classes": classes is not None and is_noisy and alone,
            "epochs": epochs,
            "ends_in_linear": True,  # until the first batch
            "features": features is not None,
            "adam": features is not None and isinstance(optimizer, ADAMS),
        }
        self._asks_model = method is None and self._known["classes"] and features is None
        self._start()
        self._said: Any = None  # what the log says of the alignments
        self._records = cuda_graph and self._state.task.device.type == "cuda" and self._sharing.reducer.ranks == 1
        self._recorded: dict[torch.dtype | None, CapturedStep] = {}  # by autocast's precision

    def _start(self) -> None:
        """Resolve the method by what is known, and begin with it."""
        task = self._task
        self.settings = resolve(task.model, n_source=task.n_source, method=self._chosen, **self._known)
        self._method: Soseleto = self.settings.method  # type: ignore[assignment]  # the user's, or the default
        self._state = self._method.start(task)
        if self._sharing.reducer.ranks > 1 and _keeps_examples(self._state.pieces):
            raise UsageError(
                "beyond_noise keeps means of every example, which ranks of a loop of your own do not share: "
                "leave it out, or use fit."
            )
        if self._optimizer is not None:
            self._state.use_optimizer(self._optimizer)
        if not self._asks_model:
            logger.info(self.settings.line())

    def _ask_model(self, source: Batch) -> None:
        """At the first batch: whether the model ends in a linear layer, as the default for classes would have it."""
        self._asks_model = False
        model = self._task.model
        with self._losses.inside(self._task.device, None), evaluation_mode(model):
            self._known["ends_in_linear"] = has_last_layer(self._losses, model, source)
        if self._known["ends_in_linear"]:
            logger.info(self.settings.line())
        else:
            self._start()

    @property
    def weights(self) -> Tensor:
        """One float32 weight per source example, on the CPU."""
        return self._state.weights.values.detach().cpu().clone()

    @property
    def scores(self) -> Tensor:
        """One float32 score per source example: the running mean of its alignments, never clipped."""
        return self._state.weights.scores.detach().cpu().clone()

    @property
    def visits(self) -> Tensor:
        """How often each source example was in a batch."""
        return self._state.weights.visits.cpu()

    @property
    def engine(self) -> str:
        """The engine that computes the alignments; ``"auto"`` until the first batch."""
        return self._state.engine.name

    @property
    def coverage(self) -> Coverage:
        """What the alignments are made of, and when they were last compared with ordinary backward passes."""
        return self._state.coverage

    def follow(self, optimizer: Optimizer) -> None:
        """Follow another optimizer from now on, where a training continues with a new one; weights and scores stay."""
        if optimizer is self._state.optimizer:
            return
        self._optimizer = optimizer
        self._state.use_optimizer(optimizer)
        self._recorded.clear()

    def backward(
        self, batch: Any, target_batch: Any, *, index: Any, scale: float = 1.0, scaler: Any = None
    ) -> dict[str, Tensor]:
        """Add the gradient of ``scale`` times the weighted source loss to ``.grad``, and move the weights.

        Args:
            batch, target_batch: what ``loss`` and ``target_loss`` take.
            index: the places of the batch's examples among the source examples, (B,); each at most once.
            scale: 1/accumulation where gradients are accumulated over several calls; weights move at each of them.
            scaler: a ``torch.amp.GradScaler``, where ``scaler.scale(loss).backward()`` would be written.

        Returns:
            the mean source and target loss, as tensors that are not waited for.

        Called under ``torch.autocast`` the losses are computed in its precision and the alignments in float32.
        """
        device = self._task.device
        self._check_statistics()
        self._read_trained()
        source, target = self._batches(batch, target_batch, _places(index))
        if self._asks_model and len(source):
            self._ask_model(source)
        state = self._state
        factor = None if scaler is None else scaler.scale(torch.ones((), dtype=torch.float32, device=device))
        inside = None if factor is None else factor / _power_of_two(source.total)  # losses are not divided by B here
        state.task = replace(self._task, sharing=Unscaled(self._sharing, inside))  # type: ignore[arg-type]
        run = self._run_for(source, target) if factor is None else self._backward
        with self._losses.inside(device, inside):
            numbers, gradients = _apart(run(source, target))
        _add_gradients(state.task.model, gradients, scale if factor is None else scale * factor)
        average_running_statistics(state.task.model, self._sharing.reducer)
        self._log_alignments()
        return numbers

    def _backward(self, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        """One step without that of the optimizer; the gradients are among the numbers."""
        evaluated = self._method.evaluate(self._state, source, target)
        if self._method.weight_step is not None:
            self._method.move(self._state, evaluated)
        self._exchange(evaluated)
        self._state.advance(1)
        return {**evaluated.numbers, **{GRADIENT + name: g for name, g in evaluated.gradients.items()}}

    def _run_for(self, source: Batch, target: Batch) -> Callable[[Batch, Batch], dict[str, Tensor]]:
        """The step, as a CUDA graph where that is asked for and every part of the batches is a tensor."""
        parts = pytree.tree_leaves((source.inputs, target.inputs))
        if not self._records or not all(isinstance(part, Tensor) for part in parts):
            return self._backward
        device = self._state.task.device.type
        precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        if precision not in self._recorded:
            reads = ("capturable", "fused") if isinstance(self._method.direction, preconditioned) else ()
            self._recorded[precision] = CapturedStep(self._backward, self._state, logger.info, reads=reads)
        return self._recorded[precision]

    def _read_trained(self) -> None:
        """The parameters of θ, anew: layers may be unfrozen or added during a training."""
        shared = frozenset(trainable(self._task.model)) - self._of_source - self._task.target_head
        if shared != self._task.shared:
            self._task = replace(self._task, shared=shared)
            self._recorded.clear()

    def _log_alignments(self) -> None:
        """Log what the alignments cover, once and when it changes."""
        now = self._state.engine.name, self._task.shared
        if now != self._said and now[0] != "auto":
            self._said = now
            logger.info(self._state.coverage.sentence())

    def _check_statistics(self) -> None:
        """Log once that BatchNorm's statistics are those of each rank's part."""
        if self._sharing.reducer.ranks > 1 and require_divisible(self._state.task.model) and not self._announced:
            self._announced = True
            logger.info(PER_PART)

    def state_dict(self) -> dict[str, Any]:
        """Weights, scores, visits, running means and the peak learning rate, for ``torch.save`` or safetensors.

        Ranks all hold the same. Tensors are copies, which later steps do not change.
        """
        state = self._state.state()
        kept = copy.deepcopy(gathered(state) if self._is_sharded else state)
        return {**kept, "settings": to_data(self._method), "known": dict(self._known)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` returned, with the same settings."""
        if self._chosen is None and self._known != state["known"]:
            self._known, self._asks_model = dict(state["known"]), False
            self._start()
        if state["settings"] != to_data(self._method):
            raise UsageError(
                f"the saved selection has other settings ({state['settings']}): make Selection(...) with these."
            )
        self._state.load_state(parts_of(state, shards(self._task.model)) if self._is_sharded else state)
        self._recorded.clear()

    @property
    def _is_sharded(self) -> bool:
        return isinstance(self._sharing, ShardedSharing)

    def _batches(self, batch: Any, target_batch: Any, places: Tensor) -> tuple[Batch, Batch]:
        """This rank's parts; only the batch of all ranks must have examples, each source example at most once."""
        reducer, device, n = self._sharing.reducer, self._state.task.device, batch_length(target_batch)
        parts = [places] if reducer.ranks == 1 else reducer.every(places.cpu())
        if reducer.ranks > 1 or not len(places):  # the weights check the indices of a single process
            self._state.weights.check(torch.cat(parts))
        lengths = [length for length in reducer.every(n) if length is not None]
        if lengths and not sum(lengths):
            raise UsageError("the target batch has no examples: give at least one.")
        of_target = torch.zeros(n or 0, dtype=torch.int64, device=device)
        source = self._batch(places.to(device), batch, sum(map(len, parts)))
        return source, self._batch(of_target, target_batch, sum(lengths))

    def _batch(self, index: Tensor, data: Any, whole: int) -> Batch:
        alone = self._sharing.reducer.ranks == 1
        return LoopBatch(index, structure.plain(data) if self._records else data, index, None if alone else whole)

    def _exchange(self, evaluated: Evaluated) -> None:
        """Every rank applies the moves of all ranks, so that all hold the same weights."""
        reducer = self._sharing.reducer
        if reducer.ranks == 1 or self._method.weight_step is None:
            return
        weights, device = self._state.weights, self._state.task.device
        for index, rows in reducer.every((evaluated.step.source.index.cpu(), evaluated.rows.cpu())):
            weights.put(index.to(device), rows.to(device))


def _by_batch(features: Features, n_source: int, device: torch.device) -> Callable[[Batch], Tensor] | None:
    if not isinstance(features, Tensor):
        return None if features is None else lambda batch: features(batch.inputs)
    if features.ndim != 2 or len(features) != n_source:
        raise UsageError(
            f"features have shape {tuple(features.shape)}: give one row for each of the {n_source} source examples."
        )
    rows = features.to(device)
    return lambda batch: rows[batch.index]


def _apart(numbers: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Numbers, which the next step must not overwrite, and gradients."""
    gradients = {name.removeprefix(GRADIENT): g for name, g in numbers.items() if name.startswith(GRADIENT)}
    return {name: value.clone() for name, value in numbers.items() if not name.startswith(GRADIENT)}, gradients


def _add_gradients(model: nn.Module, gradients: Mapping[str, Tensor], factor: Tensor | float) -> None:
    """Add to ``.grad``, as ``backward`` does.

    Copies: parameters may share a gradient, and those of a CUDA graph are overwritten by its next replay.
    """
    named = [(p, gradients[name]) for name, p in trainable(model).items() if name in gradients]
    parameters = [p for p, _ in named]
    values = torch._foreach_mul([g for _, g in named], factor) if named else ()
    if present := [(p.grad, g) for p, g in zip(parameters, values, strict=True) if p.grad is not None]:
        torch._foreach_add_([old for old, _ in present], [new for _, new in present])
    for p, g in zip(parameters, values, strict=True):
        if p.grad is None:
            p.grad = laid_out_like(p, g)


def _keeps_examples(tree: Any) -> bool:
    """Whether a piece's state has entries of its own for every source example."""
    if isinstance(tree, Mapping):
        return "examples" in tree or any(map(_keeps_examples, tree.values()))
    return isinstance(tree, list) and any(map(_keeps_examples, tree))


def _names(model: nn.Module, part: Part, argument: str) -> frozenset[str]:
    """The parameters of a part of the model, frozen ones too: these may be trained later."""
    if part is None:
        return frozenset()
    if isinstance(part, nn.Module):
        own = {id(p) for p in part.parameters()}
        found = frozenset(name for name, p in model.named_parameters() if id(p) in own)
    else:
        prefixes = (part,) if isinstance(part, str) else tuple(part)
        found = frozenset(name for name, _ in model.named_parameters() if name.startswith(prefixes))
    if not found:
        raise UsageError(f"{argument} matches no parameter of the model: give a submodule or prefixes of names.")
    return found


def _require_same(model: nn.Module, reducer: Reducer) -> None:
    """Raise unless all ranks hold the same model."""
    if reducer.ranks == 1 or sharded_modules(model):
        return
    sums = reducer.every([float(p.detach().double().sum()) for p in model.parameters()])
    if any(of_rank != sums[0] for of_rank in sums):
        raise UsageError(
            "the ranks hold different models: call torch.manual_seed before the model is made, or load the same file."
        )


def _places(index: Any) -> Tensor:
    places = torch.as_tensor(index)
    if not places.numel():  # a list without elements has no type of its own
        return places.new_empty(0, dtype=torch.int64)
    if places.ndim != 1 or places.dtype.is_floating_point or places.dtype.is_complex or places.dtype == torch.bool:
        raise UsageError(
            f"index must be a vector of whole numbers, got {places.dtype} {tuple(places.shape)}: "
            "give the places of the batch's examples in the source."
        )
    return places.to(torch.int64)


def _power_of_two(n: int) -> int:
    """The smallest power of two that is not below n: a factor without rounding errors."""
    return 1 << (n - 1).bit_length()


def _no_optimizer(parameters: Any) -> Optimizer:
    raise AssertionError("the loop has its own optimizer")
