"""Forward mode: one directional derivative of the whole loss vector, exact for BatchNorm too.

    q = d/dε ℓ(θ + ε·direction) at ε = 0, computed together with the losses.

In units of one forward pass F of the source batch: the forward, its tangents (each layer twice, with da and with dW)
and the backward cost 5F, an ordinary step 3F.

Tangents are PyTorch's own (``torch.autograd.forward_ad``), taken one function at a time. A forward-mode level around
the whole pass would keep every tangent with what is saved for the backward, and a graph of the tangents beside it: more
than twice the memory. Here each function has a level of its own, which is closed after it, and its tangents are
detached, so that a tangent is freed after the last use of its activation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from soseleto.engines.autograd import differentiable_recurrence
from soseleto.engines.functions import out_of_place
from soseleto.engines.interface import Direction, PerExampleLoss, as_loss_vector, named_in, reductions_dtype
from soseleto.engines.model_state import writes_to_first
from soseleto.engines.rules import BATCH_NORM, EMBEDDING, Arguments

# The tangent of BatchNorm in training mode, which PyTorch computes with about 25 passes over the activations.
#
# With μ and σ of the batch, x̂ = (x − μ)/σ and y = γx̂ + β, and means over the batch and positions of a channel,
#
#     dy = γ/σ·(dx − mean(dx) − x̂·mean(x̂·dx)) + dγ·x̂ + dβ,
#
# the backward of BatchNorm, a symmetric map, applied to dx, and a part for γ and β. On a CPU these are PyTorch's
# backward and two passes for the second part. On a GPU they are the two kernels of SyncBatchNorm, 5 passes in all.


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


def forward(
    model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Direction
) -> tuple[Tensor, Tensor]:
    """Losses with their ordinary graph, and alignments."""
    parameters = named_in(direction, model)
    tangents = {id(p): direction[name].to(p.dtype) for name, p in parameters.items()}
    with differentiable_recurrence(model), _ForwardMode(tangents):
        losses = per_example_loss(model, batch)
    plain = as_loss_vector(without_tangent(losses), differentiable=False)
    if not plain.requires_grad:  # an ordinary pass has just had a gradient
        raise RuntimeError("the losses have no gradient")
    if not isinstance(losses, Dual):  # they depend on none of the named parameters
        return plain, torch.zeros_like(plain, dtype=reductions_dtype(plain.dtype)).detach()
    return plain, losses.tangent.to(reductions_dtype(plain.dtype))


class Dual(Tensor):
    """An activation with its tangent, used in place of the activation. Direct access raises."""

    primal: Tensor
    tangent: Tensor

    @staticmethod
    def __new__(cls, primal: Tensor, tangent: Tensor) -> Dual:
        dual: Dual = torch.Tensor._make_wrapper_subclass(cls, primal.shape, dtype=primal.dtype, device=primal.device)
        dual.primal, dual.tangent = primal, tangent
        return dual

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Outside of the mode, as in a checkpoint's second forward, the activation alone."""
        return func(*tree_map(without_tangent, args), **tree_map(without_tangent, kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func} was called without a torch function")


def without_tangent(value: Tensor) -> Tensor:
    """The activation that an engine's pass has put a ``Dual`` in place of."""
    return value.primal if isinstance(value, Dual) else value


_ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)


