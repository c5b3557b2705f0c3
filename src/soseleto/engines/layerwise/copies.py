"""A copy of a parameter for every example, so that the function's own backward gives its per-example gradients.

A function that treats the examples of a batch separately gives the same result for D and for D expanded over the batch,
(B, *D.shape), which takes no memory. The gradient at row j of the copies is ∂ℓ_j/∂D. This is used for functions that
broadcast their arguments, for tensors that are joined along another dimension than the batch, and for attention (D may
be an additive mask, or tokens of its own). In-place functions and functions that draw at random are no exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from soseleto.engines.contract import reductions_dtype
from soseleto.engines.rules import Arguments, Rule, scale

_ARITHMETIC = ("add", "sub", "mul", "div", "truediv", "pow")
_OTHERS = (
    "subtract", "multiply", "divide", "true_divide", "where", "lerp", "addcmul", "addcdiv", "maximum", "minimum",
    "fmax", "fmin", "clamp", "atan2", "hypot", "logaddexp", "xlogy", "rsub",
)  # fmt: skip


def _variants(name: str) -> Iterator[Any]:
    """The function and its forms as a method, an operator, and in place."""
    forms = [(torch, name), (torch, f"{name}_"), (Tensor, name), (Tensor, f"{name}_")]
    if name in _ARITHMETIC:
        forms += [(Tensor, f"__{letter}{name}__") for letter in ("", "r", "i")]
    for owner, form in forms:
        if hasattr(owner, form):
            yield getattr(owner, form)


BROADCAST = {form for name in (*_ARITHMETIC, *_OTHERS) for form in _variants(name)}
JOIN = {torch.cat: 0, torch.concat: 0, torch.concatenate: 0, torch.stack: 1}  # new dimensions of the result
SMALL = 8  # at most 1/8 of an example's data: such gradients are kept until the end of the backward, all together


def _rows_of_one(arguments: Arguments, a: Tensor, delta: Tensor) -> dict[str, Tensor]:
    shape = arguments["other"].shape
    return {"other": delta.reshape(len(delta), *shape).to(reductions_dtype(delta.dtype))}


def _own_rows_gradient(arguments: Arguments, a: Tensor, delta: Tensor, coefficients: Tensor | None) -> Tensor:
    zeros = torch.zeros_like(arguments["other"], dtype=delta.dtype, memory_format=torch.contiguous_format)
    return zeros.index_copy_(0, a, scale(delta, coefficients))


LARGE_COPIES = Rule(
    ("other",),
    large="other",
    gradient=lambda arguments, a, delta, c: scale(delta, c).sum_to_size(arguments["other"].shape),
    tangent=lambda arguments, a, direction: direction.clone(),  # the caller overwrites it
)
SMALL_COPIES = Rule(("other",), small=("other",), per_example=_rows_of_one)
# For a tensor that has a row for each example already; ``a`` holds the numbers of the rows.
OWN_ROWS = Rule(
    ("other",),
    large="other",
    gradient=_own_rows_gradient,
    tangent=lambda arguments, a, direction: direction[a],
)


def batch_form(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int] | None:
    """The number of rows and of dimensions that copies for ``func`` must have; None if it does not take copies."""
    if func in JOIN:
        joined = args[0] if args else kwargs["tensors"]
        dim, ndim = args[1] if len(args) > 1 else kwargs.get("dim", 0), joined[0].ndim
        return (len(joined[0]), ndim) if ndim and dim % (ndim + JOIN[func]) else None
    if func is Tensor.__setitem__:
        return _form_of_setitem(*args)
    if func in BROADCAST or func is F.scaled_dot_product_attention:
        found = list(tensors((*args, *kwargs.values())))
        ndim = max(t.ndim for t in found)
        return (max(t.shape[0] for t in found if t.ndim == ndim), ndim) if ndim else None
    return None


def _form_of_setitem(written: Tensor, index: Any, value: Tensor) -> tuple[int, int] | None:
    """For x[:, ...] = D, and for x[mask] = D."""
    if is_mask(index):
        return (len(written), written.ndim) if value.ndim <= written.ndim - index.ndim else None
    if not isinstance(index, tuple) or next(tensors(index), None) is not None or index[0] not in (slice(None), ...):
        return None
    shape = written.detach()[index].shape
    return (shape[0], len(shape)) if shape else None


def is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


def writes_to_first(func: Any) -> bool:
    """Whether a function changes its first argument in place."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and func in BROADCAST)
    return name.endswith("_")


def over_batch(value: Tensor, rows: int, ndim: int) -> Tensor:
    """``value`` with a row for each example, of ``ndim`` dimensions; no memory is taken."""
    if value.ndim == ndim:
        return value.expand(rows, *value.shape[1:])
    ones = [1] * (ndim - 1 - value.ndim)
    return value.reshape(*ones, *value.shape).expand(rows, *ones, *value.shape)


def promotes(value: Tensor, others: Iterable[Tensor]) -> bool:
    """Whether a number without dimensions would act on the dtype or the device of a result if it got some."""
    if value.ndim:
        return False
    return any((t.is_floating_point() and t.dtype != value.dtype) or t.device != value.device for t in others)


def tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among the arguments of a function, also inside lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)


def replaced(values: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    """Arguments of a function, with ``replace`` applied to each tensor."""
    if isinstance(values, Tensor):
        return replace(values)
    if isinstance(values, Mapping):
        return {name: replaced(value, replace) for name, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(replaced(value, replace) for value in values)
    return values
