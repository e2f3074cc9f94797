"""Top-k, top-p and min-p on the device: a threshold for each row, found by halving the range of its weights.

What is kept is `weight >= threshold`, so tokens as likely as the last one kept are kept too. Nothing is sorted, nobody
waits for the device, and a row's threshold depends on that row alone.
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_ONE = 0x3F800000  # bits of 1.0; the order of floats that are not negative is that of their bits


@triton.jit
def _mass_and_count(bits, threshold, width, BLOCK: tl.constexpr):
    """Sum and number of the weights whose bits are not below `threshold`."""
    mass = 0.0
    count = 0
    for first in range(0, width, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        found = tl.load(bits + cols, mask=cols < width, other=0)
        is_kept = (found >= threshold) & (cols < width)
        mass += tl.sum(tl.where(is_kept, found.to(tl.float32, bitcast=True), 0.0), axis=0)
        count += tl.sum(is_kept.to(tl.int32), axis=0)
    return mass, count


@triton.jit
def _highest(bits, low, width, mass, count, ONE: tl.constexpr, BLOCK: tl.constexpr):
    """The highest threshold from `low` on that keeps at least `mass` and `count`. `low` itself must."""
    high = low * 0 + (ONE + 1)
    while low + 1 < high:
        middle = (low + high) // 2
        found_mass, found_count = _mass_and_count(bits, middle, width, BLOCK)
        is_enough = (found_mass >= mass) & (found_count >= count)
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return low


@triton.jit
def _filter_weights(
    weights,  # [rows, width] float32, row stride `stride`
    bits,  # the same as int32
    min_p,  # [rows] float32
    top_k,  # [rows] int32; 0 is none
    top_p,  # [rows] float32; 1 is none
    width,
    stride,
    ONE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    own = bits + row * stride
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    threshold = tl.load(min_p + row).to(tl.int32, bitcast=True)
    if k > 0:
        lowest = _highest(own, threshold * 0, width, p * 0.0, tl.minimum(k, width), ONE, BLOCK)
        threshold = tl.maximum(threshold, lowest)
    if p < 1.0:
        total, _ = _mass_and_count(own, threshold, width, BLOCK)
        threshold = _highest(own, threshold, width, p * total, k * 0, ONE, BLOCK)
    for first in range(0, width, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        found = tl.load(own + cols, mask=cols < width, other=0)
        tl.store(weights + row * stride + cols, 0.0, mask=(cols < width) & (found < threshold))


def filter_weights(weights: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Set the weights that the filters exclude to 0: min-p, then top-k, then top-p of what is left.

    weights [rows, width] float32 from 0 to 1, the largest of each row 1; min_p [rows] float32, top_k [rows] int32 (0 is
    none), top_p [rows] float32 (1 is none), on the same device.
    """
    assert weights.stride(1) == 1
    rows, width = weights.shape
    bits = weights.view(top_k.dtype)
    _filter_weights[(rows,)](
        weights, bits, min_p, top_k, top_p, width, weights.stride(0), ONE=_ONE, BLOCK=_BLOCK, num_warps=8
    )
