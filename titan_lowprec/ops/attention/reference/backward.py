"""Backward of the reference: scores rebuilt from the saved operands, three products over tokens."""

from dataclasses import dataclass

import torch

from titan_lowprec.formats.scales import multiply_exp2
from titan_lowprec.ops.attention.common import Gradients, Saved
from titan_lowprec.ops.attention.reference.boost import boost_exponents
from titan_lowprec.ops.attention.reference.casts import (
    round_e4m3fn,
    round_groups,
    round_nvfp4,
    round_plain,
)
from titan_lowprec.ops.attention.reference.pairs import PairTerms, pair_inputs, pair_terms
from titan_lowprec.ops.attention.reference.tiles import gather_tiles, plan_tiles, scatter_tiles
from titan_lowprec.ops.attention.reference.token_operands import RightOperand, token_tiles
from titan_lowprec.ops.attention.spec import FIXED_DV_EXPONENT, AttentionSpec
from titan_lowprec.ops.hadamard.api import hadamard
from titan_lowprec.shapes import Float, Float32, Int32, Tensor


def backward_reference(
    grad_out_NHD: Float[Tensor, "N H D"],
    saved: Saved,
    cu_seqlens_RM: Int32[Tensor, "R M1"],
    spec: AttentionSpec,
) -> Gradients:
    """Compute the gradients of q, k and v from what a forward saved.

    Args:
        grad_out_NHD: Gradient of the output, bf16 or fp32.
        saved: What the forward of either implementation saved under the same specification.
        cu_seqlens_RM: The forward's document offsets.
        spec: The forward's specification.

    Numerics:
        ``ops/attention/README.md``, "Formulas, backward". Tile pairs are visited by diagonals,
        so that every gradient tile gets its terms one by one in an order of its own document.

    Source:
        arXiv:2611.03344, sections 3.1-3.5.
    """
    N = grad_out_NHD.shape[0]
    plan = plan_tiles(cu_seqlens_RM, total_tokens=N, spec=spec)
    if not plan.documents:
        dq = torch.zeros_like(saved.out_NHD)
        return Gradients(dq, dq.new_zeros(saved.k_codes.shape), dq.new_zeros(saved.k_codes.shape))
    inputs = pair_inputs(grad_out_NHD, saved, cu_seqlens_RM, plan, spec)
    q_tiles = token_tiles(inputs.q, plan.q_token_QT, spec, causal_groups=False)
    k_tiles = token_tiles(inputs.k, plan.k_token_KS, spec, causal_groups=True)
    g_tiles = token_tiles(inputs.g, plan.q_token_QT, spec, causal_groups=False)
    dq = _QueryGradient.start(inputs.scores.q_QJRTD, spec)
    if spec.dq_accum == "fp16_boost":
        boost_NH = boost_exponents(inputs.g, inputs.v, inputs.k, plan.documents, spec)
        dq = _QueryGradient.boosted(dq, gather_tiles(boost_NH, plan.q_token_QT, padding=0.0))
    dk = torch.zeros_like(inputs.scores.k_KJSD)
    dv = torch.zeros_like(dk)
    for step in plan.diagonal_steps:
        terms = pair_terms(inputs, plan, step, spec)
        g, q = g_tiles.rows(step.q_tile_P), q_tiles.rows(step.q_tile_P)
        k = k_tiles.right_operand(plan, step)
        weights = cast_key_side(terms.P, terms, g, spec, weights=True)
        dv[step.k_tile_P] += _over_queries(weights, g)
        dk[step.k_tile_P] += _over_queries(cast_key_side(terms.U, terms, q, spec, weights=False), q)
        dq.add(step.q_tile_P, _over_keys(cast_query_side(terms, k, spec), k))
    alpha = inputs.q.values_NHD.shape[-1] ** -0.5
    dq_NHD = scatter_tiles(dq.total().flatten(1, 2), plan.q_token_QT, total_tokens=N, fill=0.0)
    dk_NJD, dv_NJD = (scatter_tiles(x, plan.k_token_KS, total_tokens=N, fill=0.0) for x in (dk, dv))
    dq_NHD, dk_NJD = dq_NHD * alpha, dk_NJD * alpha
    if spec.rotate:
        dq_NHD, dk_NJD = hadamard(dq_NHD), hadamard(dk_NJD)
    dtype = saved.out_NHD.dtype
    return Gradients(dq_NHD.to(dtype), dk_NJD.to(dtype), dv_NJD.to(dtype))


