"""Encode and decode e4m3fn, e2m1fn and ue8m0, bit for bit the same on every device."""

import torch

from titan_lowprec.formats.catalogue import E2M1FN, E4M3FN, UE8M0
from titan_lowprec.formats.rounding import round_to_grid
from titan_lowprec.shapes import Float, Float8e4m3fn, Float32, Tensor, UInt8

_INPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_F32_MANTISSA_BITS = 23
_F32_NAN_BITS = 0x7FC00000
_F32_BITS_2_POW_MINUS_127 = 0x00400000
_E2M1FN_SIGN = 8
_E2M1FN_MAGNITUDE = 7


def _check_input(name: str, x: Tensor) -> None:
    if x.dtype not in _INPUT_DTYPES:
        raise TypeError(
            f"{name}: x must be float16, bfloat16, float32 or float64, got {x.dtype}; "
            "decode or cast it first"
        )


def encode_e4m3fn(x: Float[Tensor, "*N"]) -> Float8e4m3fn[Tensor, "*N"]:
    """Round values to e4m3fn, saturating at 448.

    Args:
        x: Values in fp16, bf16, fp32 or fp64.

    Returns:
        Codes. Never a NaN code: NaN becomes code 0 and infinities saturate, since a block with
        either is marked by its scale byte.

    Raises:
        TypeError: ``x`` has another dtype.

    Numerics:
        Round to nearest, ties to even; the sign of zero is kept. Values are clamped before the
        cast because casts differ past 464: torch 2.13 on a CPU saturates, torch 2.11 gives NaN.
        float64 is rounded to the grid first, since the cast itself would go through fp32.

    Source:
        OCP 8-bit Floating Point v1.0, section 5.
    """
    _check_input("encode_e4m3fn", x)
    limit = E4M3FN.max_value
    finite = torch.nan_to_num(x, nan=0.0, posinf=limit, neginf=-limit).clamp(-limit, limit)
    if finite.dtype == torch.float64:
        finite = round_to_grid(finite, element=E4M3FN)
    return finite.to(torch.float32).to(torch.float8_e4m3fn)


def decode_e4m3fn(codes: Float8e4m3fn[Tensor, "*N"]) -> Float32[Tensor, "*N"]:
    """Give the values of e4m3fn codes in fp32.

    Numerics:
        Exact; 0x7F and 0xFF decode to NaN.

    Source:
        OCP 8-bit Floating Point v1.0, section 5.
    """
    return codes.to(torch.float32)


def encode_e2m1fn(x: Float[Tensor, "*N"]) -> UInt8[Tensor, "*N"]:
    """Round values to e2m1fn, saturating at 6.

    Args:
        x: Values in fp16, bf16, fp32 or fp64.

    Returns:
        Codes 0 to 15, one a byte; bit 3 is the sign. NaN becomes code 0, infinities saturate.

    Raises:
        TypeError: ``x`` has another dtype.

    Numerics:
        Round to nearest, ties to the even code; the sign of zero is kept. Each comparison is a
        rounding boundary, inclusive where the code above it is the even one.

    Source:
        OCP Microscaling v1.0, section 5.3.3.
    """
    _check_input("encode_e2m1fn", x)
    magnitude = x.abs()
    codes = (magnitude > 0.25).to(torch.uint8)
    codes += magnitude >= 0.75
    codes += magnitude > 1.25
    codes += magnitude >= 1.75
    codes += magnitude > 2.5
    codes += magnitude >= 3.5
    codes += magnitude > 5.0
    negative = torch.signbit(x) & ~torch.isnan(x)
    return codes + negative.to(torch.uint8) * _E2M1FN_SIGN


def decode_e2m1fn(codes: UInt8[Tensor, "*N"]) -> Float32[Tensor, "*N"]:
    """Give the values of e2m1fn codes in fp32.

    Args:
        codes: Codes 0 to 15; only the low nibble is read.

    Numerics:
        Exact: magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6; code 8 is minus zero.

    Source:
        OCP Microscaling v1.0, section 5.3.3.
    """
    magnitude = (codes & _E2M1FN_MAGNITUDE).to(torch.int32)
    exponent = magnitude >> E2M1FN.mantissa_bits
    mantissa = magnitude & 1
    in_subnormals = torch.where(exponent == 0, mantissa, (2 + mantissa) << (exponent - 1).clamp(0))
    values = in_subnormals.to(torch.float32) * E2M1FN.min_subnormal
    return torch.where((codes & _E2M1FN_SIGN) != 0, -values, values)


def pack_e2m1fn(codes: UInt8[Tensor, "*N twice"]) -> UInt8[Tensor, "*N half"]:
    """Pack two e2m1fn codes into a byte, the first code in the low nibble.

    Args:
        codes: Codes 0 to 15; the last axis is even.

    Returns:
        Bytes, the last axis halved.

    Raises:
        ValueError: The last axis is odd.

    Numerics:
        Exact.

    Source:
        The layout of ``torch.float4_e2m1fn_x2``.
    """
    if codes.shape[-1] % 2 != 0:
        raise ValueError(
            f"pack_e2m1fn: the last axis must be even, got {codes.shape[-1]} codes; append a zero"
        )
    return (codes[..., 0::2] & 0xF) | (codes[..., 1::2] << 4)


def unpack_e2m1fn(packed: UInt8[Tensor, "*N half"]) -> UInt8[Tensor, "*N twice"]:
    """Unpack bytes into e2m1fn codes, the low nibble first.

    Numerics:
        Exact; the inverse of ``pack_e2m1fn``.

    Source:
        The layout of ``torch.float4_e2m1fn_x2``.
    """
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def decode_ue8m0(codes: UInt8[Tensor, "*N"]) -> Float32[Tensor, "*N"]:
    """Give the powers of two that ue8m0 bytes stand for, in fp32.

    Numerics:
        Built from bits, no ``exp2``: byte 0 is the subnormal 2**-127 even where arithmetic
        flushes subnormals, and byte 255 is NaN rather than the infinity that 2**128 would be.

    Source:
        OCP Microscaling v1.0, section 5.4.
    """
    bits = codes.to(torch.int32) << _F32_MANTISSA_BITS
    bits = torch.where(codes == 0, _F32_BITS_2_POW_MINUS_127, bits)
    bits = torch.where(codes == UE8M0.nan_code, _F32_NAN_BITS, bits)
    return bits.view(torch.float32)
