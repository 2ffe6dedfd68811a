"""What low precision does inside an attention backward: lost elements and row sums."""

from dataclasses import dataclass

import torch

from titan_lowprec.ops.attention.reference.backward import cast_key_side, cast_query_side
from titan_lowprec.ops.attention.reference.forward import forward_reference
from titan_lowprec.ops.attention.reference.pairs import pair_inputs, pair_terms
from titan_lowprec.ops.attention.reference.tiles import plan_tiles
from titan_lowprec.ops.attention.reference.token_operands import token_tiles
from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.shapes import Float, Int32, Tensor


@dataclass(frozen=True, slots=True)
class GradientStatistics:
    """Shares are of visible elements that are not zero before their cast."""

    ds_flushed_dq: float
    """Share of dS cast to zero for dQ."""
    ds_flushed_dk: float
    """Share of dS cast to zero for dK."""
    weight_flushed_dv: float
    """Share of P cast to zero for dV."""
    row_sum_residual: float
    """RMS over rows of the sum of dS, over the RMS of the sum of its magnitudes; before the
    cast, so that it shows the centre D and the rebuilt weights alone."""


def gradient_statistics(
    q_NHD: Float[Tensor, "N H D"],
    k_NJD: Float[Tensor, "N J D"],
    v_NJD: Float[Tensor, "N J D"],
    grad_out_NHD: Float[Tensor, "N H D"],
    cu_seqlens_RM: Int32[Tensor, "R M1"],
    *,
    spec: AttentionSpec,
) -> GradientStatistics:
    """Run the reference's backward and count what its casts lose.

    Args:
        q_NHD: Queries.
        k_NJD: Keys.
        v_NJD: Values.
        grad_out_NHD: Gradient of the output.
        cu_seqlens_RM: Document offsets of each row.
        spec: What to compute.

    Raises:
        ValueError: No document has a token.
    """
    saved = forward_reference(q_NHD, k_NJD, v_NJD, cu_seqlens_RM, spec)
    plan = plan_tiles(cu_seqlens_RM, total_tokens=q_NHD.shape[0], spec=spec)
    if not plan.documents:
        raise ValueError("gradient_statistics: a document with a token is required, got none")
    inputs = pair_inputs(grad_out_NHD, saved, cu_seqlens_RM, plan, spec)
    q_tiles = token_tiles(inputs.q, plan.q_token_QT, spec, causal_groups=False)
    k_tiles = token_tiles(inputs.k, plan.k_token_KS, spec, causal_groups=True)
    g_tiles = token_tiles(inputs.g, plan.q_token_QT, spec, causal_groups=False)
    lost, present = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    sums = torch.zeros_like(inputs.lse2_QJRT)
    magnitudes = torch.zeros_like(sums)
    for step in plan.diagonal_steps:
        terms = pair_terms(inputs, plan, step, spec)
        casts = (
            (terms.U, cast_query_side(terms, k_tiles.right_operand(plan, step), spec)),
            (
                terms.U,
                cast_key_side(terms.U, terms, q_tiles.rows(step.q_tile_P), spec, weights=False),
            ),
            (
                terms.P,
                cast_key_side(terms.P, terms, g_tiles.rows(step.q_tile_P), spec, weights=True),
            ),
        )
        for index, (exact, cast) in enumerate(casts):
            lost[index] += ((cast == 0) & (exact != 0)).sum().cpu()
            present[index] += (exact != 0).sum().cpu()
        sums[step.q_tile_P] += terms.U.sum(-1)
        magnitudes[step.q_tile_P] += terms.U.abs().sum(-1)
    shares = (lost.double() / present.clamp(min=1)).tolist()
    residual = sums.double().square().sum().sqrt() / magnitudes.double().square().sum().sqrt()
    return GradientStatistics(*shares, row_sum_residual=float(residual))
