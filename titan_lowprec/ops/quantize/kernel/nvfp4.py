"""NVFP4 codes inside the rotating quantisation kernel, and their values in bf16."""

import struct
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from titan_lowprec.formats.catalogue import E2M1FN, E4M3FN, NVFP4
from titan_lowprec.ops.quantize.kernel.encode import magnitude_bits
from titan_lowprec.shapes import Float, Tensor, UInt8


def _signed(bits: int) -> int:
    """The lowest 32 bits as an int32."""
    return (bits + 2**31) % 2**32 - 2**31


_F32_MANTISSA_BITS = 23
_F32_BIAS = 127
_WORDS_PER_PROGRAM = 1024
_WORD_CODES = 8

_GROUP_PAIRS = tl.constexpr(NVFP4.group // 2)
_GROUP_WORDS = tl.constexpr(NVFP4.group // _WORD_CODES)
_F32_INFINITY = tl.constexpr(0x7F800000)
_F32_EXPONENT = tl.constexpr(0x7F800000)
_NAN_BYTE = tl.constexpr(0x7F)
_CODE_MAX = tl.constexpr(E2M1FN.max_value)
_SCALE_MAX = tl.constexpr(E4M3FN.max_value)
_SCALE_MIN_NORMAL = tl.constexpr(E4M3FN.min_normal)
_SCALE_MIN = tl.constexpr(E4M3FN.min_subnormal)
_SCALE_SHIFT = tl.constexpr(_F32_MANTISSA_BITS - E4M3FN.mantissa_bits)
_SCALE_OFFSET = tl.constexpr((_F32_BIAS - E4M3FN.bias) << E4M3FN.mantissa_bits)
_SCALE_MAGIC = tl.constexpr(1.5 * 2.0 ** (_F32_MANTISSA_BITS - E4M3FN.mantissa_bits))
_SCALE_UNBIASED = tl.constexpr(2.0 ** (_F32_BIAS - E4M3FN.bias))
_ROUND_VALUE = 1.5 * 2.0**_F32_MANTISSA_BITS
_ROUND_BITS = struct.unpack("<i", struct.pack("<f", _ROUND_VALUE))[0]
_ROUND = tl.constexpr(_ROUND_VALUE)
"""Added to a small number, rounds it to an integer, which is then in the lowest bits."""
_ROUND_SUM = tl.constexpr(_signed(sum(_ROUND_BITS << 4 * place for place in range(_WORD_CODES))))
_SIGNS = tl.constexpr(_signed(0x88888888))
_CODE_SHIFT = tl.constexpr(_F32_MANTISSA_BITS - E2M1FN.mantissa_bits)
# 2**(127 - bias) in two factors: all of it times the largest scale would overflow.
_CODE_UNBIASED_FIRST = tl.constexpr(2.0**118)
_CODE_UNBIASED_LAST = tl.constexpr(2.0 ** (_F32_BIAS - E2M1FN.bias - 118))


@triton.jit
def _group_scale(bits):
    """e4m3 scale of groups, as value and byte, from the fp32 bits of their largest magnitudes.

    The nearest to amax / 6, ties to even: adding and subtracting 1.5 * 2**20 times a power of two
    rounds to the grid. A conversion would need its bytes taken apart; see ``pack_codes``.
    """
    ideal = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full(bits.shape, _CODE_MAX, tl.float32))
    ideal = tl.minimum(tl.maximum(ideal, _SCALE_MIN), _SCALE_MAX)
    power = (ideal.to(tl.int32, bitcast=True) & _F32_EXPONENT).to(tl.float32, bitcast=True)
    magic = tl.maximum(power, _SCALE_MIN_NORMAL) * _SCALE_MAGIC
    scale = (ideal + magic) - magic
    normal = (scale.to(tl.int32, bitcast=True) >> _SCALE_SHIFT) - _SCALE_OFFSET
    subnormal = (scale * (1.0 / _SCALE_MIN)).to(tl.int32)
    byte = tl.where(scale < _SCALE_MIN_NORMAL, subnormal, normal)
    return scale, tl.where(bits >= _F32_INFINITY, _NAN_BYTE, byte)


@triton.jit
def _rounded(x, scale, inverse, COMPILED: tl.constexpr):
    """Bits of ``_ROUND`` plus the e2m1 magnitude code of x / scale.

    The code is min(2q, q + 2, q / 2 + 4, 7) of the quotient q, rounded to nearest, ties to even.
    Compiled, the quotient is one product and its correction by the exact remainder, which is the
    correctly rounded one (Markstein); interpreted, where nothing is fused, a division.
    """
    magnitude = tl.abs(x)
    if COMPILED:
        first = magnitude * inverse
        quotient = tl.fma(tl.fma(-first, scale, magnitude), inverse, first)
    else:
        quotient = tl.div_rn(magnitude, scale)
    low = tl.minimum(quotient * 2.0 + _ROUND, quotient + (_ROUND + 2.0))
    high = tl.minimum(quotient * 0.5 + (_ROUND + 4.0), _ROUND + 7.0)
    return tl.minimum(low, high).to(tl.int32, bitcast=True)


@triton.jit
def _quarters(x, WORDS: tl.constexpr, TOKENS: tl.constexpr):
    """Every fourth row of ``[4 * WORDS, TOKENS]``, from the first, second, third and fourth on."""
    x = tl.permute(tl.reshape(x, [WORDS, 2, 2, TOKENS]), (0, 3, 1, 2))
    even, odd = tl.split(x)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _push_sign(signs, x):
    """Shift signs by a nibble and put x's highest four bits, the sign on top, into the lowest."""
    return (signs << 4) | ((x.to(tl.int32, bitcast=True) >> 28) & 15)


@triton.jit
def _encode_half(even, odd, PAIRS: tl.constexpr, TOKENS: tl.constexpr, COMPILED: tl.constexpr):
    """Words of eight codes ``[PAIRS // 4, TOKENS]``, the first in the lowest bits, and bytes.

    From even and odd features ``[PAIRS, TOKENS]``; scale bytes are ``[PAIRS // 8, TOKENS]``.
    """
    GROUPS: tl.constexpr = PAIRS // _GROUP_PAIRS
    WORDS: tl.constexpr = PAIRS // 4
    groups = tl.maximum(
        magnitude_bits(tl.reshape(even, [GROUPS, _GROUP_PAIRS, TOKENS]), 1, COMPILED),
        magnitude_bits(tl.reshape(odd, [GROUPS, _GROUP_PAIRS, TOKENS]), 1, COMPILED),
    )
    scale, byte = _group_scale(groups)
    keep = tl.where(byte == _NAN_BYTE, 0, -1)
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    shape: tl.constexpr = [GROUPS, _GROUP_WORDS, TOKENS]
    s = tl.reshape(tl.broadcast_to(scale[:, None, :], shape), [WORDS, TOKENS])
    r = tl.reshape(tl.broadcast_to(inverse[:, None, :], shape), [WORDS, TOKENS])
    keep = tl.reshape(tl.broadcast_to(keep[:, None, :], shape), [WORDS, TOKENS])
    x0, x2, x4, x6 = _quarters(even, WORDS, TOKENS)
    x1, x3, x5, x7 = _quarters(odd, WORDS, TOKENS)
    word = _rounded(x0, s, r, COMPILED) + (_rounded(x1, s, r, COMPILED) << 4)
    word += (_rounded(x2, s, r, COMPILED) << 8) + (_rounded(x3, s, r, COMPILED) << 12)
    word += (_rounded(x4, s, r, COMPILED) << 16) + (_rounded(x5, s, r, COMPILED) << 20)
    word += (_rounded(x6, s, r, COMPILED) << 24) + (_rounded(x7, s, r, COMPILED) << 28)
    signs = _push_sign(_push_sign(tl.zeros_like(word), x7), x6)
    signs = _push_sign(_push_sign(signs, x5), x4)
    signs = _push_sign(_push_sign(signs, x3), x2)
    signs = _push_sign(_push_sign(signs, x1), x0)
    return ((word - _ROUND_SUM) | (signs & _SIGNS)) & keep, byte


@triton.jit
def _store_halves(
    ptr, low, high, base, inside, H: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Store ``[BLOCK // 2, TOKENS]`` of each half of the features as COUNT elements a token."""
    x = tl.reshape(tl.permute(tl.join(low, high), (1, 2, 0)), [TOKENS, BLOCK])
    element = tl.arange(0, BLOCK)
    at = base * COUNT + (tl.arange(0, TOKENS)[:, None] * (H * COUNT) + element[None, :])
    tl.store(ptr + at, x, mask=inside[:, None] & (element < COUNT)[None, :])


@triton.jit
def store_nvfp4(
    a, b, c, d, words_ptr, scale_ptr, base, inside,
    H: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, TOKENS: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """NVFP4 of even and odd features ``[PAIRS, TOKENS]`` of the lower and of the upper half."""
    low, low_byte = _encode_half(a, b, PAIRS, TOKENS, COMPILED)
    high, high_byte = _encode_half(c, d, PAIRS, TOKENS, COMPILED)
    _store_halves(words_ptr, low, high, base, inside, H, D // 8, PAIRS // 2, TOKENS)
    low_byte, high_byte = low_byte.to(tl.uint8), high_byte.to(tl.uint8)
    _store_halves(scale_ptr, low_byte, high_byte, base, inside, H, D // 16, PAIRS // 4, TOKENS)


@triton.jit
def _decode(word, scale, PLACE: tl.constexpr):
    """fp32 value of one of the eight codes of words; six significant bits at most.

    The code's bits as a float, subnormals included, are its value times a power of two.
    """
    code = word >> (4 * PLACE)
    bits = ((code & 7) << _CODE_SHIFT) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * scale * _CODE_UNBIASED_LAST


@triton.jit
def _decode_pair(word, scale, PLACE: tl.constexpr):
    """Two neighbours as a word of two bf16, which hold them exactly."""
    even = _decode(word, scale, PLACE).to(tl.int32, bitcast=True)
    odd = _decode(word, scale, PLACE + 1).to(tl.int32, bitcast=True)
    return ((even >> 16) & 0xFFFF) | (odd & -65536)


@triton.jit
def _widen(packed_ptr, scale_ptr, out_ptr, words, WORDS: tl.constexpr):
    """Values of WORDS words of eight codes: words of two bf16, or fp32."""
    at = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    mask = at < words
    word = tl.load(packed_ptr + at, mask=mask, other=0)
    byte = tl.load(scale_ptr + at // _GROUP_WORDS, mask=mask, other=0).to(tl.int32)
    scale = (byte << _SCALE_SHIFT).to(tl.float32, bitcast=True) * _SCALE_UNBIASED
    scale = tl.where(byte == _NAN_BYTE, float("nan"), scale) * _CODE_UNBIASED_FIRST
    if out_ptr.dtype.element_ty == tl.int32:
        first = tl.join(_decode_pair(word, scale, 0), _decode_pair(word, scale, 4))
        second = tl.join(_decode_pair(word, scale, 2), _decode_pair(word, scale, 6))
        values = tl.reshape(tl.join(first, second), [WORDS, 4])
        place = 4 * at[:, None] + tl.arange(0, 4)[None, :]
        tl.store(out_ptr + place, values, mask=mask[:, None])
    else:
        for place in tl.static_range(8):
            tl.store(out_ptr + 8 * at + place, _decode(word, scale, place), mask=mask)


@dataclass(frozen=True, slots=True)
class Nvfp4Codes:
    """NVFP4 of packed tokens without an outer scale, as ``common.Saved`` of attention keeps it."""

    packed_NHP: UInt8[Tensor, "N H P"]
    """Two e2m1 codes a byte, the first in the low nibble."""
    scale_NHG: UInt8[Tensor, "N H G"]
    """e4m3 bits."""


def empty_nvfp4(like_NHD: Tensor) -> Nvfp4Codes:
    """Unwritten codes of packed tokens."""
    N, H, D = like_NHD.shape
    packed, scale = (
        torch.empty((N, H, D // share), dtype=torch.uint8, device=like_NHD.device)
        for share in (2, NVFP4.group)
    )
    return Nvfp4Codes(packed, scale)


def widen_nvfp4(four: Nvfp4Codes, dtype: torch.dtype) -> Float[Tensor, "N H D"]:
    """Give the values of NVFP4 codes.

    Args:
        four: Codes and scales; a group is two words of eight codes.
        dtype: bf16, or fp32 for an interpreter that cannot multiply bf16 matrices.

    Numerics:
        Exact in bf16: a code has two significant bits, a scale four. A NaN scale gives NaN.

    Source:
        NVFP4 as in cuBLAS, "1D Block Scaling".
    """
    N, H, P = four.packed_NHP.shape
    values = torch.empty((N, H, 2 * P), dtype=dtype, device=four.packed_NHP.device)
    words = four.packed_NHP.numel() // 4
    if words:
        _widen[(triton.cdiv(words, _WORDS_PER_PROGRAM),)](
            four.packed_NHP.view(torch.int32), four.scale_NHG,
            values.view(torch.int32) if dtype == torch.bfloat16 else values,
            words, WORDS=_WORDS_PER_PROGRAM,
        )  # fmt: skip
    return values
