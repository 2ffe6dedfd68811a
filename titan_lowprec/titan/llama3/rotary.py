"""Rotary position embedding in real numbers.

TorchTitan rotates with complex numbers, which the compiler leaves to eager kernels in every layer.
"""

import torch

from titan_lowprec.shapes import Float, Int, Tensor


def rotation_of(
    freqs_cis_SF: Tensor, positions_RT: Int[Tensor, "R T"] | None, *, tokens: int
) -> Float[Tensor, "R T F 2"]:
    """Cosine and sine of each token, gathered once for all layers.

    Args:
        freqs_cis_SF: Complex fp32 factors of every position and feature pair.
        positions_RT: Position of each token; None counts from 0, the same for every row (R = 1).
        tokens: T.
    """
    if positions_RT is None:
        return torch.view_as_real(freqs_cis_SF[:tokens])[None]
    return torch.view_as_real(freqs_cis_SF)[positions_RT]


def rotate(
    x_BTHD: Float[Tensor, "B T H D"], rotation_RTF2: Float[Tensor, "R T F 2"]
) -> Float[Tensor, "B T H D"]:
    """Rotate each feature pair (2f, 2f + 1) by its angle, in fp32; the result has x's type.

    Numerics:
        The products and their sum are those of a complex product; compiled, one of the products
        may be fused into the sum, which rounds once less.

    Source:
        RoFormer (arXiv:2104.09864), section 3.4.2, with pairs as in Llama's weights.
    """
    even, odd = x_BTHD.float().unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = rotation_RTF2[:, :, None].unbind(-1)
    rotated = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1)
    return rotated.flatten(-2).type_as(x_BTHD)
