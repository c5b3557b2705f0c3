"""``fit``, the entry point: resolves the arguments, sets the training up and runs the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from soseleto.data import Augment, Reading
from soseleto.data.feeding import Standardize
from soseleto.data.views import AnyViews
from soseleto.errors import UsageError
from soseleto.methods.wrappers import CountingGuard, Recording, Signals, Skipping
from soseleto.parallel.reducer import Reducer, Single, choose_device
from soseleto.run_folder.folder import RunFolder
from soseleto.run_folder.source import digest, remember
from soseleto.suspects.probes import Share
from soseleto.task.losses import Loss, cross_entropy
from soseleto.task.task import MakeOptimizer, MakeSchedule, Method, make_guard
from soseleto.training import recipe as recipes
from soseleto.training.agreement import require_reducer, require_same_settings
from soseleto.training.data import BatchSizes, Data
from soseleto.training.history import Records
from soseleto.training.loop import Loop
from soseleto.training.optimizers import default_batch_size, default_epochs, default_schedule
from soseleto.training.options import (
    Balanced,
    Checkpoints,
    Compute,
    Heads,
    Probes,
    Watcher,
    as_losses,
    as_probes,
    as_watchers,
    checks_arguments,
    require_callable,
)
from soseleto.training.place import check_rescue
from soseleto.training.planting import planted, planted_before
from soseleto.training.rehearsal import rehearse
from soseleto.training.result import Result
from soseleto.training.resume import require_folder_for_steps
from soseleto.training.setup import Settings, Setup, make_sharing, seeded
from soseleto.training.usual import Usual
from soseleto.training.views_for import check_augment, completed, with_views


@checks_arguments
def fit(
    model: nn.Module,
    source: Any,
    target: Any,
    mode: Literal["noisy", "transfer"] = "noisy",
    *,
    recipe: recipes.Name = "plain",
    test: Any = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    target_batch_size: int | Balanced | None = None,
    lr: float | None = None,
    optimizer: MakeOptimizer | None = None,
    schedule: MakeSchedule | Literal["auto"] | None = "auto",
    loss: Loss | tuple[Loss, Loss] = cross_entropy,
    method: Method | Usual | None = None,
    augment: Augment | AnyViews | tuple[Augment | None, Augment | None] | None = None,
    standardize: Standardize | bool | None = None,
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

    Args:
        model: in noisy mode a whole classifier; in transfer mode the trunk, which returns (B, features). It is trained
            in place and never wrapped.
        source, target, test: ``Examples``, a pair (inputs, labels) of arrays, tensors, or dicts and tuples of these, a
            Dataset, or a path. A Dataset that is random, ragged or large is read in every epoch, as by
            ``soseleto.data.LazyDataset``.
        mode: ``"noisy"`` when both sides have the same classes; ``"transfer"`` gives each side a head of its own.
        recipe: ``"plain"`` is SOSELETO with the settings given here. ``"strong"`` is for many wrong labels, images or
            texts, and a GPU: a teacher, strong augmentation and mixup, see ``soseleto.methods.Strong``. Inputs are
            uint8 images, rows of numbers or dicts of tokens; ``StrongTransfer`` is its form for transfer mode.
        epochs: passes over the source; by default 30, 100 for images with ``recipe="strong"``, and for a model with
            parts from transformers, timm or peft 3, or 10 if it reads images.
        batch_size: source examples per step; by default 16 to 256, by the size of the source, and for a pretrained
            model of texts at most 64.
        target_batch_size: target examples per step, by default 32, or 64 for ``recipe="strong"`` in noisy mode but for
            texts; ``Balanced(32)`` makes the batches class-balanced.
        lr: learning rate of the default optimizer: 0.03 of SGD, 0.1 with ``recipe="strong"``, 3e-5 of AdamW, 6e-5 with
            ``recipe="strong"``, and 1e-4 for images and adapters.
        optimizer: ``soseleto.sgd(lr, weight_decay)``, ``soseleto.adamw(lr, weight_decay)``, or a function from
            parameters to any torch optimizer. By default SGD with momentum 0.9, and AdamW for a model with parts from
            transformers, timm or peft.
        schedule: a function from the optimizer and the number of steps to a torch scheduler, which is stepped after
            every batch: ``soseleto.linear`` falls to 0, ``soseleto.warmup_cosine`` rises before, and is the default
            where AdamW is; ``None`` keeps the rate constant.
        loss: ``loss(outputs, labels) -> (B,)``, or in transfer mode a pair of these (source, target); ``outputs`` is
            what the model returns.
        method: ``Soseleto(...)`` with its settings, or another method of ``soseleto.methods``. By default one for the
            kind of task: for classes with wrong labels it doubts labels and moves weights by the last layer, see
            ``soseleto.training.usual``.
        augment: random changes of image batches, one ``Augment`` for both sides or a pair (source, target); for
            methods that take several views of an example ``soseleto.data.Views``, ``FeatureViews`` or ``TokenViews``.
        standardize: centre and scale inputs by the source's statistics, or by the ``Preprocess`` given; by default
            only for uint8 images. For tables the ``preparation`` of ``soseleto.data.read_pair``, by default where a
            table with categories is read from its path; the model then gets ``preparation.width`` numbers, or the
            tokens of texts.
        heads: the classifiers of transfer mode; linear layers by default.
        probes: ``"auto"``, a share of the target, or ``Probes(...)``: plants target examples among the source, which
            ``result.suspects()`` needs (noisy mode).
        compute: autocast, micro-batches, CUDA graphs, non-finite losses, several processes.
        checkpoints: how often the run folder gets a checkpoint, and whether an unfinished run is continued.
        seed: everything random in the training follows from it; the global random state is left unchanged.
        device: ``"auto"``, ``"cpu"``, ``"cuda"``, ...
        out: the run folder to write. An unfinished run in it is continued.
        progress: ``True`` for a live line on the terminal, a function ``progress(event, record)``, a logger such as
            ``soseleto.TensorBoard(folder)``, or a list of these.

    Example:
        >>> x, y = torch.randn(64, 2), torch.randint(2, (64,))
        >>> result = fit(nn.Linear(2, 2), (x, y), (x[:8], y[:8]), epochs=1)
        >>> result.weights.shape
        torch.Size([64])
    """
    if schedule not in ("auto", None):
        require_callable("schedule", schedule, "soseleto.linear")
    if method is not None and not isinstance(method, Usual) and not hasattr(method, "init"):
        raise UsageError(f"method must be an object, got {method!r}: write method=soseleto.Soseleto(), for example.")
    usual = Usual() if method is None and recipe == "plain" else method if isinstance(method, Usual) else None
    if usual is not None and recipe == "strong":
        raise UsageError("recipe='strong' is a method of its own: leave out method=Usual(...), or the recipe.")
    named = None if isinstance(method, Usual) else method
    asked = recipes.Recipe.of(recipe, model, mode=mode, method=named, augment=augment, optimizer=optimizer, lr=lr)
    chosen = asked.choice()
    settings = Settings(
        mode=mode,
        epochs=_epochs(epochs, chosen, model),
        optimizer=chosen.optimizer,
        schedule=default_schedule(model) if schedule == "auto" else schedule,
        loss=as_losses(loss, mode),
        method=chosen.method,
        augment=chosen.augment,
        heads=heads,
        probes=as_probes(probes),
        compute=compute,
        checkpoints=checkpoints,
        seed=seed,
    )
    require_reducer(compute.reducer)
    given: dict[str, Any] = {"batch_size": batch_size, "target_batch_size": target_batch_size}
    given |= {"standardize": standardize, "usual": repr(usual), "resume": checkpoints.resume}
    given |= {"test": test is not None, "out": out is not None}
    require_same_settings(compute.reducer or Single(), {**settings.describe_all(), **given})
    require_folder_for_steps(checkpoints, out)
    check_rescue(_path(checkpoints.rescue), _path(out))
    sharing = make_sharing(model, settings)
    team, where = sharing.reducer, sharing.reducer.device or choose_device(device)
    data = Data.read(source, target, test, mode)
    data.require_shareable(sharing, settings.probes, mode)
    chosen = asked.choice(data)
    settings = replace(settings, epochs=_epochs(epochs, chosen, model))
    settings = _by_inputs(settings, chosen, data, standardize)
    if batch_size is None:
        batch_size = default_batch_size(model, len(data.own_source))

    def sizes_of(data: Data) -> BatchSizes:
        """Probes leave a smaller target."""
        asked = chosen.target_batch if target_batch_size is None else None
        return BatchSizes.of(data, batch_size, target_batch_size if asked is None else min(asked, len(data.target)))

    with seeded(seed, where):
        setup = Setup.of(
            model, settings, data, sizes=sizes_of(data), sharing=sharing, device=where, standardize=standardize
        )
        setup = setup if usual is None else _with_usual(setup, usual, out)
        data = planted(setup, planted_before(out, resume=checkpoints.resume))
        setup = replace(setup, data=data, sizes=sizes_of(data))
        folder = _folder(out, checkpoints.resume, team)
        functions, loggers = as_watchers(progress) if team.rank == 0 else ([], [])
        records = Records(folder, functions, loggers, rescue=_path(checkpoints.rescue))
        loop = make_loop(setup, records, keeps=out is not None)
        with ExitStack() as stack:
            if out is not None:
                team.first(lambda: stack.enter_context(folder.held()) if folder else None)
            if records.place is not None:
                stack.callback(records.place.close)
            write_source = _remembering(source, records, data)
            result = loop.run(setup.describe())
            team.first(write_source)
            return result


