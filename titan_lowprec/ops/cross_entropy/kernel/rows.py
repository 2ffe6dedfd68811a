"""Per-row work between the GEMMs: LSE, loss, the two factors of a row's gradient, dX."""

import triton
import triton.language as tl

from titan_lowprec.ops.cross_entropy.kernel.logits import LOG2E, tanh
from titan_lowprec.shapes import Float, Int32, Tensor

LN2 = tl.constexpr(0.6931471805599453)
# A sum of exponentials in this range has lost nothing to overflow or to flushed small terms.
SMALLEST = tl.constexpr(2.0**-60)
LARGEST = tl.constexpr(2.0**60)


@triton.jit
def _log1p(u):
    """log(1 + u) for u in [0, 1], to fp32 accuracy relative to the result."""
    z = u / (2.0 + u)
    s = z * z
    series = 1.0 / 13.0
    series = series * s + 1.0 / 11.0
    series = series * s + 1.0 / 9.0
    series = series * s + 1.0 / 7.0
    series = series * s + 1.0 / 5.0
    series = series * s + 1.0 / 3.0
    return 2.0 * z * (series * s + 1.0)


@triton.jit
def statistics_kernel(
    partial_ptr,
    x_ptr,
    w_ptr,
    label_ptr,
    scale_ptr,
    shift_ptr,
    redo_ptr,
    lse_ptr,
    loss_ptr,
    ratio_ptr,
    coefficient_ptr,
    scaled_ptr,
    column_tiles,
    E,
    z_loss,
    softcap,
    TILE_ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """One row: sums to LSE, loss and gradient factors; flags its tile if the sum left the range.

    ``ratio`` turns stored exponentials into the row's gradient, ``coefficient`` is the label's
    entry; ``scaled`` is ``bf16(ratio * x)``, an operand of the weight-gradient GEMM.
    """
    row = tl.program_id(0)
    if AGAIN and tl.load(redo_ptr + row // TILE_ROWS) == 0:
        return
    total = 0.0
    for g in range(0, column_tiles, BLOCK_G):
        at = g + tl.arange(0, BLOCK_G)
        part = tl.load(
            partial_ptr + row * column_tiles + at, mask=at < column_tiles, other=0.0
        )  # [BLOCK_G]
        total += tl.sum(part, axis=0)
    if not AGAIN:  # noqa: SIM102 - the outer test is made at compile time
        if not ((total >= SMALLEST) & (total <= LARGEST)):
            tl.store(redo_ptr + row // TILE_ROWS, 1)
    label = tl.load(label_ptr + row).to(tl.int64)
    dot = tl.zeros((BLOCK_E,), dtype=tl.float32)
    for e in range(0, E, BLOCK_E):
        at = e + tl.arange(0, BLOCK_E)
        x = tl.load(x_ptr + row.to(tl.int64) * E + at, mask=at < E, other=0.0)  # [BLOCK_E]
        w = tl.load(w_ptr + label * E + at, mask=at < E, other=0.0)  # [BLOCK_E]
        dot += x.to(tl.float32) * w.to(tl.float32)
    target = tl.sum(dot, axis=0)
    slope = 1.0
    if SOFTCAP:
        t = tanh(target / softcap)
        target = t * softcap
        slope = 1.0 - t * t

    shift = tl.load(shift_ptr + row)
    log_others = (shift + tl.log2(total)) * LN2
    margin = log_others - target
    u = tl.exp(-tl.abs(margin))
    tail = _log1p(u)
    lse = tl.maximum(log_others, target) + tail
    others = tl.where(margin > 0, 1.0, u) / (1.0 + u)
    own = tl.where(margin > 0, u, 1.0) / (1.0 + u)
    pull = 2.0 * z_loss * lse
    scale = tl.load(scale_ptr + row)
    loss = scale * (tl.maximum(margin, 0.0) + tail + z_loss * lse * lse)
    ratio = scale * (1.0 + pull) * tl.exp2(shift - lse * LOG2E)
    coefficient = scale * slope * (pull * own - others)
    tl.store(lse_ptr + row, lse)
    tl.store(loss_ptr + row, tl.where(scale == 0, 0.0, loss))
    tl.store(ratio_ptr + row, tl.where(scale == 0, 0.0, ratio))
    tl.store(coefficient_ptr + row, tl.where(scale == 0, 0.0, coefficient))
    if SCALED:
        for e in range(0, E, BLOCK_E):
            at = e + tl.arange(0, BLOCK_E)
            x = tl.load(x_ptr + row.to(tl.int64) * E + at, mask=at < E, other=0.0)  # [BLOCK_E]
            value = tl.where(scale == 0, 0.0, ratio * x.to(tl.float32))
            tl.store(scaled_ptr + row.to(tl.int64) * E + at, value.to(tl.bfloat16), mask=at < E)


@triton.jit
def shift_kernel(
    partial_ptr, shift_ptr, redo_ptr, column_tiles, TILE_ROWS: tl.constexpr, BLOCK_G: tl.constexpr
):
    """Shift of a flagged tile's row: its largest logit but the label's, times log2(e)."""
    row = tl.program_id(0)
    if tl.load(redo_ptr + row // TILE_ROWS) == 0:
        return
    largest = float("-inf")
    for g in range(0, column_tiles, BLOCK_G):
        at = g + tl.arange(0, BLOCK_G)
        part = tl.load(
            partial_ptr + row * column_tiles + at, mask=at < column_tiles, other=float("-inf")
        )  # [BLOCK_G]
        largest = tl.maximum(largest, tl.max(part, axis=0))
    tl.store(shift_ptr + row, tl.where(largest == float("-inf"), 0.0, largest))


@triton.jit
def hidden_gradient_kernel(
    raw_ptr, w_ptr, label_ptr, ratio_ptr, coefficient_ptr, E, BLOCK_E: tl.constexpr
):
    """In place: ``raw`` (exponentials times the head) becomes the row's fp32 gradient."""
    row = tl.program_id(0)
    label = tl.load(label_ptr + row).to(tl.int64)
    ratio = tl.load(ratio_ptr + row)
    coefficient = tl.load(coefficient_ptr + row)
    for e in range(0, E, BLOCK_E):
        at = e + tl.arange(0, BLOCK_E)
        here = raw_ptr + row.to(tl.int64) * E + at
        raw = tl.load(here, mask=at < E, other=0.0)  # [BLOCK_E]
        w = tl.load(w_ptr + label * E + at, mask=at < E, other=0.0)  # [BLOCK_E]
        value = ratio * raw + coefficient * w.to(tl.float32)
        unused = (ratio == 0) & (coefficient == 0)
        tl.store(here, tl.where(unused, 0.0, value), mask=at < E)


def statistics(
    partial_CG: Float[Tensor, "C G"],
    x_CE: Float[Tensor, "C E"],
    weight_VE: Float[Tensor, "V E"],
    label_C: Int32[Tensor, " C"],
    scale_C: Float[Tensor, " C"],
    shift_C: Float[Tensor, " C"],
    redo_Q: Int32[Tensor, " Q"],
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    *,
    z_loss: float,
    softcap: float | None,
    tile_rows: int,
    again: bool,
) -> None:
    """Fill ``results``: LSE, loss, ratio, coefficient and (if given) the scaled rows."""
    C, E = x_CE.shape
    lse_C, loss_C, ratio_C, coefficient_C, scaled_CE = results
    statistics_kernel[(C,)](
        partial_CG,
        x_CE,
        weight_VE,
        label_C,
        scale_C,
        shift_C,
        redo_Q,
        lse_C,
        loss_C,
        ratio_C,
        coefficient_C,
        scaled_CE if scaled_CE is not None else x_CE,
        partial_CG.shape[1],
        E,
        z_loss,
        softcap or 1.0,
        TILE_ROWS=tile_rows,
        BLOCK_G=1024,
        BLOCK_E=min(2048, triton.next_power_of_2(E)),
        SOFTCAP=softcap is not None,
        SCALED=scaled_CE is not None,
        AGAIN=again,
    )


def correct_shift(
    partial_CG: Float[Tensor, "C G"],
    shift_C: Float[Tensor, " C"],
    redo_Q: Int32[Tensor, " Q"],
    *,
    tile_rows: int,
) -> None:
    """Set the shifts of flagged row tiles from the maxima in ``partial_CG``."""
    C, G = partial_CG.shape
    shift_kernel[(C,)](partial_CG, shift_C, redo_Q, G, TILE_ROWS=tile_rows, BLOCK_G=1024)


def finish_hidden_gradient(
    raw_CE: Float[Tensor, "C E"],
    weight_VE: Float[Tensor, "V E"],
    label_C: Int32[Tensor, " C"],
    ratio_C: Float[Tensor, " C"],
    coefficient_C: Float[Tensor, " C"],
) -> None:
    """``raw = ratio * raw + coefficient * weight[label]``, in place."""
    C, E = raw_CE.shape
    block = min(2048, triton.next_power_of_2(E))
    hidden_gradient_kernel[(C,)](
        raw_CE, weight_VE, label_C, ratio_C, coefficient_C, E, BLOCK_E=block
    )
