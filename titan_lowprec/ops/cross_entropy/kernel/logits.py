"""Logits GEMM whose epilogue leaves exponentials: no fp32 logits are written.

A tile of logits becomes ``exp(logit - shift)`` with a shift per row that is known beforehand (0,
or a corrected one for a row whose sum left the safe range). The epilogue sums the fp32 values over
the tile's columns and stores them in bf16: with the row's factor they are its softmax, so the two
gradient GEMMs follow without another pass over the logits. The label's column is left out of sum
and store; it has its own fp32 path.
"""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_lowprec.ops.cross_entropy.kernel.tiles import LogitsTile, descriptor, programs
from titan_lowprec.shapes import Float, Int32, Tensor

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def tanh(x):
    """tanh from one exponential of a negative number; absolute error below 2e-7."""
    u = tl.exp(-2.0 * tl.abs(x))
    magnitude = (1.0 - u) / (1.0 + u)
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def _accumulate(
    x_desc,
    w_desc,
    row_start,
    column_start,
    E,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    acc = tl.zeros((BLOCK_R, BLOCK_V), dtype=tl.float32)
    for k in range(0, E, BLOCK_E):
        x = x_desc.load([row_start, k])  # [BLOCK_R, BLOCK_E]
        w = w_desc.load([column_start, k])  # [BLOCK_V, BLOCK_E]
        acc = tl.dot(x, w.T, acc)
    return acc


@triton.jit
def _exponentials(
    acc,
    p_desc,
    label,
    shift,
    row_start,
    column_start,
    V,
    softcap,
    COLUMNS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STORE: tl.constexpr,
):
    """Store exponentials of one part of a tile; return their sums over the columns."""
    columns = column_start + tl.arange(0, COLUMNS)
    keep = (columns[None, :] != label[:, None]) & (columns < V)[None, :]
    if SOFTCAP:
        t = tanh(acc / softcap)
        value = tl.where(keep, tl.exp2(t * (softcap * LOG2E) - shift[:, None]), 0.0)
        stored = value * (1.0 - t * t)
    else:
        value = tl.where(keep, tl.exp2(acc * LOG2E - shift[:, None]), 0.0)
        stored = value
    if STORE:
        p_desc.store([row_start, column_start], stored.to(tl.bfloat16))
    return tl.sum(value, axis=1)


@triton.jit
def _finish_tile(
    acc,
    p_desc,
    label_ptr,
    shift_ptr,
    partial_ptr,
    row_tile,
    column_tile,
    C,
    V,
    column_tiles,
    softcap,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLIT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STORE: tl.constexpr,
):
    rows = row_tile * BLOCK_R + tl.arange(0, BLOCK_R)
    label = tl.load(label_ptr + rows, mask=rows < C, other=-1)  # [BLOCK_R]
    shift = tl.load(shift_ptr + rows, mask=rows < C, other=0.0)  # [BLOCK_R]
    r0 = row_tile * BLOCK_R
    c0 = column_tile * BLOCK_V
    if SPLIT:
        halves = tl.permute(tl.reshape(acc, (BLOCK_R, 2, BLOCK_V // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        total = _exponentials(
            left, p_desc, label, shift, r0, c0, V, softcap, BLOCK_V // 2, SOFTCAP, STORE
        )
        c1 = c0 + BLOCK_V // 2
        total += _exponentials(
            right, p_desc, label, shift, r0, c1, V, softcap, BLOCK_V // 2, SOFTCAP, STORE
        )
    else:
        total = _exponentials(
            acc, p_desc, label, shift, r0, c0, V, softcap, BLOCK_V, SOFTCAP, STORE
        )
    tl.store(partial_ptr + rows * column_tiles + column_tile, total, mask=rows < C)


@triton.jit
def exponential_kernel(
    x_desc,
    w_desc,
    p_desc,
    label_ptr,
    shift_ptr,
    partial_ptr,
    C,
    V,
    E,
    softcap,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SPLIT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STORE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """All tiles, rows fastest, so that the head is read from memory about once."""
    row_tiles = tl.cdiv(C, BLOCK_R)
    column_tiles = tl.cdiv(V, BLOCK_V)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=FLATTEN):
        row_tile = tile % row_tiles
        column_tile = tile // row_tiles
        acc = _accumulate(
            x_desc,
            w_desc,
            row_tile * BLOCK_R,
            column_tile * BLOCK_V,
            E,
            BLOCK_R,
            BLOCK_V,
            BLOCK_E,
        )
        _finish_tile(
            acc,
            p_desc,
            label_ptr,
            shift_ptr,
            partial_ptr,
            row_tile,
            column_tile,
            C,
            V,
            column_tiles,
            softcap,
            BLOCK_R,
            BLOCK_V,
            SPLIT,
            SOFTCAP,
            STORE,
        )


@triton.jit
def correct_kernel(
    x_desc,
    w_desc,
    p_desc,
    label_ptr,
    shift_ptr,
    partial_ptr,
    redo_ptr,
    C,
    V,
    E,
    softcap,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SPLIT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STORE: tl.constexpr,
    MAXIMUM: tl.constexpr,
):
    """Repeat the flagged row tiles: ``MAXIMUM`` leaves row maxima in ``partial``, else sums."""
    column_tiles = tl.cdiv(V, BLOCK_V)
    row_tile = tl.program_id(0)
    if tl.load(redo_ptr + row_tile) == 0:
        return
    for column_tile in range(tl.program_id(1), column_tiles, tl.num_programs(1)):
        acc = _accumulate(
            x_desc, w_desc, row_tile * BLOCK_R, column_tile * BLOCK_V, E, BLOCK_R, BLOCK_V, BLOCK_E
        )
        if MAXIMUM:
            rows = row_tile * BLOCK_R + tl.arange(0, BLOCK_R)
            columns = column_tile * BLOCK_V + tl.arange(0, BLOCK_V)
            label = tl.load(label_ptr + rows, mask=rows < C, other=-1)  # [BLOCK_R]
            keep = (columns[None, :] != label[:, None]) & (columns < V)[None, :]
            if SOFTCAP:
                acc = tanh(acc / softcap) * softcap
            largest = tl.max(tl.where(keep, acc * LOG2E, float("-inf")), axis=1)
            tl.store(partial_ptr + rows * column_tiles + column_tile, largest, mask=rows < C)
        else:
            _finish_tile(
                acc,
                p_desc,
                label_ptr,
                shift_ptr,
                partial_ptr,
                row_tile,
                column_tile,
                C,
                V,
                column_tiles,
                softcap,
                BLOCK_R,
                BLOCK_V,
                SPLIT,
                SOFTCAP,
                STORE,
            )


def _operands(
    x_CE: Tensor, weight_VE: Tensor, p_CV: Tensor | None, tile: LogitsTile
) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    x_desc = descriptor(x_CE, (tile.rows, tile.reduction))
    w_desc = descriptor(weight_VE, (tile.columns, tile.reduction))
    part = tile.columns // (2 if tile.split else 1)
    p_desc = x_desc if p_CV is None else descriptor(p_CV, (tile.rows, part))
    return x_desc, w_desc, p_desc


def exponentials(
    x_CE: Float[Tensor, "C E"],
    weight_VE: Float[Tensor, "V E"],
    p_CV: Float[Tensor, "C Vp"] | None,
    label_C: Int32[Tensor, " C"],
    shift_C: Float[Tensor, " C"],
    partial_CG: Float[Tensor, "C G"],
    *,
    softcap: float | None,
    tile: LogitsTile,
) -> None:
    """Fill ``p_CV`` (if given) and the column tiles' sums ``partial_CG``; shifts in powers of 2."""
    (C, E), V = x_CE.shape, weight_VE.shape[0]
    tiles = triton.cdiv(C, tile.rows) * triton.cdiv(V, tile.columns)
    count = programs(tiles, x_CE.device, tile.resident)
    exponential_kernel[(count,)](
        *_operands(x_CE, weight_VE, p_CV, tile),
        label_C,
        shift_C,
        partial_CG,
        C,
        V,
        E,
        softcap or 1.0,
        BLOCK_R=tile.rows,
        BLOCK_V=tile.columns,
        BLOCK_E=tile.reduction,
        SPLIT=tile.split,
        SOFTCAP=softcap is not None,
        STORE=p_CV is not None,
        PROGRAMS=count,
        FLATTEN=tile.resident > 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def correct(
    x_CE: Float[Tensor, "C E"],
    weight_VE: Float[Tensor, "V E"],
    p_CV: Float[Tensor, "C Vp"] | None,
    label_C: Int32[Tensor, " C"],
    shift_C: Float[Tensor, " C"],
    partial_CG: Float[Tensor, "C G"],
    redo_Q: Int32[Tensor, " Q"],
    *,
    softcap: float | None,
    tile: LogitsTile,
    maximum: bool,
) -> None:
    """Repeat `exponentials` (or take row maxima) for row tiles flagged in ``redo_Q``, no other."""
    (C, E), V = x_CE.shape, weight_VE.shape[0]
    # Sixteen programs a row tile: enough for one flagged tile, and soon over for none.
    correct_kernel[(triton.cdiv(C, tile.rows), min(16, triton.cdiv(V, tile.columns)))](
        *_operands(x_CE, weight_VE, p_CV, tile),
        label_C,
        shift_C,
        partial_CG,
        redo_Q,
        C,
        V,
        E,
        softcap or 1.0,
        BLOCK_R=tile.rows,
        BLOCK_V=tile.columns,
        BLOCK_E=tile.reduction,
        SPLIT=tile.split,
        SOFTCAP=softcap is not None,
        STORE=p_CV is not None,
        MAXIMUM=maximum,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
