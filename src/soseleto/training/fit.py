"""``fit``, the entry point: resolves the arguments, sets the training up and runs the loop."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from soseleto.defaults import DefaultMethod, kind_of_inputs, resolve
from soseleto.errors import UsageError, need
from soseleto.methods.wrappers import Recording, Signals
from soseleto.parallel.reducer import Reducer, Single, choose_device
from soseleto.run_folder.folder import RunFolder
from soseleto.run_folder.source import digest, remember
from soseleto.suspects.probes import Share
from soseleto.task import optimizers
from soseleto.task.losses import Loss, cross_entropy
from soseleto.task.settings import to_data
from soseleto.task.task import MakeOptimizer, MakeSchedule, Method, make_guard
from soseleto.training.data import BatchSizes, Data, ends_in_linear, seeded, wrong_share
from soseleto.training.history import Records
from soseleto.training.loop import Loop
from soseleto.training.options import (
    Balanced,
    Checkpoints,
    Compute,
    Heads,
    Inputs,
    Probes,
    Watcher,
    as_losses,
    as_probes,
)
from soseleto.training.progress import functions_of
from soseleto.training.result import Result
from soseleto.training.resume import require_same_settings, unfinished
from soseleto.training.setup import (
    Network,
    Options,
    Setup,
    check_settings,
    first_weights,
    make_sharing,
    with_views,
)

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
    _check_folder(checkpoints, out)
    _require_same(options, chosen, out)
    sharing = make_sharing(model, compute)
    team, where = sharing.reducer, sharing.reducer.device or choose_device(device)
    data = Data.read(source, target, mode)
    data.require_shareable(sharing, options.probes, mode)
    with seeded(seed, where):
        network = Network.of(model, options, data, sharing=sharing, device=where, keeps=out is not None)
        before = unfinished(out) if checkpoints.resume else {}
        setup = _setup(options, network, data, chosen, before, sharing=sharing, device=where)
        folder = _folder(out, checkpoints.resume, team)
        records = Records(folder, functions_of(progress) if team.rank == 0 else [])
        loop = make_loop(setup, records, keeps=out is not None)
        with ExitStack() as stack:
            if out is not None:
                team.first(lambda: stack.enter_context(folder.held()) if folder else None)
            sha256 = digest(source) if folder and isinstance(source, str | Path) else None
            result = loop.run(setup.describe())
            if folder and isinstance(source, str | Path):
                remember(folder, source, setup.data, sha256)
            return result


def _check_folder(checkpoints: Checkpoints, out: str | Path | None) -> None:
    if checkpoints.steps is not None and out is None:
        raise UsageError("checkpoints every few steps have no effect without a run folder: add out='runs/name'.")


def _require_same(options: Options, chosen: Mapping[str, Any], out: str | Path | None) -> None:
    """Raise where torchrun started several processes that would train alone, or with different settings."""
    reducer, size = options.compute.reducer, os.environ.get("WORLD_SIZE", "1")
    if reducer is None and size.isdecimal() and int(size) > 1:
        raise UsageError(
            f"this is one of {size} processes (WORLD_SIZE is set, as by torchrun), and without a reducer each would "
            "train alone: write `with soseleto.ranks() as reducer:` and in it fit(..., "
            "compute=Compute(reducer=reducer)), or unset WORLD_SIZE."
        )
    optimizer = chosen["optimizer"]
    described = optimizers.describe(optimizer[0] if isinstance(optimizer, tuple) else optimizer)
    method = to_data(chosen["method"])
    settings = {**to_data(chosen), **options.describe_all(), **described, "settings": method, "out": out is not None}
    require_same_settings(reducer or Single(), settings)


def _setup(
    options: Options,
    network: Network,
    data: Data,
    chosen: Mapping[str, Any],
    before: Mapping[str, Any],
    **more: Any,
) -> Setup:
    """Plant the probes and resolve what was left out, by what is known about model, inputs and labels.

    before: the configuration of an unfinished run that is to be continued
    """
    planted = data.with_probes(options.probes, seed=options.seed)
    known: dict[str, Any] = {"n_source": len(data.source), "n_target": len(planted.target)}
    share, beliefs = None, first_weights(options, planted, more["sharing"])
    chooses = chosen["method"] is None or isinstance(chosen["method"], DefaultMethod)
    classifies = options.mode == "noisy" and network.kind == "classification"
    if chooses and classifies and options.loss[0] is cross_entropy:
        evidence = options.probes.evidence
        if "wrong_share" in before:  # an estimate that differs a little on another machine must not make another run
            share = float(before["wrong_share"])
        elif evidence is not None:
            share = evidence.wrong_share.low
        else:
            share = wrong_share(network.model, network.prepare, data, seed=options.seed)
        linear = ends_in_linear(network.model, network.prepare, data.source)
        known |= {"classes": True, "ends_in_linear": linear, "wrong_share": share, "judged": beliefs is not None}
    inputs = kind_of_inputs(data.source)
    settings = resolve(network.model, mode=options.mode, inputs=inputs, **known, **chosen)
    check_settings(settings, data, more["sharing"])
    if line := settings.line():
        logger.info(line)
    return Setup(
        options=options,
        settings=settings,
        network=network,
        data=planted,
        sizes=BatchSizes.of(planted, settings),
        wrong_share=share,
        beliefs=beliefs,
        **more,
    )


def make_loop(setup: Setup, records: Records, *, keeps: bool) -> Loop:
    """The method wrapped for what it must record, and the loop that runs it."""
    data, compute, device, settings = setup.data, setup.options.compute, setup.device, setup.settings
    method = with_views(settings.method, settings.augment[0], data.source, setup.network.prepare)
    signals = None if data.probes is None else Signals(len(data.source))
    if signals is not None:
        method = Recording(method, signals)
    return Loop(
        setup=setup,
        task=setup.task(make_guard(device, setup.sharing.reducer)),
        method=method,
        signals=signals,
        data=data.to(device),
        fingerprints=data.fingerprints(),
        target=setup.sizes.target_cycle(data.target, setup.options.seed),
        capture=compute.cuda_graph and device.type == "cuda" and setup.in_one_process,
        records=records,
        keeps=keeps,
    )


def _folder(out: str | Path | None, resume: bool, team: Reducer) -> RunFolder | None:
    """The run folder, on the rank that writes it."""
    if out is None:
        return None
    for package in ("PIL.Image", "pyarrow.parquet", "safetensors.torch"):
        need(package, to="a run folder")
    folder = team.first(lambda: RunFolder.create(out, resume=resume))
    return folder if team.rank == 0 else None
