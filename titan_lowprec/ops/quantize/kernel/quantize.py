"""Fused token-block quantisation: rotation, maximum, scale byte, codes, transposed codes."""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from titan_lowprec.formats.token_blocks import BLOCK_TOKENS
from titan_lowprec.ops.hadamard.kernel import hadamard_butterflies
from titan_lowprec.ops.quantize.common import BlockScales
from titan_lowprec.ops.quantize.kernel.encode import (
    join_codes,
    pack_codes,
    scale_byte,
    scale_exponent,
    scale_rows,
)
from titan_lowprec.ops.quantize.kernel.work_items import TILE_BLOCKS
from titan_lowprec.shapes import Float, Float8e4m3fn, Int32, Tensor

_BLOCK = tl.constexpr(BLOCK_TOKENS)
_TILE_BLOCKS = tl.constexpr(TILE_BLOCKS)
_WORDS = tl.constexpr(BLOCK_TOKENS // 4)


@triton.jit
def _quantize_rows(
    x_ptr, codes_ptr, scale_ptr, items_ptr,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    ROTATE: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Codes and scale bytes of one block of up to 32 tokens of one head."""
    slot = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(items_ptr + slot * 4)
    length = tl.load(items_ptr + slot * 4 + 1)
    if length == 0:
        return
    features = tl.arange(0, BLOCK_D)
    position = tl.load(items_ptr + slot * 4 + 2) * _BLOCK + tl.arange(0, _BLOCK)
    token = (start + position).to(tl.int64)
    at = (token * H + head)[:, None] * D + features[None, :]
    inside = (position < tl.abs(length))[:, None] & (features < D)[None, :]
    live = (position < length)[:, None] & (features < D)[None, :]
    values = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)  # [32, D]
    if ROTATE:
        values = hadamard_butterflies(values, _BLOCK, D)
    bits = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    if SCALES == "token_block":
        bits = tl.zeros([_BLOCK], tl.int32) + tl.max(bits, 0)
    byte = scale_byte(bits)
    codes = scale_rows(values, byte[:, None]).to(tl.float8e4nv)
    tl.store(codes_ptr + at, codes, mask=inside)
    byte = tl.where(position < length, byte, 0).to(tl.uint8)
    tl.store(scale_ptr + token * H + head, byte, mask=position < tl.abs(length))


@triton.jit
def _quarter_position(unit, QUARTER: tl.constexpr):
    """Positions of the tokens in byte QUARTER of the block's eight 32-bit words."""
    word = tl.arange(0, _WORDS)
    place = 16 * (word // 4) + 8 * (QUARTER // 2) + 2 * (word % 4) + QUARTER % 2
    return unit * _BLOCK + place


@triton.jit
def _load_quarter(
    x_ptr, position, start, length, head,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    features = tl.arange(0, BLOCK_D)
    at = ((start + position).to(tl.int64) * H + head)[:, None] * D + features[None, :]
    live = (position < length)[:, None] & (features < D)[None, :]
    return tl.load(x_ptr + at, mask=live, other=0.0)  # [8, D]


@triton.jit
def _finish_quarter(
    values, bits, position, start, length, head, slot, columns,
    out_ptr, low_ptr, lse_ptr, codes_ptr, scale_ptr, delta_ptr, shifted_ptr,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    SOURCE: tl.constexpr, REDUCE: tl.constexpr,
):  # fmt: skip
    """Scale eight tokens for their cast and store everything but the transposed codes."""
    features = tl.arange(0, BLOCK_D)
    token = (start + position).to(tl.int64)
    at = (token * H + head)[:, None] * D + features[None, :]
    wide = (features < D)[None, :]
    inside = position < tl.abs(length)
    live = position < length
    exponent = tl.zeros([_WORDS], tl.float32)
    codes = values
    if SOURCE == "values":
        byte = scale_byte(bits)
        values = scale_rows(values, byte[:, None])
        codes = values.to(tl.float8e4nv)
        exponent = scale_exponent(byte)
        tl.store(codes_ptr + at, codes, mask=inside[:, None] & wide)
        tl.store(scale_ptr + token * H + head, tl.where(live, byte, 0).to(tl.uint8), mask=inside)
    if REDUCE != "nothing":
        out = tl.load(out_ptr + at, mask=live[:, None] & wide, other=0.0).to(tl.float32)
        if REDUCE == "residual":
            out += tl.load(low_ptr + at, mask=live[:, None] & wide, other=0.0).to(tl.float32)
        delta = tl.sum(codes.to(tl.float32) * out, 1)
        lse = tl.load(lse_ptr + token * H + head, mask=live, other=float("inf"))
        place = head.to(tl.int64) * columns + slot * _BLOCK + position % _BLOCK
        tl.store(delta_ptr + place, delta)
        tl.store(shifted_ptr + place, lse - exponent)
    return values


@triton.jit
def _magnitude(x):
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def _quantize_columns(
    x_ptr, out_ptr, low_ptr, lse_ptr, codes_ptr, scale_ptr, words_ptr, delta_ptr, shifted_ptr,
    items_ptr, columns,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    SCALES: tl.constexpr, SOURCE: tl.constexpr, REDUCE: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """One block of up to 32 tokens of one head, with its transposed codes.

    SOURCE "values" quantises; "codes" only transposes; "bf16" only reduces. REDUCE "output" or
    "residual" writes D in units of the token's scale, and the LSE less the scale's exponent.
    Tokens are taken in four quarters of eight, so that four codes of a feature make a word.
    """
    slot = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(items_ptr + slot * 4)
    length = tl.load(items_ptr + slot * 4 + 1)
    unit = tl.load(items_ptr + slot * 4 + 2)
    features = tl.arange(0, BLOCK_D)
    words = words_ptr + (head.to(tl.int64) * D + features)[:, None] * (columns // 4)
    words += slot * _WORDS + tl.arange(0, _WORDS)[None, :]
    wide = (features < D)[:, None] & (tl.arange(0, _WORDS) >= 0)[None, :]
    if length == 0:
        if SOURCE != "bf16" and unit < _TILE_BLOCKS:
            # A tile of the last document may reach past the last block.
            tl.store(words, tl.zeros([BLOCK_D, _WORDS], tl.int32), mask=wide)
        return
    n0 = _quarter_position(unit, 0)
    n1 = _quarter_position(unit, 1)
    n2 = _quarter_position(unit, 2)
    n3 = _quarter_position(unit, 3)
    x0 = _load_quarter(x_ptr, n0, start, length, head, H, D, BLOCK_D)
    x1 = _load_quarter(x_ptr, n1, start, length, head, H, D, BLOCK_D)
    x2 = _load_quarter(x_ptr, n2, start, length, head, H, D, BLOCK_D)
    x3 = _load_quarter(x_ptr, n3, start, length, head, H, D, BLOCK_D)
    b0 = tl.zeros([_WORDS], tl.int32)
    b1, b2, b3 = b0, b0, b0
    if SOURCE == "values":
        x0, x1, x2, x3 = (
            x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
        )  # fmt: skip
        b0, b1, b2, b3 = _magnitude(x0), _magnitude(x1), _magnitude(x2), _magnitude(x3)
        if SCALES == "token_block":
            largest = tl.max(tl.maximum(tl.maximum(b0, b1), tl.maximum(b2, b3)), 0)
            b0 = tl.zeros([_WORDS], tl.int32) + largest
            b1, b2, b3 = b0, b0, b0
    if SOURCE != "codes":
        x0 = _finish_quarter(
            x0, b0, n0, start, length, head, slot, columns, out_ptr, low_ptr, lse_ptr,
            codes_ptr, scale_ptr, delta_ptr, shifted_ptr, H, D, BLOCK_D, SOURCE, REDUCE,
        )  # fmt: skip
        x1 = _finish_quarter(
            x1, b1, n1, start, length, head, slot, columns, out_ptr, low_ptr, lse_ptr,
            codes_ptr, scale_ptr, delta_ptr, shifted_ptr, H, D, BLOCK_D, SOURCE, REDUCE,
        )  # fmt: skip
        x2 = _finish_quarter(
            x2, b2, n2, start, length, head, slot, columns, out_ptr, low_ptr, lse_ptr,
            codes_ptr, scale_ptr, delta_ptr, shifted_ptr, H, D, BLOCK_D, SOURCE, REDUCE,
        )  # fmt: skip
        x3 = _finish_quarter(
            x3, b3, n3, start, length, head, slot, columns, out_ptr, low_ptr, lse_ptr,
            codes_ptr, scale_ptr, delta_ptr, shifted_ptr, H, D, BLOCK_D, SOURCE, REDUCE,
        )  # fmt: skip
    if SOURCE == "codes":
        tl.store(words, tl.trans(join_codes(x0, x1, x2, x3)), mask=wide)
    elif SOURCE == "values":
        tl.store(words, tl.trans(pack_codes(x0, x1, x2, x3, COMPILED)), mask=wide)


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
    delta_HC: Tensor
    """``sum_k codes_k * (out_k + low_k)`` of gradients, one column a token, in token order."""
    shifted_lse_HC: Tensor
    """LSE (base 2) less the exponent of the gradient's scale; +inf in unused places."""


def _empty_columns(x_NHD: Tensor, blocks: Tensor) -> Tensor:
    """Words of four codes, seen as codes ``(H, D, columns)``."""
    _, H, D = x_NHD.shape
    words = torch.empty(
        (H, D, blocks.shape[0] * BLOCK_TOKENS // 4), dtype=torch.int32, device=x_NHD.device
    )
    return words.view(torch.float8_e4m3fn)


def _launch_columns(
    x_NHD: Tensor, blocks: Tensor, operand: Operand, out: Tensor, low: Tensor, lse: Tensor,
    **choices: str,
) -> None:  # fmt: skip
    N, H, D = x_NHD.shape
    if N == 0:
        return
    _quantize_columns[(blocks.shape[0], H)](
        x_NHD, out, low, lse, operand.codes_NHD, operand.scale_NH,
        operand.transposed_HDC.view(torch.int32), operand.delta_HC, operand.shifted_lse_HC,
        blocks, blocks.shape[0] * BLOCK_TOKENS,
        H=H, D=D, BLOCK_D=triton.next_power_of_2(D), COMPILED=not interpreted(),
        num_warps=4, **choices,
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
    N, H, D = x_NHD.shape
    device = x_NHD.device
    none = torch.empty(0, dtype=torch.int32, device=device)
    operand = Operand(
        codes_NHD=torch.empty(x_NHD.shape, dtype=torch.float8_e4m3fn, device=device),
        scale_NH=torch.empty((N, H), dtype=torch.uint8, device=device),
        transposed_HDC=_empty_columns(x_NHD, blocks) if transpose and not rotate else none,
        delta_HC=none,
        shifted_lse_HC=none,
    )
    if transpose and not rotate:
        _launch_columns(
            x_NHD, blocks, operand, x_NHD, x_NHD, x_NHD,
            SCALES=scales, SOURCE="values", REDUCE="nothing",
        )  # fmt: skip
    elif N:
        _quantize_rows[(blocks.shape[0], H)](
            x_NHD, operand.codes_NHD, operand.scale_NH, blocks,
            H=H, D=D, BLOCK_D=triton.next_power_of_2(D), ROTATE=rotate, SCALES=scales,
            num_warps=1,
        )  # fmt: skip
    if transpose and rotate:
        operand = replace(operand, transposed_HDC=transpose_codes(operand.codes_NHD, blocks))
    return operand


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
    operand = Operand(codes_NHD, none, _empty_columns(codes_NHD, blocks), none, none)
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
    shape = (H, blocks.shape[0] * BLOCK_TOKENS)
    delta, shifted = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
    operand = Operand(grad_NHD, none, none, delta, shifted)
    if scales is not None:
        operand = Operand(
            codes_NHD=torch.empty(grad_NHD.shape, dtype=torch.float8_e4m3fn, device=device),
            scale_NH=torch.empty((N, H), dtype=torch.uint8, device=device),
            transposed_HDC=_empty_columns(grad_NHD, blocks),
            delta_HC=delta,
            shifted_lse_HC=shifted,
        )
    _launch_columns(
        grad_NHD, blocks, operand, out_NHD, low if low.numel() else out_NHD, lse2_NH,
        SCALES=scales or "token",
        SOURCE="bf16" if scales is None else "values",
        REDUCE="residual" if low.numel() else "output",
    )  # fmt: skip
    return operand
