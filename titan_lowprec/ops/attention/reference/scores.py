"""Base-2 scores of tile pairs, computed the same way in the forward and in the backward."""

from dataclasses import dataclass

import torch

from titan_lowprec.ops.attention.common import score_factor
from titan_lowprec.ops.attention.reference.operands import Operand
from titan_lowprec.ops.attention.reference.tiles import (
    PairStep,
    TilePlan,
    gather_tiles,
    visible_mask,
)
from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.shapes import Bool, Float32, Tensor


@dataclass(frozen=True, slots=True)
class ScoreTiles:
    """Q and K in tiles, with the exponents' factors outside; heads as (KV head, repeat)."""

    q_QJRTD: Float32[Tensor, "Q J R T D"]
    q_factor_QJRT: Float32[Tensor, "Q J R T"]
    """``d**-0.5 * log2(e)`` times the token's power of two."""
    k_KJSD: Float32[Tensor, "K J S D"]
    k_factor_KJS: Float32[Tensor, "K J S"]


def score_tiles(q: Operand, k: Operand, plan: TilePlan) -> ScoreTiles:
    """Gather the score operands into tiles."""
    q_tiles = gather_tiles(q.values_NHD, plan.q_token_QT, padding=0.0)
    Q, H, T, D = q_tiles.shape
    J = k.values_NHD.shape[1]
    q_factor = gather_tiles(q.factor_NH, plan.q_token_QT, padding=1.0) * score_factor(D)
    return ScoreTiles(
        q_QJRTD=q_tiles.reshape(Q, J, H // J, T, D),
        q_factor_QJRT=q_factor.reshape(Q, J, H // J, T),
        k_KJSD=gather_tiles(k.values_NHD, plan.k_token_KS, padding=0.0),
        k_factor_KJS=gather_tiles(k.factor_NH, plan.k_token_KS, padding=1.0),
    )


def tile_scores(
    tiles: ScoreTiles, plan: TilePlan, step: PairStep, spec: AttentionSpec
) -> tuple[Float32[Tensor, "P J R T S"], Bool[Tensor, "P 1 1 T S"]]:
    """Give the scores of a step's pairs, not masked, and the mask.

    Numerics:
        Row factor, then column factor: their exponents may span 254 together.
    """
    q = tiles.q_QJRTD[step.q_tile_P]
    k = tiles.k_KJSD[step.k_tile_P]
    P, J, R, T, D = q.shape
    product = torch.matmul(q.reshape(P, J, R * T, D), k.transpose(-1, -2))
    t = product.reshape(P, J, R, T, -1)
    t = t * tiles.q_factor_QJRT[step.q_tile_P][..., None]
    t = t * tiles.k_factor_KJS[step.k_tile_P][:, :, None, None, :]
    return t, visible_mask(plan, step, spec)
