"""Fused token-block quantisation: rotation, maximum, scale byte, codes, transposed codes."""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from titan_lowprec.formats.token_blocks import BLOCK_TOKENS
from titan_lowprec.ops.hadamard.kernel import hadamard_butterflies
from titan_lowprec.ops.quantize.common import BlockScales
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
from titan_lowprec.ops.quantize.kernel.nvfp4 import Nvfp4Codes, empty_nvfp4, store_nvfp4
from titan_lowprec.ops.quantize.kernel.work_items import TILE_BLOCKS
from titan_lowprec.shapes import Float, Float8e4m3fn, Int32, Tensor

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
def _quantize_rows(
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
def _quantize_columns(
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


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU instead of compiling them."""
    return bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class Operand:
    """Quantised packed tokens as the kernels read them; an unused field is an empty tensor."""

    codes_NHD: Tensor
    scale_NH: Tensor
    transposed_HDC: Tensor
    """The same codes, tokens innermost. Block ``b`` of the work list has columns ``32 b`` to
    ``32 b + 31``, so that documents start at multiples of 32; unused places of a block are zero,
    and every 16 tokens are in the order of ``permute_token_pairs``."""
    terms_HC2: Tensor
    """Of gradients, one column a token, in token order: the LSE (base 2) less the exponent of the
    gradient's scale (+inf in unused places), and ``sum_k codes_k * (out_k + low_k)``."""


def _empty_columns(x_NHD: Tensor, blocks: Tensor) -> Tensor:
    """Words of four codes, seen as codes ``(H, D, columns)``."""
    _, H, D = x_NHD.shape
    words = torch.empty(
        (H, D, blocks.shape[0] * BLOCK_TOKENS // 4), dtype=torch.int32, device=x_NHD.device
    )
    return words.view(torch.float8_e4m3fn)


def _pairs(x: Tensor) -> Tensor:
    """bf16 as 32-bit words of two, fp32 as it is."""
    return x.view(torch.int32) if x.dtype == torch.bfloat16 else x


def _grid_and_sizes(x_NHD: Tensor, blocks: Tensor) -> tuple[tuple[int], dict[str, int | bool]]:
    """Programs of one warp, the heads of a block side by side, as tokens lie in memory."""
    _, H, D = x_NHD.shape
    sizes = {"H": H, "D": D, "BLOCK_D": triton.next_power_of_2(D), "COMPILED": not interpreted()}
    return (blocks.shape[0] * H,), sizes | {"num_warps": 1}


def _launch_columns(
    x_NHD: Tensor, blocks: Tensor, operand: Operand, out: Tensor, low: Tensor, lse: Tensor,
    **choices: str,
) -> None:  # fmt: skip
    if x_NHD.shape[0] == 0:
        return
    grid, sizes = _grid_and_sizes(x_NHD, blocks)
    coded = choices["SOURCE"] == "codes"
    _quantize_columns[grid](
        x_NHD.view(torch.int32) if coded else _pairs(x_NHD), _pairs(out), _pairs(low), lse,
        operand.codes_NHD.view(torch.int32), operand.scale_NH,
        operand.transposed_HDC.view(torch.int32), operand.terms_HC2,
        blocks, blocks.shape[0] * BLOCK_TOKENS, **sizes, **choices,
    )  # fmt: skip


def quantize_operand(
    x_NHD: Float[Tensor, "N H D"],
    blocks: Int32[Tensor, "items 4"],
    *,
    scales: BlockScales,
    rotate: bool,
    transpose: bool,
) -> Operand:
    """Rotate (or not) and quantise packed tokens in one pass over memory.

    Args:
        x_NHD: bf16 or fp32 values, contiguous.
        blocks: ``work_items`` of ``unit=32``, ``order="document"``.
        scales: As in ``api.quantize_token_blocks``.
        rotate: Hadamard rotation over the head dimension first, in fp32.
        transpose: Write the transposed codes too (from the codes, if rotated).

    Numerics:
        Codes and bytes are those of ``hadamard`` followed by ``quantize_token_blocks``, bit for
        bit, NaN, infinity and tails included.

    Source:
        arXiv:2611.03344, section 3.1; 8-bit wgmma operands in shared memory are K-major only.
    """
    N, H, _ = x_NHD.shape
    device = x_NHD.device
    none = torch.empty(0, dtype=torch.int32, device=device)
    operand = Operand(
        codes_NHD=torch.empty(x_NHD.shape, dtype=torch.float8_e4m3fn, device=device),
        scale_NH=torch.empty((N, H), dtype=torch.uint8, device=device),
        transposed_HDC=_empty_columns(x_NHD, blocks) if transpose and not rotate else none,
        terms_HC2=none,
    )
    if transpose and not rotate:
        _launch_columns(
            x_NHD, blocks, operand, x_NHD, x_NHD, x_NHD,
            SCALES=scales, SOURCE="values", REDUCE="nothing",
        )  # fmt: skip
    elif N:
        grid, sizes = _grid_and_sizes(x_NHD, blocks)
        _quantize_rows[grid](
            _pairs(x_NHD), operand.codes_NHD.view(torch.int32), operand.scale_NH, none, none,
            blocks, ROTATE=rotate, SCALES=scales, NVFP4=False, **sizes,
        )  # fmt: skip
    if transpose and rotate:
        operand = replace(operand, transposed_HDC=transpose_codes(operand.codes_NHD, blocks))
    return operand


@dataclass(frozen=True, slots=True)
class MixedOperand:
    """One tensor as token-block codes, for products over tokens, and in NVFP4, for scores."""

    blocks: Operand
    four: Nvfp4Codes


def quantize_mixed_operand(
    x_NHD: Float[Tensor, "N H D"],
    blocks: Int32[Tensor, "items 4"],
    *,
    scales: BlockScales,
    rotate: bool,
) -> MixedOperand:
    """Rotate (or not) and quantise packed tokens twice in one pass over memory.

    Args:
        x_NHD: As in ``quantize_operand``; so the rest.
        blocks: ``work_items`` of ``unit=32``, ``order="document"``.
        scales: Tokens that share an exponent of the token-block codes.
        rotate: Hadamard rotation over the head dimension first, in fp32.

    Numerics:
        Bit for bit ``hadamard``, then ``quantize_token_blocks`` and ``quantize_nvfp4`` without an
        outer scale; tokens past a row's last document count as zeros in both.

    Source:
        arXiv:2611.03344, section 3.4; NVFP4 as in cuBLAS, "1D Block Scaling".
    """
    N, H, _ = x_NHD.shape
    none = torch.empty(0, dtype=torch.int32, device=x_NHD.device)
    codes = torch.empty(x_NHD.shape, dtype=torch.float8_e4m3fn, device=x_NHD.device)
    scale = torch.empty((N, H), dtype=torch.uint8, device=x_NHD.device)
    four = empty_nvfp4(x_NHD)
    if N:
        grid, sizes = _grid_and_sizes(x_NHD, blocks)
        _quantize_rows[grid](
            _pairs(x_NHD), codes.view(torch.int32), scale, four.packed_NHP.view(torch.int32),
            four.scale_NHG, blocks, ROTATE=rotate, SCALES=scales, NVFP4=True, **sizes,
        )  # fmt: skip
    return MixedOperand(Operand(codes, scale, none, none), four)


def transpose_codes(
    codes_NHD: Float8e4m3fn[Tensor, "N H D"], blocks: Int32[Tensor, "items 4"]
) -> Tensor:
    """Transposed codes of an operand that is already quantised; see ``Operand``.

    Numerics:
        Exact.

    Source:
        As ``quantize_operand``.
    """
    none = torch.empty(0, dtype=torch.int32, device=codes_NHD.device)
    operand = Operand(codes_NHD, none, _empty_columns(codes_NHD, blocks), none)
    _launch_columns(
        codes_NHD, blocks, operand, none, none, none,
        SCALES="token", SOURCE="codes", REDUCE="nothing",
    )  # fmt: skip
    return operand.transposed_HDC


def quantize_gradient(
    grad_NHD: Float[Tensor, "N H D"],
    out_NHD: Float[Tensor, "N H D"],
    low: Tensor,
    lse2_NH: Float[Tensor, "N H"],
    blocks: Int32[Tensor, "items 4"],
    *,
    scales: BlockScales | None,
) -> Operand:
    """Quantise the incoming gradient and reduce it with the output, from the same codes.

    Args:
        grad_NHD: Incoming gradient, contiguous.
        out_NHD: Output of the forward.
        low: Its residual ``(N, H, D)``, or an empty tensor.
        lse2_NH: The forward's LSE, base 2.
        blocks: As in ``quantize_operand``.
        scales: ``None`` keeps the gradient as it is (bf16 attention) and only reduces.

    Returns:
        All fields; under ``scales=None`` the gradient itself, no scales and nothing transposed.

    Numerics:
        Sums in fp32.

    Source:
        arXiv:2611.03344, section 3.3: D from the same gradient codes as dP.
    """
    N, H, _ = grad_NHD.shape
    device = grad_NHD.device
    none = torch.empty(0, dtype=torch.int32, device=device)
    shape = (H, blocks.shape[0] * BLOCK_TOKENS, 2)
    terms = torch.empty(shape, dtype=torch.float32, device=device)
    operand = Operand(grad_NHD, none, none, terms)
    if scales is not None:
        operand = Operand(
            codes_NHD=torch.empty(grad_NHD.shape, dtype=torch.float8_e4m3fn, device=device),
            scale_NH=torch.empty((N, H), dtype=torch.uint8, device=device),
            transposed_HDC=_empty_columns(grad_NHD, blocks),
            terms_HC2=terms,
        )
    _launch_columns(
        grad_NHD, blocks, operand, out_NHD, low if low.numel() else out_NHD, lse2_NH,
        SCALES=scales or "token",
        SOURCE="bf16" if scales is None else "values",
        REDUCE="residual" if low.numel() else "output",
    )  # fmt: skip
    return operand
