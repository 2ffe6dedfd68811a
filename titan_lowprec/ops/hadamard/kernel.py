"""Hadamard rotation inside Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def hadamard_butterflies(x, ROWS: tl.constexpr, D: tl.constexpr):
    """Rotate the rows of an fp32 tile ``[ROWS, D]``; bit for bit ``hadamard_reference``.

    Butterflies at strides 1, 2, ..., D/2, then one multiply by ``D**-0.5``.
    """
    STRIDES: tl.constexpr = D // 2
    for stage in tl.static_range(7):
        if (1 << stage) <= STRIDES:
            pairs = tl.reshape(x, [ROWS, D // (2 << stage), 2, 1 << stage])
            low, high = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
            pairs = tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2))
            x = tl.reshape(pairs, [ROWS, D])
    return x * (D**-0.5)


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
