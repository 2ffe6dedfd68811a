"""Forward of the reference: online softmax over key tiles, all documents and heads at once."""

from dataclasses import dataclass, replace

import torch

from titan_lowprec.ops.attention.common import Saved, empty_slot
from titan_lowprec.ops.attention.reference.casts import round_e4m3fn, round_nvfp4, round_plain
from titan_lowprec.ops.attention.reference.operands import (
    encode_operands,
    product_operands,
    score_operands,
)
from titan_lowprec.ops.attention.reference.scores import ScoreTiles, score_tiles, tile_scores
from titan_lowprec.ops.attention.reference.tiles import (
    PairStep,
    TilePlan,
    plan_tiles,
    scatter_tiles,
)
from titan_lowprec.ops.attention.reference.token_operands import TokenTiles, token_tiles
from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.shapes import Float, Float32, Int32, Tensor


@dataclass(frozen=True, slots=True)
class SoftmaxRows:
    """What the online softmax carries for each query row of each tile."""

    reference: Float32[Tensor, "Q J R T"]
    """Exponent to which the weights of the accumulator are relative."""
    top: Float32[Tensor, "Q J R T"]
    """Exact running maximum of the scores."""
    total: Float32[Tensor, "Q J R T"]
    """Sum of ``2**(t - top)``."""
    rounded: Float32[Tensor, "Q J R T"]
    """Sum of the weights after their cast, in the accumulator's unit."""
    accumulator: Float32[Tensor, "Q J R T D"]

    def take(self, index: Tensor) -> "SoftmaxRows":
        """Rows of some query tiles."""
        return SoftmaxRows(*(getattr(self, name)[index] for name in self.__dataclass_fields__))

    def put(self, index: Tensor, rows: "SoftmaxRows") -> None:
        """Write rows of some query tiles back."""
        for name in self.__dataclass_fields__:
            getattr(self, name)[index] = getattr(rows, name)


def forward_reference(
    q_NHD: Float[Tensor, "N H D"],
    k_NJD: Float[Tensor, "N J D"],
    v_NJD: Float[Tensor, "N J D"],
    cu_seqlens_RM: Int32[Tensor, "R M1"],
    spec: AttentionSpec,
) -> Saved:
    """Compute attention inside each document and everything that the backward needs.

    Args:
        q_NHD: Queries of packed rows, bf16 or fp32.
        k_NJD: Keys; ``H`` is a multiple of ``J``.
        v_NJD: Values.
        cu_seqlens_RM: Document offsets of each row of ``N / R`` tokens, relative to the row.
        spec: What to compute.

    Numerics:
        ``ops/attention/README.md``, "Formulas, forward". Operands of every product have at most 8
        significant bits, so products are exact in fp32 (and in TF32); sums are fp32. Every
        product has the shape of a whole tile: on a CPU a document's bits do not depend on what
        else is in the batch. Memory is proportional to tokens times tile.

    Source:
        arXiv:2611.03344, sections 3.1-3.4; arXiv:2205.14135 for the online softmax.
    """
    slots = encode_operands(q_NHD, k_NJD, v_NJD, cu_seqlens_RM, spec)
    saved = Saved(
        out_NHD=torch.zeros_like(q_NHD, memory_format=torch.contiguous_format),
        lse2_NH=torch.full_like(q_NHD[..., 0], torch.inf, dtype=torch.float32),
        out_low=empty_slot(torch.bfloat16, q_NHD.device),
        **slots,
    )
    N = q_NHD.shape[0]
    plan = plan_tiles(cu_seqlens_RM, total_tokens=N, spec=spec)
    rows = _softmax_rows(saved, plan, spec)
    if rows is not None:
        out_tiles, lse2_tiles = _normalise(rows, spec)
        out = scatter_tiles(out_tiles, plan.q_token_QT, total_tokens=N, fill=0.0)
        lse2 = scatter_tiles(lse2_tiles, plan.q_token_QT, total_tokens=N, fill=torch.inf)
        saved = replace(saved, out_NHD=out.to(q_NHD.dtype), lse2_NH=lse2)
    else:
        out = saved.out_NHD.to(torch.float32)
    if spec.output_residual and q_NHD.dtype == torch.bfloat16:
        low = out - saved.out_NHD.to(torch.float32)
        saved = replace(saved, out_low=low.to(torch.bfloat16))
    return saved