class _ForwardMode(TorchFunctionMode):
    """While it is open, the tangents of parameters are their directions, and results become ``Dual`` tensors."""

    def __init__(self, directions: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._tangents = dict(directions)  # of parameters, and of constants that an activation was written into, by id
        self._written: list[Tensor] = []  # keeps those constants alive, and with them their ids

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        has_tangent = any(isinstance(v, Dual) or id(v) in self._tangents for v in tree_leaves((args, kwargs)))
        # Under no_grad a result is a constant for the backward, hence one for the tangents.
        if not has_tangent or not torch.is_grad_enabled() or _is_plain(func):
            return func(*tree_map(without_tangent, args), **tree_map(without_tangent, kwargs))
        if func is F.batch_norm and (dual := self._batch_norm(BATCH_NORM.bind(args, kwargs))) is not None:
            return dual
        written = args[0] if args and writes_to_first(func) else None
        # Writing to a dual tensor is writing to a view, for which autograd copies the activation in the backward.
        if isinstance(written, Dual) and (plain := out_of_place(func)) is not None:
            return _replace(written, self._follow(plain, args, kwargs)[0])
        if kwargs.get("inplace") and args and isinstance(args[0], Dual):
            return _replace(args[0], self._follow(func, args, {**kwargs, "inplace": False})[0])
        if func is F.scaled_dot_product_attention and not (kwargs.get("dropout_p", 0.0) or any(args[4:5])):
            return self._attention(func, args, kwargs)
        out, tangent = self._follow(func, args, kwargs)
        return out if written is None else self._write(written, tangent)

    def _attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result by the fused kernel, whose graph is small; it has no forward mode, so tangents are by another."""
        out = func(*tree_map(without_tangent, args), **tree_map(without_tangent, kwargs))
        with torch.no_grad():
            return tree_map(_leave, out, self._run(func, args, kwargs)[1])

    def _follow(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Tensor | None]:
        """The function's result, a ``Dual`` where it has a tangent, and the tangent of its first argument after it."""
        out, tangent, first = self._run(func, args, kwargs)
        return tree_map(_leave, out, tangent), first

    def _run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Tensor | None]:
        """The function's result, its tangent, and that of its first argument."""
        unfused = sdpa_kernel(SDPBackend.MATH) if func in _ATTENTION else nullcontext()
        with forward_ad.dual_level(), _without_hooks(), unfused:
            args, kwargs = tree_map(self._enter, args), tree_map(self._enter, kwargs)
            out = func(*args, **kwargs)
            tangent = tree_map(_tangent, out)
            first = _tangent(args[0]) if args else None
        if func is F.embedding:
            tangent = _without_padding(args, kwargs, tangent)
        return out, tangent, first

    def _enter(self, value: Any) -> Any:
        if isinstance(value, Dual):
            return forward_ad.make_dual(value.primal, value.tangent)
        if id(value) in self._tangents:
            return forward_ad.make_dual(value, self._tangents[id(value)])
        return value

    def _write(self, written: Tensor, tangent: Tensor | None) -> Tensor:
        """Note the tangent of an argument that was written to."""
        if isinstance(written, Dual):
            assert tangent is not None
            written.tangent = tangent
        elif tangent is not None:
            self._tangents[id(written)] = tangent
            self._written.append(written)
        return written

    def _batch_norm(self, arguments: Arguments) -> Dual | None:
        """BatchNorm in training mode; None where the general way is to be taken."""
        x, weight, bias = (arguments.get(name) for name in ("input", "weight", "bias"))
        if not arguments.get("training", False) or not isinstance(x, Dual) or isinstance(weight, Dual):
            return None
        call = BatchNorm(arguments | {"input": x.primal})
        return Dual(call.out, call.tangent(x.tangent, *(self._tangents.get(id(value)) for value in (weight, bias))))


@contextmanager
def _without_hooks() -> Iterator[None]:
    """Inside, what is saved for the backward is saved plainly.

    torch.utils.checkpoint would count the tensors that the tangents' graph saves, which its second forward lacks.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield


def _tangent(value: Any) -> Tensor | None:
    """The tangent of a tensor inside its level, without a graph."""
    tangent = forward_ad.unpack_dual(value).tangent if isinstance(value, Tensor) else None
    return None if tangent is None else tangent.detach().to(value.dtype)  # some rules of mixed precision return float32


def _leave(value: Any, tangent: Tensor | None) -> Any:
    """A result outside of its level, where nothing but its tangent is left of forward mode."""
    return value if tangent is None or not value.requires_grad else Dual(value, tangent)


@cache
def _is_plain(func: Any) -> bool:
    """Whether a function is an attribute that is no activation, as ``shape``."""
    views = ("T", "mT", "H", "mH", "real", "imag")
    return getattr(func, "__name__", "") == "__get__" and getattr(func.__self__, "__name__", "") not in views


def _replace(written: Dual, out: Any) -> Dual:
    """An activation with the result that was to be written into it."""
    if not isinstance(out, Dual) or out.shape != written.shape or out.dtype != written.dtype:
        raise RuntimeError("a function that works in place changed the shape or the precision")
    written.primal, written.tangent = out.primal, out.tangent
    return written


def _without_padding(args: Any, kwargs: Any, tangent: Tensor) -> Tensor:
    """The padding row of an embedding has no gradient; PyTorch's forward mode does not know of it."""
    arguments = EMBEDDING.bind(args, kwargs)
    if arguments.get("padding_idx") is None:
        return tangent
    padding = arguments["padding_idx"] % arguments["weight"].shape[0]
    return tangent.masked_fill((arguments["input"] == padding).unsqueeze(-1), 0.0)
