"""Plants probes in the data of a training, with mistakes estimated from the data where earlier labels are not known."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from soseleto.run_folder.folder import RunFolder
from soseleto.suspects import mistakes, probes
from soseleto.training.data import Data
from soseleto.training.estimated_mistakes import estimate_mistakes
from soseleto.training.setup import Setup

PLANTED = "planted"  # entry of config.json


def planted_before(out: str | Path | None, *, resume: bool) -> Mapping[str, Any] | None:
    """The probes of an unfinished run in the folder ``out`` whose labels were drawn from estimated mistakes."""
    if out is None or not resume:
        return None
    folder = RunFolder(out)
    found = folder.config().get(PLANTED) if folder.is_run() and not folder.has_ended() else None
    return found if isinstance(found, Mapping) else None


def planted(setup: Setup, before: Mapping[str, Any] | None = None) -> Data:
    """The data of ``setup`` with probes; ``before``: as they were planted in a run that is resumed."""
    data, wanted, seed = setup.data, setup.settings.probes, setup.settings.seed
    if wanted.share == 0:
        return data
    if before is not None and (again := probes.plant_again(data.source, data.target, before)) is not None:
        return data.with_probes(again)
    classes = probes.class_count_of_both(data.source, data.target)
    found = None
    labels = data.labels_before if wanted.labels_before is None else wanted.labels_before
    if labels is None and setup.kind == "classification" and mistakes.can_estimate(len(data.target), classes):
        found = estimate_mistakes(setup.model, setup.prepare, data.source, data.target, classes, seed=seed)
    return data.with_probes(
        probes.plant(
            data.source,
            data.target,
            wanted.share,
            seed=seed,
            labels_before=labels,
            mistakes=found,
        )
    )
