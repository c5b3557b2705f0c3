"""``compare``: a training beside its baselines on the same data, all evaluated on the same held-out examples.

The target is cut into folds, and each example is evaluated by a model that was trained without it. Ordinary training
does not use the target, so that one training serves all folds. ``accuracy.winner`` chooses the model that is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from soseleto.comparison.trainings import Comparing, Comparison
from soseleto.data import Pair, as_example_set, as_examples, read_pair
from soseleto.data.groups import kept_together, unseen
from soseleto.defaults import Balanced, DefaultMethod
from soseleto.errors import UsageError
from soseleto.run_folder.folder import RunFolder
from soseleto.run_folder.source import digest, remember
from soseleto.suspects.probes import Share
from soseleto.task.losses import Loss, cross_entropy
from soseleto.task.task import MakeOptimizer, MakeSchedule, Method
from soseleto.training.options import Checkpoints, Compute, Heads, Inputs, Probes, Watcher, as_probes


def compare(
    model: nn.Module | Callable[[], nn.Module],
    source: Any,
    target: Any,
    mode: Literal["noisy", "transfer"] = "noisy",
    *,
    test: Any = None,
    folds: int | None = None,
    baselines: bool | None = None,
    keep: Literal["best", "soseleto"] = "best",
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
) -> Comparison:
    """Train as ``fit`` does, and beside it the baselines on the same data; keep the best model.

    In noisy mode it begins with ``scan``, where the features are columns, small images or those of a pretrained
    network: a first answer, which judges the labels, gives a pretrained network its head and first weights, and is kept
    unless training is better by more than one standard error. The baselines are then trained on the same features, in
    seconds. Otherwise, and with ``baselines=True``, they are ordinary, mixed and target-only trainings of the network,
    in transfer mode only the last, for as many epochs. With ``out`` an interrupted comparison is continued: trainings
    that have ended are not repeated.

    Args:
        model: as in ``fit``, and left as it is: every training gets a copy. Or a function that makes a new one.
        source, target, mode: as in ``fit``; the target must fit into memory.
        test: examples whose accuracies are shown in place of those of the folds; nothing is chosen on them.
        folds: of the target; by default 3, fewer for a tiny target, and 0 with a test set and ``keep="soseleto"``.
            Without folds SOSELETO's model is kept.
        baselines: whether to train them; by default not beside a first answer, which has its own.
        keep: ``"soseleto"`` keeps SOSELETO's model whatever the comparison says.
        method: of SOSELETO's training alone, as are ``probes``; all others are for every training.
        probes: by default ``"auto"`` in noisy mode, if there are enough examples and no first answer judges the labels.
        out: the run folder of SOSELETO's training, with the comparison and the model that is kept; the first answer is
            in its folder ``first`` before the training begins.

    Example:
        >>> x, y = torch.randn(64, 2), torch.randint(2, (64,))
        >>> compared = compare(nn.Linear(2, 2), (x, y), (x[:8], y[:8]), epochs=1)
        >>> [row["method"] for row in compared.rows]
        ['soseleto', 'scan', 'scan_mixed', 'scan_target_only']
    """
    sha256 = digest(source) if isinstance(source, str | Path) else None
    pair = _pair(source, target, test, mode)

    def describe(folder: RunFolder) -> None:
        if isinstance(source, str | Path):
            remember(folder, source, pair, sha256)

    return Comparing(
        make=_maker(model),
        pair=pair,
        mode=mode,
        folds=folds,
        baselines=baselines,
        keep=keep,
        method=method,
        inputs=inputs,
        heads=heads,
        probes=as_probes(probes),
        target_batch_size=target_batch_size,
        checkpoints=checkpoints,
        compute=compute,
        seed=seed,
        device=device,
        out=None if out is None else Path(out),
        progress=progress,
        chosen={"epochs": epochs, "batch_size": batch_size, "lr": lr, "optimizer": optimizer, "loss": loss},
        describe=describe,
    ).run()


def _pair(source: Any, target: Any, test: Any, mode: str) -> Pair:
    if any(isinstance(data, str | Path) for data in (source, target, test)):
        return read_pair(source, target, test, mode=mode)
    held_out = None if test is None else as_examples(test, name="test")
    sides = kept_together(as_example_set(source, name="source"), as_examples(target, name="target"))
    if held_out is not None:
        held_out = unseen(held_out, sides)
    return Pair(*sides, held_out)  # type: ignore[arg-type]


def _maker(model: nn.Module | Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    if isinstance(model, nn.Module):
        return lambda: copy.deepcopy(model)
    if not callable(model):
        raise UsageError(f"model must be a module, or a function that makes one, got {type(model).__name__}.")
    return model
