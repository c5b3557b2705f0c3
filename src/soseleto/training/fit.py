"""``fit``, the entry point: resolves the arguments, sets the training up and runs the loop."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from soseleto.defaults import Balanced, DefaultMethod, Settings, kind_of_inputs, name_of, resolve
from soseleto.errors import UsageError, need
from soseleto.parallel.fsdp import sharing_of
from soseleto.parallel.micro_batches import Sharing
from soseleto.parallel.reducer import Single, choose_device, require_alone
from soseleto.run_folder.folder import RunFolder
from soseleto.run_folder.source import digest, remember
from soseleto.suspects.probes import Share
from soseleto.task.losses import Loss, cross_entropy, squared_error
from soseleto.task.task import MakeOptimizer, MakeSchedule, Method
from soseleto.training.data import Data, ends_in_linear, seeded, wrong_share
from soseleto.training.history import Records
from soseleto.training.loop import Loop
from soseleto.training.options import Checkpoints, Compute, Heads, Inputs, Probes, Watcher, as_losses, as_probes
from soseleto.training.progress import functions_of
from soseleto.training.result import Result
from soseleto.training.resume import unfinished
from soseleto.training.setup import Network, Options, check_settings, first_weights

logger = logging.getLogger("soseleto")


def fit(
    model: nn.Module,
    source: Any,
    target: Any,
    mode: Literal["noisy", "transfer"] = "noisy",
    *,
    epochs: int | None = None,
    batch_size: int | None = None,
    target_batch_size: int | Balanced | None = None,
    lr: float | None = None,
    optimizer: MakeOptimizer | tuple[MakeOptimizer, MakeSchedule | None] | None = None,
    loss: Loss | tuple[Loss, Loss] = cross_entropy,
    method: Method | DefaultMethod | None = None,
    inputs: Inputs = Inputs(),
    heads: Heads = Heads(),
    probes: Probes | Share | None = None,
    compute: Compute = Compute(),
    checkpoints: Checkpoints = Checkpoints(),
    seed: int = 0,
    device: str | torch.device = "auto",
    out: str | Path | None = None,
    progress: Watcher | Sequence[Watcher] = False,
) -> Result:
    """Train ``model`` on a large, doubtful source for a small, trusted target, and learn a weight per source example.

    What is left out is chosen by ``soseleto.defaults.resolve``, logged in one line, and kept as ``result.settings``.

    Args:
        model: in noisy mode a whole classifier; in transfer mode the trunk, which returns (B, features). It is trained
            in place and never wrapped.
        source, target: ``Examples``, a pair (inputs, labels) of arrays, tensors, or dicts and tuples of these, a
            Dataset, or a path. A Dataset that is random, ragged or large is read in every epoch, as by
            ``soseleto.data.LazyDataset``.
        mode: ``"noisy"`` when both sides have the same classes; ``"transfer"`` gives each side a head of its own.
        epochs: passes over the source.
        batch_size: source examples per step.
        target_batch_size: target examples per step; ``Balanced(32)`` makes the batches class-balanced.
        lr: learning rate of the default optimizer.
        optimizer: a function from parameters to any torch optimizer, such as
            ``functools.partial(torch.optim.SGD, lr=0.1)``, or a pair of it and a schedule: a function from the
            optimizer and the number of steps to a torch scheduler, which is stepped after every batch, such as those of
            ``soseleto.schedules``; ``None`` keeps the rate constant.
        loss: ``loss(outputs, labels) -> (B,)``, or in transfer mode a pair of these (source, target); ``outputs`` is
            what the model returns.
        method: ``Soseleto(...)`` with its settings, or another method of ``soseleto.methods``, such as ``Strong()`` for
            many wrong labels, images or texts, and a GPU. By default one for the kind of task.
        inputs: random augmentation, and standardization.
        heads: the classifiers of transfer mode; linear layers by default.
        probes: ``"auto"``, a share of the target, or ``Probes(...)``: plants target examples among the source, which
            ``result.suspects()`` needs (noisy mode).
        compute: autocast, micro-batches, CUDA graphs, several processes.
        checkpoints: how often the run folder gets a checkpoint, and whether an unfinished run is continued.
        seed: everything random in the training follows from it; the global random state is left unchanged.
        device: ``"auto"``, ``"cpu"``, ``"cuda"``, ...
        out: the run folder to write. An unfinished run in it is continued.
        progress: ``True`` for a live line on the terminal, a function ``progress(event, record)`` such as
            ``soseleto.integrations.loggers.TensorBoard(folder)``, or a list of these.

    Example:
        >>> x, y = torch.randn(64, 2), torch.randint(2, (64,))
        >>> result = fit(nn.Linear(2, 2), (x, y), (x[:8], y[:8]), epochs=1)
        >>> result.weights.shape
        torch.Size([64])
    """
    options = Options(
        mode=mode,
        loss=as_losses(loss, mode),
        inputs=inputs,
        heads=heads,
        probes=as_probes(probes),
        compute=compute,
        checkpoints=checkpoints,
        seed=seed,
    )
    chosen: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size, "target_batch_size": target_batch_size}
    chosen |= {"lr": lr, "method": method, "optimizer": optimizer, "augment": inputs.augment}
    _check(checkpoints, compute, out)
    sharing = sharing_of(model, Sharing(compute.reducer or Single(), compute.micro_batch_size))
    team, where = sharing.reducer, sharing.reducer.device or choose_device(device)
    data = Data.read(source, target, mode)
    data.require_shareable(sharing, options.probes, mode)
    with seeded(seed, where), ExitStack() as stack:
        network = Network.of(model, options, data, sharing=sharing, device=where, keeps=out is not None)
        planted = data.with_probes(options.probes, seed=seed)
        beliefs = first_weights(options, planted, sharing)
        known = {"n_source": len(data.source), "n_target": len(planted.target), "judged": beliefs is not None}
        settings, share = _settings(options, network, data, chosen, known, out)
        check_settings(settings, planted, sharing)
        if line := settings.line():
            logger.info(line)
        folder = team.first(lambda: None if out is None else RunFolder.create(out, resume=checkpoints.resume))
        folder = folder if team.rank == 0 else None
        team.first(lambda: stack.enter_context(folder.held()) if folder else None)
        loop = Loop(
            options=options,
            settings=settings,
            network=network,
            data=planted.to(where),
            fingerprints=planted.fingerprints(),
            sharing=sharing,
            device=where,
            records=Records(folder, functions_of(progress) if team.rank == 0 else []),
            keeps=out is not None,
            wrong_share=share,
            beliefs=beliefs,
        )
        sha256 = digest(source) if folder and isinstance(source, str | Path) else None
        result = loop.run()
        if folder and isinstance(source, str | Path):
            remember(folder, source, planted, sha256)
        return result


def _check(checkpoints: Checkpoints, compute: Compute, out: str | Path | None) -> None:
    """Raise for a run folder that is missing, and for one of several processes that would train alone."""
    if checkpoints.steps is not None and out is None:
        raise UsageError("checkpoints every few steps have no effect without a run folder: add out='runs/name'.")
    for package in ("PIL.Image", "pyarrow.parquet", "safetensors.torch") if out is not None else ():
        need(package, to="a run folder")
    if compute.reducer is None:
        require_alone()


def _settings(
    options: Options, network: Network, data: Data, chosen: Mapping[str, Any], known: dict[str, Any], out: Any
) -> tuple[Settings, float | None]:
    """What was left out is resolved by what is known of model, inputs and labels; also the share of wrong labels."""
    share = None
    chooses = chosen["method"] is None or isinstance(chosen["method"], DefaultMethod)
    known["numbers"] = options.mode == "noisy" and name_of(options.loss[0]) == name_of(squared_error)
    classifies = options.mode == "noisy" and network.kind == "classification"
    if chooses and classifies and options.loss[0] is cross_entropy:
        before = unfinished(out) if options.checkpoints.resume else {}
        evidence = options.probes.evidence
        if "wrong_share" in before:  # an estimate that differs a little on another machine must not make another run
            share = float(before["wrong_share"])
        elif evidence is not None:
            share = evidence.wrong_share.low
        else:
            share = wrong_share(network.model, network.prepare, data, seed=options.seed)
        linear = ends_in_linear(network.model, network.prepare, data.source)
        known = {**known, "classes": True, "ends_in_linear": linear, "wrong_share": share}
    settings = resolve(network.model, mode=options.mode, inputs=kind_of_inputs(data.source), **known, **chosen)
    return settings, share
