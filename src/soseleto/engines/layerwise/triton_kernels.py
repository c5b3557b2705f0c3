"""The kernels of ``kernels``, in Triton's language; importing this needs Triton."""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def dot_and_scale(tangent, delta, coefficients, partial, each, BLOCK: tl.constexpr, SCALE: tl.constexpr):
    """One program per example and block: partial[j, block] = Σ tangent·delta; tangent = c_j·delta if SCALE."""
    example = tl.program_id(0)
    block = tl.program_id(1)
    entry = block * BLOCK + tl.arange(0, BLOCK)
    inside = entry < each
    at = example.to(tl.int64) * each + entry
    x = tl.load(tangent + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(delta + at, mask=inside, other=0.0)
    tl.store(partial + example * tl.num_programs(1) + block, tl.sum(x * y.to(tl.float32)))
    if SCALE:
        tl.store(tangent + at, y * tl.load(coefficients + example), mask=inside)


@triton.jit
def reduce_gradients(gradients, direction, coefficients, partial, total, rows, each, BLOCK: tl.constexpr):
    """One program per block of entries: partial[j, block] = Σ W_j·G, total += Σ_j c_j W_j."""
    block = tl.program_id(0)
    entry = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < each
    along = tl.load(direction + entry, mask=inside, other=0.0).to(tl.float32)
    summed = tl.load(total + entry, mask=inside, other=0.0)
    for j in range(rows):
        one = tl.load(gradients + j.to(tl.int64) * each + entry, mask=inside, other=0.0).to(tl.float32)
        tl.store(partial + j * tl.num_programs(0) + block, tl.sum(one * along))
        summed += tl.load(coefficients + j) * one
    tl.store(total + entry, summed, mask=inside)
