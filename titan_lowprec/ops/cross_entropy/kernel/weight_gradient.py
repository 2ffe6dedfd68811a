"""Gradient of the head: one exact fp32 sum over chunks, kept as two 16-bit halves."""

import torch
import triton
import triton.language as tl
from jaxtyping import Int16

from titan_lowprec.ops.cross_entropy.kernel.tiles import WeightTile, descriptor, programs
from titan_lowprec.shapes import Float, Int32, Int64, Tensor


@triton.jit
def _join(high, low):
    return ((high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _high(x):
    return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16)


@triton.jit
def _low(x):
    return (x.to(tl.int32, bitcast=True) & 0xFFFF).to(tl.int16)


@triton.jit
def _add(acc, high_desc, low_desc, row, column, ACCUMULATE: tl.constexpr):
    if ACCUMULATE:
        acc += _join(high_desc.load([row, column]), low_desc.load([row, column]))
    high_desc.store([row, column], _high(acc))
    low_desc.store([row, column], _low(acc))


@triton.jit
def weight_gradient_kernel(
    p_desc,
    x_desc,
    high_desc,
    low_desc,
    C,
    V,
    E,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SPLIT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """``high, low (+)= p.T @ x``; model columns fastest, so that ``p`` is read about once."""
    width_tiles = tl.cdiv(E, BLOCK_E)
    tiles = tl.cdiv(V, BLOCK_V) * width_tiles
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=FLATTEN):
        v0 = (tile // width_tiles) * BLOCK_V
        e0 = (tile % width_tiles) * BLOCK_E
        acc = tl.zeros((BLOCK_V, BLOCK_E), dtype=tl.float32)
        for k in range(0, C, BLOCK_C):
            p = p_desc.load([k, v0])  # [BLOCK_C, BLOCK_V]
            x = x_desc.load([k, e0])  # [BLOCK_C, BLOCK_E]
            acc = tl.dot(p.T, x, acc)
        if SPLIT:
            halves = tl.permute(tl.reshape(acc, (BLOCK_V, 2, BLOCK_E // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            _add(left, high_desc, low_desc, v0, e0, ACCUMULATE)
            _add(right, high_desc, low_desc, v0, e0 + BLOCK_E // 2, ACCUMULATE)
        else:
            _add(acc, high_desc, low_desc, v0, e0, ACCUMULATE)


@triton.jit
def label_gradient_kernel(
    high_ptr,
    low_ptr,
    x_ptr,
    coefficient_ptr,
    order_ptr,
    sorted_ptr,
    N,
    V,
    E,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Add every row's label term: one program per label and part of the model dimension.

    Rows come sorted by label (ties in row order), so each sum has one order and no atomics.
    """
    first = tl.program_id(0)
    label = tl.load(sorted_ptr + first)
    if label >= V:
        return
    if first > 0:  # noqa: SIM102 - a load before the first row must not happen
        if tl.load(sorted_ptr + first - 1) == label:
            return
    columns = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside = columns < E
    acc = tl.zeros((BLOCK_E,), dtype=tl.float32)
    start = first
    more = 1
    while more > 0:
        index = start + tl.arange(0, BLOCK_N)
        same = (index < N) & (tl.load(sorted_ptr + index, mask=index < N, other=V) == label)
        row = tl.load(order_ptr + index, mask=same, other=0)
        coefficient = tl.load(coefficient_ptr + row, mask=same, other=0.0)
        x = tl.load(
            x_ptr + row[:, None] * E + columns[None, :],
            mask=same[:, None] & inside[None, :],
            other=0.0,
        )  # [BLOCK_N, BLOCK_E]
        acc += tl.sum(coefficient[:, None] * x.to(tl.float32), axis=0)
        start += BLOCK_N
        more = tl.min(same.to(tl.int32), axis=0)
    at = label.to(tl.int64) * E + columns
    acc += _join(
        tl.load(high_ptr + at, mask=inside, other=0), tl.load(low_ptr + at, mask=inside, other=0)
    )
    tl.store(high_ptr + at, _high(acc), mask=inside)
    tl.store(low_ptr + at, _low(acc), mask=inside)


@triton.jit
def round_kernel(out_ptr, high_ptr, low_ptr, factor_ptr, count, BLOCK: tl.constexpr):
    """``out`` (which may be ``high``) becomes the bits of ``bf16(factor * join(high, low))``."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = _join(
        tl.load(high_ptr + at, mask=inside, other=0), tl.load(low_ptr + at, mask=inside, other=0)
    )
    rounded = (value * tl.load(factor_ptr)).to(tl.bfloat16)
    tl.store(out_ptr + at, rounded.to(tl.int16, bitcast=True), mask=inside)


def add_weight_gradient(
    p_CV: Float[Tensor, "C Vp"],
    x_CE: Float[Tensor, "C E"],
    high_VE: Tensor,
    low_VE: Tensor,
    *,
    accumulate: bool,
    tile: WeightTile,
) -> None:
    """Write or add ``p.T @ x`` to the split fp32 gradient."""
    (C, E), V = x_CE.shape, high_VE.shape[0]
    tiles = triton.cdiv(V, tile.columns) * triton.cdiv(E, tile.width)
    count = programs(tiles, x_CE.device, tile.resident)
    part = tile.width // (2 if tile.split else 1)
    weight_gradient_kernel[(count,)](
        descriptor(p_CV, (tile.reduction, tile.columns)),
        descriptor(x_CE, (tile.reduction, tile.width)),
        descriptor(high_VE, (tile.columns, part)),
        descriptor(low_VE, (tile.columns, part)),
        C,
        V,
        E,
        BLOCK_V=tile.columns,
        BLOCK_E=tile.width,
        BLOCK_C=tile.reduction,
        SPLIT=tile.split,
        ACCUMULATE=accumulate,
        PROGRAMS=count,
        FLATTEN=tile.resident > 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def add_label_gradient(
    high_VE: Tensor,
    low_VE: Tensor,
    x_NE: Float[Tensor, "N E"],
    coefficient_N: Float[Tensor, " N"],
    order_N: Int64[Tensor, " N"],
    sorted_N: Int32[Tensor, " N"],
) -> None:
    """Add ``coefficient * x`` of every row to its label's line; labels of ``V`` take no part."""
    N, E = x_NE.shape
    block = 1024
    label_gradient_kernel[(N, triton.cdiv(E, block))](
        high_VE,
        low_VE,
        x_NE,
        coefficient_N,
        order_N,
        sorted_N,
        N,
        high_VE.shape[0],
        E,
        BLOCK_N=8,
        BLOCK_E=block,
    )


def round_triton(
    out_VE: Int16[Tensor, "V E"],
    high_VE: Int16[Tensor, "V E"],
    low_VE: Int16[Tensor, "V E"],
    factor: Float[Tensor, ""],
    dtype: torch.dtype,
) -> None:
    """As `round_reference`; bf16 alone."""
    assert dtype == torch.bfloat16
    count, block = high_VE.numel(), 4096
    if count > 0:
        round_kernel[(triton.cdiv(count, block),)](
            out_VE, high_VE, low_VE, factor, count, BLOCK=block, num_warps=8
        )
