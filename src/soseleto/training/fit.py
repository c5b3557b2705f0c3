"""``fit``: what a user may say, checked and put together; ``loop`` does the training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from soseleto.algorithm import Soseleto
from soseleto.data import Augment, Preprocess, TargetCycle, seed_for
from soseleto.data.preprocess import make_prepare
from soseleto.engines import Engine
from soseleto.engines.shards import is_shard, rest
from soseleto.errors import UsageError
from soseleto.methods.wrappers.record_signals import Recording, Signals
from soseleto.methods.wrappers.skip_non_finite import CountingGuard, Skipping
from soseleto.parallel.device import choose_device
from soseleto.parallel.fsdp import ShardedSharing, require_shardable, sharing_of, split_heads
from soseleto.parallel.micro_batches import Sharing, require_sharing
from soseleto.parallel.reducer import Reducer, Single, owned
from soseleto.run_folder.folder import RunFolder
from soseleto.suspects.probes import Share
from soseleto.task.finite import make_guard
from soseleto.task.losses import Loss, NoisyLosses, Precision, TransferLosses, cross_entropy
from soseleto.task.task import MakeOptimizer, MakeSchedule, Method, Task
from soseleto.training.history import Progress, Records
from soseleto.training.loggers import Logger
from soseleto.training.loop import Loop
from soseleto.training.optimizers import linear, sgd
from soseleto.training.pseudo_labels import as_unlabelled, fit_in_rounds
from soseleto.training.result import Result
from soseleto.training.resume import check_intervals
from soseleto.training.settings import settings_of
from soseleto.training.setup import Data, assemble, check_fit, class_count


def fit(
    model: nn.Module,
    source: Any,
    target: Any,
    mode: Literal["noisy", "transfer"] = "noisy",
    *,
    test: Any = None,
    unlabelled: Any = None,
    epochs: int = 30,
    batch_size: int | None = None,
    target_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    lr: float = 0.01,
    weight_decay: float = 0.0,
    optimizer: MakeOptimizer | None = None,
    schedule: MakeSchedule | None = linear,
    loss: Loss = cross_entropy,
    target_loss: Loss | None = None,
    method: Method | None = None,
    weight_step: float | None = None,
    engine: str | Engine | None = None,
    source_head: nn.Module | None = None,
    target_head: nn.Module | None = None,
    augment_source: Augment | None = None,
    augment_target: Augment | None = None,
    balanced_target: bool = False,
    probes: Share = 0.0,
    labels_before: Any = None,
    suspect_precision: float = 0.95,
    standardize: bool | Preprocess | None = None,
    precision: torch.dtype | None = None,
    cuda_graph: bool = True,
    seed: int = 0,
    device: str | torch.device = "auto",
    out: str | Path | None = None,
    checkpoint_every: float | None = 60.0,
    checkpoint_steps: int | None = None,
    resume: bool = True,
    notes: Mapping[str, Any] | None = None,
    progress: bool | Progress = False,
    loggers: Sequence[Logger] = (),
    non_finite: Literal["stop", "skip"] = "stop",
    reducer: Reducer | None = None,
) -> Result:
    """Train ``model`` on a large, doubtful source for the sake of a small, trusted target; weigh every source example.

    Args:
        model: in noisy mode a whole classifier; in transfer mode the trunk, which returns (B, features). It is trained
            in place and never wrapped.
        source, target, test: ``Examples``, a pair of arrays or tensors (inputs, labels), a Dataset, or a path.
        unlabelled: inputs like the target's without labels, or ``Unlabelled(inputs=..., rounds=...)``: after the
            training they are classified and used as a noisy source, in rounds.
        mode: ``"noisy"`` when both sides have the same classes; ``"transfer"`` gives each side a head of its own.
        epochs, batch_size, target_batch_size: passes over the source; examples per step (256 and 32 where there are
            that many).
        micro_batch_size: at most so many examples go through the model at a time; the result is the whole batch's.
        lr, weight_decay: of the default optimizer, SGD with momentum 0.9.
        optimizer: instead of that, a function from parameters to any torch optimizer.
        schedule: a function from the optimizer and the number of steps to a torch scheduler, which is stepped every
            batch; the default falls linearly to 0, ``None`` keeps the rate constant.
        loss: ``loss(outputs, labels) -> (B,)``; ``target_loss`` where the target's is another (transfer mode).
        method: any method: ``Soseleto(...)`` with settings of its own, or a rival. ``weight_step`` and ``engine`` are
            shorthands for Soseleto's.
        source_head, target_head: the classifiers of transfer mode; linear layers where nothing is said.
        augment_source, augment_target: random changes of image batches.
        balanced_target: class-balanced target batches.
        probes: this share of the target, or ``"auto"``, is planted among the source with known right and wrong labels,
            so that ``result.suspects()`` can tell mislabelled source examples, and how surely (noisy mode).
        labels_before: the labels that the target's examples had before somebody checked them, where these are known:
            probes then make the mistakes that are really made, instead of any with equal chance.
        suspect_precision: the share of the suspects that shall really be mislabelled.
        standardize: centre and scale inputs by the source's statistics, or by the ``Preprocess`` given; by default done
            for uint8 images.
        precision: ``torch.bfloat16`` runs the model under autocast; weights, scores and alignments stay float32.
        cuda_graph: on a GPU, record a step once and replay it; where that is impossible the run says so.
        seed: everything random in the training follows from it; the global random state comes out untouched.
        device: ``"auto"``, ``"cpu"``, ``"cuda"``, ...
        out: a run folder to write. Where it holds a run that was cut short, that run goes on.
        checkpoint_every, checkpoint_steps: seconds and steps between two checkpoints in that folder.
        resume: ``False`` refuses a folder that holds a run of any kind.
        notes: more entries for ``config.json``; a run that goes on must have the same.
        progress: ``True`` for a live line on the terminal, or a function ``progress(event, record)``.
        loggers: where every epoch's numbers go beside the run folder, see ``soseleto.loggers``.
        non_finite: what to do about a loss or gradient that is NaN or infinite: stop and name the examples, or skip
            the step as if it had not been, and count it.
        reducer: the ranks of a training on several processes, see ``soseleto.ranks``.

    Example:
        >>> x, y = torch.randn(64, 2), torch.randint(2, (64,))
        >>> result = fit(nn.Linear(2, 2), (x, y), (x[:8], y[:8]), epochs=1)
        >>> result.weights.shape
        torch.Size([64])
    """
    if unlabelled is not None:
        if not isinstance(reducer or Single(), Single):
            raise UsageError("unlabelled examples are used in one process: start one, or leave them out.")
        given = dict(locals())
        return fit_in_rounds(fit, given, as_unlabelled(given.pop("unlabelled")))
    chosen = _method(method, weight_step, engine)
    make_optimizer = _optimizer(optimizer, lr, weight_decay)
    if epochs < 1:
        raise UsageError(f"epochs must be at least 1, got {epochs}.")
    if not 0.0 < suspect_precision < 1.0:
        raise UsageError(f"suspect_precision must lie between 0 and 1, got {suspect_precision}: for 95 % say 0.95.")
    if target_loss is not None and mode == "noisy":
        raise UsageError("target_loss has no effect in noisy mode, where both sides share one loss: leave it out.")
    check_intervals(checkpoint_every, checkpoint_steps, out)
    if non_finite not in ("stop", "skip"):
        raise UsageError(f"non_finite must be 'stop' or 'skip', got {non_finite!r}.")
    sharing = _sharing(model, reducer, micro_batch_size, chosen)
    team = sharing.reducer
    if isinstance(sharing, ShardedSharing):
        require_shardable(model, non_finite, team.ranks)
    where = team.device or choose_device(device)
    data = Data.read(source, target, test, mode).plant(probes, labels_before, mode=mode, seed=seed)
    if data.probes is not None and not sharing.nothing:
        raise UsageError("probes are followed in one process and on whole batches: say probes=0 beside these.")
    if len(data.source) < team.ranks:
        raise UsageError(f"{team.ranks} ranks are too many for {len(data.source)} source examples: start fewer.")
    signals = None if data.probes is None else Signals(len(data.source))
    batch_size = _batch_size("batch_size", batch_size, 256, len(data.source), "source")
    target_batch_size = _batch_size("target_batch_size", target_batch_size, 32, len(data.target), "target")
    with _seeded(seed, where):
        model.to(where)
        prepare = make_prepare(data.own_source, model, standardize=standardize)
        whole = assemble(model, mode, data, prepare, source_head=source_head, target_head=target_head)
        if isinstance(sharing, ShardedSharing):
            split_heads(whole, (source_head, target_head))
            require_shardable(whole, non_finite, team.ranks)
        inside = Precision(precision)
        losses = NoisyLosses(loss, inside) if mode == "noisy" else TransferLosses(loss, target_loss or loss, inside)
        check_fit(whole, losses, data, prepare)
        rest(whole)
        team.alike(t for t in [*whole.parameters(), *whole.buffers()] if not is_shard(t))
        folder = _folder(out, resume, team)
        guard = CountingGuard(where) if non_finite == "skip" else None
        loop = Loop(
            task=Task(
                model=whole,
                losses=losses,
                n_source=owned(len(data.source), team),
                steps=epochs * math.ceil(len(data.source) / batch_size),
                shared=_names(whole, mode, "trunk."),
                target_head=frozenset() if mode == "noisy" else _names(whole, mode, "target_head."),
                make_optimizer=make_optimizer,
                make_schedule=schedule,
                device=where,
                classes=class_count(data.source),
                guard=guard or make_guard(where, team),
                sharing=sharing,
            ),
            method=_wrapped(chosen, signals, guard),
            signals=signals,
            data=data.to(where),
            fingerprints=data.fingerprints(),
            prepare=prepare,
            evaluated_loss=target_loss or loss,
            batch_size=batch_size,
            target=TargetCycle(
                len(data.target), target_batch_size, seed, data.target.labels.cpu() if balanced_target else None
            ),
            augment_source=augment_source or Augment(),
            augment_target=augment_target or Augment(),
            epochs=epochs,
            seed=seed,
            capture=cuda_graph and where.type == "cuda" and isinstance(team, Single),
            records=Records(folder, *((_progress(progress), loggers) if team.rank == 0 else (None,))),
            keeps=out is not None,
            every=checkpoint_every,
            every_steps=checkpoint_steps,
            suspect_precision=suspect_precision,
        )
        with ExitStack() as stack:
            if out is not None:
                team.first(lambda: stack.enter_context(folder.held()) if folder else None)
            return loop.run(
                {
                    **(notes or {}),
                    "mode": mode,
                    "method": chosen.name,
                    "settings": settings_of(chosen),
                    "epochs": epochs,
                    "batch_size": batch_size,
                    "target_batch_size": target_batch_size,
                    "micro_batch_size": micro_batch_size,
                    "ranks": team.ranks,
                    "lr": lr if optimizer is None else None,
                    "weight_decay": weight_decay,
                    "optimizer": "SGD, momentum 0.9" if optimizer is None else _name_of(optimizer),
                    "schedule": _name_of(schedule),
                    "loss": _name_of(loss),
                    "target_loss": _name_of(target_loss),
                    "balanced_target": balanced_target,
                    "probes": 0 if data.probes is None else len(data.probes),
                    "suspect_precision": suspect_precision,
                    "non_finite": non_finite,
                    "precision": None if precision is None else str(precision),
                    "augment_source": repr(augment_source),
                    "augment_target": repr(augment_target),
                    "seed": seed,
                    "device": str(where) if isinstance(team, Single) else where.type,
                }
            )


def _sharing(model: nn.Module, reducer: Reducer | None, micro_batch_size: int | None, method: Method) -> Sharing:
    if micro_batch_size is not None and micro_batch_size < 1:
        raise UsageError(f"micro_batch_size must be at least 1, got {micro_batch_size}.")
    sharing = sharing_of(model, Sharing(reducer or Single(), micro_batch_size))
    if not sharing.nothing:
        require_sharing(method, method.name)
    return sharing


def _wrapped(method: Method, signals: Signals | None, guard: CountingGuard | None) -> Method:
    recorded = method if signals is None else Recording(method, signals)
    return recorded if guard is None else Skipping(recorded, guard)


def _folder(out: str | Path | None, resume: bool, team: Reducer) -> RunFolder | None:
    """The run folder, on the rank that writes it."""
    if out is None:
        return None
    folder = team.first(lambda: RunFolder.create(out, resume=resume))
    return folder if team.rank == 0 else None


def _method(method: Method | None, weight_step: float | None, engine: str | Engine | None) -> Method:
    if method is None:
        given: dict[str, Any] = {"weight_step": weight_step, "engine": engine}
        return Soseleto(**{name: value for name, value in given.items() if value is not None})
    if weight_step is not None or engine is not None:
        name = "weight_step" if weight_step is not None else "engine"
        raise UsageError(f"{name} has no effect beside method=...: write it there, as in Soseleto({name}=...).")
    return method


def _optimizer(optimizer: MakeOptimizer | None, lr: float, weight_decay: float) -> MakeOptimizer:
    if optimizer is None:
        return sgd(lr, weight_decay)
    if isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            "optimizer must be a function that makes one, since transfer mode adds heads: "
            "write optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3)."
        )
    return optimizer


def _batch_size(name: str, given: int | None, default: int, n: int, side: str) -> int:
    size = min(default, n) if given is None else given
    if size < 1:
        raise UsageError(f"{name} must be at least 1, got {size}.")
    if size > n:
        raise UsageError(f"{name} is {size}, but the {side} has only {n} examples: say {name}={n} or less.")
    return size


def _names(model: nn.Module, mode: str, prefix: str) -> frozenset[str]:
    """The trainable parameters of one part; in noisy mode there is but one part."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    return frozenset(name for name in names if mode == "noisy" or name.startswith(prefix))


def _progress(progress: bool | Progress) -> Progress | None:
    if progress is True:
        from soseleto.training.progress import live

        return live()
    return progress or None


def _name_of(value: Any) -> str | None:
    return None if value is None else getattr(value, "__qualname__", None) or repr(value)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, the global random state follows from the seed; outside, it is as it was."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed_for(seed, "training"))
        yield