def _epochs(asked: int | None, chosen: recipes.Choice, model: nn.Module) -> int:
    """As asked for, or the recipe's, or the model's."""
    usual = default_epochs(model) if chosen.epochs is None else chosen.epochs
    return usual if asked is None else asked


def _by_inputs(
    settings: Settings, chosen: recipes.Choice, data: Data, standardize: Standardize | bool | None
) -> Settings:
    """With what depends on the kind of inputs."""
    check_augment(chosen.augment, data, chosen.method)
    views = completed(chosen.augment, data, standardize)
    return replace(settings, method=chosen.method, augment=views, optimizer=chosen.optimizer)


def _with_usual(setup: Setup, usual: Usual, out: str | Path | None) -> Setup:
    """With the usual method for this task, which depends on the losses, the labels and the model."""
    settings, data = setup.settings, setup.data
    if settings.mode == "noisy" and setup.kind == "classification" and settings.loss[0] is cross_entropy:
        before = None
        if out is not None and settings.checkpoints.resume and (folder := RunFolder(out)).is_run():
            before = folder.config().get("settings")
        given: dict[str, Any] = {"seed": settings.seed, "epochs": settings.epochs, "before": before}
        method = usual.method_for_data(setup.model, setup.prepare, data.source, data.target, **given)
    else:
        method = usual.method(settings.mode)
    return replace(setup, settings=replace(settings, method=method))


