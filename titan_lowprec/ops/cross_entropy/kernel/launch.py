"""Order of the kernels: chunks of rows through three GEMMs, then the label terms."""

import torch
import triton

from titan_lowprec.ops.cross_entropy.common import Formed, HeadSpec, row_scale, usable_rows
from titan_lowprec.ops.cross_entropy.kernel.logits import correct, exponentials
from titan_lowprec.ops.cross_entropy.kernel.rows import (
    correct_shift,
    finish_hidden_gradient,
    statistics,
)
from titan_lowprec.ops.cross_entropy.kernel.shard_rows import flag_tiles, shard_statistics
from titan_lowprec.ops.cross_entropy.kernel.tiles import LOGITS, WEIGHT, LogitsTile
from titan_lowprec.ops.cross_entropy.kernel.weight_gradient import (
    add_label_gradient,
    add_weight_gradient,
)
from titan_lowprec.ops.cross_entropy.shards import VocabularyShard, sum_over_ranks
from titan_lowprec.shapes import Float, Int64, Tensor


def form_triton(
    hidden_NE: Float[Tensor, "N E"],
    weight_VE: Float[Tensor, "V E"],
    labels_N: Int64[Tensor, " N"],
    token_weight_N: Float[Tensor, " N"] | None,
    *,
    spec: HeadSpec,
    shard: VocabularyShard | None,
    need_hidden: bool,
    need_weight: bool,
) -> Formed:
    """Losses and unrounded gradients, as `form_reference`; bf16 on a Hopper GPU.

    Numerics:
        Logits stay in fp32 accumulators; sums, LSE, loss and the label's column are fp32. The
        other columns' probabilities reach the gradient GEMMs as ``bf16(exp(logit - shift))``
        times a row factor: exact fp32 for dX, inside ``bf16(factor * x)`` for dW. dW of all
        chunks is one fp32 sum.
    """
    _check(hidden_NE, weight_VE)
    (N, E), V = hidden_NE.shape, weight_VE.shape[0]
    all_V = V if shard is None else shard.vocabulary
    scale_N = row_scale(labels_N, token_weight_N, vocabulary=all_V, ignore_index=spec.ignore_index)
    label_N, row_N = _labels_here(labels_N, shard, rows=V, vocabulary=all_V)
    store = need_hidden or need_weight
    lse_N, loss_N, ratio_N, coefficient_N = (torch.empty_like(scale_N) for _ in range(4))
    grad_hidden_NE = hidden_NE.new_empty((N if need_hidden else 0, E), dtype=torch.float32)
    high_VE = hidden_NE.new_empty((V if need_weight else 0, E), dtype=torch.int16)
    low_VE = torch.empty_like(high_VE)
    if N == 0:
        high_VE.zero_()
        low_VE.zero_()
        return Formed(loss_N.sum(), loss_N, lse_N, grad_hidden_NE, high_VE, low_VE)

    # Without gradients there is nothing to store, so all rows are one chunk.
    rows = min(spec.chunk_rows, N) if store else N
    padded = triton.cdiv(V, 64) * 64
    p_CV = hidden_NE.new_empty((rows, padded)) if store else None
    scaled_CE = hidden_NE.new_empty((rows, E)) if need_weight else None
    for start in range(0, N, rows):
        at = slice(start, min(start + rows, N))
        C = at.stop - at.start
        p = None if p_CV is None else p_CV[:C]
        scaled = None if scaled_CE is None else scaled_CE[:C]
        results = (lse_N[at], loss_N[at], ratio_N[at], coefficient_N[at], scaled)
        x_CE = usable_rows(hidden_NE[at], scale_N[at]).contiguous()
        _softmax_chunk(x_CE, weight_VE, label_N[at], scale_N[at], p, results, spec, shard, LOGITS)
        if need_hidden:
            assert p is not None
            _multiply_fp32(p[:, :V], weight_VE, out=grad_hidden_NE[at])
            finish_hidden_gradient(
                grad_hidden_NE[at],
                weight_VE,
                row_N[at],
                ratio_N[at],
                coefficient_N[at],
            )
        if need_weight:
            assert p is not None and scaled is not None
            add_weight_gradient(p, scaled, high_VE, low_VE, accumulate=start > 0, tile=WEIGHT)
    sum_over_ranks(grad_hidden_NE, shard)
    if need_weight:
        key_N = torch.where((scale_N == 0) | (label_N < 0), V, label_N)
        sorted_N, order_N = torch.sort(key_N, stable=True)
        x_NE = hidden_NE.contiguous()
        add_label_gradient(high_VE, low_VE, x_NE, coefficient_N, order_N, sorted_N)
    return Formed(loss_N.sum(), loss_N, lse_N, grad_hidden_NE, high_VE, low_VE)


