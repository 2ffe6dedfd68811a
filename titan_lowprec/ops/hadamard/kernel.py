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
def hadamard_product(x, D: tl.constexpr, TYPE: tl.constexpr):
    """Rotate the rows of an fp32 tile ``[ROWS, D]`` on the tensor cores, to about 2**-17.

    The matrix entries are +-1 and x is split into two bf16 parts, so every product is exact and
    the sums are fp32. For results that are rounded to bf16 next; not for codes. TYPE is bf16;
    the interpreter, which cannot multiply bf16 matrices, takes fp32.
    """
    row = tl.arange(0, D)[:, None]
    column = tl.arange(0, D)[None, :]
    parity = row & column
    parity = parity ^ (parity >> 4)
    parity = parity ^ (parity >> 2)
    parity = (parity ^ (parity >> 1)) & 1
    sign = (1 - 2 * parity).to(TYPE)  # [D, D], symmetric
    high = x.to(TYPE)
    low = (x - high.to(tl.float32)).to(TYPE)
    return (tl.dot(low, sign) + tl.dot(high, sign)) * (D**-0.5)
