"""Quantisers in plain PyTorch: one group maximum, one scale, one cast."""

import torch

from titan_lowprec.formats.catalogue import E2M1FN, E4M3FN, NVFP4_MAX, UE8M0, ElementFormat
from titan_lowprec.formats.codec import (
    decode_e2m1fn,
    decode_e4m3fn,
    encode_e2m1fn,
    encode_e4m3fn,
)
from titan_lowprec.formats.scales import (
    ScaleMode,
    inverse_scale,
    multiply_exp2,
    ue8m0_round_up,
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
from titan_lowprec.shapes import Bool, Float, Float32, Int32, Tensor, UInt8


def _scale_down(
    x: Float32[Tensor, "*N"], scale: UInt8[Tensor, "*#N"], keep: Bool[Tensor, "*#N"]
) -> Float32[Tensor, "*N"]:
    """Divide by ue8m0 scales where ``keep`` is set, and give zero elsewhere."""
    return torch.where(keep, x * inverse_scale(scale), 0.0)


def _scale_up(values: Float32[Tensor, "*N"], scale: UInt8[Tensor, "*#N"]) -> Float32[Tensor, "*N"]:
    """Multiply by ue8m0 scales; byte 255 gives NaN whatever the codes."""
    exponent = scale.to(torch.int32) - UE8M0.bias
    return torch.where(scale == UE8M0.nan_code, torch.nan, multiply_exp2(values, exponent))


def _group(x: Float[Tensor, "*M K"], group: int) -> Float32[Tensor, "*M G group"]:
    return x.to(torch.float32).reshape(*x.shape[:-1], x.shape[-1] // group, group)


def _mx_groups(
    x_MK: Float[Tensor, "*M K"], group: int, element: ElementFormat, scale_mode: ScaleMode
) -> tuple[Float32[Tensor, "*M K"], UInt8[Tensor, "*M G"]]:
    """Scale groups into the range of an element format."""
    x_MGK = _group(x_MK, group)
    scale_MG = ue8m0_scale(x_MGK.abs().amax(-1), element=element, mode=scale_mode)
    scale_MG1 = scale_MG.unsqueeze(-1)
    scaled_MGK = _scale_down(x_MGK, scale_MG1, scale_MG1 != UE8M0.nan_code)
    return scaled_MGK.flatten(-2), scale_MG


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


def quantize_nvfp4_reference(x_MK: Float[Tensor, "*M K"], group: int, outer: OuterScale) -> Nvfp4:
    """Quantise to NVFP4; see ``api.quantize_nvfp4``."""
    x_MK = x_MK.to(torch.float32)
    outer_M = torch.full(x_MK.shape[:-1], UE8M0.bias, dtype=torch.uint8, device=x_MK.device)
    if outer == "token":
        outer_M = ue8m0_round_up(x_MK.abs().amax(-1), max_value=NVFP4_MAX)
        x_MK = x_MK * inverse_scale(outer_M).unsqueeze(-1)
    x_MGK = _group(x_MK, group)
    amax_MG = x_MGK.abs().amax(-1)
    # A tensor divisor: dividing by a Python number multiplies by its reciprocal on CUDA.
    ideal_MG = amax_MG / torch.full_like(amax_MG, E2M1FN.max_value)
    scale_values_MG = decode_e4m3fn(encode_e4m3fn(ideal_MG.clamp(min=E4M3FN.min_subnormal)))
    finite_MG = torch.isfinite(amax_MG)
    ratio_MGK = x_MGK / scale_values_MG.unsqueeze(-1)
    codes_MGK = encode_e2m1fn(torch.where(finite_MG.unsqueeze(-1), ratio_MGK, 0.0))
    marked_MG = torch.where(finite_MG, scale_values_MG, torch.nan)
    magnitude_MGK = x_MGK.abs()
    beyond_MGK = (magnitude_MGK > NVFP4_MAX) & (magnitude_MGK < torch.inf)
    return Nvfp4(
        codes_MK=codes_MGK.flatten(-2),
        scale_MG=marked_MG.to(torch.float8_e4m3fn),
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
    keep_NH = (scale_NH != UE8M0.nan_code) & ~tail_N1
    scaled_NHD = _scale_down(x_NHD.to(torch.float32), scale_NH.unsqueeze(-1), keep_NH.unsqueeze(-1))
    return TokenBlocks(codes_NHD=encode_e4m3fn(scaled_NHD), scale_NH=scale_NH)


def dequantize_token_blocks_reference(quantized: TokenBlocks) -> Float32[Tensor, "N H D"]:
    """Give the values of packed tokens; see ``api.dequantize_token_blocks``."""
    return _scale_up(decode_e4m3fn(quantized.codes_NHD), quantized.scale_NH.unsqueeze(-1))


def scale_table_reference(
    scale_NH: UInt8[Tensor, "N H"], block_N: Int32[Tensor, " N"], capacity: int
) -> UInt8[Tensor, "G H"]:
    """Gather per-token scale bytes into a table of blocks; see ``api.scale_table``."""
    N, H = scale_NH.shape
    slot_N = torch.where(block_N < 0, capacity, block_N).to(torch.int64)
    table = torch.zeros((capacity + 1, H), dtype=torch.int32, device=scale_NH.device)
    slot_NH = slot_N.unsqueeze(1).expand(N, H)
    table = table.scatter_reduce(0, slot_NH, scale_NH.to(torch.int32), "amax")
    return table[:capacity].to(torch.uint8)


def quantize_tiles_reference(
    x_TS: Float[Tensor, "*B T S"], tile: int, scale_mode: ScaleMode
) -> Tiles:
    """Quantise square tiles to e4m3fn; see ``api.quantize_tiles``."""
    T, S = x_TS.shape[-2:]
    tiles = x_TS.to(torch.float32).reshape(*x_TS.shape[:-2], T // tile, tile, S // tile, tile)
    scale_GG = ue8m0_scale(tiles.abs().amax((-3, -1)), element=E4M3FN, mode=scale_mode)
    wide = scale_GG[..., :, None, :, None]
    scaled = _scale_down(tiles, wide, wide != UE8M0.nan_code)
    return Tiles(codes_TS=encode_e4m3fn(scaled).reshape(x_TS.shape), scale_GG=scale_GG)


def dequantize_tiles_reference(quantized: Tiles) -> Float32[Tensor, "*B T S"]:
    """Give the values of square tiles; see ``api.dequantize_tiles``."""
    codes, scale = quantized.codes_TS, quantized.scale_GG
    tile_T, tile_S = codes.shape[-2] // scale.shape[-2], codes.shape[-1] // scale.shape[-1]
    wide = scale.repeat_interleave(tile_T, dim=-2).repeat_interleave(tile_S, dim=-1)
    return _scale_up(decode_e4m3fn(codes), wide)
