"""Backward kernels: dK and dV by key tiles, dQ by query tiles; no atomics, fixed order."""

import triton
import triton.language as tl

from titan_lowprec.ops.attention.kernel.tiles import (
    as_blocks,
    as_column_pairs,
    as_rows,
    cast_exponent_log2,
    fold_and_cast,
    load_block_scalars,
    load_column_pairs,
    load_columns,
    load_rows,
    load_transposed,
    nan_of,
    next_tile,
    store_rows,
    tile_maximum,
    visible,
    without_nan,
)
from titan_lowprec.ops.hadamard.kernel import hadamard_product
from titan_lowprec.ops.quantize.kernel import permute_token_pairs, scale_factor


@triton.jit
def _query_terms(terms_ptr, column, tile, length, BLOCK_M: tl.constexpr):
    """LSE and D of the queries from ``tile`` on, side by side."""
    pair = tl.arange(0, 2 * BLOCK_M)
    at = terms_ptr + 2 * (column + tile) + pair
    return tl.load(at, mask=tile + pair // 2 < length, other=0.0)


@triton.jit
def _query_factors(factor, WIDE: tl.constexpr):
    """Factors of Q's scales, with NaN for scores and finite for the fold into U.

    WIDE scores know nothing of these scales: the first is then 1 or NaN, for dP.
    """
    finite = without_nan(factor)
    if WIDE:
        factor = nan_of(factor)
    return factor, finite


@triton.jit
def _keys_step_fp8(
    k, v, k_factor, v_factor, dk, dv, q_ptr, g_ptr, qt_ptr, gt_ptr, q_scales,
    terms, head, token, column, columns, first_key, first_query, length, masked,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, TOKEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One tile of queries against the program's keys; rows are keys, columns queries.

    ``masked``, known at run time: some pairs of the tile do not attend.
    """
    BLOCKS: tl.constexpr = BLOCK_M // 32
    TIGHT: tl.constexpr = TOKEN or WIDE  # two stages at 128 features: loads wait one by one
    q_factor, q_finite = _query_factors(q_scales, WIDE)
    left = length - first_query
    lse, delta = as_column_pairs(terms, BLOCK_M)
    q = load_rows(q_ptr, token, head, left, BLOCK_M, HEADS, D, BLOCK_D)
    if not TIGHT:  # side by side, they wait together
        g = load_rows(g_ptr, token, head, left, BLOCK_M, HEADS, D, BLOCK_D)
        gt = load_transposed(gt_ptr, column, head, columns, BLOCK_M, D, BLOCK_D)
    s = tl.reshape(tl.dot(k, tl.trans(q)), [BLOCK_N, BLOCKS, 4, 4, 2])
    if WIDE:
        t = s * k_factor - lse  # log2 of P * 2**e_g
    elif TOKEN:
        t = s * q_factor * as_rows(k_factor) - lse
    else:
        t = s * (as_rows(k_factor) * q_factor) - lse
    if masked:
        seen = visible(first_key, first_query, length, BLOCK_N, BLOCK_M, CAUSAL, True)
        seen = tl.reshape(seen, [BLOCK_N, BLOCKS, 4, 4, 2])
        t = tl.where(seen, t, float("-inf"))
    exponent = cast_exponent_log2(tile_maximum(t))
    p = tl.exp2(t - as_rows(exponent))
    if TIGHT:
        g = load_rows(g_ptr, token, head, left, BLOCK_M, HEADS, D, BLOCK_D)
    e = tl.reshape(tl.dot(v, tl.trans(g)), [BLOCK_N, BLOCKS, 4, 4, 2])
    if WIDE:
        u = p * (e * (as_rows(v_factor) * q_factor) - delta)
    else:
        u = p * (e * as_rows(v_factor) - delta)
    if masked:  # dP may be another document's NaN
        if TIGHT:  # a select in every tile, but fewer registers
            u = tl.where(p == 0.0, 0.0, u)
        else:  # asked anew, so that whole tiles branch around it
            seen = visible(first_key, first_query, length, BLOCK_N, BLOCK_M, CAUSAL, True)
            u = tl.where(tl.reshape(seen, [BLOCK_N, BLOCKS, 4, 4, 2]), u, 0.0)
    codes, u_exponent = fold_and_cast(u, q_finite, TOKEN)
    p = permute_token_pairs(tl.reshape(p.to(tl.float8e4nv), [BLOCK_N, BLOCK_M]), BLOCK_N, BLOCK_M)
    if TIGHT:
        gt = load_transposed(gt_ptr, column, head, columns, BLOCK_M, D, BLOCK_D)
    dv = dv + tl.dot(p, tl.trans(gt)) * tl.exp2(exponent)[:, None]
    codes = permute_token_pairs(tl.reshape(codes, [BLOCK_N, BLOCK_M]), BLOCK_N, BLOCK_M)
    qt = load_transposed(qt_ptr, column, head, columns, BLOCK_M, D, BLOCK_D)
    u_exponent = tl.reshape(u_exponent, [BLOCK_N])
    dk = dk + tl.dot(codes, tl.trans(qt)) * tl.exp2(exponent + u_exponent)[:, None]
    return dk, dv


@triton.jit
def _keys_step_bf16(
    k, v, score_factor, dk, dv, q_ptr, g_ptr, terms_ptr,
    head, token, column, first_key, first_query, length,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    left = length - first_query
    lse, delta = load_column_pairs(terms_ptr, column, BLOCK_M)
    lse = tl.reshape(lse, [1, BLOCK_M])
    delta = tl.reshape(delta, [1, BLOCK_M])
    q = load_rows(q_ptr, token, head, left, BLOCK_M, HEADS, D, BLOCK_D, MASKED)
    p = tl.exp2(tl.dot(k, tl.trans(q)) * score_factor - lse)
    g = load_rows(g_ptr, token, head, left, BLOCK_M, HEADS, D, BLOCK_D, MASKED)
    u = p * (tl.dot(v, tl.trans(g)) - delta)
    if MASKED:
        seen = visible(first_key, first_query, length, BLOCK_N, BLOCK_M, CAUSAL, True)
        p = tl.where(seen, p, 0.0)
        u = tl.where(seen, u, 0.0)
    dv = tl.dot(p.to(tl.bfloat16), g, dv)
    dk = tl.dot(u.to(tl.bfloat16), q, dk)
    return dk, dv


@triton.jit
def _keys_of_head(
    k, v, k_factor, v_factor, dk, dv, q_ptr, g_ptr, qt_ptr, gt_ptr, qs_ptr, terms_ptr,
    head, start, column, columns, first_key, length,
    H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, FP8: tl.constexpr, WIDE: tl.constexpr,
    CAUSAL: tl.constexpr, TOKEN: tl.constexpr,
):  # fmt: skip
    """All query tiles of one head.

    In bf16 the masked ones come last, in a loop of their own: only they clean what they load.
    """
    diagonal = 0
    whole = 0
    if CAUSAL:
        diagonal = first_key // BLOCK_M * BLOCK_M
        whole = (tl.minimum(first_key + BLOCK_N, length) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    if FP8:
        # carried from tile to tile: stages of them would leave room for one program only
        terms = _query_terms(terms_ptr, column, diagonal, length, BLOCK_M)
        BLOCKS: tl.constexpr = BLOCK_M // 32
        if not TOKEN:
            s0, s1, s2, s3 = load_block_scalars(qs_ptr, (column + diagonal) // 32, 1, BLOCKS)
        for tile in tl.range(diagonal, length, BLOCK_M, num_stages=STAGES):
            if TOKEN:
                q_scales = load_columns(qs_ptr, column + tile, BLOCK_M)
            else:
                q_scales = as_blocks(s0, s1, s2, s3, BLOCKS)
                ahead = next_tile(tile, BLOCK_M, length)
                s0, s1, s2, s3 = load_block_scalars(qs_ptr, (column + ahead) // 32, 1, BLOCKS)
            next_terms = _query_terms(terms_ptr, column, tile + BLOCK_M, length, BLOCK_M)
            masked = (tile < whole) | (tile + BLOCK_M > length)
            dk, dv = _keys_step_fp8(
                k, v, k_factor, v_factor, dk, dv, q_ptr, g_ptr, qt_ptr, gt_ptr,
                q_scales, terms, head, start + tile, column + tile,
                columns, first_key, tile, length, masked, H, BLOCK_M, BLOCK_N, D, BLOCK_D,
                CAUSAL, TOKEN, WIDE,
            )  # fmt: skip
            terms = next_terms
    else:
        rest = tl.maximum(whole, length // BLOCK_M * BLOCK_M)
        for tile in tl.range(whole, rest, BLOCK_M, num_stages=STAGES):
            dk, dv = _keys_step_bf16(
                k, v, k_factor, dk, dv, q_ptr, g_ptr, terms_ptr, head, start + tile,
                column + tile, first_key, tile, length, H, BLOCK_M, BLOCK_N, D, BLOCK_D,
                CAUSAL, False,
            )  # fmt: skip
        masked = (whole - diagonal) // BLOCK_M + (rest < length).to(tl.int32)
        for step in tl.range(0, masked, num_stages=1):
            tile = diagonal + step * BLOCK_M
            tile = tl.where(tile < whole, tile, rest)
            dk, dv = _keys_step_bf16(
                k, v, k_factor, dk, dv, q_ptr, g_ptr, terms_ptr, head, start + tile,
                column + tile, first_key, tile, length, H, BLOCK_M, BLOCK_N, D, BLOCK_D,
                CAUSAL, True,
            )  # fmt: skip
    return dk, dv


@triton.jit
def attention_backward_keys(
    q_ptr, k_ptr, v_ptr, g_ptr, qt_ptr, gt_ptr, qs_ptr, ks_ptr, vs_ptr,
    terms_ptr, dk_ptr, dv_ptr, items_ptr, columns, score_factor, alpha,
    H: tl.constexpr, J: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    FP8: tl.constexpr, WIDE: tl.constexpr, CAUSAL: tl.constexpr, TOKEN: tl.constexpr,
    ROTATE: tl.constexpr, PRODUCT_TYPE: tl.constexpr,
):  # fmt: skip
    """dK and dV of one key tile: all query tiles that see it, of all heads that share it.

    WIDE: as in the forward; Q's scales then belong to its transposed codes alone.
    """
    GROUP: tl.constexpr = H // J
    item = items_ptr + tl.program_id(0) * 4
    j = tl.program_id(1)
    start = tl.load(item)
    length = tl.load(item + 1)
    first_key = tl.load(item + 2) * BLOCK_N
    column = tl.load(item + 3) * 32
    if length == 0:
        return
    left = tl.abs(length) - first_key
    token = start + first_key
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if length > 0:
        k = load_rows(k_ptr, token, j, left, BLOCK_N, J, D, BLOCK_D, POINTER=FP8 and not WIDE)
        v = load_rows(v_ptr, token, j, left, BLOCK_N, J, D, BLOCK_D, POINTER=FP8)
        k_factor = score_factor
        v_factor = 1.0
        if FP8:
            row = tl.arange(0, BLOCK_N)
            at = (token + row).to(tl.int64) * J + j
            if not WIDE:
                k_byte = tl.load(ks_ptr + at, mask=row < left, other=0)
                k_factor = score_factor * scale_factor(k_byte)
            v_factor = scale_factor(tl.load(vs_ptr + at, mask=row < left, other=0))
        for member in tl.range(0, GROUP, num_stages=1):
            head = j * GROUP + member
            across = head.to(tl.int64) * columns
            dk, dv = _keys_of_head(
                k, v, k_factor, v_factor, dk, dv, q_ptr, g_ptr, qt_ptr, gt_ptr,
                qs_ptr + (across if TOKEN else across // 32), terms_ptr + 2 * across,
                head, start, column, columns, first_key, length,
                H, BLOCK_M, BLOCK_N, STAGES, D, BLOCK_D, FP8, WIDE, CAUSAL, TOKEN,
            )  # fmt: skip
        if ROTATE:
            dk = hadamard_product(dk * (alpha * D**-0.5), BLOCK_N, BLOCK_D, PRODUCT_TYPE)
        else:
            dk = dk * alpha
    store_rows(dk_ptr + j * D, dk, token, J * D, left, BLOCK_N, D, BLOCK_D)
    store_rows(dv_ptr + j * D, dv, token, J * D, left, BLOCK_N, D, BLOCK_D)


@triton.jit
def _key_factors(k_factor, v_factor, WIDE: tl.constexpr):
    """Factors of K's scales for scores and (finite) for the fold into U, and of V's scales.

    WIDE scores know nothing of K's scales: their NaN then goes to V's, and so to dP; the first
    is not used.
    """
    finite = without_nan(k_factor)
    if WIDE:
        k_factor = nan_of(k_factor)
        v_factor = v_factor * k_factor
    return k_factor, finite, v_factor


@triton.jit
def _queries_step_fp8(
    q, g, row_factor, lse, delta, dq, k_ptr, v_ptr, kt_ptr, k_scales, v_scales,
    head, token, column, columns, first_row, first_key, length, masked,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, TOKEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One tile of keys; dP and D are in units of the query's gradient scale.

    ``masked`` as for keys.
    """
    BLOCKS: tl.constexpr = BLOCK_N // 32
    k_factor, k_finite, v_factor = _key_factors(k_scales, v_scales, WIDE)
    left = length - first_key
    k = load_rows(k_ptr, token, head, left, BLOCK_N, HEADS, D, BLOCK_D)
    v = load_rows(v_ptr, token, head, left, BLOCK_N, HEADS, D, BLOCK_D)
    kt = load_transposed(kt_ptr, column, head, columns, BLOCK_N, D, BLOCK_D)
    s = tl.reshape(tl.dot(q, tl.trans(k)), [BLOCK_M, BLOCKS, 4, 4, 2])
    if WIDE:
        p = tl.exp2(s * row_factor - as_rows(lse))
    elif TOKEN:
        p = tl.exp2(s * k_factor * as_rows(row_factor) - as_rows(lse))
    else:
        p = tl.exp2(s * (as_rows(row_factor) * k_factor) - as_rows(lse))
    e = tl.reshape(tl.dot(g, tl.trans(v)), [BLOCK_M, BLOCKS, 4, 4, 2])
    u = p * (e * v_factor - as_rows(delta))
    if masked:
        seen = visible(first_row, first_key, length, BLOCK_M, BLOCK_N, CAUSAL, False)
        u = tl.where(tl.reshape(seen, [BLOCK_M, BLOCKS, 4, 4, 2]), u, 0.0)
    codes, exponent = fold_and_cast(u, k_finite, TOKEN)
    codes = permute_token_pairs(tl.reshape(codes, [BLOCK_M, BLOCK_N]), BLOCK_M, BLOCK_N)
    power = tl.exp2(tl.reshape(exponent, [BLOCK_M]))
    return dq + tl.dot(codes, tl.trans(kt)) * power[:, None]


@triton.jit
def _queries_step_bf16(
    q, g, score_factor, lse, delta, dq, k_ptr, v_ptr,
    head, start, first_row, first_key, length,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    token = start + first_key
    left = length - first_key
    k = load_rows(k_ptr, token, head, left, BLOCK_N, HEADS, D, BLOCK_D, MASKED)
    v = load_rows(v_ptr, token, head, left, BLOCK_N, HEADS, D, BLOCK_D)
    p = tl.exp2(tl.dot(q, tl.trans(k)) * score_factor - lse[:, None])
    u = p * (tl.dot(g, tl.trans(v)) - delta[:, None])
    if MASKED:
        seen = visible(first_row, first_key, length, BLOCK_M, BLOCK_N, CAUSAL, False)
        u = tl.where(seen, u, 0.0)
    return tl.dot(u.to(tl.bfloat16), k, dq)


@triton.jit
def attention_backward_queries(
    q_ptr, k_ptr, v_ptr, g_ptr, kt_ptr, qs_ptr, ks_ptr, vs_ptr, gs_ptr,
    lse_ptr, terms_ptr, dq_ptr, items_ptr, columns, score_factor, alpha,
    H: tl.constexpr, J: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    FP8: tl.constexpr, WIDE: tl.constexpr, CAUSAL: tl.constexpr, TOKEN: tl.constexpr,
    ROTATE: tl.constexpr, PRODUCT_TYPE: tl.constexpr,
):  # fmt: skip
    """dQ of one query tile: all key tiles that it sees. WIDE: as for dK, with K's scales."""
    item = items_ptr + tl.program_id(0) * 4
    head = tl.program_id(1)
    start = tl.load(item)
    length = tl.load(item + 1)
    first_row = tl.load(item + 2) * BLOCK_M
    column = tl.load(item + 3) * 32
    if length == 0:
        return
    left = tl.abs(length) - first_row
    token = start + first_row
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if length > 0:
        j = head // (H // J)
        q = load_rows(q_ptr, token, head, left, BLOCK_M, H, D, BLOCK_D, POINTER=FP8 and not WIDE)
        g = load_rows(g_ptr, token, head, left, BLOCK_M, H, D, BLOCK_D, POINTER=FP8)
        row = tl.arange(0, BLOCK_M)
        at = (token + row).to(tl.int64) * H + head
        lse = tl.load(lse_ptr + at, mask=row < left, other=float("inf"))
        terms_ptr += 2 * (head.to(tl.int64) * columns + column + first_row)
        delta = tl.load(terms_ptr + 2 * row + 1, mask=row < left, other=0.0)
        keys = length
        unmasked = length // BLOCK_N * BLOCK_N
        if CAUSAL:
            keys = tl.minimum(length, first_row + BLOCK_M)
            unmasked = first_row // BLOCK_N * BLOCK_N
        if FP8:
            across = j.to(tl.int64) * (columns if TOKEN else columns // 32)
            ks_ptr += across
            vs_ptr += across
            row_factor = score_factor
            if not WIDE:
                q_byte = tl.load(qs_ptr + at, mask=row < left, other=0)
                row_factor = score_factor * scale_factor(q_byte)
            BLOCKS: tl.constexpr = BLOCK_N // 32
            if not TOKEN:
                k0, k1, k2, k3 = load_block_scalars(ks_ptr, column // 32, 1, BLOCKS)
                v0, v1, v2, v3 = load_block_scalars(vs_ptr, column // 32, 1, BLOCKS)
            for first_key in tl.range(0, keys, BLOCK_N, num_stages=STAGES):
                if TOKEN:
                    k_scales = load_columns(ks_ptr, column + first_key, BLOCK_N)
                    v_scales = load_columns(vs_ptr, column + first_key, BLOCK_N)
                else:
                    k_scales = as_blocks(k0, k1, k2, k3, BLOCKS)
                    v_scales = as_blocks(v0, v1, v2, v3, BLOCKS)
                    ahead = next_tile(first_key, BLOCK_N, keys)
                    block = (column + ahead) // 32
                    k0, k1, k2, k3 = load_block_scalars(ks_ptr, block, 1, BLOCKS)
                    v0, v1, v2, v3 = load_block_scalars(vs_ptr, block, 1, BLOCKS)
                dq = _queries_step_fp8(
                    q, g, row_factor, lse, delta, dq, k_ptr, v_ptr, kt_ptr, k_scales, v_scales,
                    j, start + first_key, column + first_key, columns, first_row,
                    first_key, length, first_key >= unmasked, J, BLOCK_M, BLOCK_N, D, BLOCK_D,
                    CAUSAL, TOKEN, WIDE,
                )  # fmt: skip
            factor = alpha * scale_factor(tl.load(gs_ptr + at, mask=row < left, other=0))
        else:
            for first_key in tl.range(0, unmasked, BLOCK_N, num_stages=STAGES):
                dq = _queries_step_bf16(
                    q, g, score_factor, lse, delta, dq, k_ptr, v_ptr, j, start,
                    first_row, first_key, length, J, BLOCK_M, BLOCK_N, D, BLOCK_D, CAUSAL, False,
                )  # fmt: skip
            for first_key in tl.range(unmasked, keys, BLOCK_N, num_stages=1):
                dq = _queries_step_bf16(
                    q, g, score_factor, lse, delta, dq, k_ptr, v_ptr, j, start,
                    first_row, first_key, length, J, BLOCK_M, BLOCK_N, D, BLOCK_D, CAUSAL, True,
                )  # fmt: skip
            factor = tl.zeros([BLOCK_M], tl.float32) + alpha
        if ROTATE:
            factor = factor * D**-0.5
        dq = dq * factor[:, None]
        if ROTATE:
            dq = hadamard_product(dq, BLOCK_M, BLOCK_D, PRODUCT_TYPE)
    store_rows(dq_ptr + head * D, dq, token, H * D, left, BLOCK_M, D, BLOCK_D)
