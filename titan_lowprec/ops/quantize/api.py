"""Quantise and dequantise: MXFP8, MXFP4, NVFP4, token blocks and square tiles."""

import torch

from titan_lowprec.formats.codec import decode_e2m1fn, decode_e4m3fn
from titan_lowprec.formats.scales import ScaleMode
from titan_lowprec.ops.quantize import reference
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

__all__ = [
    "BlockScales",
    "Mxfp4",
    "Mxfp8",
    "Nvfp4",
    "OuterScale",
    "Tiles",
    "TokenBlocks",
    "dequantize_mxfp4",
    "dequantize_mxfp8",
    "dequantize_nvfp4",
    "dequantize_tiles",
    "dequantize_token_blocks",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "quantize_tiles",
    "quantize_token_blocks",
    "scale_table",
]


def _check_dtype(who: str, x: Tensor) -> None:
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"{who}: x must be bfloat16 or float32, got {x.dtype}; cast it first")


def _check_tokens(who: str, x: Tensor, block_N: Tensor, *, axes: str) -> None:
    if x.ndim != len(axes.split()) or block_N.shape != x.shape[:1]:
        raise ValueError(
            f"{who}: one block id per token is required, values ({axes}) and blocks (N), "
            f"got {tuple(x.shape)} and {tuple(block_N.shape)}; take ids from token_metadata"
        )


def _check_groups(who: str, x_MK: Tensor, group: int) -> None:
    _check_dtype(who, x_MK)
    K = x_MK.shape[-1]
    if group < 1 or K % group != 0:
        raise ValueError(
            f"{who}: K must be a multiple of a positive group, got K={K}, group={group}; "
            "pad the last axis with zeros"
        )


def quantize_mxfp8(x_MK: Float[Tensor, "*M K"], *, group: int, scale_mode: ScaleMode) -> Mxfp8:
    """Quantise to MXFP8 with one ue8m0 scale per group along the last axis.

    Args:
        x_MK: bf16 or fp32 values.
        group: Neighbours that share a scale; divides ``K``. OCP MX fixes 32.
        scale_mode: See ``ue8m0_scale``: ``"rceil"`` never saturates the group maximum,
            ``"floor"``, the OCP rule, clips maxima of 448 to 512 times a power of two.

    Returns:
        Codes ``(..., K)`` and biased scale exponents ``(..., K // group)``.

    Raises:
        TypeError: ``x_MK`` is neither bf16 nor fp32.
        ValueError: ``K`` is not a multiple of ``group``, or ``scale_mode`` is unknown.

    Numerics:
        Scaling is exact wherever it can matter; the cast rounds to nearest, ties to even, and
        saturates. A zero group gets scale byte 0. A group with NaN or infinity gets scale byte
        255 and zero codes, and decodes to NaN.

    Source:
        OCP Microscaling v1.0, section 6.3; arXiv:2506.08027 ("rceil").
    """
    _check_groups("quantize_mxfp8", x_MK, group)
    return reference.quantize_mxfp8_reference(x_MK, group, scale_mode)


def dequantize_mxfp8(quantized: Mxfp8) -> Float32[Tensor, "*M K"]:
    """Give the values of an MXFP8 tensor in fp32.

    Numerics:
        Exact but for subnormal fp32 results and for values rounded up to 2**128, which become
        infinite; scale byte 255 gives NaN.

    Source:
        OCP Microscaling v1.0, section 6.2.
    """
    return reference.dequantize_mx_reference(decode_e4m3fn(quantized.codes_MK), quantized.scale_MG)


def quantize_mxfp4(x_MK: Float[Tensor, "*M K"], *, group: int, scale_mode: ScaleMode) -> Mxfp4:
    """Quantise to MXFP4 with one ue8m0 scale per group along the last axis.

    Args:
        x_MK: bf16 or fp32 values.
        group: Neighbours that share a scale; divides ``K``. OCP MX fixes 32.
        scale_mode: As in ``quantize_mxfp8``, with 6 in place of 448.

    Returns:
        Codes ``(..., K)``, one a byte (``pack_e2m1fn`` halves them), and biased scale exponents.

    Raises:
        ValueError, TypeError: As ``quantize_mxfp8``.

    Numerics:
        As ``quantize_mxfp8``.

    Source:
        OCP Microscaling v1.0, section 6.3; arXiv:2506.08027 ("rceil").
    """
    _check_groups("quantize_mxfp4", x_MK, group)
    return reference.quantize_mxfp4_reference(x_MK, group, scale_mode)


def dequantize_mxfp4(quantized: Mxfp4) -> Float32[Tensor, "*M K"]:
    """Give the values of an MXFP4 tensor in fp32.

    Numerics:
        As ``dequantize_mxfp8``.

    Source:
        OCP Microscaling v1.0, section 6.2.
    """
    return reference.dequantize_mx_reference(decode_e2m1fn(quantized.codes_MK), quantized.scale_MG)