def _softmax_rows(saved: Saved, plan: TilePlan, spec: AttentionSpec) -> SoftmaxRows | None:
    """Run the online softmax; None without a document."""
    if not plan.documents:
        return None
    q, k, v = product_operands(saved, spec)
    scores = score_tiles(*score_operands(saved, q, k, spec), plan)
    values = token_tiles(v, plan.k_token_KS, spec, causal_groups=True)
    Q, J, R, T, D = scores.q_QJRTD.shape
    zeros = torch.zeros((Q, J, R, T), device=v.values_NHD.device)
    rows = SoftmaxRows(
        reference=torch.full_like(zeros, -torch.inf),
        top=torch.full_like(zeros, -torch.inf),
        total=zeros,
        rounded=zeros.clone(),
        accumulator=zeros[..., None].expand(Q, J, R, T, D).clone(),
    )
    for step in plan.key_steps:
        updated = _update(rows.take(step.q_tile_P), scores, values, plan, step, spec)
        rows.put(step.q_tile_P, updated)
    return rows


def _update(
    rows: SoftmaxRows,
    scores: ScoreTiles,
    values: TokenTiles,
    plan: TilePlan,
    step: PairStep,
    spec: AttentionSpec,
) -> SoftmaxRows:
    """Add one key tile to each query tile of a step."""
    t, visible = tile_scores(scores, plan, step, spec)
    t = torch.where(visible, t, -torch.inf)
    top = torch.maximum(rows.top, t.amax(-1))
    weight = torch.exp2(t - top[..., None])
    total = rows.total * torch.exp2(rows.top - top) + weight.sum(-1)

    v = values.right_operand(plan, step)
    if v.exponent_PJS is None and spec.max_lag == 0:
        reference = top
    else:
        u = t
        if v.exponent_PJS is not None:
            u = torch.where(visible, t + v.exponent_PJS[:, :, None, None, :], -torch.inf)
        tile_top = u.amax(-1)
        moves = tile_top > rows.reference + spec.max_lag
        reference = torch.where(moves, tile_top, rows.reference)
        weight = torch.exp2(u - reference[..., None])
    correction = torch.exp2(rows.reference - reference)
    cast = _cast_weight(weight, spec)
    P, J, R, T, S = cast.shape
    product = torch.matmul(cast.reshape(P, J, R * T, S), v.values_PJSD).reshape(P, J, R, T, -1)
    return SoftmaxRows(
        reference=reference,
        top=top,
        total=total,
        rounded=rows.rounded * correction + cast.sum(-1),
        accumulator=rows.accumulator * correction[..., None] + product,
    )


def _cast_weight(weight: Float32[Tensor, "*B S"], spec: AttentionSpec) -> Float32[Tensor, "*B S"]:
    """Cast softmax weights for the product with V, times ``2**c``."""
    if not spec.quantised:
        return round_plain(weight, spec)
    scaled = weight * 2.0**spec.weight_exponent
    return round_nvfp4(scaled) if spec.recipe == "nvfp4_full" else round_e4m3fn(scaled)


def _normalise(
    rows: SoftmaxRows, spec: AttentionSpec
) -> tuple[Float32[Tensor, "Q H T D"], Float32[Tensor, "Q H T"]]:
    """Divide by the row sums; give the output and the base-2 LSE with heads in one axis."""
    if spec.row_sum == "rounded":
        out = rows.accumulator / rows.rounded[..., None]
    else:
        unit = torch.exp2(rows.reference - rows.top - spec.weight_exponent)
        out = rows.accumulator * unit[..., None] / rows.total[..., None]
    lse2 = rows.top + torch.log2(rows.total)
    return out.flatten(1, 2), lse2.flatten(1, 2)
