"""dQ of 8-bit operands for Hopper, with loads and products placed by hand (Gluon).

Arithmetic, in its order, and work items are those of ``backward.attention_backward_queries``.
There, with two stages, a tile's loads are issued when the tile before has ended, and a quarter of
the time is spent waiting for them; here they are issued a whole tile earlier, with the same shared
memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from titan_lowprec.ops.attention.kernel.tiles import (
    as_rows,
    fold_and_cast,
    load_block_scalars,
    next_tile,
    visible_at,
    without_nan,
)
from titan_lowprec.ops.hadamard.kernel import (
    hadamard_pieces,
    hadamard_sign,
    join_pieces,
    truncate_to_bf16,
)
from titan_lowprec.ops.quantize.kernel import permute_token_pairs, scale_factor

_load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Its name in triton 3.9, and that in 3.6."""


@gluon.jit
def _rotate(x, ROWS: gl.constexpr, D: gl.constexpr):
    """``hadamard_product`` of an accumulator's rows; the layout stays."""
    layout: gl.constexpr = x.type.layout
    blocked: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, blocked))
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, blocked))
    sign = hadamard_sign(row[:, None], column[None, :]).to(gl.bfloat16)
    sign_smem = gl.allocate_shared_memory(
        gl.bfloat16, [16, 16], gl.NVMMASharedLayout(32, 16, 2), sign
    )
    fence_async_shared()
    accumulator: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, accumulator, 2)
    x = hadamard_pieces(x, ROWS, D)
    high = truncate_to_bf16(x)
    low = gl.convert_layout((x - high).to(gl.bfloat16), operand)
    high = gl.convert_layout(high.to(gl.bfloat16), operand)
    zeros = gl.zeros([D // 16 * ROWS, 16], gl.float32, accumulator)
    x = warpgroup_mma(low, sign_smem, zeros, use_acc=False, is_async=True)
    x = warpgroup_mma(high, sign_smem, x, is_async=True)
    x = warpgroup_mma_wait(0, deps=[x])
    return gl.convert_layout(join_pieces(x, ROWS, D), layout)


@gluon.jit
def _load_keys(
    k_desc, v_desc, kt_desc, k_smem, v_smem, kt_smem, arrived, head, token, column, wanted,
    D: gl.constexpr,
):  # fmt: skip
    """Begin to load one tile of keys if it is ``wanted``; ``arrived`` counts its bytes already."""
    _load_tile(k_desc, [token, head * D], arrived, k_smem, wanted)
    _load_tile(v_desc, [token, head * D], arrived, v_smem, wanted)
    _load_tile(kt_desc, [head * D, column], arrived, kt_smem, wanted)


@gluon.jit
def _as_blocks(first, second):
    """Scalars of two blocks as ``[1, blocks, 1, 1, 1]``."""
    block = gl.arange(0, 2, layout=gl.AutoLayout())
    return gl.where(block == 0, first, second)[None, :, None, None, None]


@gluon.jit
def _columns(ptr, column, SIZE: gl.constexpr, SCORES: gl.constexpr, VIEWED: gl.constexpr):
    """One value a key from ``column`` on, as ``[1, blocks, 4, 4, 2]``."""
    x = gl.load(ptr + column + gl.arange(0, SIZE, layout=gl.SliceLayout(0, SCORES)))
    return gl.convert_layout(gl.reshape(x[None, :], [1, SIZE // 32, 4, 4, 2]), VIEWED)


@gluon.jit
def attention_backward_queries_sm90(
    q_desc, k_desc, v_desc, g_desc, kt_desc, qs_ptr, ks_ptr, vs_ptr, gs_ptr,
    lse_ptr, terms_ptr, dq_ptr, items_ptr, columns, score_factor, alpha,
    H: gl.constexpr, J: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr,
    CAUSAL: gl.constexpr, TOKEN: gl.constexpr, ROTATE: gl.constexpr,
):  # fmt: skip
    """dQ of one query tile: all tiles of 64 keys that it sees.

    Two tiles of K, V and transposed K are on their way or in use at a time.
    """
    BLOCK_N: gl.constexpr = 64
    BLOCKS: gl.constexpr = BLOCK_N // 32
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32])
    weights: gl.constexpr = gl.DotOperandLayout(0, summed, 4)
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    item = items_ptr + gl.program_id(0) * 4
    head = gl.program_id(1)
    start = gl.load(item)
    length = gl.load(item + 1)
    first_row = gl.load(item + 2) * BLOCK_M
    column = gl.load(item + 3) * 32
    if length == 0:
        return
    left = gl.abs(length) - first_row
    token = start + first_row
    dq = gl.zeros([BLOCK_M, D], gl.float32, summed)
    if length > 0:
        j = head // (H // J)
        keys = length
        unmasked = length // BLOCK_N * BLOCK_N
        if CAUSAL:
            keys = gl.minimum(length, first_row + BLOCK_M)
            unmasked = first_row // BLOCK_N * BLOCK_N

        arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        q_smem = gl.allocate_shared_memory(q_desc.dtype, [BLOCK_M, D], q_desc.layout)
        g_smem = gl.allocate_shared_memory(g_desc.dtype, [BLOCK_M, D], g_desc.layout)
        k_smem = gl.allocate_shared_memory(k_desc.dtype, [2, BLOCK_N, D], k_desc.layout)
        v_smem = gl.allocate_shared_memory(v_desc.dtype, [2, BLOCK_N, D], v_desc.layout)
        kt_smem = gl.allocate_shared_memory(kt_desc.dtype, [2, D, BLOCK_N], kt_desc.layout)
        for n in gl.static_range(2):
            mbarrier.init(arrived.index(n), count=1)
        fence_async_shared()
        mbarrier.expect(arrived.index(0), (2 * BLOCK_M + 3 * BLOCK_N) * D)
        _load_tile(q_desc, [token, head * D], arrived.index(0), q_smem)
        _load_tile(g_desc, [token, head * D], arrived.index(0), g_smem)
        for n in gl.static_range(2):
            wanted = n * BLOCK_N < keys
            if n > 0:
                mbarrier.expect(arrived.index(n), 3 * BLOCK_N * D, wanted)
            _load_keys(
                k_desc, v_desc, kt_desc, k_smem.index(n), v_smem.index(n), kt_smem.index(n),
                arrived.index(n), j, start + n * BLOCK_N, column + n * BLOCK_N, wanted, D,
            )  # fmt: skip

        row = gl.arange(0, BLOCK_M, layout=gl.AutoLayout())
        at = (token + row).to(gl.int64) * H + head
        lse = gl.load(lse_ptr + at, mask=row < left, other=float("inf"))
        terms_ptr += 2 * (head.to(gl.int64) * columns + column + first_row)
        delta = gl.load(terms_ptr + 2 * row + 1, mask=row < left, other=0.0)
        row_factor = score_factor * scale_factor(gl.load(qs_ptr + at, mask=row < left, other=0))
        across = j.to(gl.int64) * (columns if TOKEN else columns // 32)
        ks_ptr += across
        vs_ptr += across
        if not TOKEN:
            k0, k1, _, _ = load_block_scalars(ks_ptr, column // 32, 1, BLOCKS)
            v0, v1, _, _ = load_block_scalars(vs_ptr, column // 32, 1, BLOCKS)
        nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores)
        viewed: gl.constexpr = gl.reshape(nothing, [BLOCK_M, BLOCKS, 4, 4, 2]).type.layout
        nothing_summed = gl.zeros([BLOCK_M, D], gl.float32, summed)
        for first_key in range(0, keys, BLOCK_N):
            turn = first_key // BLOCK_N
            slot = turn & 1
            if TOKEN:
                k_factor = _columns(ks_ptr, column + first_key, BLOCK_N, scores, viewed)
                v_factor = _columns(vs_ptr, column + first_key, BLOCK_N, scores, viewed)
            else:
                k_factor = _as_blocks(k0, k1)
                v_factor = _as_blocks(v0, v1)
                ahead = (column + next_tile(first_key, BLOCK_N, keys)) // 32
                k0, k1, _, _ = load_block_scalars(ks_ptr, ahead, 1, BLOCKS)
                v0, v1, _, _ = load_block_scalars(vs_ptr, ahead, 1, BLOCKS)
            mbarrier.wait(arrived.index(slot), (turn >> 1) & 1)
            kt = kt_smem.index(slot)
            s = warpgroup_mma(
                q_smem, k_smem.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True
            )
            e = warpgroup_mma(
                g_smem, v_smem.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True
            )
            s = gl.reshape(warpgroup_mma_wait(1, deps=[s]), [BLOCK_M, BLOCKS, 4, 4, 2])
            if TOKEN:
                p = gl.exp2(s * k_factor * as_rows(row_factor) - as_rows(lse))
            else:
                p = gl.exp2(s * (as_rows(row_factor) * k_factor) - as_rows(lse))
            e = gl.reshape(warpgroup_mma_wait(0, deps=[e]), [BLOCK_M, BLOCKS, 4, 4, 2])
            u = p * (e * v_factor - as_rows(delta))
            if first_key >= unmasked:
                query = first_row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, scores))
                key = first_key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scores))
                seen = visible_at(query, key, length, CAUSAL, False)
                u = gl.where(gl.reshape(seen, [BLOCK_M, BLOCKS, 4, 4, 2]), u, 0.0)
            codes, exponent = fold_and_cast(u, without_nan(k_factor), TOKEN)
            codes = permute_token_pairs(gl.reshape(codes, [BLOCK_M, BLOCK_N]), BLOCK_M, BLOCK_N)
            power = gl.exp2(gl.reshape(exponent, [BLOCK_M]))
            power = gl.convert_layout(power, gl.SliceLayout(1, summed))
            product = warpgroup_mma(
                gl.convert_layout(codes, weights), kt.permute((1, 0)), nothing_summed,
                use_acc=False, is_async=True,
            )  # fmt: skip
            dq = dq + warpgroup_mma_wait(0, deps=[product]) * power[:, None]
            later = first_key + 2 * BLOCK_N  # into the tile's own place
            mbarrier.expect(arrived.index(slot), 3 * BLOCK_N * D, later < keys)
            _load_keys(
                k_desc, v_desc, kt_desc, k_smem.index(slot), v_smem.index(slot), kt,
                arrived.index(slot), j, start + later, column + later, later < keys, D,
            )  # fmt: skip
        for n in gl.static_range(2):
            mbarrier.invalidate(arrived.index(n))

        row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, summed))
        at = (token + row).to(gl.int64) * H + head
        factor = alpha * scale_factor(gl.load(gs_ptr + at, mask=row < left, other=0))
        if ROTATE:
            factor = factor * D**-0.5
        dq = dq * factor[:, None]
        if ROTATE:
            dq = _rotate(dq, BLOCK_M, D)
    out = gl.convert_layout(dq.to(dq_ptr.dtype.element_ty), stored)
    row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, stored))
    feature = gl.arange(0, D, layout=gl.SliceLayout(0, stored))
    at = (token + row).to(gl.int64)[:, None] * (H * D) + (head * D + feature)[None, :]
    gl.store(dq_ptr + at, out, mask=(row < left)[:, None] & (feature >= 0)[None, :])
