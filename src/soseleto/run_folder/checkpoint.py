"""Checkpoints: the complete state of a training in ``RUN/checkpoint/<step>/``, as safetensors and JSON, never a pickle.

``tensors.safetensors`` holds every tensor, ``state.json`` everything else, ``SHA256SUMS`` the checksums of both. A
checkpoint is written to a temporary folder, flushed to disk and renamed, so that a kill at any moment leaves the
previous one intact; the last two are kept, so that a damaged one costs one interval and not the run.

A state is a tree: mappings, lists and tuples whose leaves are tensors or JSON values.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from soseleto.errors import CannotSave, DataError, need
from soseleto.run_folder.files import CHECKSUMS, json_of, readable, sync, tensors_of, verified, write_checksums, writing
from soseleto.run_folder.folder import CHECKPOINT

TENSORS, STATE = "tensors.safetensors", "state.json"
KEPT = 2

Tree = Any


def save(run: Path, step: int, state: Tree) -> Path:
    """Write a checkpoint atomically, then delete all but the last ``KEPT``."""
    tensors: dict[str, Tensor] = {}
    tree = encode(state, tensors)
    home = _home(run)
    path = home / f"{step:012d}"
    part = home / f".{path.name}.{os.getpid()}.part"
    try:
        with writing(path):
            home.mkdir(exist_ok=True)  # a run folder that was deleted is not made again
            part.mkdir()
            _write(part, step, tree, tensors)
            shutil.rmtree(path, ignore_errors=True)  # exists only if it was found damaged
            part.rename(path)
            sync(home)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    _delete_old(run)
    return path


def load_last(run: Path, warn: Callable[[str], None]) -> tuple[int, Tree] | None:
    """Step and state of the newest intact checkpoint; None where there are no checkpoints.

    Damaged ones are reported through ``warn`` and deleted once an intact one is loaded; where none is intact,
    nothing is deleted.
    """
    damaged: list[Path] = []
    for path in existing(run):
        try:
            loaded = load(path)
        except DataError:
            warn(f"the checkpoint {path} is damaged; using the previous one")
            damaged.append(path)
            continue
        for bad in damaged:
            shutil.rmtree(bad, ignore_errors=True)
        _delete_old(run)
        return loaded
    if damaged:
        raise DataError(
            f"none of the {len(damaged)} checkpoints in {run / CHECKPOINT} is intact: "
            "restore one from a backup, or start again in another folder."
        )
    return None


def load(path: Path) -> tuple[int, Tree]:
    """Step and state of one checkpoint; DataError where a checksum does not match."""
    with readable(path):
        files = [verified(path / name) for name in (CHECKSUMS, STATE, TENSORS)]
        if None in files:
            raise DataError(f"the checkpoint {path} is incomplete.")
        payload, (tensors, _) = json_of(path / STATE), tensors_of(path / TENSORS)
        return payload["step"], decode(payload["state"], tensors)


def existing(run: Path) -> list[Path]:
    """Existing checkpoints, newest first; incomplete ones were never renamed and are not listed."""
    home = _home(run)
    names = [entry for entry in home.iterdir() if entry.name.isdecimal()] if home.is_dir() else []
    return sorted(names, key=lambda entry: int(entry.name), reverse=True)


def _home(run: Path) -> Path:
    """The folder of the checkpoints. A link is refused, since old checkpoints are deleted."""
    home = run / CHECKPOINT
    if home.is_symlink():
        raise DataError(f"{home} is a link, but must be a folder: delete it, or give --out another folder.")
    return home


def encode(value: Tree, tensors: dict[str, Tensor], at: str = "") -> Any:
    """The tree in JSON types, others marked by ``$`` keys; tensors are moved to ``tensors``, named by their paths."""
    if isinstance(value, Tensor):
        name = at if at not in tensors else f"{at}#{len(tensors)}"
        tensors[name] = value
        return {"$tensor": name}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, list):
        return [encode(item, tensors, f"{at}/{i}") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": encode(list(value), tensors, at)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item, tensors, f"{at}/{key}") for key, item in value.items()}
        return {"$items": [encode([key, item], tensors, f"{at}/{key}") for key, item in value.items()]}
    raise CannotSave(f"{at.strip('/')} holds a {type(value).__name__}")


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Tree:
    """The inverse of ``encode``."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]].clone()  # memory-mapped from a file that will be deleted
    if "$float" in value:
        return float(value["$float"])
    if "$tuple" in value:
        return tuple(decode(value["$tuple"], tensors))
    if "$items" in value:
        return dict(decode(pair, tensors) for pair in value["$items"])
    return {key: decode(item, tensors) for key, item in value.items()}


def _delete_old(run: Path) -> None:
    """And the temporary folders of writes that were killed."""
    for old in [*existing(run)[KEPT:], *_home(run).glob(".*.part")]:
        shutil.rmtree(old, ignore_errors=True)


def _write(part: Path, step: int, tree: Any, tensors: Mapping[str, Tensor]) -> None:
    safetensors = need("safetensors", to="writing a checkpoint")
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    try:
        need("safetensors.torch", to="writing a checkpoint").save_file(copies, part / TENSORS)
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error
    (part / STATE).write_text(json.dumps({"step": step, "state": tree}, allow_nan=False))
    for name in (TENSORS, STATE):
        sync(part / name)
    write_checksums(part, (TENSORS, STATE))
