"""P, dP and dS of tile pairs: what the three gradient products start from."""

from dataclasses import dataclass

import torch

from titan_lowprec.ops.attention.common import Saved
from titan_lowprec.ops.attention.reference.casts import round_nvfp4
from titan_lowprec.ops.attention.reference.operands import (
    Operand,
    gradient_operand,
    plain_operand,
    product_operands,
    score_operands,
)
from titan_lowprec.ops.attention.reference.scores import ScoreTiles, score_tiles, tile_scores
from titan_lowprec.ops.attention.reference.tiles import PairStep, TilePlan, gather_tiles
from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.shapes import Bool, Float, Float32, Int32, Tensor


@dataclass(frozen=True, slots=True)
class PairInputs:
    """Everything from which the terms of any tile pair are computed."""

    q: Operand
    """As the products over tokens use it; so k and v."""
    k: Operand
    v: Operand
    g: Operand
    """The incoming gradient in the representation of dP, and of D unless ``delta_gradient`` is
    the fault."""
    scores: ScoreTiles
    g_QJRTD: Float32[Tensor, "Q J R T D"]
    g_factor_QJRT: Float32[Tensor, "Q J R T"]
    v_KJSD: Float32[Tensor, "K J S D"]
    v_factor_KJS: Float32[Tensor, "K J S"]
    lse2_QJRT: Float32[Tensor, "Q J R T"]
    centre_QJRT: Float32[Tensor, "Q J R T"]
    """D of the softmax gradient."""


@dataclass(frozen=True, slots=True)
class PairTerms:
    """Terms of tile pairs; 0 where masked."""

    P: Float32[Tensor, "P J R T S"]
    E: Float32[Tensor, "P J R T S"]
    """dP, the gradient of P; not masked."""
    U: Float32[Tensor, "P J R T S"]
    """dS, the gradient of the scores, before its cast."""
    visible: Bool[Tensor, "P 1 1 T S"]


def pair_inputs(
    grad_out_NHD: Float[Tensor, "N H D"],
    saved: Saved,
    cu_seqlens_RM: Int32[Tensor, "R M1"],
    plan: TilePlan,
    spec: AttentionSpec,
) -> PairInputs:
    """Gather the backward's operands into tiles and compute D."""
    g = gradient_operand(grad_out_NHD, cu_seqlens_RM, spec)
    q, k, v = product_operands(saved, spec)
    v_of_dp = plain_operand(round_nvfp4(v.values_NHD)) if spec.recipe == "nvfp4_full" else v
    scores = score_tiles(*score_operands(saved, q, k, spec), plan)
    rows = scores.q_QJRTD.shape[:-1]
    g_tiles = gather_tiles(g.values_NHD, plan.q_token_QT, padding=0.0)
    fault = spec.delta_gradient == "unquantised_fault"
    g_of_centre = plain_operand(grad_out_NHD) if fault else g
    centre_QHT = gather_tiles(_output_centre(g_of_centre, saved), plan.q_token_QT, padding=0.0)
    inputs = PairInputs(
        q=q,
        k=k,
        v=v,
        g=g,
        scores=scores,
        g_QJRTD=g_tiles.reshape(scores.q_QJRTD.shape),
        g_factor_QJRT=gather_tiles(g.factor_NH, plan.q_token_QT, padding=1.0).reshape(rows),
        v_KJSD=gather_tiles(v_of_dp.values_NHD, plan.k_token_KS, padding=0.0),
        v_factor_KJS=gather_tiles(v_of_dp.factor_NH, plan.k_token_KS, padding=1.0),
        lse2_QJRT=gather_tiles(saved.lse2_NH, plan.q_token_QT, padding=torch.inf).reshape(rows),
        centre_QJRT=centre_QHT.reshape(rows),
    )
    if spec.centring:
        inputs.centre_QJRT.copy_(_backward_centre(inputs, plan, spec))
    return inputs


def _output_centre(g: Operand, saved: Saved) -> Float32[Tensor, "N H"]:
    """D from the output and the gradient in one representation."""
    out_NHD = saved.out_NHD.to(torch.float32)
    if saved.out_low.numel() > 0:
        out_NHD = out_NHD + saved.out_low.to(torch.float32)
    return (g.values_NHD * out_NHD).sum(-1) * g.factor_NH


def _backward_centre(
    inputs: PairInputs, plan: TilePlan, spec: AttentionSpec
) -> Float32[Tensor, "Q J R T"]:
    """D as the mean of dP under the rebuilt weights: the rows of dS then sum to zero."""
    weighted, total = torch.zeros_like(inputs.lse2_QJRT), torch.zeros_like(inputs.lse2_QJRT)
    for step in plan.diagonal_steps:
        P, E, visible = _weights_and_gradients(inputs, plan, step, spec)
        weighted[step.q_tile_P] += torch.where(visible, P * E, 0.0).sum(-1)
        total[step.q_tile_P] += P.sum(-1)
    return torch.where(total == 0, 0.0, weighted / total)


def _weights_and_gradients(
    inputs: PairInputs, plan: TilePlan, step: PairStep, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """P, dP and the mask."""
    t, visible = tile_scores(inputs.scores, plan, step, spec)
    P = torch.where(visible, torch.exp2(t - inputs.lse2_QJRT[step.q_tile_P][..., None]), 0.0)
    g = inputs.g_QJRTD[step.q_tile_P]
    v = inputs.v_KJSD[step.k_tile_P]
    pairs, J, R, T, D = g.shape
    product = torch.matmul(g.reshape(pairs, J, R * T, D), v.transpose(-1, -2)).reshape(t.shape)
    # Row factor, then column factor, as for the scores.
    by_row = product * inputs.g_factor_QJRT[step.q_tile_P][..., None]
    E = by_row * inputs.v_factor_KJS[step.k_tile_P][:, :, None, None, :]
    return P, E, visible


def pair_terms(
    inputs: PairInputs, plan: TilePlan, step: PairStep, spec: AttentionSpec
) -> PairTerms:
    """Rebuild P from the scores and the LSE, and form dP and dS, for the pairs of a step."""
    P, E, visible = _weights_and_gradients(inputs, plan, step, spec)
    U = P * (E - inputs.centre_QJRT[step.q_tile_P][..., None])
    return PairTerms(P=P, E=E, U=torch.where(visible, U, 0.0), visible=visible)
