"""Forward kernel: one program a query tile of one document and head, key tiles ascending."""

import triton
import triton.language as tl

from titan_lowprec.ops.attention.kernel.tiles import (
    as_blocks,
    as_rows,
    load_block_scalars,
    load_column_pairs,
    load_columns,
    load_rows,
    load_transposed,
    next_tile,
    normal_factor,
    store_rows,
    tile_maximum,
    visible,
)
from titan_lowprec.ops.quantize.kernel import (
    SUM_EXPONENT,
    permute_token_pairs,
    scale_factor,
)

_SUM_EXPONENT = tl.constexpr(SUM_EXPONENT)

_NOTHING_SEEN = tl.constexpr(-1e30)
"""Running maxima before the first key: finite, so that differences stay numbers."""


@triton.jit
def _softmax_fp8(
    s, row_factor, k_factor, v_exponent, unfold, total, reference, first_row, first_key, length,
    masked, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    TOKEN: tl.constexpr, WEIGHT_EXPONENT: tl.constexpr, MAX_LAG: tl.constexpr,
):  # fmt: skip
    """Weights of one key tile, cast: ``2**(t + e_v - reference + WEIGHT_EXPONENT)``.

    ``reference`` runs over t + e_v. Times ``2**-(SUM_EXPONENT + e_v)`` the weights, before their
    cast, add up to a row's sum of ``2**t`` in units of the reference: no maximum of t is needed.
    ``masked``, known at run time: some pairs of the tile do not attend.
    """
    BLOCKS: tl.constexpr = BLOCK_N // 32
    s = tl.reshape(s, [BLOCK_M, BLOCKS, 4, 4, 2])
    if TOKEN:
        t = s * k_factor * as_rows(row_factor) + v_exponent
        if masked:
            seen = visible(first_row, first_key, length, BLOCK_M, BLOCK_N, CAUSAL, False)
            t = tl.where(tl.reshape(seen, [BLOCK_M, BLOCKS, 4, 4, 2]), t, float("-inf"))
        highest = t
    else:  # factors are positive and constant in a block: maxima of the products do
        factor = as_rows(row_factor) * k_factor
        # of the shape that a mask gives them
        factor = tl.broadcast_to(factor, [BLOCK_M, BLOCKS, 1, 4, 1])
        v_exponent = tl.broadcast_to(v_exponent, [BLOCK_M, BLOCKS, 1, 4, 1])
        unfold = tl.broadcast_to(unfold, [BLOCK_M, BLOCKS, 1, 4, 1])
        if masked:
            seen = visible(first_row, first_key, length, BLOCK_M, BLOCK_N, CAUSAL, False)
            s = tl.where(tl.reshape(seen, [BLOCK_M, BLOCKS, 4, 4, 2]), s, float("-inf"))
        highest = tl.max(tl.max(s, 4, keep_dims=True), 2, keep_dims=True)
        if masked:  # a NaN or zero factor must not reach -inf
            unseen = highest == float("-inf")
            factor = tl.where(unseen, 1.0, normal_factor(factor))
            v_exponent = tl.where(unseen, 0.0, v_exponent)
            unfold = tl.where(unseen, 0.0, unfold)
        highest = highest * factor + v_exponent
    new_reference = tile_maximum(highest)
    new_reference = tl.where(new_reference > reference + MAX_LAG, new_reference, reference)
    gain = tl.exp2(reference - new_reference)
    shift = WEIGHT_EXPONENT - as_rows(new_reference)
    if TOKEN:
        weight = tl.exp2(t + shift)
        summed = tl.sum(tl.sum(tl.sum(weight * unfold, 4), 2), 1)
    else:
        weight = tl.exp2(s * factor + (v_exponent + shift))
        summed = tl.sum(tl.sum(weight, 4, keep_dims=True), 2, keep_dims=True) * unfold
        summed = tl.sum(tl.sum(tl.sum(summed, 4), 2), 1)
    total = total * gain[:, None] + summed  # [BLOCK_M, 4]: a sum a thread
    p = tl.reshape(weight.to(tl.float8e4nv), [BLOCK_M, BLOCK_N])
    return permute_token_pairs(p, BLOCK_M, BLOCK_N), gain, total, new_reference