@dataclass(frozen=True, slots=True)
class _QueryGradient:
    """The running sum of dQ, in fp32 or, times a power of two a row, in fp16."""

    sum_QJRTD: Float[Tensor, "Q J R T D"]
    boost_QJRT: Int32[Tensor, "Q J R T"] | None

    @classmethod
    def start(cls, like: Tensor, spec: AttentionSpec) -> "_QueryGradient":
        dtype = torch.float16 if spec.dq_accum == "fp16_boost" else torch.float32
        return cls(torch.zeros_like(like, dtype=dtype), None)

    @classmethod
    def boosted(cls, start: "_QueryGradient", boost_QHT: Tensor) -> "_QueryGradient":
        return cls(start.sum_QJRTD, boost_QHT.reshape(start.sum_QJRTD.shape[:-1]))

    def add(self, index: Tensor, part: Float32[Tensor, "P J R T D"]) -> None:
        if self.boost_QJRT is not None:
            part = multiply_exp2(part, self.boost_QJRT[index][..., None]).to(torch.float16)
        self.sum_QJRTD[index] += part

    def total(self) -> Float32[Tensor, "Q J R T D"]:
        total = self.sum_QJRTD.to(torch.float32)
        if self.boost_QJRT is not None:
            total = multiply_exp2(total, -self.boost_QJRT[..., None])
        return total


def cast_key_side(
    x: Float32[Tensor, "P J R T S"],
    terms: PairTerms,
    right: RightOperand,
    spec: AttentionSpec,
    *,
    weights: bool,
) -> Float32[Tensor, "P J R T S"]:
    """Cast P (``weights``) or U for a product that sums over queries."""
    if not spec.quantised:
        return round_plain(x, spec)
    if right.factor_PJS is not None:
        factor = right.factor_PJS.reshape(x.shape[:-1])[..., None]
        x = torch.where(terms.visible, x * factor, 0.0)
    if spec.recipe == "nvfp4_full":
        return round_nvfp4(x.transpose(-1, -2).contiguous()).transpose(-1, -2)
    if weights and spec.dv_exponent == "fixed":
        return round_e4m3fn(x * 2.0**FIXED_DV_EXPONENT) * 2.0**-FIXED_DV_EXPONENT
    if spec.gradient_groups == "line":
        return round_groups(x, rows=spec.tile_q, columns=1)
    return round_groups(x, rows=32, columns=32)


def cast_query_side(
    terms: PairTerms, right: RightOperand, spec: AttentionSpec
) -> Float32[Tensor, "P J R T S"]:
    """Cast U for the product that sums over keys."""
    x = terms.U
    if not spec.quantised:
        return round_plain(x, spec)
    if right.factor_PJS is not None:
        x = torch.where(terms.visible, x * right.factor_PJS[:, :, None, None, :], 0.0)
    if spec.recipe == "nvfp4_full":
        return round_nvfp4(x)
    columns = spec.tile_k if spec.gradient_groups == "line" else 32
    return round_groups(x, rows=spec.query_group, columns=columns)


def _over_queries(
    left: Float32[Tensor, "P J R T S"], right: RightOperand
) -> Float32[Tensor, "P J S D"]:
    """Sum over the queries of a tile and over the query heads of a KV head."""
    P, J, R, T, S = left.shape
    values = right.values_PJSD.reshape(P, J, R * T, -1)
    return torch.matmul(left.reshape(P, J, R * T, S).transpose(-1, -2), values)


def _over_keys(
    left: Float32[Tensor, "P J R T S"], right: RightOperand
) -> Float32[Tensor, "P J R T D"]:
    """Sum over the keys of a tile."""
    P, J, R, T, S = left.shape
    product = torch.matmul(left.reshape(P, J, R * T, S), right.values_PJSD)
    return product.reshape(P, J, R, T, -1)
