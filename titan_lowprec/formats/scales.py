"""Power-of-two block scales: the four MX rules and exact scaling."""

from typing import Literal

import torch

from titan_lowprec.formats.catalogue import UE8M0, ElementFormat, exponent_of
from titan_lowprec.shapes import Float32, Int32, Tensor, UInt8

ScaleMode = Literal["floor", "ceil", "even", "rceil"]

_F32_MANTISSA_BITS = 23
_F32_MANTISSA_MASK = (1 << _F32_MANTISSA_BITS) - 1
_F32_MAGNITUDE_MASK = 0x7FFFFFFF
_F32_INFINITY_BITS = 0x7F800000
_F32_BITS_2_POW_MINUS_127 = 0x00400000
_F32_BIAS = 127
_F32_MIN_EXPONENT = -126
_F32_MAX_EXPONENT = 127


def _round_up_threshold(max_value: float) -> int:
    """Smallest fp32 mantissa field above the mantissa of ``max_value``."""
    mantissa = max_value / 2.0 ** exponent_of(max_value)
    return int((mantissa - 1.0) * 2**_F32_MANTISSA_BITS) + 1


def _mantissa_threshold(element: ElementFormat, mode: ScaleMode) -> int:
    """Smallest fp32 mantissa field that takes the next exponent under a scale rule."""
    if mode == "floor":
        return 1 << _F32_MANTISSA_BITS
    if mode == "ceil":
        return 1
    if mode == "even":
        return (1 << _F32_MANTISSA_BITS) - (1 << (_F32_MANTISSA_BITS - element.mantissa_bits - 1))
    if mode == "rceil":
        return _round_up_threshold(element.max_value)
    raise ValueError(
        f"ue8m0_scale: mode must be 'floor', 'ceil', 'even' or 'rceil', got {mode!r}; "
        "this project's recipes use 'rceil'"
    )


def _scale_bytes(
    who: str, amax: Float32[Tensor, "*N"], max_exponent: int, threshold: int
) -> UInt8[Tensor, "*N"]:
    """Give ``exponent(amax) - max_exponent``, one more from a mantissa threshold on."""
    if amax.dtype != torch.float32:
        raise TypeError(
            f"{who}: amax must be float32, got {amax.dtype}; cast it with .to(torch.float32)"
        )
    bits = amax.view(torch.int32) & _F32_MAGNITUDE_MASK
    field = bits >> _F32_MANTISSA_BITS
    carry = (bits & _F32_MANTISSA_MASK) >= threshold
    code = (field + carry.to(torch.int32) - max_exponent).clamp(min=0)
    return torch.where(bits >= _F32_INFINITY_BITS, UE8M0.nan_code, code).to(torch.uint8)


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
            - ``"rceil"``: ``m * 2**E > element.max_value``, so the maximum never saturates.

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
    threshold = _mantissa_threshold(element, mode)
    return _scale_bytes("ue8m0_scale", amax, element.max_exponent, threshold)


def ue8m0_round_up(amax: Float32[Tensor, "*N"], *, max_value: float) -> UInt8[Tensor, "*N"]:
    """Choose the smallest power of two that brings magnitudes to ``max_value`` or less.

    Args:
        amax: Largest magnitude of each block, fp32; the sign bit is ignored.
        max_value: Any positive fp32 value of at least 4: 448 makes this the ``"rceil"`` rule of
            e4m3fn, 2688 chooses the outer exponent of an NVFP4 row.

    Returns:
        Biased exponents. Zero gives byte 0, NaN and infinity give byte 255.

    Raises:
        TypeError: ``amax`` is not fp32.
        ValueError: ``max_value`` is too small for subnormal maxima to fit byte 0.

    Numerics:
        As ``ue8m0_scale``.

    Source:
        arXiv:2506.08027, section 3.
    """
    if not 4.0 <= max_value < 2.0**127:
        raise ValueError(
            f"ue8m0_round_up: max_value must be in [4, 2**127), got {max_value}; "
            "pass the largest value of the format"
        )
    threshold = _round_up_threshold(max_value)
    return _scale_bytes("ue8m0_round_up", amax, exponent_of(max_value), threshold)


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


def inverse_scale(scale: UInt8[Tensor, "*N"]) -> Float32[Tensor, "*N"]:
    """Give the powers of two that divide by ue8m0 scales, ``2**(127 - byte)``, in fp32.

    Args:
        scale: Bytes of ``ue8m0_scale``.

    Numerics:
        Normal powers of two: finite maxima give bytes up to 253. Byte 254, which no scale rule
        gives, has the exact subnormal reciprocal; byte 255 gives 0, and its codes are the
        caller's to clear.

    Source:
        OCP Microscaling v1.0, section 5.4.
    """
    bits = (UE8M0.max_code - scale.to(torch.int32)) << _F32_MANTISSA_BITS
    bits = torch.where(scale == UE8M0.max_code, _F32_BITS_2_POW_MINUS_127, bits)
    return torch.where(scale == UE8M0.nan_code, 0, bits).view(torch.float32)
