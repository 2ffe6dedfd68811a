"""Rotary position embedding in real numbers.

TorchTitan rotates with complex numbers, which the compiler leaves to eager kernels in every layer.
"""

import torch

from titan_lowprec.shapes import Float, Int, Tensor


def rotation_of(
    freqs_cis_SF: Tensor, positions_RT: Int[Tensor, "R T"] | None, *, tokens: int
) -> Float[Tensor, "R T 2 D"]:
    """Factors of each token, gathered once for all layers.

    Args:
        freqs_cis_SF: Complex fp32 factors of every position and feature pair.
        positions_RT: Position of each token; None counts from 0, the same for every row (R = 1).
        tokens: T.

    Returns:
        For each feature the factor of itself, a cosine, and that of its partner, a sine with its
        sign: so written out, a compiled rotation reads whole words.
    """
    if positions_RT is None:
        pairs_RTF2 = torch.view_as_real(freqs_cis_SF[:tokens])[None]
    else:
        pairs_RTF2 = torch.view_as_real(freqs_cis_SF)[positions_RT]
    cosine, sine = pairs_RTF2.unbind(-1)
    across = torch.stack([-sine, sine], -1).flatten(-2)
    return torch.stack([cosine.repeat_interleave(2, -1), across], -2)


def rotate(
    x_BTHD: Float[Tensor, "B T H D"], rotation_RT2D: Float[Tensor, "R T 2 D"]
) -> Float[Tensor, "B T H D"]:
    """Rotate each feature pair (2f, 2f + 1) by its angle, in fp32; the result has x's type.

    Numerics:
        The products and their sum are those of a complex product; compiled, one of the products
        may be fused into the sum, which rounds once less.

    Source:
        RoFormer (arXiv:2104.09864), section 3.4.2, with pairs as in Llama's weights.
    """
    x = x_BTHD.float()
    partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    along, across = rotation_RT2D[:, :, None].unbind(-2)
    return (x * along + partner * across).type_as(x_BTHD)
