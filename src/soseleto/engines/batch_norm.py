"""The tangent of BatchNorm in training mode, which PyTorch computes with about 25 passes over the activations.

With μ and σ of the batch, x̂ = (x − μ)/σ and y = γx̂ + β, and means over the batch and positions of a channel,

    dy = γ/σ·(dx − mean(dx) − x̂·mean(x̂·dx)) + dγ·x̂ + dβ,

the backward of BatchNorm, a symmetric map, applied to dx, and a part for γ and β. On a CPU these are PyTorch's backward
and two passes for the second part. On a GPU they are the two kernels of SyncBatchNorm, 5 passes in all.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from soseleto.engines.rules import Arguments

_SMALLEST = 1e-15  # added to γ, by which the arguments of a kernel are divided: not visible in the result


class BatchNorm:
    """One call of F.batch_norm in training mode: its output, and what its tangent needs."""

    def __init__(self, arguments: Arguments) -> None:
        self.x, self.weight, self.eps = arguments["input"], arguments.get("weight"), arguments.get("eps", 1e-5)
        self.running = arguments.get("running_mean"), arguments.get("running_var")
        momentum, cudnn = arguments.get("momentum", 0.1), torch.backends.cudnn.enabled
        self.out, self.mean, self.invstd, self.reserve, self.kind = torch._batch_norm_impl_index(
            self.x, self.weight, arguments.get("bias"), *self.running, True, momentum, self.eps, cudnn
        )

    @torch.no_grad()
    def tangent(self, dx: Tensor, d_weight: Tensor | None, d_bias: Tensor | None) -> Tensor:
        dx = dx.to(self.x.dtype)
        return self._on_gpu(dx, d_weight, d_bias) if dx.is_cuda else self._by_backward(dx, d_weight, d_bias)

    def _by_backward(self, dx: Tensor, d_weight: Tensor | None, d_bias: Tensor | None) -> Tensor:
        x = self.x
        dy: Tensor = torch.ops.aten._batch_norm_impl_index_backward(
            self.kind, x, dx, self.weight, *self.running, self.mean, self.invstd, True, self.eps,
            [True, False, False], self.reserve,
        )[0]  # fmt: skip
        shape = (1, -1, *[1] * (x.ndim - 2))
        shift = torch.zeros_like(self.mean) if d_bias is None else d_bias
        if d_weight is not None:  # dγ·x̂ = x·scale − mean·scale
            scale = d_weight * self.invstd
            shift = torch.addcmul(shift, self.mean, scale, value=-1)
            dy.addcmul_(x, scale.to(x.dtype).view(shape))
        return dy.add_(shift.to(x.dtype).view(shape))

    def _on_gpu(self, dx: Tensor, d_weight: Tensor | None, d_bias: Tensor | None) -> Tensor:
        """The second kernel computes (dx − total/n − (x − μ)·product/(nσ²))·γ/σ.

        dγ·x̂ + dβ has the same form, so that it is a change of ``total`` and ``product``.
        """
        layout = torch.contiguous_format if self.x.is_contiguous() or dx.ndim != 4 else torch.channels_last
        x, dx = self.x.detach().contiguous(memory_format=layout), dx.contiguous(memory_format=layout)
        n, mean, invstd = x.numel() // x.shape[1], self.mean, self.invstd
        weight = torch.ones_like(mean) if self.weight is None else self.weight.to(mean.dtype) + _SMALLEST
        total, product, _, _ = torch.batch_norm_backward_reduce(dx, x, mean, invstd, weight, True, False, False)
        if d_bias is not None:
            total = torch.addcdiv(total, d_bias, weight * invstd, value=-n)
        if d_weight is not None:
            product = torch.addcdiv(product, d_weight, weight * invstd * invstd, value=-n)
        return torch.batch_norm_backward_elemt(dx, x, mean, invstd, weight, total, product, _count(n, x.device))


@cache
def _count(n: int, device: torch.device) -> Tensor:
    return torch.full((1,), n, dtype=torch.int32, device=device)