def _remembering(source: Any, records: Records, data: Data) -> Callable[[], None]:
    """Writes where the source was read from and which rows it has now, so that it can be exported with corrections."""
    if records.folder is None or not isinstance(source, str | Path):
        return lambda: None
    path, reading = Path(source), Reading()
    sha256 = digest(path)

    def write() -> None:
        assert records.folder is not None  # it may be a rescue folder by now
        remember(records.folder, path, reading, data.feature_names, sha256, data.texts, data.checked)

    return write


def make_loop(setup: Setup, records: Records, *, keeps: bool) -> Loop:
    """The method wrapped for what it must record or skip, and the loop that runs it."""
    data, compute, device = setup.data, setup.settings.compute, setup.device
    settings = setup.settings
    method = with_views(settings.method, settings.augment[0], data.source, setup.prepare)
    signals = None if data.probes is None else Signals(len(data.source))
    if signals is not None:
        method = Recording(method, signals)
    counting = CountingGuard(device) if compute.non_finite == "skip" else None
    if counting is not None:
        method = Skipping(method, counting)
    return Loop(
        setup=setup,
        task=setup.task(counting or make_guard(device, setup.sharing.reducer)),
        method=method,
        signals=signals,
        data=data.to(device),
        fingerprints=data.fingerprints(),
        target=setup.sizes.target_cycle(data.target, setup.settings.seed),
        capture=compute.cuda_graph and device.type == "cuda" and setup.in_one_process,
        records=records,
        keeps=keeps,
        rehearse=rehearse,
    )


def _folder(out: str | Path | None, resume: bool, team: Reducer) -> RunFolder | None:
    """The run folder, on the rank that writes it."""
    if out is None:
        return None
    folder = team.first(lambda: RunFolder.create(out, resume=resume))
    return folder if team.rank == 0 else None


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)