def quantize_nvfp4(x_MK: Float[Tensor, "*M K"], *, group: int, outer: OuterScale) -> Nvfp4:
    """Quantise to NVFP4 with one e4m3fn scale per group along the last axis.

    Args:
        x_MK: bf16 or fp32 values.
        group: Neighbours that share a scale; divides ``K``. NVFP4 fixes 16.
        outer: ``"token"`` first scales each row by the power of two that brings its maximum to
            2688 or less; under ``"none"`` larger values saturate. There is no tensor scale: over
            a sequence it would depend on later tokens.

    Returns:
        Codes, one a byte, scales, the rows' powers of two, and a count of values beyond 2688.

    Raises:
        TypeError: ``x_MK`` is neither bf16 nor fp32.
        ValueError: ``K`` is not a multiple of ``group``, or ``outer`` is unknown.

    Numerics:
        The scale is ``amax / 6`` rounded to nearest, in [2**-9, 448]; codes are ``x / scale``
        rounded to nearest, ties to the even code, saturating at 6. Correctly rounded fp32
        divisions turn no near tie into a tie here; products with a reciprocal do. A group with
        NaN or infinity gets a NaN scale and zero codes; an outer scale marks its whole row NaN.

    Source:
        NVFP4 as in cuBLAS, "1D Block Scaling"; the outer power of two is ours.
    """
    _check_groups("quantize_nvfp4", x_MK, group)
    if outer not in ("none", "token"):
        raise ValueError(
            f"quantize_nvfp4: outer must be 'none' or 'token', got {outer!r}; 'none' is plain NVFP4"
        )
    return reference.quantize_nvfp4_reference(x_MK, group, outer)


def dequantize_nvfp4(quantized: Nvfp4) -> Float32[Tensor, "*M K"]:
    """Give the values of an NVFP4 tensor in fp32.

    Numerics:
        As ``dequantize_mxfp8``; ``scale * code`` is exact, and a NaN scale gives NaN.

    Source:
        NVFP4 as in cuBLAS, "1D Block Scaling".
    """
    return reference.dequantize_nvfp4_reference(quantized)


def quantize_token_blocks(
    x_NHD: Float[Tensor, "N H D"], block_N: Int32[Tensor, " N"], *, scales: BlockScales
) -> TokenBlocks:
    """Quantise packed tokens to e4m3fn with one exponent per token block and head.

    Args:
        x_NHD: bf16 or fp32 values of packed tokens.
        block_N: Block of each token, from ``token_metadata`` or ``row_metadata``; any ids in
            ``[0, N)``, equal for the tokens of one block; -1 for tokens past the last document.
        scales: ``"token_block"`` takes the maximum over a block and all features of a head;
            ``"token"`` over one token's features, so that no token depends on another.

    Returns:
        Codes ``(N, H, D)`` and one scale byte per token and head, in both modes.

    Raises:
        TypeError: ``x_NHD`` is neither bf16 nor fp32.
        ValueError: Sizes do not match, or ``scales`` is unknown.

    Numerics:
        Round-up ("rceil") scales, so the block maximum never saturates. NaN or infinity in a
        block gives byte 255 and zero codes: it decodes to NaN, and 0 * code stays 0 in masked
        products. Tokens past the last document get byte 0 and zero codes whatever they hold.
        The maximum is over integers: bits depend on neither device nor order of arrival.

    Source:
        FLAMIA, arXiv:2611.03344, for 32-token blocks over all features.
    """
    _check_dtype("quantize_token_blocks", x_NHD)
    _check_tokens("quantize_token_blocks", x_NHD, block_N, axes="N H D")
    if scales not in ("token_block", "token"):
        raise ValueError(
            f"quantize_token_blocks: scales must be 'token_block' or 'token', got {scales!r}; "
            "'token' is the strictly causal choice"
        )
    return reference.quantize_token_blocks_reference(x_NHD, block_N, scales)


def dequantize_token_blocks(quantized: TokenBlocks) -> Float32[Tensor, "N H D"]:
    """Give the values of packed tokens in fp32.

    Numerics:
        As ``dequantize_mxfp8``.

    Source:
        OCP Microscaling v1.0, section 6.2.
    """
    return reference.dequantize_token_blocks_reference(quantized)


def scale_table(
    scale_NH: UInt8[Tensor, "N H"], block_N: Int32[Tensor, " N"], *, capacity: int
) -> UInt8[Tensor, "G H"]:
    """Collect the scale bytes of token blocks, one row of the table per block.

    Args:
        scale_NH: Bytes per token and head, equal within a block.
        block_N: Block of each token, below ``capacity``; -1 past the last document.
        capacity: Rows of the table; ``max_blocks`` bounds them without reading device memory.

    Returns:
        Bytes of each block and head; unused rows are 0.

    Numerics:
        Exact.

    Source:
        FLAMIA, arXiv:2611.03344, for one exponent per block.
    """
    _check_tokens("scale_table", scale_NH, block_N, axes="N H")
    return reference.scale_table_reference(scale_NH, block_N, capacity)


def quantize_tiles(x_TS: Float[Tensor, "*B T S"], *, tile: int, scale_mode: ScaleMode) -> Tiles:
    """Quantise square tiles to e4m3fn with one ue8m0 scale per tile.

    Args:
        x_TS: bf16 or fp32 values.
        tile: Rows and columns of a tile; divides both axes. Score gradients use 32.
        scale_mode: As in ``quantize_mxfp8``.

    Returns:
        Codes, for products along either axis, and one biased scale exponent per tile.

    Raises:
        ValueError: A size is not a multiple of ``tile``, or ``scale_mode`` is unknown.

    Numerics:
        As ``quantize_mxfp8``.

    Source:
        FLAMIA, arXiv:2611.03344, for 32x32 tiles of score gradients.
    """
    _check_groups("quantize_tiles", x_TS, tile)
    if x_TS.ndim < 2 or x_TS.shape[-2] % tile != 0:
        raise ValueError(
            f"quantize_tiles: T must be a multiple of tile={tile}, got shape {tuple(x_TS.shape)}; "
            "pad the tile with zeros"
        )
    return reference.quantize_tiles_reference(x_TS, tile, scale_mode)


def dequantize_tiles(quantized: Tiles) -> Float32[Tensor, "*B T S"]:
    """Give the values of square tiles in fp32.

    Numerics:
        As ``dequantize_mxfp8``.

    Source:
        OCP Microscaling v1.0, section 6.2.
    """
    return reference.dequantize_tiles_reference(quantized)
