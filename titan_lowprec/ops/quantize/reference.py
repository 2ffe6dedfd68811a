"""Quantisers in plain PyTorch: one group maximum, one scale, one cast."""

import torch

from titan_lowprec.formats.catalogue import E2M1FN, E4M3FN, UE8M0, ElementFormat
from titan_lowprec.formats.codec import (
    decode_e2m1fn,
    decode_e4m3fn,
    encode_e2m1fn,
    encode_e4m3fn,
)
from titan_lowprec.formats.scales import (
    ScaleMode,
    inverse_exponent,
    multiply_exp2,
    ue8m0_scale,
)
from titan_lowprec.ops.quantize.common import (
    BlockScales,
    Mxfp4,
    Mxfp8,
    Nvfp4,
    OuterScale,
    Tiles,
    TokenBlocks,
)
from titan_lowprec.shapes import Float, Float32, Int32, Tensor, UInt8

_NVFP4_MAX = E2M1FN.max_value * E4M3FN.max_value


def _scale_down(x: Float32[Tensor, "*N"], scale: UInt8[Tensor, "*#N"]) -> Float32[Tensor, "*N"]:
    """Divide by ue8m0 scales; blocks marked NaN become zero, so that their codes stay finite."""
    scaled = multiply_exp2(x, inverse_exponent(scale))
    return torch.where(scale == UE8M0.nan_code, 0.0, scaled)


