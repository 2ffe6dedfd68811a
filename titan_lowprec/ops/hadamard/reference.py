"""Fast Walsh-Hadamard transform in plain PyTorch."""

import torch

from titan_lowprec.shapes import Float, Float32, Tensor


def hadamard_reference(x: Float[Tensor, "*N D"]) -> Float32[Tensor, "*N D"]:
    """Rotate the last axis by the orthonormal Hadamard matrix.

    Args:
        x: Values; ``D`` is a power of two.

    Returns:
        Rotated values in fp32.

    Numerics:
        fp32 butterflies at strides 1, 2, ..., D/2, in this order, then one multiply by the fp32
        value of ``D**-0.5``. Each output is a fixed tree of additions, so bits do not depend on
        the device or on the other rows.

    Source:
        Sylvester's construction, natural order: ``H[i, j] = (-1)**popcount(i & j) / sqrt(D)``.
    """
    D = x.shape[-1]
    y = x.to(torch.float32)
    stride = 1
    while stride < D:
        pairs = y.reshape(*x.shape[:-1], D // (2 * stride), 2, stride)
        low, high = pairs.unbind(dim=-2)
        y = torch.stack((low + high, low - high), dim=-2).reshape(x.shape)
        stride *= 2
    return y * D**-0.5
