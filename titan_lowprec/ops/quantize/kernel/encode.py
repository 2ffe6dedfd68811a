"""Scale bytes and e4m3 codes inside Triton kernels."""

import triton
import triton.language as tl

from titan_lowprec.formats.catalogue import E4M3FN

_E4M3_MAX_EXPONENT = tl.constexpr(E4M3FN.max_exponent)
_RCEIL_MANTISSA = tl.constexpr(int((E4M3FN.max_value * 2.0**-E4M3FN.max_exponent - 1.0) * 2**23))
_F32_INFINITY = tl.constexpr(0x7F800000)
_F32_NAN = tl.constexpr(0x7FC00000)
_F32_MIN_EXPONENT_FACTOR = tl.constexpr(0x400000)


@triton.jit
def scale_byte(magnitude_bits):
    """ue8m0 byte of a group from the fp32 bits of its largest magnitude; the rceil rule."""
    carry = (magnitude_bits & 0x7FFFFF) > _RCEIL_MANTISSA
    byte = tl.maximum((magnitude_bits >> 23) + carry.to(tl.int32) - _E4M3_MAX_EXPONENT, 0)
    return tl.where(magnitude_bits >= _F32_INFINITY, 255, byte)


@triton.jit
def scale_factor(byte):
    """fp32 value of ue8m0 bytes: 0 gives 2**-127, 255 gives NaN."""
    byte = byte.to(tl.int32)
    bits = tl.where(byte == 0, _F32_MIN_EXPONENT_FACTOR, byte << 23)
    bits = tl.where(byte == 255, _F32_NAN, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def scale_exponent(byte):
    """Exponent of ue8m0 bytes as fp32; 255 gives NaN."""
    exponent = byte.to(tl.float32) - 127.0
    return tl.where(byte == 255, float("nan"), exponent)


@triton.jit
def scale_rows(x, byte):
    """Values to be cast to e4m3 under scale bytes that broadcast against them."""
    scaled = x * scale_factor(tl.maximum(254 - byte, 0))
    return tl.where(byte == 255, 0.0, scaled)  # within +-448 by the rceil rule


@triton.jit
def join_codes(c0, c1, c2, c3):
    """Four codes in one 32-bit word, the first in the lowest byte."""
    word = c0.to(tl.uint8, bitcast=True).to(tl.int32)
    word = word | (c1.to(tl.uint8, bitcast=True).to(tl.int32) << 8)
    word = word | (c2.to(tl.uint8, bitcast=True).to(tl.int32) << 16)
    return word | (c3.to(tl.uint8, bitcast=True).to(tl.int32) << 24)


@triton.jit
def pack_codes(x0, x1, x2, x3, COMPILED: tl.constexpr):
    """Cast four values to e4m3 into one 32-bit word, the first in the lowest byte.

    Compiled, this is two conversions of pairs: taking the bytes apart after the ordinary cast
    makes ptxas (CUDA 12.8, sm_90a) read registers before they are written.
    """
    if COMPILED:
        word = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }
            """,
            "=r,r,r,r,r",
            [x0, x1, x2, x3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        word = join_codes(
            x0.to(tl.float8e4nv), x1.to(tl.float8e4nv), x2.to(tl.float8e4nv), x3.to(tl.float8e4nv)
        )
    return word


@triton.jit
def permute_token_pairs(codes, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """Reorder the last axis of ``[ROWS, TOKENS]`` from 8a + 2t + b to 4t + 2a + b in each 16.

    An fp32 accumulator keeps columns 2t, 2t+1 of both halves of 16 in thread t of a quad; an
    8-bit left operand wants 4t ... 4t+3 there. With the reduction axis of the right operand
    stored in this order, the accumulator becomes an operand without moving between threads.
    """
    halves = tl.reshape(codes, [ROWS, TOKENS // 16, 2, 4, 2])
    return tl.reshape(tl.permute(halves, (0, 1, 3, 2, 4)), [ROWS, TOKENS])