@triton.jit
def _rows_fp8(
    q, row_factor, acc, k_ptr, v_ptr, ks_ptr, vs_ptr, j, token, column, columns,
    first_row, unmasked, keys, length,
    J: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, TOKEN: tl.constexpr,
    WIDE: tl.constexpr, WEIGHT_EXPONENT: tl.constexpr, MAX_LAG: tl.constexpr,
):  # fmt: skip
    """All key tiles of a query tile.

    Every tile's product with V starts a fresh accumulator and is added in fp32: the tensor
    core's own sum keeps about 14 bits.
    """
    reference = tl.full([BLOCK_M], _NOTHING_SEEN, tl.float32)
    total = tl.zeros([BLOCK_M, 4], tl.float32)
    wide = columns if TOKEN else columns // 32
    ks_ptr += j.to(tl.int64) * wide
    vs_ptr += j.to(tl.int64) * wide * 2
    BLOCKS: tl.constexpr = BLOCK_N // 32
    if not TOKEN:
        k0, k1, k2, k3 = load_block_scalars(ks_ptr, column // 32, 1, BLOCKS)
        e0, e1, e2, e3 = load_block_scalars(vs_ptr, column // 32, 2, BLOCKS)
        u0, u1, u2, u3 = load_block_scalars(vs_ptr + 1, column // 32, 2, BLOCKS)
    for first_key in tl.range(0, keys, BLOCK_N, num_stages=STAGES):
        k_factor = 1.0  # WIDE scores need none
        if TOKEN:
            if not WIDE:
                k_factor = load_columns(ks_ptr, column + first_key, BLOCK_N)
            v_exponent, unfold = load_column_pairs(vs_ptr, column + first_key, BLOCK_N)
        else:
            if not WIDE:
                k_factor = as_blocks(k0, k1, k2, k3, BLOCKS)
            v_exponent = as_blocks(e0, e1, e2, e3, BLOCKS)
            unfold = as_blocks(u0, u1, u2, u3, BLOCKS)
            ahead = next_tile(first_key, BLOCK_N, keys)
            block = (column + ahead) // 32
            k0, k1, k2, k3 = load_block_scalars(ks_ptr, block, 1, BLOCKS)
            e0, e1, e2, e3 = load_block_scalars(vs_ptr, block, 2, BLOCKS)
            u0, u1, u2, u3 = load_block_scalars(vs_ptr + 1, block, 2, BLOCKS)
        k = load_rows(k_ptr, token + first_key, j, length - first_key, BLOCK_N, J, D, BLOCK_D)
        v = load_transposed(v_ptr, column + first_key, j, columns, BLOCK_N, D, BLOCK_D)
        s = tl.dot(q, tl.trans(k))
        p, gain, total, reference = _softmax_fp8(
            s, row_factor, k_factor, v_exponent, unfold, total, reference, first_row, first_key,
            length, first_key >= unmasked, BLOCK_M, BLOCK_N, CAUSAL, TOKEN,
            WEIGHT_EXPONENT, MAX_LAG,
        )  # fmt: skip
        acc = acc * gain[:, None] + tl.dot(p, tl.trans(v))
    row_sum = tl.sum(total, 1)
    out = acc * ((1.0 / row_sum) * 2.0**-_SUM_EXPONENT)[:, None]
    return out, row_sum, reference + (_SUM_EXPONENT - WEIGHT_EXPONENT)


@triton.jit
def _step_bf16(
    q, row_factor, acc, total, top, k_ptr, v_ptr, j, token, first_row, first_key, length,
    J: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, MAX_LAG: tl.constexpr,
):  # fmt: skip
    token += first_key
    left = length - first_key
    k = load_rows(k_ptr, token, j, left, BLOCK_N, J, D, BLOCK_D)
    v = load_rows(v_ptr, token, j, left, BLOCK_N, J, D, BLOCK_D, MASKED)
    s = tl.dot(q, tl.trans(k))
    if MASKED:
        seen = visible(first_row, first_key, length, BLOCK_M, BLOCK_N, CAUSAL, False)
        s = tl.where(seen, s, float("-inf"))
    highest = tl.max(s, 1) * row_factor
    new_top = tl.where(highest > top + MAX_LAG, highest, top)
    weight = tl.exp2(s * row_factor - new_top[:, None])
    gain = tl.exp2(top - new_top)
    total = total * gain + tl.sum(weight, 1)
    acc = tl.dot(weight.to(tl.bfloat16), v, acc * gain[:, None])
    return acc, total, new_top


@triton.jit
def attention_forward(
    q_ptr, k_ptr, v_ptr, qs_ptr, ks_ptr, vs_ptr, out_ptr, low_ptr, lse_ptr, items_ptr,
    columns, score_factor,
    H: tl.constexpr, J: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    FP8: tl.constexpr, WIDE: tl.constexpr, CAUSAL: tl.constexpr, TOKEN: tl.constexpr,
    RESIDUAL: tl.constexpr, WEIGHT_EXPONENT: tl.constexpr, MAX_LAG: tl.constexpr,
):  # fmt: skip
    """Output, LSE (base 2) and optionally the output's low part of one query tile.

    WIDE (with FP8): Q and K are values in bf16, without scales; V and the weights stay e4m3.
    """
    item = items_ptr + tl.program_id(0) * 4
    head = tl.program_id(1)
    start = tl.load(item)
    length = tl.load(item + 1)
    first_row = tl.load(item + 2) * BLOCK_M
    column = tl.load(item + 3) * 32
    if length == 0:
        return
    row = first_row + tl.arange(0, BLOCK_M)
    rows_left = tl.abs(length) - first_row
    inside = row < tl.abs(length)
    token = start + first_row
    at = (start + row).to(tl.int64) * H + head
    out_ptr += head * D
    low_ptr += head * D
    if length < 0:  # tokens past the row's last document
        zeros = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        store_rows(out_ptr, zeros, token, H * D, rows_left, BLOCK_M, D, BLOCK_D)
        if RESIDUAL:
            store_rows(low_ptr, zeros, token, H * D, rows_left, BLOCK_M, D, BLOCK_D)
        tl.store(lse_ptr + at, tl.full([BLOCK_M], float("inf"), tl.float32), mask=inside)
        return
    j = head // (H // J)
    q = load_rows(q_ptr, token, head, rows_left, BLOCK_M, H, D, BLOCK_D, POINTER=FP8 and not WIDE)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    keys = length
    unmasked = length // BLOCK_N * BLOCK_N
    if CAUSAL:
        keys = tl.minimum(length, first_row + BLOCK_M)
        unmasked = first_row // BLOCK_N * BLOCK_N
    if FP8:
        if WIDE:
            row_factor = tl.zeros([BLOCK_M], tl.float32) + score_factor
        else:
            row_factor = score_factor * scale_factor(tl.load(qs_ptr + at, mask=inside, other=0))
        out, row_sum, top = _rows_fp8(
            q, row_factor, acc, k_ptr, v_ptr, ks_ptr, vs_ptr, j, start, column,
            columns, first_row, unmasked, keys, length,
            J, BLOCK_M, BLOCK_N, STAGES, D, BLOCK_D, CAUSAL, TOKEN, WIDE, WEIGHT_EXPONENT, MAX_LAG,
        )  # fmt: skip
    else:
        top = tl.full([BLOCK_M], _NOTHING_SEEN, tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        for first_key in tl.range(0, unmasked, BLOCK_N, num_stages=STAGES):
            acc, row_sum, top = _step_bf16(
                q, score_factor, acc, row_sum, top, k_ptr, v_ptr, j, start,
                first_row, first_key, length,
                J, BLOCK_M, BLOCK_N, D, BLOCK_D, CAUSAL, False, MAX_LAG,
            )  # fmt: skip
        for first_key in tl.range(unmasked, keys, BLOCK_N, num_stages=1):
            acc, row_sum, top = _step_bf16(
                q, score_factor, acc, row_sum, top, k_ptr, v_ptr, j, start,
                first_row, first_key, length,
                J, BLOCK_M, BLOCK_N, D, BLOCK_D, CAUSAL, True, MAX_LAG,
            )  # fmt: skip
        out = acc * (1.0 / row_sum)[:, None]
    store_rows(out_ptr, out, token, H * D, rows_left, BLOCK_M, D, BLOCK_D)
    if RESIDUAL:
        low = out - out.to(out_ptr.dtype.element_ty).to(tl.float32)
        store_rows(low_ptr, low, token, H * D, rows_left, BLOCK_M, D, BLOCK_D)
    tl.store(lse_ptr + at, top + tl.log2(row_sum), mask=inside)
