"""Target gradients of a layer count as zero where one of them is not finite; finite ones are left as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from soseleto.task.loop import _zero_unless_finite

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)


def gradients(dtype: torch.dtype, *, parameters: int) -> dict[str, Tensor]:
    """Of one layer, with a parameter without entries; the largest values that there are count as finite."""
    torch.manual_seed(0)
    made = {str(n): torch.randn(3, 2 + n).to(dtype) for n in range(parameters)}
    made["0"].real[0, 0] = torch.finfo(dtype).max
    return {**made, "empty": torch.zeros(0, dtype=dtype)}


@pytest.mark.parametrize("parameters", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_gradients_are_left_and_others_are_zero(dtype: torch.dtype, parameters: int) -> None:
    given = gradients(dtype, parameters=parameters)
    found = _zero_unless_finite(given)
    assert all(torch.equal(found[name], g) and found[name].dtype == dtype for name, g in given.items())
    for bad in (torch.nan, torch.inf, -torch.inf):
        for name in map(str, range(parameters)):
            changed = {**given, name: given[name].clone()}
            changed[name].real[-1, -1] = bad
            zeros = _zero_unless_finite(changed)
            assert all(torch.equal(zeros[one], torch.zeros_like(g)) for one, g in given.items()), (bad, name)


def test_nothing_and_gradients_of_two_kinds() -> None:
    assert _zero_unless_finite({}) == {}
    mixed = {"one": torch.ones(2, dtype=torch.float16), "other": torch.tensor([1.0, torch.nan])}
    found = _zero_unless_finite(mixed)
    assert [g.dtype for g in found.values()] == [torch.float16, torch.float32]
    assert not any(g.any() for g in found.values())
