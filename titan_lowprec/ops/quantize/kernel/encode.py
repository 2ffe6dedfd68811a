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
def rceil_exponent(magnitude_bits):
    """Biased exponent of a group's scale from the fp32 bits of its largest magnitude; unclamped.

    The sum carries into the exponent's bits where the mantissa is beyond that of e4m3's maximum.
    """
    return ((magnitude_bits + (0x7FFFFF - _RCEIL_MANTISSA)) >> 23) - _E4M3_MAX_EXPONENT


@triton.jit
def scale_byte(magnitude_bits):
    """ue8m0 byte of a group from the fp32 bits of its largest magnitude; the rceil rule."""
    byte = tl.maximum(rceil_exponent(magnitude_bits), 0)
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
def cast_factor(byte):
    """What brings values under scale bytes into e4m3; codes under 255 are to be cleared."""
    return scale_factor(tl.maximum(254 - byte, 0))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def magnitude_bits(x, AXIS: tl.constexpr, COMPILED: tl.constexpr):
    """fp32 bits of the largest magnitude along an axis; those of a NaN where there is one.

    Compiled, magnitudes are compared as floats: their sign costs nothing there. The interpreter
    is quick at plain reductions alone.
    """
    if COMPILED:
        bits = tl.reduce(tl.abs(x), AXIS, _larger).to(tl.int32, bitcast=True)
    else:
        bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS)
    return bits


@triton.jit
def widen_pair(word):
    """fp32 values of two bf16 in 32-bit words, the lower half first."""
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def load_pairs(ptr, pair, mask):
    """fp32 of the even and odd values at pairs of places; bf16 pairs come as 32-bit words."""
    if ptr.dtype.element_ty == tl.int32:
        even, odd = widen_pair(tl.load(ptr + pair, mask=mask, other=0))
    else:
        even = tl.load(ptr + 2 * pair, mask=mask, other=0.0)
        odd = tl.load(ptr + 2 * pair + 1, mask=mask, other=0.0)
    return even, odd


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
def unpack_codes(word, COMPILED: tl.constexpr):
    """fp32 values of the four e4m3 codes of 32-bit words, the lowest byte first."""
    if COMPILED:
        x0, x1, x2, x3 = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high, h0, h1, h2, h3;
            .reg .b32 a, b;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 a, low;
            cvt.rn.f16x2.e4m3x2 b, high;
            mov.b32 {h0, h1}, a;
            mov.b32 {h2, h3}, b;
            cvt.f32.f16 $0, h0;
            cvt.f32.f16 $1, h1;
            cvt.f32.f16 $2, h2;
            cvt.f32.f16 $3, h3;
            }
            """,
            "=&r,=&r,=&r,=&r,r",
            [word],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        x0 = (word & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        x1 = ((word >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        x2 = ((word >> 16) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        x3 = ((word >> 24) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return x0, x1, x2, x3


@triton.jit
def _gather_byte(r0, r1, r2, r3, BYTE: tl.constexpr):
    word = (r0 >> (8 * BYTE)) & 0xFF
    word = word | (((r1 >> (8 * BYTE)) & 0xFF) << 8)
    word = word | (((r2 >> (8 * BYTE)) & 0xFF) << 16)
    return word | (((r3 >> (8 * BYTE)) & 0xFF) << 24)


@triton.jit
def transpose_bytes(r0, r1, r2, r3, COMPILED: tl.constexpr):
    """Four words of four bytes, seen as a 4 x 4 matrix of bytes, transposed."""
    if COMPILED:
        c0, c1, c2, c3 = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, c, d;
            prmt.b32 a, $4, $5, 0x5140;
            prmt.b32 b, $6, $7, 0x5140;
            prmt.b32 c, $4, $5, 0x7362;
            prmt.b32 d, $6, $7, 0x7362;
            prmt.b32 $0, a, b, 0x5410;
            prmt.b32 $1, a, b, 0x7632;
            prmt.b32 $2, c, d, 0x5410;
            prmt.b32 $3, c, d, 0x7632;
            }
            """,
            "=&r,=&r,=&r,=&r,r,r,r,r",
            [r0, r1, r2, r3],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        c0 = _gather_byte(r0, r1, r2, r3, 0)
        c1 = _gather_byte(r0, r1, r2, r3, 1)
        c2 = _gather_byte(r0, r1, r2, r3, 2)
        c3 = _gather_byte(r0, r1, r2, r3, 3)
    return c0, c1, c2, c3


@triton.jit
def permute_token_pairs(codes, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """Reorder the last axis of ``[ROWS, TOKENS]`` from 8a + 2t + b to 4t + 2a + b in each 16.

    An fp32 accumulator keeps columns 2t, 2t+1 of both halves of 16 in thread t of a quad; an
    8-bit left operand wants 4t ... 4t+3 there. With the reduction axis of the right operand
    stored in this order, the accumulator becomes an operand without moving between threads.
    """
    halves = tl.reshape(codes, [ROWS, TOKENS // 16, 2, 4, 2])
    return tl.reshape(tl.permute(halves, (0, 1, 3, 2, 4)), [ROWS, TOKENS])
