"""Checkpoints: the complete state of a training in ``RUN/checkpoint/<step>/``, as safetensors and JSON, never a pickle.

``tensors.safetensors`` holds every tensor, ``state.json`` everything else and the checksums of both. A checkpoint is
written to a temporary folder, flushed to disk and renamed, so that a kill at any moment leaves the previous one
intact; the last two are kept, so that a damaged one costs one interval and not the run.

A state is a tree: mappings, lists and tuples whose leaves are tensors or JSON values.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from soseleto.errors import CannotSave, DataError, first_line, need
from soseleto.run_folder.checksums import sha256
from soseleto.run_folder.files import MOST_LINES, bounded, regular, sync, tensors_of, writing
from soseleto.run_folder.folder import CHECKPOINT

FORMAT = "soseleto checkpoint 1"
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
        except DataError as error:
            warn(f"{error}; using the previous one")
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
    try:
        if not (regular(path / STATE) and regular(path / TENSORS)):
            raise ValueError("a file is missing")
        payload = _unsealed(bounded(path / STATE, MOST_LINES))
        if sha256(path / TENSORS) != payload["tensors"]:
            raise ValueError(f"the checksum of {TENSORS} does not match")
        tensors, _ = tensors_of(path / TENSORS)
        return payload["step"], decode(payload["state"], tensors)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"the checkpoint {path} is damaged ({first_line(error)})") from error


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


def tidy(run: Path) -> None:
    """Delete the temporary folders of writes that were killed."""
    for entry in _home(run).glob(".*.part"):
        shutil.rmtree(entry, ignore_errors=True)


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
    for old in existing(run)[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


def _write(part: Path, step: int, tree: Any, tensors: Mapping[str, Tensor]) -> None:
    safetensors = need("safetensors", to="writing a checkpoint")
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    try:
        need("safetensors.torch", to="writing a checkpoint").save_file(copies, part / TENSORS)
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error
    payload = {"format": FORMAT, "step": step, "tensors": sha256(part / TENSORS), "state": tree}
    (part / STATE).write_bytes(_sealed(payload))
    for name in (TENSORS, STATE):
        sync(part / name)
    sync(part)


def _sealed(payload: Any) -> bytes:
    """The payload with its checksum; deterministic."""
    text = json.dumps(payload, allow_nan=False)
    return f'{{"sha256": "{hashlib.sha256(text.encode()).hexdigest()}", "payload": {text}}}\n'.encode()


def _unsealed(content: bytes) -> dict[str, Any]:
    payload: dict[str, Any] = json.loads(content)["payload"]
    if _sealed(payload) != content:
        raise ValueError(f"the checksum of {STATE} does not match")
    if payload["format"] != FORMAT:
        raise ValueError(f"its format is {payload['format']!r}, not {FORMAT!r}")
    return payload
