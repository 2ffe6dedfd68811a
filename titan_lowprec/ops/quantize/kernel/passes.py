"""Passes of token-block quantisation over one block of one head, by one warp each."""

import triton
import triton.language as tl

from titan_lowprec.formats.token_blocks import BLOCK_TOKENS
from titan_lowprec.ops.hadamard.kernel import hadamard_butterflies
from titan_lowprec.ops.quantize.kernel.encode import (
    cast_factor,
    load_pairs,
    magnitude_bits,
    pack_codes,
    scale_byte,
    scale_exponent,
    transpose_bytes,
    unpack_codes,
    widen_pair,
)
from titan_lowprec.ops.quantize.kernel.nvfp4 import store_nvfp4
from titan_lowprec.ops.quantize.kernel.work_items import TILE_BLOCKS

_BLOCK = tl.constexpr(BLOCK_TOKENS)
_TILE_BLOCKS = tl.constexpr(TILE_BLOCKS)
_WORDS = tl.constexpr(BLOCK_TOKENS // 4)


@triton.jit
def _load_halves(ptr, at, mask, PAIRS: tl.constexpr):
    """Even and odd features ``[PAIRS, 32]`` of the lower half, then of the upper, from pairs.

    The split by halves is one across threads: it moves words of two bf16, and from there on a
    thread has all features of a token.
    """
    if ptr.dtype.element_ty == tl.int32:
        word = tl.trans(tl.load(ptr + at, mask=mask, other=0))  # [2 PAIRS, 32]
        low, high = tl.split(tl.permute(tl.reshape(word, [2, PAIRS, _BLOCK]), (1, 2, 0)))
        a, b = widen_pair(low)
        c, d = widen_pair(high)
    else:
        even, odd = load_pairs(ptr, at, mask)
        even = tl.reshape(tl.trans(even), [2, PAIRS, _BLOCK])
        a, c = tl.split(tl.permute(even, (1, 2, 0)))
        odd = tl.reshape(tl.trans(odd), [2, PAIRS, _BLOCK])
        b, d = tl.split(tl.permute(odd, (1, 2, 0)))
    return a, b, c, d


@triton.jit
def _pack_features(even, odd, factor, PAIRS: tl.constexpr, COMPILED: tl.constexpr):
    """Codes of ``[PAIRS, 32]`` even and odd features as words ``[PAIRS // 2, 32]``."""
    even = tl.reshape(even * factor[None, :], [PAIRS // 2, 2, _BLOCK])
    odd = tl.reshape(odd * factor[None, :], [PAIRS // 2, 2, _BLOCK])
    x0, x2 = tl.split(tl.permute(even, (0, 2, 1)))
    x1, x3 = tl.split(tl.permute(odd, (0, 2, 1)))
    return pack_codes(x0, x1, x2, x3, COMPILED)


@triton.jit
def quantize_rows(
    x_ptr, words_ptr, scale_ptr, words4_ptr, scale4_ptr, items_ptr,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    ROTATE: tl.constexpr, SCALES: tl.constexpr, NVFP4: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Codes and scale bytes of one block of up to 32 tokens of one head, by one warp.

    With NVFP4 those of groups of 16 features too, from the same values.
    """
    PAIRS: tl.constexpr = BLOCK_D // 4
    slot = tl.program_id(0) // H
    head = tl.program_id(0) % H
    start = tl.load(items_ptr + slot * 4)
    length = tl.load(items_ptr + slot * 4 + 1)
    first = tl.load(items_ptr + slot * 4 + 2) * _BLOCK
    if length == 0:
        return
    base = (start + first).to(tl.int64) * H + head
    n = tl.arange(0, _BLOCK)
    live = first + n < length
    inside = first + n < tl.abs(length)
    pair = tl.arange(0, 2 * PAIRS)
    at = base * (D // 2) + (n[:, None] * (H * D // 2) + pair[None, :])
    a, b, c, d = _load_halves(x_ptr, at, live[:, None] & (pair < D // 2)[None, :], PAIRS)
    if ROTATE:
        a, b, c, d = a + b, a - b, c + d, c - d
        a = hadamard_butterflies(a, PAIRS, _BLOCK)
        b = hadamard_butterflies(b, PAIRS, _BLOCK)
        c = hadamard_butterflies(c, PAIRS, _BLOCK)
        d = hadamard_butterflies(d, PAIRS, _BLOCK)
        a, b, c, d = a + c, b + d, a - c, b - d
        a, b, c, d = a * (D**-0.5), b * (D**-0.5), c * (D**-0.5), d * (D**-0.5)
    low = tl.maximum(magnitude_bits(a, 0, COMPILED), magnitude_bits(b, 0, COMPILED))
    high = tl.maximum(magnitude_bits(c, 0, COMPILED), magnitude_bits(d, 0, COMPILED))
    bits = tl.maximum(low, high)  # [32]
    if SCALES == "token_block":
        bits = tl.zeros([_BLOCK], tl.int32) + tl.max(bits, 0)
    byte = scale_byte(bits)
    factor = cast_factor(byte)
    low = _pack_features(a, b, factor, PAIRS, COMPILED)
    high = _pack_features(c, d, factor, PAIRS, COMPILED)
    words = tl.join(low, high) & tl.where(byte == 255, 0, -1)[None, :, None]
    words = tl.reshape(tl.permute(words, (1, 2, 0)), [_BLOCK, PAIRS])
    word = tl.arange(0, PAIRS)
    at = base * (D // 4) + (n[:, None] * (H * D // 4) + word[None, :])
    tl.store(words_ptr + at, words, mask=inside[:, None] & (word < D // 4)[None, :])
    tl.store(scale_ptr + base + n * H, tl.where(live, byte, 0).to(tl.uint8), mask=inside)
    if NVFP4:
        store_nvfp4(
            a, b, c, d, words4_ptr, scale4_ptr, base, inside, H, D, PAIRS, _BLOCK, COMPILED
        )  # fmt: skip


@triton.jit
def _split_words(pairs, CHUNKS: tl.constexpr):
    """First and second pair of every four features."""
    return tl.split(tl.reshape(pairs, [CHUNKS, 2, 16, 2, 2]))


@triton.jit
def _encode_columns(
    even, odd, codes_ptr, scale_ptr, at, token, live, inside, wide,
    CHUNKS: tl.constexpr, SCALES: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Store codes and scale bytes; words ``[CHUNKS, 2, 16, 2]`` and exponents ``[1, 2, 16, 1]``."""
    bits = tl.maximum(magnitude_bits(even, 3, COMPILED), magnitude_bits(odd, 3, COMPILED))
    if SCALES == "token_block":
        bits = tl.zeros([2, 16], tl.int32) + tl.max(tl.max(tl.max(bits, 2), 1), 0)
    else:
        bits = tl.max(bits, 0)
    byte = scale_byte(bits)[None, :, :, None]
    factor = cast_factor(byte)
    x0, x2 = _split_words(even * factor, CHUNKS)
    x1, x3 = _split_words(odd * factor, CHUNKS)
    words = pack_codes(x0, x1, x2, x3, COMPILED) & tl.where(byte == 255, 0, -1)
    tl.store(codes_ptr + at, words, mask=inside & wide)
    tl.store(scale_ptr + token, tl.where(live, byte, 0).to(tl.uint8), mask=inside)
    return words, scale_exponent(byte)


@triton.jit
def quantize_columns(
    x_ptr, out_ptr, low_ptr, lse_ptr, codes_ptr, scale_ptr, words_ptr, terms_ptr,
    items_ptr, columns,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    SCALES: tl.constexpr, SOURCE: tl.constexpr, REDUCE: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """One block of up to 32 tokens of one head with its transposed codes, by one warp.

    SOURCE "values" quantises; "codes" only transposes; "bf16" only reduces. REDUCE "output" or
    "residual" writes D in units of the token's scale, and the LSE less the scale's exponent.
    Tiles are ``[chunks of eight features, halves of the block, 16 tokens, features]``: at D = 128
    the first two axes lie across threads and stay there, so that a thread has, for eight
    features, all tokens of its 16 bytes of transposed codes.
    """
    CHUNKS: tl.constexpr = BLOCK_D // 8
    slot = tl.program_id(0) // H
    head = tl.program_id(0) % H
    start = tl.load(items_ptr + slot * 4)
    length = tl.load(items_ptr + slot * 4 + 1)
    unit = tl.load(items_ptr + slot * 4 + 2)
    chunk = tl.arange(0, CHUNKS)[:, None, None, None]
    half = tl.arange(0, 2)[None, :, None, None]
    feature = 8 * chunk + tl.arange(0, 8)[None, None, :, None]
    column = 4 * half + tl.arange(0, 4)[None, None, None, :]
    words_ptr += head.to(tl.int64) * D * (columns // 4) + slot * _WORDS
    columns_at = words_ptr + (feature * (columns // 4) + column)  # [CHUNKS, 2, 8, 4]
    columns_mask = (feature < D) & (column >= 0)
    if length == 0:
        if SOURCE != "bf16" and unit < _TILE_BLOCKS:
            # A tile of the last document may reach past the last block.
            tl.store(columns_at, tl.zeros([CHUNKS, 2, 8, 4], tl.int32), mask=columns_mask)
        return
    n = 16 * half + tl.arange(0, 16)[None, None, :, None]  # [1, 2, 16, 1]
    live = unit * _BLOCK + n < length
    inside = unit * _BLOCK + n < tl.abs(length)
    token = (start + unit * _BLOCK).to(tl.int64) * H + head
    word = 2 * chunk + tl.arange(0, 2)[None, None, None, :]
    words_at = token * (D // 4) + (n * (H * D // 4) + word)
    if SOURCE == "codes":
        words = tl.load(x_ptr + words_at, mask=live & (word < D // 4), other=0)
    else:
        pair = 4 * chunk + tl.arange(0, 4)[None, None, None, :]
        at = token * (D // 2) + (n * (H * D // 2) + pair)
        mask = live & (pair < D // 2)
        token = token + n * H
        even, odd = load_pairs(x_ptr, at, mask)
        exponent = 0.0
        if SOURCE == "values":
            words, exponent = _encode_columns(
                even, odd, codes_ptr, scale_ptr, words_at, token, live, inside, word < D // 4,
                CHUNKS, SCALES, COMPILED,
            )  # fmt: skip
        if REDUCE != "nothing":
            o_even, o_odd = load_pairs(out_ptr, at, mask)
            if REDUCE == "residual":
                low_even, low_odd = load_pairs(low_ptr, at, mask)
                o_even += low_even
                o_odd += low_odd
            if SOURCE == "values":
                g0, g1, g2, g3 = unpack_codes(words, COMPILED)
                o0, o2 = _split_words(o_even, CHUNKS)
                o1, o3 = _split_words(o_odd, CHUNKS)
                delta = tl.sum((g0 * o0 + g1 * o1) + (g2 * o2 + g3 * o3), 3)
            else:
                delta = tl.sum(even * o_even + odd * o_odd, 3)
            lse = tl.load(lse_ptr + token, mask=live, other=float("inf"))
            place = head.to(tl.int64) * columns + slot * _BLOCK + n
            tl.store(terms_ptr + 2 * place, lse - exponent)
            tl.store(terms_ptr + 2 * place + 1, tl.sum(delta, 0)[None, :, :, None])
    if SOURCE != "bf16":
        # Token 8a + 2b + c of a half is byte 2a + c of its word b.
        words = tl.permute(tl.reshape(words, [CHUNKS, 2, 2, 4, 2, 2]), (0, 1, 5, 3, 4, 2))
        a0, a1 = tl.split(words)
        r0, r1 = tl.split(a0)
        r2, r3 = tl.split(a1)
        c0, c1, c2, c3 = transpose_bytes(r0, r1, r2, r3, COMPILED)  # [CHUNKS, 2, 2 words, 4]
        codes = tl.join(tl.join(c0, c2), tl.join(c1, c3))
        codes = tl.reshape(tl.permute(codes, (0, 1, 2, 4, 5, 3)), [CHUNKS, 2, 8, 4])
        tl.store(columns_at, codes, mask=columns_mask)
