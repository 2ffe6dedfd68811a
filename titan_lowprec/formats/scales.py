"""Power-of-two block scales: the four MX rules, exact scaling, and the 128x4 export layout."""

from typing import Literal

import torch

from titan_lowprec.formats.catalogue import UE8M0, ElementFormat
from titan_lowprec.shapes import Float32, Int32, Tensor, UInt8

ScaleMode = Literal["floor", "ceil", "even", "rceil"]

_F32_MANTISSA_BITS = 23
_F32_MANTISSA_MASK = (1 << _F32_MANTISSA_BITS) - 1
_F32_MAGNITUDE_MASK = 0x7FFFFFFF
_F32_INFINITY_BITS = 0x7F800000
_F32_BIAS = 127
_F32_MIN_EXPONENT = -126
_F32_MAX_EXPONENT = 127

_TILE_ROWS = 128
_TILE_COLUMNS = 4
_TILE_LANES = 32


def _mantissa_threshold(element: ElementFormat, mode: ScaleMode) -> int:
    """Smallest fp32 mantissa field that takes the next exponent under a scale rule."""
    if mode == "floor":
        return 1 << _F32_MANTISSA_BITS
    if mode == "ceil":
        return 1
    if mode == "even":
        return (1 << _F32_MANTISSA_BITS) - (1 << (_F32_MANTISSA_BITS - element.mantissa_bits - 1))
    if mode == "rceil":
        return int((element.max_mantissa - 1.0) * 2**_F32_MANTISSA_BITS) + 1
    raise ValueError(
        f"ue8m0_scale: mode must be 'floor', 'ceil', 'even' or 'rceil', got {mode!r}; "
        "this project's recipes use 'rceil'"
    )


def ue8m0_scale(
    amax: Float32[Tensor, "*N"], *, element: ElementFormat, mode: ScaleMode
) -> UInt8[Tensor, "*N"]:
    """Choose the ue8m0 scale byte of blocks from their largest magnitudes.

    Args:
        amax: Largest magnitude of each block, fp32; the sign bit is ignored.
        element: Format of the elements that the scale will multiply.
        mode: With ``amax = m * 2**k``, ``1 <= m < 2``, and ``E = element.max_exponent``, the
            exponent is ``k - E``, one more where

            - ``"floor"``: never (the OCP rule; maxima above ``max_value`` saturate);
            - ``"ceil"``: ``m > 1``;
            - ``"even"``: ``m`` rounds to 2 in the element's mantissa;
            - ``"rceil"``: ``m > element.max_mantissa``, so the maximum never saturates.

    Returns:
        Biased exponents. Zero gives byte 0, NaN and infinity give byte 255.

    Raises:
        TypeError: ``amax`` is not fp32.
        ValueError: ``mode`` is none of the four.

    Numerics:
        Integer arithmetic on the fp32 bits. ``ceil(log2(x))`` in fp32 is wrong one ulp above
        most powers of two. A subnormal ``amax`` has exponent field 0 and gets byte 0 under every
        rule, as ``2**-127`` already holds it.

    Source:
        OCP Microscaling v1.0, section 6.3 ("floor"); arXiv:2506.08027 ("rceil"); torchao
        ``ScaleCalculationMode`` for the names of the other two.
    """
    if amax.dtype != torch.float32:
        raise TypeError(
            f"ue8m0_scale: amax must be float32, got {amax.dtype}; cast it with .to(torch.float32)"
        )
    bits = amax.view(torch.int32) & _F32_MAGNITUDE_MASK
    field = bits >> _F32_MANTISSA_BITS
    carry = (bits & _F32_MANTISSA_MASK) >= _mantissa_threshold(element, mode)
    code = (field + carry.to(torch.int32) - element.max_exponent).clamp(min=0)
    return torch.where(bits >= _F32_INFINITY_BITS, UE8M0.nan_code, code).to(torch.uint8)


def _exp2_factor(exponent: Int32[Tensor, "*N"]) -> Float32[Tensor, "*N"]:
    """Build normal powers of two from their exponents."""
    return ((exponent + _F32_BIAS) << _F32_MANTISSA_BITS).view(torch.float32)


