"""Tiles of attention kernels: loads, masks, and exponents laid out like an accumulator.

An fp32 accumulator ``[M, N]`` is viewed as ``[M, N // 32, 4, 4, 2]``: token blocks, eights of
columns, threads of a quad, pairs. Everything but the threads' axis then lies inside one thread, so
a factor a block costs no more than a factor a tile.
"""

import math

import triton
import triton.language as tl

from titan_lowprec.formats.catalogue import E4M3FN
from titan_lowprec.ops.quantize.kernel import rceil_exponent

_LOG2_E4M3_MAX = tl.constexpr(math.log2(E4M3FN.max_value))
_LOWEST_EXPONENT = tl.constexpr(-16384.0)
_LOWEST_FOLD = tl.constexpr(127 - 100)
"""Biased; a fold's exponent is at least -100."""


@triton.jit
def load_columns(ptr, column, COLUMNS: tl.constexpr):
    """A tile's fp32 values from ``column`` on, one a token, ``[1, blocks, 4, 4, 2]``.

    Readable past any document.
    """
    x = tl.load(ptr + column + tl.arange(0, COLUMNS))
    return tl.reshape(x, [1, COLUMNS // 32, 4, 4, 2])


@triton.jit
def load_block_scalars(ptr, block, STRIDE: tl.constexpr, BLOCKS: tl.constexpr):
    """Values of the up to four blocks from ``block`` on, as scalars; STRIDE values a block.

    Carried over a loop they arrive a tile ahead, without shared memory or barriers.
    """
    x0 = tl.load(ptr + block * STRIDE)
    x1 = tl.load(ptr + (block + 1) * STRIDE)
    x2, x3 = x0, x1
    if BLOCKS == 4:
        x2 = tl.load(ptr + (block + 2) * STRIDE)
        x3 = tl.load(ptr + (block + 3) * STRIDE)
    return x0, x1, x2, x3


@triton.jit
def as_blocks(x0, x1, x2, x3, BLOCKS: tl.constexpr):
    """Scalars of blocks as ``[1, blocks, 1, 1, 1]``."""
    block = tl.arange(0, BLOCKS)
    x = tl.where(block == 0, x0, x1)
    if BLOCKS == 4:
        x = tl.where(block < 2, x, tl.where(block == 2, x2, x3))
    return x[None, :, None, None, None]


@triton.jit
def load_column_pairs(ptr, column, COLUMNS: tl.constexpr):
    """Two values a token that lie side by side, each as ``load_columns`` gives it.

    One load for both: alone, every thread copies the columns of its own accumulator.
    """
    return as_column_pairs(tl.load(ptr + 2 * column + tl.arange(0, 2 * COLUMNS)), COLUMNS)


@triton.jit
def as_column_pairs(both, COLUMNS: tl.constexpr):
    """Two values a token that lie side by side, each in the shape of ``load_columns``."""
    return tl.split(tl.reshape(both, [1, COLUMNS // 32, 4, 4, 2, 2]))


@triton.jit
def normal_factor(factor):
    """Keep a product of scale factors off zero and infinity: -inf times it stays -inf."""
    clamped = tl.minimum(tl.maximum(factor, 1.1754943508222875e-38), 1.7e38)
    return tl.where(factor == factor, clamped, float("nan"))


@triton.jit
def tile_maximum(x):
    """Row maxima ``[M]`` of ``[M, blocks, eights, threads, pairs]``; over threads last."""
    return tl.max(tl.max(tl.max(tl.max(x, 4), 2), 1), 1)


@triton.jit
def as_rows(x):
    """``[M]`` as ``[M, 1, 1, 1, 1]``."""
    return x[:, None, None, None, None]


@triton.jit
def load_rows(
    source, token, head, length,
    ROWS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CLEAN: tl.constexpr = False, POINTER: tl.constexpr = False,
):  # fmt: skip
    """``[ROWS, BLOCK_D]`` of consecutive tokens of a head, from ``(N, HEADS * D)``.

    With a descriptor (head dimensions that are powers of two) rows past the document hold other
    tokens, or zeros past the last one; what is computed from them is masked. Codes are finite;
    bf16 values may be NaN, and CLEAN makes those rows zero. With a pointer they always are.

    POINTER, for codes that a program loads once: such loads are on their way together, those
    through descriptors wait one after another.
    """
    if POINTER or D < BLOCK_D:
        row = tl.arange(0, ROWS)
        feature = tl.arange(0, BLOCK_D)
        at = (token + row).to(tl.int64)[:, None] * (HEADS * D) + head * D + feature[None, :]
        inside = (row < length)[:, None]
        if D < BLOCK_D:
            inside = inside & (feature < D)[None, :]
        x = tl.load(source + at, mask=inside, other=0.0)
    else:
        x = source.load([token, head * D])
        if CLEAN:
            x = tl.where((tl.arange(0, ROWS) < length)[:, None], x, 0.0)
    return x


@triton.jit
def next_tile(tile, SIZE: tl.constexpr, end):
    """The tile after one, or itself if it is the last: what is read ahead stays in the document."""
    return tl.where(tile + SIZE < end, tile + SIZE, tile)


@triton.jit
def load_transposed(
    source, column, head, columns,
    COLUMNS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_D, COLUMNS]`` of transposed codes; their buffer is readable past any document."""
    if D == BLOCK_D:
        x = source.load([head * D, column])
    else:
        feature = tl.arange(0, BLOCK_D)
        at = (head * D + feature).to(tl.int64)[:, None] * columns
        at += (column + tl.arange(0, COLUMNS))[None, :]
        x = tl.load(source + at, mask=(feature < D)[:, None], other=0.0)
    return x


@triton.jit
def visible_at(row, column, length, CAUSAL: tl.constexpr, ROWS_ARE_KEYS: tl.constexpr):
    """Which pairs of ``row`` and ``column``, places in a document, attend: ``[rows, columns]``.

    Columns past the document never do.
    """
    seen = (column < length)[None, :] & (row >= 0)[:, None]
    if CAUSAL:
        if ROWS_ARE_KEYS:
            seen = seen & (row[:, None] <= column[None, :])
        else:
            seen = seen & (row[:, None] >= column[None, :])
    return seen


@triton.jit
def visible(first_row, first_column, length, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
             CAUSAL: tl.constexpr, ROWS_ARE_KEYS: tl.constexpr):  # fmt: skip
    """``visible_at`` of a whole tile."""
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    return visible_at(row, column, length, CAUSAL, ROWS_ARE_KEYS)


@triton.jit
def store_rows(ptr, x, token, stride, length, ROWS: tl.constexpr, D: tl.constexpr,
                BLOCK_D: tl.constexpr):  # fmt: skip
    row = tl.arange(0, ROWS)
    feature = tl.arange(0, BLOCK_D)
    inside = (row < length)[:, None]
    if D < BLOCK_D:
        inside = inside & (feature < D)[None, :]
    at = ptr + (token + row).to(tl.int64)[:, None] * stride + feature[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def nan_of(factor):
    """1 for finite factors, NaN for NaN."""
    return factor * 0.0 + 1.0


@triton.jit
def power_of_two(biased):
    """``2**(biased - 127)`` for 0 < biased < 255."""
    return (biased << 23).to(tl.float32, bitcast=True)


@triton.jit
def cast_exponent_log2(highest):
    """The same from log2 of the maximum; -inf (nothing visible) gives a large negative number."""
    return tl.maximum(tl.ceil(highest - _LOG2_E4M3_MAX), _LOWEST_EXPONENT)


@triton.jit
def without_nan(factor):
    """A scale's factor with 2**127 for NaN: the NaN it marks travels another way."""
    return tl.minimum(factor, 1.7014118346046923e38)


@triton.jit
def fold_and_cast(u, column_factor, ELEMENTWISE: tl.constexpr):
    """e4m3 codes of ``u * column_factor``; a row has one exponent, ``[M, 1, 1, 1, 1]``."""
    if ELEMENTWISE:
        u = u * column_factor
        highest = tl.max(tl.max(tl.abs(u), 4, keep_dims=True), 2, keep_dims=True)
    else:
        highest = tl.max(tl.max(tl.abs(u), 4, keep_dims=True), 2, keep_dims=True)
        highest = highest * column_factor
    highest = tl.max(tl.max(highest, 1, keep_dims=True), 3, keep_dims=True)
    biased = tl.maximum(rceil_exponent(highest.to(tl.int32, bitcast=True)), _LOWEST_FOLD)
    factor = power_of_two(254 - biased)
    if not ELEMENTWISE:
        factor = tl.minimum(column_factor * factor, 1.7e38)  # 0 stays 0
    return (u * factor).to(tl.float8e4nv), biased.to(tl.float32) - 127.0
