"""The peak memory of a call: what the GPU's allocator reports, on a CPU the size of the tensors alive at one time."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes that ``run`` holds at one time, above what was allocated before it; its result is dropped.

    On a CPU memory inside a kernel is not counted, and the result does not depend on the machine's load.
    """
    if device.type == "cuda":
        return _peak_of_gpu(run, device)
    with LiveTensors() as live:
        run()
    return live.peak


def _peak_of_gpu(run: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - held


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of the tensors that operators return while it is open, each storage once while it is alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):  # memory from before is not counted
            if isinstance(value, Tensor):
                self._add(value, is_new=False)
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self._add(value, is_new=True)
        return out

    def _add(self, tensor: Tensor, *, is_new: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if is_new else 0

        def freed(_: object) -> None:
            self.bytes -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, freed)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
