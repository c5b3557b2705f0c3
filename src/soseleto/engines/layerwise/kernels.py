"""Two Triton kernels for GPUs, each one pass over memory where PyTorch's own functions need several.

``dot_and_scale`` computes an alignment ⟨δ_j, y_j⟩ and c_j δ_j together; ``reduce_gradients`` computes ⟨W_j, G⟩ and
Σ_j c_j W_j from per-example gradients W_j. Both sum in float32 and in a fixed order. Triton is installed with PyTorch's
CUDA builds; without it the engine uses PyTorch's functions.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

BLOCK = 4096  # entries per program
WARPS = 8
HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALF)


def found() -> bool:
    """Whether Triton is installed."""
    return _kernels() is not None


def usable(*tensors: Tensor) -> bool:
    """Whether the kernels can work on these tensors: on a GPU, of one layout, each example in its own block."""
    first = tensors[0]
    return first.is_cuda and found() and all(_fits(t, first) for t in tensors)


def _fits(tensor: Tensor, first: Tensor) -> bool:
    return (
        tensor.dtype in DTYPES
        and tensor.shape == first.shape
        and tensor.stride() == first.stride()
        and len(tensor) > 0
        and tensor.numel() // len(tensor) >= BLOCK // 8  # a program for fewer entries is not worth its launch
        and (len(tensor) == 1 or tensor.stride(0) * len(tensor) == tensor.numel())
        and _is_dense(tensor)
    )


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def dot_and_scale(tangent: Tensor, delta: Tensor, coefficients: Tensor | None) -> Tensor:
    """Σ over all but the first dimension of tangent·delta, in float32; ``tangent`` becomes c_j δ_j unless c is None."""
    rows, each = len(delta), delta.numel() // len(delta)
    chunks = -(-each // BLOCK)
    partial = torch.empty(rows, chunks, device=delta.device, dtype=torch.float32)
    kernels = _kernels()
    assert kernels is not None
    kernels.dot_and_scale[(rows, chunks)](
        tangent,
        delta,
        delta if coefficients is None else coefficients.contiguous(),
        partial,
        each,
        BLOCK=BLOCK,
        SCALE=coefficients is not None,
        num_warps=WARPS,
    )
    return partial.sum(1)


def reduce_gradients(gradients: Tensor, direction: Tensor, coefficients: Tensor, total: Tensor) -> Tensor:
    """⟨W_j, G⟩ of each row of ``gradients`` (examples, entries), in float32; adds Σ_j c_j W_j to ``total``."""
    rows, each = gradients.shape
    chunks = -(-each // BLOCK)
    partial = torch.empty(rows, chunks, device=gradients.device, dtype=torch.float32)
    kernels = _kernels()
    assert kernels is not None
    kernels.reduce_gradients[(chunks,)](
        gradients, direction, coefficients, partial, total, rows, each, BLOCK=BLOCK, num_warps=WARPS
    )
    return partial.sum(1)


@cache
def _kernels() -> Any:
    """The compiled kernels, or None without Triton."""
    try:
        from soseleto.engines.layerwise import triton_kernels
    except ImportError:
        return None
    return triton_kernels
