"""Casts of softmax weights and score gradients, as values: what the codes decode to."""

import torch

from titan_lowprec.formats.catalogue import E4M3FN, NVFP4
from titan_lowprec.formats.codec import decode_ue8m0
from titan_lowprec.formats.scales import inverse_scale, ue8m0_scale
from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.ops.quantize.api import dequantize_nvfp4, quantize_nvfp4
from titan_lowprec.shapes import Float, Float32, Tensor

_F32_EXPONENT_BITS = 0x7F800000
_F32_MANTISSA_BITS = 23


def round_bf16(x: Float32[Tensor, "*N"]) -> Float32[Tensor, "*N"]:
    """Round to bf16 and back."""
    return x.to(torch.bfloat16).to(torch.float32)


def round_plain(x: Float32[Tensor, "*N"], spec: AttentionSpec) -> Float32[Tensor, "*N"]:
    """Round to the operand type of a recipe without codes: bf16, or fp32 and so not at all."""
    return round_bf16(x) if spec.recipe == "bf16" else x


def round_e4m3fn(x: Float32[Tensor, "*N"]) -> Float32[Tensor, "*N"]:
    """Round to the nearest e4m3fn value, saturating; NaN stays NaN.

    Numerics:
        Equal to decoding ``encode_e4m3fn(x)`` for every x that is not NaN. Adding and
        subtracting ``1.5 * 2**(23 - 3)`` times the power of two of x rounds to the grid, ties to
        even, in fp32; no byte tensor is made, which a CPU converts slowly.

    Source:
        Dekker's splitting; OCP 8-bit Floating Point v1.0, section 5.
    """
    limit = E4M3FN.max_value
    clamped = x.clamp(-limit, limit)
    power = (clamped.view(torch.int32) & _F32_EXPONENT_BITS).view(torch.float32)
    magic = power.clamp_(min=E4M3FN.min_normal).mul_(
        1.5 * 2.0 ** (_F32_MANTISSA_BITS - E4M3FN.mantissa_bits)
    )
    return clamped.add_(magic).sub_(magic)


def round_groups(x: Float32[Tensor, "*B T S"], *, rows: int, columns: int) -> Tensor:
    """Cast a tile to e4m3fn with one round-up exponent for each ``rows x columns`` group."""
    T, S = x.shape[-2:]
    grouped = x.reshape(*x.shape[:-2], T // rows, rows, S // columns, columns)
    scale = ue8m0_scale(grouped.abs().amax((-3, -1), keepdim=True), element=E4M3FN, mode="rceil")
    codes = round_e4m3fn(grouped * inverse_scale(scale))
    return (codes * decode_ue8m0(scale)).reshape(x.shape)


def round_nvfp4(x: Float[Tensor, "*B K"]) -> Float32[Tensor, "*B K"]:
    """Cast to NVFP4 along the last axis, with a power of two for each row."""
    return dequantize_nvfp4(quantize_nvfp4(x, group=NVFP4.group, outer="token"))