def _group(x: Float[Tensor, "*M K"], group: int) -> Float32[Tensor, "*M G group"]:
    return x.to(torch.float32).unflatten(-1, (x.shape[-1] // group, group))


def _mx_groups(
    x_MK: Float[Tensor, "*M K"], group: int, element: ElementFormat, scale_mode: ScaleMode
) -> tuple[Float32[Tensor, "*M K"], UInt8[Tensor, "*M G"]]:
    """Scale groups into the range of an element format."""
    x_MGK = _group(x_MK, group)
    scale_MG = ue8m0_scale(x_MGK.abs().amax(-1), element=element, mode=scale_mode)
    return _scale_down(x_MGK, scale_MG.unsqueeze(-1)).flatten(-2), scale_MG


def quantize_mxfp8_reference(
    x_MK: Float[Tensor, "*M K"], group: int, scale_mode: ScaleMode
) -> Mxfp8:
    """Quantise to MXFP8; see ``api.quantize_mxfp8``."""
    scaled_MK, scale_MG = _mx_groups(x_MK, group, E4M3FN, scale_mode)
    return Mxfp8(codes_MK=encode_e4m3fn(scaled_MK), scale_MG=scale_MG)


def quantize_mxfp4_reference(
    x_MK: Float[Tensor, "*M K"], group: int, scale_mode: ScaleMode
) -> Mxfp4:
    """Quantise to MXFP4; see ``api.quantize_mxfp4``."""
    scaled_MK, scale_MG = _mx_groups(x_MK, group, E2M1FN, scale_mode)
    return Mxfp4(codes_MK=encode_e2m1fn(scaled_MK), scale_MG=scale_MG)


def dequantize_mx_reference(
    values_MK: Float32[Tensor, "*M K"], scale_MG: UInt8[Tensor, "*M G"]
) -> Float32[Tensor, "*M K"]:
    """Multiply decoded elements by their groups' scales; see ``api.dequantize_mxfp8``."""
    values_MGK = _group(values_MK, values_MK.shape[-1] // max(scale_MG.shape[-1], 1))
    return _scale_up(values_MGK, scale_MG.unsqueeze(-1)).flatten(-2)


def _scale_up(values: Float32[Tensor, "*N"], scale: UInt8[Tensor, "*#N"]) -> Float32[Tensor, "*N"]:
    """Multiply by ue8m0 scales; byte 255 gives NaN whatever the codes."""
    scaled = multiply_exp2(values, -inverse_exponent(scale))
    return torch.where(scale == UE8M0.nan_code, torch.nan, scaled)


def outer_exponent_reference(x_MK: Float[Tensor, "*M K"]) -> UInt8[Tensor, "*M"]:
    """Choose the power of two of each row that brings its maximum to 2688 or less.

    Numerics:
        ``2688 = 1.3125 * 2**11``; the smallest such power, from the bits of the row maximum.
        NaN or infinity in a row gives byte 255.

    Source:
        The round-up rule of ``ue8m0_scale``, applied to the largest NVFP4 value.
    """
    amax_M = x_MK.to(torch.float32).abs().amax(-1)
    nvfp4_value = ElementFormat(
        name="nvfp4_value",
        bits=0,
        exponent_bits=0,
        mantissa_bits=0,
        bias=0,
        max_value=_NVFP4_MAX,
        min_normal=0.0,
        min_subnormal=0.0,
    )
    return ue8m0_scale(amax_M, element=nvfp4_value, mode="rceil")


def quantize_nvfp4_reference(x_MK: Float[Tensor, "*M K"], group: int, outer: OuterScale) -> Nvfp4:
    """Quantise to NVFP4; see ``api.quantize_nvfp4``."""
    x_MK = x_MK.to(torch.float32)
    outer_M = torch.full(x_MK.shape[:-1], UE8M0.bias, dtype=torch.uint8, device=x_MK.device)
    if outer == "token":
        outer_M = outer_exponent_reference(x_MK)
        x_MK = multiply_exp2(x_MK, inverse_exponent(outer_M).unsqueeze(-1))
    x_MGK = _group(x_MK, group)
    amax_MG = x_MGK.abs().amax(-1)
    # A tensor divisor: dividing by a Python number multiplies by its reciprocal on CUDA.
    largest_code = torch.full_like(amax_MG, E2M1FN.max_value)
    ideal_MG = (amax_MG / largest_code).clamp(min=E4M3FN.min_subnormal)
    finite_MG = torch.isfinite(amax_MG)
    scale_MG = encode_e4m3fn(ideal_MG)
    ratio_MGK = x_MGK / decode_e4m3fn(scale_MG).unsqueeze(-1)
    ratio_MGK = torch.where(finite_MG.unsqueeze(-1), ratio_MGK, 0.0)
    codes_MK = encode_e2m1fn(ratio_MGK).flatten(-2)
    nan_scale = torch.full_like(ideal_MG, torch.nan).to(torch.float8_e4m3fn)
    beyond_MGK = (x_MGK.abs() > _NVFP4_MAX) & torch.isfinite(x_MGK)
    return Nvfp4(
        codes_MK=codes_MK,
        scale_MG=torch.where(
            finite_MG, scale_MG.view(torch.uint8), nan_scale.view(torch.uint8)
        ).view(torch.float8_e4m3fn),
        outer_M=outer_M,
        saturated=beyond_MGK.sum(),
    )


def dequantize_nvfp4_reference(quantized: Nvfp4) -> Float32[Tensor, "*M K"]:
    """Give the values of an NVFP4 tensor; see ``api.dequantize_nvfp4``."""
    group = quantized.codes_MK.shape[-1] // max(quantized.scale_MG.shape[-1], 1)
    values_MGK = _group(decode_e2m1fn(quantized.codes_MK), group)
    values_MGK = values_MGK * decode_e4m3fn(quantized.scale_MG).unsqueeze(-1)
    return _scale_up(values_MGK.flatten(-2), quantized.outer_M.unsqueeze(-1))


def quantize_token_blocks_reference(
    x_NHD: Float[Tensor, "N H D"], block_N: Int32[Tensor, " N"], scales: BlockScales
) -> TokenBlocks:
    """Quantise packed tokens to e4m3fn; see ``api.quantize_token_blocks``."""
    N, H, _ = x_NHD.shape
    amax_NH = x_NHD.abs().amax(-1).to(torch.float32)
    if scales == "token_block":
        # The bits of magnitudes order like the magnitudes, with NaN above infinity: an integer
        # maximum is exact in any order of arrival.
        slot_NH = torch.where(block_N < 0, N, block_N).to(torch.int64).unsqueeze(1).expand(N, H)
        table = torch.zeros((N + 1, H), dtype=torch.int32, device=x_NHD.device)
        table = table.scatter_reduce(0, slot_NH, amax_NH.view(torch.int32), "amax")
        amax_NH = table.gather(0, slot_NH).view(torch.float32)
    tail_N1 = block_N.unsqueeze(1) < 0
    amax_NH = torch.where(tail_N1, 0.0, amax_NH)
    scale_NH = ue8m0_scale(amax_NH, element=E4M3FN, mode="rceil")
    scaled_NHD = _scale_down(x_NHD.to(torch.float32), scale_NH.unsqueeze(-1))
    codes_NHD = encode_e4m3fn(torch.where(tail_N1.unsqueeze(-1), 0.0, scaled_NHD))
    return TokenBlocks(codes_NHD=codes_NHD, scale_NH=scale_NH)


def dequantize_token_blocks_reference(quantized: TokenBlocks) -> Float32[Tensor, "N H D"]:
    """Give the values of packed tokens; see ``api.dequantize_token_blocks``."""
    return _scale_up(decode_e4m3fn(quantized.codes_NHD), quantized.scale_NH.unsqueeze(-1))


def quantize_tiles_reference(
    x_TS: Float[Tensor, "*B T S"], tile: int, scale_mode: ScaleMode
) -> Tiles:
    """Quantise square tiles to e4m3fn; see ``api.quantize_tiles``."""
    T, S = x_TS.shape[-2:]
    tiles = x_TS.to(torch.float32).unflatten(-1, (S // tile, tile)).unflatten(-3, (T // tile, tile))
    scale_GG = ue8m0_scale(tiles.abs().amax((-3, -1)), element=E4M3FN, mode=scale_mode)
    scaled = _scale_down(tiles, scale_GG[..., :, None, :, None])
    return Tiles(codes_TS=encode_e4m3fn(scaled).reshape(x_TS.shape), scale_GG=scale_GG)


def dequantize_tiles_reference(quantized: Tiles) -> Float32[Tensor, "*B T S"]:
    """Give the values of square tiles; see ``api.dequantize_tiles``."""
    codes, scale = quantized.codes_TS, quantized.scale_GG
    tile_T, tile_S = codes.shape[-2] // scale.shape[-2], codes.shape[-1] // scale.shape[-1]
    wide = scale.repeat_interleave(tile_T, dim=-2).repeat_interleave(tile_S, dim=-1)
    return _scale_up(decode_e4m3fn(codes), wide)
