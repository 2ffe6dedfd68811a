"""Hadamard rotation inside Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def hadamard_butterflies(x, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Butterflies at strides 1, 2, ..., D/2 down the columns of an fp32 tile ``[D, COLUMNS]``.

    Not yet multiplied by ``D**-0.5``. Split over tensors, a longer transform does its smallest
    and largest strides between them, in the order of ``hadamard_reference``.
    """
    for stage in tl.static_range(7):
        if (2 << stage) <= D:
            pairs = tl.reshape(x, [D // (2 << stage), 2, 1 << stage, COLUMNS])
            low, high = tl.split(tl.permute(pairs, (0, 2, 3, 1)))
            pairs = tl.permute(tl.join(low + high, low - high), (0, 3, 1, 2))
            x = tl.reshape(pairs, [D, COLUMNS])
    return x


@triton.jit
def hadamard_pieces(x, ROWS: tl.constexpr, D: tl.constexpr):
    """Rows of ``[ROWS, D]`` after ``H_(D/16)``, in pieces of 16 values ``[D / 16 * ROWS, 16]``.

    What is left is ``H_16`` of every piece.
    """
    PIECES: tl.constexpr = D // 16
    for stage in tl.static_range(3):
        if (16 << stage) < D:
            pairs = tl.reshape(x, [ROWS, D // (32 << stage), 2, 16 << stage])
            first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
            pairs = tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2))
            x = tl.reshape(pairs, [ROWS, D])
    return tl.reshape(tl.permute(tl.reshape(x, [ROWS, PIECES, 16]), (1, 0, 2)), [PIECES * ROWS, 16])


@triton.jit
def join_pieces(x, ROWS: tl.constexpr, D: tl.constexpr):
    """Pieces of 16 values as rows ``[ROWS, D]`` again."""
    return tl.reshape(tl.permute(tl.reshape(x, [D // 16, ROWS, 16]), (1, 0, 2)), [ROWS, D])


@triton.jit
def hadamard_sign(row, column):
    """Entries +-1 of ``H_16`` at ``row`` and ``column``; it is symmetric."""
    parity = row & column
    parity = parity ^ (parity >> 2)
    return 1 - 2 * ((parity ^ (parity >> 1)) & 1)


@triton.jit
def truncate_to_bf16(x):
    """fp32 values cut to those of bf16, with integers: conversions run at a quarter rate."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def hadamard_product(x, ROWS: tl.constexpr, D: tl.constexpr, TYPE: tl.constexpr):
    """Rotate the rows of an fp32 tile ``[ROWS, D]``, a result of the tensor cores, to about 2**-16.

    Not yet multiplied by ``D**-0.5``. ``H_D`` is the Kronecker product of ``H_(D/16)``, whose
    butterflies in fp32 stay inside a thread of an accumulator, and of ``H_16``, a product on the
    tensor cores: its entries are +-1 and x is split into two bf16 parts, so every product is exact
    and the sums are fp32. For results that are rounded to bf16 next; not for codes. TYPE is bf16;
    the interpreter, which cannot multiply bf16 matrices, takes fp32.
    """
    x = hadamard_pieces(x, ROWS, D)
    sign = hadamard_sign(tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]).to(TYPE)
    high = truncate_to_bf16(x)
    x = tl.dot((x - high).to(TYPE), sign) + tl.dot(high.to(TYPE), sign)
    return join_pieces(x, ROWS, D)
