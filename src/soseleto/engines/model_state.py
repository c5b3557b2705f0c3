"""What engines know of a model between passes: its buffers, attributes and random states, its settings and its shards.

A model that ``fully_shard`` (FSDP2) has split over ranks has DTensors as parameters, of which each rank holds a part.
For its forward and again for its backward a sharded module has whole, plain parameters under the same names.
"""

from __future__ import annotations

import logging
import random
import sys
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import cache
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

logger = logging.getLogger("soseleto")

_is_capturing = torch.cuda.is_current_stream_capturing  # torch's own: ``as_if_recording`` replaces the name in torch


def is_recording() -> bool:
    """Whether a CUDA graph is being recorded, not only said to be."""
    return torch.cuda.is_available() and _is_capturing()


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore what a pass may change at the end of the block: see ``Restore``."""
    restore = Restore(model)
    try:
        with _Watching(), uncompiled(model):
            yield
    finally:
        restore()


def uncompiled(model: nn.Module) -> AbstractContextManager[object]:
    """Inside, a model of torch.compile runs uncompiled: a compiled backward gives no per-example gradients."""
    if not any(map(_is_compiled, modules_of(model))):
        return nullcontext()
    if model not in _announced:
        _announced.add(model)
        logger.warning("the model is compiled: its passes for the alignments run uncompiled")
    return torch.compiler.set_stance("force_eager")


def _is_compiled(module: nn.Module) -> bool:
    """By torch.compile(module), or by module.compile()."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


_announced: WeakSet[nn.Module] = WeakSet()  # compiled models that were logged


class Restore:
    """What a forward pass may change: buffers, parameters, plain attributes of the modules, and random states.

    A call writes it back; a buffer that was made or enlarged since stays, such as a table of positions that grows with
    the inputs. Parameters are copied when they are about to be written to (``before_call``), as by a momentum teacher.
    Does nothing while a CUDA graph is recorded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._is_recording = is_recording()
        if self._is_recording:
            return
        modules = modules_of(model)
        self._buffers = [(m, name, b.clone()) for m in modules for name, b in m._buffers.items() if b is not None]
        self._attributes = [
            (own, {name: (v, _copy(v)) for name, v in own.items() if name not in _OF_MODULES})
            for own in map(vars, modules)
        ]
        self._written: dict[nn.Parameter, Tensor] = {}
        self._random, self._python = random_states(model), random.getstate()
        self._numpy = np.random.get_state()  # noqa: NPY002  # what the user's code draws from
        _restores.add(self)

    def keep(self, places: set[int]) -> None:
        """Copy the parameters in these places, which are about to be written to."""
        for p in self._model.parameters():
            if p not in self._written and _place(p) in places:
                self._written[p] = p.detach().clone()

    def __call__(self) -> None:
        if self._is_recording:
            return
        for device, state in self._random.items():
            torch.set_rng_state(state) if device is None else torch.cuda.set_rng_state(state, device)
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        for attributes, copies in self._attributes:
            for name in attributes.keys() - copies.keys() - _OF_MODULES:
                del attributes[name]
            attributes |= {name: _written_back(value, copy) for name, (value, copy) in copies.items()}
        for module, name, kept in self._buffers:
            b = module._buffers.get(name)
            if b is not None and kept.shape == b.shape:
                b.data.copy_(kept)  # without a new version, which would invalidate graphs that hold it
        for p, values in self._written.items():
            p.data.copy_(values)


def modules_of(model: nn.Module) -> dict[nn.Module, str]:
    """``model.modules()``, each with the beginning of its parameters' names; PyTorch's nested generators are slow."""
    found, waiting = dict[nn.Module, str](), [("", model)]
    while waiting:
        prefix, module = waiting.pop()
        if module not in found:
            found[module] = prefix
            children = reversed(module._modules.items())
            waiting += [(f"{prefix}{name}.", child) for name, child in children if child is not None]
    return found


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """What ``model.named_parameters()`` yields, at less cost; a tied parameter appears once, under its first name."""
    if type(model).named_parameters is not nn.Module.named_parameters:
        return dict(model.named_parameters())
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for module, prefix in modules_of(model).items():
        for name, p in module._parameters.items():
            if p is not None and id(p) not in found:
                found[id(p)] = prefix + name, p
    return dict(found.values())


def random_states(model: nn.Module) -> dict[torch.device | None, Tensor]:
    """Of torch's generators, on the CPU (None) and on the model's GPUs."""
    devices = dict.fromkeys(p.device for p in parameters_of(model).values() if p.is_cuda)
    return {None: torch.get_rng_state(), **{device: torch.cuda.get_rng_state(device) for device in devices}}


_restores: WeakSet[Restore] = WeakSet()
_OF_MODULES = vars(nn.Module()).keys()  # what nn.Module keeps in attributes of its own


def before_call(func: Any, args: tuple[Any, ...]) -> None:
    """To be called before a function that a model calls: it may write to parameters."""
    if not args or not writes_to_first(func):
        return
    places = {_place(v) for v in tree_leaves(args[0]) if isinstance(v, Tensor) and v.is_leaf} - {None}
    for restore in _restores if places else ():
        restore.keep(places)  # type: ignore[arg-type]


_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "pow")} | {"__setitem__"}


@cache
def writes_to_first(func: Any) -> bool:
    """Whether a function changes its first argument in place."""
    name = getattr(func, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.startswith("__"))


class _Watching(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before_call(func, args)
        return func(*args, **(kwargs or {}))


def _place(value: Tensor) -> int | None:
    """In memory; None for tensors without a place of their own, as inside vmap."""
    try:
        return None if is_shard(value) else value.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return None


def _copy(value: Any) -> Any:
    """What an attribute holds, where that can change in place."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else value.detach().clone()
    return copy(value) if type(value) in (list, dict, set, deque) else None


def _written_back(value: Any, kept: Any) -> Any:
    """The same object as before, with what it held then."""
    if isinstance(value, Tensor) and kept is not None:
        value.data.copy_(kept)
    elif kept is not None:
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(kept)
    return value


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that fully_shard was called on."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: fully_shard cannot have been called
    return [] if fsdp is None else [module for module in modules_of(model) if isinstance(module, fsdp.FSDPModule)]


def is_shard(value: object) -> bool:
    return hasattr(value, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor; for a shard this is a collective that every rank must call."""
    found: Tensor = tensor.full_tensor() if is_shard(tensor) else tensor  # type: ignore[attr-defined]
    return found


def reshard(model: nn.Module) -> None:
    """Free whole parameters that FSDP keeps for a backward that does not follow."""
    for module in sharded_modules(model):
        module.reshard()


def settings(model: nn.Module) -> Hashable:
    """Each module's class, training flag, number of hooks, and its own trainable parameters with theirs."""
    found: list[Hashable] = []
    for module in modules_of(model):
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks), len(module._backward_hooks)
        found.append((type(module), module.training, hooks))
        own = module._parameters.items()
        found += [(name, len(p._backward_hooks or ())) for name, p in own if p is not None and p.requires_grad]
    return tuple(found)
