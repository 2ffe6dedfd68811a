"""Scales as fp32 columns: how a tile reads one value a token or block without decoding bytes."""

import torch
import triton
import triton.language as tl

from titan_lowprec.formats.token_blocks import BLOCK_TOKENS
from titan_lowprec.ops.quantize.common import BlockScales
from titan_lowprec.ops.quantize.kernel.encode import scale_exponent, scale_factor
from titan_lowprec.ops.quantize.kernel.work_items import TILE_BLOCKS
from titan_lowprec.shapes import Float32, Int32, Tensor, UInt8

_BLOCK = tl.constexpr(BLOCK_TOKENS)
_TILE_BLOCKS = tl.constexpr(TILE_BLOCKS)

SUM_EXPONENT = 16
"""Unfolding factors are ``2**-(16 + e)``: 128 weights of e4m3 under any exponent then add up to
less than the largest fp32 number."""

_SUM_EXPONENT = tl.constexpr(SUM_EXPONENT)


@triton.jit
def _scale_columns(
    scale_ptr, out_ptr, items_ptr, columns,
    H: tl.constexpr, BLOCK_H: tl.constexpr, PLACES: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Columns of one token block, all heads; places without a token get the scale of zeros."""
    slot = tl.program_id(0)
    start = tl.load(items_ptr + slot * 4)
    length = tl.load(items_ptr + slot * 4 + 1)
    unit = tl.load(items_ptr + slot * 4 + 2)
    if (length == 0) & (unit >= _TILE_BLOCKS):
        return
    n = tl.arange(0, PLACES)
    head = tl.arange(0, BLOCK_H)
    live = (unit * _BLOCK + n < length)[:, None] & (head < H)[None, :]
    token = (start + unit * _BLOCK + n).to(tl.int64)
    byte = tl.load(scale_ptr + token[:, None] * H + head[None, :], mask=live, other=0)
    at = head.to(tl.int64)[None, :] * columns + slot * PLACES + n[:, None]
    wide = (n >= 0)[:, None] & (head < H)[None, :]
    if FOLD:
        exponent = tl.where(byte == 0, 0.0, scale_exponent(byte))
        inverse = scale_factor(tl.maximum(254 - byte.to(tl.int32), 0))
        inverse = tl.where((byte == 0) | (byte == 255), 1.0, inverse)
        tl.store(out_ptr + 2 * at, exponent, mask=wide)
        tl.store(out_ptr + 2 * at + 1, inverse * 2.0**-_SUM_EXPONENT, mask=wide)
    else:
        tl.store(out_ptr + at, scale_factor(byte), mask=wide)


def scale_columns(
    scale_NH: UInt8[Tensor, "N H"],
    blocks: Int32[Tensor, "items 4"],
    *,
    scales: BlockScales,
    fold: bool = False,
) -> Float32[Tensor, "H C kinds"]:
    """Write scale bytes out in the order of ``Operand``'s columns.

    Args:
        scale_NH: ue8m0 bytes, one a token and head.
        blocks: ``work_lists`` of ``(32, "document")``.
        scales: One column a token, or (``"token_block"``) one a block.
        fold: What fp8 weights of a softmax need of V's scales, instead of the scales.

    Returns:
        ``(H, C, 1)`` factors ``2**e``, or with ``fold`` ``(H, C, 2)``: exponents ``e`` and
        ``2**-(SUM_EXPONENT + e)``. Byte 255 is NaN in factors and exponents; what unfolds is
        finite there, so that a weight of zero stays zero. Byte 0, whose codes are zero, has
        ``e = 0`` under ``fold``, as any will do.

    Numerics:
        Exact, subnormal numbers included.

    Source:
        OCP Microscaling Formats 1.0, section 5.3.
    """
    H = scale_NH.shape[1]
    places = BLOCK_TOKENS if scales == "token" else 1
    columns = blocks.shape[0] * places
    out = torch.empty((H, columns, 1 + fold), dtype=torch.float32, device=scale_NH.device)
    _scale_columns[(blocks.shape[0],)](
        scale_NH, out, blocks, columns,
        H=H, BLOCK_H=triton.next_power_of_2(H), PLACES=places, FOLD=fold, num_warps=1,
    )  # fmt: skip
    return out