def _labels_here(
    labels_N: Tensor, shard: VocabularyShard | None, *, rows: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """The labels' rows in this process's part of the head: -1 if elsewhere, and 0 if elsewhere."""
    label_N = labels_N.clamp(0, vocabulary - 1).to(torch.int32)
    if shard is None:
        return label_N, label_N
    label_N -= shard.first
    elsewhere_N = (label_N < 0) | (label_N >= rows)
    return label_N.masked_fill(elsewhere_N, -1), label_N.masked_fill(elsewhere_N, 0)


def _check(hidden_NE: Tensor, weight_VE: Tensor) -> None:
    who = "linear_cross_entropy: impl='triton'"
    if hidden_NE.dtype != torch.bfloat16:
        raise ValueError(f"{who} requires bf16, got {hidden_NE.dtype}; cast or use 'reference'")
    if hidden_NE.shape[1] % 8 != 0 or not weight_VE.is_contiguous():
        raise ValueError(
            f"{who} requires a contiguous head with E a multiple of 8, got E={weight_VE.shape[1]} "
            f"and strides {weight_VE.stride()}; pad E or use 'reference'"
        )
    if hidden_NE.device.type == "cuda":
        capability = torch.cuda.get_device_capability(hidden_NE.device)
        if capability[0] != 9:
            raise ValueError(
                f"{who} requires a Hopper GPU, got capability {capability}; use 'reference'"
            )


def _softmax_chunk(
    x_CE: Tensor,
    weight_VE: Tensor,
    label_C: Tensor,
    scale_C: Tensor,
    p_CV: Tensor | None,
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    spec: HeadSpec,
    shard: VocabularyShard | None,
    tile: LogitsTile,
) -> None:
    """Exponentials and row statistics of a chunk, repeated where the shift 0 did not do.

    The decision is taken on the device, per tile of rows: no synchronisation, and a CUDA graph
    holds both ways. A pass without a flagged tile ends at once. Shards decide each for themselves,
    and exchange sums once, at the end.
    """
    C, V = x_CE.shape[0], weight_VE.shape[0]
    shift_C = torch.zeros(C, dtype=torch.float32, device=x_CE.device)
    partial_CG = shift_C.new_empty((C, triton.cdiv(V, tile.columns)))
    redo_Q = torch.zeros(triton.cdiv(C, tile.rows), dtype=torch.int32, device=x_CE.device)
    chunk = (x_CE, weight_VE, p_CV, label_C, shift_C, partial_CG)
    row_inputs = (partial_CG, x_CE, weight_VE, label_C, scale_C, shift_C, redo_Q, results)

    def finish(*, again: bool) -> None:
        statistics(
            *row_inputs,
            z_loss=spec.z_loss,
            softcap=spec.softcap,
            tile_rows=tile.rows,
            again=again,
        )

    exponentials(*chunk, softcap=spec.softcap, tile=tile)
    if shard is None:
        finish(again=False)
    else:
        flag_tiles(partial_CG, redo_Q, tile_rows=tile.rows)
    correct(*chunk, redo_Q, softcap=spec.softcap, tile=tile, maximum=True)
    correct_shift(partial_CG, shift_C, redo_Q, tile_rows=tile.rows)
    correct(*chunk, redo_Q, softcap=spec.softcap, tile=tile, maximum=False)
    if shard is None:
        finish(again=True)
    else:
        shard_statistics(
            partial_CG,
            x_CE,
            weight_VE,
            label_C,
            scale_C,
            shift_C,
            results,
            spec=spec,
            shard=shard,
        )


def _multiply_fp32(p_CV: Tensor, weight_VE: Tensor, *, out: Tensor) -> None:
    """``out = p @ weight`` with an fp32 result of bf16 operands."""
    if p_CV.device.type == "cpu":  # the interpreter, under test
        torch.mm(p_CV.float(), weight_VE.float(), out=out)
    else:
        torch.mm(p_CV, weight_VE, out_dtype=torch.float32, out=out)