def multiply_exp2(
    x: Float32[Tensor, "*#N"], exponent: Int32[Tensor, "*#N"]
) -> Float32[Tensor, "*#N"]:
    """Multiply by ``2**exponent`` with one rounding, for exponents of magnitude up to 378.

    Args:
        x: Any fp32 values.
        exponent: int32, broadcast against ``x``; the sum of a row's and a column's exponent may
            reach 254 in magnitude.

    Returns:
        ``x * 2**exponent``, correctly rounded: exact unless the result overflows or is subnormal.

    Raises:
        TypeError: ``exponent`` is not int32.

    Numerics:
        Three normal powers of two, the part beyond one fp32 exponent first. Only the last factor
        can round, since anything that an earlier one rounds ends below the smallest subnormal;
        no factor overflows or flushes by itself.

    Source:
        C ``scalbn``, ISO/IEC 9899:2018, section 7.12.6.13.
    """
    if exponent.dtype != torch.int32:
        raise TypeError(
            f"multiply_exp2: exponent must be int32, got {exponent.dtype}; "
            "cast it with .to(torch.int32)"
        )
    last = exponent.clamp(_F32_MIN_EXPONENT, _F32_MAX_EXPONENT)
    rest = exponent - last
    middle = rest.clamp(_F32_MIN_EXPONENT, _F32_MAX_EXPONENT)
    first = (rest - middle).clamp(_F32_MIN_EXPONENT, _F32_MAX_EXPONENT)
    return x * _exp2_factor(first) * _exp2_factor(middle) * _exp2_factor(last)


def inverse_exponent(scale: UInt8[Tensor, "*N"]) -> Int32[Tensor, "*N"]:
    """Give the exponent that divides by ue8m0 scales: ``127 - byte``.

    Numerics:
        Byte 255 gives -128, which keeps scaled elements small; its codes are zeroed elsewhere.

    Source:
        OCP Microscaling v1.0, section 5.4.
    """
    return UE8M0.bias - scale.to(torch.int32)


def swizzle_128x4(scale_RC: UInt8[Tensor, "R C"]) -> UInt8[Tensor, " bytes"]:
    """Lay scale bytes out in the 128x4 tiles that cuBLAS and tcgen05 read.

    Args:
        scale_RC: One byte per matrix row and scale group.

    Returns:
        ``ceil(R / 128) * ceil(C / 4) * 512`` bytes. Byte ``(r % 32) * 16 + (r // 32) * 4 + c`` of
        a tile holds its element ``(r, c)``; tiles follow one another along columns first; padded
        bytes are 0.

    Numerics:
        Exact.

    Source:
        NVIDIA cuBLAS documentation, "1D Block Scaling Factors Layout".
    """
    R, C = scale_RC.shape
    row_tiles, column_tiles = -(-R // _TILE_ROWS), -(-C // _TILE_COLUMNS)
    padded = scale_RC.new_zeros((row_tiles * _TILE_ROWS, column_tiles * _TILE_COLUMNS))
    padded[:R, :C] = scale_RC
    tiles = padded.view(
        row_tiles, _TILE_ROWS // _TILE_LANES, _TILE_LANES, column_tiles, _TILE_COLUMNS
    )
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle_128x4(
    swizzled: UInt8[Tensor, " bytes"], *, rows: int, columns: int
) -> UInt8[Tensor, "R C"]:
    """Read scale bytes back from 128x4 tiles.

    Args:
        swizzled: Bytes as ``swizzle_128x4`` wrote them.
        rows: Rows of the scale table, without padding.
        columns: Columns of the scale table, without padding.

    Raises:
        ValueError: The number of bytes does not fit the table.

    Numerics:
        Exact; padded bytes are dropped unread.

    Source:
        NVIDIA cuBLAS documentation, "1D Block Scaling Factors Layout".
    """
    row_tiles, column_tiles = -(-rows // _TILE_ROWS), -(-columns // _TILE_COLUMNS)
    expected = row_tiles * column_tiles * _TILE_ROWS * _TILE_COLUMNS
    if swizzled.numel() != expected:
        raise ValueError(
            f"unswizzle_128x4: a {rows}x{columns} table takes {expected} bytes, "
            f"got {swizzled.numel()}; pass the rows and columns given to swizzle_128x4"
        )
    tiles = swizzled.view(
        row_tiles, column_tiles, _TILE_LANES, _TILE_ROWS // _TILE_LANES, _TILE_COLUMNS
    )
    table = tiles.permute(0, 3, 2, 1, 4).reshape(row_tiles * _TILE_ROWS, -1)
    return table[:rows, :columns].contiguous()
